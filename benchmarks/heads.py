"""What results of benchmarks on a GPU begin with, and the environment of processes that they start."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import zarr


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


def with_cache(cache: Path | None) -> dict[str, str]:
    """Return the environment of a process. cache: a folder for what is remembered, instead of the usual."""
    return os.environ | ({"OOC_GEMM_CACHE": str(cache)} if cache else {})
