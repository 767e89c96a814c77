"""Integer geometry: ranges, grids and their overlaps. Standard library only."""

import math
from collections.abc import Iterator
from functools import lru_cache


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
