"""Records what each stage did and when: totals for the result, and a timeline for Perfetto."""

import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock, get_ident
from typing import Any

from . import recording
from .recording import Span, Spans
from .span_file import SpanFile

STAGES = ("read", "upload", "compute", "download", "write")
DECODE = "decode"
"""Chunks that a device decodes, which only the timeline shows."""
PASS = "pass"
"""Copies from one device to another, likewise."""
LINES = (*STAGES[:2], DECODE, *STAGES[2:], PASS)
"""What the timeline shows, from its first line to its last."""
EXCHANGE = "exchange"
"""Bytes that workers of a cluster get from each other. Their readers wait for them as for the store, so the
seconds are those of reads."""


@dataclass(frozen=True)
class Timeline:
    """When the stages of a run were busy."""

    seconds: float
    """From the beginning of the first span to the end of the last."""
    busy: dict[str, tuple[float, ...]]
    """For each stage, the share of each of equal parts of this time in which it was busy on any thread, from
    0 to 1."""


class Trace:
    """Collects spans from any thread. Times are seconds of `time.perf_counter`."""

    def __init__(self, file: str | os.PathLike[str] | None = None, recorded: bool = True):
        """`file`: where `write` puts a timeline of all spans; None where their totals are enough. `recorded`:
        hand spans to the recording that is on, if there is one (`recording.py`). Raises OSError."""
        self._file, self._few = None if file is None else SpanFile(file), Spans()
        self._recording = recording.current() if recorded else None
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Busy seconds of each stage, added up over its threads. Reads and writes in the background count
        only while a thread waits for them."""
        self.least: dict[str, float] = {}
        """Seconds of the shortest span of each stage. Other spans are not kept, because a product of many
        pieces has a million."""
        self.spans: Counter[str] = Counter()
        """Number of spans of each stage."""
        self.bytes: defaultdict[str, int] = defaultdict(int)
        """Bytes that each stage moved."""
        self._lock = Lock()
        self._start = time.perf_counter()

    @property
    def keep(self) -> bool:
        """Whether the trace keeps all spans for a timeline, and not their totals alone."""
        return self._file is not None

    def add(
        self, stage: str, start: float, stop: float = 0.0, track: str = "", nbytes: int = 0, **args: Any
    ) -> None:
        """Add a span of `stage` that ends now, or at `stop`. `track` names the line of the timeline on which
        it is drawn; by default each thread has one of its own."""
        seconds = (stop or time.perf_counter()) - start
        with self._lock:
            self.seconds[stage] += seconds
            self.spans[stage] += 1
            if seconds < self.least.get(stage, math.inf):
                self.least[stage] = seconds
            self.bytes[stage] += nbytes
        if not (self.keep or self._recording):
            return
        track = track or f"{stage} {get_ident()}"
        if self._recording:
            self._recording.add(stage, track, start, start + seconds, nbytes)
        if self._file is not None:
            self._few.add(track, Span(stage, start, start + seconds, seconds, nbytes))
            self._file.add(stage, track, start, start + seconds, {"bytes": nbytes, **args})

    def include(self, nbytes: Mapping[str, int], seconds: Mapping[str, float]) -> None:
        """Add the totals that another process has recorded."""
        with self._lock:
            self.bytes[EXCHANGE] += nbytes.get(EXCHANGE, 0)
            for stage in STAGES:
                self.bytes[stage] += nbytes.get(stage, 0)
                self.seconds[stage] += seconds.get(stage, 0.0)

    def age(self) -> float:
        """Seconds since the trace was begun."""
        return time.perf_counter() - self._start

    def stage_seconds(self) -> dict[str, float]:
        """Seconds that each stage was busy, added up over its threads."""
        return {stage: round(self.seconds[stage], 6) for stage in STAGES}

    def timeline(self, parts: int = 100) -> Timeline | None:
        """When each stage was busy, in so many parts; None where spans are not kept."""
        lanes = self._few.lanes()
        if not lanes:
            return None
        first = min(lane[0].start for _, lane in lanes)
        last = max(span.stop for _, lane in lanes for span in lane)
        step = max(last - first, 1e-9) / parts
        found: dict[str, tuple[float, ...]] = {}
        for stage in STAGES:
            spans = sorted((span.start, span.stop) for one, lane in lanes if one == stage for span in lane)
            busy, upto = [0.0] * parts, first
            for start, stop in spans:
                at, upto = max(start, upto), max(upto, stop)
                while at < stop:
                    part = min(parts - 1, int((at - first) / step))
                    end = stop if part == parts - 1 else min(stop, first + (part + 1) * step)
                    end = max(end, math.nextafter(at, math.inf))
                    busy[part] += end - at
                    at = end
            if spans:
                found[stage] = tuple(min(1.0, one / step) for one in busy)
        return Timeline(last - first, found)

    def write(self) -> None:
        """Write the timeline to its file. Raises StoreError, and then leaves no part of the file behind."""
        if self._file is not None:
            self._file.write(self._start, LINES)

    def close(self) -> None:
        """Drop the spans that were kept."""
        if self._file is not None:
            self._file.close()
