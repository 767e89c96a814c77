"""Carries out a plan on a cluster: its workers make superblocks of C, and this process, the client, does the
rest. The client takes over the chunks of each finished superblock, and notes them. Where a worker dies,
others make its superblock again."""

import os
import queue
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import distributed
from distributed.comm import CommClosedError

from ..engine.ports import Failure, Operation, Source
from ..planning.plan import Plan
from ..planning.schedule import Block
from ..storage.io import locks
from ..storage.read import addresses
from ..support.errors import DeviceError, InputError
from ..support.intervals import ceil_div
from ..support.trace import Trace
from . import workers as alike
from .on_worker import SECONDS, Chunk, Report, Work, superblock
from .workers import GONE, Workers

SUPERBLOCKS = 16
"""Most superblocks for each worker, which keep all workers busy nearly to the end."""
ANSWER = 10.0
"""Seconds within which the report of a superblock must arrive from its worker."""
DEATHS = 5
"""Workers that may die while they make a superblock, before the superblock counts as the reason."""


@dataclass
class _Superblock:
    """Consecutive blocks that one worker makes."""

    number: int
    chunks: frozenset[Chunk]
    flops: float
    deaths: int = 0
    fraction: float = 0.0
    """Share of the superblock that is done."""
    bytes_read: int = 0


class Cluster:
    """An `Executor` that runs plans on the workers of a cluster."""

    def __init__(self, workers: Workers, inputs: Mapping[str, Any]):
        """inputs: A and B by operand, which the workers open themselves. Raises InputError where they
        cannot."""
        self.hardware = self.workers = workers
        self._inputs = {name: _portable(spec) for name, spec in inputs.items()}
        self.predicted_bytes_read = 0
        """Bytes that the superblocks of all plans read. Workers do not share panels."""
        self._started: tuple[Plan, Operation, Trace] | None = None
        self._peaks = 0, 0
        self._failure: Failure | None = None

    def start(self, plan: Plan, operation: Operation, trace: Trace) -> None:
        """Does nothing: workers start their devices for each superblock."""
        self._started = plan, operation, trace

    def close(self) -> None:
        """Does nothing: workers hold nothing between superblocks."""

    def explain(self, error: Exception) -> Failure | None:
        """Returns what a worker's device has said of the error, or that the scheduler is gone."""
        if self._failure and self._failure.error is error:
            return self._failure
        if isinstance(error, OSError | CommClosedError) and self.workers.client.status != "running":
            return Failure(DeviceError(GONE))
        return None

    def peak_host_bytes(self) -> int:
        """The largest resident set of a worker, in bytes."""
        return self._peaks[0]

    def peak_device_bytes(self) -> int:
        """The most memory that a worker's device has held, in bytes."""
        return self._peaks[1]

    def execute(
        self, sources: Mapping[str, Source], target: Any, progress: Callable[[float], None]
    ) -> list[Block]:
        """Runs the plan on the workers."""
        assert self._started, "it is started"
        plan, operation, trace = self._started
        todo, chunks = _cut(plan, len(self.workers.known))
        self.predicted_bytes_read += sum(plan.without(chunks - one.chunks).bytes_read for one in todo)
        with self.workers.reached(), target.sink.run_folder() as folder:
            work = Work(
                inputs={name: self._inputs.get(name) for name in sources},
                c=str(folder.parent),
                name=target.name,
                folder=str(folder),
                plan=_slim(plan),
                operation=operation,
                device=self.workers.device,
                topic=f"ooc-gemm-{os.urandom(8).hex()}",
                boot=locks.boot_id(),
            )
            run = _Run(self, work, todo, chunks, target, trace)
            try:
                run.to_the_end(progress)
            finally:
                run.forget()
        return sorted(run.wrong, key=lambda block: (block.row, block.col))

    def note(self, report: Report) -> None:
        """Remember the peak memory that a worker reports."""
        self._peaks = max(self._peaks[0], report.peak), max(self._peaks[1], report.peak_device)

    def failed(self, failure: Failure) -> DeviceError:
        """Return the error to raise for a failure of a worker's device, which `explain` recognizes."""
        self._failure = failure
        return failure.error


class _Run:
    """The superblocks of a run: which are left to do, which worker makes which, and their results."""

    def __init__(
        self,
        cluster: Cluster,
        work: Work,
        todo: list[_Superblock],
        chunks: frozenset[Chunk],
        target: Any,
        trace: Trace,
    ):
        """chunks: all chunks of C that the superblocks make."""
        self._cluster, self._workers, self._work = cluster, cluster.workers, work
        self._client = cluster.workers.client
        self._todo, self._all, self._chunks = todo, list(todo), chunks
        self._target, self._trace, self._read = target, trace, trace.bytes["read"]
        self._running: dict[Any, tuple[str, _Superblock]] = {}
        self._reports: queue.SimpleQueue[tuple[int, float, int]] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.wrong: list[Block] = []
        """Blocks that failed their check."""
        self._client.subscribe_topic(work.topic, lambda event: self._reports.put(event[1]))

    def to_the_end(self, progress: Callable[[float], None]) -> None:
        """Have all superblocks made. Raises what a worker raises, and DeviceError where no worker is left
        or all of them are paused."""
        looked = seen = heard = time.monotonic()
        flops = sum(one.flops for one in self._all) or 1.0
        while self._todo or self._running:
            self._hand_out()
            for future in _some(self._finished, SECONDS):
                self._take(future)
                heard = time.monotonic()
            if self._hear():
                heard = time.monotonic()
            progress(sum(one.fraction * one.flops for one in self._all) / flops)
            if time.monotonic() < looked + SECONDS:
                continue
            self._look()
            looked = time.monotonic()
            seen = looked if self._workers.known else seen
            if looked > seen + alike.TIMEOUT:
                raise DeviceError("the cluster has no workers left; add some and continue with resume=True")
            if looked > heard + alike.TIMEOUT:
                if self._workers.paused():
                    raise DeviceError(alike.PAUSED)
                heard = looked

    def forget(self) -> None:
        """Cancel what is still under way, because its results are not needed any more."""
        if self._client.status != "running":
            return
        try:
            self._client.unsubscribe_topic(self._work.topic)
            self._client.cancel(list(self._running), force=True)
        except (OSError, RuntimeError, ValueError, TimeoutError):  # the scheduler is gone
            pass

    def _hand_out(self) -> None:
        """Give every idle worker a superblock to make."""
        idle = set(self._workers.known) - {address for address, _ in self._running.values()}
        while self._todo and idle:
            address, one = idle.pop(), self._todo.pop(0)
            future = self._client.submit(
                superblock, self._work, one.number, self._chunks - one.chunks, workers=[address], pure=False,
                key=f"{self._work.topic}-{one.number}-{one.deaths}",
            )  # fmt: skip
            self._running[future] = address, one
            future.add_done_callback(self._finished.put)

    def _take(self, future: Any) -> None:
        """Take over the chunks that a worker has made."""
        if future not in self._running:
            return
        address, one = self._running.pop(future)
        report = self._result(future)
        if report is None:
            self._died(one, address)
            return
        for chunk, path in report.written:
            self._target.sink.take(chunk, path)
        self.wrong += report.wrong
        self._target.overflowed += report.overflowed
        self._trace.include(report.moved, report.seconds)
        self._read += report.moved["read"]
        self._cluster.note(report)
        one.fraction = 1.0

    def _hear(self) -> bool:
        """Note the progress that workers report. Returns whether there was any."""
        heard = False
        for number, fraction, nbytes in _some(self._reports, 0):
            one = self._all[number]
            one.fraction = max(one.fraction, fraction)
            one.bytes_read = max(one.bytes_read, nbytes)
            heard = True
        self._trace.bytes["read"] = self._read + sum(one.bytes_read for _, one in self._running.values())
        return heard

    def _look(self) -> None:
        """Find out which workers exist, and have the superblocks of missing ones made again."""
        if self._client.status != "running":  # it would ask for long whether anybody is there
            raise CommClosedError
        self._workers.look()
        for future, (address, one) in list(self._running.items()):
            if address not in self._workers.known:
                del self._running[future]
                future.cancel()
                self._died(one, address)

    def _result(self, future: Any) -> Report | None:
        """Return the report of a superblock; None where its worker has died. Raises what the worker
        raised."""
        try:
            found: Report | Failure = future.result(ANSWER)
        except (distributed.KilledWorker, TimeoutError):
            return None
        except (distributed.CancelledError, CommClosedError):
            if self._client.status != "running":
                raise
            return None
        finally:
            future.release()
        if isinstance(found, Failure):
            raise self._cluster.failed(found)
        return found

    def _died(self, one: _Superblock, address: str) -> None:
        """Have the superblock of a worker that has died made again by another."""
        self._workers.known.pop(address, None)
        one.deaths, one.fraction, one.bytes_read = one.deaths + 1, 0.0, 0
        if one.deaths == DEATHS:
            raise DeviceError(
                f"{DEATHS} workers have died of the same blocks of C; give a smaller memory_limit "
                "and continue with resume=True"
            )
        self._todo.insert(0, one)


def _cut(plan: Plan, workers: int) -> tuple[list[_Superblock], frozenset[Chunk]]:
    """Cut the plan into superblocks of consecutive blocks, which share panels. Returns them, and all chunks
    of C."""
    blocks = list(plan.blocks())
    count, (down, across) = max(1, len(blocks) // (SUPERBLOCKS * workers)), plan.problem.c.grid
    found = []
    for number in range(ceil_div(len(blocks), count)):
        some = blocks[number * count : (number + 1) * count]
        chunks = frozenset(part.chunk for block in some for part in plan.parts(block))
        flops = float(sum(block.rows * block.cols for block in some))
        found.append(_Superblock(number, chunks, flops))
    return found, frozenset((i, j) for i in range(down) for j in range(across))


def _slim(plan: Plan) -> Plan:
    """Return a plan without what workers find out when they open the arrays or plan their part again."""
    p = plan.problem
    a, b, c = (replace(matrix, stored=None) for matrix in (p.a, p.b, p.c))
    return replace(plan, problem=replace(p, a=a, b=b, c=c), found=(), kept=(), done=frozenset(), advice=None)


def _portable(spec: Any) -> Any:
    """Return what a worker opens an input by. Raises InputError where it cannot be opened there."""
    found = addresses.portable(spec)
    if found is None and next(addresses.secrets_of(spec), None) is not None:
        raise InputError(
            f"{addresses.describe(spec)} has credentials in its address or in its store, which are not sent "
            "to workers; give its address without them and set them in the environment of the workers"
        )
    if found is None:
        raise InputError(
            f"{addresses.describe(spec)} is not where workers find it; store it as a Zarr array first"
        )
    return found


def _some(items: "queue.SimpleQueue[Any]", seconds: float) -> Iterator[Any]:
    """Return all items of a queue, after waiting so long for the first."""
    try:
        yield items.get(timeout=seconds) if seconds else items.get_nowait()
        while True:
            yield items.get_nowait()
    except queue.Empty:
        return
