"""The reduction of `topk` where a device finds the best of each row (a `Ranked`): they come in order, when
all blocks of a row have passed."""

from threading import Lock
from typing import Any

import numpy as np

from ..engine.reduction import Best
from .nearest import Scores
from .rescore import Array


class Gathered:
    """Keeps what a device has found until its row of blocks is complete."""

    tile = (1, 1)

    def __init__(self, shape: tuple[int, int], height: int, keep: int, dtype: np.dtype[Any], scores: Scores):
        """shape: of C. height: rows of a row of blocks. keep: columns that are kept for each row. dtype: type
        of the scores."""
        self._shape, self._height = shape, height
        shift = scores.shift
        if scores.never is not None:  # rows of B that are neighbours of none have an infinite shift
            shift = np.zeros(shape[1], dtype) if shift is None else shift.copy()
            shift[scores.never] = np.inf
        self.wanted = Best(keep, dtype, scores.scale, shift, scores.others)
        self._bands: dict[int, tuple[Array, Array]] = {}
        self._lock = Lock()

    def take(self, values: Array, row: int, col: int) -> None:
        """Is not called: the device downloads no blocks."""
        raise NotImplementedError

    def add(self, found: Array, columns: Array, row: int) -> None:
        """Copies them to where they belong."""
        number = row // self._height
        with self._lock:
            if number not in self._bands:
                rows, keep = min(self._height, self._shape[0] - number * self._height), self.wanted.keep
                # Of rows that are finished already nothing comes.
                scores = np.full((rows, keep), -np.inf, self.wanted.dtype)
                self._bands[number] = scores, np.full((rows, keep), -1, np.int64)
            to, to_columns = self._bands[number]
        first = row - number * self._height
        to[first : first + len(found)], to_columns[first : first + len(found)] = found, columns

    def best(self, band: int) -> tuple[Array, Array]:
        """(columns, scores) of a row of blocks, best first; column −1 where there are no more."""
        with self._lock:
            scores, columns = self._bands.pop(band)
        return columns, scores
