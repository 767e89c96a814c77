"""Which plan: the one of least predicted time that fits.

Candidates are block and panel sizes, rings and layouts of C; each has a ledger of what it holds, and seconds
from bytes and rates. Nothing is tried out but the schedule of a cache.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import wraps
from itertools import product
from typing import TypeVar, cast

from ..support.errors import BudgetError
from ..support.intervals import LEAST_GROWN, band_rows, ceil_div, growing_panels, round_up, touches
from .plan import (
    DIAGONAL_STRIPS,
    EARLY_STRIPS,
    Plan,
    check_bytes,
    count_blocks,
    lower_bound_bytes,
    panel_elements,
    uploaded_again,
    with_cache,
)
from .problem import CHUNK_BYTES, Budget, Matrix, MiB, Problem, Rates, rows_apart

T = TypeVar("T")

MAX_VISITS = 200_000
"""Panels visited in a schedule, up to which a cache is planned: the simulation takes 1 µs each, and more of
them means blocks so small that there is no memory for a cache either."""

BUSY_READERS = 4
"""Reader threads that a disk needs to give what it can."""

HIDDEN_COST = 0.12
"""What a second of a stage that another hides is worth, in seconds: others use the disk and the bus too. Of a
symmetric product twice that: square blocks come in few sizes, and the next smaller one, for a few percent of
the time, would read half as much again."""

LEAST_CACHE_SLOTS = 8
"""Fewer are not worth a cache."""

TOO_SLOW = 1.5
"""Blocks that take so many times what others take. Where all of C fits, with several panels, lower ones are
not tried: they read more, and what is written while others are made soon makes no difference."""

PANEL_BUFFERS = 2
"""Pairs of panels: one is filled while the other is multiplied."""

RESIDENT_BUFFERS = 4
"""Panels of op(B) where those of op(A) stay: small ones, and with only two of them readers stop at each."""

READY_AGAIN = 300
"""Columns of a block whose products take as long as to make a panel of op(A) ready once more (fp16x3, H200:
three times its bytes pass through the memory of the device)."""

WORTH_KEEPING = 0.97
"""What op(A) on the device must save to stay there: of the time without."""

WIDTHS_TRIED = 8
"""Of blocks for which op(A) stays on the device."""

MIN_DEPTH, MAX_DEPTH = 256, 8192
"""Thinnest panel tried: thinner ones save a few MiB and cost many times the reads. And the deepest, but for
chunks that are deeper: C is read and written for each (fp16x3, H200: 6 % of the time; 26 % at 2048)."""

MOST_EXTENT = 2**28
"""Most rows, columns and depth of what a device with kernels of its own multiplies at a time. Some kernels
count in 32 bits: twice as far for the parts of complex numbers, and again for the two planes of a float32."""

GROWTHS = (1.25, 1.5)
"""How much deeper than the one before panels are, where they grow."""


@dataclass(frozen=True)
class _Ring:
    """How many threads and how large a slot at most: the choices, ample first."""

    readers: int
    writers: int
    slots: int
    cap: int


def _rings(budget: Budget) -> list[_Ring]:
    r, w = budget.readers, budget.writers
    ample = (16 * MiB, 4 * MiB) if budget.device is not None else (4 * MiB, 1 * MiB)
    counts = [r]
    while budget.connection and counts[-1] > 4:
        counts.append(counts[-1] // 2)
    share = 1 if budget.connection else 2  # where a request is made again, those behind it need room
    if budget.stacked:  # in memory: the more slots, the fewer are still in the caches of the CPU
        share = 4
    rings = [_Ring(n, max(1, w * n // r), n + max(2, n // share), cap) for n in counts for cap in ample]
    return [*rings, _Ring(min(2, r), 1, 3, 1 * MiB)]


@dataclass(frozen=True)
class _Candidate:
    c: Matrix
    bm: int
    bn: int
    bk: int
    c_buffers: int
    ring: _Ring
    cache: int = 0
    by_columns: bool = False
    growth: float = 1.0
    resident: bool = False


def _slot_bytes(p: Problem, x: _Candidate) -> int:
    """The largest piece of any panel."""
    a, b = p.a, p.b
    panels = [
        (a, x.bk, x.bm) if a.transposed else (a, x.bm, x.bk),
        (b, x.bn, x.bk) if b.transposed else (b, x.bk, x.bn),
    ]
    if p.reads_c:
        panels.append((x.c, x.bm, x.bn))
    return max(1, *(piece_bytes(s, rows, cols, x.ring.cap) for s, rows, cols in panels))


def _once(work: Callable[..., T]) -> Callable[..., T]:
    """A function of a matrix and some numbers, whose results the matrix keeps."""

    @wraps(work)
    def found(s: Matrix, *numbers: int) -> T:
        key = work.__name__, *numbers
        if key not in s.known:
            s.known[key] = work(s, *numbers)
        return cast(T, s.known[key])

    return found


@_once
def piece_bytes(s: Matrix, rows: int, cols: int, cap: int) -> int:
    """The largest piece of rows × cols of S, cut at `cap` where it can be cut (between rows)."""
    rows, cols = min(rows, s.chunks_of_piece(cap) * s.chunk_rows), min(cols, s.chunk_cols)
    if s.whole:
        return rows * cols * s.itemsize
    line = (cols if rows_apart(s.chunk_cols, cols, s.skipped) else s.chunk_cols) * s.itemsize
    return max(line, min(rows * line, cap))


def _ledgers(p: Problem, budget: Budget, x: _Candidate) -> tuple[dict[str, int], dict[str, int]]:
    """Every byte of both budgets, by holder."""
    slot = _slot_bytes(p, x)
    chunk = x.c.chunk_rows * x.c.chunk_cols
    encoding = chunk * x.c.itemsize * (x.c.held if x.c.whole else int(x.c.itemsize != p.block_itemsize))
    encoding += x.c.encodes.bytes_for(x.c.chunk_bytes)
    read = (p.a, p.b, x.c) if p.reads_c else (p.a, p.b)
    host = {
        "baseline": budget.host_baseline,
        "read ring": x.ring.slots * slot,
        "cache": x.cache * slot,
        "decoding": x.ring.readers * max(s.beside(slot) for s in read),
        "lazy inputs": max(s.apart for s in read),
        "connections": (x.ring.readers + x.ring.writers) * budget.connection,
        "write slots": x.ring.writers * chunk * p.block_itemsize,
        "encoding": x.ring.writers * encoding,
    }
    rows = max(band_rows(x.bm, budget.weights, index) for index in range(len(budget.weights)))
    panels = panel_elements(p, rows, x.bn, x.bk)
    scratch = panels[0] * p.scratch[0] + panels[1] * p.scratch[1] + (rows + x.bn + x.bk) * p.line_bytes
    scratch += rows * x.bn * p.block_scratch
    if p.symmetric and budget.device is not None:
        scratch += chunk * p.block_itemsize  # where a part is transposed
    buffers = PANEL_BUFFERS * sum(panels)
    if x.resident:  # a kernel may need room to make of a panel what it would else make in its place
        buffers = ceil_div(p.k, x.bk) * panels[0] + RESIDENT_BUFFERS * panels[1]
        scratch += panels[0] * p.panel_itemsize
    compute = {
        "panels": buffers * p.panel_itemsize,
        "C blocks": x.c_buffers * rows * x.bn * p.block_itemsize,
        "workspace": budget.workspace + (slot if budget.staged else 0) + scratch,
    }
    sums, vectors = check_bytes(p, rows, x.bn, x.bk)
    count = len(budget.weights)
    if budget.device is None:
        here = compute | {"checks": sums + vectors}
        return host | {name: count * size for name, size in here.items()}, {}
    device = {"baseline": budget.device_baseline} | compute | {"checks": sums + vectors}
    return host | {"checks": count * x.c_buffers * sums}, device


def _columns(p: Problem, bm: int, bn: int) -> tuple[int, int]:
    """Columns of all blocks off the diagonal of a symmetric C, and of those on it."""
    down = ceil_div(p.m, bm)
    return (bn * (down * (down - 1) // 2), p.m) if p.symmetric else (down * p.n, 0)


def _fits(p: Problem, budget: Budget, x: _Candidate) -> bool:
    if budget.device is not None and max(x.bm, x.bn, x.bk) > MOST_EXTENT:
        return False
    host, device = _ledgers(p, budget, x)
    return sum(host.values()) <= budget.host and (
        budget.device is None or sum(device.values()) <= budget.device
    )


@dataclass(frozen=True)
class Pass:
    """One pass over an operand, cut as a candidate cuts it: estimates."""

    nbytes: float
    """Moved from the store."""
    decoded: float
    """Of chunks that must be decoded."""
    pieces: float
    calls: float
    """Reads."""


@_once
def one_pass(s: Matrix, row_step: int, col_step: int, slot: int) -> Pass:
    nbytes = s.read_bytes_estimate(row_step, col_step)
    row_touches = touches(s.rows, row_step, s.chunk_rows)
    col_touches = touches(s.cols, col_step, s.chunk_cols)
    count = row_touches * col_touches
    if s.whole:
        return Pass(nbytes, float(count * s.chunk_bytes), count, count)
    cuts = max(1, ceil_div(s.rows * s.cols * s.itemsize, slot * max(1, count)))
    pieces = touches(s.rows, row_step, s.chunks_of_piece(slot) * s.chunk_rows) * col_touches * cuts
    by_rows = rows_apart(s.chunk_cols, min(col_step, s.chunk_cols), s.skipped)
    return Pass(nbytes, 0.0, pieces, s.rows * col_touches if by_rows else count * cuts)


def _found_shares(x: "_Candidate", a: Pass, b: Pass, down: int, across: int) -> tuple[float, float]:
    """Which share of all pieces of A, and of B, a cache finds: an estimate of what `reuse.hits` will say.
    Next block's panel of the operand that stays comes first, then that at the turn, then any."""
    if x.by_columns:
        return _found_shares(replace(x, by_columns=False), b, a, across, down)[::-1]
    strip_a, strip_b = a.pieces / down, b.pieces / across
    found_a = down * (across - 1) * min(x.cache, strip_a)
    spare = max(0.0, x.cache - strip_a - strip_b)
    found_b = (down - 1) * min(b.pieces, min(x.cache, strip_b) + spare)
    return found_a / max(1.0, a.pieces * across), found_b / max(1.0, b.pieces * down)


def _found_share(x: "_Candidate", a: Pass, down: int) -> float:
    """The same of a symmetric product, whose block row i uses its own strip of A i times more, and i others,
    of which the last block row has used all but one."""
    strip = a.pieces / down
    spare = max(0.0, x.cache - 2 * strip)
    found = sum(i * min(x.cache, strip) + min(i * strip, min(x.cache, strip) + spare) for i in range(1, down))
    return found / max(1.0, a.pieces * down)


def _seconds(p: Problem, budget: Budget, rates: Rates, x: _Candidate) -> tuple[dict[str, float], float]:
    """Seconds of each stage, and of the whole: their sum where all share the cores, else the longest of three
    chains and what nothing hides: the last multiplication and the write-back of the last block, which begins
    when the first strip of that is done. Multiplying waits for the first panels; the last multiplication for
    the last reads, which share the store with the writes before; writing for the first block."""
    down, across, deep = ceil_div(p.m, x.bm), ceil_div(p.n, x.bn), ceil_div(p.k, x.bk)
    slot = _slot_bytes(p, x)
    a = one_pass(p.a, *((x.bk, x.bm) if p.a.transposed else (x.bm, x.bk)), slot)
    if p.symmetric:
        sides = [(p.a, a, across, 1 - _found_share(x, a, down) if x.cache else 1.0)]
    else:
        b = one_pass(p.b, *((x.bn, x.bk) if p.b.transposed else (x.bk, x.bn)), slot)
        found = _found_shares(x, a, b, down, across) if x.cache else (0.0, 0.0)
        sides = [(p.a, a, 1 if x.resident else across, 1 - found[0]), (p.b, b, down, 1 - found[1])]
    if p.reads_c:
        sides.append((x.c, one_pass(x.c, x.bm, x.bn, slot), 1, 1.0))
    read = uploaded = handling = first = 0.0
    # A few readers do not keep a disk busy.
    rate = rates.read * (1.0 if rates.shared else min(1.0, x.ring.readers / BUSY_READERS))
    rate, call = min(rate, x.ring.readers * rates.stream), rates.read_seconds + rates.latency / x.ring.readers
    for s, one, times, share in sides:
        moving = one.nbytes / rate + one.decoded / rates.decode + one.calls * call
        read += times * share * moving
        first += moving / (1 if s is p.a else max(1, across))
        handling += times * one.pieces * rates.piece_seconds
        uploaded += times * s.rows * s.cols * s.itemsize
    uploaded += uploaded_again(p, budget, *_columns(p, x.bm, x.bn))
    written = x.c.rows * x.c.cols
    cache = x.cache * slot / rates.touch
    if x.growth > 1:
        deep = len(growing_panels(p.k, x.bk, p.k_chunk, x.growth))
    thin = rates.thin * deep / max(1, p.k) + 64 / x.bm + 64 / x.bn
    thin += READY_AGAIN / x.bn if x.resident else 0.0
    if p.symmetric and len(budget.weights) > 1:  # blocks on the diagonal are made whole
        thin += 1 / max(1, down)
    elif p.symmetric:  # in thin strips whose ends stand out
        thin += (1 + 64 * DIAGONAL_STRIPS / x.bm) / (DIAGONAL_STRIPS * max(1, down))
    stages = {
        # The conductor hands pieces on while the readers read others.
        "read": cache + (read + handling if rates.shared else max(read, handling)),
        "upload": uploaded / rates.upload,
        "compute": p.flops / rates.flops * (1 + thin),
        "download": written * p.block_itemsize / rates.download,
        "write": written * x.c.itemsize / rates.write + math.prod(x.c.grid) * rates.piece_seconds,
    }
    fresh = x.ring.slots * slot + x.ring.writers * x.c.chunk_rows * x.c.chunk_cols * p.block_itemsize
    start = rates.start + fresh / rates.touch
    if rates.shared:
        return stages, start + sum(stages.values())
    if x.growth > 1:
        return stages, start + _growing_seconds(p, rates, x, stages)
    blocks = count_blocks(p, x.bm, x.bn)
    each_read, each_multiply = (stages[name] / max(1, blocks * deep) for name in ("read", "compute"))
    parts = blocks if x.c_buffers > 1 else 1
    last = max(stages["download"], stages["write"]) / max(1, parts)
    strips = 1 if p.check_itemsize else EARLY_STRIPS
    tail = max(each_multiply, last) + min(each_multiply, last) / strips
    hidden = stages["write"] * (1 - 1 / max(1, parts))
    filled = each_read + stages["upload"] / max(1, blocks * deep)
    store = taking_turns(stages["read"], hidden, rates.turns)
    until_tail = max(filled + stages["compute"] - each_multiply, store, each_read + stages["upload"])
    if x.resident:  # the first block waits for all of op(A)
        until_tail = max(until_tail, first + stages["compute"] * (1 - 1 / blocks))
    until_last = max(stages["read"], stages["compute"]) / max(1, blocks) + hidden
    return stages, start + max(until_tail + tail, until_last + last)


def _growing_seconds(p: Problem, rates: Rates, x: _Candidate, stages: dict[str, float]) -> float:
    """The one block of panels that grow: each is read when one of two buffers is free, and multiplied when it
    is there."""
    panels = growing_panels(p.k, x.bk, p.k_chunk, x.growth)
    bringing = max(stages["read"], stages["upload"]) / p.k
    multiplying = stages["compute"] / (p.k + rates.thin * len(panels))
    came = done = before = began = took = 0.0
    for start, stop in panels:
        came = max(came, before) + (stop - start) * bringing
        began, took = max(came, done), (stop - start + rates.thin) * multiplying
        before, done = done, began + took
    leaving, strips = max(stages["download"], stages["write"]), 1 if p.check_itemsize else EARLY_STRIPS
    return max(began + took / strips + leaving, done + leaving / strips)


def _rounds(p: Problem, budget: Budget, x: _Candidate) -> float:
    """The share of a product's time that it takes several workers, of which the busiest decides."""
    blocks = max(1, count_blocks(p, x.bm, x.bn))
    return ceil_div(blocks, budget.workers) / blocks


def taking_turns(read: float, write: float, turns: float) -> float:
    """Seconds of reads and writes that take so long alone and share the store (`Rates.turns`)."""
    return 2 * turns * min(read, write) + abs(read - write)


def steps(extent: int, align: int) -> list[int]:
    """Block sizes to try along an axis, descending: the axis whole, then in 2, 3, … about equal parts,
    each a multiple of `align`."""
    top = max(1, ceil_div(extent, align))
    counts = [*range(1, 13), 14, 16, 20, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 4096, 1 << 14, 1 << 16]
    sizes = {min(extent, ceil_div(top, count) * align) for count in counts if count <= top} | {
        min(extent, align)
    }
    return sorted((max(1, size) for size in sizes), reverse=True)


def _depths(p: Problem) -> list[int]:
    """Panel depths to try: fractions and multiples of both k chunks, powers of two, all of k."""
    k = max(1, p.k)
    chunks = {
        p.a.chunk_rows if p.a.transposed else p.a.chunk_cols,
        p.b.chunk_cols if p.b.transposed else p.b.chunk_rows,
        p.k_chunk,
    }
    depths = {MIN_DEPTH, 512, 1024, 2048, k}
    for chunk in chunks:
        depths.update(chunk * times for times in (1, 2, 4, 8) if chunk * times <= max(MAX_DEPTH, chunk))
        depths.update(ceil_div(chunk, parts) for parts in (2, 4))
    return sorted({min(k, depth) for depth in depths if depth >= min(k, MIN_DEPTH)})


def chunk_side(extent: int, near: float, other: int) -> int:
    """A chunk side of C of about `near`, a multiple or an even part of the operand's chunk side `other`
    where that comes close, so that block edges fall on chunk edges of both."""
    extent = max(1, extent)
    near = max(1, min(extent, round(near)))
    if other <= near:
        return min(extent, near // other * other)
    side = ceil_div(other, ceil_div(other, near))
    if other % side == 0:
        return side
    return min(extent, round_up(ceil_div(extent, ceil_div(extent, near)), 16))


def _outputs(p: Problem) -> list[Matrix]:
    """C as it may be stored: as asked, or new with chunks of the wanted size or, for small budgets, less."""
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


def make_plan(problem: Problem, budget: Budget, rates: Rates) -> Plan:
    """The schedule of least predicted time among those whose ledgers fit both budgets. Chunks of C of
    the wanted size and an ample ring come first: less of either must save 5 % to be taken.

    A symmetric C whose blocks cannot be square and small enough is made as if it were not symmetric.

    Raises BudgetError, with the smallest limit that would do, where none fits.
    """
    x = _best(problem, budget, rates)
    if x is None and problem.symmetric:
        return make_plan(replace(problem, symmetric=False), budget, rates)
    if x is None:
        raise _refusal(problem, budget)
    return _finish(problem, budget, rates, x)


def predict(problem: Problem, budget: Budget, rates: Rates) -> float:
    """Predicted seconds of the plan, without making it; infinite where none fits (with symmetric blocks)."""
    x = _best(problem, budget, rates)
    if x is None:
        return math.inf
    return _seconds(problem, budget, rates, x)[1] * _rounds(problem, budget, x)


def least_seconds(problem: Problem, budget: Budget, rates: Rates) -> float:
    """Predicted seconds with memory without end: no plan is predicted to take less."""
    return _seconds(problem, budget, rates, _everything(problem, budget))[1] / budget.workers


def _best(problem: Problem, budget: Budget, rates: Rates) -> "_Candidate | None":
    stages, ideal = _seconds(problem, budget, rates, _everything(problem, budget))
    ideal = (ideal + _hidden_cost(problem, stages)) / budget.workers
    best: tuple[float, int, _Candidate] | None = None
    for c in _outputs(problem):
        for ring in _rings(budget):
            found = _search(problem, budget, rates, c, ring)
            if found and (best is None or found[0] < 0.95 * best[0]):
                best = found
            if best and best[0] <= 1.05 * ideal:
                return best[2]
    return best[2] if best else None


def _everything(p: Problem, budget: Budget) -> _Candidate:
    """C in one block, and panels so deep that their depth costs nothing: what memory without end allows."""
    return _Candidate(_outputs(p)[0], max(1, p.m), max(1, p.n), max(1, p.k), 1, _rings(budget)[0])


def _hidden_cost(p: Problem, stages: dict[str, float]) -> float:
    """What hides behind the longest stage is still not for nothing."""
    return HIDDEN_COST * (2 if p.symmetric else 1) * sum(stages.values())


def _search(
    p: Problem, budget: Budget, rates: Rates, c: Matrix, ring: _Ring
) -> tuple[float, int, _Candidate] | None:
    """The best block and panel sizes for one ring and one layout of C: (seconds, elements, candidate)."""
    best: tuple[float, int, _Candidate] | None = None
    rows, cols = replace(p, c=c).align
    heights, widths = steps(p.m, rows), steps(p.n, cols)
    for c_buffers in (1,) if budget.device is None else (2, 1):
        for bk in _depths(p):
            whole = False
            for bm in heights:

                def fits(bn: int, bm: int = bm, bk: int = bk, c_buffers: int = c_buffers) -> bool:
                    return _fits(p, budget, _Candidate(c, bm, bn, bk, c_buffers, ring))

                if p.symmetric:
                    chosen = [bm] if fits(bm) else []
                else:  # narrower blocks only read more
                    widest = 0 if fits(widths[0]) else bisect_left(widths, True, key=fits)
                    chosen = widths[widest : widest + 2]
                least_here = math.inf
                for bn in chosen:
                    plain = _Candidate(c, bm, bn, bk, c_buffers, ring)
                    others = (_cached, _growing, _resident)
                    for x in (plain, *(x for make in others for x in make(p, budget, plain))):
                        elements = bm * bn + (bm + bn) * bk + x.cache
                        stages, seconds = _seconds(p, budget, rates, x)
                        seconds = seconds * _rounds(p, budget, x) + _hidden_cost(p, stages) / budget.workers
                        if x.resident:
                            seconds /= WORTH_KEEPING
                        found = (seconds, elements, x)
                        if best is None or found[:2] < best[:2]:
                            best = found
                        least_here = min(least_here, seconds)
                whole |= (bm, chosen[:1]) == (heights[0], widths[:1])
                if whole and 4 * bk <= p.k and best and least_here > TOO_SLOW * best[0]:
                    break
    return best


def _cached(p: Problem, budget: Budget, x: _Candidate) -> Iterator[_Candidate]:
    """The same with what is left of the host budget as a cache, in both orders of blocks. What one of several
    workers has read is of no use to the others, and of little to its own next blocks."""
    if budget.workers > 1:
        return
    down, across, deep = ceil_div(p.m, x.bm), ceil_div(p.n, x.bn), ceil_div(p.k, x.bk)
    spare = (budget.host - sum(_ledgers(p, budget, x)[0].values())) // _slot_bytes(p, x)
    if spare >= LEAST_CACHE_SLOTS and down * across > 1 and 2 * down * across * deep <= MAX_VISITS:
        yield replace(x, cache=spare, by_columns=False)
        if not p.symmetric:
            yield replace(x, cache=spare, by_columns=True)


def _growing(p: Problem, budget: Budget, x: _Candidate) -> Iterator[_Candidate]:
    """The same with panels that grow, up to twice as deep, where C is one block of a device with memory of
    its own."""
    if budget.device is None or p.symmetric or x.bm < p.m or x.bn < p.n:
        return
    for depth, growth in product((x.bk, 2 * x.bk), GROWTHS):
        deeper = replace(x, bk=depth, growth=growth)
        if LEAST_GROWN <= depth < p.k and depth % p.k_chunk == 0 and _fits(p, budget, deeper):
            yield deeper


def _resident(p: Problem, budget: Budget, x: _Candidate) -> Iterator[_Candidate]:
    """The same in a few blocks side by side, for all of which op(A) stays on a device with memory of its own:
    while one is made, the one before is written."""
    if budget.device is None or budget.workers > 1 or p.symmetric or not p.keeps_a or x.bm < p.m:
        return
    widths = [bn for bn in steps(p.n, x.c.chunk_cols) if bn <= x.bn and bn < p.n]
    for bn in widths[:WIDTHS_TRIED] if x.c_buffers > 1 else ():
        narrower = replace(x, bn=bn, resident=True)
        if _fits(p, budget, narrower):
            yield narrower


def _refusal(p: Problem, budget: Budget) -> BudgetError:
    """Which limit is too small, and the smallest that would do: the ledgers grow with every size, so
    the smallest sizes decide."""
    needs = []
    rows, cols = min(p.m, p.c.chunk_rows), min(p.n, p.c.chunk_cols)
    if budget.device is not None and not p.free_chunks and max(rows, cols) > MOST_EXTENT:
        return BudgetError(
            f"chunks of C of {rows}×{cols} are longer than the {MOST_EXTENT} rows or columns that a GPU "
            "multiplies at a time; give smaller chunks=(M, N), or use device='cpu'"
        )
    whole = [(s.chunk_bytes, name) for name, s in (("A", p.a), ("B", p.b)) if s.whole]
    size, name = max(whole, default=(0, ""))
    why = (
        f" (a chunk of {name} takes {size} bytes and must be decoded whole)"
        if size > budget.host // 4
        else ""
    )
    for c in _outputs(p):
        bm, bn = min(steps(p.m, c.chunk_rows)), min(steps(p.n, c.chunk_cols))
        for bk in _depths(p):
            for ring in _rings(budget):
                host, device = _ledgers(p, budget, _Candidate(c, bm, bn, bk, 1, ring))
                needs.append((sum(host.values()), sum(device.values())))
    if budget.device is not None and min(device for _, device in needs) > budget.device:
        least = min(device for _, device in needs)
        return BudgetError(
            f"a device memory limit of {budget.device} bytes is too small for this product; "
            f"the smallest that would do is {least} bytes ({ceil_div(least, MiB)}MiB)",
            minimum_device_memory_limit=least,
        )
    least = min(host for host, device in needs if budget.device is None or device <= budget.device)
    return BudgetError(
        f"a memory limit of {budget.host} bytes is too small for this product{why}; "
        f"the smallest that would do is {least} bytes ({ceil_div(least, MiB)}MiB)",
        minimum_memory_limit=least,
    )


def _finish(p: Problem, budget: Budget, rates: Rates, x: _Candidate) -> Plan:
    down, across = ceil_div(p.m, x.bm), ceil_div(p.n, x.bn)
    p = replace(p, c=x.c)
    times_a = 1 if x.resident else across
    bytes_read = times_a * p.a.read_bytes(*((x.bk, x.bm) if p.a.transposed else (x.bm, x.bk)))
    uploaded = times_a * p.m * p.k * p.a.itemsize
    if not p.symmetric:  # else each strip of A has met all others as op(A) or as op(B), and itself once
        bytes_read += down * p.b.read_bytes(*((x.bn, x.bk) if p.b.transposed else (x.bk, x.bn)))
        uploaded += down * p.k * p.n * p.b.itemsize
    if p.reads_c:
        bytes_read += p.c.read_bytes(x.bm, x.bn)
        uploaded += p.m * p.n * p.c.itemsize
    uploaded += uploaded_again(p, budget, *_columns(p, x.bm, x.bn))
    host, device = _ledgers(p, budget, x)
    stages, seconds = _seconds(p, budget, rates, x)
    separate = budget.device is not None
    fast = budget.host if budget.device is None else len(budget.weights) * budget.device
    plan = Plan(
        problem=p,
        budget=budget,
        bm=x.bm,
        bn=x.bn,
        bk=x.bk,
        panel_buffers=RESIDENT_BUFFERS if x.resident else PANEL_BUFFERS,
        c_buffers=x.c_buffers,
        readers=x.ring.readers,
        writers=x.ring.writers,
        slots=x.ring.slots,
        slot_bytes=_slot_bytes(p, x),
        cache_slots=0,
        by_columns=x.by_columns,
        growth=x.growth,
        resident=x.resident,
        found=(),
        kept=(),
        lower_bound_bytes=lower_bound_bytes(p, fast),
        bytes_read=bytes_read,
        bytes_written=p.c.grid[0] * p.c.grid[1] * p.c.chunk_bytes,
        bytes_uploaded=uploaded if separate else 0,
        bytes_downloaded=p.m * p.n * p.block_itemsize if separate else 0,
        ledger=host,
        device_ledger=device,
        stage_seconds=stages,
        predicted_seconds=seconds * _rounds(p, budget, x),
        used_rates=rates,
    )
    return with_cache(plan, x.cache) if x.cache else plan
