"""What is kept of C where C itself is not stored."""

from typing import Any, Protocol

import numpy.typing as npt


class Reduction(Protocol):
    """Takes finished rectangles of C and keeps less of them. Any thread may call it."""

    tile: tuple[int, int]
    """Rows and columns of the rectangles that it takes fastest."""

    def take(self, values: npt.NDArray[Any], row: int, col: int) -> None:
        """Take rows × columns of C that begin at (row, col). Every element of C comes exactly once, in any
        order, and a rectangle lies within one block. `values` may be overwritten, and is not kept."""


def pieces_of(shape: tuple[int, int], tile: tuple[int, int]) -> list[tuple[slice, slice]]:
    """Cut a block of this shape into tiles, those of one column after the other: tiles that are reduced at
    the same time are then of different rows, and share columns of op(B)."""
    return [
        (slice(i, min(i + tile[0], shape[0])), slice(j, min(j + tile[1], shape[1])))
        for j in range(0, shape[1], tile[1])
        for i in range(0, shape[0], tile[0])
    ]
