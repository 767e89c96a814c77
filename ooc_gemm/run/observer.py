"""Who watches a run. Nothing here changes C."""

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
    """What is called, and written, while a product is computed."""

    progress: Progress | None = None
    """Called with the fraction that is done, the plan and the bytes and seconds so far."""
    notice: Notice | None = None
    """Called with sentences for the user."""
    trace: str | os.PathLike[str] | None = None
    """File for a timeline of all stages."""

    def note(self, text: str) -> None:
        """Pass on a sentence about how the run goes; without `notice` it is dropped."""
        if self.notice:
            self.notice(text)

    def warn(self, text: str) -> None:
        """Pass on a sentence about what C holds; without `notice` it is a UserWarning in the user's code."""
        if self.notice:
            self.notice(text)
        else:
            warnings.warn(text, stacklevel=1 + _frames_inside())


def _frames_inside() -> int:
    """How many frames of this package lie between the caller of this function and the user's code."""
    frame, count = sys._getframe(1), 0
    while frame and frame.f_globals.get("__name__", "").startswith("ooc_gemm."):
        count, frame = count + 1, frame.f_back  # type: ignore[assignment]
    return count
