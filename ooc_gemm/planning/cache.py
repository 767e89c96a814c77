"""Which pieces stay in host memory: a cache that gives up what is needed last (Belady), simulated.

The schedule is fixed, so every next use is known before anything is read. `hits` plays the schedule once and
tells for each visit of a panel how many of its pieces are still there. A run does not decide anything: a
piece stays after its upload where the plan says that the panel's next visit finds it, and only there.

Standard library only.
"""

import heapq
from collections.abc import Hashable, Sequence
from itertools import accumulate

Visit = tuple[Hashable, int]
"""What is visited, and the number of pieces that it consists of."""


def next_visits(visits: Sequence[Visit]) -> list[int]:
    """Return for each visit the number of the next visit of the same thing; `len(visits)` where there is
    none."""
    never, seen, after = len(visits), dict[Hashable, int](), [0] * len(visits)
    for number in range(never - 1, -1, -1):
        unit, _ = visits[number]
        after[number] = seen.get(unit, never)
        seen[unit] = number
    return after


def hits(visits: Sequence[Visit], capacity: int) -> tuple[int, ...]:
    """Return for each visit how many of its first pieces are found in a cache of `capacity` pieces.

    The cache is filled in the order of the visits, and drops the pieces whose next use is farthest away
    (Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5(2),
    1966).
    """
    after, never = next_visits(visits), len(visits)
    there = [0] * (never + 1)  # at the number of the next visit: pieces kept for it
    farthest: list[int] = []  # −number of those visits
    free = capacity
    for number, (_, pieces) in enumerate(visits):
        free += there[number]
        following = after[number]
        if following == never:
            continue
        kept = min(pieces, free)
        free -= kept
        while kept < pieces and farthest and -farthest[0] > following:
            last = -farthest[0]
            taken = min(pieces - kept, there[last])
            kept += taken
            there[last] -= taken
            if there[last] == 0:
                heapq.heappop(farthest)
        if kept:
            there[following] = kept
            heapq.heappush(farthest, -following)
    return tuple(there[:never])


def kept(visits: Sequence[Visit], found: Sequence[int]) -> tuple[int, ...]:
    """Return for each visit how many of its first pieces are kept, because the next visit finds them."""
    return tuple(found[after] if after < len(visits) else 0 for after in next_visits(visits))


def most_kept(found: Sequence[int], kept: Sequence[int]) -> int:
    """Return the largest number of pieces that are kept at the same time, which the cache must hold."""
    return max(accumulate(comes - leaves for leaves, comes in zip(found, kept, strict=True)), default=0)
