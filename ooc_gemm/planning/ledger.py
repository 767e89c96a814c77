"""The ledger: which part of a plan holds how many bytes of the host budget and of the device budget."""

import math
from typing import NamedTuple

from ..support.intervals import band_rows, ceil_div, round_up
from .candidates import Candidate
from .machine import Budget
from .problem import Matrix, MiB, Problem, rows_apart
from .schedule import block_widths
from .teams import ALONE

PAGE = 4096
"""Bytes in which host memory is allocated."""

SUMS = 3
"""Blocks that a worker of a cluster holds where it adds up partial sums: two, and their sum."""

STAGED = 16
"""One in so many bytes of a device's memory may hold pieces that are to be converted."""
STAGED_ALIGN = 512
"""Each of them begins at a multiple of so many bytes."""

DECODED = 5
"""One in so many bytes of a device's memory may hold chunks that it decodes."""
MOST_DECODED = 128
"""Most chunks that a device decodes at a time: the kernels take no more."""
DECODING_ROOM = 3 * MiB
"""Bytes in which a device decodes one part of a chunk, beside what is stored and what becomes of it: 2 MiB
for what is decoded of some blocks of zstd (half a MiB for one, at most), and 1 MiB for a block of blosc."""
DECODED_PART = 2 * MiB
"""Decoded bytes of a part of a chunk that is made of blocks of its own, as those of blosc are."""

DECODING_PADDING = 32
"""Bytes that follow a stored chunk on a device: kernels read whole words."""

Ledger = dict[str, int]
"""Bytes of a budget, by the name of what holds them."""

MOST_EXTENT = 2**28
"""Most rows, columns and depth of what a device with kernels of its own multiplies at a time. Some kernels
count in 32 bits: twice as far for the parts of complex numbers, and again for the two planes of a float32."""


def fits(p: Problem, budget: Budget, x: Candidate) -> bool:
    """Whether a candidate keeps both limits, and the device can multiply blocks and panels of this size."""
    if budget.device is not None:
        if max(x.bm, x.bn, x.panels.deepest) > MOST_EXTENT:
            return False
        if len(budget.weights) == 1 and least_device_bytes(p, x) > budget.device:
            return False
    host, device = ledgers(p, budget, x)
    return sum(host.values()) <= budget.host and (
        budget.device is None or sum(device.values()) <= budget.device
    )


def least_device_bytes(p: Problem, x: Candidate) -> int:
    """Return bytes that a candidate takes of one device at least: panels without padding, and blocks. Much of
    what the search tries takes more than there is, and the ledger takes ten times as long."""
    panels, blocks = x.panels, 1 if x.panels.narrowing else x.c_buffers
    a = min(p.m, panels.rows * x.bm) * p.k if panels.resident else panels.buffers * x.bm * panels.deepest
    b = min(p.n, panels.columns * x.bn) * p.k if panels.columns else panels.buffers * x.bn * panels.deepest
    return (a + b) * p.panel_itemsize + blocks * x.bm * x.bn * p.block_itemsize


def ledgers(p: Problem, budget: Budget, x: Candidate) -> tuple[Ledger, Ledger]:
    """Return every byte of the host budget and of each device's budget, by holder. The second is empty for a
    device that computes in host memory."""
    slot, count = slot_bytes(p, x), len(budget.weights)
    rows = max(band_rows(x.bm, budget.weights, index) for index in range(count))
    host, compute = _host(p, budget, x, slot), _compute(p, budget, x, slot, rows)
    sums, vectors = check_bytes(p, rows, x.bn, x.panels.deepest)
    compute["checks"] = sums + vectors
    lost = x.c_buffers * lost_bytes(x.c, rows, x.bn) if p.narrowed else 0
    compute["workspace"] += lost
    host["write slots"] += count * lost
    if budget.device is None:
        return host | {name: count * size for name, size in compute.items()}, {}
    device = {"baseline": budget.device_baseline} | compute | {"transforms": p.transforms[0]}
    device["reduction"] = x.c_buffers * rows * p.found_bytes + 2 * p.n * p.score_bytes + p.kept_bytes
    return host | {"checks": count * x.c_buffers * sums}, device


def _host(p: Problem, budget: Budget, x: Candidate, slot: int) -> Ledger:
    """Return what reading and writing hold in host memory."""
    c, ring = x.c, x.ring
    chunk = c.chunk_rows * c.chunk_cols
    encoding = chunk * c.itemsize * (c.held if c.whole else int(c.itemsize != p.part_itemsize))
    encoding += c.encodes.bytes_for(c.chunk_bytes)
    read = (p.a, p.b, c) if p.reads_c else (p.a, p.b)
    partial = SUMS * x.bm * x.bn * p.block_itemsize if p.parts > 1 else 0
    handed = ring.readers * slot if x.team != ALONE else 0  # what arrives, or is sent, beside each slot
    return {
        "baseline": budget.host_baseline,
        "read ring": ring.slots * slot,
        "cache": x.cache * slot,
        "decoding": ring.readers * max(s.beside(slot) for s in read),
        "lazy inputs": max(s.apart for s in read),
        "connections": (ring.readers + ring.writers) * budget.connection,
        "write slots": ring.writers * chunk * p.part_itemsize,
        "encoding": ring.writers * encoding,
        "transforms": p.transforms[0] + ring.readers * p.transforms[1],
        "reduction": x.bm * p.row_bytes,
        "finished chunks": finished_bytes(c, budget.chunk),
    } | {name: size for name, size in (("partial sums", partial), ("handed over", handed)) if size}


def finished_bytes(c: Matrix, each: int) -> int:
    """Return what a process holds for all chunks of C until C is stored; 0 where that is so little that the
    baseline, which is rounded up, has room for it. each: bytes for each chunk."""
    nbytes = math.prod(c.grid) * each if each else 0
    return nbytes if nbytes >= MiB else 0


def _compute(p: Problem, budget: Budget, x: Candidate, slot: int, rows: int) -> Ledger:
    """Return what multiplying holds where the device computes. `rows`: those of a block that one device
    computes."""
    bn, bk = x.bn, x.panels.deepest
    widths = block_widths(p, bn, x.panels.narrowing, x.c_buffers)
    a, b = panel_elements(p, rows, bn, bk)
    scratch = a * p.scratch[0] + b * p.scratch[1] + (rows + bn + bk) * p.line_bytes
    if p.turns:
        depth = round_up(bk, p.pitch) * p.panel_itemsize
        lines = zip((rows, bn), p.panels_along_k, strict=True)
        scratch += sum(count * depth for count, along_k in lines if not along_k)
    scratch += rows * bn * p.block_scratch
    if p.symmetric and budget.device is not None:
        scratch += x.c.chunk_rows * x.c.chunk_cols * p.part_itemsize  # where a part is transposed
    if p.once:  # what is known of the lines of panels that stay is remembered
        of_a, of_b = x.panels.staying
        scratch += (of_a * (rows + bk) + of_b * (bn + bk)) * p.line_bytes
    else:  # a kernel may need room to make of such a panel what it would else make in its place
        scratch += (a * x.panels.stay[0] + b * x.panels.stay[1]) * p.panel_itemsize
    return {
        "panels": _panels(p, x, rows) * p.panel_itemsize,
        "C blocks": rows * (sum(widths) + (x.panels.sums - 1) * bn) * p.block_itemsize,
        "workspace": budget.workspace + budget.step + staged_bytes(budget, x.ring.readers, slot) + scratch,
    } | ({"decoding": nbytes} if (nbytes := decoders(p, budget).nbytes) else {})


def _panels(p: Problem, x: Candidate, rows: int) -> int:
    """Return the elements of all buffers for panels. `rows`: those of a block that one device computes."""
    panels, found = x.panels, 0
    depths = panels.depths() if panels.resident else {}
    for at, (operand, each, extent) in enumerate((("a", rows, p.m), ("b", x.bn, p.n))):
        for lines in panels.strips(operand, each, extent):
            sizes = (n * panel_elements(p, lines, lines, depth)[at] for depth, n in depths.items())
            found += sum(sizes)
        if not panels.stay[at]:
            found += panels.buffers * panel_elements(p, each, each, panels.deepest)[at]
    return found


def staged_bytes(budget: Budget, readers: int, slot: int) -> int:
    """Return the bytes of a device's memory for pieces that it converts or transposes: one slot, and where
    threads send pieces on from places of their own as many more as are on their way, within a share of the
    device's memory. `slot`: bytes of a slot."""
    if not budget.staged or budget.device is None:
        return 0
    area = staged_area(slot)
    on_their_way = min(readers, budget.device // STAGED // area) if budget.step and budget.in_memory else 0
    return area * (1 + on_their_way)


class Decoders(NamedTuple):
    """How many chunks a device decodes at a time, and what memory that takes."""

    chunks: int = 0
    """Most chunks that it decodes at a time; 0 where it decodes none."""
    parts: int = 0
    """Most parts of chunks that it decodes at a time, each in DECODING_ROOM bytes."""
    stored: int = 0
    """Bytes for a chunk as it is stored. There are twice as many of these areas as chunks, because others
    arrive while some are decoded."""
    decoded: int = 0
    """Bytes for a chunk when it is decoded, from which its pieces go to panels."""

    @property
    def nbytes(self) -> int:
        """Bytes of the device's memory, with those for the number of chunks that it could not decode."""
        areas = self.chunks * (2 * self.stored + self.decoded)
        return areas + self.parts * DECODING_ROOM + (STAGED_ALIGN if self.chunks else 0)


def decoders(p: Problem, budget: Budget) -> Decoders:
    """Return how many chunks a device decodes at a time: as many as keep it busy, within a share of its
    memory."""
    found = p.encoded
    if not found or not budget.device:
        return Decoders()
    stored = round_up(max(s.largest_stored for s in found) + DECODING_PADDING, STAGED_ALIGN)
    decoded = round_up(max(s.chunk_bytes for s in found), STAGED_ALIGN)
    parts, fewest = max(parts_of(s) for s in found), min(parts_of(s) for s in found)
    most = min(MOST_DECODED, max(1, budget.decodes // fewest))
    chunks = min(most, budget.device // DECODED // (2 * stored + decoded + parts * DECODING_ROOM))
    return Decoders(chunks, min(budget.decodes, chunks * parts), stored, decoded) if chunks else Decoders()


def parts_of(s: Matrix) -> int:
    """Return the parts of a chunk that a device decodes at the same time: some blocks of blosc each, or the
    frame of zstd."""
    return ceil_div(s.chunk_bytes, DECODED_PART) if s.encoded == "blosc" else 1


def staged_area(slot: int) -> int:
    """Return the bytes from one such piece to the next. Each begins where kernels can read elements of any
    type, several at a time."""
    return round_up(slot, STAGED_ALIGN)


def slot_bytes(p: Problem, x: Candidate) -> int:
    """Return the bytes of a slot of the read ring: those of the largest piece of any panel."""
    key = x.bm, x.bn, x.panels.deepest, x.ring.cap, x.c.chunk_rows, x.c.chunk_cols
    found = p.slots.get(key)
    if found is None:
        cut = [(p.a, *x.a_steps(p)), (p.b, *x.b_steps(p))]
        if p.reads_c:
            cut.append((x.c, x.bm, x.bn))
        found = max(1, *(piece_bytes(s, rows, cols, x.ring.cap) for s, rows, cols in cut))
        p.slots[key] = found
    return found


def piece_bytes(s: Matrix, rows: int, cols: int, cap: int) -> int:
    """Return the bytes of the largest piece of rows × cols of S, cut at `cap` bytes between rows where that
    is possible."""
    rows, cols = min(rows, s.chunks_of_piece(cap, cols) * s.chunk_rows), min(cols, s.chunk_cols)
    if s.whole:
        return rows * cols * s.itemsize
    line = (cols if rows_apart(s.chunk_cols, cols, s.skipped) else s.chunk_cols) * s.itemsize
    return max(line, min(rows * line, cap))


def panel_elements(p: Problem, bm: int, bn: int, bk: int) -> tuple[int, int]:
    """Return the elements of a panel of op(A) and of a panel of op(B), with the padding of their rows."""
    a_along_k, b_along_k = p.panels_along_k
    return (
        bm * round_up(bk, p.pitch) if a_along_k else bk * round_up(bm, p.pitch),
        bn * round_up(bk, p.pitch) if b_along_k else bk * round_up(bn, p.pitch),
    )


LOST_BYTES = 24
"""Bytes in which a device counts what C's type does not hold of a chunk."""


def lost_bytes(c: Matrix, bm: int, bn: int) -> int:
    """Return the bytes in which a device that narrows C counts what C's type does not hold of a block."""
    chunks = (bm // c.chunk_rows + 2) * ceil_div(bn, c.chunk_cols)  # a band may begin within a chunk
    return round_up(chunks * LOST_BYTES, PAGE)


def check_bytes(p: Problem, bm: int, bn: int, bk: int) -> tuple[int, int]:
    """Return the bytes that the check of a block holds: the sums for a verdict (`check.Sums`), and
    vectors."""
    if not p.check_itemsize:
        return 0, 0
    return bm * (3 * p.check_itemsize + 16) + bk * 8, (bn + bk) * p.check_itemsize
