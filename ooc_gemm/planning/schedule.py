"""The parts of a schedule: blocks of C, the pieces that are read for them, the chunks that they make.

block   bm × bn of C; stays on the device until it is finished
panel   bm × bk of op(A), or bk × bn of op(B); one pair a step
piece   what one read brings into one slot: a part of one chunk
part    one chunk of C in the block that makes it
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from typing import NamedTuple

from ..support.intervals import band_edges, ceil_div, overlaps, round_up
from .problem import Matrix, Problem

EARLY_STRIPS = 8
"""Most strips of rows in which a block is finished: each is downloaded while the next one is computed."""

DIAGONAL_STRIPS = 16
"""Strips of rows in which a block on the diagonal is computed, each up to the diagonal: 17/32 of its
products."""

DIAGONAL_ELEMENTS = 1 << 27
"""Least number of elements of a block on the diagonal that is finished in early strips, too: so many strips
that what they compute above the diagonal does not matter."""

LEAST_STRIP = 1024
"""Least number of rows in such a strip."""

TOGETHER = 4
"""Most parts that are brought from a device to the store in one go: the interpreter, for which a writer waits
half a millisecond beside four H200, is needed a quarter as often."""

NARROWEST = 8192
"""Least number of columns of blocks that become narrower. Panels of four devices are multiplied in 6 ms where
blocks have 4096 columns, and it takes as long to start them."""


@dataclass(frozen=True)
class Block:
    """Rows [row, row+rows) × columns [col, col+cols) of C."""

    index: int
    row: int
    rows: int
    col: int
    cols: int
    diagonal: bool = False
    """Whether the block is symmetric: its panels of op(A) are also those of op(B), and its lower triangle is
    enough."""
    last: bool = False
    """Whether no other block is made after this one."""
    band: bool = False
    """Whether these are some rows of a block on the diagonal, which one of several devices computes: their
    panel of op(A) is a part of op(B)'s, from column `row − col` on."""

    def flops(self, k: int) -> int:
        """Return the number of operations of a sum of products of `k` terms; for a symmetric block, of half
        of it and its diagonal."""
        return (self.rows + 1 if self.diagonal else 2 * self.rows) * self.cols * k


class Piece(NamedTuple):
    """What one read brings into one slot: rows × cols of one chunk of a stored matrix, or of several that lie
    one below the other (`StoreTraits.stackable`)."""

    operand: str
    """The operand that the piece is read for: `a`, `b`, or `c` (β ≠ 0)."""
    chunk: tuple[int, int]
    """Row and column of its first chunk in the grid of chunks."""
    rows: tuple[int, int]
    """Rows [start, stop) of the stored matrix."""
    cols: tuple[int, int]
    """Columns [start, stop) of the stored matrix."""
    span: tuple[int, int]
    """The columns that are read, `cols` or the chunk's whole rows (with their padding)."""
    into: tuple[int, int]
    """Row and column of the piece in its panel (or C block), which is oriented as stored."""
    panel: tuple[int, int]
    """Rows and columns of that panel (or C block)."""
    found: bool = False
    """Whether the piece is still in host memory, so that nothing is read."""
    kept: bool = False
    """Whether the piece stays in host memory for its next use."""
    matrix: str = ""
    """The stored matrix from which it is cut, where that is not the operand's: op(B) = op(A)ᵀ is cut from
    A."""
    both: bool = False
    """Whether it also belongs to the panel of op(B), because the block is on the diagonal."""
    number: int = 0
    """Its number among the pieces of its panel."""

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and of columns."""
        return self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]

    @property
    def source(self) -> str:
        """Name of the stored matrix from which the piece is cut: `a`, `b` or `c`."""
        return self.matrix or self.operand

    @property
    def place(self) -> tuple[str, tuple[int, int], tuple[int, int]]:
        """What identifies the piece's data, wherever they are used."""
        return self.source, self.rows, self.cols


class Part(NamedTuple):
    """One chunk of C and its place in the block that makes it, or in that block's transpose."""

    chunk: tuple[int, int]
    row: int
    col: int
    rows: int
    cols: int
    mirrored: bool = False
    """Whether it is a part of the block's transpose."""


def cut(
    operand: str,
    s: Matrix,
    rows: tuple[int, int],
    cols: tuple[int, int],
    slot_bytes: int,
    found: int = 0,
    kept: int = 0,
    matrix: str = "",
    edges: Iterable[int] = (),
) -> Iterator[Piece]:
    """Cut rows × cols of a stored matrix into pieces that fit a slot: at chunk edges and, where a chunk can
    be read in part, between rows. The first `found` pieces are in host memory, and the first `kept` stay
    there. `edges`: rows at which other devices' bands begin; few pieces go on past them."""
    panel, number = (rows[1] - rows[0], cols[1] - cols[0]), 0
    stacked = s.chunks_of_piece(slot_bytes, panel[1]) * s.chunk_rows
    for row, row_stop in _runs(s, rows, stacked, edges):
        for j, col, col_stop in overlaps(*cols, s.chunk_cols):
            span = s.span(col, col_stop)
            fitting = max(1, slot_bytes // ((span[1] - span[0]) * s.itemsize))
            step = row_stop - row if s.whole else fitting
            for start in range(row, row_stop, step):
                stop = min(start + step, row_stop)
                into = (start - rows[0], col - cols[0])
                yield Piece(
                    operand, (start // s.chunk_rows, j), (start, stop), (col, col_stop), span, into, panel,
                    number < found, number < kept, matrix, number=number,
                )  # fmt: skip
                number += 1


def _runs(s: Matrix, rows: tuple[int, int], stacked: int, edges: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the rows of pieces: up to so many `stacked` ones, and none on both sides of an edge, but for a
    chunk of which no part can go to a device without a slot."""
    height = 1 if s.traits.asynchronous and not s.whole else s.chunk_rows
    apart = {row for edge in edges for row in (edge // height * height, round_up(edge, height))}
    for _, row, stop in overlaps(*rows, stacked):
        yield from pairwise([row, *sorted(edge for edge in apart if row < edge < stop), stop])


Side = tuple[Matrix, tuple[int, int], tuple[int, int]]
"""A stored matrix, and the rows and columns of it that a panel needs."""


def sides(p: Problem, row: tuple[int, int], col: tuple[int, int], k: tuple[int, int]) -> dict[str, Side]:
    """Return where a pair of panels lies in the stored matrices."""
    a, b = ((row, k), (k, col))
    return {
        "a": (p.a, *(a[::-1] if p.a.transposed else a)),
        "b": (p.b, *(b[::-1] if p.b.transposed else b)),
    }


def cuts(p: Problem, operand: str, side: Side, weights: tuple[int, ...]) -> tuple[int, ...]:
    """Return the rows at which bands of several devices begin in what a panel needs of a stored matrix. Bands
    are rows of op(A). Of a symmetric product strips of one matrix are op(A) as well as op(B), so both are cut
    likewise."""
    s, rows, _ = side
    across_c = s.transposed == (operand == "b")
    return band_edges(rows, weights) if across_c and (operand == "a" or p.symmetric) else ()


def places(
    p: Problem, bm: int, bn: int, by_columns: bool, narrowing: bool = False, together: int = 0
) -> Iterator[tuple[int, int]]:
    """Return block rows and block columns of C in the order in which blocks are made.

    Every second row (or column) is walked backwards. A symmetric C is made row by row, each from the diagonal
    to the left and then its diagonal block, so that each block shares a panel with the one before.

    together: the first so many columns are made row by row, and then one column after the other. So what
    comes to a device that keeps it is soon used for as many blocks as it can be (`Panels.columns`).
    """
    down, across = _grid(p, bm, bn, narrowing)
    if together:
        first = min(together, across)
        yield from product(range(down), range(first))
        yield from ((i, j) for j in range(first, across) for i in range(down))
        return
    if p.symmetric:
        for i in range(down):
            for j in (*reversed(range(i)), i):
                yield i, j
        return
    outer, inner = (across, down) if by_columns else (down, across)
    for i in range(outer):
        for j in range(inner) if i % 2 == 0 else reversed(range(inner)):
            yield (j, i) if by_columns else (i, j)


def last_place(down: int, across: int, by_columns: bool, together: int = 0) -> tuple[int, int]:
    """Return the last of `places` for a C that is not symmetric, of so many block rows and block columns."""
    if together:
        return down - 1, across - 1
    outer, inner = (across, down) if by_columns else (down, across)
    end = inner - 1 if outer % 2 else 0
    return (end, outer - 1) if by_columns else (outer - 1, end)


def column_edges(p: Problem, bn: int, narrowing: bool) -> tuple[int, ...]:
    """Return the first column of each column of blocks, and the end of the last. `narrowing`: only the first
    blocks are `bn` wide, and the next ones become narrower, down to a quarter (`Panels.resident`): so the
    device computes while the first panels come, and little is left to write at the end."""
    step = p.b.chunk_rows if p.b.transposed else p.b.chunk_cols
    return _edges(p.n, bn, math.lcm(p.c.chunk_cols, step), narrowing)


@lru_cache(maxsize=1024)
def _edges(n: int, bn: int, align: int, narrowing: bool) -> tuple[int, ...]:
    """Return these edges. All are multiples of `align`: blocks that begin within chunks of B would read more.
    Where `bn` is none, or less than four of those, they are multiples of `bn`."""
    if not narrowing or 4 * align > bn or bn % align:
        return (*range(0, n, bn), n)
    edges, least = [0], round_up(max(ceil_div(bn, 4), min(bn, NARROWEST)), align)
    while edges[-1] < n:
        left = n - edges[-1]
        half = round_up(ceil_div(left, 2), align)
        width = bn if len(edges) == 1 else min(bn, left if left < 2 * least else half)
        edges.append(min(n, edges[-1] + width))
    return tuple(edges)


def block_widths(p: Problem, bn: int, narrowing: bool, count: int) -> tuple[int, ...]:
    """Return for how many columns of a block each of `count` buffers on the device has room. Blocks beside
    each other take turns with them, so where they become narrower most buffers hold narrow ones only."""
    if not narrowing:
        return (bn,) * count
    widths = [stop - start for start, stop in pairwise(column_edges(p, bn, True))]
    return tuple(max(widths[c::count], default=0) for c in range(count))


def _grid(p: Problem, bm: int, bn: int, narrowing: bool) -> tuple[int, int]:
    """Return how many blocks lie one below the other, and how many beside each other."""
    return ceil_div(p.m, bm), len(column_edges(p, bn, True)) - 1 if narrowing else ceil_div(p.n, bn)


def count_blocks(p: Problem, bm: int, bn: int, narrowing: bool = False) -> int:
    """Return the number of blocks in which C is made."""
    down, across = _grid(p, bm, bn, narrowing)
    return down * (down + 1) // 2 if p.symmetric else down * across
