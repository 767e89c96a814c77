"""Callbacks and files by which users watch a run. Nothing here changes C."""

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from ..planning.plan import Plan
from ..support.trace import Trace

Progress = Callable[[float, Plan, Trace], None]
Notice = Callable[[str], None]


@dataclass(frozen=True)
class Observer:
    """The callbacks that are called, and the trace that is written, while a product is computed."""

    progress: Progress | None = None
    """Called with the fraction that is done, the plan, and the bytes and seconds so far."""
    notice: Notice | None = None
    """Called with sentences for the user; None drops or warns (`note`, `warn`)."""
    trace: str | os.PathLike[str] | None = None
    """File to which a timeline of all stages is written; None for no file."""

    def note(self, text: str) -> None:
        """Pass on a sentence about how the run proceeds; it is dropped where there is no `notice`."""
        if self.notice:
            self.notice(text)

    def warn(self, text: str) -> None:
        """Pass on a sentence about what C holds; where there is no `notice`, it becomes a UserWarning in the
        user's code."""
        if self.notice:
            self.notice(text)
        else:
            warnings.warn(text, stacklevel=1 + _frames_inside())


def _frames_inside() -> int:
    """Return how many frames of this package lie between the caller of this function and the user's code."""
    frame, count = sys._getframe(1), 0
    while frame and frame.f_globals.get("__name__", "").startswith("ooc_gemm."):
        count, frame = count + 1, frame.f_back  # type: ignore[assignment]
    return count
