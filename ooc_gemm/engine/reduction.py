"""What is kept of C where C itself is not stored."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..support.intervals import round_up

Array = npt.NDArray[Any]


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

    def add(self, scores: Array, columns: Array, row: int) -> None:
        """Take what a device has found in rows of C from `row` on (`Best.records`). Any thread may call
        it."""


def pieces_of(shape: tuple[int, int], tile: tuple[int, int]) -> list[tuple[slice, slice]]:
    """Cut a block of this shape into tiles, those of one column after the other: tiles that are reduced at
    the same time are then of different rows, and share columns of op(B)."""
    return [
        (slice(i, min(i + tile[0], shape[0])), slice(j, min(j + tile[1], shape[1])))
        for j in range(0, shape[1], tile[1])
        for i in range(0, shape[0], tile[0])
    ]
