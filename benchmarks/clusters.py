"""Products on a `LocalCluster` of 2 processes with 1 thread each, beside their peers in the same run:

    python benchmarks/clusters.py [--size N] [--memory SIZE] [--only CASE ...] [--repeat R] [--dir DIR]
                                  [--out FILE]

`multiply`: `ooc_gemm.dask.multiply` beside the engine alone with 2 threads and the same memory. The others:
`ooc_gemm.dask.matmul` beside `dask.array.matmul`, of arrays from Zarr in several chunks, and computed ones,
stored to Zarr. Every contestant has a cluster of its own, started before its time begins; peaks are those of
worker processes (VmHWM). Every result is checked (Freivalds). Exit status 1: a result is wrong or missing,
or a bar was missed.
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
import dask.array as da
import numpy as np
import zarr
from dask.utils import format_bytes, parse_bytes
from distributed import Client, LocalCluster
from engine import git, machine
from rich.console import Console
from rich.table import Table

import ooc_gemm
import ooc_gemm.dask
from ooc_gemm.support.memory import peak_resident_bytes

WORKERS = 2
CASES = {
    "multiply": ((1024, 1024), (1024, 1024)),
    "squares": ((1024, 1024), (1024, 1024)),
    "rows": ((256, 8192), (256, 8192)),
    "small": ((512, 512), (512, 512)),
    "misaligned": ((1000, 700), (900, 1300)),
    "computed": ((512, 512), (512, 512)),
}
BARS = {"multiply": 1 / 1.15, "rows": 2.0, "small": 2.0, "misaligned": 1.3}
"""Least ratio of the peer's time to ours."""
ALONE = """
import json, sys, time
import ooc_gemm
from ooc_gemm.devices.cpu.device import CPU
begun = time.perf_counter()
result = ooc_gemm.multiply(*sys.argv[1:4], device=CPU(2), memory_limit=int(sys.argv[4]), chunks=(1024, 1024))
print(json.dumps({"seconds": time.perf_counter() - begun, "peak": result.peak_host_bytes}))
"""
Run = dict[str, Any]
console = Console(highlight=False)


def spilled(dask_worker: Any) -> int:
    """Return the bytes that a worker has spilled to its disk."""
    found = getattr(dask_worker.data, "spilled_total", None)
    return int(found.disk) if found else 0


def on_cluster(work: Callable[[Client], Any], memory: int) -> Run:
    """Run `work` on a cluster of its own, and return what it took."""
    lost = []
    with (
        LocalCluster(
            n_workers=WORKERS, threads_per_worker=1, memory_limit=memory, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        before = set(client.scheduler_info()["workers"])
        begun = time.perf_counter()
        try:
            most = [0]
            client.run(watch)
            work(client)
            seconds = time.perf_counter() - begun
            most = list(client.run(watched).values())
        except Exception as error:
            return {"problem": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        peaks = client.run(peak_resident_bytes)
        lost = list(before - set(peaks))
    return {"seconds": seconds, "peak": max(peaks.values()), "spilled": max(most), "workers_lost": len(lost)}


def watch(dask_worker: Any) -> None:
    """Let a worker note the most bytes that it spills from now on."""
    import asyncio

    dask_worker.most_spilled = 0

    async def look() -> None:
        while True:
            dask_worker.most_spilled = max(dask_worker.most_spilled, spilled(dask_worker))
            await asyncio.sleep(0.05)

    dask_worker.watching = dask_worker.loop.asyncio_loop.create_task(look())


def watched(dask_worker: Any) -> int:
    """Return the most bytes that a worker has spilled since `watch`."""
    dask_worker.watching.cancel()
    return int(dask_worker.most_spilled)


def operands(folder: Path, computed: bool) -> list[Any]:
    """Open the operands as a user would. `computed`: each is the result of a computation."""
    arrays = [da.from_zarr(str(folder / name)) for name in ("a.zarr", "b.zarr")]
    return [array.map_blocks(abs) for array in arrays] if computed else arrays


def stored(folder: Path, product: Callable[[Any, Any], Any], computed: bool) -> Callable[[Client], None]:
    """Return a function that stores a product of dask arrays as C."""

    def work(client: Client) -> None:
        z = product(*operands(folder, computed))
        chunks = tuple(sizes[0] for sizes in z.chunks)
        c = zarr.create_array(
            folder / "c.zarr", shape=z.shape, chunks=chunks, dtype=z.dtype, compressors=None
        )
        da.store(z, c, lock=False)

    return work


def multiplied(folder: Path) -> Callable[[Client], None]:
    """Return a function that computes C by `ooc_gemm.dask.multiply`."""
    a, b, c = (str(folder / f"{name}.zarr") for name in "abc")
    return lambda client: ooc_gemm.dask.multiply(a, b, c, client=client, chunks=(1024, 1024))


def alone(folder: Path, memory: int) -> Run:
    """Run the engine in a process of its own."""
    arrays = [str(folder / f"{name}.zarr") for name in "abc"]
    command = [sys.executable, "-c", ALONE, *arrays, str(memory)]
    root = str(Path(__file__).resolve().parent.parent)
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": root})
    if done.returncode:
        return {"problem": done.stderr.strip().splitlines()[-1]}
    found: Run = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def check(folder: Path, computed: bool) -> bool:
    """Whether C is the product."""
    if not computed:
        arrays = [str(folder / f"{name}.zarr") for name in "abc"]
        return bool(ooc_gemm.verify(*arrays, memory_limit="2GiB").ok)
    x, y = (np.asarray(zarr.open_array(folder / f"{name}.zarr")[...]) for name in "ab")
    found = zarr.open_array(folder / "c.zarr")[:64]
    want = abs(x[:64]).astype("f8") @ abs(y)
    return bool((abs(found - want) <= 1e-5 * want).all())


def one(case: str, size: int, memory: int, repeat: int, folder: Path) -> dict[str, Any]:
    """Run one case, its contestants in turns."""
    for name, chunks, seed in zip("ab", CASES[case], (0, 1), strict=True):
        ooc_gemm.random(
            folder / f"{name}.zarr",
            (size, size),
            chunks=(min(chunks[0], size), min(chunks[1], size)),
            seed=seed,
            force=True,
        )
    computed = case == "computed"
    if case == "multiply":
        contestants: dict[str, Callable[[], Run]] = {
            "engine alone": lambda: alone(folder, WORKERS * memory),
            "dask.multiply": lambda: on_cluster(multiplied(folder), memory),
        }
    else:
        contestants = {
            "dask.array.matmul": lambda: on_cluster(stored(folder, da.matmul, computed), memory),
            "ooc_gemm.dask.matmul": lambda: on_cluster(
                stored(folder, ooc_gemm.dask.matmul, computed), memory
            ),
        }
    runs: dict[str, list[Run]] = {name: [] for name in contestants}
    for _ in range(repeat):
        for name, contestant in contestants.items():
            shutil.rmtree(folder / "c.zarr", ignore_errors=True)
            run = contestant()
            if "problem" not in run and not check(folder, computed):
                run["problem"] = "the result is wrong"
            runs[name].append(run)
    seconds = {
        name: statistics.median(run["seconds"] for run in some)
        for name, some in runs.items()
        if not any("problem" in run for run in some)
    }
    peer, ours = contestants
    ratio = seconds[peer] / seconds[ours] if len(seconds) == 2 else None
    return {"case": case, "size": size, "memory": memory, "seconds": seconds, "ratio": ratio, "runs": runs}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size", default=8192, show_default=True)
@click.option("--memory", default="1GiB", show_default=True, help="Of each worker.")
@click.option("--only", multiple=True, type=click.Choice(list(CASES)))
@click.option("--repeat", default=1, show_default=True)
@click.option("--dir", "place", type=click.Path(path_type=Path, file_okay=False), help="For arrays.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="The figures, as JSON.")
def main(
    size: int, memory: str, only: tuple[str, ...], repeat: int, place: Path | None, out: Path | None
) -> None:
    """Measure products on a cluster beside their peers. Exit status 1: a result is wrong, or a bar was
    missed."""
    table = Table(
        "case", "", "seconds", "peak of a worker", "spilled", "peer / ours", "bar", title=f"{size}³"
    )
    rows, failed = [], False
    for case in only or CASES:
        with tempfile.TemporaryDirectory(dir=place) as scratch:
            row = one(case, size, parse_bytes(memory), repeat, Path(scratch))
        rows.append(row)
        bar = BARS.get(case)
        failed |= row["ratio"] is None or (bar is not None and row["ratio"] < bar)
        for name, runs in row["runs"].items():
            problem = next((run["problem"] for run in runs if "problem" in run), None)
            last = name == list(row["runs"])[-1]
            table.add_row(
                case,
                name,
                problem or f"{row['seconds'][name]:.2f}",
                "" if problem else format_bytes(max(run["peak"] for run in runs)),
                "" if problem else format_bytes(max(run.get("spilled", 0) for run in runs)),
                f"{row['ratio']:.2f}" if last and row["ratio"] else "",
                f"{bar:.2f}" if last and bar else "",
            )
    console.print(table)
    if out:
        report = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "version": ooc_gemm.__version__,
            "dask": dask.__version__,
            "machine": machine(),
            "commit": git("rev-parse", "--short", "HEAD"),
            "rows": rows,
        }
        out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
