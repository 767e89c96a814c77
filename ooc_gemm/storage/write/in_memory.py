"""A target that makes C a NumPy array in memory."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ...planning.problem import Matrix
from ...planning.schedule import Part
from ...support.buffers import Bytes
from ..read.source import Array
from .conversion import check_fits, check_range, convert


class ArrayTarget:
    """C as a NumPy array in memory (the engine's `Target`)."""

    background, bring = False, None

    def __init__(self, out: Array, matrix: Matrix, block: np.dtype[Any]):
        """out: C. matrix: C, in the chunks in which it comes. block: the type in which they come."""
        self._out, self._matrix, self._block = out, matrix, block
        self.overflowed, self._lock = 0, threading.Lock()

    def cancel(self) -> None:
        """Does nothing: no thread waits for a store."""

    def note_lost(self, elements: int, least: int, greatest: int) -> None:
        """Counts elements that a device has made infinite. Raises RangeError for integers that do not fit."""
        if self._out.dtype.kind in "iu":
            check_range(least, greatest, self._out.dtype, "the result")
        with self._lock:
            self.overflowed += elements

    def view(self, part: Part, slot: Bytes) -> Array:
        """Returns a dense matrix at the front of the slot."""
        return (
            slot[: part.rows * part.cols * self._block.itemsize]
            .view(self._block)
            .reshape(part.rows, part.cols)
        )

    def start(self, part: Part, slot: Bytes) -> Callable[[], int]:
        """Returns `write`: nothing is done in the background."""
        return partial(self.write, part, slot)

    def write(self, part: Part, slot: Bytes) -> int:
        """Converts to the type of C and copies. Raises RangeError for integers that do not fit."""
        inside = self.view(part, slot)
        if self._out.dtype.kind in "iu":
            check_fits(inside, self._out.dtype, "the result")
        row, col = part.chunk[0] * self._matrix.chunk_rows, part.chunk[1] * self._matrix.chunk_cols
        if found := convert(inside, self._out[row : row + part.rows, col : col + part.cols]):
            with self._lock:
                self.overflowed += found
        return part.rows * part.cols * self._out.itemsize
