"""How `threshold` is carried out by processes elsewhere.

A, B ──ranges of rows──► moments of rows ──► this process
rows of blocks, or parts of them ──► what reaches the value, in files ──► this process: put together, written
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import numpy as np

from ..engine.ports import Operation
from ..planning.plan import Plan
from ..run.executor import Local
from ..run.moments import Moments, column_moments, largest
from ..run.observer import Observer
from ..run.plans import slim
from ..run.pool import RANGES, Function, Here, InOrder, Pool, parts_of
from ..run.request import Request
from ..storage.write.row_files import RowFiles, side_by_side
from ..storage.write.sparse import SparseRows
from ..support.intervals import ceil_div
from .above import Above, Powers, room
from .compared import Compared
from .reducing import Blocks, run_reduced
from .rescore import Array, Range
from .selection import InMemory, Kept, Pairs, Selection
from .units import Gathering, Unit, cell_bytes, deal, plan_of, units

_Folders = list[tuple[Range, str]]
"""Columns of C, and the folder with what reaches the value in them."""


@dataclass(frozen=True)
class Search:
    """What all processes are given."""

    least: float
    absolute: bool
    others: bool
    """No row is compared with itself."""
    name: str
    """How messages call the result."""
    kept: Kept
    plan: Plan
    operation: Operation
    powers: Powers | None
    """As of `Above`."""


def select(here: Here, shared: Search, unit: Unit) -> tuple[str, int]:
    """Write what reaches the value in some blocks; the folder with the chunks of rows, and how many elements
    are not finite."""
    both = Compared("threshold", here.inputs["a"], here.inputs.get("b"), include_self=True)
    operands = {"a": both.a, "b": both.b.transpose()}
    plan = plan_of(unit, shared.plan, operands)
    blocks = Blocks(plan, shared.operation, {name: one.source for name, one in operands.items()})
    shape = both.m, both.n
    unbounded = not shared.kept.bounded
    above = Above(
        shape, plan.bm, shared.least, shared.absolute, shared.others, here.folder,
        unbounded=unbounded, powers=shared.powers,
    )  # fmt: skip
    folder = here.folder / uuid4().hex
    files = RowFiles(folder, shared.name, shared.kept.dtype, shared.kept.chunk_rows)
    progress = Observer(lambda fraction, plan, trace: here.tell(fraction))
    executor = Local(here.device)
    finish = partial(shared.kept.write, above, files, set())
    run_reduced(blocks, above, finish, executor, progress, here.trace)
    here.peak_device_bytes = executor.peak_device_bytes()
    return str(folder), above.not_finite


def moments_of(here: Here, shared: tuple[str, float], rows: Range) -> Moments:
    """The moments of some rows of an input. shared: its name, and what elements are multiplied with."""
    name, times = shared
    opened = here.inputs[name]
    some = opened.window(rows, (0, opened.shape[1])).transpose()
    found, read = column_moments(some, here.memory_limit, threads=here.threads, times=times)
    here.trace.bytes["read"] += read
    return found


def largest_of(here: Here, shared: str, rows: Range) -> Array:
    """The largest element in size of each of some rows of an input. shared: its name."""
    opened = here.inputs[shared]
    some = opened.window(rows, (0, opened.shape[1])).transpose()
    found, read = largest(some, here.memory_limit, threads=here.threads)
    here.trace.bytes["read"] += read
    return found


class SelectionElsewhere(Selection):
    """One run of `threshold` for which processes elsewhere compute."""

    def __init__(
        self, pairs: Pairs, request: Request, pool: Pool, beside: Callable[[int], int], observer: Observer
    ):
        """request: of the product, without transforms. beside: counts bytes that this process holds
        (`Elsewhere`). Raises InputError and BudgetError."""
        self._pool, reduced = pool, request.reduced
        assert reduced is not None, "C is not stored"
        # Moments of rows, and what rows are put together in and checked with.
        share = beside(reduced.fixed_bytes + (pairs.m + pairs.n) * 5 * 8)
        more = share + cell_bytes((pairs.m, pairs.n), pairs.chunk_rows)
        reduced = replace(reduced, fixed_bytes=reduced.fixed_bytes + more)
        super().__init__(pairs, replace(request, reduced=reduced), None, observer)
        self.trace = pool.trace

    def peaks(self) -> int:
        """The largest resident set of a process elsewhere."""
        return self._pool.peak_host_bytes

    def close(self) -> None:
        """Closes the pool."""
        self._pool.close()

    def _moments(self, name: Literal["a", "b"], times: float) -> tuple[Moments, int]:
        """Has each process look at ranges of rows."""
        found, parts = Moments.none(getattr(self._pairs, name).shape[0]), self._ranges(name)

        def add(number: int, some: Moments) -> None:
            found.include(parts[number][0], some)

        return found, self._passed((moments_of, (name, times)), parts, add)

    def _largest(self, name: Literal["a", "b"]) -> tuple[Array, int]:
        """Has each process look at ranges of rows."""
        found, parts = np.empty(getattr(self._pairs, name).shape[0]), self._ranges(name)

        def add(number: int, some: Array) -> None:
            found[slice(*parts[number])] = some

        return found, self._passed((largest_of, name), parts, add)

    def _ranges(self, name: Literal["a", "b"]) -> list[Range]:
        return parts_of(getattr(self._pairs, name), RANGES * self._pool.count)

    def _passed(self, call: tuple[Function, Any], parts: list[Range], add: Callable[[int, Any], None]) -> int:
        """Have processes look at ranges of rows; the bytes read, which count apart."""
        before = self.trace.bytes["read"]
        self._pool.each(*call, parts, InOrder(add), lambda done: None)
        read = self.trace.bytes["read"] - before
        self.trace.bytes["read"] -= read
        return read

    def _make(self, sink: InMemory | SparseRows, folder: Path | None, done: set[int]) -> None:
        """Deals blocks to processes, and takes their files."""
        assert isinstance(sink, SparseRows), "the result is stored"
        pairs, blocks, parts = self._pairs, self._blocks(), units(self.plan, self._pool.count)
        shared = Search(
            pairs.least, pairs.absolute, pairs.others, sink.name, self._kept, slim(self.job.plan),
            blocks.operation, self._powers,
        )  # fmt: skip

        def listed(before: _Folders | None, unit: Unit, found: tuple[str, int]) -> _Folders:
            self._not_finite += found[1]
            return [*(before or []), (unit.cols, found[0])]

        gathering = Gathering(parts, listed, partial(self._put, sink, done))
        deal(self._pool, self.plan, self._observer, (select, shared), parts, gathering.take)

    def _put(self, sink: SparseRows, done: set[int], band: int, found: _Folders) -> None:
        """Write a row of blocks. found: where its parts are."""
        kept, height = self._kept, self.plan.bm
        files = [RowFiles(Path(one), sink.name, kept.dtype, kept.chunk_rows) for _, one in sorted(found)]
        last = ceil_div(min((band + 1) * height, self._pairs.m), kept.chunk_rows)
        for number in sorted(set(range(band * height // kept.chunk_rows, last)) - done):
            parts = side_by_side(files, number, room(self._pairs.n) // 16)
            self.trace.bytes["write"] += sink.write(number, parts)
        for one in files:
            shutil.rmtree(one.folder, ignore_errors=True)
