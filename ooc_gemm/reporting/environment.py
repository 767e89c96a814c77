"""Versions, the machine and the command of this process, for a report."""

import os
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version

import psutil

from .. import __version__
from ..devices.cpu.device import processor
from ..support.memory import spelled_size

PACKAGES = "numpy", "zarr", "numcodecs", "obstore", "dask", "distributed", "cupy-cuda12x", "cupy-cuda13x"
"""Packages whose versions matter to a run, as far as they are installed."""


def environment() -> list[tuple[str, str]]:
    """Return names and values: the command, versions and the machine."""
    cores = len(os.sched_getaffinity(0))
    return [
        ("command", shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]])),
        ("folder", os.getcwd()),
        ("ooc-gemm", __version__),
        ("Python", f"{platform.python_version()} ({platform.python_implementation()})"),
        *((name, found) for name in PACKAGES if (found := _version(name))),
        ("CPU", f"{processor()}; {cores} of {os.cpu_count()} cores may be used"),
        ("memory of the machine", spelled_size(psutil.virtual_memory().total)),
        ("system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
    ]


def _version(name: str) -> str | None:
    """Return the version of a package; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
