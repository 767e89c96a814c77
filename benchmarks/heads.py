"""What results of benchmarks on a GPU begin with, and the environment of processes that they start."""

import atexit
import functools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import zarr

import ooc_gemm


def head(suite: str, commit: str | None) -> dict[str, Any]:
    """Return what was measured, when, and on what. commit: where there is no git repository."""
    return {
        "suite": suite,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit or subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip(),
        "device": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "machine": {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()},
        "versions": {"cupy": cupy.__version__, "numpy": np.__version__, "zarr": zarr.__version__},
    }


def environment(cache: Path | None) -> dict[str, str]:
    """Return the environment of a process that finds its modules compiled, as an installation leaves them.
    cache: a folder for what is remembered, instead of the usual."""
    found = os.environ | {"PYTHONPYCACHEPREFIX": _compiled()}
    found.pop("PYTHONDONTWRITEBYTECODE", None)  # the first process compiles what is missing
    return found | ({"OOC_GEMM_CACHE": str(cache)} if cache else {})


@functools.cache
def _compiled() -> str:
    """Compile the largest packages, and return the folder, which is removed when this process ends."""
    folder = tempfile.mkdtemp(prefix="ooc-gemm-compiled-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    packages = [each.__path__[0] for each in (cupy, np, ooc_gemm, zarr)]
    command = [sys.executable, "-m", "compileall", "-q", "-j", "0", "-x", "/tests/", *packages]
    subprocess.run(command, env=os.environ | {"PYTHONPYCACHEPREFIX": folder}, check=True)
    return folder
