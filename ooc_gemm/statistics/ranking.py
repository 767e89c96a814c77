"""How `topk` is carried out: the engine multiplies, a reduction keeps candidates, and when all blocks of some
rows have passed, the candidates' exact scores decide."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import numpy as np

from ..engine.reduction import Pairs, score_type
from ..planning.plan import Plan
from ..run.executor import Local
from ..run.observer import Observer
from ..run.prepare import MOST_COLUMNS, prepare
from ..run.request import Reduced, Request
from ..storage.read.source import Opened
from ..storage.write import rows as stored
from ..support.errors import BudgetError, InputError
from ..support.intervals import ranges
from ..support.trace import Trace
from .compared import Compared
from .gathered import Gathered
from .graph import graph_rows
from .nearest import Nearest, Scores
from .recheck import Recheck
from .reducing import fail, run_reduced
from .rescore import CANDIDATE_BYTES, PANEL_BYTES, Array, Exact, Metric, Rows
from .rounding import Rounding
from .scored import SHARE, TYPES, OnDevice

SPARE = 6
"""Candidates beyond k that are kept of each row, at least: sums of the product are rounded."""
PANEL_SHARE = 8
"""Rows of A of a whole block are held where they take up to this part of the memory limit."""

Arrays = Mapping[str, tuple[tuple[int, int], np.dtype[Any]]]
"""Shape and type of each array of a result."""


class Asked(Compared):
    """What is asked for, checked against the operands."""

    def __init__(self, left: Any, right: Any, k: int, metric: Metric, include_self: bool, graph: bool):
        """graph: a graph is written, too. Raises InputError."""
        if metric not in get_args(Metric):
            raise InputError(f"{metric!r} is not a metric; choose one of {', '.join(get_args(Metric))}")
        super().__init__("topk", left, right, include_self)
        self.k, self.metric, self.graph = k, metric, graph
        there = self.n - self.others if self.depth else 0
        if not 1 <= k <= there:
            raise InputError(
                f"k is {k}, and a row of {self.a.name} has {max(0, there)} possible neighbours in "
                f"{self.b.name}; give another k"
            )
        self.spared = k + max(SPARE, k // 8) < there
        self.keep = min(there, k + max(SPARE, k // 8))
        kinds = np.result_type(self.a.dtype, self.b.dtype)
        self.values = np.dtype(np.float32 if kinds in (np.float16, np.float32) else np.float64)

    def exact(self, a: Opened, b: Opened) -> Exact:
        """What computes the exact scores of candidates on the host."""
        return Exact(Rows(a), Rows(b), self.metric)

    def pairs(self) -> Pairs | None:
        """What a device keeps to compute them; None where it cannot."""
        types = self.a.dtype, self.b.dtype
        if any(dtype.name not in TYPES for dtype in types) or self.n > MOST_COLUMNS:
            return None
        return Pairs((self.m, self.n), self.depth, types[1], None if self.same else types[0], self.keep)

    def reduced(self, in_memory: bool, limit: int) -> Reduced:
        """Counts what exact scores on the host take, and norms."""
        fixed = self.exact(self.a, self.b).nbytes + self.n * 40
        if in_memory:
            fixed += sum(m * k * dtype.itemsize for (m, k), dtype in self.arrays.values())
        # Rows of the next blocks may come while those of the ones before are finished.
        row = 2 * Nearest.row_bytes(self.keep, np.dtype(np.float64)) + self.keep * CANDIDATE_BYTES
        return Reduced(self.chunk_rows, row, fixed, self.keep)

    @property
    def options(self) -> dict[str, Any]:
        """Adds k, the metric and the graph."""
        found = {"k": self.k, "metric": self.metric} | super().options
        return found | ({"graph": "csr"} if self.graph else {})

    @property
    def arrays(self) -> Arrays:
        """The arrays of the result."""
        shape = self.m, self.k
        return {"indices": (shape, np.dtype(np.int64)), "values": (shape, self.values)}

    def scores(self, squares: Array, dtype: np.dtype[Any]) -> Scores:
        """How scores come from products. squares: the squared norm of each row of B."""
        finite = np.isfinite(squares)
        never = None if finite.all() else np.flatnonzero(~finite)
        squares = np.where(finite, squares, 0)
        if self.metric == "cosine":
            lengths = np.sqrt(squares)
            scale = np.divide(1, lengths, out=np.zeros_like(lengths), where=lengths > 0)
            return Scores(scale.astype(dtype), None, never, self.others)
        shift = (squares / 2).astype(dtype) if self.metric == "sqeuclidean" else None
        return Scores(None, shift, never, self.others)


class InMemory:
    """The result as NumPy arrays."""

    def __init__(self, arrays: Arrays):
        self.arrays = {name: np.empty(*what) for name, what in arrays.items()}

    def write(self, row: int, arrays: Mapping[str, Array]) -> int:
        """Keep some rows; the bytes."""
        for name, values in arrays.items():
            self.arrays[name][row : row + len(values)] = values
        return sum(values.nbytes for values in arrays.values())


class Ranking:
    """One run of `topk`."""

    def __init__(
        self, asked: Asked, request: Request, executor: Local, observer: Observer, verify: bool = False
    ):
        """request: of the product. verify: some rows of the result are checked. Raises InputError and
        BudgetError."""
        self._asked, self._executor, self._observer = asked, executor, observer
        self.trace, self.rows_close, self.rows_resumed = Trace(), 0, 0
        self._request = request.check()
        self.job = prepare(self._request, executor=executor)
        a, b = self.job.sources["a"], self.job.sources["b"].transpose()
        self._host = self._exact = asked.exact(a, b)
        self._norms_cost = self._host.b.cost((0, asked.n), (0, b.shape[1]))
        self._recheck = Recheck(self._host, asked.metric, asked.others) if verify else None
        self._keep_rows(a, b)
        if self._exact is self._host:
            self._hold_panel(a, b)
        self.plan = self.job.plan

    def _keep_rows(self, a: Opened, b: Opened) -> None:
        """Let the device compute exact scores, if it can, and has memory for the rows of B beside blocks."""
        start, pairs = self._executor.device.scorer, self._asked.pairs()
        most, reduced = self.job.plan.budget.device, self._request.reduced
        if start is None or pairs is None or reduced is None or most is None:
            return
        if pairs.device_bytes > most // SHARE:
            return
        exact = OnDevice(Rows(a, uploads=True), Rows(b, uploads=True), self._asked.metric, pairs, start)
        fixed = reduced.fixed_bytes + exact.nbytes
        kept = replace(reduced, fixed_bytes=fixed, device_bytes=pairs.device_bytes)
        with suppress(BudgetError):
            request = replace(self._request, reduced=kept)
            self.job = prepare(request, executor=self._executor)
            self._request, self._exact = request, exact

    def _hold_panel(self, a: Opened, b: Opened) -> None:
        """Let the host hold all rows of A that a device's block has, where memory allows it. Else rows of B
        are read in many narrow parts."""
        plan, reduced = self.job.plan, self._request.reduced
        wanted = plan.bm * self._asked.depth * self._asked.a.dtype.itemsize
        most = int(self._request.memory_limit or 0) // PANEL_SHARE
        if plan.budget.device is None or reduced is None or not PANEL_BYTES < wanted <= most:
            return
        exact = Exact(Rows(a), Rows(b), self._asked.metric, wanted)
        held = replace(reduced, fixed_bytes=reduced.fixed_bytes + exact.nbytes - self._host.nbytes)
        with suppress(BudgetError):
            request = replace(self._request, reduced=held)
            self.job = prepare(request, executor=self._executor)
            self._request, self._exact = request, exact

    def close(self) -> None:
        """Free what a device keeps."""
        self._exact.close()

    @property
    def verified(self) -> bool | None:
        """True if rows of the result were checked, which raises an error where they are wrong."""
        return True if self._recheck else None

    def planned(self) -> Plan:
        """What a run would do that begins now, if products in float32 tell rows apart."""
        self._leave_out(set())
        return self.plan

    def measure(self) -> None:
        """Read B once, for the norms of its rows, and decide in which type products are computed."""
        start = time.perf_counter()
        try:
            self._squares, spread = self._exact.norms()
        except Exception as error:
            self.close()
            fail(error, self._executor)
        self.trace.add("read", start, nbytes=self._exact.b.bytes_read)
        if self._rounding.too_coarse(spread):
            self._observer.note(
                "float32 has too few digits to tell these rows apart; products are made in float64"
            )
            self.job = prepare(replace(self._request, out_dtype="float64"), executor=self._executor)
            self.plan = self.job.plan

    def carry_out(self, place: stored.GroupPlace | None, resume: bool) -> dict[str, Any]:
        """Run it; the arrays of the result. place: where they go; None for NumPy arrays."""
        asked, head = self._asked, self._asked.head(self.job)
        if place is None:
            memory = InMemory(asked.arrays)
            self._execute(memory, set())
            self._verify("the result", lambda name, row: memory.arrays[name][row : row + 1])
            self._check_unchanged()
            return memory.arrays
        name = place.name
        if asked.finished(place, head, resume):
            self._observer.note(f"{name} is finished already, with the same inputs; nothing was done")
            self._leave_out(asked.all_chunks)
            arrays = stored.open_arrays(place)
            self._verify(name, lambda key, row: np.asarray(arrays[key][row : row + 1]))
            return arrays
        making = place.begin(head, resume, self._observer.note)
        sink = stored.RowArrays(making, asked.arrays, asked.chunk_rows)
        try:
            self._execute(sink, sink.done())
            self._verify(name, lambda key, row: sink.read(key, row, row + 1))
            self._check_unchanged()
            if asked.graph:
                self._write_graph(sink)
            sink.commit(head or {"inputs": {}, "options": asked.options})
        finally:
            sink.close()
        return stored.open_arrays(place)

    def _verify(self, name: str, read: Callable[[str, int], Array]) -> None:
        """Check some rows of the result, if that was asked for. name: how messages call it. read: returns a
        row of one of its arrays."""
        if self._recheck is None:
            return
        start, before = time.perf_counter(), self._host.a.bytes_read + self._host.b.bytes_read
        indices, values = (
            np.concatenate([read(key, row) for row in self._recheck.rows.tolist()])
            for key in ("indices", "values")
        )
        self._recheck.carry_out(name, indices, values, self._rounding.of_scores)
        moved = self._host.a.bytes_read + self._host.b.bytes_read - before
        self.trace.add("read", start, nbytes=moved)

    @property
    def _rounding(self) -> Rounding:
        """Of the products that are computed. Norms of rows are known."""
        largest = float(self._squares.max(where=np.isfinite(self._squares), initial=0.0))
        single = self.job.operation.arithmetic.block == np.float32
        return Rounding(self._asked.metric, self._asked.depth, largest, single)

    def _check_unchanged(self) -> None:
        for source in self.job.sources.values():
            source.check_unchanged()

    def _leave_out(self, done: set[int]) -> None:
        """Leave chunks of rows out of the plan that are there already, and predict what is left."""
        asked, problem = self._asked, self.job.plan.problem
        self.plan = plan = self.job.plan
        if done:
            across = range(problem.c.grid[1])
            self.plan = plan = plan.without(frozenset((i, j) for i in done for j in across))
        self.rows_resumed = asked.rows_of(done)
        bands = sorted({block.row // plan.bm for block in plan.blocks()})
        again = sum(self._exact.cost(self._rows(band)) for band in bands)
        line = sum(shape[1] * dtype.itemsize for shape, dtype in asked.arrays.values())
        written = (asked.m - self.rows_resumed) * line
        if asked.graph:  # of rows that all have neighbours
            written += asked.m * line + (asked.m + 1) * 8
        again += self._recheck.cost() if self._recheck else 0
        self.plan = replace(
            plan, bytes_read=plan.bytes_read + self._norms_cost + again, bytes_written=written
        )

    def _rows(self, band: int) -> tuple[int, int]:
        """The rows of a row of blocks."""
        return band * self.plan.bm, min((band + 1) * self.plan.bm, self._asked.m)

    def _execute(self, sink: InMemory | stored.RowArrays, done: set[int]) -> None:
        """Compute what is not done yet."""
        asked, executor = self._asked, self._executor
        self._leave_out(done)
        plan, products = self.plan, self.job.operation.arithmetic.block
        dtype = score_type(products)
        scores = asked.scores(self._squares, dtype)
        shape = asked.m, asked.n
        ranked = Gathered(shape, plan.bm, asked.keep, dtype, scores) if plan.problem.found_bytes else None
        reduction = ranked or Nearest(shape, plan.bm, asked.keep, products, dtype, scores)
        finish = partial(self._finish, reduction, self._rounding, sink, done)
        job = replace(self.job, plan=plan, operation=replace(self.job.operation, ranked=ranked))
        run_reduced(job, reduction, finish, executor, self._observer, self.trace)

    def _finish(
        self,
        nearest: Nearest | Gathered,
        rounding: Rounding,
        sink: InMemory | stored.RowArrays,
        done: set[int],
        band: int,
    ) -> int:
        """Score the candidates of a row of blocks and write the best; bytes written."""
        asked, rows, start = self._asked, self._rows(band), time.perf_counter()
        columns, about = nearest.best(band)
        scores, lengths, moved = self._exact.scores(rows, columns)
        self.trace.add("read", start, nbytes=moved)
        order = np.lexsort((columns, -scores), axis=1)[:, : asked.k]
        columns, scores = (np.take_along_axis(x, order, 1) for x in (columns, scores))
        if asked.spared:
            self.rows_close += rounding.close(about[:, -1], scores[:, -1], lengths)
        none = np.isneginf(scores)
        columns[none], scores[none] = -1, np.nan
        if asked.metric == "cosine":
            np.clip(scores, -1, 1, out=scores)
        elif asked.metric == "sqeuclidean":
            np.negative(scores, out=scores)
        values, written = scores.astype(asked.values), 0
        for first in range(rows[0], rows[1], asked.chunk_rows):
            if first // asked.chunk_rows not in done:
                some = slice(first - rows[0], first - rows[0] + asked.chunk_rows)
                written += sink.write(first, {"indices": columns[some], "values": values[some]})
        return written

    def _write_graph(self, sink: stored.RowArrays) -> None:
        """Write the graph of neighbours, which are all there."""
        asked, start = self._asked, time.perf_counter()
        rows = ranges(asked.m, asked.chunk_rows)
        found = ([sink.read(name, *some) for name in ("indices", "values")] for some in rows)
        parts = (graph_rows(indices, values, asked.metric) for indices, values in found)
        nbytes = sink.write_sparse("graph", (asked.m, asked.n), asked.values, parts)
        self.trace.add("write", start, nbytes=nbytes)
