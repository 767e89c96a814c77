"""Deals ranges of k to workers, which hold partial sums of blocks until these are added up.

A block is computed over one range of k after the other. A worker that has computed a range keeps the sum in
its memory, and adds the next range that it computes. When no range is left, one of two workers that hold
sums of the block gives its own to the other. The worker that so gets a sum of all of k writes the block, and
the client takes it over. Every sum says which ranges it is made of, so none of them counts twice; what a dead
worker held is computed again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..planning.chunk_set import ChunkSet
from ..planning.plan import Plan
from ..planning.schedule import Block
from ..support.trace import Trace
from .dealing import Dealing, Task, Unit
from .on_worker import Report, Work
from .partial import merged, report_of, summed, written
from .workers import Workers


@dataclass
class _Held:
    """The sum of a block over some ranges of k, in the memory of a worker."""

    address: str
    parts: frozenset[int]
    """Numbers of the ranges."""
    future: Any


@dataclass
class _Block:
    """What is known of one block."""

    block: Block
    units: list[Unit]
    """The block over each range of k."""
    todo: list[int]
    """Numbers of the ranges that are neither in a sum nor under way."""
    held: list[_Held] = field(default_factory=list)
    """The sums of which no task makes another."""
    deaths: Unit = field(default_factory=lambda: Unit(-1, 0.0))
    """Counts workers that have died while they added up sums of this block, or wrote it."""
    finished: bool = False


class Sums(Dealing):
    """The tasks of a run in which k is cut."""

    def __init__(self, workers: Workers, work: Work, plan: Plan, target: Any, trace: Trace):
        self._plan, self._ranges = plan, plan.problem.k_ranges
        self._blocks, units = list[_Block](), list[Unit]()
        for block in plan.blocks():
            some = [
                Unit(len(units) + number, float(block.rows * block.cols) * (stop - start))
                for number, (start, stop) in enumerate(self._ranges)
            ]
            units += some
            todo = list(range(len(self._ranges)))
            self._blocks.append(_Block(block, some, todo))
        self.predicted_bytes_read = plan.bytes_read
        self._work = work
        super().__init__(workers, work.topic, units, target, trace)

    def _left(self) -> bool:
        """Whether a block is left to do."""
        return not all(block.finished for block in self._blocks)

    def forget(self) -> None:
        """Cancels the sums that workers hold, too."""
        if self._client.status == "running":
            for block in self._blocks:
                _release(block.held)
        super().forget()

    def _hand_out(self) -> None:
        """Give each idle worker a range of the block of which it holds a sum, or else of the first block that
        has any left; where none is left, have sums added up, and the last one written."""
        for address in sorted(self._idle()):
            if address not in self._idle():  # it gives its sum to the one before
                continue
            block, held = self._held_by(address)
            if block is None:
                block = next((one for one in self._blocks if one.todo), None)
            if block is None:
                continue
            if block.todo:
                self._compute(address, block, held)
            elif held and len(held.parts) == len(self._ranges):
                self._write(block, [held])
            elif held and (other := self._other(block, held)):
                if len(held.parts | other.parts) == len(self._ranges):
                    self._write(block, [held, other])
                else:
                    self._merge(block, held, other)

    def _held_by(self, address: str) -> tuple[_Block | None, _Held | None]:
        """Return the sum that a worker holds, and its block."""
        for block in self._blocks:
            for held in block.held:
                if held.address == address:
                    return block, held
        return None, None

    def _other(self, block: _Block, held: _Held) -> _Held | None:
        """Return another sum of a block whose worker is idle, the smallest one."""
        idle = self._idle()
        others = [one for one in block.held if one is not held and one.address in idle]
        return min(others, key=lambda one: len(one.parts), default=None)

    def _compute(self, address: str, block: _Block, held: _Held | None) -> None:
        """Have a worker compute a range, and add it to the sum that it holds."""
        number = block.todo.pop(0)
        unit = block.units[number]
        before = held.future if held else None
        arguments = self._work, unit.number, _unneeded(self._plan, block.block), self._ranges[number], before
        future = self._submit(address, summed, *arguments)
        self._add(address, block, [held] if held else [], {number}, future, unit)

    def _merge(self, block: _Block, held: _Held, other: _Held) -> None:
        """Have a worker add the sum of another one to its own."""
        future = self._submit(held.address, merged, held.future, other.future)
        self._add(held.address, block, [held, other], set(), future, None)

    def _add(
        self, address: str, block: _Block, used: list[_Held], fresh: set[int], future: Any, unit: Unit | None
    ) -> None:
        """Note a task that makes a sum of others and of fresh ranges."""
        parts = frozenset(fresh).union(*(one.parts for one in used))
        block.held = [one for one in block.held if one not in used]

        def done(report: Report) -> None:
            block.held.append(_Held(address, parts, future))
            _release(used)

        self._start(
            self._submit(address, report_of, future),
            Task(
                (address, *(one.address for one in used if one.address != address)),
                done,
                partial(self._died, block, used, fresh, unit),
                unit,
                [future],
            ),
        )

    def _write(self, block: _Block, used: list[_Held]) -> None:
        """Have the worker that holds all of a block write it, or the first of two that hold it together."""
        block.held = [one for one in block.held if one not in used]

        def done(report: Report) -> None:
            self._take_over(report)
            block.finished = True
            _release(used)

        others, addresses = self._plan.all_but([block.block]), tuple(one.address for one in used)
        sums = [one.future for one in used]
        future = self._submit(addresses[0], written, self._work, others, *sums)
        self._start(future, Task(addresses, done, partial(self._died, block, used, set(), None)))

    def _died(self, block: _Block, used: list[_Held], fresh: Iterable[int], unit: Unit | None) -> None:
        """Have done again what a dead worker was doing. Sums of workers that are alive stay."""
        block.todo += fresh
        block.held += used
        self._check_held()
        (unit or block.deaths).died(self._workers.again)

    def _check_held(self) -> None:
        """Drop the sums of workers that are gone, and have their ranges computed again."""
        for block in self._blocks:
            gone = [one for one in block.held if one.address not in self._workers.known]
            block.held = [one for one in block.held if one not in gone]
            for one in gone:
                for number in one.parts:
                    block.units[number].fraction = 0.0
                block.todo += one.parts
            _release(gone)


def _release(some: list[_Held]) -> None:
    """Let workers forget sums."""
    for one in some:
        one.future.release()


def _unneeded(plan: Plan, block: Block) -> ChunkSet:
    """Return all chunks of C that sums of a block need not hold: of a symmetric C also those of its mirror
    image."""
    if not plan.problem.symmetric:
        return plan.all_but([block])
    c = plan.problem.c
    rows = range(block.row // c.chunk_rows, -(-(block.row + block.rows) // c.chunk_rows))
    cols = range(block.col // c.chunk_cols, -(-(block.col + block.cols) // c.chunk_cols))
    return ChunkSet(c.grid, ((i, j) for i in rows for j in cols), inverted=True)
