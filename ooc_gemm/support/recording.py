"""Records what a run does, for its report: spans of all stages, memory over time, plans and notices.

A recording is on for what its thread does inside `with Recording()`. Traces that are made meanwhile hand it
their spans. It takes a bounded amount of memory, however long the run is.
"""

import math
import time
from contextlib import suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Any, Self, TypeVar

from .memory import resident_bytes

T = TypeVar("T")

MOST_SPANS = 6000
"""Spans that are kept. Beyond that, neighbours on a track become one."""
MOST_SAMPLES = 2000
"""Samples of memory that are kept. Beyond that, every second one is dropped."""
FIRST_PERIOD = 0.05
"""Seconds between samples of memory, at first."""
MOST_NOTICES = 200
"""Notices that are kept: the first of them."""


@dataclass(slots=True)
class Span:
    """Work of one stage on one track, or several pieces of work that follow each other closely."""

    stage: str
    start: float
    """Seconds since the recording began."""
    stop: float
    busy: float
    """Seconds of work in it."""
    nbytes: int
    count: int = 1
    """How many pieces of work it stands for."""

    def take(self, other: "Span") -> None:
        """Make one span of this one and a later one."""
        self.start, self.stop = min(self.start, other.start), max(self.stop, other.stop)
        self.busy += other.busy
        self.nbytes += other.nbytes
        self.count += other.count


class Spans:
    """Spans by track, of which at most `most` are kept."""

    def __init__(self, most: int = MOST_SPANS):
        self._most, self._gap, self._count = most, 0.0, 0
        self._tracks: dict[str, list[Span]] = {}
        self._lock = Lock()

    def add(self, track: str, span: Span) -> None:
        """Add a span that ends later than those before it on its track."""
        with self._lock:
            line = self._tracks.setdefault(track, [])
            if not self._joined(line, span):
                self._count += 1
            while self._count > self._most and self._gap < math.inf:
                self._coarsen()

    def _joined(self, line: list[Span], span: Span) -> bool:
        """Put a span at the end of a line; whether it has become part of the last one there."""
        if line and line[-1].stage == span.stage and span.start - line[-1].stop < self._gap:
            line[-1].take(span)
            return True
        line.append(span)
        return False

    def _coarsen(self) -> None:
        """Join neighbours that are twice as far apart as before."""
        self._gap = max(1e-5, 2 * self._gap)
        for track, line in self._tracks.items():
            short: list[Span] = []
            for span in line:
                self._count -= self._joined(short, span)
            self._tracks[track] = short

    def lanes(self) -> list[tuple[str, list[Span]]]:
        """Return stages and spans, a lane for each of the most tracks of a stage that are in use at a time: a
        thread that ends makes room for one that begins later."""
        found: dict[str, list[list[Span]]] = {}
        with self._lock:
            tracks = sorted((line for line in self._tracks.values() if line), key=lambda line: line[0].start)
        for line in tracks:
            lanes = found.setdefault(line[0].stage, [])
            free = next((lane for lane in lanes if lane[-1].stop <= line[0].start), None)
            if free is None:
                lanes.append(list(line))
            else:
                free += line
        return [(stage, lane) for stage, lanes in found.items() for lane in lanes]


class _Memory(Thread):
    """Samples the resident memory of this process until it is stopped."""

    def __init__(self, start: float):
        super().__init__(name="ooc-gemm memory", daemon=True)
        self._begin, self._ended, self._period = start, Event(), FIRST_PERIOD
        self.samples: list[tuple[float, int]] = []

    def run(self) -> None:
        """Take samples, less often the longer it takes."""
        while True:
            self.sample()
            if len(self.samples) >= MOST_SAMPLES:
                self.samples[:] = self.samples[::2]
                self._period *= 2
            if self._ended.wait(self._period):
                return

    def sample(self) -> None:
        """Take one sample."""
        self.samples.append((time.perf_counter() - self._begin, resident_bytes()))

    def end(self) -> None:
        """Stop, and take the last sample."""
        self._ended.set()
        self.join()
        self.sample()


class Recording:
    """What is known of a run. It is on between `__enter__` and `__exit__`, and can be read afterwards."""

    def __init__(self, spans: bool = True):
        """`spans`: keep the spans of traces. A benchmark leaves them out, so that they take no time."""
        self.spans = Spans() if spans else None
        self.started = datetime.now(UTC).astimezone()
        self.seconds = 0.0
        """Seconds from the beginning to the end."""
        self.plans: list[Any] = []
        """The plans that were begun, in order."""
        self.devices: list[str] = []
        """What carried out each plan."""
        self.notices: list[str] = []
        """Sentences for the user, in order."""
        self.result: Any = None
        """The last result that was made; None where there is none."""
        self.benchmark: dict[str, Any] | None = None
        """The report of a benchmark."""
        self.parts: list[Any] = []
        """Lines and tables that show a benchmark."""
        self.error: BaseException | None = None
        """What ended the run; None where it has done its work."""
        self._begin = time.perf_counter()
        self._memory = _Memory(self._begin)
        self._token: Token[Recording | None] | None = None

    @property
    def memory(self) -> list[tuple[float, int]]:
        """Samples of resident memory: seconds since the beginning, and bytes."""
        return self._memory.samples

    def __enter__(self) -> Self:
        self._token = _current.set(self)
        self._memory.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.error, self.seconds = error, time.perf_counter() - self._begin
        self._memory.end()
        if self._token is not None:
            with suppress(ValueError):  # ended in another context than it began in
                _current.reset(self._token)

    @property
    def begun(self) -> bool:
        """Whether anything was begun."""
        return bool(self.plans or self.benchmark or (self.spans and self.spans.lanes()))

    def add(self, stage: str, track: str, start: float, stop: float, nbytes: int) -> None:
        """Add a span. Times are those of `time.perf_counter`."""
        if self.spans is not None:
            begin = start - self._begin
            self.spans.add(track, Span(stage, begin, stop - self._begin, stop - start, nbytes))

    def notice(self, text: str) -> None:
        """Keep a sentence for the user."""
        if len(self.notices) < MOST_NOTICES:
            self.notices.append(text)


_current: ContextVar[Recording | None] = ContextVar("ooc_gemm_recording", default=None)


def current() -> Recording | None:
    """Return the recording that is on, if there is one."""
    return _current.get()


def note_plan(plan: Any, device: str) -> None:
    """Keep a plan that is begun, and the model of its device, where a recording is on."""
    if (recording := current()) is not None:
        recording.plans.append(plan)
        recording.devices.append(device)


def recorded(result: T) -> T:
    """Keep a result, where a recording is on, and return it."""
    if (recording := current()) is not None:
        recording.result = result
    return result
