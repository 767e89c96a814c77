"""The option --stop-before: a run ends in order before a time, as the limit of a batch system."""

import os
import re
import signal
import sys
import time
from datetime import datetime
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import click

from ..support.errors import ENOUGH
from .types import ParamType

if TYPE_CHECKING:
    from ..planning.plan import Plan
    from ..support.trace import Trace

RESERVE_SECONDS, RESERVE_SHARE = 5.0, 0.1
"""What is kept free before the time, for the end of the process: so many seconds, but at most this share of
what is left when it begins."""
CAUTION = 1.25
"""A block may take so many times as long as the slowest before it."""
KEY = "ooc_gemm.stop"
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


class Moment(ParamType):
    """An option whose value is a time: a duration from now, or in ISO 8601. Its value are seconds since
    1970."""

    name = "time"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if isinstance(value, float):
            return value
        now = time.time()
        found = _DURATION.fullmatch(value) if value else None
        if found:
            days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
            at = now + ((days * 24 + hours) * 60 + minutes) * 60 + seconds
        else:
            try:
                at = datetime.fromisoformat(value).timestamp()
            except (ValueError, OverflowError):
                self.fail(f"{value!r} is not a time; write for example 2h, 30m, 90s or 2026-11-24T06:00")
        if at <= now:
            self.fail(f"{value!r} is over; give a time that is still to come")
        return at


class Until:
    """The time before which a run has to end."""

    def __init__(self, at: float):
        self.at = at
        self._end = at - min(RESERVE_SECONDS, RESERVE_SHARE * (at - time.time()))
        self._blocks, self._seen, self._slowest = 0, 0.0, 0.0
        self._over = Event()

    def __str__(self) -> str:
        """The time in ISO 8601."""
        return datetime.fromtimestamp(self.at).astimezone().isoformat()

    def look(self, fraction: float, plan: "Plan", trace: "Trace") -> object:
        """Return `ENOUGH` where the next block might not be written in time. This is called whenever
        multiplications have been handed to the device (a progress callback)."""
        done = int(fraction * plan.block_count + 1e-6)
        if done == self._blocks:
            return None
        now, count = trace.age(), done - self._blocks
        self._slowest = max(self._slowest, (now - self._seen) / max(1, count))
        self._blocks, self._seen = done, now
        writing = (trace.seconds["download"] + trace.seconds["write"]) / (max(1, done - 1) * plan.writers)
        needs = CAUTION * (self._slowest + plan.c_buffers * writing)
        return ENOUGH if time.time() + needs > self._end else None

    def watch(self) -> None:
        """Interrupt the run at the last moment, whatever it does then, as SIGTERM does."""
        Thread(target=self._wait, name="ooc-gemm stop", daemon=True).start()

    def forget(self) -> None:
        """End the watch, because the run is over."""
        self._over.set()

    def _wait(self) -> None:
        while (left := self._end - time.time()) > 0:
            if self._over.wait(min(left, 60.0)):  # the clock may be set meanwhile
                return
        if not self._over.is_set() and callable(signal.getsignal(signal.SIGTERM)):
            print("Note: --stop-before is reached; what is under way is given up", file=sys.stderr)
            os.kill(os.getpid(), signal.SIGTERM)


def stop_before_option(context: click.Context, _: click.Parameter, at: float | None) -> None:
    """Begin to watch the time (a callback of click)."""
    if at is not None and not context.resilient_parsing:
        context.meta[KEY] = until = Until(at)
        context.call_on_close(until.forget)
        until.watch()


def limit() -> Until | None:
    """Return what --stop-before has set for the command that runs."""
    context = click.get_current_context(silent=True)
    return context.meta.get(KEY) if context else None
