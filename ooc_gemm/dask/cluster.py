"""Carries out a plan on a cluster: its workers make superblocks of C, or add up partial sums of its blocks,
and this process, the client, does the rest. The client takes over the chunks of each finished superblock or
block, and notes them. What a worker was making that has died, others make again."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from distributed.comm import CommClosedError

from ..engine.ports import Failure, Operation, Source
from ..planning.plan import Plan
from ..planning.schedule import Block
from ..run.finish import Finished
from ..run.plans import slim
from ..run.request import Operand
from ..storage.io import locks
from ..storage.read import addresses
from ..storage.read.source import Opened
from ..support.errors import DeviceError, InputError
from ..support.intervals import ceil_div
from ..support.recording import note_plan
from ..support.trace import Trace
from .dealing import Dealing, Task, Unit
from .large import Large
from .on_worker import Chunk, Input, Work, superblock
from .sums import Sums
from .workers import Workers

SUPERBLOCKS = 16
"""Most superblocks for each worker, which keep all workers busy nearly to the end."""


class Cluster:
    """An `Executor` that runs plans on the workers of a cluster."""

    def __init__(self, workers: Workers, operands: Mapping[str, Operand]):
        """operands: A and B, which the workers open themselves. Raises InputError where they cannot."""
        self.hardware = self.workers = workers
        self._inputs = {name: portable(one) for name, one in operands.items()}
        self._predicted = 0
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
        """Returns the plan with the bytes that the tasks of all plans read: workers do not share panels."""
        return replace(plan, bytes_read=self._predicted)

    def peak_host_bytes(self) -> int:
        """The largest resident set of a worker, in bytes."""
        return self._peaks[0]

    def peak_device_bytes(self) -> int:
        """The most memory that a worker's device has held, in bytes."""
        return self._peaks[1]

    def execute(
        self, sources: Mapping[str, Source], target: Any, progress: Callable[[float], object]
    ) -> list[Block]:
        """Runs the plan on the workers."""
        assert self._started, "it is started"
        plan, operation, trace = self._started
        finish = None
        if isinstance(target, Finished):
            target, finish = target.target, target.finish
        with self.workers.reached(), target.sink.run_folder() as folder:
            work = Work(
                inputs={name: self._inputs.get(name) for name in sources},
                c=str(folder.parent),
                name=target.name,
                folder=str(folder),
                plan=slim(plan),
                operation=replace(operation, transforms={}),
                transforms=Large.written(operation.transforms, folder / "transforms"),
                finish=Large.written(finish, folder / "finish") if finish else None,
                device=self.workers.device,
                topic=f"ooc-gemm-{os.urandom(8).hex()}",
                boot=locks.boot_id(),
            )
            run = (Sums if plan.problem.parts > 1 else _Superblocks)(self.workers, work, plan, target, trace)
            self._predicted += run.predicted_bytes_read
            try:
                run.to_the_end(progress)
            finally:
                run.forget()
                self._failure = run.failure
                self._peaks = max(self._peaks[0], run.peaks[0]), max(self._peaks[1], run.peaks[1])
        return sorted(run.wrong, key=lambda block: (block.row, block.col))


class _Superblocks(Dealing):
    """The tasks of a run in which each superblock is made over all of k."""

    def __init__(self, workers: Workers, work: Work, plan: Plan, target: Any, trace: Trace):
        self._todo, self._all = _cut(plan, len(workers.known))
        self.predicted_bytes_read = sum(plan.without(self._all - one.chunks).bytes_read for one in self._todo)
        self._work = work
        super().__init__(workers, work.topic, list(self._todo), target, trace)

    def _left(self) -> bool:
        """Whether a superblock is left to do."""
        return bool(self._todo or self._running)

    def _hand_out(self) -> None:
        """Give every idle worker a superblock to make."""
        idle = self._idle()
        while self._todo and idle:
            address, one = idle.pop(), self._todo.pop(0)
            future = self._submit(address, superblock, self._work, one.number, self._all - one.chunks)
            self._start(future, Task((address,), self._take_over, partial(self._died, one), one))

    def _died(self, one: Unit) -> None:
        """Have the superblock of a worker that has died made again by another."""
        self._todo.insert(0, one)
        one.died(self._workers.again)


def _cut(plan: Plan, workers: int) -> tuple[list[Unit], frozenset[Chunk]]:
    """Cut the plan into superblocks of consecutive blocks, which share panels. Returns them, and all chunks
    of C."""
    blocks = list(plan.blocks())
    count, (down, across) = max(1, len(blocks) // (SUPERBLOCKS * workers)), plan.problem.c.grid
    found = []
    for number in range(ceil_div(len(blocks), count)):
        some = blocks[number * count : (number + 1) * count]
        chunks = frozenset(part.chunk for block in some for part in plan.parts(block))
        flops = float(sum(block.rows * block.cols for block in some))
        found.append(Unit(number, chunks, flops))
    return found, frozenset((i, j) for i in range(down) for j in range(across))


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
