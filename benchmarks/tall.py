"""XᵀX of tall data on a `LocalCluster` of 2 processes with 1 thread each, beside the engine alone:

    python benchmarks/tall.py [--rows N] [--columns M] [--memory SIZE] [--repeat R] [--dir DIR] [--out FILE]

`multiply` (X and X, whole) and `gram` (half of the products) run on the cluster, whose workers cut k, in one
process with two threads and the memory of both workers, and in one process with one thread and the memory of
one: once with both cores, of which its readers use the other one, and once with one core. NumPy runs beside
them: it loads all of X, computes `X.T @ X` and stores it. Processes are started, and have made a small
product, before their time begins. The contestants run in turns; a figure is the median of their runs. The
cluster's C must agree with that of one machine within the tolerance of `ooc_gemm.verify`, which checks it.
Exit status 1: a result is wrong, or a bar was missed.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import dask
from dask.utils import format_bytes, parse_bytes
from distributed import Client, LocalCluster
from engine import git, machine
from rich.console import Console
from rich.table import Table

import ooc_gemm
import ooc_gemm.dask

WORKERS = 2
SLOWEST, LEAST_GAIN = 1.15, 1.7
"""Most times the seconds of two threads that the cluster may take, and least ratio of one thread's to its."""
ALONE = """
import json, os, sys, time
x, small, c, command, threads, memory, cores = sys.argv[1:]
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:int(cores)])
import ooc_gemm
from ooc_gemm.devices.cpu.device import CPU
run = {
    "multiply": lambda x, c: ooc_gemm.multiply(x, x, c, transpose_a=True, force=True, **options),
    "gram": lambda x, c: ooc_gemm.gram(x, c, transpose=True, force=True, **options),
}[command]
options = {"device": CPU(int(threads)), "memory_limit": int(memory)}
run(small, c + ".small")
begun = time.perf_counter()
result = run(x, c)
print(json.dumps({"seconds": time.perf_counter() - begun, "peak": result.peak_host_bytes}))
"""
Run = dict[str, Any]
NUMPY = """
import json, sys, time
import zarr
from ooc_gemm.support.memory import peak_resident_bytes
x, small, c = sys.argv[1:]
def run(x, c):
    values = zarr.open_array(x, mode="r")[:]
    product = values.T @ values
    zarr.create_array(c, data=product, compressors=None, overwrite=True)
run(small, c + ".small")
begun = time.perf_counter()
run(x, c)
print(json.dumps({"seconds": time.perf_counter() - begun, "peak": peak_resident_bytes()}))
"""
console = Console(highlight=False)


def alone(folder: Path, program: str, *settings: str) -> Run:
    """Run one of the programs above in a process of its own."""
    root = str(Path(__file__).resolve().parent.parent)
    arrays = [str(folder / name) for name in ("x.zarr", "small.zarr", "c.zarr")]
    line = [sys.executable, "-c", program, *arrays, *settings]
    done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": root})
    if done.returncode:
        return {"problem": done.stderr.strip().splitlines()[-1]}
    found: Run = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def spread(command: str, folder: Path, memory: int) -> Run:
    """Run a command on a cluster of its own."""
    cluster = LocalCluster(
        n_workers=WORKERS, threads_per_worker=1, memory_limit=memory, dashboard_address=None
    )

    def run(x: str, c: str) -> ooc_gemm.Result:
        options: dict[str, Any] = {"client": client, "device": "cpu", "force": True}
        x, c = (str(folder / name) for name in (x, c))
        if command == "gram":
            return ooc_gemm.dask.gram(x, c, transpose=True, **options)
        return ooc_gemm.dask.multiply(x, x, c, transpose_a=True, **options)

    with cluster, Client(cluster) as client:
        run("small.zarr", "small-c.zarr")
        begun = time.perf_counter()
        result = run("x.zarr", "c.zarr")
        seconds = time.perf_counter() - begun
    ranges = len(result.plan.problem.k_ranges)
    predicted = result.plan.predicted_seconds
    return {
        "seconds": seconds, "peak": result.peak_host_bytes, "ranges": ranges, "predicted": predicted,
        "bytes_read": result.bytes_read, "predicted_bytes_read": result.plan.bytes_read,
    }  # fmt: skip


def one(command: str, folder: Path, memory: int, repeat: int) -> dict[str, Any]:
    """Run a command in all places, in turns."""
    places: dict[str, Callable[[], Run]] = {
        "NumPy": lambda: alone(folder, NUMPY),
        "two threads": lambda: alone(folder, ALONE, command, "2", str(WORKERS * memory), "2"),
        "one thread": lambda: alone(folder, ALONE, command, "1", str(memory), "2"),
        "one core": lambda: alone(folder, ALONE, command, "1", str(memory), "1"),
        "cluster": lambda: spread(command, folder, memory),
    }
    runs: dict[str, list[Run]] = {name: [] for name in places}
    x, c = str(folder / "x.zarr"), folder / "c.zarr"
    for _ in range(repeat):
        for name, place in places.items():
            shutil.rmtree(c, ignore_errors=True)
            run = place()
            if "problem" not in run and not ooc_gemm.verify(x, x, c, transpose_a=True).ok:
                run["problem"] = "the result is wrong"
            if "bytes_read" in run and run["bytes_read"] != run["predicted_bytes_read"]:
                run["problem"] = "more or less was read than predicted"
            runs[name].append(run)
    seconds = {
        name: statistics.median(run["seconds"] for run in some)
        for name, some in runs.items()
        if not any("problem" in run for run in some)
    }
    ratios = {}
    if len(seconds) == len(places):
        ratios = {
            "two threads / NumPy": seconds["two threads"] / seconds["NumPy"],
            "cluster / two threads": seconds["cluster"] / seconds["two threads"],
            "one thread / cluster": seconds["one thread"] / seconds["cluster"],
            "one core / cluster": seconds["one core"] / seconds["cluster"],
        }
    return {"command": command, "seconds": seconds, "ratios": ratios, "runs": runs}


def met(row: dict[str, Any]) -> bool:
    """Whether a command meets its bars; `gram` has one."""
    slower, gain = (row["ratios"].get(name) for name in ("cluster / two threads", "one thread / cluster"))
    if slower is None or gain is None:
        return False
    return bool(slower <= SLOWEST and (gain >= LEAST_GAIN or row["command"] == "gram"))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rows", default=2_000_000, show_default=True)
@click.option("--columns", default=256, show_default=True)
@click.option("--memory", default="1GiB", show_default=True, help="Of each worker.")
@click.option("--repeat", default=3, show_default=True)
@click.option("--dir", "place", type=click.Path(path_type=Path, file_okay=False), help="For arrays.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="The figures, as JSON.")
def main(rows: int, columns: int, memory: str, repeat: int, place: Path | None, out: Path | None) -> None:
    """Measure products of tall data on a cluster beside one machine."""
    table = Table("command", "", "seconds", "peak of a process", "ratios", title=f"{columns}×{rows:,}")
    found = []
    with tempfile.TemporaryDirectory(dir=place) as scratch:
        folder, chunk = Path(scratch), (16384, columns)
        ooc_gemm.random(folder / "x.zarr", (rows, columns), chunks=chunk)
        ooc_gemm.random(folder / "small.zarr", (64, columns), chunks=chunk)
        for command in ("multiply", "gram"):
            row = one(command, folder, parse_bytes(memory), repeat)
            found.append(row)
            for name, runs in row["runs"].items():
                problem = next((run["problem"] for run in runs if "problem" in run), None)
                peak = "" if problem else format_bytes(max(run["peak"] for run in runs))
                ratios = [f"{title} {ratio:.2f}" for title, ratio in row["ratios"].items()]
                last = ", ".join(ratios) if name == "cluster" else ""
                table.add_row(command, name, problem or f"{row['seconds'][name]:.2f}", peak, last)
    console.print(table)
    if out:
        report = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "version": ooc_gemm.__version__,
            "dask": dask.__version__,
            "machine": machine(),
            "load": os.getloadavg(),
            "commit": git("rev-parse", "--short", "HEAD"),
            "rows": rows,
            "columns": columns,
            "memory": parse_bytes(memory),
            "results": found,
        }
        out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    raise SystemExit(not all(map(met, found)))


if __name__ == "__main__":
    main()
