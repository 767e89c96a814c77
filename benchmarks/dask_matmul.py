"""`ooc_gemm.dask.matmul` within a memory limit beside `dask.array.matmul`, on dask's threads:

    python benchmarks/dask_matmul.py [--size N] [--limit SIZE] [--threads T] [--repeat R] [--dir DIR]

N×N float32 arrays are read from Zarr in row strips and in chunks of 512², and the product is stored to Zarr.
Each contestant runs in a process of its own with the environment that it is started with. Its peak is the
largest resident set beyond what it held before the product. Processor seconds are printed because they vary
less than seconds where other programs run. Exit status 1: a result is wrong, a peak exceeds the limit, or a
ratio of seconds is less than 2.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import dask
import dask.array as da
import zarr
from dask.utils import format_bytes, parse_bytes
from rich.console import Console
from rich.table import Table

import ooc_gemm
import ooc_gemm.dask
from ooc_gemm.support.memory import peak_resident_bytes, resident_bytes

LAYOUTS = {"row strips": (256, 8192), "512²": (512, 512)}
BAR = 2.0
"""Least ratio of dask's seconds to ours."""
PEER, OURS = "dask.array.matmul", "ooc_gemm.dask.matmul"
Run = dict[str, float]


def product(contestant: str, folder: Path, limit: int, threads: int) -> Run:
    """Store the product of two arrays, and return what it took."""
    x, y = (da.from_zarr(str(folder / f"{name}.zarr")) for name in "ab")
    with dask.config.set(scheduler="threads", num_workers=threads):
        x[:256, :256].compute() @ y[:256, :256].compute()  # what BLAS and zarr allocate once
        held, used, begun = resident_bytes(), time.process_time(), time.perf_counter()
        z: Any = da.matmul(x, y) if contestant == PEER else ooc_gemm.dask.matmul(x, y, memory_limit=limit)
        chunks = tuple(sizes[0] for sizes in z.chunks)
        c = zarr.create_array(
            folder / "c.zarr", shape=z.shape, chunks=chunks, dtype=z.dtype, compressors=None, overwrite=True
        )
        da.store(z, c, lock=False)
    return {
        "seconds": time.perf_counter() - begun,
        "processor": time.process_time() - used,
        "peak": peak_resident_bytes() - held,
    }


def in_a_process(contestant: str, folder: Path, limit: int, threads: int) -> Run:
    """Run a contestant in a process of its own, and check its result."""
    shutil.rmtree(folder / "c.zarr", ignore_errors=True)
    code = "import sys, json, pathlib, dask_matmul as d; a = sys.argv; "
    code += "print(json.dumps(d.product(a[1], pathlib.Path(a[2]), int(a[3]), int(a[4]))))"
    command = [sys.executable, "-W", "ignore", "-c", code, contestant, str(folder), str(limit), str(threads)]
    done = subprocess.run(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, check=True)
    arrays = [str(folder / f"{name}.zarr") for name in "abc"]
    if not ooc_gemm.verify(*arrays, memory_limit="4GiB").ok:
        raise SystemExit(f"the result of {contestant} is wrong")
    found: Run = json.loads(done.stdout)
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size", default=8192, show_default=True)
@click.option("--limit", default="512MiB", show_default=True, help="Memory limit of our product.")
@click.option("--threads", default=2, show_default=True)
@click.option("--repeat", default=3, show_default=True)
@click.option("--dir", "place", type=click.Path(path_type=Path, file_okay=False), help="For arrays.")
def main(size: int, limit: str, threads: int, repeat: int, place: Path | None) -> None:
    """Measure products of dask arrays within a memory limit beside dask's own, in turns."""
    table = Table("layout", "", "seconds", "processor", "peak", "ratio", title=f"{size}³, {limit}")
    most, failed = parse_bytes(limit), False
    for layout, chunks in LAYOUTS.items():
        runs: dict[str, list[Run]] = {PEER: [], OURS: []}
        with tempfile.TemporaryDirectory(dir=place) as scratch:
            for seed, name in enumerate("ab"):
                ooc_gemm.random(
                    f"{scratch}/{name}.zarr",
                    (size, size),
                    chunks=(min(chunks[0], size), min(chunks[1], size)),
                    seed=seed,
                )
            for _ in range(repeat):
                for contestant, some in runs.items():
                    some.append(in_a_process(contestant, Path(scratch), most, threads))
        seconds, processor = (
            {name: statistics.median(run[key] for run in some) for name, some in runs.items()}
            for key in ("seconds", "processor")
        )
        ratio, peak = seconds[PEER] / seconds[OURS], max(run["peak"] for run in runs[OURS])
        failed |= ratio < BAR or peak > most
        for name, some in runs.items():
            table.add_row(
                layout if name == PEER else "",
                name,
                f"{seconds[name]:.2f}",
                f"{processor[name]:.2f}",
                format_bytes(max(int(run["peak"]) for run in some)),
                f"{ratio:.2f}" if name == OURS else "",
            )
    Console(highlight=False).print(table)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
