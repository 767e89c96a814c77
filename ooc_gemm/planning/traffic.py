"""Counts the bytes that a plan moves, and the fewest that any schedule can move."""

import math
from typing import NamedTuple

from ..support.intervals import ceil_div, overlaps
from .candidates import Candidate
from .machine import Budget
from .problem import Matrix, Problem
from .schedule import Block, Piece
from .teams import ALONE


class Traffic(NamedTuple):
    """Bytes between the store and host memory, between host memory and the device (0 where the device
    computes in host memory), and between workers of a cluster."""

    read: int
    written: int
    uploaded: int
    downloaded: int
    exchanged: int


def whole_traffic(p: Problem, budget: Budget, x: Candidate) -> Traffic:
    """Return the bytes that a candidate moves without a cache. `p.c` is C as the candidate stores it."""
    times_a, times_b, (fetches_a, fetches_b) = x.times_a(p), x.times_b(p), x.fetches(p)
    read = fetches_a * p.a.read_bytes(*x.a_steps(p))
    uploaded, fetched = (times * p.m * p.k * p.a.itemsize for times in (times_a, fetches_a))
    # What a device decodes is uploaded as it is stored.
    saved = times_a * (p.m * p.k * p.a.itemsize - p.a.read_bytes(*x.a_steps(p))) if p.a.encoded else 0
    if not p.symmetric:  # else each strip of A has met all others as op(A) or as op(B), and itself once
        read += fetches_b * p.b.read_bytes(*x.b_steps(p))
        uploaded += times_b * p.k * p.n * p.b.itemsize
        fetched += fetches_b * p.k * p.n * p.b.itemsize
        if p.b.encoded:
            saved += times_b * (p.k * p.n * p.b.itemsize - p.b.read_bytes(*x.b_steps(p)))
    exchanged = 0 if x.team == ALONE else uploaded - fetched
    if p.reads_c:
        read += p.c.read_bytes(x.bm, x.bn)
        uploaded += p.m * p.n * p.c.itemsize
    uploaded += uploaded_again(p, budget, shared_columns(p, x.bm, x.bn))
    written = p.c.grid[0] * p.c.grid[1] * p.c.chunk_bytes if p.c.chunked else p.m * p.n * p.c.itemsize
    if budget.device is None:
        return Traffic(read, written, 0, 0, exchanged)
    return Traffic(read, written, uploaded - saved, downloaded_bytes(p), exchanged)


def uploaded_bytes(p: Problem, budget: Budget, blocks: list[Block], rows_of_a: int, cols_of_b: int) -> int:
    """Return the bytes that go to a device with memory of its own for some blocks. rows_of_a, cols_of_b: rows
    of op(A) and columns of op(B) that are uploaded for them."""
    old = sum(block.rows * block.cols for block in blocks) * p.c.itemsize if p.reads_c else 0
    again = uploaded_again(p, budget, sum(block.cols for block in blocks))
    return p.k * (rows_of_a * p.a.itemsize + cols_of_b * p.b.itemsize) + old + again


def downloaded_bytes(p: Problem) -> int:
    """Return the bytes that leave a device."""
    return p.m * (p.found_bytes or p.n * p.part_itemsize)


def piece_read_bytes(s: Matrix, piece: Piece) -> int:
    """Return the bytes that reading a piece moves from the store."""
    width, total = piece.span[1] - piece.span[0], 0
    for i, row, row_stop in overlaps(*piece.rows, s.chunk_rows):
        stored = s.stored_size(i, piece.chunk[1])
        total += stored if s.whole or not stored else (row_stop - row) * width * s.itemsize
    return total


def shared_columns(p: Problem, bm: int, bn: int) -> int:
    """Return the number of columns of all blocks."""
    down = ceil_div(p.m, bm)
    return bn * (down * (down - 1) // 2) + p.m if p.symmetric else down * p.n


def uploaded_again(p: Problem, budget: Budget, columns: int) -> int:
    """Return the bytes that several devices receive in addition to each piece once. columns: those of op(B)'s
    panels, which go to each device that cannot take them from another."""
    others = 0 if budget.linked else len(budget.weights) - 1
    return p.k * (p.a.itemsize if p.symmetric else p.b.itemsize) * columns * others


def lower_bound_bytes(p: Problem, fast_bytes: int) -> int:
    """Least bytes between store and a fast memory of `fast_bytes` for any schedule of the classical
    algorithm: 2mnk/√S − 2S elements (Smith, Lowery, Langou, van de Geijn, arXiv:1702.02017), of a symmetric
    product m(m − 1)k/√(2S) − 2S (Beaumont, Eyraud-Dubois, Vérité, Langou, SPAA 2022), and never less than
    each input read and C written once."""
    s = max(1.0, fast_bytes / p.panel_itemsize)
    loads = 2.0 * p.m * p.n * p.k / math.sqrt(s)
    if p.symmetric:
        loads = p.m * (p.m - 1.0) * p.k / math.sqrt(2 * s)
    compulsory = p.input_bytes + p.m * p.n * p.c.itemsize
    return max(round((loads - 2.0 * s) * p.panel_itemsize), compulsory)
