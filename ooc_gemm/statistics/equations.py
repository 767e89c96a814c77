"""The normal equations of a linear model, xᵀx·w = xᵀy, from one pass over x, here or by processes
elsewhere.

Where that pass shows that squares of a column are too large or too small for float64, it is made again with
the column multiplied by a power of two.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..devices.cpu.blas import one_blas_thread
from ..devices.cpu.device import WORKER_BYTES
from ..planning.stream_plan import Cut
from ..run.pool import RANGES, Here, InOrder, Pool, parts_of
from ..run.stream import Array, Needs, Panels, Pieces, Range
from ..storage.read.source import Opened
from ..support.errors import Refusals
from ..support.intervals import ceil_div, round_up
from ..support.memory import peak_resident_bytes
from .subspace_cpu import centred_columns

Floats = npt.NDArray[np.float64]

PANEL_ROWS = 1024
"""Rows of a panel, at least: each panel's products are added to a matrix of n×n."""
SOLVED, ADDED = 7, 3
"""Matrices of n×n that are held where equations are solved: xᵀx, a correction of it, and what the
eigendecomposition takes, which is a copy, vectors, and twice as much; and where they are only added up."""


SHIFT = 720
"""Powers of two that columns are multiplied by are 2**SHIFT, 1 and 2**-SHIFT. Squares of any column of which
they do not suit float64 are in its middle then."""
FEWEST = 2.0**-900
"""Where the mean square of a column is less, squares of elements that count in it may have lost digits."""
NEAR = 2.0**-400
"""Where the mean of a column is larger, such deviations from it are rounding."""


@dataclass(frozen=True)
class Powers:
    """Exponents of the powers of two by which the columns of x and y are multiplied."""

    columns: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]

    def __bool__(self) -> bool:
        """Whether any column is multiplied by another number than 1."""
        return bool(self.columns.any() or self.targets.any())


@dataclass
class Equations:
    """Sums over some rows of x and y, centred by the means of these rows where that is asked for."""

    gram: Floats
    """xᵀx."""
    product: Floats
    """xᵀy."""
    mean: Floats
    """Mean of each column of x; 0 where nothing is centred."""
    target_mean: Floats
    """The same of y."""
    target_squares: Floats
    """Sum of the squares of each column of y."""
    small: npt.NDArray[np.bool_]
    """Whether a column of x, or of y, has small elements that are not zero."""
    rows: int = 0

    @classmethod
    def none(cls, columns: int, targets: int) -> "Equations":
        """Those of no rows."""
        sums = np.zeros((columns, columns)), np.zeros((columns, targets))
        small = np.zeros(columns + targets, bool)
        return cls(*sums, np.zeros(columns), np.zeros(targets), np.zeros(targets), small)

    @classmethod
    def of(cls, panel: Array, y: Array, centred: bool) -> "Equations":
        """Those of some rows, which are centred in place."""
        means = np.zeros(panel.shape[1]), np.zeros(y.shape[1])
        if centred:
            means = centred_columns(panel), centred_columns(y)
        gram, squares = panel.T @ panel, np.square(y).sum(axis=0)
        small = _small(panel, gram.diagonal(), means[0]), _small(y, squares, means[1])
        return cls(gram, panel.T @ y, *means, squares, np.concatenate(small), len(panel))

    def include(self, other: "Equations", centred: bool) -> None:
        """Add those of further rows, by Chan's formula where rows are centred."""
        self.gram += other.gram
        self.product += other.product
        self.target_squares += other.target_squares
        self.small |= other.small
        total = self.rows + other.rows
        if centred:
            apart, target_apart = other.mean - self.mean, other.target_mean - self.target_mean
            share = other.rows / total
            self.gram += np.outer(apart * (self.rows * share), apart)
            self.product += np.outer(apart * (self.rows * share), target_apart)
            self.target_squares += np.square(target_apart) * (self.rows * share)
            self.mean += apart * share
            self.target_mean += target_apart * share
        self.rows = total

    def powers(self) -> Powers:
        """By what columns have to be multiplied, as these sums of columns as they are show it."""
        squares = np.concatenate([self.gram.diagonal(), self.target_squares])
        near = np.abs(np.concatenate([self.mean, self.target_mean])) >= NEAR
        low = (squares < FEWEST * self.rows) & self.small & ~near
        found = np.where(low, SHIFT, np.where(np.isfinite(squares), 0, -SHIFT)).astype(np.int32)
        return Powers(*np.split(found, [len(self.mean)]))


def _small(panel: Array, squares: Floats, mean: Floats) -> npt.NDArray[np.bool_]:
    """Whether columns of a panel, of which the squares sum up to so much, have small elements that are not
    zero."""
    found = squares < FEWEST * len(panel)
    if found.any():
        found[found] = panel[:, found].any(axis=0) | (mean[found] != 0)
    return found


@dataclass(frozen=True)
class Room:
    """The memory and the cores that a process has. Sizes in bytes."""

    limit: int
    extra: int
    """What the result takes where it is written, and other memory that counts in the limit."""
    copies: int = SOLVED
    """Matrices of n×n that are held."""
    threads: int = 0
    """As of `Needs`."""


class OnePass:
    """One pass over x, after one over y, in this process."""

    device = "cpu"

    def __init__(self, left: Opened, right: Opened, centred: bool, room: Room, first: int = 0):
        """left, right: x and y. first: the row of y that belongs to the first row of x. Raises
        BudgetError."""
        n, (m, t) = left.shape[1], right.shape
        self._centred, self._first, size = centred, first, n * n * 8
        held = m * t * right.dtype.itemsize
        fixed = room.copies * size + 8 * n * t * 8 + held + room.extra
        work = size + 4 * n * t * 8 + WORKER_BYTES
        needs = Needs(fixed, work, ceil_div(2 * t * 8, max(1, n)), room.threads)
        purpose, refusals = "fit a model to", Refusals()
        with refusals.noted():
            self._panels = Panels(left, np.float64, room.limit, purpose, needs, rows=PANEL_ROWS)
        with refusals.noted():
            self._pieces = Pieces(right, room.limit, "hold", Needs(held, threads=room.threads))
        refusals.end()
        self._targets: Array = np.empty((m, t), right.dtype)
        self._held = False

    @property
    def peak_host_bytes(self) -> int:
        """The largest resident set that this process has had."""
        return peak_resident_bytes()

    @property
    def opened(self) -> Opened:
        """x."""
        return self._panels.opened

    @property
    def cut(self) -> Cut:
        """How the pass cuts x, and what it takes."""
        return self._panels.cut

    @property
    def bytes_read(self) -> int:
        """Of both arrays."""
        return self._pieces.bytes_read + self._panels.bytes_read

    def equations(self, progress: Callable[[float], None] | None, powers: Powers | None = None) -> Equations:
        """Make the sums. powers: what columns are multiplied by; None: nothing. Raises StoreError."""
        self._hold()
        sums = Equations.none(self.opened.shape[1], self._targets.shape[1])

        def work(panel: Array, rows: Range) -> Equations:
            y = self._targets[self._first + rows[0] : self._first + rows[1]].astype(np.float64)
            if powers is not None:
                panel *= np.ldexp(1.0, powers.columns)
                y *= np.ldexp(1.0, powers.targets)
            return Equations.of(panel, y, self._centred)

        with one_blas_thread:
            self._panels.each(work, lambda found: sums.include(found, self._centred), progress=progress)
        return sums

    def _hold(self) -> None:
        """Read y, once. Raises StoreError."""

        def keep(values: Array, rows: Range, cols: Range) -> None:
            self._targets[slice(*rows), slice(*cols)] = values

        if not self._held:
            self._pieces.each(keep, lambda found: None)
        self._held = True


@dataclass(frozen=True)
class Shared:
    """What all processes are given."""

    centred: bool
    extra: int
    """Bytes of what comes together elsewhere that count in the limit of each process."""
    powers: Powers | None = None


def _pass(here: Here, shared: Shared, rows: Range) -> OnePass:
    """The pass over some rows of x, and the chunks of y that hold these rows. Raises BudgetError."""
    x, y = here.inputs["x"], here.inputs["y"]
    chunk = y.matrix.chunk_cols if y.matrix.transposed else y.matrix.chunk_rows
    first = rows[0] // chunk * chunk
    some = y.window((first, min(round_up(rows[1], chunk), y.shape[0])), (0, y.shape[1]))
    room = Room(here.memory_limit, shared.extra, ADDED, here.threads)
    return OnePass(x.window(rows, (0, x.shape[1])), some, shared.centred, room, rows[0] - first)


def fit(here: Here, shared: Shared, rows: Range) -> None:
    """Raise BudgetError where a process cannot make the sums over some rows."""
    _pass(here, shared, rows)


def equations_of(here: Here, shared: Shared, rows: Range) -> Equations:
    """Make the sums over some rows."""
    one = _pass(here, shared, rows)
    found = one.equations(here.tell, shared.powers)
    here.trace.bytes["read"] += one.bytes_read
    return found


class PassElsewhere:
    """The same pass by processes elsewhere, each of which is given ranges of rows. Their sums are added up in
    the order of the ranges."""

    def __init__(
        self,
        pool: Pool,
        beside: Callable[[int], int],
        arrays: tuple[Opened, Opened],
        centred: bool,
        extra: int,
    ):
        """beside: counts bytes that this process holds (`Elsewhere`). arrays: x and y. extra: as of `Room`.
        Raises BudgetError and DeviceError."""
        left, n, t = arrays[0], arrays[0].shape[1], arrays[1].shape[1]
        self.device, self._pool, self._shape = pool.hardware.name, pool, (n, t)
        self._parts = parts_of(left, RANGES * pool.count)
        share = beside((SOLVED + 1) * n * n * 8 + 9 * n * t * 8 + extra)
        self._shared = Shared(centred, share)
        pool.ask(fit, self._shared, self._parts[0])

    @property
    def peak_host_bytes(self) -> int:
        """The largest resident set of a process that took part."""
        return self._pool.peak_host_bytes

    @property
    def bytes_read(self) -> int:
        """Of both arrays."""
        return self._pool.trace.bytes["read"]

    def equations(self, progress: Callable[[float], None] | None, powers: Powers | None = None) -> Equations:
        """Adds up what processes find. Raises StoreError and DeviceError."""
        sums, shared = Equations.none(*self._shape), replace(self._shared, powers=powers)

        def add(number: int, found: Equations) -> None:
            with np.errstate(all="ignore"):
                sums.include(found, shared.centred)

        told = progress or (lambda fraction: None)
        with self._pool:
            self._pool.each(equations_of, shared, self._parts, InOrder(add), told)
        return sums


def equations(
    made: OnePass | PassElsewhere, progress: Callable[[float], None] | None
) -> tuple[Equations, Powers, int]:
    """Make the sums in one pass, or in two where columns have to be multiplied by powers of two; by which;
    and the passes. Raises StoreError and DeviceError."""
    sums = made.equations(progress)
    powers = sums.powers()
    return (made.equations(None, powers), powers, 2) if powers else (sums, powers, 1)
