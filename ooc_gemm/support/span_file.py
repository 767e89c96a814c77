"""The spans of a trace, in a file without a name until the timeline is written: a product of many pieces has
millions, and each takes half a kilobyte in memory."""

import json
import os
import pickle
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from threading import Lock
from typing import IO, Any

from .errors import StoreError

BUFFER_BYTES = 1 << 16
"""Bytes that are written at a time."""

Kept = tuple[str, float, float, dict[str, Any]]
"""The track of a span, its beginning and end in seconds, and its details."""


class SpanFile:
    """Keeps spans from any thread, and writes them as a timeline in Chrome's trace event format."""

    def __init__(self, path: str | os.PathLike[str]):
        """path: the file for the timeline, beside which spans are kept. Raises OSError."""
        self._path = os.fspath(path)
        self._tracks: dict[str, str] = {}  # track → its stage
        self._error: OSError | None = None
        self._lock = Lock()
        self._file = _nameless(os.path.dirname(self._path) or ".")

    def add(self, stage: str, track: str, start: float, stop: float, args: dict[str, Any]) -> None:
        """Keep a span. Where there is no room for it, `write` will say so."""
        data = pickle.dumps((track, start, stop, args))
        with self._lock:
            self._tracks[track] = stage
            if self._error is None:
                try:
                    self._file.write(data)
                except OSError as error:
                    self._error = error

    def write(self, begin: float, order: tuple[str, ...]) -> None:
        """Write the timeline: one process, and a track for each stage and thread. begin: its beginning, in
        seconds. order: the stages, from the top down. Raises StoreError, and then leaves no part of the file
        behind."""
        begun = False
        try:
            if self._error is not None:
                raise self._error
            self._file.seek(0)
            with open(self._path, "w") as file:
                begun = True
                file.write('{"displayTimeUnit": "ms", "traceEvents": [')
                for number, event in enumerate(self._events(begin, order)):
                    file.write((",\n" if number else "\n") + json.dumps(event))
                file.write("\n]}\n")
        except OSError as error:
            if begun and os.path.isfile(self._path):
                os.unlink(self._path)
            said = f"the trace {self._path} cannot be written: {error.strerror or error}"
            raise StoreError(f"{said}; the result itself is finished") from error
        finally:
            self.close()

    def close(self) -> None:
        """Remove the file in which spans are kept, and forget them."""
        with suppress(OSError):
            self._file.close()

    def _events(self, begin: float, order: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        """Yield the events of the timeline: the names of the tracks, and the spans in the order in which they
        were added."""
        tracks = sorted(self._tracks, key=lambda track: (order.index(self._tracks[track]), track))
        common = {track: {"pid": 1, "tid": number} for number, track in enumerate(tracks)}
        seen: Counter[str] = Counter()
        for number, track in enumerate(tracks):
            stage = self._tracks[track]
            seen[stage] += 1
            named, sorts = {"name": f"{stage} {seen[stage]}"}, {"sort_index": number}
            yield {"ph": "M", **common[track], "name": "thread_name", "args": named}
            yield {"ph": "M", **common[track], "name": "thread_sort_index", "args": sorts}
        for track, start, stop, args in self._spans():
            stage = self._tracks[track]
            times = {"ts": (start - begin) * 1e6, "dur": (stop - start) * 1e6}
            yield {"name": stage, "cat": stage, "ph": "X", **common[track], **times, "args": args}

    def _spans(self) -> Iterator[Kept]:
        with suppress(EOFError):
            while True:
                yield pickle.load(self._file)


def _nameless(folder: str) -> IO[bytes]:
    """Make a temporary file in a folder, or in the system's folder for these if no file can be made there: a
    timeline can still replace a file that exists. Raises OSError."""
    try:
        return tempfile.TemporaryFile(buffering=BUFFER_BYTES, dir=folder)
    except OSError:
        return tempfile.TemporaryFile(buffering=BUFFER_BYTES)
