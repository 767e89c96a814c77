"""The normal equations of a linear model, xᵀx·w = xᵀy, from one pass over x, here or by processes
elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass

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
    rows: int = 0

    @classmethod
    def none(cls, columns: int, targets: int) -> "Equations":
        """Those of no rows."""
        sums = np.zeros((columns, columns)), np.zeros((columns, targets))
        return cls(*sums, np.zeros(columns), np.zeros(targets))

    def include(self, other: "Equations", centred: bool) -> None:
        """Add those of further rows, by Chan's formula where rows are centred."""
        self.gram += other.gram
        self.product += other.product
        total = self.rows + other.rows
        if centred:
            apart, target_apart = other.mean - self.mean, other.target_mean - self.target_mean
            share = other.rows / total
            self.gram += np.outer(apart * (self.rows * share), apart)
            self.product += np.outer(apart * (self.rows * share), target_apart)
            self.mean += apart * share
            self.target_mean += target_apart * share
        self.rows = total


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

    def equations(self, progress: Callable[[float], None] | None) -> Equations:
        """Make the sums. Raises StoreError."""

        def keep(values: Array, rows: Range, cols: Range) -> None:
            self._targets[slice(*rows), slice(*cols)] = values

        self._pieces.each(keep, lambda found: None)
        sums = Equations.none(self.opened.shape[1], self._targets.shape[1])

        def work(panel: Array, rows: Range) -> Equations:
            y = self._targets[self._first + rows[0] : self._first + rows[1]].astype(np.float64)
            means = np.zeros(panel.shape[1]), np.zeros(y.shape[1])
            if self._centred:
                means = centred_columns(panel), centred_columns(y)
            return Equations(panel.T @ panel, panel.T @ y, *means, len(panel))

        with one_blas_thread:
            self._panels.each(work, lambda found: sums.include(found, self._centred), progress=progress)
        return sums


@dataclass(frozen=True)
class Shared:
    """What all processes are given."""

    centred: bool
    extra: int
    """Bytes of what comes together elsewhere that count in the limit of each process."""


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
    found = one.equations(here.tell)
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
        self.device, self._pool, self._sums = pool.hardware.name, pool, Equations.none(n, t)
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

    def equations(self, progress: Callable[[float], None] | None) -> Equations:
        """Adds up what processes find. Raises StoreError and DeviceError."""

        def add(number: int, found: Equations) -> None:
            with np.errstate(all="ignore"):
                self._sums.include(found, self._shared.centred)

        told = progress or (lambda fraction: None)
        with self._pool:
            self._pool.each(equations_of, self._shared, self._parts, InOrder(add), told)
        return self._sums
