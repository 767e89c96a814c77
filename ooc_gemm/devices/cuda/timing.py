"""When the streams of a GPU did what, for the trace."""

import time
from collections import Counter, deque
from dataclasses import dataclass
from threading import Lock
from typing import Any

from ...cuda_kernels.driver import Event, Events
from ...support.trace import Trace

SPANS = 128
"""Number of operations whose events are kept before the trace is told. A product of many pieces has a million
operations, and each that is left for the end takes 15 µs then."""

COPIES_TIMED = 16
"""One copy in this many has two events of its own. Recording them takes as long as the copy's own call."""


@dataclass
class _Span:
    """An operation, and the events before and after it."""

    stage: str
    start: Event
    stop: Event
    nbytes: int
    args: dict[str, Any]


class Timing:
    """Records events around the operations in the streams of one device, and tells the trace of them later,
    so that nobody waits for the device."""

    def __init__(self, device: str, times: Events, points: Events):
        """`device`: its name, such as "cuda:1". `times`: makes events with their times. `points`: makes
        events that only order streams."""
        self._device, self._times, self.points = device, times, points
        self.spans: deque[_Span] = deque()
        self._copies = Counter[str]()
        self._due = set[str]()
        """Stages of which the next copy is to be timed."""
        self._untimed = Counter[str]()
        self._telling, self._counting = Lock(), Lock()
        self._base_time = time.perf_counter()

    def open(self, trace: Trace, stream: Any) -> None:
        """Begin a run. `stream` must be idle."""
        self._trace = trace
        self._copies.clear()
        self._due.clear()
        self._base = self._times.record(stream.ptr)
        self._base.synchronize()
        self._base_time = time.perf_counter()

    def begin(self, stream: Any) -> Event:
        """Record the event before an operation."""
        return self._times.record(stream.ptr)

    def begin_copy(self, stage: str, stream: Any) -> Event | None:
        """Record the event before a copy if the copy is timed: one in some, or each of them for a
        timeline."""
        if stage not in self._due and not self.times(stage) and not self._trace.keep:
            return None
        self._due.discard(stage)
        return self.begin(stream)

    def times(self, stage: str) -> bool:
        """Count a copy, and return whether it is one in COPIES_TIMED, which is to be timed. Then it, or one
        that is made meanwhile, must come to `begin_copy`. Two threads may count the same copy, so it is about
        one."""
        count = self._copies[stage]
        self._copies[stage] = count + 1
        if count % COPIES_TIMED == 0:
            self._due.add(stage)
        return count % COPIES_TIMED == 0

    def count(self, stage: str, nbytes: int) -> None:
        """Count the bytes of a copy that is not timed."""
        with self._counting:
            self._untimed[stage] += nbytes

    def end(self, stage: str, start: Event | None, stream: Any, nbytes: int, **args: Any) -> Event:
        """Record the event after an operation of `nbytes` bytes. `start`: what `begin` or `begin_copy`
        returned. `args`: details for the timeline."""
        if start is None:
            self.count(stage, nbytes)
            return self.points.record(stream.ptr)
        stop = self._times.record(stream.ptr)
        self.spans.append(_Span(stage, start, stop, nbytes, args))
        self._tell(SPANS)
        return stop

    def tell_all(self) -> None:
        """Tell the trace of all operations. The streams must be idle."""
        self._tell(0)
        longest = time.perf_counter() - self._base_time
        for stage, nbytes in self._untimed.items():  # at the rate of those like them, if there are any
            seconds = nbytes * self._trace.seconds[stage] / max(1, self._trace.bytes[stage])
            self._trace.include({stage: nbytes}, {stage: min(seconds, longest)})

    def close(self) -> None:
        """Drop the operations that the trace has not been told of."""
        self._untimed.clear()
        self.spans.clear()

    def _tell(self, keep: int) -> None:
        """Tell the trace of the oldest operations that the device has completed, until `keep` are left."""
        if len(self.spans) <= keep or not self._telling.acquire(blocking=False):
            return
        try:
            while len(self.spans) > keep and self.spans[0].stop.done:
                span = self.spans.popleft()
                start, stop = (
                    self._base_time + event.seconds_since(self._base) for event in (span.start, span.stop)
                )
                self._trace.add(span.stage, start, stop, self._track(span.stage), span.nbytes, **span.args)
        finally:
            self._telling.release()

    def _track(self, stage: str) -> str:
        """Return the line of the timeline that shows one of the device's streams."""
        return stage if self._device == "cuda" else f"{stage} {self._device}"
