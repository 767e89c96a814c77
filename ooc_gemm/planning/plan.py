"""A plan: a frozen schedule, which `planner` chooses.

Nothing here touches a store or a device; everything is integers, and a `Plan` can be printed,
iterated twice and checked. The words:

    block   bm × bn of C; stays on the device until it is finished
    panel   bm × bk of op(A), or bk × bn of op(B); one pair a step
    piece   what one read brings into one slot: a part of one chunk

    for block in plan.blocks():                     # every element of C once
        for panel in plan.panels():                 # every k once
            for piece in plan.pieces(block, panel): # every byte of both panels once
"""

import math
import textwrap
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import accumulate, chain
from typing import Any, NamedTuple

from ..support.intervals import band_of, ceil_div, growing_panels, overlaps, ranges, round_up
from . import reuse
from .problem import Budget, Matrix, MiB, Problem, Rates


def _mib(nbytes: int) -> str:
    return f"{nbytes / MiB:,.1f} MiB" if nbytes >= MiB or not nbytes else f"{nbytes / 1024:,.1f} KiB"


def _wrapped(text: str, indent: int) -> str:
    return f"\n{'':{indent}}".join(textwrap.wrap(text, 100 - indent))


@dataclass(frozen=True)
class Block:
    """Rows [row, row+rows) × columns [col, col+cols) of C."""

    index: int
    row: int
    rows: int
    col: int
    cols: int
    diagonal: bool = False
    """It is symmetric: its panels of op(A) are those of op(B), too, and its lower triangle is enough."""
    last: bool = False
    """No other is made after it."""


class Piece(NamedTuple):
    """What one read brings into one slot: rows × cols of one chunk of a stored matrix, or of several that lie
    one below the other (`Matrix.stacked`)."""

    operand: str
    """`a`, `b`, or `c` (β ≠ 0)."""
    chunk: tuple[int, int]
    """The first."""
    rows: tuple[int, int]
    """[start, stop) in the stored matrix."""
    cols: tuple[int, int]
    """[start, stop) in the stored matrix."""
    span: tuple[int, int]
    """The columns that are read, `cols` or the chunk's whole rows (with their padding)."""
    into: tuple[int, int]
    """Row and column in the panel (or C block), oriented as stored."""
    panel: tuple[int, int]
    """Rows and columns of that panel (or C block)."""
    found: bool = False
    """It is still in host memory: nothing is read."""
    kept: bool = False
    """It stays in host memory for its next use."""
    matrix: str = ""
    """The stored matrix it is cut from, where that is not the operand's: op(B) = op(A)ᵀ is cut from A."""
    both: bool = False
    """It belongs to the panel of op(B), too: the block is on the diagonal."""

    @property
    def source(self) -> str:
        """The stored matrix it is cut from."""
        return self.matrix or self.operand

    @property
    def place(self) -> tuple[str, tuple[int, int], tuple[int, int]]:
        """What it is, wherever it is used."""
        return self.source, self.rows, self.cols


class Part(NamedTuple):
    """One chunk of C and its place in the block that makes it, or in that block's transpose."""

    chunk: tuple[int, int]
    row: int
    col: int
    rows: int
    cols: int
    mirrored: bool = False
    """It is a part of the block's transpose."""


def cut(
    operand: str,
    s: Matrix,
    rows: tuple[int, int],
    cols: tuple[int, int],
    slot_bytes: int,
    found: int = 0,
    kept: int = 0,
    matrix: str = "",
) -> Iterator[Piece]:
    """rows × cols of a stored matrix in pieces: at chunk edges, and where a chunk can be read in part
    also between rows, so that each fits a slot. The first `found` of them are in host memory, the first
    `kept` stay there."""
    panel, number = (rows[1] - rows[0], cols[1] - cols[0]), 0
    for _, row, row_stop in overlaps(*rows, s.chunks_of_piece(slot_bytes) * s.chunk_rows):
        for j, col, col_stop in overlaps(*cols, s.chunk_cols):
            span = s.span(col, col_stop)
            fitting = max(1, slot_bytes // ((span[1] - span[0]) * s.itemsize))
            step = row_stop - row if s.whole else fitting
            for start in range(row, row_stop, step):
                stop = min(start + step, row_stop)
                into = (start - rows[0], col - cols[0])
                yield Piece(
                    operand, (start // s.chunk_rows, j), (start, stop), (col, col_stop), span, into, panel,
                    number < found, number < kept, matrix,
                )  # fmt: skip
                number += 1


@dataclass(frozen=True)
class Plan:
    """A frozen schedule. All sizes in bytes, all times in seconds."""

    problem: Problem
    budget: Budget
    bm: int
    bn: int
    bk: int
    panel_buffers: int
    """Pairs of panels: one is filled while another is used. Of op(B) alone where op(A)'s are `resident`."""
    c_buffers: int
    """C blocks on the device: with two, one is written back while the other accumulates."""
    readers: int
    writers: int
    slots: int
    """Slots of the read ring."""
    slot_bytes: int
    """Bytes of one slot of the read ring; each writer has one more, of one chunk of C."""
    cache_slots: int
    """Slots more, for pieces that stay in host memory until their next use."""
    by_columns: bool
    """Blocks are made column by column of C, not row by row; either way there and back (serpentine), so
    that the panel at a turn is used twice in a row."""
    found: tuple[int, ...] = field(repr=False)
    """For each panel of op(A) and op(B) in the order of the schedule: how many of its first pieces are found
    in host memory. Empty: none ever."""
    kept: tuple[int, ...] = field(repr=False)
    """Likewise: how many of its first pieces stay there."""
    lower_bound_bytes: int
    """Least bytes any schedule moves between store and fast memory of this size:
    max(2mnk/√S − 2S, mk + kn + mn) elements (Smith et al., arXiv:1702.02017)."""
    bytes_read: int
    bytes_written: int
    bytes_uploaded: int
    bytes_downloaded: int
    ledger: dict[str, int]
    """Who holds how much of the host budget."""
    device_ledger: dict[str, int]
    stage_seconds: dict[str, float]
    predicted_seconds: float
    used_rates: Rates = field(repr=False)
    """What seconds are predicted by."""
    advice: str | None = None
    """What there is to say of the inputs' chunks: see `layout`."""
    growth: float = 1.0
    """Panels grow along k by that, up to `bk` (`growing_panels`); 1: all but the last are as deep."""
    resident: bool = False
    """All panels of op(A) stay on the device, each with a buffer of its own, while a row of blocks is made:
    only the first of those brings them."""
    done: frozenset[tuple[int, int]] = field(default=frozenset(), repr=False)
    """Chunks of C that are not made again; a block of which all are done is left out."""

    def without(self, done: frozenset[tuple[int, int]]) -> "Plan":
        """The same blocks, without those of which all chunks of C are done already. Bytes and seconds are
        those of what is left."""
        left, p = replace(self, done=done, found=(), kept=()), self.problem
        share = left.flops / self.flops if self.flops else 0.0
        blocks = list(left.blocks())
        parts = [part for block in blocks for part in left.parts(block)]
        old = [piece for block in blocks for piece in left.block_pieces(block)]
        read = sum(sizes[-1] for _, sizes in _visits(left) if sizes)
        uploaded = p.k * sum(
            (block.rows * p.a.itemsize if left.brings_a(block.index) else 0)
            + (0 if block.diagonal else block.cols * p.b.itemsize)
            for block in blocks
        ) + sum(block.rows * block.cols * p.c.itemsize for block in blocks if p.reads_c)
        off = sum(block.cols for block in blocks if not block.diagonal)
        uploaded += uploaded_again(p, self.budget, off, sum(x.rows for x in blocks if x.diagonal))
        downloaded = sum(part.rows * part.cols for part in parts) * p.block_itemsize
        separate = self.budget.device is not None
        left = replace(
            left,
            bytes_read=read + sum(_moved(p.c, piece) for piece in old),
            bytes_written=len(parts) * p.c.chunk_bytes,
            bytes_uploaded=uploaded if separate else 0,
            bytes_downloaded=downloaded if separate else 0,
            stage_seconds={stage: seconds * share for stage, seconds in self.stage_seconds.items()},
            predicted_seconds=self.predicted_seconds * share,
        )
        return with_cache(left, self.cache_slots) if self.cache_slots else left

    @property
    def host_bytes(self) -> int:
        """Sum of the ledger."""
        return sum(self.ledger.values())

    @property
    def device_bytes(self) -> int:
        """Sum of the device's ledger."""
        return sum(self.device_ledger.values())

    @property
    def block_count(self) -> int:
        """How many blocks are made."""
        return len(self._places) if self.done else count_blocks(self.problem, self.bm, self.bn)

    @property
    def flops(self) -> float:
        """Operations of the blocks that are made."""
        share = self.block_count / max(1, count_blocks(self.problem, self.bm, self.bn))
        return self.problem.flops * share

    @property
    def panel_count(self) -> int:
        """How many panel pairs each block takes."""
        return len(self._panels)

    @property
    def a_buffers(self) -> int:
        """How many panels of op(A) the device has room for."""
        return self.panel_count if self.resident else self.panel_buffers

    def a_buffer(self, panel: tuple[int, int], p: int) -> int:
        """Which of them op(A)'s panel of pair p is in."""
        return panel[0] // self.bk if self.resident else p

    def brings_a(self, i: int) -> bool:
        """Whether the panels of op(A) of block number i are not on the device yet."""
        return not self.resident or i == 0 or self._places[i - 1][0] != self._places[i][0]

    def blocks(self) -> Iterator[Block]:
        """Every element of C that is not done exactly once; of a symmetric one, those on and below the
        diagonal."""
        last = self.block_count - 1
        blocks = (self._block(index, i, j) for index, (i, j) in enumerate(self._places))
        return (replace(block, last=block.index == last) for block in blocks)

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        """Block row and column of each block, in order."""
        places = _places(self.problem, self.bm, self.bn, self.by_columns)
        return [place for place in places if not self.done or any(self.parts(self._block(0, *place)))]

    def _block(self, index: int, i: int, j: int) -> Block:
        row, col = i * self.bm, j * self.bn
        rows, cols = min(self.bm, self.problem.m - row), min(self.bn, self.problem.n - col)
        return Block(index, row, rows, col, cols, diagonal=self.problem.symmetric and i == j)

    def panels(self) -> Iterator[tuple[int, int]]:
        """The k ranges of a block, in order: every k exactly once."""
        return iter(self._panels)

    @cached_property
    def _panels(self) -> tuple[tuple[int, int], ...]:
        if self.growth > 1:
            return growing_panels(self.problem.k, self.bk, self.problem.k_chunk, self.growth)
        return tuple(ranges(self.problem.k, self.bk))

    def pieces(self, block: Block, panel: tuple[int, int]) -> Iterator[Piece]:
        """What fills one pair of panels; on the diagonal op(A)'s alone, and where that is there, op(B)'s."""
        row, col = (block.row, block.row + block.rows), (block.col, block.col + block.cols)
        visit = 2 * (block.index * self.panel_count + bisect_right(self._panels, panel) - 1)
        matrix = "a" if self.problem.symmetric else ""
        for number, (operand, (s, rows, cols)) in enumerate(_sides(self.problem, row, col, panel).items()):
            if (operand == "b" and block.diagonal) or (operand == "a" and not self.brings_a(block.index)):
                continue
            found, kept = (x[visit + number] if x else 0 for x in (self.found, self.kept))
            pieces = cut(operand, s, rows, cols, self.slot_bytes, found, kept, matrix)
            along_b = operand == "b"
            pieces = self._in_turns(pieces, int(s.transposed != along_b), even=along_b)
            yield from (piece._replace(both=True) for piece in pieces) if block.diagonal else pieces

    def _in_turns(self, pieces: Iterator[Piece], axis: int, even: bool) -> Iterator[Piece]:
        """Those of several devices' bands along an axis of a panel in turns, so that all are sent to at once.
        `even`: all bands are as wide, whatever the devices."""
        weights = (1,) * len(self.budget.weights) if even else self.budget.weights
        if len(weights) == 1:
            return pieces

        def depth(piece: Piece) -> tuple[int, int]:
            return band_of(piece.into[axis], piece.panel[axis], weights)[1], piece.into[1 - axis]

        return iter(sorted(pieces, key=depth))

    def block_pieces(self, block: Block) -> Iterator[Piece]:
        """What is read to fill a block with the C that was (β ≠ 0)."""
        if self.problem.reads_c:
            row, col = (block.row, block.row + block.rows), (block.col, block.col + block.cols)
            yield from self._in_turns(cut("c", self.problem.c, row, col, self.slot_bytes), 0, even=False)

    def parts(self, block: Block) -> Iterator[Part]:
        """The chunks of C that a block makes, and its mirror image, but for those that are done. Block edges
        are chunk edges, so each is whole. Of several devices' bands in turns, so that all send at once."""
        parts = self._parts((block.row, block.rows), (block.col, block.cols), mirrored=False)
        if self.problem.symmetric and not block.diagonal:
            turned = self._parts((block.col, block.cols), (block.row, block.rows), mirrored=True)
            parts = chain(parts, turned)
        if len(self.budget.weights) == 1:
            return parts
        weights = self.budget.weights

        def depth(part: Part) -> tuple[bool, int]:
            row = part.col if part.mirrored else part.row
            return part.mirrored, band_of(row, block.rows, weights)[1]

        return iter(sorted(parts, key=depth))

    def _parts(self, down: tuple[int, int], across: tuple[int, int], mirrored: bool) -> Iterator[Part]:
        """Of (first row, rows) and (first column, columns) of C."""
        c = self.problem.c
        for i, row, row_stop in overlaps(down[0], sum(down), c.chunk_rows):
            for j, col, col_stop in overlaps(across[0], sum(across), c.chunk_cols):
                size = row_stop - row, col_stop - col
                if (i, j) in self.done:
                    continue
                yield Part((i, j), row - down[0], col - across[0], *size, mirrored)

    def __str__(self) -> str:
        """The plan as a table, with its reasons."""
        return self.table()

    def table(self) -> str:
        """What is done, what it moves and who holds the memory."""
        p, c = self.problem, self.problem.c
        moved, bound = self.bytes_read + self.bytes_written, self.lower_bound_bytes
        slowest = max(self.stage_seconds, key=lambda stage: self.stage_seconds[stage], default="")
        mirrored = ", symmetric: one half is computed" if p.symmetric else ""
        inputs = p.a.stored_bytes + (0 if p.symmetric else p.b.stored_bytes)
        hold = "input holds" if p.symmetric else "inputs hold"
        rows = [
            ("product", f"{p.m}×{p.k} · {p.k}×{p.n}{mirrored}"),
            *([("type of C", _type_words(p))] if p.types[2] else []),
            *([("kernel", p.kernel)] if p.kernel else []),
            (
                "blocks of C",
                f"{self.block_count} of {self.bm}×{self.bn}, each in {self.panel_count} "
                f"{'panel' if self.panel_count == 1 else 'panels'} of "
                f"{'up to ' if self.growth > 1 else ''}{self.bk}"
                f"{'; those of A stay on the device' if self.resident else ''}",
            ),
            *(
                [("workers", f"{self.budget.workers}, each with this much memory")]
                * (self.budget.workers > 1)
            ),
            ("chunks of C", f"{c.chunk_rows}×{c.chunk_cols}, {_mib(c.chunk_bytes)}"),
            (
                "read",
                f"{_mib(self.bytes_read)} (the {hold} {_mib(inputs)})",
            ),
            *([("cache", self._cache_words())] if self.cache_slots else []),
            ("written", _mib(self.bytes_written)),
            ("lower bound", f"{_mib(bound)}; this plan moves {moved / max(1, bound):.2f} times that"),
            ("predicted", f"{self.predicted_seconds:.2f} s, most of it {slowest}"),
            *([("rates", self.used_rates.note)] if self.used_rates.note else []),
        ]
        rows += [("layout", self.advice)] if self.advice else []
        for title, ledger, limit in (
            ("host memory", self.ledger, self.budget.host),
            ("device memory", self.device_ledger, self.budget.device),
        ):
            if limit is not None:
                rows.append((title, f"{_mib(sum(ledger.values()))} of {_mib(limit)}"))
                rows += [(f"  {name}", _mib(size)) for name, size in ledger.items() if size]
        width = max(len(name) for name, _ in rows) + 2
        return "\n".join(f"{name:<{width}}{_wrapped(value, width)}" for name, value in rows)

    def _cache_words(self) -> str:
        size, order = _mib(self.cache_slots * self.slot_bytes), "columns" if self.by_columns else "rows"
        return f"{size} of host memory keeps what is used again soonest; blocks go by {order}"

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON types."""
        keys = [
            *("bm", "bn", "bk", "panel_buffers", "c_buffers", "readers", "writers", "slots", "slot_bytes"),
            *("cache_slots", "by_columns"),
            *("bytes_read", "bytes_written", "bytes_uploaded", "bytes_downloaded", "lower_bound_bytes"),
            *("ledger", "device_ledger", "stage_seconds", "predicted_seconds", "advice"),
        ]
        out = {key: getattr(self, key) for key in keys}
        p, c = self.problem, self.problem.c
        out.update(kernel=self.problem.kernel, symmetric=self.problem.symmetric)
        out.update(out_dtype=p.types[2])
        out.update(rates=self.used_rates.note, resident=self.resident)
        out.update(blocks=self.block_count, panels=self.panel_count, chunks=[c.chunk_rows, c.chunk_cols])
        out.update(host_bytes=self.host_bytes, device_bytes=self.device_bytes)
        out.update(memory_limit=self.budget.host, device_memory_limit=self.budget.device)
        return out


def _type_words(p: Problem) -> str:
    """C's type, where it comes from, and what becomes of a result that it cannot hold."""
    a, b, c = p.types
    if "int" in c:
        beyond = "sums are exact, and one that does not fit is an error"
    elif c == "float16":
        beyond = "sums are kept in float32, and one past 65504 becomes infinite"
    else:
        beyond = ""
    return "; ".join(filter(None, [f"{c}, of {a} · {b}", beyond]))


Side = tuple[Matrix, tuple[int, int], tuple[int, int]]
"""A stored matrix, and the rows and columns of it that are meant."""


def _sides(p: Problem, row: tuple[int, int], col: tuple[int, int], k: tuple[int, int]) -> dict[str, Side]:
    """Where a pair of panels lies in the stored matrices."""
    a, b = ((row, k), (k, col))
    return {
        "a": (p.a, *(a[::-1] if p.a.transposed else a)),
        "b": (p.b, *(b[::-1] if p.b.transposed else b)),
    }


def _places(p: Problem, bm: int, bn: int, by_columns: bool) -> Iterator[tuple[int, int]]:
    """Block rows and columns of C in the order in which they are made: there and back. Of a symmetric C row
    by row, each leftwards from the diagonal and then its diagonal block, so that all share a panel with
    the one before."""
    down, across = ceil_div(p.m, bm), ceil_div(p.n, bn)
    if p.symmetric:
        for i in range(down):
            for j in (*reversed(range(i)), i):
                yield i, j
        return
    outer, inner = (across, down) if by_columns else (down, across)
    for i in range(outer):
        for j in range(inner) if i % 2 == 0 else reversed(range(inner)):
            yield (j, i) if by_columns else (i, j)


def count_blocks(p: Problem, bm: int, bn: int) -> int:
    """How many blocks C is made in."""
    down, across = ceil_div(p.m, bm), ceil_div(p.n, bn)
    return down * (down + 1) // 2 if p.symmetric else down * across


_Unit = tuple[str, int, int]
"""A panel, as the cache sees it: its matrix, its number down or across C, its number along k."""
_NOTHING = "", 0, 0
"""The panel of op(B) of a block on the diagonal."""


def _unit(plan: Plan, unit: _Unit) -> Iterator[Piece]:
    """The pieces that fill a panel."""
    (operand, strip, number), p = unit, plan.problem
    row, col = (
        (strip * step, min((strip + 1) * step, extent)) for step, extent in ((plan.bm, p.m), (plan.bn, p.n))
    )
    return cut(operand, *_sides(p, row, col, plan._panels[number])[operand], plan.slot_bytes)


def _visits(plan: Plan) -> list[tuple[_Unit, list[int]]]:
    """Every panel in the order of the schedule, op(A)'s before op(B)'s, and what reading its pieces would
    move from the store: bytes of the first, of the first two, and so on."""
    symmetric = plan.problem.symmetric
    nothing = [(_NOTHING, list[int]())] * plan.panel_count

    @cache
    def strip(operand: str, at: int) -> list[tuple[_Unit, list[int]]]:
        s = plan.problem.a if operand == "a" else plan.problem.b
        units = [(operand, at, number) for number in range(plan.panel_count)]
        return [(unit, list(accumulate(_moved(s, piece) for piece in _unit(plan, unit)))) for unit in units]

    pairs = (
        zip(
            strip("a", i) if plan.brings_a(index) else nothing,
            nothing if symmetric and i == j else strip("a" if symmetric else "b", j),
            strict=True,
        )
        for index, (i, j) in enumerate(plan._places)
    )
    return list(chain.from_iterable(chain.from_iterable(pairs)))


def with_cache(plan: Plan, slots: int) -> Plan:
    """The plan with what a cache of up to so many slots finds, and no more of them than that takes."""
    panels = _visits(plan)
    visits = [(unit, len(sizes)) for unit, sizes in panels]
    found = reuse.hits(visits, slots)
    kept = reuse.kept(visits, found)
    slots = reuse.most_kept(found, kept)
    saved = sum(sizes[count - 1] for (_, sizes), count in zip(panels, found, strict=True) if count)
    ledger = plan.ledger | {"cache": slots * plan.slot_bytes}
    bytes_read = plan.bytes_read - saved
    return replace(plan, found=found, kept=kept, cache_slots=slots, ledger=ledger, bytes_read=bytes_read)


def _moved(s: Matrix, piece: Piece) -> int:
    """Bytes that reading a piece moves from the store."""
    width, total = piece.span[1] - piece.span[0], 0
    for i, row, row_stop in overlaps(*piece.rows, s.chunk_rows):
        stored = s.chunk_bytes if s.stored is None else s.stored[i * s.grid[1] + piece.chunk[1]]
        total += stored if s.whole or not stored else (row_stop - row) * width * s.itemsize
    return total


EARLY_STRIPS = 8
"""Strips of rows, at most, in which a block is finished: each leaves while the next one is made."""

DIAGONAL_STRIPS = 16
"""Strips of rows in which a block on the diagonal is made, each up to the diagonal: 17/32 of its products."""


def panel_elements(p: Problem, bm: int, bn: int, bk: int) -> tuple[int, int]:
    """Elements of a panel of op(A) and of one of op(B), the padding of their rows included."""
    a_along_k, b_along_k = p.panels_along_k
    return (
        bm * round_up(bk, p.pitch) if a_along_k else bk * round_up(bm, p.pitch),
        bn * round_up(bk, p.pitch) if b_along_k else bk * round_up(bn, p.pitch),
    )


def check_bytes(p: Problem, bm: int, bn: int, bk: int) -> tuple[int, int]:
    """What the check of a block holds: sums that a verdict is made of (`check.Sums`), and vectors."""
    if not p.check_itemsize:
        return 0, 0
    return bm * (3 * p.check_itemsize + 16) + bk * 8, (bn + bk) * p.check_itemsize


def uploaded_again(p: Problem, budget: Budget, off: int, on: int) -> int:
    """Bytes that go to several devices beside each piece once: `off` columns of op(B)'s panels to those that
    cannot take them from another, `on` such columns, that are op(A)'s rows, to one or all."""
    others = len(budget.weights) - 1
    apart = 0 if budget.linked else others
    itemsize = p.a.itemsize if p.symmetric else p.b.itemsize
    return p.k * itemsize * (off * apart + on * (apart + 1)) if others else 0


def lower_bound_bytes(p: Problem, fast_bytes: int) -> int:
    """Least bytes between store and a fast memory of `fast_bytes` for any schedule of the classical
    algorithm: 2mnk/√S − 2S elements (Smith, Lowery, Langou, van de Geijn, arXiv:1702.02017), of a symmetric
    product m(m − 1)k/√(2S) − 2S (Beaumont, Eyraud-Dubois, Vérité, Langou, SPAA 2022), and never less than
    each input read and C written once."""
    s = max(1.0, fast_bytes / p.panel_itemsize)
    loads = 2.0 * p.m * p.n * p.k / math.sqrt(s)
    inputs = p.a.stored_bytes + p.b.stored_bytes
    if p.symmetric:
        loads = p.m * (p.m - 1.0) * p.k / math.sqrt(2 * s)
        inputs = p.a.stored_bytes
    compulsory = inputs + p.m * p.n * p.c.itemsize
    return max(round((loads - 2.0 * s) * p.panel_itemsize), compulsory)
