"""The progress bar."""

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .show import rate, size

if TYPE_CHECKING:
    from ..planning.plan import Plan


@contextmanager
def progress_bar(wanted: bool | None) -> Any:
    """A progress callback, and the bar it moves: percent, rate, bytes, time left."""
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
        task = shown.add_task("", total=1.0, rate="", moved="")

        def report(fraction: float, plan: "Plan", trace: Any) -> None:
            seconds = shown.tasks[task].elapsed or 0
            flops = plan.flops * fraction / seconds if seconds else 0.0
            (done, unit), (whole, last) = (
                size(nbytes).split() for nbytes in (trace.bytes["read"], plan.bytes_read)
            )
            of = f"of {float(whole):.3g} {last}"
            moved = f"read {float(done):.3g} {of if unit == last else f'{unit} {of}'}"
            shown.update(task, completed=fraction, rate=rate(flops), moved=moved)

        yield report
