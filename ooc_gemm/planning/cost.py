"""Predicts how many seconds a candidate takes."""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from ..support.intervals import ceil_div
from .candidates import Candidate, may_have_lanes
from .ledger import decoders, panel_elements, parts_of, slot_bytes
from .machine import Budget, Rates, nobody_waits
from .panels import MORE_BUFFERS
from .problem import Matrix, MiB, Problem
from .reads import Pass, Reads, found_share, found_shares, one_pass
from .schedule import (
    DIAGONAL_ELEMENTS,
    DIAGONAL_STRIPS,
    EARLY_STRIPS,
    LEAST_STRIP,
    TOGETHER,
    column_edges,
    count_blocks,
    last_place,
)
from .teams import ALONE, rounds
from .traffic import downloaded_bytes, shared_columns, uploaded_again
from .waiting import first_made, strips_made

REDUCED = 0.5
"""What finding the best elements of a block takes, in multiples of what a panel costs besides its operations:
C is read once, and for a panel it is read and written."""

TASK_SECONDS = 0.03
"""Seconds of a task of a cluster besides its work: to hand it out, open arrays and allocate buffers."""

HANDING_SECONDS = 2e-3
"""Seconds of a piece that one worker of a cluster gets from another, besides those for its bytes: what the
event loops of both do for it (two processes on two busy cores, over TCP)."""

TOUCHED = 1 / 8
"""Share of the slots that is used where threads copy through places of their own (`Budget.step`)."""

IN_CACHES = 0.5
"""What copying a piece into a panel takes if both are in the caches of the core, as a share of what it takes
else (two cores, AᵀA of 1,000,000 × 256 in chunks of 64 columns). Reading a file in memory to such a place
takes less than that."""

LANE_EDGE = 8.0
"""Height or width of a block at which a thread that multiplies alone takes twice its time, where for threads
that share a block it is `Rates.edge`: one thread of OpenBLAS multiplies 64 columns at nine tenths of its
rate, two threads at a quarter of theirs."""

NOT_CLEARED = 128 * MiB
"""Bytes of panels in host memory that the system clears in some milliseconds, for which nothing should be
read again."""

IN_BACKGROUND = 2.5e-7
"""Seconds of a read from files in memory, besides those for its bytes, where threads without the interpreter
read for a device (16 cores, rows of 4 to 32 KiB: 0.17 to 0.32 µs)."""


class Estimate(NamedTuple):
    """The predicted seconds of a candidate."""

    stages: dict[str, float]
    """Seconds that each stage is busy, if one worker makes all blocks."""
    alone: float
    """Seconds until everything is done, if one worker makes all blocks."""
    share: float
    """Share of the blocks, or of their ranges of k, that the busiest of several workers makes."""
    together: float = 0.0
    """Seconds in which workers add up partial sums and give them to each other, or begin their tasks at the
    same time."""

    @property
    def seconds(self) -> float:
        """Predicted seconds until everything is done."""
        return self.alone * self.share + self.together


class CostModel:
    """Predicts seconds for candidates of one problem on one machine.

    The search tries a thousand candidates that cut an operand in few ways, so the model keeps what it has
    found out about passes over operands.
    """

    def __init__(self, problem: Problem, budget: Budget, rates: Rates):
        self._problem, self._budget, self.rates = problem, budget, rates
        self._decoders = decoders(problem, budget)
        operands = (problem.a,) if problem.symmetric else (problem.a, problem.b)
        self._stored = sum(s.read_bytes_estimate(max(1, s.rows), max(1, s.cols)) for s in operands)
        self._decoded = sum(s.rows * s.cols * s.itemsize for s in operands)
        """Bytes of all operands, in the store and in memory."""
        self._passes: dict[tuple[str, int, int, int, int, int], Pass] = {}

    def estimate(self, x: Candidate) -> Estimate:
        """Predict the seconds of each stage and of the whole product."""
        p, rates, slot = self._problem, self.rates, slot_bytes(self._problem, x)
        reads = self._reads(x, slot)
        written, c, sharing = x.c.rows * x.c.cols, x.c, self._sharing
        parts = c.grid[0] * (ceil_div(p.n, x.bn) if p.found_bytes else c.grid[1])
        stages = {
            "read": self._read_seconds(x, reads, slot),
            "upload": self._uploaded_bytes(x, reads) / rates.upload,
            "compute": self._with_unpacking(x, self._compute_seconds(x), reads),
            "download": downloaded_bytes(p) / rates.download,
            "write": written * c.itemsize / rates.write * sharing
            + self._handed(x, parts) * rates.piece_seconds,
        }
        if x.team != ALONE:
            stages["exchange"] = sum(
                each.times * (1 - each.missed) * (each.nbytes / rates.network + each.pieces * HANDING_SECONDS)
                for each in reads
            )
        start = rates.start + self._fresh_bytes(x, slot) / rates.touch
        if rates.shared:
            alone = start + rates.begin + sum(stages.values())
        elif x.panels.growth > 1 and not x.panels.resident:
            alone = start + max(rates.begin, self._growing_seconds(x, stages))
        else:
            alone = start + max(rates.begin, self._overlapped_seconds(x, stages, reads))
        tasks, workers = max(1, count_blocks(p, x.bm, x.bn)) * p.parts, self._budget.workers
        if x.team != ALONE:
            turns = rounds(p, x.bm, x.bn, x.team, workers)
            return Estimate(stages, alone, turns / tasks, turns * TASK_SECONDS)
        return Estimate(stages, alone, ceil_div(tasks, workers) / tasks, self._adding_seconds(tasks))

    def _fresh_bytes(self, x: Candidate, slot: int) -> int:
        """Return the bytes of slots, and of large panels in host memory, which the system clears while they
        are filled. Threads that copy through places of their own (`Budget.step`) use no slots for what they
        read from memory, and few others. Panels of lanes are small."""
        p, budget = self._problem, self._budget
        written = x.ring.writers * x.c.chunk_rows * x.c.chunk_cols * p.part_itemsize
        slots = (0 if budget.step and budget.in_memory else x.ring.slots * slot) + written
        if budget.step:
            slots = int(TOUCHED * slots)
        if x.panels.lanes or budget.device is not None:
            return slots
        buffers = min(len(x.panels), x.panels.buffers)
        a, b = panel_elements(p, x.bm, x.bn, x.panels.deepest)
        alone = p.symmetric and x.bm >= p.m  # then op(A)'s panel is op(B)'s
        return slots + max(0, buffers * (a if alone else a + b) * p.panel_itemsize - NOT_CLEARED)

    def _handed(self, x: Candidate, parts: int) -> int:
        """Return how often the interpreter is needed for so many parts of C: some of those that go from a
        device to files in memory by themselves are handed on together."""
        p, step = self._problem, self._budget.step
        mirrors = p.symmetric and (x.bm < p.m or len(self._budget.weights) > 1)
        brought = step and not (p.c.whole or mirrors or p.found_bytes)
        return ceil_div(parts, TOGETHER) if brought else parts

    def least(self, x: Candidate, may_grow: bool = True) -> float:
        """Return seconds that no candidate with these blocks, or smaller ones, is predicted to beat, however
        much it keeps in memory: each operand is read at least once.

        may_grow: whether panels may also grow to twice their depth, where blocks are as high as C.
        """
        p = self._problem
        if may_grow and x.bm >= p.m:
            x = x._replace(panels=replace(x.panels, deepest=2 * x.panels.deepest))
        times = x.times_a(p) if x.bm < p.m else 1, 0 if p.symmetric else x.times_b(p)
        brought = [(s, count * s.rows * s.cols) for s, count in zip((p.a, p.b), times, strict=True)]
        if may_have_lanes(p, self._budget):  # which may read a piece for both operands, and copy none
            reading, uploaded, multiplying = 0.0, 0.0, p.flops / self.rates.flops
        else:
            reading = self._stored * self._sharing / self.rates.reading(x.ring.readers)
            uploaded = sum(elements * _sent_bytes(s) for s, elements in brought)
            multiplying = self._compute_seconds(x)
        if self._decoders.chunks:  # a device decodes as many at a time as it has memory for
            at_once = self._decoders.chunks * min(map(parts_of, p.encoded))
            unpacked = sum(elements * s.itemsize for s, elements in brought if s.encoded)
            multiplying += unpacked / at_once / self.rates.unpack
        stages = {
            "read": reading,
            "upload": uploaded / self.rates.upload,
            "compute": multiplying,
            "download": downloaded_bytes(p) / self.rates.download,
            "write": p.m * p.n * x.c.itemsize / self.rates.write * self._sharing,
        }
        # All of C that leaves before its last block shares the store with what enters.
        entering, leaving = entering_seconds(stages, self.rates), leaving_seconds(stages, self.rates)
        store = taking_turns(entering, leaving, min(1.0, self.rates.turns))
        slowest = max(store, stages["upload"], stages["compute"])
        if self.rates.shared:
            slowest = sum(stages.values())
        elif x.c_buffers == 1:  # C leaves when the last panel is multiplied, but for its first strips
            blocks, deepest = count_blocks(p, x.bm, x.bn), x.panels.deepest
            last = stages["compute"] * min(1.0, deepest / max(1, p.k)) / max(1, blocks)
            slowest = max(slowest, stages["compute"] - last + max(last, leaving))
        return (self.rates.start + slowest + self.hidden_cost(stages)) / self._budget.workers

    def least_with_cache(self, x: Candidate, without: Estimate) -> float:
        """Return seconds that a candidate with a cache is predicted not to beat, of `without`, what is
        predicted without one: each piece is read at least once, into memory that the system clears first."""
        p, down = self._problem, ceil_div(self._problem.m, x.bm)
        times = max(1, x.times_a(p), down)
        held = min(x.cache * slot_bytes(p, x), self._decoded)
        stages = without.stages | {"read": without.stages["read"] / times + held / self.rates.touch}
        if self.rates.shared:
            alone = sum(stages.values())
        else:
            alone = self._overlapped_seconds(x, stages, [])
            if down > 1 and x.bn < p.n:  # the block that is written last depends on the order
                other = x._replace(by_columns=not x.by_columns)
                alone = min(alone, self._overlapped_seconds(other, stages, []))
        return alone + self.hidden_cost(stages)

    def _adding_seconds(self, tasks: int) -> float:
        """Seconds for partial sums, which halve in number each time all workers have added up two of them. A
        task has its own seconds, also where it makes a few blocks over all of k; only what a cut of k adds to
        that counts."""
        p, workers = self._problem, self._budget.workers
        if p.parts == 1:
            return 0.0
        nbytes = p.m * p.n * p.block_itemsize / (2 if p.symmetric else 1)
        halvings = math.ceil(math.log2(workers))
        return halvings * nbytes / self.rates.exchange + ceil_div(tasks, workers) * TASK_SECONDS

    @property
    def _sharing(self) -> int:
        """Number of workers that share the rate of the store."""
        return self._budget.workers if self.rates.one_store else 1

    def hidden_cost(self, stages: dict[str, float]) -> float:
        """Return the seconds that are added to a candidate's when candidates are compared.

        A stage that is hidden behind the longest one still has a price (`Rates.hidden_cost`). For symmetric
        products the price is twice as high, because square blocks come in few sizes: the next smaller one
        would read half as much again to save a few percent of the time.
        """
        return self.rates.hidden_cost * (2 if self._problem.symmetric else 1) * sum(stages.values())

    def _pass(self, name: str, s: Matrix, row_step: int, col_step: int, slot: int) -> Pass:
        key = name, s.chunk_rows, s.chunk_cols, row_step, col_step, slot
        if key not in self._passes:
            self._passes[key] = one_pass(s, row_step, col_step, slot)
        return self._passes[key]

    def _reads(self, x: Candidate, slot: int) -> list[Reads]:
        """Return how A, B (unless the product is symmetric) and C (where β ≠ 0) are read."""
        p = self._problem
        down, across = ceil_div(p.m, x.bm), ceil_div(p.n, x.bn)
        a = self._pass("a", p.a, *x.a_steps(p), slot)
        if p.symmetric:
            missed = 1 - found_share(x, a, down) if x.cache else x.fetches(p)[0] / max(1, across)
            return [self._reads_of(p.a, a, x, across, missed)]
        b = self._pass("b", p.b, *x.b_steps(p), slot)
        shares = found_shares(x, a, b, down, across) if x.cache else (0.0, 0.0)
        times = x.times_a(p), x.times_b(p)
        each = zip((p.a, p.b), (a, b), times, x.fetches(p), shares, strict=True)
        found = [
            self._reads_of(s, one, x, times, (1 - share) * (fetches / max(1, times)))
            for s, one, times, fetches, share in each
        ]
        if p.reads_c:
            found.append(self._reads_of(x.c, self._pass("c", x.c, x.bm, x.bn, slot), x, 1, 1.0))
        return found

    def _reads_of(self, s: Matrix, one: Pass, x: Candidate, times: int, missed: float) -> Reads:
        rates, readers = self.rates, x.ring.readers
        in_background = self._budget.in_memory and not rates.shared
        call = (IN_BACKGROUND if in_background else rates.read_seconds) + rates.latency / readers
        rate = rates.reading(readers) / self._sharing
        if x.panels.lanes and nobody_waits(self._budget, rates):
            rate /= IN_CACHES  # what is read stays in the caches of the core
        seconds = one.seconds(rates, rate, call)
        if s.encoded:
            return Reads(seconds, one.pieces, times, missed, one.nbytes, one.unpacked)
        return Reads(seconds, one.pieces, times, missed, s.rows * s.cols * s.itemsize)

    def _read_seconds(self, x: Candidate, reads: list[Reads], slot: int) -> float:
        """Seconds of reading, of handing pieces on (which the conductor does while the readers read others),
        and of getting memory for the cache, which holds no more than every piece once."""
        rates, read, handling = self.rates, 0.0, 0.0
        for each in reads:
            read += each.times * each.missed * each.seconds
            handling += each.times * each.pieces * rates.piece_seconds
        cache = min(x.cache, sum(each.pieces for each in reads)) * slot / rates.touch
        return cache + (read + handling if rates.shared else max(read, handling))

    def _with_unpacking(self, x: Candidate, multiplying: float, reads: list[Reads]) -> float:
        """Return the seconds of multiplying and of decoding chunks, where the device does that.

        It decodes as many at a time as it has memory for, and some take as long as all of these. Those of the
        first panels come before anything is multiplied. Others are decoded beside multiplications, which they
        slow down by their share of the device; if few come at a time, these wait for them."""
        unpacked = sum(each.times * each.unpacked for each in reads)
        if not unpacked:
            return multiplying
        p, most = self._problem, self._decoders.chunks
        chunk, parts = max(s.chunk_bytes for s in p.encoded), min(map(parts_of, p.encoded))
        start, stop = next(iter(x.panels))
        lines = [x.bm / p.m, x.bn / p.n] if not p.symmetric else [min(1.0, 2 * x.bm / p.m)]
        shares = [min(1.0, share) * (stop - start) / p.k for share in lines]
        first = sum(share * each.unpacked for share, each in zip(shares, reads, strict=False)) / chunk
        chunks, turns, buffers = unpacked / chunk, self._turns(x), x.panels.b_buffers
        # One buffer holds what is multiplied, the next one what was decoded, and others what is gathered.
        gathered = max(1, min(buffers - 2, len(x.panels)))
        alone, beside = min(chunks, math.ceil(first / most)), max(0.0, chunks - first) / most
        waiting, took = min(chunks, (turns - 1) / gathered), chunk / parts / self.rates.unpack
        return alone * took + max(multiplying + beside * took, waiting * took)

    def _turns(self, x: Candidate) -> int:
        """Return how many times panels are brought."""
        p, each = self._problem, len(x.panels)
        if x.panels.columns:
            return (ceil_div(p.m, x.bm) + ceil_div(p.n, x.bn)) * each
        return max(1, count_blocks(p, x.bm, x.bn, x.panels.narrowing) * each)

    def _uploaded_bytes(self, x: Candidate, reads: list[Reads]) -> float:
        """Bytes that are copied into panels. If the thread that has read a piece multiplies it, the piece
        stays where it was read if it is all of a panel, and else in the caches; and sums are added up."""
        p = self._problem
        if x.panels.lanes:
            sums = (x.panels.sums - 1) * p.m * p.n * p.block_itemsize
            return sums + IN_CACHES * sum(
                each.nbytes
                for each, s in zip(reads, (p.a, p.b), strict=False)
                if each.pieces > len(x.panels) or any(p.transforms) or s.itemsize != p.panel_itemsize
            )
        again = uploaded_again(p, self._budget, shared_columns(p, x.bm, x.bn))
        return sum(each.times * each.nbytes for each in reads) + again

    def _compute_seconds(self, x: Candidate) -> float:
        """Seconds of multiplying: those of the kernels, or of the conductor's calls that start them if these
        take longer, as of thin panels of a fast type."""
        p, rates = self._problem, self.rates
        multiplying = p.flops / rates.flops * (1 + self._overhead(x))
        if rates.shared:
            return multiplying
        calls = count_blocks(p, x.bm, x.bn, x.panels.narrowing)
        if p.symmetric:  # a block on the diagonal is made in strips
            calls += ceil_div(p.m, x.bm) * (min(DIAGONAL_STRIPS, ceil_div(x.bm, LEAST_STRIP)) - 1)
        return max(multiplying, calls * len(x.panels) * rates.piece_seconds)

    def _overhead(self, x: Candidate) -> float:
        """What multiplying takes beside the operations at full speed, as a share of their time: C is read and
        written for each panel, and tiles stand out over the edges of blocks."""
        p, rates = self._problem, self.rates
        passes = len(x.panels) + (REDUCED if p.found_bytes else 0.0)
        width = p.n / max(1, len(column_edges(p, x.bn, True)) - 1) if x.panels.narrowing else x.bn
        edge = LANE_EDGE if x.panels.lanes else rates.edge
        thin = rates.thin * passes / max(1, p.k) + edge / x.bm + edge / width
        a_again, b_again = p.ready_again
        thin += rates.ready_again / width if a_again and x.panels.resident else 0.0
        thin += rates.ready_again / x.bm if b_again and x.panels.columns else 0.0
        down = max(1, ceil_div(p.m, x.bm))
        if p.symmetric and len(self._budget.weights) > 1:  # blocks on the diagonal are made whole
            thin += 1 / down
        elif p.symmetric:  # in thin strips whose ends stand out
            thin += (1 + edge * DIAGONAL_STRIPS / x.bm) / (DIAGONAL_STRIPS * down)
        return thin

    def _overlapped_seconds(self, x: Candidate, stages: dict[str, float], reads: list[Reads]) -> float:
        """Seconds of stages that overlap: the longest of three chains, and what nothing hides, which is the
        last multiplication and the write-back of the last block.

        Multiplying waits for the first panels; the last multiplication for the last reads, which share the
        store with the writes before; writing for the first block. The last write-back begins when the first
        strip of the last multiplication is done."""
        rates, p = self.rates, self._problem
        blocks = count_blocks(p, x.bm, x.bn, x.panels.narrowing)
        panels = max(1, blocks * len(x.panels))
        entering = entering_seconds(stages, rates)
        turns = self._turns(x)
        turns -= min(turns, max(0, x.panels.b_buffers - MORE_BUFFERS))  # which are open from the beginning
        opening = turns * rates.turn_seconds * rates.devices
        bringing = self._bringing_seconds(entering, stages) + opening
        each_read, each_multiply = bringing / panels, stages["compute"] / panels
        first, before, last = self._shares(x)
        if x.c_buffers == 1:
            last = 1.0
        leaving = leaving_seconds(stages, rates)
        whole = p.check_itemsize or (p.symmetric and x.bm * x.bn < DIAGONAL_ELEMENTS)
        strips = 1 if whole else EARLY_STRIPS
        tail = max(each_multiply, last * leaving) + min(each_multiply, last * leaving) / strips
        hidden = leaving * (1 - last)
        store = taking_turns(entering, hidden, rates.turns) + opening
        brought = max(store, bringing, each_read + stages["upload"])
        until_last = first * max(bringing, stages["compute"]) + hidden
        if x.panels.columns:
            slower = (entering + opening) / max(1e-9, stages["read"])
            made = strips_made(p, x, stages["compute"], [slower * each.seconds for each in reads])
            until_tail, until_last = max(brought, made[1] - each_multiply), made[0] + hidden
        elif x.panels.resident:  # the first block waits for all of op(A), and for its share of the others
            slower = entering / max(1e-9, stages["read"])
            of_a, *others = (each.seconds * slower for each in reads)
            bringing_first = of_a + first * sum(others)
            wide = first_made(x, bringing_first, first * stages["compute"], rates.thin)
            until_tail = max(brought, wide + (1 - first) * stages["compute"] - each_multiply)
        else:
            filled = each_read + stages["upload"] / panels
            until_tail = max(brought, filled + stages["compute"] - each_multiply)
        ends = [until_tail + tail, until_last + last * leaving]
        if last < before:  # the block before the last one, a smaller one, may take longer to leave
            ends.append(until_tail + each_multiply - last * stages["compute"] + (before + last) * leaving)
        return max(ends)

    def _bringing_seconds(self, entering: float, stages: dict[str, float]) -> float:
        """Seconds in which pieces come from the store and from other workers: from both at the same time, but
        from a store that is far away over the same network."""
        exchange = stages.get("exchange", 0.0)
        return entering + exchange if self.rates.latency else max(entering, exchange)

    def _shares(self, x: Candidate) -> tuple[float, float, float]:
        """Return the shares of C that the first block, the one before the last, and the last one make. The
        last one may be smaller, because blocks need not divide C, and blocks may become narrower. The blocks
        of a symmetric product count as equal."""
        p = self._problem
        down, across = ceil_div(p.m, x.bm), ceil_div(p.n, x.bn)
        if p.symmetric or not (down and across):
            return (1 / max(1, count_blocks(p, x.bm, x.bn)),) * 3
        if x.panels.narrowing:
            edges = column_edges(p, x.bn, True)
            widths = [(stop - start) / p.n for start, stop in pairwise(edges)]
            return widths[0], widths[max(0, len(widths) - 2)], widths[-1]
        i, j = last_place(down, across, x.by_columns, x.panels.columns)
        last = min(x.bm, p.m - i * x.bm) * min(x.bn, p.n - j * x.bn)
        first = min(x.bm, p.m) * min(x.bn, p.n) / (p.m * p.n)
        return first, first, last / (p.m * p.n)

    def _growing_seconds(self, x: Candidate, stages: dict[str, float]) -> float:
        """Seconds of the one block of panels that grow: each is read when one of two buffers is free, and
        multiplied when it is there."""
        p, thin = self._problem, self.rates.thin
        bringing = entering_seconds(stages, self.rates) / p.k
        multiplying = stages["compute"] / (p.k + thin * len(x.panels))
        came = done = before = began = took = 0.0
        for start, stop in x.panels:
            came = max(came, before) + (stop - start) * bringing + self.rates.turn_seconds
            began, took = max(came, done), (stop - start + thin) * multiplying
            before, done = done, began + took
        leaving, strips = leaving_seconds(stages, self.rates), 1 if p.check_itemsize else EARLY_STRIPS
        return max(began + took / strips + leaving, done + leaving / strips)


def _sent_bytes(s: Matrix) -> float:
    """Return the least bytes that go to a device for an element."""
    return s.stored_bytes / max(1, s.rows * s.cols) if s.encoded else s.itemsize


def least_seconds(flops: float, moved: Mapping[str, int], rates: Rates) -> dict[str, float]:
    """Return the least seconds that each part of the hardware needs: operations ÷ rate, and for each stage
    bytes (`moved`) ÷ rate. `store` are the seconds of all bytes on their way through the host, where reads,
    writes and copies share its memory as measured (`Rates.entering`, `leaving`, `turns`)."""
    seconds = {
        stage: moved[stage] / getattr(rates, stage) for stage in ("read", "upload", "download", "write")
    }
    store = taking_turns(entering_seconds(seconds, rates), leaving_seconds(seconds, rates), rates.turns)
    return seconds | {"compute": flops / rates.flops, "store": store}


def entering_seconds(stages: Mapping[str, float], rates: Rates) -> float:
    """Return the seconds of reads and of copies to devices, which share the host's memory. `stages`: the
    seconds of each stage alone."""
    return taking_turns(stages["read"], stages["upload"], rates.entering)


def leaving_seconds(stages: Mapping[str, float], rates: Rates) -> float:
    """Return the seconds of copies from devices and of writes, likewise."""
    return taking_turns(stages["write"], stages["download"], rates.leaving)


def taking_turns(read: float, write: float, turns: float) -> float:
    """Return the seconds of reads and writes that would take so long alone and share the store, or of other
    work that shares something (`Rates.turns`, `entering`, `leaving`)."""
    return 2 * turns * min(read, write) + abs(read - write)
