"""Integer geometry: ranges, grids and their overlaps, panels and bands. Standard library only."""

import math
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise


def ceil_div(a: int, b: int) -> int:
    """⌈a / b⌉ for b > 0."""
    return -(-a // b)


def round_up(a: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `a`."""
    return ceil_div(a, step) * step


def ranges(extent: int, step: int) -> Iterator[tuple[int, int]]:
    """[0, extent) cut every `step`: (start, stop) pairs in order; the last may be short."""
    for start in range(0, extent, step):
        yield start, min(start + step, extent)


def overlaps(start: int, stop: int, chunk: int) -> Iterator[tuple[int, int, int]]:
    """The chunks that [start, stop) meets: (chunk index, start, stop) of each common range."""
    while start < stop:
        index = start // chunk
        end = min((index + 1) * chunk, stop)
        yield index, start, end
        start = end


@lru_cache(maxsize=4096)
def touches(extent: int, step: int, chunk: int) -> int:
    """How many (range, chunk) pairs meet when [0, extent) is cut every `step` and every `chunk`."""
    if extent < 1:
        return 0
    common = (extent - 1) // math.lcm(step, chunk)  # cuts of both
    return 1 + (extent - 1) // step + (extent - 1) // chunk - common


LEAST_GROWN = 512
"""Depth that panels that grow begin with, at least."""


@lru_cache(maxsize=4096)
def growing_panels(k: int, deepest: int, unit: int, growth: float) -> tuple[tuple[int, int], ...]:
    """[0, k) cut at multiples of `unit`, each panel about `growth` times as deep as the one before. They are
    thin at first, so that the first multiplication begins soon; each is read while the one before is
    multiplied; and while the last is multiplied, much of what it makes is written."""
    step = round_up(LEAST_GROWN, unit)
    edges = [ceil_div(k, step)]
    while edges[-1] > 0:
        depth = math.ceil(edges[-1] * (1 - 1 / growth))
        edges.append(edges[-1] - max(1, min(depth, deepest // step)))
    edges.reverse()
    return tuple((start * step, min(stop * step, k)) for start, stop in pairwise(edges))


BAND = 128
"""Bands of rows are multiples of this, as tiles of kernels are."""


@lru_cache(maxsize=1024)
def bands(rows: int, weights: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """[start, stop) for each of several devices; the last ones may have none."""
    found, start = list[tuple[int, int]](), 0
    for index in range(len(weights)):
        stop = rows if index == len(weights) - 1 else min(rows, start + band_rows(rows, weights, index))
        found.append((start, stop))
        start = stop
    return tuple(found)


def band_of(at: int, rows: int, weights: tuple[int, ...]) -> tuple[int, int]:
    """The number of the band that a row is in, and that of the row within it."""
    found = bands(rows, weights)
    number = bisect_right(found, (at, rows)) - 1
    return number, at - found[number][0]


def band_rows(rows: int, weights: tuple[int, ...], index: int) -> int:
    """The most rows of one device in blocks of up to so many."""
    return min(rows, round_up(ceil_div(rows * weights[index], sum(weights)), BAND))
