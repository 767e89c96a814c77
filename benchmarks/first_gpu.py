"""What the first product of a process, and of a machine, takes on one GPU.

    python benchmarks/first_gpu.py [--repeat R] [--out FILE]

- A product of 512³ by the command line: the whole process, beside one that imports zarr and cupy and makes
  one product with cupy.
- The first product by a kernel of ours where no compiled kernel is remembered, beside one where all are.

Processes of both kinds take turns, and find their modules compiled. The median counts. Exit status 1: a bar
was missed.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np
import zarr
from heads import environment, head

RESULTS = Path(__file__).resolve().parent / "results"
WHOLE, MORE = 1.25, 0.8
"""The longest that a whole process may take, in times of the other; and the most seconds that compiling may
add to a first product."""
OTHER = """
import sys, cupy, zarr
a, b = (cupy.asarray(zarr.open_array(path, mode="r")[:]) for path in sys.argv[1:3])
c = (a @ b).get()
zarr.create_array(sys.argv[3], shape=c.shape, dtype=c.dtype, chunks=c.shape, overwrite=True)[:] = c
"""
SMALL, LARGE = 512, 8192


def make(path: Path, n: int) -> None:
    """Write a random float32 matrix."""
    values = np.random.default_rng(n).standard_normal((n, n), dtype="f4")
    chunk = min(n, 2048)
    zarr.create_array(str(path), shape=(n, n), dtype="f4", chunks=(chunk, chunk), compressors=None)[:] = (
        values
    )


def seconds(command: list[str], cache: Path | None = None) -> float:
    """Run a command to its end, and return the seconds that it took."""
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment(cache))
    return time.perf_counter() - start


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--repeat", default=5, show_default=True)
@click.option("--commit", help="What is measured, where there is no git repository.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS / "first_h200.json")
def main(repeat: int, commit: str | None, out: Path) -> None:
    """Measure both, and write the results."""
    ours, other = [sys.executable, "-m", "ooc_gemm.cli", "multiply"], [sys.executable, "-c", OTHER]
    found: dict[str, list[float]] = {name: [] for name in ("whole", "cupy", "full cache", "empty cache")}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        place = Path(folder)
        for n in (SMALL, LARGE):
            for name in "ab":
                make(place / f"{name}{n}", n)
        small, large = ([str(place / f"{name}{n}") for name in "abc"] for n in (SMALL, LARGE))
        product = [*ours, *large, "-f", "--kernel", "fp16x3", "-M", "8GiB", "-D", "8GiB"]
        full, empty = place / "full", place / "empty"
        seconds(product, full)  # compiles
        for _ in range(repeat + 1):
            found["cupy"].append(seconds([*other, *small]))
            found["whole"].append(seconds([*ours, *small, "-f"], full))
            shutil.rmtree(empty, ignore_errors=True)
            found["empty cache"].append(seconds(product, empty))
            found["full cache"].append(seconds(product, full))
    middle = {name: statistics.median(times[1:]) for name, times in found.items()}
    ratio, more = middle["whole"] / middle["cupy"], middle["empty cache"] - middle["full cache"]
    click.echo(f"{middle}\n512^3: {ratio:.2f} times (bar {WHOLE}); empty cache: {more:+.2f} s (bar {MORE})")
    report = head("gpu first products", commit) | {
        "seconds": found,
        "median": middle,
        "whole_ratio": ratio,
        "empty_cache_seconds": more,
    }
    out.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(ratio > WHOLE or more > MORE)


if __name__ == "__main__":
    main()
