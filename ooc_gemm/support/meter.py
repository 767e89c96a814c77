"""How far a run is, and the logger `ooc_gemm`, which says so while that takes long.

The logger has no handlers of its own. Its records are of the level INFO. They have two attributes beside the
message: `event`, the kind of the record, and `fields`, numbers and texts by name.
"""

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, Self

from .memory import spelled_size

log = logging.getLogger("ooc_gemm")
LOG_SECONDS = 30.0
"""Seconds between two records that say how far a run is."""

UNWRITTEN = 1 - 1e-6
"""The largest share that is reported while something is still to be written."""


class Unfinished:
    """Passes on how far a run is whose output is not all written when its last part says that it is done."""

    def __init__(self, report: Callable[..., Any] | None):
        """report: called with the share that is done, and what else is told; None where nobody asks."""
        self._report = report
        self._told: tuple[Any, ...] | None = None

    def __call__(self, fraction: float, *told: Any) -> Any:
        """Report no more than `UNWRITTEN`. Returns what the callback does."""
        self._told = told
        return self._report(min(fraction, UNWRITTEN), *told) if self._report else None

    def finish(self) -> None:
        """Report that all is written, where anything has been reported."""
        if self._report and self._told is not None:
            self._report(1.0, *self._told)


def logs() -> bool:
    """Whether anybody wants the records."""
    return log.isEnabledFor(logging.INFO)


def event(kind: str, text: str, **fields: Any) -> None:
    """Log that something has happened. kind: `plan`, `progress`, `note`, `done` and so on. fields: JSON
    types."""
    log.info("%s", text, extra={"event": kind, "fields": fields})


class Meter:
    """How far some work is. While it is under way, this is logged every `LOG_SECONDS`, where the logger lets
    records of the level INFO through.

    Work within other work of the same thread is not logged, because the other work says how far it is.
    """

    under_way: ClassVar["list[Meter]"] = []
    """Of this process, the oldest first."""

    def __init__(
        self,
        what: str,
        flops: float = 0.0,
        nbytes: int = 0,
        moved: Callable[[], int] | None = None,
        verb: str = "read",
    ):
        """what: names the work. flops: operations of all of it; 0 where nobody counts them. nbytes: bytes
        that it moves in all; 0 where that is not known. moved: returns those moved so far; by default they
        grow with the work. verb: what is done with them."""
        self.what, self._flops, self._nbytes, self._verb = what, flops, nbytes, verb
        self.fraction = 0.0
        """Share of the work that is done."""
        self._moved = moved
        self._began = time.perf_counter()
        self._thread = threading.get_ident()
        self._ended = threading.Event()
        self._logging: threading.Thread | None = None

    def __call__(self, fraction: float) -> None:
        """Note the share that is done."""
        self.fraction = fraction

    def __enter__(self) -> Self:
        if all(other._thread != self._thread for other in self.under_way):
            self.under_way.append(self)
            if logs():
                self._logging = threading.Thread(target=self._log, name="ooc-gemm log", daemon=True)
                self._logging.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._logging is not None:
            self._logging.join(1)  # a handler may hang in what it writes to
        if self in self.under_way:
            self.under_way.remove(self)

    def _log(self) -> None:
        while not self._ended.wait(LOG_SECONDS):
            event("progress", str(self), **self.fields())

    def fields(self) -> dict[str, Any]:
        """Return how far the work is, as JSON types: percent, bytes, seconds, and rates per second."""
        seconds, fraction = time.perf_counter() - self._began, self.fraction
        moved = self._moved() if self._moved else round(fraction * self._nbytes)
        return {
            "work": self.what,
            "percent": 100.0 if fraction == 1 else min(99.99, round(100 * fraction, 2)),
            f"bytes_{self._verb}": moved,
            "bytes_in_all": self._nbytes or None,
            "bytes_per_second": round(moved / seconds) if seconds else None,
            "flops_per_second": round(self._flops * fraction / seconds) if seconds and self._flops else None,
            "seconds": round(seconds, 3),
            "seconds_left": round(seconds * (1 - fraction) / fraction, 3) if fraction else None,
        }

    def __str__(self) -> str:
        """How far the work is, for people."""
        found = self.fields()
        speed = found["flops_per_second"] if self._flops else found["bytes_per_second"]
        moved, left = found[f"bytes_{self._verb}"], found["seconds_left"]
        parts = [
            f"{self.what}: {int(found['percent'])} %",
            (rate(speed) if self._flops else f"{spelled_size(speed)}/s") if speed else "",
            f"{self._verb} {of(moved, self._nbytes) if self._nbytes else spelled_size(moved)}"
            if moved
            else "",
            f"{timedelta(seconds=round(left))} left" if left is not None else "",
        ]
        return ", ".join(filter(None, parts))


def rate(flops: float) -> str:
    """Return floating-point operations per second as text, such as `3.2 TFLOP/s`."""
    scale, unit = next((pair for pair in ((1e12, "T"), (1e9, "G")) if flops >= 0.9995 * pair[0]), (1e6, "M"))
    return f"{flops / scale:.3g} {unit}FLOP/s"


def of(done: int, whole: int) -> str:
    """Return `1.2 of 3.4 GiB`, of two numbers of bytes."""
    (part, unit), (most, last) = (spelled_size(nbytes).split() for nbytes in (done, whole))
    rest = f"of {float(most):.3g} {last}"
    return f"{float(part):.3g} {rest if unit == last else f'{unit} {rest}'}"
