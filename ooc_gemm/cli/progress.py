"""The progress bar that commands show on a terminal."""

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .show import rate, size

if TYPE_CHECKING:
    from ..planning.plan import Plan


@contextmanager
def progress_bar(wanted: bool | None) -> Any:
    """Yield a progress callback for a product, which moves a bar with percent, rate, bytes and time left.

    Yields None where no bar is shown. `wanted` is what -P and -Q say; None: on a terminal.
    """
    with _bar(wanted) as show:

        def report(fraction: float, plan: "Plan", trace: Any) -> None:
            seconds = show.seconds()
            flops = plan.flops * fraction / seconds if seconds else 0.0
            show(fraction, rate(flops), f"read {_of(trace.bytes['read'], plan.bytes_read)}")

        yield show and report


@contextmanager
def bytes_bar(wanted: bool | None, verb: str) -> Any:
    """Yield a progress callback for work on `done` of `total` bytes, as `progress_bar`. `verb`: what is done
    with them, such as `wrote`."""
    with _bar(wanted) as show:

        def report(done: int, total: int) -> None:
            seconds = show.seconds()
            speed = f"{size(int(done / seconds))}/s" if seconds else ""
            show(done / total if total else 1.0, speed, f"{verb} {_of(done, total)}")

        yield show and report


@contextmanager
def share_bar(wanted: bool | None) -> Any:
    """Yield a progress callback for work of which a share is done, as `progress_bar`."""
    with _bar(wanted) as show:
        yield show and (lambda share: show(share, "", ""))


def _of(done: int, whole: int) -> str:
    """Return `1.2 of 3.4 GiB`."""
    (part, unit), (most, last) = (size(nbytes).split() for nbytes in (done, whole))
    of = f"of {float(most):.3g} {last}"
    return f"{float(part):.3g} {of if unit == last else f'{unit} {of}'}"


class _Shown:
    """A bar on standard error: call it with the fraction that is done and two texts."""

    def __init__(self, bar: Any):
        self._bar = bar
        self._task = bar.add_task("", total=1.0, rate="", moved="")

    def seconds(self) -> float:
        """Seconds since the bar was made."""
        return self._bar.tasks[self._task].elapsed or 0.0

    def __call__(self, fraction: float, speed: str, moved: str) -> None:
        self._bar.update(self._task, completed=fraction, rate=speed, moved=moved)


@contextmanager
def _bar(wanted: bool | None) -> Any:
    """Yield a bar on standard error, or None where none is shown."""
    if not (sys.stderr.isatty() if wanted is None else wanted):
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
    console = Console(stderr=True, force_terminal=wanted)
    with Progress(*columns, console=console, transient=True) as shown:
        yield _Shown(shown)
