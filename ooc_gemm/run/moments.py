"""Means and sums of squared deviations of columns, from one pass, without loss of digits.

Elements count as differences from a pivot near their mean, in float64. Parts are combined by the formula of
Chan, Golub and LeVeque (Updating formulae and a pairwise algorithm for computing sample variances, COMPSTAT
1982), so means that are many times the deviations lose nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.transform import missing_of
from ..storage.read.source import Opened
from .stream import Array, Needs, Pieces, Progress, Range

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

STRIP_ELEMENTS = 1 << 16
"""Elements that are worked on at a time, so that in float64 they stay in a cache."""
WORK_BYTES = 8 * 8 * STRIP_ELEMENTS
"""Memory in bytes that `of_columns` takes for the elements."""
LINE_BYTES = 14 * 8
"""Memory in bytes that `of_columns` takes for each column."""
TIMES = 2.0**600
"""Elements are multiplied with this in a further pass where sums of their squares are less than …"""
SMALL = 1e-280
"""… this, and divided by it where these are not finite."""
NO_MEAN = 1e-120
"""Elements whose mean is larger than this in size do not differ by so little, unless they are equal."""
TINY = float(np.finfo(np.float64).smallest_subnormal)
"""Stands for a sum of squares, or a length, that is too small for float64 but not 0."""


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of each column of a matrix."""

    count: npt.NDArray[np.int64] | Floats
    """Number of elements that are not missing; where they have weights, the sum of the weights."""
    mean: Floats
    """Mean of these elements; NaN where there are none."""
    squares: Floats
    """Sum of their squared deviations from the mean. Divided by `count` − 1 it is the sample variance. It is
    not 0 if elements differ. Where no element counts, it is 0, or NaN if one of weight 0 is not finite."""

    @classmethod
    def none(cls, columns: int, weighted: bool = False) -> "Moments":
        """Return the moments of no elements."""
        count: Any = np.zeros(columns, np.float64 if weighted else np.int64)
        return cls(count, np.full(columns, np.nan), np.zeros(columns))

    @property
    def deviation(self) -> Floats:
        """The standard deviation of each column, with `count` as the divisor; 0 where there are no
        elements."""
        with np.errstate(all="ignore"):
            return np.where(self.count == 0, 0.0, np.sqrt(self.squares / self.count))

    def include(self, start: int, other: "Moments") -> None:
        """Add the moments of further rows of columns [start, start + width of `other`), in place."""
        here = slice(start, start + len(other.count))
        n, m = self.count[here], other.count
        total = np.where(n + m == 0, 1, n + m)
        with np.errstate(all="ignore"):
            apart = np.where(n == 0, 0.0, other.mean - self.mean[here])
            # To what counts more, so that a large mean of little weight costs no digits.
            mean = np.where(m > n, other.mean - apart * (n / total), self.mean[here] + apart * (m / total))
            shares = self.mean[here] * (n / total) + other.mean * (m / total)
            mean = np.where(np.isfinite(apart), mean, shares)
            mean = np.where(n == 0, other.mean + self.squares[here], mean)
            squares = self.squares[here] + other.squares
            between = np.where(m == 0, 0.0, (apart * n) * (apart * (m / total)))
            squares = np.where((between == 0) & (apart != 0) & (m != 0), squares + TINY, squares + between)
        self.mean[here] = np.where(m == 0, self.mean[here] + other.squares, mean)
        self.squares[here] = squares
        self.count[here] += m


def of_columns(
    values: Array, missing: float | None = None, weights: Floats | None = None, times: float = 1
) -> Moments:
    """Moments of the columns of an array in memory.

    values: real numbers, rows × columns. missing: the number that stands for a missing value, or NaN where
    NaN does. weights: a number for each row, none of them negative. times: elements that have no weights are
    multiplied with this power of two before.
    """
    rows, cols = values.shape
    if not rows:
        return Moments.none(cols, weights is not None)
    with np.errstate(all="ignore"):
        if weights is not None:
            return _weighted(values, missing, weights)
        count, pivot, lacking = np.zeros(cols, np.int64), np.zeros(cols), np.ones(cols, np.bool_)
        sums, squares = np.zeros(cols), np.zeros(cols)
        for _, strip, gone in _strips(values, missing, times):
            if lacking.any():
                _begin(strip, gone, pivot, lacking)
            apart = np.subtract(strip, pivot, dtype=np.float64)
            count += len(strip)
            if gone is not None:
                apart[gone] = 0
                count -= np.count_nonzero(gone, axis=0)
            sums += apart.sum(axis=0)
            squares += np.einsum("ij,ij->j", apart, apart)
        shares = sums / count
        squares = np.where(count > 0, np.maximum(squares - sums * shares, 0.0), 0.0)
        found = Moments(count, pivot + shares, squares)
        if values.dtype.kind == "f" and values.dtype.itemsize == 8:
            _look_again(found, values, missing, times)
        return found


def _strips(
    values: Array, missing: float | None, times: float = 1, some: Any = slice(None)
) -> Iterator[tuple[int, Array, Flags | None]]:
    """Rows of some columns, as many at a time as stay in a cache: where they begin, their elements multiplied
    with `times`, and which of them are missing."""
    step = max(1, STRIP_ELEMENTS // max(1, values.shape[1]))
    for start in range(0, len(values), step):
        strip = values[start : start + step, some]
        gone = missing_of(strip, missing)
        yield start, strip if times == 1 else np.multiply(strip, times, dtype=np.float64), gone


def _begin(strip: Array, gone: Flags | None, pivot: Floats, lacking: Flags) -> None:
    """Find a number near the mean of each column that lacks one, unless all its elements are missing yet."""
    some = lacking.copy()
    if gone is not None:
        some[lacking] = ~gone[:, lacking].all(axis=0)
    if not some.any():
        return
    hidden: Any = False if gone is None else gone[:, some]
    wide: Any = strip[:, some].astype(np.float64)
    base = np.max(np.where(hidden, -np.inf, wide), axis=0)  # so the mean of equal elements is exact
    base = np.where(np.isfinite(base), base, 0.0)
    near = base + np.where(hidden, 0.0, wide - base).sum(axis=0) / (len(strip) - np.sum(hidden, axis=0))
    pivot[some] = np.where(np.isfinite(near), near, 0.0)
    lacking[some] = False


def _look_again(found: Moments, values: Array, missing: float | None, times: float) -> None:
    """Correct the moments of columns of float64 whose sums are too large for it, or whose squares are too
    small."""
    large = ~np.isfinite(found.mean) & (found.count > 0)
    for _, strip, gone in _strips(values, missing, times):
        if not large.any():
            break
        plain = np.isfinite(strip[:, large])
        large[large] = (plain if gone is None else plain | gone[:, large]).all(axis=0)
    if large.any():
        found.mean[large] = 0
        for _, strip, gone in _strips(values, missing, times, large):
            shares = strip / found.count[large]
            found.mean[large] += np.where(False if gone is None else gone, 0.0, shares).sum(axis=0)
    small = (found.squares == 0) & (np.abs(found.mean) < NO_MEAN)
    if small.any():
        mean = found.mean[small]  # that of equal elements is exact
        for _, strip, gone in _strips(values, missing, times, small):
            differ = strip != mean if gone is None else (strip != mean) & ~gone
            found.squares[small] += TINY * differ.any(axis=0)


def _weighted(values: Array, missing: float | None, weights: Floats) -> Moments:
    """Moments of the columns of an array whose rows have weights. Their weighted mean is found first: an
    element of little weight may be so large that differences from it have no digits of the others."""
    whole = float(weights.sum()) or 1.0
    count, sums, _ = _about(np.zeros(values.shape[1]), values, missing, weights / whole)
    mean = sums / count
    pivot = np.where(np.isfinite(mean), mean, 0.0)
    count, sums, squares = _about(pivot, values, missing, weights / whole)
    shares = np.where(count == 0, 0.0, sums / count)
    mean = np.where(np.isfinite(mean) & np.isfinite(shares), mean + shares, mean)
    return Moments(count * whole, mean, np.maximum(squares - sums * shares, 0.0) * whole)


def _about(
    pivot: Floats, values: Array, missing: float | None, weights: Floats
) -> tuple[Floats, Floats, Floats]:
    """Sums of weights, and of differences from `pivot` and their squares times these, of each column."""
    count, sums, squares = (np.zeros(len(pivot)) for _ in range(3))
    for start, strip, gone in _strips(values, missing):
        factors = weights[start : start + len(strip)]
        apart = np.subtract(strip, pivot, dtype=np.float64)
        nothing = factors == 0
        if nothing.any():  # 0, or NaN where the element is not finite
            apart[nothing] = np.multiply(strip[nothing], 0.0, dtype=np.float64)
        if gone is None:
            count += factors.sum()
        else:
            apart[gone] = 0
            count += np.einsum("i,ij->j", factors, ~gone)
        sums += np.einsum("i,ij->j", factors, apart)
        squares += np.einsum("i,ij,ij->j", factors, apart, apart)
    return count, sums, squares


def column_moments(
    opened: Opened,
    limit: int,
    missing: float | None = None,
    progress: Progress | None = None,
    weights: Floats | None = None,
    threads: int = 0,
    times: float = 1,
) -> tuple[Moments, int]:
    """Moments of the columns of op(X), and the bytes read; of its rows with `opened.transpose()`.

    opened: a real matrix. limit: the memory limit of the process, in bytes. missing: as of `of_columns`.
    progress: called with the fraction that is done. weights, times: as of `of_columns`. threads: as of
    `Needs`.

    Raises BudgetError before anything is read, StoreError where a chunk cannot be.
    """
    pieces, found = the_pass(opened, limit, threads), Moments.none(opened.shape[1], weights is not None)

    def work(values: Array, rows: Range, cols: Range) -> tuple[int, Moments]:
        some = None if weights is None else weights[slice(*rows)]
        return cols[0], of_columns(values, missing, some, times)

    pieces.each(work, lambda part: found.include(*part), progress)
    return found, pieces.bytes_read


def largest(opened: Opened, limit: int, threads: int = 0) -> tuple[Floats, int]:
    """The largest element of each column of op(X) in size, and the bytes read. NaN where one is NaN, infinite
    where one is. Arguments: as of `column_moments`."""
    pieces, found = the_pass(opened, limit, threads), np.zeros(opened.shape[1])

    def work(values: Array, rows: Range, cols: Range) -> tuple[slice, Floats]:
        most, least = (ends.astype(np.float64) for ends in (values.max(axis=0), values.min(axis=0)))
        return slice(*cols), np.maximum(most, -least)

    def add(part: tuple[slice, Floats]) -> None:
        found[part[0]] = np.maximum(found[part[0]], part[1])

    pieces.each(work, add)
    return found, pieces.bytes_read


def deviations(
    opened: Opened, limit: int, found: Moments, missing: float | None = None
) -> tuple[Floats, int]:
    """The standard deviations of columns of op(X), also of those whose squares float64 does not hold, and the
    bytes read by the passes that find these. found: the moments of the columns. Others: as of
    `column_moments`."""
    deviation = found.deviation
    large = ~np.isfinite(found.squares) & np.isfinite(found.mean)
    small = (found.squares < SMALL) & (found.squares > 0) & (np.abs(found.mean) < NO_MEAN)

    def again(times: float) -> tuple[Floats, int]:
        made, moved = column_moments(opened, limit, missing, times=times)
        return made.deviation, moved

    return deviation, found_again(deviation, large, small, again)


def found_again(
    lengths: Floats, large: Flags, small: Flags, again: Callable[[float], tuple[Floats, int]]
) -> int:
    """Replace some lengths, whose squares are too large or too small for float64, by those of a further pass.
    again: returns the lengths of all lines whose elements are multiplied with a number, and the bytes read.
    Returns the bytes read by all."""
    read = 0
    for times, some in ((1 / TIMES, large), (TIMES, small)):
        if some.any():
            made, moved = again(times)
            with np.errstate(over="ignore", under="ignore"):
                lengths[some] = np.where(made[some] > 0, np.maximum(made[some] / times, TINY), made[some])
            read += moved
    return read


def the_pass(opened: Opened, limit: int, threads: int = 0) -> Pieces:
    """The pass that finds moments of columns, as of `column_moments`. Raises BudgetError before anything is
    read."""
    columns, s = opened.shape[1], opened.matrix
    width = min(
        columns, s.chunk_rows * s.chunks_of_piece(limit, s.chunk_cols) if s.transposed else s.chunk_cols
    )
    needs = Needs(columns * 3 * 8, WORK_BYTES + width * LINE_BYTES, threads=threads)
    return Pieces(opened, limit, "find the means of", needs)
