"""Integer geometry: ranges, grids, overlaps of grids, panels and bands. Standard library only."""

import math
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up; b > 0."""
    return -(-a // b)


def round_up(a: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `a`."""
    return ceil_div(a, step) * step


def power_of_two(most: int) -> int:
    """Return the largest power of two that is at most so large; 1 where there is none."""
    return 1 << max(0, most.bit_length() - 1)


def reuses(m: int, n: int, k: int, least: tuple[int, int]) -> bool:
    """Return whether a product of m×k by k×n uses its elements often: whether m·n/(m + n), the products for
    each element of A and B, and k, those for each element of C, reach the two numbers of `least`."""
    return m * n >= least[0] * (m + n) and k >= least[1]


def ranges(extent: int, step: int) -> Iterator[tuple[int, int]]:
    """Cut [0, extent) every `step` and yield (start, stop) pairs in order; the last may be short."""
    for start in range(0, extent, step):
        yield start, min(start + step, extent)


def overlaps(start: int, stop: int, chunk: int) -> Iterator[tuple[int, int, int]]:
    """Yield (chunk index, start, stop) for the part of [start, stop) in each chunk that it meets."""
    while start < stop:
        index = start // chunk
        end = min((index + 1) * chunk, stop)
        yield index, start, end
        start = end


@lru_cache(maxsize=4096)
def touches(extent: int, step: int, chunk: int) -> int:
    """Count the (range, chunk) pairs that meet when [0, extent) is cut every `step` and every `chunk`."""
    if extent < 1:
        return 0
    common = (extent - 1) // math.lcm(step, chunk)  # cuts of both
    return 1 + (extent - 1) // step + (extent - 1) // chunk - common


LEAST_GROWN = 512
"""Least depth of the first panel, in elements, where panels grow."""


@lru_cache(maxsize=4096)
def growing_panels(k: int, deepest: int, unit: int, growth: float) -> tuple[tuple[int, int], ...]:
    """Cut [0, k) at multiples of `unit` into panels that are each about `growth` times as deep as the one
    before.

    The first panels are thin, so that the first multiplication begins soon; each is read while the one before
    is multiplied; and while the last is multiplied, much of its result is written.
    """
    step = round_up(LEAST_GROWN, unit)
    edges = [ceil_div(k, step)]
    while edges[-1] > 0:
        depth = math.ceil(edges[-1] * (1 - 1 / growth))
        edges.append(edges[-1] - max(1, min(depth, deepest // step)))
    edges.reverse()
    return tuple((start * step, min(stop * step, k)) for start, stop in pairwise(edges))


BAND = 128
"""The height of a band is a multiple of this many rows, as the tiles of kernels are."""


@lru_cache(maxsize=1024)
def bands(rows: int, weights: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Cut [0, rows) into one range of rows for each device, in proportion to `weights`; the last may be
    empty."""
    found, start = list[tuple[int, int]](), 0
    for index in range(len(weights)):
        stop = rows if index == len(weights) - 1 else min(rows, start + band_rows(rows, weights, index))
        found.append((start, stop))
        start = stop
    return tuple(found)


def band_edges(rows: tuple[int, int], weights: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first row of each device's band of rows [start, stop), but for the first."""
    return tuple(rows[0] + start for start, _ in bands(rows[1] - rows[0], weights)[1:])


def band_of(at: int, rows: int, weights: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of the band that contains row `at`, and the number of that row within the band."""
    found = bands(rows, weights)
    number = bisect_right(found, (at, rows)) - 1
    return number, at - found[number][0]


def band_rows(rows: int, weights: tuple[int, ...], index: int) -> int:
    """The most rows that device number `index` gets of any block of up to `rows` rows."""
    return min(rows, round_up(ceil_div(rows * weights[index], sum(weights)), BAND))
