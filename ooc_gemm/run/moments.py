"""Means and sums of squared deviations of columns, from one pass, without loss of digits.

Elements count as differences from a pivot near their mean, in float64. Parts are combined by the formula of
Chan, Golub and LeVeque (Updating formulae and a pairwise algorithm for computing sample variances, COMPSTAT
1982), so means that are many times the deviations lose nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.transform import missing_of
from ..planning.problem import MOST_STACKED
from ..storage.read.source import Opened
from .stream import Array, Needs, Pieces, Progress, Range

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

STRIP_ELEMENTS = 1 << 16
"""Elements that are worked on at a time, so that in float64 they stay in a cache."""
WORK_BYTES = 8 * 8 * STRIP_ELEMENTS
"""Memory in bytes that `of_columns` takes for the elements."""
LINE_BYTES = 10 * 8
"""Memory in bytes that `of_columns` takes for each column."""
TIMES = 2.0**600
"""Elements are multiplied with this in a further pass where sums of their squares are less than …"""
SMALL = 1e-280
"""… this, and divided by it where these are not finite."""
NO_MEAN = 1e-120
"""Elements whose mean is larger than this in size do not differ by so little, unless they are equal."""


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of each column of a matrix."""

    count: npt.NDArray[np.int64] | Floats
    """Number of elements that are not missing; where they have weights, the sum of the weights."""
    mean: Floats
    """Mean of these elements; NaN where there are none."""
    squares: Floats
    """Sum of their squared deviations from the mean. Divided by `count` − 1 it is the sample variance."""

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
            mean = np.where(n == 0, other.mean, self.mean[here] + apart * (m / total))
            mean = np.where(np.isinf(apart), self.mean[here] + other.mean, mean)
            squares = self.squares[here] + other.squares + np.square(apart) * (n * (m / total))
        self.mean[here] = np.where(m == 0, self.mean[here], mean)
        self.squares[here] = np.where(m == 0, self.squares[here], squares)
        self.count[here] += m


def of_columns(
    values: Array, missing: float | None = None, weights: Floats | None = None, times: float = 1
) -> Moments:
    """Moments of the columns of an array in memory.

    values: real numbers, rows × columns. missing: the number that stands for a missing value, or NaN where
    NaN does. weights: a number for each row, none of them negative. times: without both, elements are
    multiplied with this power of two before.
    """
    rows, cols = values.shape
    if not rows:
        return Moments.none(cols, weights is not None)
    step = max(1, STRIP_ELEMENTS // max(1, cols))
    with np.errstate(all="ignore"):
        count, pivot = _begin(values[:step] if times == 1 else values[:step] * times, missing)
        if weights is not None:
            return _weighted(values, missing, weights, pivot, step)
        sums, squares = np.zeros(cols), np.zeros(cols)
        for start in range(0, rows, step):
            strip = values[start : start + step]
            if times != 1:
                strip = strip * times
            apart = np.subtract(strip, pivot, dtype=np.float64)
            count += len(strip)
            gone = missing_of(strip, missing)
            if gone is not None:
                apart[gone] = 0
                count -= np.count_nonzero(gone, axis=0)
            sums += apart.sum(axis=0)
            squares += np.einsum("ij,ij->j", apart, apart)
        shares = sums / count
        squares = np.where(count > 0, np.maximum(squares - sums * shares, 0.0), 0.0)
        return Moments(count, pivot + shares, squares)


def _weighted(values: Array, missing: float | None, weights: Floats, pivot: Floats, step: int) -> Moments:
    """Moments of the columns of an array whose rows have weights. Elements count as differences from `pivot`,
    `step` rows at a time."""
    count, sums, squares = (np.zeros(len(pivot)) for _ in range(3))
    for start in range(0, len(values), step):
        strip, factors = values[start : start + step], weights[start : start + step]
        apart = np.subtract(strip, pivot, dtype=np.float64)
        gone = missing_of(strip, missing)
        if gone is None:
            count += factors.sum()
        else:
            apart[gone] = 0
            count += np.einsum("i,ij->j", factors, ~gone)
        sums += np.einsum("i,ij->j", factors, apart)
        squares += np.einsum("i,ij,ij->j", factors, apart, apart)
    shares = np.where(count == 0, 0.0, sums / np.where(count == 0, 1, count))
    mean = np.where(count == 0, np.nan, pivot + shares)
    return Moments(count, mean, np.maximum(squares - sums * shares, 0.0))


def _begin(strip: Array, missing: float | None) -> tuple[npt.NDArray[np.int64], Floats]:
    """Return zeros to count in, and for each column a number near its mean."""
    found = missing_of(strip, missing)
    gone: Any = False if found is None else found
    wide: Any = strip.astype(np.float64)
    base = np.max(np.where(gone, -np.inf, wide), axis=0)  # so the mean of equal elements is exact
    base = np.where(np.isfinite(base), base, 0.0)
    count = np.maximum(len(strip) - np.sum(gone, axis=0), 1)
    pivot = base + np.where(gone, 0.0, wide - base).sum(axis=0) / count
    return np.zeros(strip.shape[1], np.int64), np.where(np.isfinite(pivot), pivot, 0.0)


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


def deviations(opened: Opened, limit: int, found: Moments) -> tuple[Floats, int]:
    """The standard deviations of columns of op(X), also of those whose squares float64 does not hold, and the
    bytes read by the passes that find these. found: the moments of the columns. Others: as of
    `column_moments`."""
    deviation = found.deviation
    large = ~np.isfinite(found.squares) & np.isfinite(found.mean)
    small = (found.squares < SMALL) & ((found.squares > 0) | (found.mean != 0))
    small &= np.abs(found.mean) < NO_MEAN

    def again(times: float) -> tuple[Floats, int]:
        made, moved = column_moments(opened, limit, times=times)
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
            lengths[some] = made[some] / times
            read += moved
    return read


def the_pass(opened: Opened, limit: int, threads: int = 0) -> Pieces:
    """The pass that finds moments of columns, as of `column_moments`. Raises BudgetError before anything is
    read."""
    columns, s = opened.shape[1], opened.matrix
    width = min(columns, s.chunk_rows * MOST_STACKED if s.transposed else s.chunk_cols)
    needs = Needs(columns * 3 * 8, WORK_BYTES + width * LINE_BYTES, threads=threads)
    return Pieces(opened, limit, "find the means of", needs)
