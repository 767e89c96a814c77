"""How `topk` is carried out by processes elsewhere.

B ──ranges of rows──► norms of rows, sums of columns ──► this process
rows of blocks, or parts of them ──► the best of each row, by exact scores ──► this process: merged, written
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from ..engine.ports import Operation
from ..planning.plan import Plan
from ..run.executor import Local
from ..run.observer import Observer
from ..run.plans import slim
from ..run.pool import RANGES, Here, InOrder, Pool, parts_of
from ..run.request import Request
from ..storage.write.rows import RowArrays
from . import copies
from .asked import Asked
from .candidates import Candidates
from .ranking import InMemory, Ranking
from .reducing import Blocks, run_reduced
from .rescore import Array, Exact, Metric, Range, Rows, norms, spread
from .units import Gathering, Unit, cell_bytes, deal, plan_of, units


@dataclass(frozen=True)
class Search:
    """What all processes are given."""

    k: int
    metric: Metric
    others: bool
    """B is A, and no row is its own neighbour."""
    cores: int
    panel_bytes: int
    """Of the rows of A whose candidates are scored (`Exact`)."""
    plan: Plan
    operation: Operation
    squares: Array
    """The squared norm of each row of B."""
    factors: tuple[Array | None, Array | None]
    """What rows of A and of B are multiplied with, if anything."""
    scale: Array | None
    """As of `Scaling`."""


def search(here: Here, shared: Search, unit: Unit) -> Candidates:
    """Find the best of each row of some blocks."""
    a, b = here.inputs["a"], here.inputs.get("b")
    asked = Asked(a, b, shared.k, shared.metric, include_self=not shared.others, graph=False)
    asked.cores = shared.cores
    operands = {"a": asked.a, "b": asked.b.transpose()}
    plan = plan_of(unit, shared.plan, operands)
    blocks = Blocks(plan, shared.operation, {name: one.source for name, one in operands.items()})
    exact = asked.exact(asked.a, asked.b, shared.panel_bytes, unit.cols)
    exact.multiply(shared.factors, shared.scale)
    reduction = asked.reduction(blocks, shared.squares, shared.scale)
    found: list[Candidates] = []

    def finish(band: int) -> int:
        rows = band * plan.bm, min((band + 1) * plan.bm, asked.m)
        best, moved = Candidates.of(exact, rows, reduction.best(band), asked.k)
        here.trace.bytes["read"] += moved
        found.append(best)
        return 0

    executor = Local(here.device)
    progress = Observer(lambda fraction, plan, trace: here.tell(fraction))
    run_reduced(blocks.taken_by(reduction), reduction, finish, executor, progress, here.trace)
    here.peak_device_bytes = executor.peak_device_bytes()
    (best,) = found
    if unit.cols[1] - unit.cols[0] <= asked.keep:  # all of these rows of B are candidates
        best = replace(best, about=np.full_like(best.about, -np.inf))
    return best


@dataclass(frozen=True)
class Look:
    """What processes are given that look at rows of an array."""

    name: Literal["a", "b"]
    cores: int
    factors: Array | None
    """What rows are multiplied with, if anything."""

    def rows(self, here: Here, rows: Range) -> Rows:
        """Return what reads these rows on a worker, with the factors that are theirs."""
        one = here.inputs.get(self.name, here.inputs["a"])
        some = Rows(one.window(rows, (0, one.shape[1])), cores=self.cores)
        some.factors = None if self.factors is None else self.factors[slice(*rows)]
        return some


def norms_of(here: Here, shared: Look, rows: Range) -> tuple[Array, Array, Array, bool]:
    """As `norms`, of some rows of an array."""
    some = shared.rows(here, rows)
    found = norms(some)
    here.trace.bytes["read"] += some.bytes_read
    return found


def marks_of(here: Here, shared: Look, rows: Range) -> Array:
    """As `copies.marks`, of some rows of an array."""
    some = shared.rows(here, rows)
    found = copies.marks(some)
    here.trace.bytes["read"] += some.bytes_read
    return found


class RankingElsewhere(Ranking):
    """One run of `topk` for which processes elsewhere compute."""

    def __init__(
        self,
        asked: Asked,
        request: Request,
        pool: Pool,
        beside: Callable[[int], int],
        observer: Observer,
        verify: bool,
    ):
        """request: of the product. beside: counts bytes that this process holds (`Elsewhere`). Raises
        InputError and BudgetError."""
        reduced, self._pool = request.reduced, pool
        assert reduced is not None, "C is not stored"
        line, fixed = self._held(asked, verify)
        more = cell_bytes((asked.m, asked.n), asked.chunk_rows) + beside(fixed)
        reduced = replace(
            reduced, row_bytes=reduced.row_bytes + beside(line), fixed_bytes=reduced.fixed_bytes + more
        )
        super().__init__(asked, replace(request, reduced=reduced), None, observer, verify)
        self.trace = pool.trace
        beside(self.plan.bm * line + fixed)

    def _held(self, asked: Asked, verify: bool) -> tuple[int, int]:
        """Bytes that this process holds, for each row of a block and beside these: the best of rows of blocks
        that are not complete, and of one that comes; norms of rows of B, what finds copies, and what a check
        takes."""
        line = (self._pool.count + 2) * (3 * 16 * asked.k + 4 * 8)
        return line, 9 * 8 * asked.n + asked.scaling_bytes + (
            asked.exact(asked.a, asked.b).nbytes if verify else 0
        )

    def peaks(self) -> tuple[int, int]:
        """Those of the processes elsewhere."""
        return self._pool.peak_host_bytes, self._pool.peak_device_bytes

    def close(self) -> None:
        """Closes the pool."""
        self._pool.close()

    def _norms(self, name: Literal["a", "b"]) -> tuple[Array, float, Array, bool]:
        """Has each process look at ranges of rows."""
        asked, one = self._asked, getattr(self._asked, name)
        parts, count = parts_of(one, RANGES * self._pool.count), one.shape[0]
        squares, sums, exponents = np.empty(count), np.zeros(asked.depth), np.empty(count, np.int32)
        whole = np.empty(len(parts), bool)

        def add(number: int, found: tuple[Array, Array, Array, bool]) -> None:
            some = slice(*parts[number])
            squares[some], exponents[some], whole[number] = found[0], found[2], found[3]
            np.add(sums, found[1], out=sums)

        shared = Look(name, asked.cores or 1, getattr(self._host, name).factors)
        self._pool.each(norms_of, shared, parts, InOrder(add), lambda done: None)
        return squares, spread(squares, sums), exponents, bool(whole.all())

    def _marks(self, name: Literal["a", "b"]) -> Array:
        """Has each process look at ranges of rows."""
        one = getattr(self._asked, name)
        parts, found = parts_of(one, RANGES * self._pool.count), np.empty((one.shape[0], 2), np.uint64)

        def add(number: int, some: Array) -> None:
            found[slice(*parts[number])] = some

        shared = Look(name, self._asked.cores or 1, getattr(self._host, name).factors)
        self._pool.each(marks_of, shared, parts, InOrder(add), lambda done: None)
        return found

    def _bytes_of_norms(self) -> int:
        """Counts none: other processes read."""
        return 0

    def _scoring_cost(self) -> int:
        """Counts what is read for each unit: rows of A again, where several have parts of one row of
        blocks."""
        asked, host, cost = self._asked, self._host, 0
        for unit in units(self.plan, self._pool.count):
            exact = Exact(host.a, host.b, asked.metric, self._exact.panel_bytes, unit.cols)
            cost += exact.cost(self._rows(unit.band))
        return cost

    def _search(self, sink: InMemory | RowArrays, done: set[int]) -> None:
        """Deals blocks to processes, and merges what they find."""
        self._leave_out(done)
        parts = units(self.plan, self._pool.count)
        best = Gathering(parts, _merged, partial(self._complete, sink, done))
        deal(self._pool, self.plan, self._observer, (search, self._shared()), parts, best.take)

    def _shared(self) -> Search:
        asked, job = self._asked, self.job
        return Search(
            asked.k, asked.metric, asked.others, asked.cores or 1, self._exact.panel_bytes,
            slim(job.plan), Blocks.of(job, job.plan).operation, self._taking_part,
            (self._host.a.factors, self._host.b.factors), self._host.scale,
        )  # fmt: skip

    def _complete(self, sink: InMemory | RowArrays, done: set[int], band: int, found: Candidates) -> None:
        """Write the best of a row of blocks, all of whose parts have come."""
        self.trace.bytes["write"] += self._write(sink, done, self._rows(band), found)


def _merged(before: Candidates | None, _: Unit, found: Candidates) -> Candidates:
    return found if before is None else before.merged(found)
