"""Callbacks and files by which users watch a run. Nothing here changes C."""

import os
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..planning.plan import Plan
from ..storage.format import conventions
from ..storage.read.source import Opened
from ..support import recording
from ..support.meter import event
from ..support.trace import Trace

Progress = Callable[[float, Plan, Trace], object]
Notice = Callable[[str], None]


@dataclass(frozen=True)
class Observer:
    """The callbacks that are called, and the trace that is written, while a product is computed."""

    progress: Progress | None = None
    """Called with the fraction that is done, which is 1 when all is written, the plan, and the bytes and
    seconds so far. Where it returns
    `ENOUGH`, no further block is begun, and the run ends with a StoppedError."""
    notice: Notice | None = None
    """Called with sentences for the user; None drops or warns (`note`, `warn`)."""
    trace: str | os.PathLike[str] | None = None
    """File to which a timeline of all stages is written; None for no file."""

    def note(self, text: str) -> None:
        """Pass on a sentence about how the run proceeds; where there is no `notice`, it is only
        logged."""
        event("note", text)
        self._keep(text)
        if self.notice:
            self.notice(text)

    def warn(self, text: str) -> None:
        """Pass on a sentence about what C holds; where there is no `notice`, it becomes a UserWarning in the
        user's code."""
        event("warning", text)
        self._keep(text)
        if self.notice:
            self.notice(text)
        else:
            warnings.warn(text, stacklevel=1 + _frames_inside())

    def warn_of_undecoded(self, sources: Iterable[Opened]) -> None:
        """Tell the user, once for each array, what its attributes say of its values that is not applied."""
        for text in dict.fromkeys(conventions.said(one.name, one.undecoded) for one in sources):
            if text:
                self.warn(text)

    def note_of_unused_limit(self, given: object, used: int | None) -> None:
        """Tell the user that a limit on device memory has no effect. given: what was asked for. used: the
        limit of the device that computes; None where it computes in host memory."""
        if given is not None and used is None:
            self.note(
                "device_memory_limit has no effect, because the CPU computes, in host memory; memory_limit "
                "limits that"
            )

    def all_done(self, plan: Plan, trace: Trace) -> None:
        """Report that everything is computed and written."""
        if self.progress:
            self.progress(1.0, plan, trace)

    @staticmethod
    def _keep(text: str) -> None:
        """Keep a sentence where a recording is on."""
        if (found := recording.current()) is not None:
            found.notice(text)


def _frames_inside() -> int:
    """Return how many frames of this package lie between the caller of this function and the user's code."""
    frame, count = sys._getframe(1), 0
    while frame and frame.f_globals.get("__name__", "").startswith("ooc_gemm."):
        count, frame = count + 1, frame.f_back  # type: ignore[assignment]
    return count
