"""The option --report, which writes a page on what a command has done."""

import functools
import os
from collections.abc import Callable
from typing import Any

import click

from ..support.errors import Error
from ..support.recording import Recording, current
from ..support.redact import url
from .log import LOG_FILE
from .show import note, spelled
from .types import Address


def reported(spans: bool = True) -> Callable[[Any], Any]:
    """Return a decorator that adds --report to a command. `spans`: the page has a timeline of the command's
    own work."""
    option = click.option(
        "--report",
        "page",
        type=Address(),
        metavar="FILE.html",
        help="Write a page on the run: its timeline, memory over time, limits, plan and checks.",
    )

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def run(*args: Any, page: str | None, **given: Any) -> None:
            _check_apart(page, given.get("trace"))
            if page is None:
                function(*args, **given)
            elif given.get("plans"):
                raise click.UsageError("--plan computes nothing to report; leave out --report.")
            else:
                _reported(page, Recording(spans), functools.partial(function, *args, **given))

        return option(run)

    return decorate


def _check_apart(page: str | None, trace: str | None) -> None:
    """Raise UsageError where the options that write files name one file twice."""
    log = click.get_current_context().meta.get(LOG_FILE)
    given = {"--report": page, "--trace": trace, "--log-file": log}
    seen: dict[str, str] = {}
    for option, file in given.items():
        if file is not None and (other := seen.setdefault(os.path.realpath(file), option)) != option:
            raise click.UsageError(f"{other} and {option} name the same file, {file}; give another to one.")


def _reported(page: str, recording: Recording, run: Callable[[], None]) -> None:
    """Run a command, and write its page whether or not it fails. Raises what it raises."""
    from ..reporting.report import check, write

    place = check(page)
    try:
        with recording:
            run()
    finally:
        if isinstance(recording.error, click.exceptions.Exit):
            status = recording.error.exit_code
            recording.error = Error(f"the command ended with exit status {status}") if status else None
        if why := write(place, recording, _title(), spelled):
            note(why)


def _title() -> str:
    """Return the command that runs, with its arguments."""
    context = click.get_current_context()
    found = (context.params[one.name] for one in context.command.params if isinstance(one, click.Argument))
    words = [word for value in found for word in (value if isinstance(value, tuple) else [value])]
    return " ".join([context.command_path.partition(" ")[2], *map(url, filter(None, words))])


def benchmark(report: dict[str, Any], parts: list[Any]) -> None:
    """Keep a benchmark, and the lines and tables that show it, where a report is written."""
    if (recording := current()) is not None:
        recording.benchmark, recording.parts = report, parts
