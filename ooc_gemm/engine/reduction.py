"""What is kept of C where C itself is not stored."""

from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..support.buffers import Bytes
from ..support.intervals import round_up

Array = npt.NDArray[Any]

ALIGN = 512
"""Arrays of a device begin at multiples of this many bytes."""
SCORER_BYTES = 4 << 20
"""Device memory of the kernels that score pairs and of their stream (estimated), and what an allocation is
rounded up by."""
STRIP_ROWS, STRIP_BYTES = 16384, 32 << 20
"""Most rows of A, and most bytes of them, whose pairs a device scores at a time."""
PARTS, PARTS_BYTES = 64, 4 << 20
"""Most parts of B of which a device adds up the columns at the same time, and most bytes of their sums."""


@dataclass(frozen=True, eq=False)
class Best:
    """The best elements of each row of C, for devices that find them in a whole block: those for which
    C·scale − shift is largest, of equal ones that in the lower column. NaN and −∞ are not among them."""

    keep: int
    """How many of each row."""
    dtype: np.dtype[Any]
    """Type of scores: float32 or float64."""
    scale: Array | None
    """Of each column of C; None: 1."""
    shift: Array | None
    """Of each column of C; None: 0."""
    others: bool
    """Whether an element on the diagonal of C is left out."""

    @property
    def record_bytes(self) -> int:
        """Bytes of what is found of a row: scores, best first, and the columns of C that they are in, as
        int32; −∞ and −1 where there are no more."""
        return record_bytes(self.keep, self.dtype)

    def records(self, memory: Array, rows: int) -> tuple[Array, Array]:
        """Return views of bytes that hold what was found of some rows: scores and columns."""
        each, scores = memory[: rows * self.record_bytes].reshape(rows, -1), self.keep * self.dtype.itemsize
        return each[:, :scores].view(self.dtype), each[:, scores : scores + 4 * self.keep].view(np.int32)


def score_type(block: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type of scores for blocks of a type."""
    return np.dtype(np.float32 if block == np.float32 else np.float64)


def record_bytes(keep: int, dtype: np.dtype[Any]) -> int:
    """Return the bytes of what is found of a row of a block."""
    return round_up(keep * (dtype.itemsize + 4), 8)


class Reduction(Protocol):
    """Takes finished rectangles of C and keeps less of them. Any thread may call it."""

    tile: tuple[int, int]
    """Rows and columns of the rectangles that it takes fastest."""

    def take(self, values: Array, row: int, col: int) -> None:
        """Take rows × columns of C that begin at (row, col). Every element of C comes exactly once, in any
        order, and a rectangle lies within one block. `values` may be overwritten, and is not kept."""


class Ranked(Reduction, Protocol):
    """A reduction that keeps the best elements of each row, which a device may find in a whole block."""

    @property
    def wanted(self) -> Best:
        """What is kept."""

    def add(self, found: Array, columns: Array, row: int) -> None:
        """Take what a device has found in rows of C from `row` on (`Best.records`). Any thread may call
        it."""


@dataclass(frozen=True)
class Pairs:
    """Rows of B that a device keeps in its memory, to score pairs of rows of A and of B in float64."""

    shape: tuple[int, int]
    """Rows of A, and of B."""
    depth: int
    """Elements of a row."""
    right: np.dtype[Any]
    """Type of B."""
    left: np.dtype[Any] | None
    """Type of A; None where A is B."""
    keep: int
    """Pairs of each row of A."""

    @property
    def strip(self) -> int:
        """Rows of A whose pairs are scored at a time."""
        line = self.depth * self.left.itemsize if self.left else 1
        return max(1, min(STRIP_ROWS, STRIP_BYTES // max(1, line), self.shape[0]))

    @property
    def parts(self) -> int:
        """Parts of B of which columns are added up at the same time."""
        return max(1, min(PARTS, self.shape[1], PARTS_BYTES // max(1, 8 * self.depth)))

    @property
    def buffers(self) -> dict[str, tuple[tuple[int, int], np.dtype[Any]]]:
        """Shape and type of each array on the device."""
        wide, left = np.dtype(np.float64), self.left or self.right
        return {
            "right": ((self.shape[1], self.depth), self.right),
            "left": ((self.strip if self.left else 0, self.depth), left),
            "left norms": ((1, self.strip if self.left else 0), wide),
            "norms": ((1, self.shape[1]), wide),
            "totals": ((self.parts, self.depth), wide),
            "columns": ((self.strip, self.keep), np.dtype(np.int32)),
            "sums": ((self.strip, self.keep), wide),
        }

    @property
    def device_bytes(self) -> int:
        """Device memory of these arrays, and of what scores them."""
        return SCORER_BYTES + sum(
            round_up(prod(shape) * dtype.itemsize, ALIGN) for shape, dtype in self.buffers.values()
        )

    @property
    def staging_bytes(self) -> int:
        """Host memory of the buffer through which numbers of pairs and rows come and go."""
        return 8 * max(self.strip * self.keep, self.parts * self.depth, self.strip)


class Scorer(Protocol):
    """Scores the pairs of rows of one run. Any thread may call `put`; other methods are called one at a
    time."""

    def host_buffers(self, count: int, nbytes: int) -> list[Bytes]:
        """Return memory from which `put` copies at full speed. It is freed by `close`."""

    def put(self, side: str, values: Array, row: int, col: int) -> None:
        """Copy rows × columns of B (`right`), or of the strip of A (`left`), to where they belong. `values`
        may change afterwards."""

    def norms(self) -> tuple[Array, Array]:
        """Return (the squared norm of each row of B, the sum of each column over the rows whose norm is
        finite)."""

    def sums(self, columns: Array, first: int, differences: bool) -> tuple[Array, Array]:
        """Return for each pair the sum over the products of elements, or over the squares of their
        differences, in float64; and the squared norm of each row of A.

        Row i of `columns` holds rows of B, −1 for none, that are paired with row `first` + i of A: of the
        strip, which begins with row `first`, or of B where A is B. `norms` has been called before.
        """

    def close(self) -> None:
        """Free all memory."""


def pieces_of(shape: tuple[int, int], tile: tuple[int, int]) -> list[tuple[slice, slice]]:
    """Cut a block of this shape into tiles, those of one column after the other: tiles that are reduced at
    the same time are then of different rows, and share columns of op(B)."""
    return [
        (slice(i, min(i + tile[0], shape[0])), slice(j, min(j + tile[1], shape[1])))
        for j in range(0, shape[1], tile[1])
        for i in range(0, shape[0], tile[0])
    ]
