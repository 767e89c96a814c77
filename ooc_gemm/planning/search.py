"""Chooses the plan of least predicted time among those that fit. Candidates are block and panel sizes, rings
and layouts of C. Each has a ledger of the memory that it holds, and predicted seconds from bytes and rates.
Only the schedule of a cache is simulated."""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from typing import NamedTuple

from ..support.intervals import LEAST_GROWN, ceil_div, reuses
from .candidates import (
    LANE_BYTES,
    MAX_DEPTH,
    SMALL_PANELS,
    Candidate,
    Ring,
    depths,
    everything,
    may_have_lanes,
    outputs,
    rings,
    shares_pieces,
    sides,
    steps,
)
from .cost import CostModel, Estimate
from .ledger import fits, ledgers, slot_bytes
from .machine import Budget, Rates, nobody_waits
from .panels import BUFFERS, MORE_BUFFERS, MOST_BUFFERS, Panels
from .plan import Plan
from .problem import Matrix, Problem
from .refusal import refusal
from .schedule import count_blocks
from .teams import ALONE, Shape, members, shapes
from .traffic import lower_bound_bytes, whole_traffic

MAX_VISITS = 200_000
"""Panels visited in a schedule, up to which a cache is planned: the simulation takes 1 µs each, and more of
them means blocks so small that there is no memory for a cache either."""

LEAST_CACHE_SLOTS = 8
"""Fewest slots of a cache; fewer save too little."""

WORTH_KEEPING = 0.97
"""What op(A) on the device must save to stay there: of the time without. It changes the order in which panels
are brought, so a gain within the error of a prediction is not worth it."""

WIDTHS_TRIED = 8
"""Number of block widths that are tried where op(A) stays on the device."""

RESIDENT_BLOCKS, MOST_BLOCKS = 3, 8
"""Blocks of C on the device where op(A) stays there and there is room: blocks become narrower, so the next
but one would be computed before the first is written (four H200: 0.13 s without a kernel). And the most of
them where blocks have few chunks: each chunk is written by one writer, and all writers are to have some."""

COLUMNS = 2
"""Columns of blocks whose panels of op(B) stay on a device where op(A) stays there in several rows of blocks:
while the blocks of one are made, panels of the next come."""

LARGE_BUFFERS = 3
"""Pairs of large panels on a device to which threads without the interpreter send pieces. These threads read
nothing whose turn has not come. With two pairs, a turn is opened when all of the one before has been sent,
and they stop at each (AᵀA of 131072 × 16384 int8 on an H200: .138 s instead of .127)."""

SMALL_BYTES = 8 * SMALL_PANELS
"""Bytes that pairs of small panels may take where there are more of them than `MORE_BUFFERS`."""

SIDES_TRIED = slice(1, 5)
"""Numbers of heights and of widths of blocks that are tried there, of those of `candidates.steps`."""

GROWTHS = (1.25, 1.5)
"""Factors by which each panel is deeper than the one before, where panels grow."""

RESIDENT_GROWTH = 1.5
"""The same where op(A) stays on the device. Multiplying a panel by the wide first block takes longer than to
bring it, so the next one may be deeper. How much longer differs: two H200 that bring 58 GB/s take 1.45 times
as long, and wait 60 ms for panels that double."""

RESIDENT_DEEPER = (1, 1.5, 2)
"""How many times as deep the deepest panel is then. Deep panels read and write C less often, and come too
late where they are brought slowly: two H200 with 65536³ float32 take 1.49, 1.46 and 1.46 s."""

WORTH_LESS = 0.95
"""Smaller chunks of C, or a smaller ring, are chosen where they need less than this share of the time."""

SHORT = 20.0
"""Seconds of a plan up to which smaller rings and chunks of C are tried only if there is much to gain. To try
all takes up to half a second, and of more memory for blocks they can hardly make more."""

MOST_RANGES = 16
"""Most ranges of k for each worker, which keep all workers busy nearly to the end."""

RANGE_SECONDS = 1.0
"""Least predicted seconds of a range of k where a worker has several."""

NEAR_IDEAL = 1.05
"""A plan within this many times the time that memory without end allows is taken without a look at smaller
chunks of C and smaller rings."""


def make_plan(problem: Problem, budget: Budget, rates: Rates) -> Plan:
    """Return the plan of least predicted time among those whose ledgers fit both budgets.

    C's chunks of the preferred size and a large ring are tried first; smaller ones must save 5 %. A symmetric
    C whose blocks cannot be square and small enough is computed as if it were not symmetric. Raises
    BudgetError, with the smallest limit that would do, where no plan fits.
    """
    found = _best(problem, budget, rates)
    if found is None and problem.symmetric and not problem.whole:
        return make_plan(replace(problem, symmetric=False), budget, rates)
    if found is None:
        raise refusal(problem, budget)
    _, p, x = found
    return finish(p, budget, rates, x)


def predict(problem: Problem, budget: Budget, rates: Rates) -> float:
    """Return the predicted seconds of the best plan, without making it; infinity where none fits, with square
    blocks for a symmetric C."""
    found = _best(problem, budget, rates)
    return math.inf if found is None else found[0]


def _best(problem: Problem, budget: Budget, rates: Rates) -> tuple[float, Problem, Candidate] | None:
    """Return the predicted seconds of the best candidate, the problem with or without a cut of k among the
    workers, and the candidate; None where none fits. Workers make blocks alone, in teams, or over some of
    k."""
    searches = [_Search(p, budget, rates) for p in (problem, *_cut_along_k(problem, budget, rates))]
    found = [(one, x) for one in (*searches, *_in_teams(searches[0])) if (x := one.best())]
    if not found:
        return None
    search, best = min(found, key=lambda one: one[0].judged(one[1]).seconds)
    return search.cost.estimate(best).seconds, search.problem, best


def _in_teams(alone: "_Search") -> list["_Search"]:
    """Return the search with the team of workers that does best with the first ring and layout of C."""
    p, budget = alone.problem, alone.budget
    if p.symmetric and len(set(budget.weights)) > 1:  # strips come in another order as op(A) than as op(B)
        return []
    each = [_Search(p, budget, alone.cost.rates, team) for team in shapes(p, budget.workers)]
    found = [(first.seconds, number) for number, one in enumerate(each) if (first := one.first())]
    return [each[min(found)[1]]] if found else []


def _cut_along_k(problem: Problem, budget: Budget, rates: Rates) -> list[Problem]:
    """Return the problem with k cut into a range or more for each worker, if there are workers and k can be
    cut. Blocks whose partial sums are still to be added up are not narrowed."""
    p, workers = problem, budget.workers
    if workers == 1 or p.row_bytes or p.k <= p.k_chunk:
        return []
    seconds = CostModel(p, budget, rates).estimate(everything(p, budget)).alone / workers
    each = max(1, min(MOST_RANGES, int(seconds / RANGE_SECONDS)))
    cut = replace(p, parts=workers * each, narrowed=0)
    return [replace(cut, parts=len(cut.k_ranges))] if len(cut.k_ranges) > 1 else []


def least_seconds(problem: Problem, budget: Budget, rates: Rates) -> float:
    """Return the predicted seconds with unlimited memory, which no plan is predicted to beat."""
    return CostModel(problem, budget, rates).estimate(everything(problem, budget)).alone / budget.workers


class _Found(NamedTuple):
    """A candidate with the numbers by which it is compared: seconds, then elements that it keeps in
    memory."""

    seconds: float
    elements: int
    x: Candidate
    estimate: Estimate


class _Search:
    """The search for the best candidate for one problem."""

    def __init__(self, problem: Problem, budget: Budget, rates: Rates, team: Shape = ALONE):
        self.problem, self.budget, self.team = problem, budget, team
        self.cost = CostModel(problem, budget, rates)

    def first(self) -> _Found | None:
        """Return the best candidate for the first layout of C and the first ring with which any fits."""
        every = (self._sizes(*one) for one in product(outputs(self.problem), rings(self.budget)))
        return next((found for found in every if found), None)

    def best(self) -> Candidate | None:
        """Return the best candidate; None where none fits."""
        ideal = self.cost.estimate(everything(self.problem, self.budget))
        least = (ideal.alone + self.cost.hidden_cost(ideal.stages)) / self.budget.workers
        best: _Found | None = None
        for c, ring in product(outputs(self.problem), rings(self.budget)):
            found = self._sizes(c, ring, WORTH_LESS * best.seconds if best else math.inf)
            if found:
                best = found
            if found and NEAR_IDEAL * least < found.seconds < SHORT:
                least = max(least, self._least_with_more_room(found))
            if best and best.seconds <= NEAR_IDEAL * least:
                break
        return best.x if best else None

    def _least_with_more_room(self, best: _Found) -> float:
        """Return the seconds of the best blocks and panels if the ring and the write slots of a candidate
        took no memory, and chunks of C were small; those of the candidate where these are not better. Smaller
        chunks and rings cannot save more than that."""
        x = best.x
        host = ledgers(self.problem, self.budget, x)[0]
        freed = sum(host[name] for name in ("read ring", "decoding", "write slots", "encoding"))
        budget = replace(self.budget, host=self.budget.host + freed)
        if budget.device is not None:
            budget = replace(budget, device=budget.device + slot_bytes(self.problem, x))
        roomy = _Search(self.problem, budget, self.cost.rates, self.team)
        found = roomy._sizes(outputs(self.problem)[-1], x.ring, best.seconds)
        return found.seconds if found else best.seconds

    def _sizes(self, c: Matrix, ring: Ring, most: float = math.inf) -> _Found | None:
        """Return the best block and panel sizes for one ring and one layout of C, if they take less than
        `most` seconds. There is no writer without a chunk."""
        p, best = self.problem, None
        ring = replace(ring, writers=min(ring.writers, max(1, math.prod(c.grid))))
        tried = sides(p, replace(p, c=c).align, self.team)
        for c_buffers in (1,) if self.budget.device is None else (2, 1):
            for bk in reversed(depths(p, self.budget)):  # shallow ones are seldom worth a look then
                panels = Panels(p.k, bk, p.k_chunk)
                plain = Candidate(c, 1, 1, panels, c_buffers, ring, team=self.team)
                best = self._blocks(plain, tried, best, most)
        return best

    def _blocks(
        self, plain: Candidate, tried: tuple[list[int], list[int]], best: _Found | None, most: float
    ) -> _Found | None:
        """Return the best of these block heights and widths for these panels, or the best candidate so far.
        One that takes `most` seconds or more is none."""
        heights, widths = tried
        most = min(most, best.seconds) if best else most
        for bm in heights:
            widest = plain._replace(bm=bm, bn=bm if self.problem.symmetric else widths[0])
            if self.cost.least(widest) > most:
                if self.problem.symmetric:  # lower blocks waste less on the diagonal
                    continue
                break
            chosen = self._widths(widest, widths)
            for bn in chosen:
                x = self._buffered(plain._replace(bm=bm, bn=bn))
                if self.cost.least(x) > most:
                    continue
                for found in self._variants(x, bn == chosen[0], most):
                    if found[:2] < (best[:2] if best else (most,)):
                        best, most = found, found.seconds
        return best

    def _variants(self, x: Candidate, keeps: bool, most: float) -> Iterator[_Found]:
        """Yield the candidate, and others with blocks and panels of its size that may take less than `most`
        seconds. keeps: whether op(A) stays on the device in some of them, if that is possible: narrower
        blocks are then among those of the widest."""
        if self.cost.least(x, may_grow=False) <= most:
            found = self.judged(x)
            yield found
            as_deep = self._in_lanes(x)
            if keeps:
                as_deep = chain(as_deep, self._resident(x, most, growing=False), self._in_strips(x, most))
            yield from map(self.judged, chain(self._cached(x, found.estimate, most), as_deep))
        yield from map(self.judged, self._growing(x))
        if keeps:
            yield from map(self.judged, self._resident(x, most, growing=True))

    def _buffered(self, x: Candidate) -> Candidate:
        """Return the candidate with more pairs of panels, on a device with memory of its own, if they fit:
        of small ones, or where threads send pieces on."""
        pair = (x.bm + x.bn) * x.panels.deepest * self.problem.panel_itemsize
        if self.budget.device is None:
            return x
        if pair <= SMALL_PANELS:
            counts = [min(MOST_BUFFERS, SMALL_BYTES // max(1, pair)), MORE_BUFFERS]
        else:
            counts = [LARGE_BUFFERS] if self.budget.step else []
        for count in dict.fromkeys(min(count, max(BUFFERS, len(x.panels))) for count in counts):
            more = x._replace(panels=replace(x.panels, buffers=count))
            if self._fits(more):
                return more
        return x

    def _widths(self, x: Candidate, widths: list[int]) -> list[int]:
        """Return the widest blocks of this height that fit, because narrower ones only read more."""
        if self.problem.symmetric:
            return [x.bm] if self._fits(x) else []
        if self._fits(x._replace(bn=widths[0])):
            return widths[:2]
        widest = bisect_left(widths, True, key=lambda bn: self._fits(x._replace(bn=bn)))
        return widths[widest : widest + 2]

    def _fits(self, x: Candidate) -> bool:
        few = self.team == ALONE or members(self.problem, x.bm, x.bn, self.team) <= self.budget.workers
        return few and fits(self.problem, self.budget, x)

    def judged(self, x: Candidate) -> _Found:
        """Return the candidate with the numbers by which it is compared."""
        found = self.cost.estimate(x)
        seconds = found.seconds + self.cost.hidden_cost(found.stages) / self.budget.workers
        if x.panels.resident:
            seconds /= WORTH_KEEPING
        elements = x.bm * x.bn + (x.bm + x.bn) * x.panels.deepest + x.cache
        return _Found(seconds, elements, x, found)

    def _cached(self, x: Candidate, without: Estimate, most: float) -> Iterator[Candidate]:
        """Yield the candidate with the rest of the host budget as a cache, in both orders of blocks, if that
        may take less than `most` seconds. With several workers there is no cache, because none of them uses
        what another has read. `without`: what is predicted for the candidate."""
        p, budget = self.problem, self.budget
        blocks = ceil_div(p.m, x.bm) * ceil_div(p.n, x.bn)
        if budget.workers > 1 or blocks <= 1 or 2 * blocks * len(x.panels) > MAX_VISITS:
            return
        spare = (budget.host - sum(ledgers(p, budget, x)[0].values())) // slot_bytes(p, x)
        cached = x._replace(cache=spare, by_columns=False)
        if spare >= LEAST_CACHE_SLOTS and self.cost.least_with_cache(cached, without) <= most:
            yield cached
            if not p.symmetric and not p.row_bytes:  # a reduction wants the blocks of a row in succession
                yield cached._replace(by_columns=True)

    def _growing(self, x: Candidate) -> Iterator[Candidate]:
        """Yield the candidate with panels that grow, up to twice as deep, where C is one block of a device
        with memory of its own."""
        p, bk = self.problem, x.panels.deepest
        if self.budget.device is None or p.symmetric or x.bm < p.m or x.bn < p.n:
            return
        for depth, growth in product(self._depths_of_grown(bk), GROWTHS):
            deeper = replace(x.panels, deepest=depth, growth=growth)
            counts = dict.fromkeys((deeper.buffers, BUFFERS))
            each = (x._replace(panels=replace(deeper, buffers=count)) for count in counts)
            if found := next(filter(self._fits, each), None):
                yield found

    def _in_lanes(self, x: Candidate) -> Iterator[Candidate]:
        """Yield the candidate in which each thread multiplies panels of its own, where C is one small block
        and panels stay in the caches, or are no deeper than chunks that must be decoded whole."""
        p, threads, depth = self.problem, self.budget.lanes, x.panels.deepest
        if not may_have_lanes(p, self.budget) or x.bm < p.m or x.bn < p.n:
            return
        small = max(p.m, p.n) * depth * p.panel_itemsize <= LANE_BYTES
        lanes = max(threads, x.ring.readers)
        # Where readers wait for a disk, others should multiply meanwhile. Where they do not, more threads
        # than cores leave cores idle (AᵀA of 2,000,000 × 256 on two: 1.20 s with two lanes, 1.36 with four).
        if nobody_waits(self.budget, self.cost.rates):
            lanes = min(lanes, max(threads, self.budget.cores))
        panels = replace(x.panels, lanes=lanes, buffers=lanes)
        if not (small or ((p.a.whole or p.b.whole) and depth <= p.k_chunk)) or len(panels) < panels.sums:
            return
        slots = lanes * (1 if p.symmetric or shares_pieces(p, panels) else 2)
        ring = replace(x.ring, readers=lanes, slots=slots)
        found = x._replace(panels=panels, ring=ring, c_buffers=1)
        if self._fits(found):
            yield found

    def _resident(self, x: Candidate, most: float, growing: bool) -> Iterator[Candidate]:
        """Yield the candidate in a few blocks side by side, for all of which op(A) stays on a device with
        memory of its own. Each block is written while the next one is computed. most: as of `_with_room`.
        growing: whether panels grow."""
        p, bk = self.problem, x.panels.deepest
        if not self._may_stay(x) or x.c_buffers == 1:
            return
        panels = [replace(x.panels, resident=True, buffers=MORE_BUFFERS)]
        if growing:
            grown = replace(panels[0], growth=RESIDENT_GROWTH, buffers=MORE_BUFFERS - 1)
            panels = [replace(grown, deepest=depth) for depth in self._depths_of_grown(bk, RESIDENT_DEEPER)]
        widths = [
            bn
            for bn in steps(p.n, x.c.chunk_cols)
            if bn <= x.bn and bn < p.n and reuses(x.bm, bn, bk, p.least)
        ]
        for bn, one in product(widths[:WIDTHS_TRIED], panels):
            yield from self._with_room(x._replace(bn=bn, panels=one), most)

    def _with_room(self, x: Candidate, most: float) -> Iterator[Candidate]:
        """Yield the candidate with as many blocks of C on the device as are of use, if they fit, else with
        fewer; nothing if it does not fit, or cannot take less than `most` seconds."""
        if self.cost.least(x, may_grow=False) > WORTH_KEEPING * most:
            return
        blocks = count_blocks(self.problem, x.bm, x.bn, x.panels.narrowing)
        chunks = ceil_div(x.bm, x.c.chunk_rows) * ceil_div(x.bn, x.c.chunk_cols)
        enough = min(MOST_BLOCKS, 1 + ceil_div(x.ring.writers, chunks))
        few, least = RESIDENT_BLOCKS, x.c_buffers
        if x.panels.interleaved > 1:
            few, least = x.panels.interleaved + 1, x.panels.interleaved
        counts = max(few, enough), few, least
        for count in dict.fromkeys(min(count, blocks) for count in counts):
            roomy = x._replace(c_buffers=count)
            if self._fits(roomy):
                yield roomy
                return

    def _depths_of_grown(self, bk: int, deeper: tuple[float, ...] = (1, 2)) -> list[int]:
        """Return the depths of the deepest panel that are tried where panels of `bk` could grow instead: so
        many times as deep."""
        p, depths = self.problem, (int(times * bk) for times in deeper)
        return [depth for depth in depths if LEAST_GROWN <= depth < p.k and depth % p.k_chunk == 0]

    def _may_stay(self, x: Candidate) -> bool:
        """Whether op(A) may stay on the device, and the candidate has blocks as high as C."""
        p, budget = self.problem, self.budget
        alone = budget.device is not None and budget.workers == 1
        return alone and p.keeps_a and not p.symmetric and x.bm >= p.m

    def _in_strips(self, x: Candidate, most: float) -> Iterator[Candidate]:
        """Yield the candidate in blocks below and beside each other, while all of op(A) and some columns of
        op(B) stay on the device. The first block is made as soon as one strip of each is there, and each
        strip that comes is used for several blocks. Or the first blocks are made at the same time: the device
        has nothing else to multiply yet, and what comes is used for two of them. Panels are no deeper than
        usual unless chunks have to be decoded whole: the device waits for the first ones, and for each of
        those that follow. most: as of `_with_room`."""
        p, budget = self.problem, self.budget
        if not self._may_stay(x) or len(budget.weights) > 1 or p.row_bytes or x.c_buffers == 1:
            return
        if x.panels.deepest > MAX_DEPTH and not (p.a.whole or p.b.whole):
            return
        heights, widths = sides(p, replace(p, c=x.c).align)
        for bm, bn in product(heights[SIDES_TRIED], widths[SIDES_TRIED]):
            rows, across = ceil_div(p.m, bm), ceil_div(p.n, bn)
            panels = replace(x.panels, resident=True, rows=rows, columns=min(COLUMNS, across))
            if reuses(bm, bn, panels.deepest, p.least):
                several = 1 if p.reads_c or p.check_itemsize else min(COLUMNS, rows) * panels.columns
                for one in self._with_room(x._replace(bm=bm, bn=bn, panels=panels), most):
                    yield one
                    if several > 1:
                        interleaved = replace(panels, interleaved=several)
                        yield from self._with_room(one._replace(panels=interleaved), most)


def finish(p: Problem, budget: Budget, rates: Rates, x: Candidate) -> Plan:
    """Make a plan of a candidate."""
    p = replace(p, c=x.c)
    if p.parts == 1:
        x = x._replace(c_buffers=max(1, min(x.c_buffers, count_blocks(p, x.bm, x.bn, x.panels.narrowing))))
    host, device = ledgers(p, budget, x)
    estimate = CostModel(p, budget, rates).estimate(x)
    fast = budget.host if budget.device is None else len(budget.weights) * budget.device
    fast *= budget.workers
    moved = whole_traffic(p, budget, x)
    plan = Plan(
        problem=p,
        budget=budget,
        bm=x.bm,
        bn=x.bn,
        k_panels=x.panels,
        c_buffers=x.c_buffers,
        readers=x.ring.readers,
        writers=x.ring.writers,
        slots=x.ring.slots,
        slot_bytes=slot_bytes(p, x),
        by_columns=x.by_columns,
        team=x.team,
        lower_bound_bytes=lower_bound_bytes(p, fast),
        bytes_read=moved.read,
        bytes_written=moved.written,
        bytes_uploaded=moved.uploaded,
        bytes_downloaded=moved.downloaded,
        bytes_exchanged=moved.exchanged,
        ledger=host,
        device_ledger=device,
        stage_seconds=estimate.stages,
        predicted_seconds=estimate.seconds,
        used_rates=rates,
    )
    if p.parts > 1:
        return plan.without(frozenset())
    return plan.with_cache(x.cache) if x.cache else plan
