"""How `topk` is carried out: the engine multiplies, a reduction keeps candidates, and when all blocks of some
rows have passed, the candidates' exact scores decide."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np

from ..engine.reduction import score_type
from ..planning.plan import Plan
from ..run.executor import Local
from ..run.observer import Observer
from ..run.operands import open_operand
from ..run.prepare import prepare
from ..run.request import Operand, Reduced, Request
from ..storage.read.source import Opened
from ..storage.write import rows as stored
from ..support.errors import InputError
from ..support.intervals import ceil_div, ranges
from ..support.trace import Trace
from .graph import graph_rows
from .nearest import Nearest, Scores
from .recheck import Recheck
from .reducing import run_reduced
from .rescore import CANDIDATE_BYTES, Array, Exact, Metric, Rows, norms

CHUNK_ROWS = 1024
"""Rows of a chunk of the result."""
SPARE = 6
"""Candidates beyond k that are kept of each row, at least: sums of the product are rounded."""
TILE_BYTES = 8 << 20
"""Memory in which a thread compares the scores of a tile."""
LITTLE_SPREAD = 1e-3
"""Where deviations from the mean make up less than this share of all squares, float32 leaves too few digits
of what tells rows apart, and products are computed in float64."""
PLAIN = 1e-30, 1e37
"""Also where the largest squared norm of a row is not between these, for products may be too large or too
small for float32."""

Arrays = Mapping[str, tuple[tuple[int, int], np.dtype[Any]]]
"""Shape and type of each array of a result."""


class Asked:
    """What is asked for, checked against the operands."""

    def __init__(self, left: Any, right: Any, k: int, metric: Metric, others: bool, graph: bool):
        """others: no row is its own neighbour. graph: a graph is written. Raises InputError."""
        if metric not in get_args(Metric):
            raise InputError(f"{metric!r} is not a metric; choose one of {', '.join(get_args(Metric))}")
        if isinstance(left, Operand) or isinstance(right, Operand):
            raise InputError("topk transforms no inputs; give arrays instead of an Operand")
        self.right, self.k, self.metric, self.others = right, k, metric, others
        self.graph = graph
        self.a, self.b = open_operand(left, "A"), open_operand(right, "B")
        (self.m, depth), (self.n, depth_b) = self.a.shape, self.b.shape
        if depth != depth_b:
            raise InputError(
                f"rows of {self.a.name} have {depth} elements and rows of {self.b.name} {depth_b}; "
                "give arrays whose rows are as long"
            )
        for opened in (self.a, self.b):
            if opened.dtype.kind == "c":
                raise InputError(f"{opened.name} holds complex numbers, which have no order; give real ones")
        there = self.n - others if depth else 0
        if not 1 <= k <= there:
            raise InputError(
                f"k is {k}, and a row of {self.a.name} has {max(0, there)} possible neighbours in "
                f"{self.b.name}; give another k"
            )
        self.spared = k + max(SPARE, k // 8) < there
        self.keep = min(there, k + max(SPARE, k // 8))
        kinds = np.result_type(self.a.dtype, self.b.dtype)
        self.values = np.dtype(np.float32 if kinds in (np.float16, np.float32) else np.float64)
        self.chunk_rows = max(1, min(CHUNK_ROWS, self.m))

    def exact(self, a: Opened, b: Opened) -> Exact:
        """What computes the exact scores of candidates."""
        return Exact(Rows(a), Rows(b), self.metric)

    def reduced(self, in_memory: bool, executor: Local) -> Reduced:
        """What the plan has to count beside the product. in_memory: the result stays in memory."""
        threads = max(getattr(executor.hardware, "threads", 1), len(os.sched_getaffinity(0)))
        fixed = self.exact(self.a, self.b).nbytes + threads * TILE_BYTES + self.n * 40
        if in_memory:
            fixed += sum(m * k * dtype.itemsize for (m, k), dtype in self.arrays.values())
        # Rows of the next blocks may come while those of the ones before are finished.
        row = 2 * Nearest.row_bytes(self.keep, np.dtype(np.float64)) + self.keep * CANDIDATE_BYTES
        return Reduced(self.chunk_rows, row, fixed, self.keep)

    @property
    def options(self) -> dict[str, Any]:
        """What makes the result what it is, beside the inputs and options of the product."""
        return {"k": self.k, "metric": self.metric, "neighbours": "others" if self.others else "all"} | (
            {"graph": "csr"} if self.graph else {}
        )

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
        self._exact = asked.exact(a, b)
        self._norms_cost = self._exact.b.cost((0, asked.n), (0, b.shape[1]))
        self._recheck = Recheck(self._exact, asked.metric, asked.others) if verify else None
        self.plan = self.job.plan

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
        self._squares, spread = norms(self._exact.b)
        self.trace.add("read", start, nbytes=self._exact.b.bytes_read)
        if self._too_coarse(spread):
            self._observer.note(
                "float32 has too few digits to tell these rows apart; products are made in float64"
            )
            self.job = prepare(replace(self._request, out_dtype="float64"), executor=self._executor)
            self.plan = self.job.plan

    def carry_out(self, place: Path | None, resume: bool) -> dict[str, Any]:
        """Run it; the arrays of the result. place: where they go; None for NumPy arrays."""
        asked, head = self._asked, self._head()
        if place is None:
            memory = InMemory(asked.arrays)
            self._execute(memory, set())
            self._verify("the result", lambda name, row: memory.arrays[name][row : row + 1])
            self._check_unchanged()
            return memory.arrays
        name = str(place)
        if resume and head is None:
            raise InputError("the inputs cannot be known again by a later run; leave out resume=True")
        if resume and not stored.is_begun(place) and stored.is_result(place, head or {}, name):
            self._observer.note(f"{name} is finished already, with the same inputs; nothing was done")
            self._recheck = None
            self._leave_out(set(range(ceil_div(asked.m, asked.chunk_rows))))
            return stored.open_arrays(place)
        sink = stored.begin(place, name, head, asked.arrays, asked.chunk_rows, resume)
        try:
            self._execute(sink, sink.done(asked.arrays))
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
        start, before = time.perf_counter(), self._exact.a.bytes_read + self._exact.b.bytes_read
        indices, values = (
            np.concatenate([read(key, row) for row in self._recheck.rows.tolist()])
            for key in ("indices", "values")
        )
        self._recheck.carry_out(name, indices, values, self._rounding)
        moved = self._exact.a.bytes_read + self._exact.b.bytes_read - before
        self.trace.add("read", start, nbytes=moved)

    def _rounding(self, lengths: Array) -> Array:
        """By how much scores of the product may be wrong. lengths: the norm of each row of A."""
        error = self._product_error(lengths)
        with np.errstate(all="ignore"):
            if self._asked.metric == "cosine":
                return np.where(lengths > 0, error / lengths, 0)
            return 2 * error if self._asked.metric == "sqeuclidean" else error

    def _too_coarse(self, spread: float) -> bool:
        """Whether products in float32 tell too little. spread: as of `norms`."""
        if self.job.operation.arithmetic.block != np.float32:
            return False
        largest = float(self._squares.max(where=np.isfinite(self._squares), initial=0.0))
        little = spread < LITTLE_SPREAD and self._asked.metric != "dot"
        return little or (largest > 0 and not PLAIN[0] < largest < PLAIN[1])

    def _head(self) -> dict[str, Any] | None:
        """What identifies the run; None where nobody could tell whether its inputs are the same again."""
        head = self.job.head
        return head and {**head, "options": {**head["options"], **self._asked.options}}

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
        rows = [min(asked.chunk_rows, asked.m - i * asked.chunk_rows) for i in done]
        self.rows_resumed = sum(rows)
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
        nearest = Nearest((asked.m, asked.n), plan.bm, asked.keep, products, dtype, scores)
        finish = partial(self._finish, nearest, sink, done)
        ranked = nearest if plan.problem.found_bytes else None
        job = replace(self.job, plan=plan, operation=replace(self.job.operation, ranked=ranked))
        run_reduced(job, nearest, finish, executor, self._observer, self.trace)

    def _finish(self, nearest: Nearest, sink: InMemory | stored.RowArrays, done: set[int], band: int) -> int:
        """Score the candidates of a row of blocks and write the best; bytes written."""
        asked, rows, start = self._asked, self._rows(band), time.perf_counter()
        columns, about = nearest.best(band)
        scores, lengths, moved = self._exact.scores(rows, columns)
        self.trace.add("read", start, nbytes=moved)
        order = np.lexsort((columns, -scores), axis=1)[:, : asked.k]
        columns, scores = (np.take_along_axis(x, order, 1) for x in (columns, scores))
        if asked.spared:
            self.rows_close += self._close(about[:, -1], scores[:, -1], lengths)
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

    def _close(self, about: Array, last: Array, lengths: Array) -> int:
        """How many rows may have another last neighbour.

        about: the score of the worst candidate of each row, from the product; what was left out has none that
        is higher. last: the exact score of the last neighbour. lengths: the norm of each row of A.
        """
        with np.errstate(all="ignore"):
            if self._asked.metric == "cosine":
                last = last * lengths
            elif self._asked.metric == "sqeuclidean":
                last = (np.square(lengths) + last) / 2
            error = self._product_error(lengths)
            return int(np.count_nonzero(np.isfinite(last) & (about + error >= last)))

    def _product_error(self, lengths: Array) -> Array:
        """Rounding of what the reduction compares: products, of rows of B of norm 1 for cosines, less half of
        their squared norm for distances."""
        arithmetic, depth = self.job.operation.arithmetic, self._asked.a.shape[1]
        longest = float(np.sqrt(self._squares.max(where=np.isfinite(self._squares), initial=0.0)))
        if self._asked.metric == "cosine":
            longest = 1.0
        single = arithmetic.block == np.float32
        with np.errstate(all="ignore"):
            error = 4 * np.sqrt(depth) * float(np.finfo(np.float32 if single else np.float64).eps)
            found: Array = error * longest * (lengths + longest * (self._asked.metric == "sqeuclidean"))
        return found
