"""Multiplies real arrays and compares the time with the plan's prediction, with the limit of the hardware,
and with other programs. The report is a plain dict, ready for JSON; tables.py shows it.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from .. import __version__
from ..api import multiply
from ..devices import open_device
from ..planning.cost import least_seconds
from ..planning.machine import Rates
from ..run.generate import random
from ..run.rates import described
from ..run.result import Result
from ..support.errors import InputError
from ..support.remembered import for_now
from ..support.trace import STAGES
from . import chunks, info
from .kernel_rate import Random

LAYOUTS: dict[str, dict[str, Any]] = {
    "squares": {},
    "rows": {"chunks": (256, None)},
    "small": {"chunks": (512, 512)},
    "zstd": {"compressor": "zstd"},
}
"""Name → how A and B are stored. Chunks are squares of 16 MiB unless given; None stands for a whole row."""

PEERS = {
    "NumPy in core": """
import zarr
def run(a, b, c):
    product = zarr.open_array(a, mode="r")[:] @ zarr.open_array(b, mode="r")[:]
    zarr.create_array(c, data=product, chunks=(1024, 1024), compressors=None)
""",
    "dask.array": """
import dask.array as da, zarr
def run(a, b, c):
    (da.from_zarr(a) @ da.from_zarr(b)).to_zarr(c, compressors=None)
""",
}
"""Name → program that somebody would write without this package. Each runs in a process of its own."""
_TIMED = """
import sys, time
start = time.perf_counter()
run(*sys.argv[1:])
print(time.perf_counter() - start)
"""

Row = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """One product, and how A and B are stored."""

    m: int
    n: int
    k: int
    dtype: str
    layout: str


def run(
    cases: Iterable[Case],
    folder: str = ".",
    repeat: int = 3,
    cold: bool = False,
    peers: bool = False,
    progress: Say = lambda text: None,
    **options: Any,
) -> dict[str, Any]:
    """Measure every case and return the report.

    `options` are those of `multiply`. `cold`: drop A and B from the page cache before every run. Rates of the
    device and of the folder are measured first and used for the plans of these runs only; remembered rates
    stay as they are.
    """
    with for_now():
        return _run(cases, folder, repeat, cold, peers, progress, options)


def _run(
    cases: Iterable[Case],
    folder: str,
    repeat: int,
    cold: bool,
    peers: bool,
    progress: Say,
    options: dict[str, Any],
) -> dict[str, Any]:
    place = Path(folder)
    device = open_device(options.get("device", "auto"))
    cases = list(cases)
    info.measure_with(device, [place], progress, [case.dtype for case in cases])
    with tempfile.TemporaryDirectory(prefix="ooc-gemm-", dir=place) as scratch:
        _warm(options)
        rows = [
            _case(case, Path(scratch) / str(index), repeat, cold, peers, progress, options)
            for index, case in enumerate(cases)
        ]
    return {
        "suite": "engine",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device.model,
        "place": described(place),
        "cold": cold,
        "repeat": repeat,
        "versions": {"ooc-gemm": __version__, "python": platform.python_version()},
        "rows": rows,
    }


def _warm(options: dict[str, Any]) -> None:
    """Run a small product, so that contexts, libraries and kernels, which a process loads once, are there."""
    small = Random((512, 512), "float32")
    multiply(small, small, **{**options, "memory_limit": None, "device_memory_limit": None})


def _case(
    case: Case, place: Path, repeat: int, cold: bool, peers: bool, say: Say, options: dict[str, Any]
) -> Row:
    name = f"{case.m}×{case.n}×{case.k} {case.dtype}, {case.layout}"
    say(f"{name}: making A and B")
    layout = dict(LAYOUTS[case.layout])
    a, b, c = (str(place / array) for array in "abc")
    for path, shape, seed in ((a, (case.m, case.k), 1), (b, (case.k, case.n), 2)):
        if "chunks" in layout:
            rows, cols = LAYOUTS[case.layout]["chunks"]
            layout["chunks"] = (min(rows, shape[0]), min(cols or shape[1], shape[1]))
        random(path, shape, dtype=case.dtype, seed=seed, **layout)
    results: list[Result] = []
    for index in range(repeat):
        say(f"{name}: run {index + 1} of {repeat}")
        results.append(_multiply(a, b, c, cold, options))
    say(f"{name}: a run that is traced")
    trace = place / "trace.json"
    _multiply(a, b, c, cold, {**options, "trace": str(trace)})
    spans = read_spans(trace)
    result = sorted(results, key=lambda result: result.seconds)[len(results) // 2]
    seconds = median(result.seconds for result in results)
    limits = limit_seconds(result, result.plan.used_rates)
    by = max(limits, key=lambda stage: limits[stage])
    row = {
        "m": case.m,
        "n": case.n,
        "k": case.k,
        "dtype": case.dtype,
        "layout": case.layout,
        "device": result.device,
        "kernel": result.kernel,
        "precision": result.precision,
        "seconds": seconds,
        "seconds_all": [result.seconds for result in results],
        "tflops": 2e-12 * case.m * case.n * case.k / seconds,
        "predicted_seconds": result.plan.predicted_seconds,
        "rates": result.plan.used_rates.note,
        "limit_seconds": limits[by],
        "limit_by": by,
        "limits": limits,
        "ratio": seconds / limits[by],
        "stages": _stages(result, spans),
        "bytes_read": result.bytes_read,
        "bytes_written": result.bytes_written,
        "lower_bound_bytes": result.lower_bound_bytes,
        "peak_host_bytes": result.peak_host_bytes,
        "peak_device_bytes": result.peak_device_bytes,
        "plan": result.plan.to_dict(),
        "peers": {},
        "spans": spans,
    }
    if peers:
        say(f"{name}: peers")
        row["peers"] = {peer: _peer(peer, case, a, b, str(place / "peer"), repeat, cold) for peer in PEERS}
    return row


def _multiply(a: str, b: str, c: str, cold: bool, options: dict[str, Any]) -> Result:
    shutil.rmtree(c, ignore_errors=True)
    if cold:
        for path in (a, b):
            chunks.forget(Path(path))
    return multiply(a, b, c, **options)


def limit_seconds(result: Result, rates: Rates) -> dict[str, float]:
    """Return the least seconds that each part of the hardware needs (`least_seconds`)."""
    moved = {
        "read": result.bytes_read,
        "upload": result.bytes_uploaded,
        "download": result.bytes_downloaded,
        "write": result.bytes_written,
    }
    return least_seconds(result.plan.problem.flops, moved, rates)


def read_spans(path: Path) -> list[dict[str, Any]]:
    """Read the spans of a trace: stage, lane, start and stop in seconds, bytes, and for multiplications the
    block."""
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return [
        {
            "stage": event["name"],
            "lane": lanes[event["tid"]],
            "start": round(event["ts"] / 1e6, 6),
            "stop": round((event["ts"] + event["dur"]) / 1e6, 6),
            "bytes": event["args"]["bytes"],
            "block": event["args"].get("block"),
        }
        for event in events
        if event["ph"] == "X"
    ]


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans runs."""
    total, end = 0.0, -1.0
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _stages(result: Result, spans: list[dict[str, Any]]) -> dict[str, Row]:
    """Return for each stage: bytes, threads, seconds in which any of them works, and their share of the
    run."""
    wall = max((span["stop"] for span in spans), default=0.0)
    found = {}
    for stage in STAGES:
        own = [span for span in spans if span["stage"] == stage]
        busy = busy_seconds((span["start"], span["stop"]) for span in own)
        nbytes = sum(span["bytes"] for span in own)
        found[stage] = {
            "bytes": nbytes,
            "lanes": len({span["lane"] for span in own}),
            "busy_seconds": busy,
            "busy_share": busy / wall if wall else 0.0,
            "bytes_per_second": nbytes / busy if busy else 0.0,
        }
    return found


def _peer(name: str, case: Case, a: str, b: str, c: str, repeat: int, cold: bool) -> Row:
    """Return the median seconds of a peer from the call to the stored result, or the reason why there are
    none."""
    whole = (case.m * case.k + case.k * case.n + case.m * case.n) * np.dtype(case.dtype).itemsize
    if name == "NumPy in core" and whole > psutil.virtual_memory().available:
        return {"seconds": None, "failed": "it needs more memory than there is"}
    seconds = []
    for _ in range(repeat):
        if cold:
            for path in (a, b):
                chunks.forget(Path(path))
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PEERS[name] + _TIMED, a, b, c],
            capture_output=True,
            text=True,
            env=dict(os.environ),
        )
        shutil.rmtree(c, ignore_errors=True)
        if done.returncode:
            return {"seconds": None, "failed": (done.stderr.strip().splitlines() or ["no output"])[-1]}
        seconds.append(float(done.stdout))
    return {"seconds": median(seconds), "failed": None}


def cases(
    shapes: Iterable[tuple[int, int, int]], dtypes: Iterable[str], layouts: Iterable[str]
) -> list[Case]:
    """Return a case for every combination. Raises InputError if a layout is unknown."""
    found = []
    for layout in layouts:
        if layout not in LAYOUTS:
            raise InputError(f"{layout!r} is not a layout; choose among {', '.join(LAYOUTS)}")
        found += [Case(*shape, dtype, layout) for shape in shapes for dtype in dtypes]
    return found
