"""Records what each stage did and when: totals for the result, and a timeline for Perfetto."""

import json
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, get_ident
from typing import Any

from . import recording
from .errors import StoreError

STAGES = ("read", "upload", "compute", "download", "write")
PASS = "pass"
"""Copies from one device to another, which only the timeline shows."""
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

    def __init__(self, keep: bool = False, recorded: bool = True):
        """`keep`: keep all spans for `write`, and not their totals alone. `recorded`: hand spans to the
        recording that is on, if there is one (`recording.py`)."""
        self.keep = keep
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
        self._spans: list[tuple[str, str, float, float, dict[str, Any]]] = []
        self._lock = Lock()
        self._start = time.perf_counter()

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
        if self.keep:
            self._spans.append((stage, track, start, start + seconds, {"bytes": nbytes, **args}))

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
        if not self._spans:
            return None
        first, last = min(span[2] for span in self._spans), max(span[3] for span in self._spans)
        step = max(last - first, 1e-9) / parts
        found: dict[str, tuple[float, ...]] = {}
        for stage in STAGES:
            spans = sorted((start, stop) for one, _, start, stop, _ in self._spans if one == stage)
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

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline in Chrome's trace event format: one process, and a track for each stage and
        thread. Raises StoreError, and then leaves no part of the file behind."""
        tracks = sorted(
            {track for _, track, *_ in self._spans}, key=lambda t: ((*STAGES, PASS).index(t.split()[0]), t)
        )
        number = {track: index for index, track in enumerate(tracks)}
        events: list[dict[str, Any]] = []
        seen: Counter[str] = Counter()
        for track in tracks:
            stage = track.split()[0]
            seen[stage] += 1
            common = {"ph": "M", "pid": 1, "tid": number[track]}
            events.append({**common, "name": "thread_name", "args": {"name": f"{stage} {seen[stage]}"}})
            events.append({**common, "name": "thread_sort_index", "args": {"sort_index": number[track]}})
        for stage, track, start, stop, args in sorted(self._spans, key=lambda span: span[2]):
            ts, dur = (start - self._start) * 1e6, (stop - start) * 1e6
            events.append(
                {
                    "name": stage,
                    "cat": stage,
                    "ph": "X",
                    "pid": 1,
                    "tid": number[track],
                    "ts": ts,
                    "dur": dur,
                    "args": args,
                }
            )
        try:
            Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        except OSError as error:
            if os.path.isfile(path):
                os.unlink(path)
            said = f"the trace {os.fspath(path)} cannot be written: {error.strerror or error}"
            raise StoreError(f"{said}; the result itself is finished") from error
