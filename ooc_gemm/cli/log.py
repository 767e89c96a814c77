"""What commands do with the records of the logger `ooc_gemm`: lines on standard error, and a file of JSON."""

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TextIO

import click

from ..support.meter import Meter, event, log
from ..support.redact import redacted

LOG_FILE = f"{__name__}.file"
"""The path of the log file, among what click keeps for a command (`Context.meta`)."""


class _Plain(logging.Handler):
    """Prints how far the run is."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a line, without escape codes."""
        if getattr(record, "event", "") == "progress":
            with suppress(OSError, ValueError):  # nobody reads it
                print(f"{_time(record):%Y-%m-%d %H:%M:%S} {record.getMessage()}", file=sys.stderr, flush=True)


class _JSON(logging.Handler):
    """Appends all records to a file, as one JSON object a line."""

    def __init__(self, file: TextIO):
        super().__init__()
        self.file = file

    def emit(self, record: logging.LogRecord) -> None:
        """Appends a line. A file that cannot be written any more, as on a full disk, does not end the run."""
        line = {
            "time": _time(record).isoformat(timespec="milliseconds"),
            "event": getattr(record, "event", "log"),
            "message": redacted(record.getMessage()),
            **getattr(record, "fields", {}),
        }
        with suppress(OSError, ValueError):
            self.file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self.file.flush()


def _time(record: logging.LogRecord) -> datetime:
    """Return when a record was made, in local time."""
    return datetime.fromtimestamp(record.created).astimezone()


def _array_around(path: Path) -> Path | None:
    """Return the folder of the Zarr array in which a file lies, or would lie; None if it lies in none."""
    from ..storage.write.checks import kind_there

    return next((folder for folder in path.parents if kind_there(folder) == "array"), None)


@contextmanager
def plain_lines() -> Iterator[None]:
    """Print how far the run is, every 30 s, on standard error."""
    handler = _Plain()
    _add(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def log_file(context: click.Context, _: click.Parameter, path: str | None) -> None:
    """Begin the file of `--log-file` (a callback of click)."""
    if path is None or context.resilient_parsing:
        return
    from .. import __version__

    if array := _array_around(Path(path).absolute()):
        raise click.UsageError(
            f"--log-file {path} lies inside the array {array}, which it would damage; give another place."
        )
    try:
        file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (`end` closes it)
    except OSError as error:
        raise click.UsageError(f"--log-file {path} cannot be written: {error.strerror}.") from error
    _add(_JSON(file))
    context.meta[LOG_FILE] = path
    arguments = [redacted(word) for word in context.find_root().obj]
    event(
        "start", f"{context.command_path} begins", version=__version__, arguments=arguments, pid=os.getpid()
    )


def _add(handler: logging.Handler) -> None:
    log.addHandler(handler)
    log.setLevel(logging.INFO)


def end(status: int, error: str = "") -> None:
    """Log how the command has ended, and close its log file. Does nothing where that is closed already."""
    handlers = [handler for handler in log.handlers if isinstance(handler, _JSON)]
    if handlers:
        said = {"error": redacted(error)} if error else {}
        event("end", f"exit status {status}", status=status, **said)
    for handler in handlers:
        log.removeHandler(handler)
        with suppress(OSError):
            handler.file.close()
    if not log.handlers:
        log.setLevel(logging.NOTSET)


def print_status() -> None:
    """Print how far the work of this process is, on standard error."""
    now = datetime.now().astimezone()
    for said in [str(meter) for meter in list(Meter.under_way)] or ["nothing is computed yet, or any more"]:
        with suppress(OSError, ValueError):
            print(f"{now:%Y-%m-%d %H:%M:%S} {said}", file=sys.stderr, flush=True)
