"""How `threshold` is carried out: rows are scaled, and centred for correlations, on their way into the
product; a reduction keeps what reaches the value, and when all blocks of some rows have passed, these rows
are written."""

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from ..planning.plan import Plan
from ..run.executor import Executor, Local
from ..run.moments import SMALL, Moments, column_moments, found_again, largest
from ..run.observer import Observer
from ..run.prepare import prepare
from ..run.request import Operand, Reduced, Request
from ..run.scalars import choice
from ..run.transforms import held
from ..storage.read.source import Opened
from ..storage.write import rows as stored
from ..storage.write.row_files import RowFiles
from ..storage.write.rows import Sparse
from ..storage.write.sparse import SparseRows
from ..support.errors import InputError
from ..support.memory import peak_resident_bytes
from ..support.trace import Trace
from .above import COPIES, Above, Powers, room
from .compared import Compared
from .recheck_pairs import Reach, RecheckPairs
from .reducing import Blocks, run_reduced
from .rescore import Array, Rows

Lines = tuple[Array, Array]
"""What is subtracted from each row, for correlations, and what rows are divided by."""
Score = Literal["cosine", "correlation", "dot"]
SHARE = 8
"""An eighth of the memory limit is for elements that are found, where they stay in memory; it is taken three
times while they are put together (`Reduced.eighths`)."""
EXPONENTS = -400, 480
"""Rows of float64 whose largest element is not between these powers of two are divided by one, so that it is,
for dot products. Then no sum of products overflows. What becomes too small is less than 2^−1153 of the
product of the largest elements of both rows. Where these meet zeros, it may be the whole score."""


class Pairs(Compared):
    """What is asked for, checked against the operands."""

    def __init__(
        self,
        left: Any,
        right: Any,
        metric: Score,
        least: float,
        absolute: bool,
        include_self: bool,
        verify: bool,
    ):
        """verify: some rows of the result are checked. Raises InputError."""
        choice("metric", metric, get_args(Score))
        if not np.isfinite(least):
            raise InputError(f"least is {least:g}; give a finite number")
        super().__init__("threshold", left, right, include_self)
        self.metric, self.least, self.absolute, self.verify = metric, least, absolute, verify
        if not (self.depth and self.m and self.n):
            raise InputError(f"{self.a.name} or {self.b.name} is empty; give arrays with rows and columns")

    def reduced(self, in_memory: bool) -> Reduced:
        """Counts the elements that are found, and what happens to rows."""
        found = 0 if in_memory else COPIES * room(self.n)
        found += RecheckPairs(Rows(self.a), Rows(self.b)).nbytes if self.verify else 0
        # Rows of the next blocks may come while those of the ones before are finished.
        fixed = found + (self.m + self.n) * 40
        lines = self.lines if self.metric == "dot" else 0
        return Reduced(self.chunk_rows, 2 * 4 * 8, fixed, eighths=3 if in_memory else 0, lines=lines)

    @property
    def passed(self) -> tuple[Literal["a", "b"], ...]:
        """The arrays that are read once before their product is made."""
        names: tuple[Literal["a", "b"], ...] = ("a",) if self.same else ("a", "b")
        if self.metric != "dot":
            return names
        return tuple(name for name in names if getattr(self, name).dtype == np.float64)

    @property
    def options(self) -> dict[str, Any]:
        """Adds what is kept, and how."""
        return {
            "metric": self.metric,
            "least": repr(self.least),
            "absolute": self.absolute,
            **super().options,
            "matrix": "csr",
        }

    def scaled(self, request: Request, a: Lines, b: Lines) -> Request:
        """The request of the product of rows that are scaled, and centred for correlations."""

        def operand(given: Operand, rows: Lines) -> Operand:
            mean, by = rows
            centred = self.metric == "correlation"
            return replace(given, center=("rows", mean) if centred else None, scale=("rows", by))

        return replace(request, a=operand(request.a, a), b=operand(request.b, b))

    def multiplied(self, request: Request, powers: Powers) -> Request:
        """The request of the product of rows that are divided by these powers of two."""
        a, b = (
            replace(one, scale=("rows", np.ldexp(1.0, some))) if some.any() else one
            for one, some in zip((request.a, request.b), powers, strict=True)
        )
        return replace(request, a=a, b=b)

    def lines_of(self, found: Moments) -> Lines:
        """What happens to the rows of an array. found: their moments."""
        if self.metric == "correlation":  # a row that is constant has none
            return found.mean, np.where(found.squares == 0, np.nan, np.sqrt(found.squares))
        with np.errstate(all="ignore"):
            lengths = np.sqrt(found.squares + found.count * np.square(found.mean))
        return found.mean, np.where(lengths == 0, 1, lengths)


@dataclass(frozen=True)
class Kept:
    """How elements that reach the value are written."""

    chunk_rows: int
    dtype: np.dtype[Any]
    bounded: bool
    """Scores lie in [−1, 1]."""

    def write(self, above: Above, sink: "InMemory | RowFiles | SparseRows", done: set[int], band: int) -> int:
        """Write what was found in a row of blocks; bytes written. done: chunks of rows that are there."""
        rows, (first, last), written = above.rows(band), above.extent(band), 0
        try:
            for start in range(first, last, self.chunk_rows):
                stop = min(start + self.chunk_rows, last)
                if (number := start // self.chunk_rows) not in done:
                    parts = rows.parts(start - first, stop - first, above.room // 16)
                    written += sink.write(number, (self._clipped(part) for part in parts))
        finally:
            rows.close()
        return written

    def _clipped(self, part: Sparse) -> Sparse:
        """Scores without what rounding adds beyond 1."""
        values, columns, counts = part
        values = values.astype(self.dtype)
        if self.bounded:
            np.clip(values, -1, 1, out=values)
        return values, columns, counts


class InMemory:
    """The result as NumPy arrays."""

    def __init__(self) -> None:
        self._found: dict[int, list[Sparse]] = {}

    def done(self) -> set[int]:
        """Return nothing: no run before has left any rows."""
        return set()

    def write(self, number: int, parts: Any) -> int:
        """Keep a chunk of rows; bytes."""
        self._found[number] = found = list(parts)
        return sum(values.nbytes + columns.nbytes for values, columns, _ in found)

    def arrays(self) -> dict[str, Array]:
        """The matrix."""
        parts = [part for number in sorted(self._found) for part in self._found[number]]
        data, indices, counts = (np.concatenate([part[i] for part in parts]) for i in range(3))
        return {"data": data, "indices": indices, "indptr": np.concatenate([[0], np.cumsum(counts)])}


class Selection:
    """One run of `threshold`."""

    def __init__(self, pairs: Pairs, request: Request, executor: Executor | None, observer: Observer):
        """request: of the product, without transforms. executor: what computes it; None for what computes
        elsewhere. Raises InputError and BudgetError."""
        self._pairs, self._executor, self._observer = pairs, executor, observer
        self.trace, self.bytes_passed, self.rows_resumed = Trace(), 0, 0
        self._not_finite = 0
        self._powers: Powers | None = None
        """What rows of A and of B are divided by, as exponents of two; None: nothing."""
        self._request = request = request.check()
        if pairs.metric != "dot":
            a, b = (2 * (np.ones(count),) for count in (pairs.m, pairs.n))
            request = pairs.scaled(request, a, b)
        self.job = prepare(request, executor=executor)
        self.plan = self.job.plan
        observer.note_of_unused_limit(request.device_memory_limit, self.plan.budget.device)
        self._pivots = np.zeros(pairs.m), np.zeros(pairs.n)
        left, right = self.job.sources["a"], self.job.sources["b"].transpose()
        self._recheck = RecheckPairs(Rows(left), Rows(right)) if pairs.verify else None

    @property
    def verified(self) -> bool | None:
        """True if rows of the result were checked, which raises an error where they are wrong."""
        return True if self._recheck else None

    def planned(self) -> Plan:
        """What a run would do that begins now."""
        passed = (getattr(self._pairs, name) for name in self._pairs.passed)
        self.bytes_passed = sum(one.matrix.stored_bytes for one in passed)
        self._leave_out(set())
        return self.plan

    def measure(self) -> None:
        """Read each array once, to find what happens to its rows, where anything does."""
        pairs = self._pairs
        self._observer.warn_of_undecoded((pairs.a, pairs.b))
        if pairs.metric == "dot":
            self._divide_rows()
            return
        a, self.bytes_passed = self._lines("a")
        b, more = (a, 0) if pairs.same else self._lines("b")
        self.bytes_passed += more
        self._leave_beyond(pairs.a.name, a)
        if not pairs.same:
            self._leave_beyond(pairs.b.name, b)
        if pairs.metric == "correlation":
            self._pivots = a[0], b[0]
        request = pairs.scaled(self._request, a, b)
        if not all(held(by, self.job.operation.arithmetic.panel).all() for _, by in (a, b)):
            self._observer.note(
                "elements of some rows are too large or too small for float32; products are made in float64"
            )
            request = replace(request, out_dtype="float64")
        self.job = prepare(request, executor=self._executor)
        self.plan = self.job.plan

    def _leave_beyond(self, name: str, lines: Lines) -> None:
        """Leave rows without scores, and say so, by whose lengths float64 cannot divide."""
        mean, by = lines
        beyond = ~held(by, np.dtype(np.float64)) | (np.isinf(by) & np.isfinite(mean))
        if count := int(np.count_nonzero(beyond)):
            by[beyond] = np.nan
            self._observer.warn(
                f"{count} of the {len(by)} rows of {name} are too long or too short for float64, and have no "
                "scores; change their unit"
            )

    def _divide_rows(self) -> None:
        """Have rows of float64 divided by powers of two, where products of such rows may be beyond
        float64."""
        pairs = self._pairs
        found = {"a": np.zeros(pairs.m, np.int32), "b": np.zeros(pairs.n, np.int32)}
        for name in pairs.passed:
            sizes, read = self._largest(name)
            self.bytes_passed += read
            exponents = np.frexp(np.where(np.isfinite(sizes) & (sizes > 0), sizes, 1))[1]
            found[name] = exponents - np.clip(exponents, *EXPONENTS)
        powers = found["a"], found["a" if pairs.same else "b"]
        if any(some.any() for some in powers):
            self._powers = powers
            self.job = prepare(pairs.multiplied(self._request, powers), executor=self._executor)
            self.plan = self.job.plan

    def _largest(self, name: Literal["a", "b"]) -> tuple[Array, int]:
        """The largest element in size of each row of an array, and the bytes read."""
        opened: Opened = getattr(self._pairs, name)
        return largest(opened.transpose(), int(self._request.memory_limit or 0))

    def _lines(self, name: Literal["a", "b"]) -> tuple[Lines, int]:
        """What happens to the rows of an array, and the bytes read by the passes that find it: one, and more
        where squares of elements are too large or too small for float64."""
        found, read = self._moments(name, 1)
        mean, by = self._pairs.lines_of(found)
        with np.errstate(all="ignore"):
            squares = found.squares + found.count * np.square(found.mean)
        large = ~np.isfinite(squares) & np.isfinite(found.mean)
        small = (squares < SMALL) & ((squares > 0) | (found.mean != 0))

        def again(times: float) -> tuple[Array, int]:
            made, moved = self._moments(name, times)
            return self._pairs.lines_of(made)[1], moved

        return (mean, by), read + found_again(by, large, small, again)

    def _moments(self, name: Literal["a", "b"], times: float) -> tuple[Moments, int]:
        """Moments of the rows of an array, whose elements are multiplied with a number, and the bytes
        read."""
        opened: Opened = getattr(self._pairs, name)
        return column_moments(opened.transpose(), int(self._request.memory_limit or 0), times=times)

    def peaks(self) -> int:
        """The largest resident set of a process that took part, in bytes."""
        return peak_resident_bytes()

    def close(self) -> None:
        """Do nothing: the run holds nothing."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the scores that are kept."""
        block = self.job.operation.arithmetic.block
        exact = self.job.output.dtype.kind in "iu"
        return self.job.output.dtype if exact else np.dtype(np.float32 if block == np.float32 else np.float64)

    def carry_out(self, place: stored.GroupPlace | None, resume: bool) -> dict[str, Any]:
        """Run it; the arrays of the result. place: where they go; None for NumPy arrays."""
        pairs, head = self._pairs, self._pairs.head(self.job)
        if place is None:
            memory = InMemory()
            self._execute(memory, None)
            arrays = memory.arrays()
            self._verify("the result", arrays)
            return arrays
        name = place.name
        if pairs.finished(place, head, resume):
            self._observer.note(f"{name} is finished already, with the same inputs; nothing was done")
            self._leave_out(pairs.all_chunks)
            arrays = stored.open_arrays(place)
            self._verify(name, arrays)
            return arrays
        making = place.begin(head, resume, self._observer.note)
        group = stored.RowArrays(making, {}, pairs.chunk_rows)
        try:
            sink = SparseRows(group, name, (pairs.m, pairs.n), self.dtype, pairs.chunk_rows)
            self._execute(sink, making.temporary)
            start = time.perf_counter()
            self.trace.add("write", start, nbytes=sink.finish())
            self._verify(name, group.sparse())
            group.commit(head or {"inputs": {}, "options": pairs.options})
        finally:
            group.close()
        return stored.open_arrays(place)

    def _verify(self, name: str, arrays: dict[str, Any]) -> None:
        """Check some rows of the result, if that was asked for. name: how messages call it."""
        if self._recheck is None:
            return
        pairs, check, start = self._pairs, self._recheck, time.perf_counter()
        reach = Reach(pairs.metric, pairs.least, pairs.absolute, pairs.others, self.dtype)
        check.carry_out(name, arrays, reach, self._pivots)
        self.trace.add("read", start, nbytes=check.a.bytes_read + check.b.bytes_read)

    def _leave_out(self, done: set[int]) -> None:
        """Leave chunks of rows out of the plan that are there already."""
        pairs, across = self._pairs, range(self.job.plan.problem.c.grid[1])
        if done:
            self.plan = self.job.plan.without(frozenset((i, j) for i in done for j in across))
        self.rows_resumed = pairs.rows_of(done)
        again = self.bytes_passed + (self._recheck.cost() if self._recheck else 0)
        self.plan = replace(self.plan, bytes_read=self.plan.bytes_read + again)

    def _execute(self, sink: InMemory | SparseRows, folder: Path | None) -> None:
        """Compute what is not done yet. folder: for temporary files."""
        done = sink.done()
        self._leave_out(done)
        self._make(sink, folder, done)
        if self._not_finite and (lost := max(0, self._not_finite - self._without_score())):
            become = (
                "count as infinite"
                if self.dtype == np.float64
                else "NaN or infinite; scale the arrays, or give arrays of float64"
            )
            self._observer.warn(f"{lost} dot products are too large for {self.dtype}, and {become}")
        for source in self.job.sources.values():
            source.check_unchanged()

    def _without_score(self) -> int:
        """How many dot products are of rows with NaN or infinite elements. Reads the arrays once more."""
        pairs = self._pairs
        a, read = self._largest("a")
        b, more = (a, 0) if pairs.same else self._largest("b")
        self.bytes_passed += read + more
        self.plan = replace(self.plan, bytes_read=self.plan.bytes_read + read + more)
        left, right = (int(np.count_nonzero(~np.isfinite(one))) for one in (a, b))
        with_themselves = left if pairs.others else 0
        return left * pairs.n + (pairs.m - left) * right - with_themselves

    def _make(self, sink: InMemory | SparseRows, folder: Path | None, done: set[int]) -> None:
        """Compute the blocks that are left, and write what reaches the value. done: chunks of rows that are
        there."""
        pairs, executor = self._pairs, self._executor
        assert isinstance(executor, Local), "this process computes"
        above = Above(
            (pairs.m, pairs.n),
            self.plan.bm,
            pairs.least,
            pairs.absolute,
            pairs.others,
            folder,
            self.job.request.memory_limit // SHARE,
            not self._kept.bounded,
            self._powers,
        )
        finish = partial(self._kept.write, above, sink, done)
        run_reduced(self._blocks(), above, finish, executor, self._observer, self.trace)
        self._not_finite = above.not_finite

    def _blocks(self) -> Blocks:
        """The blocks that are left."""
        return Blocks.of(self.job, self.plan)

    @property
    def _kept(self) -> Kept:
        return Kept(self._pairs.chunk_rows, self.dtype, self._pairs.metric != "dot")
