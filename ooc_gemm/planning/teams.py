"""Teams: workers of a cluster that make neighbouring blocks of C at the same time. A worker reads some of the
pieces that it needs from the store, and gets the others from those of its team that have read them.

                    columns of blocks, q = 3
                   ┌────────┬────────┬────────┐
    rows of        │ worker │ worker │ worker │   all workers of a row need the same pieces of op(A),
    blocks,        ├────────┼────────┼────────┤   all workers of a column the same pieces of op(B)
    p = 2          │ worker │ worker │ worker │
                   └────────┴────────┴────────┘

So bytes read from the store fall with the memory of the team, as they would with that of one large worker.
"""

import math

from ..support.intervals import ceil_div
from .problem import Problem

Shape = tuple[int, int]
"""Rows and columns of blocks that a team makes at the same time, each by a worker of its own."""

ALONE: Shape = (1, 1)
"""That of a worker that reads all pieces itself."""


def shapes(p: Problem, workers: int) -> list[Shape]:
    """Return the teams that are tried for so many workers: of all of them, of half of them, and so on. Teams
    of a symmetric product have as many rows as columns, so that its strips of A are cut at the same places in
    both directions."""
    if p.parts > 1 or p.whole or p.row_bytes:  # a reduction wants the blocks of a row one after the other
        return []
    sizes = [workers >> halved for halved in range(workers.bit_length() - 1)]
    if p.symmetric:
        one = (math.isqrt(8 * workers + 1) - 1) // 2  # all of C: so many rows of blocks down to the diagonal
        sides = dict.fromkeys([one, *map(math.isqrt, sizes)])
        return [(side, side) for side in sides if side > 1]
    found = [_squarest(p, workers, spare=0)] if workers > 1 else []
    found += [_squarest(p, size, spare=size) for size in sizes]
    return list(dict.fromkeys(found))


def _squarest(p: Problem, size: int, spare: int) -> Shape:
    """Return the team of up to `size` workers that needs the fewest rows and columns in all, leaving no more
    than `spare` of them idle."""
    found = [(i, size // i) for i in range(1, size + 1) if size % i <= spare]
    return min(found, key=lambda team: (p.m / team[0] + p.n / team[1]) / (team[0] * team[1]))


def count_groups(p: Problem, bm: int, bn: int, team: Shape) -> int:
    """Return the number of groups of blocks, of which a team makes one at a time."""
    down, across = ceil_div(ceil_div(p.m, bm), team[0]), ceil_div(ceil_div(p.n, bn), team[1])
    return down * (down + 1) // 2 if p.symmetric else down * across


def members(p: Problem, bm: int, bn: int, team: Shape) -> int:
    """Return the number of workers that the largest group takes."""
    down, across = ceil_div(p.m, bm), ceil_div(p.n, bn)
    if not p.symmetric:
        return max(1, min(down, team[0]) * min(across, team[1]))
    side = min(down, team[0])
    below = min(side, down - side)  # rows of the first group below the diagonal
    return max(1, side * (side + 1) // 2, below * side)


def rounds(p: Problem, bm: int, bn: int, team: Shape, workers: int) -> int:
    """Return how many groups the busiest team makes, one after the other."""
    return ceil_div(count_groups(p, bm, bn, team), max(1, workers // members(p, bm, bn, team)))
