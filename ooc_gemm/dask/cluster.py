"""Carries out a plan on a cluster: its workers make superblocks of C, or add up partial sums of its blocks,
and this process, the client, does the rest. The client takes over the chunks of each finished superblock or
block, and notes them. What a worker was making that has died, others make again. Blocks of a group go to
workers at the same time, which hand pieces to each other (team.py)."""

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count as count_from
from typing import Any

from distributed.comm import CommClosedError

from ..engine.ports import Failure, Operation, Source
from ..planning.plan import Plan
from ..planning.schedule import Block
from ..planning.teams import ALONE
from ..run.finish import Finished
from ..run.plans import slim
from ..run.request import Operand
from ..storage.io import locks
from ..storage.read import addresses
from ..storage.read.source import Opened
from ..support.errors import DeviceError, InputError
from ..support.recording import note_plan
from ..support.trace import Trace
from .dealing import Dealing, Task, Unit
from .large import Large
from .on_worker import Input, Report, Work, superblock
from .sums import Sums
from .team import Team, patience
from .workers import Workers

SUPERBLOCKS = 16
"""Most superblocks for each worker, which keep all workers busy nearly to the end."""


class Cluster:
    """An `Executor` that runs plans on the workers of a cluster."""

    def __init__(self, workers: Workers, operands: Mapping[str, Operand]):
        """operands: A and B, which the workers open themselves. Raises InputError where they cannot."""
        self.hardware = self.workers = workers
        self._inputs = {name: portable(one) for name, one in operands.items()}
        self._predicted = [0, 0]
        self._started: tuple[Plan, Operation, Trace] | None = None
        self._peaks = 0, 0
        self._failure: Failure | None = None

    def start(self, plan: Plan, operation: Operation, trace: Trace) -> None:
        """Does nothing: workers start their devices for each task."""
        note_plan(plan, self.hardware.model)
        self._started = plan, operation, trace

    def close(self) -> None:
        """Does nothing: workers hold nothing between runs."""

    def explain(self, error: Exception) -> Failure | None:
        """Returns what a worker's device has said of the error, or that the scheduler is gone."""
        if self._failure and self._failure.error is error:
            return self._failure
        if isinstance(error, OSError | CommClosedError) and self.workers.client.status != "running":
            return Failure(DeviceError(self.workers.gone))
        return None

    def as_done(self, plan: Plan) -> Plan:
        """Returns the plan with the bytes that the tasks of all plans read, and get from other workers."""
        read, exchanged = self._predicted
        return replace(plan, bytes_read=read, bytes_exchanged=exchanged)

    def peak_host_bytes(self) -> int:
        """The largest resident set of a worker, in bytes."""
        return self._peaks[0]

    def peak_device_bytes(self) -> int:
        """The most memory that a worker's device has held, in bytes."""
        return self._peaks[1]

    def execute(
        self,
        sources: Mapping[str, Source],
        target: Callable[[], Any],
        progress: Callable[[float], object],
        when_read: Callable[[], object] = lambda: None,
        begun: Callable[[], bool] = lambda: True,
    ) -> list[Block]:
        """Runs the plan on the workers, which read until the end, in a C that is begun before."""
        assert self._started, "it is started"
        plan, operation, trace = self._started
        stored: Any = target()
        finish = None
        if isinstance(stored, Finished):
            stored, finish = stored.target, stored.finish
        with self.workers.reached(), stored.sink.run_folder() as folder:
            work = Work(
                inputs={name: self._inputs.get(name) for name in sources},
                c=str(folder.parent),
                name=stored.name,
                folder=str(folder),
                plan=slim(plan),
                operation=replace(operation, transforms={}),
                transforms=Large.written(operation.transforms, folder / "transforms"),
                finish=Large.written(finish, folder / "finish") if finish else None,
                device=self.workers.device,
                topic=f"ooc-gemm-{os.urandom(8).hex()}",
                boot=locks.boot_id(),
            )
            run = (Sums if plan.problem.parts > 1 else _Superblocks)(self.workers, work, plan, stored, trace)
            self._predicted[0] += run.predicted_bytes_read
            self._predicted[1] += run.predicted_bytes_exchanged
            try:
                run.to_the_end(progress)
            finally:
                run.forget()
                self._failure = run.failure
                self._peaks = max(self._peaks[0], run.peaks[0]), max(self._peaks[1], run.peaks[1])
        when_read()
        return sorted(run.wrong, key=lambda block: (block.row, block.col))


class _Superblocks(Dealing):
    """The tasks of a run in which each superblock is made over all of k."""

    def __init__(self, workers: Workers, work: Work, plan: Plan, target: Any, trace: Trace):
        self._plan, self._todo = plan, _cut(plan, len(workers.known))
        self._patience, self._teams, self._idle_since = patience(plan), 0, math.inf
        for group in self._todo:
            left = plan.without(plan.all_but(block for one in group for block in one.blocks))
            self.predicted_bytes_read += left.bytes_read
            self.predicted_bytes_exchanged += left.bytes_exchanged
        self._work = work
        super().__init__(workers, work.topic, [one for group in self._todo for one in group], target, trace)

    def _left(self) -> bool:
        """Whether a superblock is left to do."""
        return bool(self._todo or self._running)

    def _hand_out(self) -> None:
        """Give idle workers superblocks to make: all of a group at the same time."""
        while group := self._next(len(idle := self._idle())):
            self._teams, self._idle_since = self._teams + 1, math.inf
            seats, team = list(zip(sorted(idle), group, strict=False)), None
            if len(group) > 1:
                blocks = tuple((address, one.blocks[0]) for address, one in seats)
                team = Team(self._teams, blocks, self._patience, self._work.plan.problem.symmetric)
            for address, one in seats:
                done = self._plan.all_but(one.blocks)  # made for each task, and not kept
                future = self._submit(address, superblock, self._work, one.number, done, team, address)
                self._start(future, Task((address,), self._done, partial(self._died, one), one))

    def _done(self, report: Report) -> None:
        """Take over what a worker has written, which is idle now."""
        self._idle_since = time.monotonic()
        self._take_over(report)

    def _next(self, idle: int) -> list["_Superblock"]:
        """Return the first group for which enough workers are idle. Where the cluster has too few for all of
        it, they make a part of it; so do those that are idle where others of their team do not finish."""
        there = len(self._workers.known)
        if time.monotonic() > self._idle_since + self._patience:
            there = idle
        for number, group in enumerate(self._todo):
            size = min(len(group), max(1, there))
            if size <= idle:
                self._todo[number : number + 1] = [group[size:]] if group[size:] else []
                return group[:size]
        return []

    def _died(self, one: "_Superblock") -> None:
        """Have the superblock of a worker that has died made again by another, which reads it alone."""
        self._todo.insert(0, [one])
        one.died(self._workers.again)


@dataclass
class _Superblock(Unit):
    """Consecutive blocks, or one of those that a team makes at the same time."""

    blocks: list[Block] = field(kw_only=True)
    """The blocks, which follow each other in the plan; where a team makes them, there is only one."""


def _cut(plan: Plan, workers: int) -> list[list[_Superblock]]:
    """Cut the plan into superblocks of consecutive blocks, or of one block each where workers make them in
    teams. Returns them in groups that a team makes at the same time."""
    groups = [[[block] for block in group] for group in plan.groups()]
    if plan.team == ALONE:
        count = max(1, plan.block_count // (SUPERBLOCKS * workers))
        blocks = list(plan.blocks())
        groups = [[blocks[at : at + count]] for at in range(0, len(blocks), count)]
    numbers = count_from(0)
    return [[_superblock(next(numbers), some) for some in group] for group in groups]


def _superblock(number: int, blocks: list[Block]) -> _Superblock:
    """Return a superblock of some blocks of the plan."""
    return _Superblock(number, float(sum(block.rows * block.cols for block in blocks)), blocks=blocks)


def portable(operand: Operand) -> Input:
    """Return what a worker opens an operand by. Raises InputError where it cannot be opened there."""
    spec = operand.array
    genotypes = isinstance(spec, Opened)
    at = spec.address or None if genotypes else spec
    found = addresses.portable(at)
    if found is None and next(addresses.secrets_of(at), None) is not None:
        raise InputError(
            f"{addresses.describe(spec)} has credentials in its address or in its store, which are not sent "
            "to workers; give its address without them and set them in the environment of the workers"
        )
    if found is None:
        raise InputError(
            f"{addresses.describe(spec)} is not where workers find it; store it as a Zarr array first"
        )
    return Input(found, operand.table, genotypes)
