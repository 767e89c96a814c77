"""The reduction of `topk`: the best few elements of each row of C, found while C passes by.

The elements of a tile are compared with what is needed to be among the best of their row so far. Eight
results of comparisons are looked at together, as one word; after a few tiles nearly all words are zero.
"""

from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from ..support.intervals import ceil_div

Array = npt.NDArray[Any]

STRIP = 64
"""Rows of a tile that are compared at a time: with the columns of a tile they fit the second cache of a
core."""
GROUPS = 128
"""Groups into which the columns of a row's first tile are cut, at least."""
WORD = 8
"""Results of comparisons, of a byte each, in a word."""
ROOM = 3
"""Candidates of a row, in multiples of those that are kept, before the others are dropped."""
LOCKED = 512
"""Rows that share a lock."""
Found = tuple[Array, Array, Array]
"""Candidates: rows of a strip in ascending order, columns of a tile, scores."""
NOWHERE = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Scores:
    """How the score of row i of A with row j of B comes from their product, and who takes part."""

    scale: Array | None = None
    """Factor for each row of B …"""
    shift: Array | None = None
    """… and what is then subtracted."""
    never: Array | None = None
    """Rows of B, ascending, that are neighbours of none."""
    others: bool = False
    """B is A, and no row is its own neighbour."""


@dataclass
class _Band:
    """What is known so far of the rows of one row of blocks."""

    first: int
    values: Array
    columns: Array
    count: Array = field(init=False)
    """Candidates of each row."""
    least: Array = field(init=False)
    """A score that each row's best few reach, all of them …"""
    edge: Array = field(init=False)
    """… and the column from which on that score is not enough any more: of equal scores the one in the lower
    column is better."""
    locks: list[Lock] = field(init=False)

    def __post_init__(self) -> None:
        rows = len(self.values)
        self.count = np.zeros(rows, np.int64)
        self.least = np.full(rows, -np.inf, self.values.dtype)
        self.edge = np.full(rows, NOWHERE)
        self.locks = [Lock() for _ in range(-(-rows // LOCKED))]


class Nearest:
    """Keeps the columns of the highest scores of each row (a `Reduction`)."""

    tile = (512, 4096)

    def __init__(
        self,
        shape: tuple[int, int],
        height: int,
        keep: int,
        products: np.dtype[Any],
        dtype: np.dtype[Any],
        scores: Scores,
    ):
        """shape: of C. height: rows of a row of blocks. keep: columns that are kept for each row. products:
        type of C. dtype: type of the scores, in floating point."""
        self.products = products
        self._shape, self._height, self._keep, self._dtype = shape, height, keep, dtype
        self._scores = scores
        self._limit: Array | None = None
        """−∞ for rows of B that are neighbours of none, and NaN for others: what `fmin` does not look at."""
        if scores.never is not None:
            self._limit = np.full(shape[1], np.nan, dtype)
            self._limit[scores.never] = -np.inf
        self._bands: dict[int, _Band] = {}
        self._lock = Lock()

    @staticmethod
    def row_bytes(keep: int, dtype: np.dtype[Any]) -> int:
        """Memory, in bytes, that a row takes."""
        return ROOM * keep * (dtype.itemsize + 8) + dtype.itemsize + 16

    def take(self, values: Array, row: int, col: int) -> None:
        """Compares strips of rows, each in the cache."""
        band, at = self._band(row), 0
        while at < len(values):  # as many rows at a time as share a lock
            lock = (row + at - band.first) // LOCKED
            stop = min(len(values), (lock + 1) * LOCKED + band.first - row)
            with np.errstate(all="ignore"):
                self._compare(band, lock, values[at:stop], row + at, col)
            at = stop

    def best(self, band: int) -> tuple[Array, Array]:
        """(columns, scores) of what is kept of each row of a row of blocks, best first; column −1 where there
        are no more. It is forgotten with that."""
        with self._lock:
            found = self._bands.pop(band, None) or self._new(band)
        order = np.lexsort((found.columns, -found.values), axis=1)[:, : self._keep]
        return np.take_along_axis(found.columns, order, 1), np.take_along_axis(found.values, order, 1)

    def _band(self, row: int) -> _Band:
        number = row // self._height
        with self._lock:
            if number not in self._bands:
                self._bands[number] = self._new(number)
            return self._bands[number]

    def _new(self, number: int) -> _Band:
        first = number * self._height
        shape = min(self._height, self._shape[0] - first), ROOM * self._keep
        return _Band(first, np.full(shape, -np.inf, self._dtype), np.full(shape, -1, np.int64))

    def _compare(self, band: _Band, lock: int, values: Array, row: int, col: int) -> None:
        """Compare rows that share a lock with what is kept of them. Other threads may raise their thresholds
        meanwhile; then some candidates come that are dropped later."""
        rows = slice(row - band.first, row - band.first + len(values))
        with band.locks[lock]:
            least, edge = band.least[rows].copy(), band.edge[rows].copy()
        new, found = np.isneginf(least), []
        for at in range(0, len(values), STRIP):
            strip = slice(at, at + STRIP)
            some = self._scored(values[strip], row + at, col)
            if new[strip].any():
                bound = self._bound(some)
                edge[strip][bound > least[strip]] = NOWHERE
                np.fmax(least[strip], bound, out=least[strip])
            needed = np.where(
                edge[strip] < col, np.nextafter(least[strip], np.inf, dtype=least.dtype), least[strip]
            )
            lines, columns, scores = self._few(some, _reaching(some, needed[:, None]))
            found.append((lines + at, columns, scores))
        with band.locks[lock]:
            if new.any():
                higher = least > band.least[rows]
                band.least[rows][higher], band.edge[rows][higher] = least[higher], edge[higher]
            lines, columns, scores = map(np.concatenate, zip(*found, strict=True))
            self._add(band, rows, (lines, columns, scores), col)

    def _bound(self, values: Array) -> Array:
        """A score that as many elements of each row reach as are kept: so many groups of columns have an
        element that is no less than the least of their maxima; −∞ where there are too few columns."""
        height, width = values.shape
        groups = max(1, width // max(GROUPS, 2 * self._keep))
        across = width // groups
        if across < self._keep:
            return np.full(height, -np.inf, values.dtype)
        most = np.maximum.reduce(values[:, : groups * across].reshape(height, groups, across), axis=1)
        bound: Array = np.partition(most, across - self._keep, axis=1)[:, across - self._keep]
        return bound

    def _scored(self, values: Array, row: int, col: int) -> Array:
        """The scores of products; −∞ where two rows are no neighbours."""
        scores, (height, width) = self._scores, values.shape
        if values.dtype != self._dtype:
            values = values.astype(self._dtype)
        if scores.scale is not None:
            values *= scores.scale[col : col + width]
        if scores.shift is not None:
            values -= scores.shift[col : col + width]
        if self._limit is not None:
            np.fmin(values, self._limit[col : col + width], out=values)
        if scores.others and row < col + width and col < row + height:
            same = np.arange(max(row, col), min(row + height, col + width))
            values[same - row, same - col] = -np.inf
        return values

    def _few(self, values: Array, found: Found) -> Found:
        """What is found in a strip; of rows with more than there is room for, as where many scores are equal,
        only the best."""
        at, columns, scores = found
        if len(at) <= ROOM * self._keep:
            return found
        many = np.flatnonzero(np.bincount(at, minlength=len(values)) > ROOM * self._keep)
        if not len(many):
            return found
        best = np.argsort(-values[many], axis=1, kind="stable")[:, : self._keep]
        others = ~np.isin(at, many)
        at = np.concatenate([at[others], np.repeat(many, best.shape[1])])
        columns = np.concatenate([columns[others], best.reshape(-1)])
        scores = np.concatenate([scores[others], np.take_along_axis(values[many], best, 1).reshape(-1)])
        order = np.argsort(at, kind="stable")
        return at[order], columns[order], scores[order]

    def _add(self, band: _Band, rows: slice, found: Found, col: int) -> None:
        """Add candidates (rows, columns, scores), in the order of rows."""
        at, columns, values = found
        real = values > -np.inf
        at, columns, values = at[real], columns[real] + col, values[real]
        count, room = band.count[rows], ROOM * self._keep
        while len(at):
            first = np.searchsorted(at, np.arange(len(count)))
            place = count[at] + np.arange(len(at)) - first[at]
            fits = place < room
            band.values[rows][at[fits], place[fits]] = values[fits]
            band.columns[rows][at[fits], place[fits]] = columns[fits]
            count += np.bincount(at[fits], minlength=len(count))
            if fits.all():
                return
            at, columns, values = at[~fits], columns[~fits], values[~fits]
            self._shrink(band, rows, np.unique(at))
            least, edge = band.least[rows][at], band.edge[rows][at]
            useful = (values > least) | ((values == least) & (columns < edge))
            at, columns, values = at[useful], columns[useful], values[useful]

    def _shrink(self, band: _Band, rows: slice, full: Array) -> None:
        """Drop all but the best of these rows, which have no room left."""
        keep = self._keep
        values, columns = band.values[rows], band.columns[rows]
        order = np.lexsort((columns[full], -values[full]), axis=1)[:, :keep]
        kept = np.take_along_axis(values[full], order, 1), np.take_along_axis(columns[full], order, 1)
        values[full], columns[full] = -np.inf, -1
        values[full, :keep], columns[full, :keep] = kept
        band.count[rows][full] = keep
        band.least[rows][full], band.edge[rows][full] = kept[0][:, -1], kept[1][:, -1]


def _reaching(values: Array, needed: Array) -> Found:
    """What reaches the number that its row needs."""
    height, width = values.shape
    words = ceil_div(width, WORD)
    reaches = np.zeros((height, words * WORD), np.bool_)
    np.greater_equal(values, needed, out=reaches[:, :width])
    word = np.flatnonzero(reaches.view(np.uint64) != 0)
    which, inside = np.nonzero(reaches.reshape(-1, WORD)[word])
    at, column = np.divmod(word[which], words)
    column = column * WORD + inside
    return at, column, values[at, column]
