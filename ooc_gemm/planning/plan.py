"""A plan: a frozen schedule, which `search` chooses.

Nothing here touches a store or a device; everything is integers, and a `Plan` can be printed,
iterated twice and checked:

    for block in plan.blocks():                     # every element of C once
        for panel in plan.panels():                 # every k once
            for piece in plan.pieces(block, panel): # every byte of both panels once
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain, islice
from typing import Any

from ..support import shown
from ..support.intervals import band_edges, band_of, overlaps
from . import cache as belady
from . import report
from .candidates import shares_pieces
from .chunk_set import Chunk, ChunkSet
from .machine import Budget, Rates
from .panels import Panels
from .problem import Problem
from .schedule import (
    Block,
    Part,
    Piece,
    block_widths,
    column_edges,
    count_blocks,
    cut,
    cuts,
    places,
    sides,
)
from .strips import NOTHING, Strips, Visit
from .teams import ALONE, Shape
from .traffic import Traffic, piece_read_bytes, uploaded_bytes


@dataclass(frozen=True, repr=False)
class Plan:
    """A frozen schedule. All sizes in bytes, all times in seconds."""

    problem: Problem
    budget: Budget
    bm: int
    """Rows of a block of C; the last blocks may have fewer."""
    bn: int
    """Columns of a block of C; the last blocks may have fewer."""
    k_panels: Panels
    """How k is cut, and for how many panels the device has room."""
    c_buffers: int
    """Blocks of C on the device: with two, one is written back while the other is computed."""
    readers: int
    """Number of reader threads."""
    writers: int
    """Number of writer threads."""
    slots: int
    """Number of slots of the read ring."""
    slot_bytes: int
    """Bytes of one slot of the read ring; each writer has one more, of one chunk of C."""
    by_columns: bool
    """Whether blocks are made column by column of C, or row by row. Either way every second column or row is
    walked backwards (serpentine), so that the panel at a turn is used twice in a row."""
    lower_bound_bytes: int
    """Least bytes any schedule moves between store and fast memory of this size, that of all workers:
    max(2mnk/√S − 2S, mk + kn + mn) elements (Smith et al., arXiv:1702.02017)."""
    bytes_read: int
    bytes_written: int
    bytes_uploaded: int
    bytes_downloaded: int
    ledger: dict[str, int]
    """Bytes of the host budget, by what holds them."""
    device_ledger: dict[str, int]
    """Bytes of each device's budget, by what holds them."""
    stage_seconds: dict[str, float]
    """Predicted seconds that each stage is busy."""
    predicted_seconds: float
    used_rates: Rates = field(repr=False)
    """The rates with which seconds are predicted."""
    starting_seconds: float = 0.0
    """How many of the predicted seconds a process that has not used its device takes to make it ready."""
    team: Shape = ALONE
    """Rows and columns of blocks that workers of a cluster make at the same time. They read each piece once,
    and hand it to each other."""
    bytes_exchanged: int = 0
    """Bytes of pieces that workers of a cluster get from each other instead of the store."""
    cache_slots: int = 0
    """Additional slots for pieces that stay in host memory until their next use."""
    found: tuple[int, ...] = field(default=(), repr=False)
    """For each panel of op(A) and op(B) in the order of the schedule: how many of its first pieces are found
    in host memory. Empty: none ever."""
    kept: tuple[int, ...] = field(default=(), repr=False)
    """For each of these panels, how many of its first pieces stay in host memory."""
    advice: str | None = None
    """Advice on the inputs' chunks (`layouts`); None where there is none."""
    done: Set[Chunk] = field(default=frozenset(), repr=False)
    """Chunks of C that are finished already. A block is left out if all of its chunks are."""

    @property
    def bk(self) -> int:
        """Depth of a panel along k; of the deepest where panels grow."""
        return self.k_panels.deepest

    @property
    def panel_buffers(self) -> int:
        """Number of buffers for panels of op(B): one is filled while another is multiplied."""
        return self.k_panels.b_buffers

    def rooms(self) -> dict[str, list[tuple[int, int]]]:
        """Return the lines (rows of op(A), columns of op(B)) and the depth for which each buffer of `a`, and
        of `b`, has room."""
        sides = ("a", self.bm, self.problem.m), ("b", self.bn, self.problem.n)
        return {name: self.k_panels.rooms(name, each, extent) for name, each, extent in sides}

    def block_rooms(self) -> tuple[int, ...]:
        """Return for how many columns each buffer for a block of C has room."""
        return block_widths(self.problem, self.bn, self.k_panels.narrowing, self.c_buffers)

    def c_buffer(self, block: Block) -> int:
        """Return the number of the buffer in which a block is made."""
        if self.k_panels.narrowing:  # the rest of a run has other numbers, and buffers differ in width
            return (bisect_right(self._edges, block.col) - 1) % self.c_buffers
        return block.index % self.c_buffers

    @property
    def host_bytes(self) -> int:
        """Host memory in bytes that the plan takes: the sum of its ledger."""
        return sum(self.ledger.values())

    @property
    def device_bytes(self) -> int:
        """Memory in bytes that the plan takes on each device: the sum of its ledger."""
        return sum(self.device_ledger.values())

    @property
    def block_count(self) -> int:
        """Number of blocks that are made."""
        if self.done:
            return len(self._places)
        return count_blocks(self.problem, self.bm, self.bn, self.k_panels.narrowing)

    @cached_property
    def flops(self) -> int:
        """Number of operations of the blocks that are made."""
        p = self.problem
        return sum(block.flops(p.k) for block in self.blocks()) if self.done else p.flops

    @property
    def panel_count(self) -> int:
        """Number of pairs of panels in each block."""
        return len(self.k_panels)

    def brings(self, index: int) -> tuple[bool, bool]:
        """Whether a block uploads its panels of op(A), and those of op(B), because they are not on the device
        yet. `index`: the number of the block."""
        return self._brought[index] if self.k_panels.resident else (True, True)

    @cached_property
    def _brought(self) -> list[tuple[bool, bool]]:
        found, rows, columns = list[tuple[bool, bool]](), self.k_panels.rows, self.k_panels.columns
        of_a, of_b = dict[int, int](), dict[int, int]()  # which row, or column, the buffers hold
        for i, j in self._places:
            found.append((of_a.get(i % rows) != i, not columns or of_b.get(j % columns) != j))
            of_a[i % rows] = i
            if columns:
                of_b[j % columns] = j
        return found

    def pair(self, step: int) -> tuple[int, int]:
        """Return the numbers of the buffers that hold the panels of op(A) and of op(B) of a step: a pair of
        panels of a block. Steps are numbered in the order in which they are multiplied."""
        index, number = self.at(step)
        return self.k_panels.pair(self._places[index], number, step)

    def at(self, step: int) -> tuple[int, int]:
        """Return the number of the block of a step, and the number of its panels along k."""
        if step < self._interleaved * self.panel_count:
            number, index = divmod(step, self._interleaved)
            return index, number
        return divmod(step, self.panel_count)

    @cached_property
    def _interleaved(self) -> int:
        """Number of first blocks that are made at the same time. In the rest of a run these are others, and
        they are made one by one if they would need the same buffers for different panels."""
        panels = self.k_panels
        first = self._places[: panels.interleaved]
        if len(first) < 2:
            return 1
        for lines, count in zip(zip(*first, strict=True), (panels.rows, panels.columns), strict=True):
            if len({line % count for line in lines}) < len(set(lines)):
                return 1
        return len(first)

    def together(self) -> Iterator[list[Block]]:
        """Yield blocks in order, those that are made at the same time in one list."""
        blocks = self.blocks()
        if first := list(islice(blocks, self._interleaved)):
            yield first
        yield from ([block] for block in blocks)

    def blocks(self) -> Iterator[Block]:
        """Yield blocks that cover every unfinished element of C exactly once; for a symmetric C, those on and
        below the diagonal."""
        last = self.block_count - 1
        blocks = (self._block(index, i, j) for index, (i, j) in enumerate(self._places))
        return (replace(block, last=block.index == last) for block in blocks)

    def groups(self) -> list[list[Block]]:
        """Return the blocks that are made, in order, in groups that a team makes at the same time."""
        found = dict[tuple[int, int], list[Block]]()
        for block in self.blocks():
            group = block.row // self.bm // self.team[0], block.col // self.bn // self.team[1]
            found.setdefault(group, []).append(block)
        return list(found.values())

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        """Block row and block column of each block, in order."""
        panels = self.k_panels
        found = places(
            self.problem, self.bm, self.bn, self.by_columns, panels.narrowing, together=panels.columns
        )
        return [place for place in found if not self.done or any(self.parts(self._block(0, *place)))]

    def _block(self, index: int, i: int, j: int) -> Block:
        row, (col, stop) = i * self.bm, self._edges[j : j + 2]
        rows = min(self.bm, self.problem.m - row)
        return Block(index, row, rows, col, stop - col, diagonal=self.problem.symmetric and i == j)

    @cached_property
    def _edges(self) -> tuple[int, ...]:
        return column_edges(self.problem, self.bn, self.k_panels.narrowing)

    def panels(self) -> Iterator[tuple[int, int]]:
        """Yield the k ranges of a block, in order: every k exactly once."""
        return iter(self.k_panels)

    @property
    def shares_pieces(self) -> bool:
        """Whether each piece of op(A) is also one of op(B), and is read once for both."""
        return shares_pieces(self.problem, self.k_panels)

    def pieces(self, block: Block, panel: tuple[int, int]) -> Iterator[Piece]:
        """Yield the pieces that fill one pair of panels: on the diagonal op(A)'s alone, and none of a panel
        that is on the device."""
        p, matrix = self.problem, "a" if self.problem.symmetric else ""
        row, col = (block.row, block.row + block.rows), (block.col, block.col + block.cols)
        pair = block.index * self.panel_count + bisect_right(self.k_panels.ranges, panel) - 1
        brings = self.brings(block.index)
        for number, (operand, side) in enumerate(sides(p, row, col, panel).items()):
            s, rows, cols = side
            if (operand == "b" and block.diagonal) or not brings[number]:
                continue
            found, kept = (x[2 * pair + number] if x else 0 for x in (self.found, self.kept))
            along_b = operand == "b"
            edges = cuts(p, operand, side, self.budget.weights)
            pieces = cut(operand, s, rows, cols, self.slot_bytes, found, kept, matrix, edges)
            even = along_b or block.diagonal  # op(B)'s panel is sent, and bands of op(A) are copied from it
            pieces = self._in_turns(pieces, int(s.transposed != along_b), even)
            yield from (piece._replace(both=True) for piece in pieces) if block.diagonal else pieces

    def _in_turns(self, pieces: Iterator[Piece], axis: int, even: bool) -> Iterator[Piece]:
        """Yield the pieces of several devices' bands in turns, so that all devices receive data at the same
        time. `even`: all bands are equally wide, whatever the devices."""
        weights = (1,) * len(self.budget.weights) if even else self.budget.weights
        if len(weights) == 1:
            return pieces

        def depth(piece: Piece) -> tuple[int, int]:
            return band_of(piece.into[axis], piece.panel[axis], weights)[1], piece.into[1 - axis]

        return iter(sorted(pieces, key=depth))

    def block_pieces(self, block: Block) -> Iterator[Piece]:
        """Yield the pieces that fill a block with the old C (β ≠ 0)."""
        if self.problem.reads_c:
            row, col = (block.row, block.row + block.rows), (block.col, block.col + block.cols)
            edges = band_edges(row, self.budget.weights)
            pieces = cut("c", self.problem.c, row, col, self.slot_bytes, edges=edges)
            yield from self._in_turns(pieces, 0, even=False)

    def parts(self, block: Block) -> Iterator[Part]:
        """Yield the unfinished chunks of C that a block and its mirror image make. Each is whole, because
        block edges are chunk edges. The parts of several devices' bands come in turns, so that all devices
        send data at the same time. Those of a block on the diagonal come from below, where it is finished
        first. Of a block that its device reduces there is one part for each row of chunks: the first of them
        stands for all."""
        upwards = block.diagonal and not self.problem.found_bytes
        parts = self._parts((block.row, block.rows), (block.col, block.cols), False, upwards)
        if self.problem.symmetric and not block.diagonal:
            turned = self._parts((block.col, block.cols), (block.row, block.rows), mirrored=True)
            parts = chain(parts, turned)
        weights = self.budget.weights
        if len(weights) == 1:
            return parts

        def depth(part: Part) -> tuple[bool, int]:
            row = part.col if part.mirrored else part.row
            return part.mirrored, band_of(row, block.rows, weights)[1]

        return iter(sorted(parts, key=depth))

    def _parts(
        self, down: tuple[int, int], across: tuple[int, int], mirrored: bool, upwards: bool = False
    ) -> Iterator[Part]:
        """Yield the parts of a block that covers (first row, rows) and (first column, columns) of C."""
        c = self.problem.c
        lines = list(overlaps(down[0], sum(down), c.chunk_rows))
        for i, row, row_stop in reversed(lines) if upwards else lines:
            for j, col, col_stop in overlaps(across[0], sum(across), c.chunk_cols):
                size = row_stop - row, col_stop - col
                if (i, j) in self.done:
                    continue
                yield Part((i, j), row - down[0], col - across[0], *size, mirrored)
                if self.problem.found_bytes:
                    break

    def all_but(self, blocks: Iterable[Block]) -> ChunkSet:
        """Return all chunks of C but those that some blocks make."""
        chunks = (part.chunk for block in blocks for part in self.parts(block))
        return ChunkSet(self.problem.c.grid, chunks, inverted=True)

    def without(self, done: Set[Chunk]) -> "Plan":
        """Return the same plan without blocks whose chunks of C are all done. Bytes and seconds are those of
        what is left."""
        left = replace(self, done=done, found=(), kept=())
        share = left.flops / self.flops if self.flops else 0.0
        moved = left._traffic()
        left = replace(
            left,
            bytes_read=moved.read,
            bytes_written=moved.written,
            bytes_uploaded=moved.uploaded,
            bytes_downloaded=moved.downloaded,
            bytes_exchanged=moved.exchanged,
            stage_seconds={stage: seconds * share for stage, seconds in self.stage_seconds.items()},
            predicted_seconds=(self.predicted_seconds - self.starting_seconds) * share
            + self.starting_seconds,
        )
        return left.with_cache(self.cache_slots) if self.cache_slots else left

    def within(self, start: int, stop: int) -> "Plan":
        """Return the plan of the same blocks for one range of k (`Problem.k_ranges`) alone. Its bytes and
        seconds are those of all of k."""
        k_panels = replace(self.k_panels, k=stop - start)
        return replace(self, problem=self.problem.within(start, stop), k_panels=k_panels, found=(), kept=())

    def _traffic(self) -> Traffic:
        """Count the bytes that the blocks move without a cache, block by block."""
        if self.problem.parts > 1:
            each = [self.within(*k)._traffic() for k in self.problem.k_ranges]
            all_of = Traffic(*map(sum, zip(*each, strict=True)))
            return all_of._replace(written=each[0].written)
        p, blocks = self.problem, list(self.blocks())
        count, elements, lines = 0, 0, set[tuple[int, int]]()
        fetched = Counter[str]()  # bytes, by the stored matrix
        for block in blocks:
            for part in self.parts(block):
                count, elements = count + 1, elements + part.rows * part.cols
                if p.found_bytes:
                    lines.add((part.chunk[0], part.rows))  # the same for all blocks of a row
        old = sum(piece_read_bytes(p.c, piece) for block in blocks for piece in self.block_pieces(block))
        written = count * p.c.chunk_bytes if p.c.chunked else elements * p.c.itemsize
        if self.team == ALONE:
            for (name, *_), sizes in self._visits():
                fetched[name] += sizes[-1] if sizes else 0
            read, exchanged = fetched.total(), 0
        else:
            read, exchanged = self._strips.read_in_teams(self.groups())
        if self.budget.device is None:
            return Traffic(read + old, written, 0, 0, exchanged)
        rows_of_a = sum(block.rows for block in blocks if self.brings(block.index)[0])
        off = [block for block in blocks if not block.diagonal and self.brings(block.index)[1]]
        uploaded = uploaded_bytes(p, self.budget, blocks, rows_of_a, sum(block.cols for block in off))
        uploaded += self._encoded_bytes(fetched, rows_of_a, sum(block.cols for block in off))
        downloaded = elements * p.part_itemsize
        if p.found_bytes:
            downloaded = sum(rows for _, rows in lines) * p.found_bytes
        return Traffic(read + old, written, uploaded, downloaded, exchanged)

    def _encoded_bytes(self, sent: Counter[str], rows_of_a: int, cols_of_b: int) -> int:
        """Return how many more bytes are uploaded of operands that the device decodes than their elements
        take: usually a negative number. sent: bytes of each stored matrix, as it is stored. rows_of_a,
        cols_of_b: rows of op(A) and columns of op(B) that are uploaded."""
        p = self.problem
        elements = {"a": p.k * rows_of_a, "b": p.k * cols_of_b}
        if p.symmetric:
            elements = {"a": sum(elements.values())}
        return sum(
            sent[name] - count * s.itemsize
            for (name, count), s in zip(elements.items(), (p.a, p.b), strict=False)
            if s.encoded
        )

    def with_cache(self, slots: int) -> "Plan":
        """Return the plan with a cache of up to so many slots, and of no more than it uses."""
        panels = self._visits()
        visits = [(unit, len(sizes)) for unit, sizes in panels]
        found = belady.hits(visits, slots)
        kept = belady.kept(visits, found)
        slots = belady.most_kept(found, kept)
        saved = sum(sizes[count - 1] for (_, sizes), count in zip(panels, found, strict=True) if count)
        ledger = self.ledger | {"cache": slots * self.slot_bytes}
        bytes_read = self.bytes_read - saved
        return replace(self, found=found, kept=kept, cache_slots=slots, ledger=ledger, bytes_read=bytes_read)

    @property
    def _strips(self) -> Strips:
        sizes = self.bm, self.bn, self._edges, self.slot_bytes
        return Strips(self.problem, self.k_panels, *sizes, self.budget.weights)

    def _visits(self) -> list[Visit]:
        """Return every panel that is read, in the order of the schedule, op(A)'s before op(B)'s."""
        symmetric = self.problem.symmetric
        nothing = [NOTHING] * self.panel_count
        strip = cache(self._strips.panels)
        pairs = (
            zip(
                strip("a", i) if brings_a else nothing,
                strip("a" if symmetric else "b", j) if brings_b and not (symmetric and i == j) else nothing,
                strict=True,
            )
            for index, (i, j) in enumerate(self._places)
            for brings_a, brings_b in (self.brings(index),)
        )
        if self.shares_pieces:
            return [panel_of_a for pair in pairs for panel_of_a, _ in pair]
        return list(chain.from_iterable(chain.from_iterable(pairs)))

    def __repr__(self) -> str:
        """Return the size of the product and of its blocks, the kernel and the predictions."""
        p = self.problem
        return (
            f"Plan(m={p.m}, n={p.n}, k={p.k}, bm={self.bm}, bn={self.bn}, bk={self.bk}, "
            f"blocks={self.block_count}, kernel={p.kernel.partition(':')[0]!r}, "
            f"predicted_seconds={self.predicted_seconds:.3g}, bytes_read={self.bytes_read}, "
            f"bytes_written={self.bytes_written}, host_bytes={self.host_bytes}, "
            f"device_bytes={self.device_bytes})"
        )

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        return shown.table(
            "Plan", report.rows(self.to_dict(), self.problem, self.budget, self.k_panels.growth > 1)
        )

    def __str__(self) -> str:
        """Return the plan as a table, as `table` does."""
        return self.table()

    def table(self) -> str:
        """Return lines that say what the plan computes, what it moves, how long that takes, and who holds the
        memory."""
        return report.table(self.to_dict(), self.problem, self.budget, self.k_panels.growth > 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON types: bytes, seconds, and numbers of elements."""
        p, budget = self.problem, self.budget
        return {key: getattr(self, key) for key in _NUMBERS} | {
            "kernel": p.kernel,
            "symmetric": p.symmetric,
            "out_dtype": p.types[2],
            "bytes_read_estimated": p.estimated,
            "rates": self.used_rates.note,
            "resident": self.k_panels.resident,
            "columns_resident": self.k_panels.columns,
            "interleaved": self._interleaved,
            "lanes": self.k_panels.lanes,
            "team": list(self.team),
            "blocks": self.block_count,
            "k_ranges": len(p.k_ranges),
            "panels": self.panel_count,
            "chunks": [p.c.chunk_rows, p.c.chunk_cols],
            "host_bytes": self.host_bytes,
            "device_bytes": self.device_bytes,
            "memory_limit": budget.host,
            "device_memory_limit": budget.device,
        }


_NUMBERS = (
    *("bm", "bn", "bk", "panel_buffers", "c_buffers", "readers", "writers", "slots", "slot_bytes"),
    *("cache_slots", "by_columns", "lower_bound_bytes"),
    *("bytes_read", "bytes_written", "bytes_uploaded", "bytes_downloaded", "bytes_exchanged"),
    *("ledger", "device_ledger", "stage_seconds", "predicted_seconds", "starting_seconds", "advice"),
)
"""Fields and properties of a plan that its JSON has under the same names."""
