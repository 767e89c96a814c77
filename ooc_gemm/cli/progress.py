"""What commands show of how far they are: a bar on a terminal, elsewhere a line every 30 s."""

import sys
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from ..support.meter import of, rate
from .log import plain_lines
from .show import size
from .stop import limit

if TYPE_CHECKING:
    from ..planning.plan import Plan


@contextmanager
def progress_bar(wanted: bool | None) -> Any:
    """Yield a progress callback for a product, which moves a bar with percent, rate, bytes and time left.

    Yields None where no bar is shown and --stop-before is not given. `wanted` is what -P and -Q
    say, if they are given.
    """
    with _bar(wanted) as show:
        until = limit()

        def report(fraction: float, plan: "Plan", trace: Any) -> object:
            if show:
                seconds = show.seconds()
                flops = plan.flops * fraction / seconds if seconds else 0.0
                show(fraction, rate(flops), f"read {of(trace.bytes['read'], plan.bytes_read)}")
            return until.look(fraction, plan, trace) if until else None

        yield report if show or until else None


@contextmanager
def bytes_bar(wanted: bool | None, verb: str) -> Any:
    """Yield a progress callback for work on `done` of `total` bytes, as `progress_bar`. `verb`: what is done
    with them, such as `wrote`."""
    with _bar(wanted) as show:

        def report(done: int, total: int) -> None:
            seconds = show.seconds()
            speed = f"{size(int(done / seconds))}/s" if seconds else ""
            show(done / total if total else 1.0, speed, f"{verb} {of(done, total)}")

        yield show and report


@contextmanager
def share_bar(wanted: bool | None) -> Any:
    """Yield a progress callback for work of which a share is done, as `progress_bar`."""
    with _bar(wanted) as show:
        yield show and (lambda share: show(share, "", ""))


class _Shown:
    """A bar on standard error: call it with the fraction that is done and two texts."""

    def __init__(self, bar: Any):
        self._bar = bar
        self._task = bar.add_task("", total=1.0, rate="", moved="")

    def seconds(self) -> float:
        """Seconds since the bar was made."""
        return self._bar.tasks[self._task].elapsed or 0.0

    def __call__(self, fraction: float, speed: str, moved: str) -> None:
        completed = fraction if fraction == 1 else min(fraction, 0.99)  # more would be shown as 100 %
        self._bar.update(self._task, completed=completed, rate=speed, moved=moved)


@contextmanager
def _bar(wanted: bool | None) -> Any:
    """Yield a bar on standard error, or None where none is shown. Off a terminal, lines are shown instead."""
    if wanted is False or not sys.stderr.isatty():
        with nullcontext() if wanted is False else plain_lines():
            yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.table import Column

    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("{task.fields[moved]}"),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),  # the bar alone gives way
        TextColumn("left"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as shown:
        yield _Shown(shown)
