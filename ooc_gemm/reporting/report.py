"""The context manager `report`, which writes a page on what is computed inside it."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..support.errors import InputError
from ..support.recording import Recording
from ..support.redact import redacted
from .gather import gather

SUFFIXES = ".html", ".htm"


@contextmanager
def report(path: str | os.PathLike[str], *, title: str | None = None) -> Iterator[None]:
    """Write a report on what is computed inside `with ooc_gemm.report(path):`, also where that fails.

    The report is one HTML page that needs no network: how the run ended, the timeline of all stages, resident
    memory over time, stages beside what the hardware allows, plans, checks, notices, and the environment.
    Credentials are hidden. Where a run fails before anything was begun, no page is written. Several products
    inside one report share its timeline. Work of other processes (a Dask cluster) is not on the timeline.

    Parameters
    ----------
    path : str or os.PathLike
        The file, which ends in `.html`. One that exists is replaced.
    title : str, optional
        The title of the page. By default the name of the program.

    Yields
    ------
    None
        Nothing: the page is written at the end.

    Raises
    ------
    InputError
        Before anything is computed: the file cannot be written there, or packages are missing
        (`pip install 'ooc-gemm[report]'`).

    A report that cannot be written in the end is a UserWarning: the result is not affected.

    Examples
    --------
    >>> with ooc_gemm.report("run.html"):  # doctest: +SKIP
    ...     ooc_gemm.multiply("a.zarr", "b.zarr", "c.zarr")
    """
    place = check(path)
    recording = Recording()
    try:
        with recording:
            yield
    finally:
        if said := write(place, recording, title or os.path.basename(sys.argv[0]) or "Python"):
            warnings.warn(said, stacklevel=3)


def check(path: str | os.PathLike[str]) -> Path:
    """Return the file as an absolute path. Raises InputError where no report can be written there."""
    for package in ("bokeh", "jinja2"):
        if find_spec(package) is None:
            raise InputError(f"a report needs {package}; install it with pip install 'ooc-gemm[report]'")
    name = os.fspath(path)
    place = Path(os.path.abspath(name))
    if place.suffix.lower() not in SUFFIXES:
        raise InputError(f"the report {name} is an HTML page; give a name that ends in .html")
    if os.path.isdir(place) or not os.access(place.parent, os.W_OK):
        raise InputError(f"the report {name} cannot be written there; name another file")
    return place


def write(place: Path, recording: Recording, title: str, spelled: Callable[[str], str] = str) -> str | None:
    """Write the report of a recording that has ended, unless it failed before anything was begun.

    title: of the page. spelled: returns a message as users read it. Returns why the page could not be
    written; None where it was.
    """
    if recording.error is not None and not recording.begun:
        return None
    try:
        found: dict[str, Any] = gather(recording, title, spelled)
        home = str(Path(__file__).resolve().parents[2])
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", __package__, str(place)],
            input=json.dumps(found),
            text=True,
            capture_output=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([home, os.environ.get("PYTHONPATH", "")])},
            start_new_session=True,  # or Ctrl-C would end it, too
        )
    except Exception as error:  # of whatever kind, it must not hide how the run has ended
        return redacted(f"the report {place} cannot be written: {type(error).__name__}: {error}")
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason is known"])[-1]
        return redacted(f"the report {place} cannot be written: {why}")
    return None
