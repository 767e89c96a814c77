"""Rows of B that come behind so many copies of themselves that they are nobody's neighbours. Of equal scores
those of lower rows are better. Such rows would only take the places of candidates from others."""

import numpy as np

from ..support.intervals import ranges
from .rescore import STRIP_BYTES, Array, Range, Rows, depths

FEWEST = 7
"""Copies of a row that matter, at least: fewer do not take all places of candidates."""
COLUMN_BYTES = 64
"""Bytes of the numbers that are made for each column of rows that are looked at."""


def often(squares: Array, before: int) -> Array:
    """The rows that may have more copies than `before`: those whose squared norms as many others have."""
    count = max(before + 1, FEWEST)
    order = np.sort(squares)
    there = order[: max(0, len(order) - count + 1)]
    values = np.unique(there[there == order[len(order) - len(there) :]])  # NaN is equal to nothing
    place = np.minimum(np.searchsorted(values, squares), max(0, len(values) - 1))
    return np.flatnonzero(values[place] == squares) if len(values) else np.empty(0, np.int64)


def behind(rows: Array, marks: Array, before: int) -> Array:
    """Those of some rows, ascending, that have at least `before` copies among the ones before them. marks: of
    each of them."""
    order = np.lexsort((rows, *marks.T))
    marks, rows = marks[order], rows[order]
    same = (marks[before:] == marks[: max(0, len(marks) - before)]).all(axis=1)
    return np.sort(rows[before:][same])


def cost(rows: Rows) -> int:
    """Return how many bytes `marks` reads."""
    return sum(rows.cost((0, rows.opened.shape[0]), k) for k in _columns(rows))


def marks(rows: Rows) -> Array:
    """Two numbers for each row, which are the same for copies. For two rows that differ in any bit they are
    with a probability of about 2^−66."""
    count = rows.opened.shape[0]
    dtype = rows.opened.dtype if rows.opened.dtype.itemsize >= 4 else np.dtype(np.float32)
    words, found = dtype.itemsize // 4, np.zeros((count, 2), np.uint64)
    for columns in _columns(rows):
        shape, most = (2, words * (columns[1] - columns[0])), np.iinfo(np.uint64).max
        factors = np.random.default_rng(columns[0]).integers(0, most, shape, np.uint64, endpoint=True)

        def add(values: Array, row: int, col: int, factors: Array = factors, first: int = columns[0]) -> None:
            some = factors[:, words * (col - first) : words * (col - first + values.shape[1])]
            for start, stop in ranges(len(values), max(1, STRIP_BYTES // 16 // max(1, values.shape[1]))):
                # Zero is added because −0 is equal to 0.
                strip = np.add(values[start:stop], 0, dtype=dtype, order="C").view(np.uint32)
                wide = strip.astype(np.uint64)
                for number, line in enumerate(some):
                    found[row + start : row + stop, number] += np.vecdot(wide, line)

        rows.each((0, count), columns, add)
    return found


def _columns(rows: Rows) -> list[Range]:
    return list(depths(rows, 1, COLUMN_BYTES))
