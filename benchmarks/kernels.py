"""Every kernel beside cuBLAS on the GPU at hand, at the shapes that docs/kernels.md shows:

    python benchmarks/kernels.py [--size N ...] [--commit ID] [--out FILE]

It is `ooc-gemm bench kernels` at more shapes than one would type, by default into
benchmarks/results/kernels_h200.json.
"""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import click

from ooc_gemm.bench import kernels as bench
from ooc_gemm.cuda_kernels.catalog import KERNELS

RESULTS = Path(__file__).resolve().parent / "results"
SQUARES = (907, 1024, 1025, 2047, 2048, 2049, 4096, 4097, 8192)
THIN = ((8192, 8192, 64), (64, 8192, 8192), (131072, 64, 4096))
LARGE = 16384
NAIVE = ("naive-uncoalesced", "naive")
"""Kernels that are left out at LARGE, where each launch takes ten seconds."""
REPEAT = 5
REPEAT_LARGE = 11
"""Rounds at LARGE, where the GPU is at its power limit and its clocks vary."""


def pairs(naive: bool) -> list[tuple[str, str]]:
    """Return each kernel with the type that it is made for, and all kernels of the ladder with float32."""
    chosen = [(name, kernel.dtypes[0]) for name, kernel in KERNELS.items() if naive or name not in NAIVE]
    return [*chosen, ("fp16x3", "complex64"), *(("ozaki2", x) for x in ("complex128", "int16", "int32"))]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size", "sizes", type=int, multiple=True, help="Measure N×N×N alone (several times: these).")
@click.option("--commit", help="What is measured, where there is no git repository.")
@click.option("--out", type=click.Path(dir_okay=False), default=RESULTS / "kernels_h200.json")
def main(sizes: tuple[int, ...], commit: str | None, out: str) -> None:
    """Measure all kernels and write the results. Exit status 1: a result is wrong."""
    if commit is None:
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    shapes = [(size, size, size) for size in sizes or SQUARES]
    rows: list[dict[str, Any]] = []
    started = time.monotonic()

    def progress(text: str) -> None:
        click.echo(f"{time.monotonic() - started:6.1f} s  {text}")

    jobs = [(pairs(True), [*shapes, *(() if sizes else THIN)], REPEAT)]
    if not sizes:
        jobs.append((pairs(False), [(LARGE, LARGE, LARGE)], REPEAT_LARGE))
    for chosen, some, repeat in jobs:
        report = bench.run(chosen, some, repeat, progress=progress)
        rows += report["rows"]
        Path(out).write_text(
            json.dumps({**report, "repeat": REPEAT, "commit": commit, "rows": rows}, indent=1) + "\n", "utf-8"
        )
    wrong = [row for row in rows if row["failed"] or not row["correct"]]
    for row in wrong:
        shape = bench.size_of(row["m"], row["n"], row["k"])
        click.echo(f"{row['kernel']} {row['dtype']} {shape}: {row['failed'] or 'wrong'}")
    raise SystemExit(any(not row["failed"] for row in wrong))


if __name__ == "__main__":
    main()
