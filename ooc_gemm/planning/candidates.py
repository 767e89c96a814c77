"""Lists what the search tries: sizes of blocks and panels, rings, and chunks of C."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..support.intervals import ceil_div, power_of_two, round_up
from .machine import Budget
from .panels import Panels
from .problem import CHUNK_BYTES, Matrix, MiB, Problem
from .teams import ALONE, Shape

MIN_DEPTH, MAX_DEPTH = 256, 8192
"""Thinnest panel tried: thinner ones save a few MiB and cost many times the reads. And the deepest, but for
chunks that are deeper: C is read and written for each (fp16x3, H200: 6 % of the time; 26 % at 2048)."""

DEEPEST_BYTES = 64 << 10
"""Bytes of each row of op(A), or column of op(B), in the deepest panel of elements of 8 or 16 bits: they are
multiplied faster, and reading and writing C takes as long as ever."""

SMALL_PANELS = 128 * MiB
"""Bytes of a pair of panels up to which panels of a small C may be deeper than the deepest, on a device with
memory of its own: turns of a few MiB take longer to hand over than to fill (AᵀA of 262144 × 768 on an H100:
65 ms instead of 82)."""

LANE_BYTES = 4 * MiB
"""Bytes of a panel that a thread multiplies alone, which should stay in the caches of its core from being
read to being multiplied …"""

LANE_ELEMENTS = 1 << 20
"""… and most elements of a C that is made so: each panel reads and writes a sum of this size."""

AMPLE_SLOTS = (4 * MiB, 1 * MiB)
"""Largest sizes of a slot tried where the device computes in host memory: a slot should stay in the cache of
the CPU between being read and being used …"""

AMPLE_DEVICE_SLOTS = (16 * MiB, 4 * MiB)
"""… and where each slot is copied to a device: fewer, longer copies."""

STEPPED_SLOT, FEWER_SLOTS = 64 * MiB, 4
"""The largest size of a slot tried, and one in how many slots, where pieces go to a device in steps
(`Budget.step`): then the size of a piece does not matter to the caches, and fewer pieces are handled."""

LEAST_SLOT = 1 * MiB
"""Largest size of a slot in the smallest ring."""


@dataclass(frozen=True)
class Ring:
    """The numbers of reader and writer threads and of read slots, and the largest size of a slot."""

    readers: int
    writers: int
    slots: int
    cap: int
    """Most bytes of a slot, unless a chunk that must be decoded whole, or a row, is larger."""


class Candidate(NamedTuple):
    """One way to compute a product. The search compares the predicted seconds of many, so it is a tuple, of
    which changed copies are quickly made."""

    c: Matrix
    """How C would be stored."""
    bm: int
    bn: int
    panels: Panels
    c_buffers: int
    """Blocks of C on the device: with two, one is written back while the other is computed."""
    ring: Ring
    cache: int = 0
    """Number of slots for pieces that stay in host memory until their next use."""
    by_columns: bool = False
    """Whether blocks are made column by column of C."""
    team: Shape = ALONE
    """Rows and columns of blocks that workers of a cluster make at the same time, and read once between
    them."""

    def times_a(self, p: Problem) -> int:
        """How many times op(A) is read if the cache holds nothing; for a symmetric product, how many times A
        is."""
        return 1 if self.panels.resident else ceil_div(p.n, self.bn)

    def times_b(self, p: Problem) -> int:
        """How many times op(B) is read if the cache holds nothing."""
        return 1 if self.panels.columns else ceil_div(p.m, self.bm)

    def fetches(self, p: Problem) -> tuple[int, int]:
        """How many times op(A) and op(B) are read from the store if the cache holds nothing; for a symmetric
        product, how many times A is. A team reads once what its workers need."""
        times_b = 0 if shares_pieces(p, self.panels) else self.times_b(p)
        return ceil_div(self.times_a(p), self.team[1]), ceil_div(times_b, self.team[0])

    def a_steps(self, p: Problem) -> tuple[int, int]:
        """Rows and columns between the cuts of A as stored, where op(A) is cut into panels."""
        bk = self.panels.deepest
        return (bk, self.bm) if p.a.transposed else (self.bm, bk)

    def b_steps(self, p: Problem) -> tuple[int, int]:
        """Rows and columns between the cuts of B as stored, where op(B) is cut into panels."""
        bk = self.panels.deepest
        return (self.bn, bk) if p.b.transposed else (bk, self.bn)


def rings(budget: Budget) -> list[Ring]:
    """Return the rings that are tried, the largest first."""
    most, writers = budget.readers, budget.writers
    counts = [most]
    while budget.connection and counts[-1] > 4:
        counts.append(counts[-1] // 2)
    share = 1 if budget.connection else 2  # where a request is made again, those behind it need room
    if budget.in_memory:  # the more slots, the fewer are still in the caches of the CPU
        share = 4
    ample = [
        Ring(count, max(1, writers * count // most), count + max(2, count // share), cap)
        for count in counts
        for cap in (AMPLE_SLOTS if budget.device is None else AMPLE_DEVICE_SLOTS)
    ]
    if budget.step and budget.in_memory:
        count = max(4, most // FEWER_SLOTS)
        ample.insert(0, Ring(count, writers, count + max(2, count // share), STEPPED_SLOT))
    return [*ample, Ring(min(2, most), 1, 3, LEAST_SLOT)]


def steps(extent: int, align: int, beside: int = 1) -> list[int]:
    """Return the block sizes that are tried along an axis, the largest first: the whole axis, then 2, 3, …
    about equal parts of it, each a multiple of `align`. Where so many blocks `beside` each other are made at
    the same time, each of these parts is cut into so many blocks."""
    top = max(1, ceil_div(extent, align))
    parts = [*range(1, 13), 14, 16, 20, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 4096, 1 << 14, 1 << 16]
    counts = [beside * count for count in parts]
    sizes = {min(extent, ceil_div(top, count) * align) for count in counts if count <= top} | {
        min(extent, align)
    }
    return sorted((max(1, size) for size in sizes), reverse=True)


def sides(p: Problem, align: tuple[int, int], team: Shape = ALONE) -> tuple[list[int], list[int]]:
    """Return the heights and the widths of blocks that are tried, the largest first. align: their factors.
    team: rows and columns of blocks that are made at the same time."""
    if p.whole:
        return [max(1, p.m)], [max(1, p.n)]
    return steps(p.m, align[0], team[0]), steps(p.n, align[1], team[1])


def may_have_lanes(p: Problem, budget: Budget) -> bool:
    """Whether C is small enough for threads that multiply pairs of panels alone, and there may be any."""
    return budget.lanes > 0 and p.m * p.n <= LANE_ELEMENTS


def shares_pieces(p: Problem, panels: Panels) -> bool:
    """Whether threads that multiply alone use each piece of op(A) as one of op(B), too: both are read alike,
    one of them is transposed, and none is copied to other chunks first. A symmetric product has pieces of
    op(A) alone."""
    if not (panels.lanes and p.read_alike) or p.symmetric or p.a.transposed == p.b.transposed:
        return False
    a, b = ((s.chunk_rows, s.chunk_cols, s.whole) for s in (p.a, p.b))
    return a == b


def depths(p: Problem, budget: Budget) -> list[int]:
    """Return the panel depths that are tried, the smallest first: fractions and multiples of both k chunks,
    powers of two, and all of k."""
    k = max(1, p.k)
    chunks = {
        p.a.chunk_rows if p.a.transposed else p.a.chunk_cols,
        p.b.chunk_cols if p.b.transposed else p.b.chunk_rows,
    }
    found, deepest = {MIN_DEPTH, 512, 1024, 2048, 4096, MAX_DEPTH, k}, MAX_DEPTH
    if p.panel_itemsize <= 2:
        deepest = DEEPEST_BYTES // p.panel_itemsize
    if p.k_chunk <= deepest or p.a.whole or p.b.whole:
        chunks.add(p.k_chunk)
    if may_have_lanes(p, budget):
        depth = power_of_two(max(MIN_DEPTH, LANE_BYTES // (max(1, p.m, p.n) * p.panel_itemsize)))
        found.add(depth - depth % min(depth, p.k_chunk))
    small = SMALL_PANELS // max(1, (p.m + p.n) * p.panel_itemsize)
    if budget.device is not None and small > deepest:
        deepest = power_of_two(small)
    for chunk in {MAX_DEPTH, *chunks} if deepest > MAX_DEPTH else chunks:
        depth = chunk
        while depth <= max(deepest, chunk) and depth <= 8 * chunk * deepest // MAX_DEPTH:
            found.add(depth)
            depth *= 2
        found.update(ceil_div(chunk, parts) for parts in (2, 4))
    return sorted({min(k, depth) for depth in found if depth >= min(k, MIN_DEPTH)})


def outputs(p: Problem) -> list[Matrix]:
    """Return the ways to store C that are tried: as asked for, or with chunks of the preferred size or
    smaller."""
    if not p.free_chunks:
        return [p.c]
    rows_of_a = p.a.chunk_cols if p.a.transposed else p.a.chunk_rows
    cols_of_b = p.b.chunk_rows if p.b.transposed else p.b.chunk_cols
    found: list[Matrix] = []
    for size in CHUNK_BYTES:
        elements = size // p.c.itemsize
        rows = chunk_side(p.m, max(math.isqrt(elements), elements / max(1, p.n)), rows_of_a)
        cols = rows if p.symmetric else chunk_side(p.n, elements / rows, cols_of_b)
        c = replace(p.c, chunk_rows=rows, chunk_cols=cols)
        if c not in found:
            found.append(c)
    return found


def chunk_side(extent: int, near: float, other: int) -> int:
    """Return a chunk side of C near `near` that is a multiple or an even part of the operand's chunk side
    `other` if one is close, so that block edges lie on chunk edges of both."""
    extent = max(1, extent)
    near = max(1, min(extent, round(near)))
    if other <= near:
        return min(extent, near // other * other)
    side = ceil_div(other, ceil_div(other, near))
    if other % side == 0:
        return side
    return min(extent, round_up(ceil_div(extent, ceil_div(extent, near)), 16))


def everything(p: Problem, budget: Budget) -> Candidate:
    """Return the candidate for unlimited memory: C in one block, panels so deep that their depth costs no
    time, and lanes where there may be any."""
    panels = Panels(p.k, max(1, p.k), p.k_chunk, lanes=budget.lanes if may_have_lanes(p, budget) else 0)
    return Candidate(outputs(p)[0], max(1, p.m), max(1, p.n), panels, 1, rings(budget)[0])
