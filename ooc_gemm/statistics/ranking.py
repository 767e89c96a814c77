"""How `topk` is carried out: the engine multiplies, a reduction keeps candidates, and when all blocks of some
rows have passed, the candidates' exact scores decide."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np

from ..engine.overflow import INT64_MAX
from ..planning.plan import Plan
from ..run.executor import Executor, Local
from ..run.observer import Observer
from ..run.prepare import Job, prepare
from ..run.request import Request
from ..storage.read.source import Opened
from ..storage.write import rows as stored
from ..support.errors import BudgetError
from ..support.intervals import ranges
from ..support.memory import peak_resident_bytes
from ..support.trace import Trace
from . import copies
from .asked import Arrays, Asked
from .candidates import Candidates
from .doubts import Doubts
from .gathered import Gathered
from .graph import graph_rows
from .nearest import Nearest
from .recheck import Recheck
from .reducing import Blocks, fail, run_reduced
from .rescore import PANEL_BYTES, Array, Range, Rows, norms, spread
from .rounding import MOST_UNSURE, Rounding
from .scaling import Scaling
from .scored import SHARE, OnDevice

Found = TypeVar("Found")
PANEL_SHARE = 8
"""Rows of A of a whole block are held where they take up to this part of the memory limit."""


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
        self,
        asked: Asked,
        request: Request,
        executor: Executor | None,
        observer: Observer,
        verify: bool = False,
    ):
        """request: of the product. executor: what computes it; None for what computes elsewhere. verify: some
        rows of the result are checked. Raises InputError and BudgetError."""
        self._asked, self._executor, self._observer = asked, executor, observer
        self.trace, self.rows_resumed = Trace(), 0
        self._doubts = Doubts()
        self.scaling: Scaling | None = None
        """What rows are multiplied with where squares of some rows of one array are beyond float64."""
        self._finer: Job | None = None
        """The product in float64, where it is made in float32."""
        self._copies: Array = np.empty(0, np.int64)
        """Rows of B that are nobody's neighbours, because of copies before them."""
        self._again: set[int] = set()
        """The chunks of rows for which a product is made that tells more."""
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
        observer.note_of_unused_limit(self._request.device_memory_limit, self.plan.budget.device)

    def _keep_rows(self, a: Opened, b: Opened) -> None:
        """Let the device compute exact scores, if it can, and has memory for the rows of B beside blocks."""
        if not isinstance(self._executor, Local):  # it would have to keep them from one task to the next
            return
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
        exact = self._asked.exact(a, b, wanted)
        held = replace(reduced, fixed_bytes=reduced.fixed_bytes + exact.nbytes - self._host.nbytes)
        with suppress(BudgetError):
            request = replace(self._request, reduced=held)
            self.job = prepare(request, executor=self._executor)
            self._request, self._exact = request, exact

    def _plan_again(self, request: Request) -> None:
        """Prepare another request. Raises BudgetError."""
        self.job = prepare(request, executor=self._executor)
        self.plan = self.job.plan

    def close(self) -> None:
        """Free what a device keeps."""
        self._exact.close()

    @property
    def rows_close(self) -> int:
        """Rows whose last neighbour may be another one."""
        return self._doubts.rows_close

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
        self._observer.warn_of_undecoded((self._asked.a, self._asked.b))
        self._squares, spread, exponents, whole = self._passed("b")
        if exponents.any():
            spread, exponents = self._multiply_rows(exponents)
        self._warn_of_extreme("b", int(np.count_nonzero(exponents)))
        self._known = Rounding.of(
            self._asked.metric, self._asked.depth, self._squares, self._host.scale,
            whole and self.scaling is None,
        )  # fmt: skip
        lengths = np.sqrt(self._squares[self._squares > 0]) if self._asked.same else np.empty(0)
        if self._rounding.too_coarse(spread, lengths):
            self._observer.note(
                "float32 has too few digits to tell these rows apart, or no numbers as large or as small as "
                "their products; these are made in float64"
            )
            self._plan_again(self._in_float64)
        elif self._may_overflow():
            self._observer.note("sums of products may exceed int64; they are made in float64")
            self._plan_again(self._in_float64)
        # Equal scores of integers are in no doubt, but for cosines of many elements.
        if self._host.scale is None and (self._asked.metric == "cosine" or not whole):
            self._leave_out_copies()

    def _may_overflow(self) -> bool:
        """Whether sums of products of integers may be beyond int64, with room for the rounding of norms."""
        if not self.job.operation.may_wrap:
            return False
        info, longest = np.iinfo(self._asked.a.dtype), self._known.longest
        largest = longest if self._asked.same else max(float(info.max), -float(info.min))
        return self._asked.depth * largest * longest > INT64_MAX / 2

    def _leave_out_copies(self) -> None:
        """Find the rows of B that are nobody's neighbours, because of copies before them. Reads B again where
        some squared norms come often."""
        before = self._asked.k + self._asked.others
        some = copies.often(self._squares, before)
        if len(some):
            self._copies = copies.behind(some, self._looked_at("b", self._marks)[some], before)
            self._norms_cost += copies.cost(self._host.b)

    def _marks(self, name: Literal["a", "b"]) -> Array:
        """The `copies.marks` of rows of an array."""
        return copies.marks(getattr(self._host, name))

    @property
    def _taking_part(self) -> Array:
        """The squared norm of each row of B; NaN of those that are nobody's neighbours."""
        squares: Array = self._squares.copy()
        squares[self._copies] = np.nan
        return squares

    @property
    def _in_float64(self) -> Request:
        return replace(self._request, out_dtype="float64")

    def _warn_of_extreme(self, name: Literal["a", "b"], count: int) -> None:
        """Warn of rows of an array whose squares are beyond float64. count: of these, as they are
        multiplied."""
        small = self.scaling.small["ab".index(name)] if self.scaling else 0
        array = getattr(self._asked, name).name
        if small:
            self._observer.warn(
                f"{small} rows of {array} are so much smaller than the largest row that float64 does not "
                "hold the squares of both: squared distances between such rows may be 0, and neighbours "
                "among them wrong; give them without the larger rows"
            )
        elif count:
            self._observer.warn(
                f"{count} rows of {array} have elements whose squares are too large or too small for "
                "float64, so their scores may be wrong or missing; multiply the array by a power of two"
            )

    def _passed(self, name: Literal["a", "b"]) -> tuple[Array, float, Array, bool]:
        """Make the first pass over an array. Returns what `_norms` does."""
        return self._looked_at(name, self._norms)

    def _looked_at(self, name: Literal["a", "b"], look: Callable[[Literal["a", "b"]], Found]) -> Found:
        """Make a pass over an array, with what is called with its name. Raises what `multiply` raises."""
        start, before = time.perf_counter(), self._bytes_of_norms()
        try:
            found = look(name)
        except Exception as error:
            self.close()
            fail(error, self.job.executor)
        self.trace.add("read", start, nbytes=self._bytes_of_norms() - before)
        return found

    def _norms(self, name: Literal["a", "b"]) -> tuple[Array, float, Array, bool]:
        """(squared norm of each row of an array, `spread` of these rows, `exponents` of those that are
        `Extreme`, whether all elements are integers)."""
        if name == "b":
            return self._exact.norms()
        squares, sums, exponents, whole = norms(self._host.a)
        return squares, spread(squares, sums), exponents, whole

    def _bytes_of_norms(self) -> int:
        """Bytes that this process has read for `_norms` and `_marks`, and others."""
        apart = 0 if self._host is self._exact else self._host.b.bytes_read
        return self._host.a.bytes_read + self._exact.b.bytes_read + apart

    def _multiply_rows(self, right: Array) -> tuple[float, Array]:
        """Have rows multiplied by powers of two, because squares of some are beyond float64. right:
        `exponents` of rows of B. Returns `spread` and `exponents` of the multiplied B. Raises BudgetError."""
        asked, squares, left = self._asked, self._squares, right
        if not asked.same:
            squares, _, left, _ = self._passed("a")
            self._norms_cost += self._host.a.cost((0, asked.m), (0, asked.depth))
        known = (left, squares), (right, self._squares)
        self.scaling = scaling = Scaling.of(asked, *known)
        self._host.multiply(scaling.factors, scaling.scale)
        self._exact.multiply(scaling.factors, scaling.scale)
        self._request = scaling.request(self._request)
        self._plan_again(self._request)
        self._squares, spread, exponents, _ = self._passed("b")
        self._norms_cost += self._host.b.cost((0, asked.n), (0, asked.depth))
        self._known = Rounding.of(asked.metric, asked.depth, self._squares, scaling.scale)
        return spread, exponents

    def peaks(self) -> tuple[int, int]:
        """The largest resident set of a process that took part, and the most memory of a device that was
        held, in bytes."""
        return peak_resident_bytes(), self.job.executor.peak_device_bytes()

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
        self._multiply_as_before(self._recheck)
        start, before = time.perf_counter(), self._host.a.bytes_read + self._host.b.bytes_read
        indices, values = (
            np.concatenate([read(key, row) for row in self._recheck.rows.tolist()])
            for key in ("indices", "values")
        )
        sure = [*self._again, *self._doubts.sure]
        fine = np.isin(self._recheck.rows // self._asked.chunk_rows, sure)
        restored = partial(self._restored, self._recheck.rows)
        self._recheck.carry_out(
            name, indices, values, lambda lengths: self._of_scores(lengths, fine), restored
        )
        moved = self._host.a.bytes_read + self._host.b.bytes_read - before
        self.trace.add("read", start, nbytes=moved)

    def _multiply_as_before(self, recheck: Recheck) -> None:
        """Have rows multiplied where only rows of A ask for it, and an earlier run has found theirs."""
        asked, plan, cost = self._asked, self.plan, self._norms_cost
        if not self.rows_resumed or asked.same or self.scaling or asked.a.dtype != np.float64:
            return
        start, before = time.perf_counter(), self._host.a.bytes_read
        extreme = recheck.has_extreme()
        more = self._host.a.bytes_read - before
        self.trace.add("read", start, nbytes=more)
        if extreme:
            self._multiply_rows(np.zeros(asked.n, np.int32))
        self.plan = replace(plan, bytes_read=plan.bytes_read + more + self._norms_cost - cost)

    def _of_scores(self, lengths: Array, fine: Array) -> Array:
        """The rounding of scores. lengths: of rows of A. fine: which of them were compared in float64 after
        all, or are in no doubt."""
        now = self._rounding
        exact, coarse = (replace(now, single=x) for x in (False, now.single or self._finer is not None))
        return np.where(fine, exact.of_scores(lengths), coarse.of_scores(lengths))

    @property
    def _rounding(self) -> Rounding:
        """Of the products that are computed. Norms of rows are known."""
        return replace(self._known, single=self.job.operation.arithmetic.block == np.float32)

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
        again = self._scoring_cost()
        line = sum(shape[1] * dtype.itemsize for shape, dtype in asked.arrays.values())
        written = (asked.m - self.rows_resumed) * line
        if asked.graph:  # of rows that all have neighbours
            written += asked.m * line + (asked.m + 1) * 8
        again += self._recheck.cost() if self._recheck else 0
        self.plan = replace(
            plan, bytes_read=plan.bytes_read + self._norms_cost + again, bytes_written=written
        )

    def _scoring_cost(self) -> int:
        """Bytes that are read to score candidates of the rows of blocks that are left."""
        bands = sorted({block.row // self.plan.bm for block in self.plan.blocks()})
        return sum(self._exact.cost(self._rows(band)) for band in bands)

    def _rows(self, band: int) -> Range:
        """The rows of a row of blocks."""
        return band * self.plan.bm, min((band + 1) * self.plan.bm, self._asked.m)

    def _execute(self, sink: InMemory | stored.RowArrays, done: set[int]) -> None:
        """Compute what is not done yet, in float64 after all where float32 turns out to tell too little."""
        if self._rounding.single:
            with suppress(BudgetError):
                self._finer = prepare(self._in_float64, executor=self._executor)
        self._search(sink, done)
        if self._again:
            self._search_again(sink)
        if not self._asked.same:
            self._warn_of_extreme("a", self._doubts.rows_extreme)
        self._doubts.tell(self._observer, self._asked.values)

    def _search_again(self, sink: InMemory | stored.RowArrays) -> None:
        """Compute again what the first product has not told."""
        before, resumed, cost = self.plan, self.rows_resumed, self._norms_cost
        again = f"the neighbours of {self._asked.rows_of(self._again)} rows are sought again, "
        if self._finer:
            self._observer.note(
                f"{again}in float64, because float32 does not tell which they are for all of these rows"
            )
            self.job = self._finer
        else:
            self._observer.note(f"{again}because squares of elements are too large or too small for float64")
            self._multiply_rows(np.zeros(self._asked.n, np.int32))
        self._search(sink, self._asked.all_chunks - self._again)
        more = self.plan.bytes_read - cost - (self._recheck.cost() if self._recheck else 0)
        self.plan = replace(
            self.plan, bytes_read=before.bytes_read + more, bytes_written=before.bytes_written
        )
        self.rows_resumed = resumed

    def _restored(self, rows: slice | Array, scores: Array) -> Array:
        """The scores of rows of A as they are stored, from those of rows that are multiplied."""
        return scores if self.scaling is None else self.scaling.restored(rows, scores)

    def _search(self, sink: InMemory | stored.RowArrays, done: set[int]) -> None:
        """Compute what is not done yet, in one type."""
        executor = self._executor
        assert isinstance(executor, Local), "this process computes"
        self._leave_out(done)
        blocks = Blocks.of(self.job, self.plan)
        reduction = self._asked.reduction(blocks, self._taking_part, self._host.scale)
        finish = partial(self._finish, reduction, sink, done)
        run_reduced(blocks.taken_by(reduction), reduction, finish, executor, self._observer, self.trace)

    def _finish(
        self,
        reduction: Nearest | Gathered,
        sink: InMemory | stored.RowArrays,
        done: set[int],
        band: int,
    ) -> int:
        """Score the candidates of a row of blocks and write the best; bytes written."""
        rows, start = self._rows(band), time.perf_counter()
        found, moved = Candidates.of(self._exact, rows, reduction.best(band), self._asked.k)
        self.trace.add("read", start, nbytes=moved)
        return self._write(sink, done, rows, found)

    def _write(
        self, sink: InMemory | stored.RowArrays, done: set[int], rows: Range, found: Candidates
    ) -> int:
        """Write the best of some rows, which are whole chunks of rows; bytes written."""
        asked, columns, scores = self._asked, found.columns, found.scores
        done = done | self._check(rows, found, done)
        none = np.isneginf(scores)
        columns[none], scores[none] = -1, np.nan
        if asked.metric == "cosine":
            np.clip(scores, -1, 1, out=scores)
        elif asked.metric == "sqeuclidean":
            np.negative(scores, out=scores)
        with np.errstate(over="ignore"):
            values, written = self._restored(slice(*rows), scores).astype(asked.values), 0
        for first in range(rows[0], rows[1], asked.chunk_rows):
            if first // asked.chunk_rows not in done:
                some = slice(first - rows[0], first - rows[0] + asked.chunk_rows)
                self._doubts.of_values(first, values[some], scores[some], self.scaling is not None)
                written += sink.write(first, {"indices": columns[some], "values": values[some]})
        return written

    def _check(self, rows: Range, found: Candidates, done: set[int]) -> set[int]:
        """Count rows whose last neighbour may be another one. Returns the chunks of rows that have to be
        compared in float64. done: chunks that are there."""
        asked, rounding, last = self._asked, self._rounding, found.scores[:, -1]
        fits = rounding.fit(found.lengths)
        doubted = rounding.close(found.about, last, found.lengths, found.whole)
        close, unsure = (asked.spared & some | ~fits for some in doubted)
        again = set()
        for first in range(rows[0], rows[1], asked.chunk_rows):
            if (number := first // asked.chunk_rows) in done:
                continue
            some = slice(first - rows[0], first - rows[0] + asked.chunk_rows)
            extreme = np.isinf(found.lengths[some])
            self._doubts.of_rows(number, close[some], unsure[some], extreme)
            coarse = unsure[some].mean() > MOST_UNSURE or not fits[some].all()
            scales = extreme.any() and self.scaling is None and not asked.same
            if scales or (rounding.single and self._finer and coarse):
                again.add(number)
        self._again |= again
        return again

    def _write_graph(self, sink: stored.RowArrays) -> None:
        """Write the graph of neighbours, which are all there."""
        asked, start = self._asked, time.perf_counter()
        rows = ranges(asked.m, asked.chunk_rows)
        found = ([sink.read(name, *some) for name in ("indices", "values")] for some in rows)
        parts = (graph_rows(indices, values, asked.metric) for indices, values in found)
        nbytes = sink.write_sparse("graph", (asked.m, asked.n), asked.values, parts)
        self.trace.add("write", start, nbytes=nbytes)
