"""Deals the tasks of a run to the workers of a cluster, one at a time to each, and takes their results.

A subclass says which tasks there are. Here is what all of them have in common: progress, errors, and workers
that die.
"""

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import distributed
from distributed.comm import CommClosedError

from ..engine.ports import Failure
from ..planning.schedule import Block
from ..support.errors import DeviceError, Error
from ..support.trace import Trace
from . import workers as alike
from .on_worker import SECONDS, Report
from .workers import Workers

ANSWER = 10.0
"""Seconds within which the report of a task must arrive from its worker."""
DEATHS = 5
"""Workers that may die of one task, before the task counts as the reason."""


@dataclass
class Unit:
    """Blocks over some of k, or another part of the work, that one worker makes in one task."""

    number: int
    flops: float
    """Its share in the progress of the run, in any unit."""
    deaths: int = 0
    fraction: float = 0.0
    """Share of the work that is done."""
    bytes_read: int = 0

    def died(self, again: str) -> None:
        """Note that a worker has died of this. Raises DeviceError where too many have. again: how the user
        goes on."""
        self.deaths, self.fraction, self.bytes_read = self.deaths + 1, 0.0, 0
        if self.deaths == DEATHS:
            raise DeviceError(
                f"{DEATHS} workers have died of the same part of the work; give a smaller memory_limit, "
                f"and {again}"
            )


@dataclass
class Task:
    """What workers are doing."""

    addresses: tuple[str, ...]
    """The worker that does it, and others whose results it needs."""
    done: Callable[[Report], None]
    """Called with the report when it is done."""
    died: Callable[[], None]
    """Called where one of the workers has died."""
    unit: Unit | None = None
    """What is computed; None for a task that computes no products."""
    more: Sequence[Any] = field(default=())
    """Other futures that are of no use if the task fails."""


class Dealing:
    """The tasks of a run: which are left to do, and which worker does which."""

    predicted_bytes_read = 0
    """Bytes that all tasks read if no worker dies."""
    predicted_bytes_exchanged = 0
    """Bytes that they get from other workers."""

    def __init__(self, workers: Workers, topic: str, units: list[Unit], target: Any, trace: Trace):
        """topic: under which workers report how far they are."""
        self._workers, self._client, self._topic = workers, workers.client, topic
        self._units, self._target, self._trace, self._read = units, target, trace, trace.bytes["read"]
        self._running: dict[Any, Task] = {}
        self._reports: queue.SimpleQueue[tuple[int, float, int]] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._submitted = 0
        self.wrong: list[Block] = []
        """Blocks that failed their check."""
        self.peaks = 0, 0
        """The largest resident set of a worker, and the most memory of a worker's device, in bytes."""
        self.failure: Failure | None = None
        """What a worker's device has failed of."""
        self._client.subscribe_topic(topic, lambda event: self._reports.put(event[1]))

    def _left(self) -> bool:
        """Whether anything is still to be done."""
        raise NotImplementedError

    def _hand_out(self) -> None:
        """Give idle workers something to do."""
        raise NotImplementedError

    def _check_held(self) -> None:
        """Do again what workers have held that are gone."""

    def to_the_end(self, progress: Callable[[float], object]) -> None:
        """Have everything done. Raises what a worker raises, and DeviceError where no worker is left or all
        of them are paused."""
        looked = seen = heard = time.monotonic()
        flops = sum(one.flops for one in self._units) or 1.0
        while self._left():
            self._hand_out()
            for future in _some(self._finished, SECONDS):
                self._take(future)
                heard = time.monotonic()
            if self._hear():
                heard = time.monotonic()
            progress(sum(one.fraction * one.flops for one in self._units) / flops)
            if time.monotonic() < looked + SECONDS:
                continue
            self._look()
            looked = time.monotonic()
            seen = looked if self._workers.known else seen
            if looked > seen + alike.TIMEOUT:
                raise DeviceError(f"the cluster has no workers left; add some and {self._workers.again}")
            if looked > heard + alike.TIMEOUT:
                if self._workers.paused():
                    raise DeviceError(self._workers.stopped)
                heard = looked

    def forget(self) -> None:
        """Cancel what is still under way, because its results are not needed any more."""
        if self._client.status != "running":
            return
        try:
            self._client.unsubscribe_topic(self._topic)
            for future, task in self._running.items():
                self._client.cancel([future, *task.more], force=True)
        except (OSError, RuntimeError, ValueError, TimeoutError):  # the scheduler is gone
            pass

    def _idle(self) -> set[str]:
        """Return the addresses of workers without a task."""
        busy = {address for task in self._running.values() for address in task.addresses}
        return set(self._workers.known) - busy

    def _submit(self, address: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Have a worker call a function, and return the future of its result."""
        self._submitted += 1
        return self._client.submit(
            function, *arguments, workers=[address], pure=False,
            key=f"{self._topic}-{self._submitted}",
        )  # fmt: skip

    def _start(self, future: Any, task: Task) -> None:
        """Note a task, whose future has a Report or a Failure as its result."""
        self._running[future] = task
        future.add_done_callback(self._finished.put)

    def _take(self, future: Any) -> None:
        """Take the report of a task."""
        if future not in self._running:
            return
        task = self._running.pop(future)
        try:
            report = self._result(future)
        except Error as error:  # a path, or a limit, may be another one there
            error.add_note(f"worker {task.addresses[0]} has met this error")
            raise
        if report is None:
            self._workers.known.pop(task.addresses[0], None)
            task.died()
            return
        self._trace.include(report.moved, report.seconds)
        self._read += report.moved["read"]
        self.peaks = max(self.peaks[0], report.peak), max(self.peaks[1], report.peak_device)
        if task.unit:
            task.unit.fraction = 1.0
        task.done(report)

    def _take_over(self, report: Report) -> None:
        """Take over the chunks that a worker has written, and what it says of them."""
        for chunk, path in report.written.files():
            self._target.sink.take(chunk, path)
        self.wrong += report.wrong
        self._target.overflowed += report.overflowed

    def _hear(self) -> bool:
        """Note the progress that workers report. Returns whether there was any."""
        heard = False
        for number, fraction, nbytes in _some(self._reports, 0):
            one = self._units[number]
            one.fraction = max(one.fraction, fraction)
            one.bytes_read = max(one.bytes_read, nbytes)
            heard = True
        units = [task.unit for task in self._running.values() if task.unit]
        self._trace.bytes["read"] = self._read + sum(one.bytes_read for one in units)
        return heard

    def _look(self) -> None:
        """Find out which workers exist, and have the tasks of missing ones done again."""
        if self._client.status != "running":  # it would ask for long whether anybody is there
            raise CommClosedError
        self._workers.look()
        for future, task in list(self._running.items()):
            if not set(task.addresses) <= set(self._workers.known):
                del self._running[future]
                for one in (future, *task.more):
                    one.cancel()
                task.died()
        self._check_held()

    def _result(self, future: Any) -> Report | None:
        """Return the report of a task; None where its worker has died. Raises what the worker raised."""
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
            self.failure = found
            raise found.error
        return found


def _some(items: "queue.SimpleQueue[Any]", seconds: float) -> Iterator[Any]:
    """Return all items of a queue, after waiting so long for the first."""
    try:
        yield items.get(timeout=seconds) if seconds else items.get_nowait()
        while True:
            yield items.get_nowait()
    except queue.Empty:
        return
