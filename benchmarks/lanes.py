"""Small results of long products, with lanes and without (docs/decisions/lanes.md):

    python benchmarks/lanes.py [--rows N] [--repeat R] [--dir DIR] [--out FILE]

Each case runs in processes of its own, with lanes and without, in turn; the plan without lanes is the one
that the search finds when it may not propose any. A process makes the product three times, and its figure is
the fastest; a case's figures are medians of processes. Exit status 1: the results of both differ by more than
rounding.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np
import zarr
from engine import git, machine
from rich.console import Console
from rich.table import Table

import ooc_gemm

COLUMNS, NARROW = 256, 64
TOLERANCE = 1e-4
"""Largest difference of both results, as a share of the largest element."""
CASES: dict[str, tuple[tuple[int, int], str, str, str]] = {
    # name: (chunk, dtype, compressor, product)
    "AᵀA, 4096 × 256": ((4096, COLUMNS), "float32", "none", "gram"),
    "AᵀA, 64 × 256": ((64, COLUMNS), "float32", "none", "gram"),
    "AᵀA, 8192 × 64": ((8192, NARROW), "float32", "none", "gram"),
    "AᵀA, 4096 × 256 zstd": ((4096, COLUMNS), "float32", "zstd", "gram"),
    "AᵀA, 1000 × 100 zstd": ((1000, 100), "float32", "zstd", "gram"),
    "AᵀA, float64": ((8192, COLUMNS), "float64", "none", "gram"),
    "AᵀA, float16": ((8192, COLUMNS), "float16", "none", "gram"),
    "AᵀB, 4096 × 256, 4096 × 64": ((4096, COLUMNS), "float32", "none", "multiply"),
    "cov, 4096 × 256": ((4096, COLUMNS), "float32", "none", "cov"),
}
PROGRAM = """
import json, sys, time
import ooc_gemm
from ooc_gemm.planning import search
x, y, c, product, lanes = sys.argv[1:]
if lanes == "without":
    search._Search._in_lanes = lambda self, x: iter(())
out = "float64" if "f64" in x else "float32"
options = {"device": "cpu", "memory_limit": "1GiB", "out_dtype": out, "force": True}
run = {
    "gram": lambda: ooc_gemm.gram(x, c, transpose=True, **options),
    "multiply": lambda: ooc_gemm.multiply(x, y, c, transpose_a=True, **options),
    "cov": lambda: ooc_gemm.cov(x, c, rowvar=False, **options),
}[product]
seconds = []
for _ in range(3):
    begun = time.perf_counter()
    found = run()
    seconds.append(time.perf_counter() - begun)
plan = found.plan
lanes, predicted = plan.k_panels.lanes, plan.predicted_seconds
print(json.dumps({"seconds": min(seconds), "lanes": lanes, "predicted": predicted}))
"""
console = Console(highlight=False)


def one(x: Path, y: Path, c: Path, product: str, lanes: str) -> dict[str, Any]:
    """Run one side of a case in a process of its own."""
    places = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    line = [sys.executable, "-c", PROGRAM, *map(str, (x, y, c)), product, lanes]
    done = subprocess.run(
        line,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))},
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rows", default=1_000_000, show_default=True)
@click.option("--repeat", default=3, show_default=True, help="Processes of each side.")
@click.option("--dir", "place", type=click.Path(path_type=Path, file_okay=False), help="For arrays.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="The figures, as JSON.")
def main(rows: int, repeat: int, place: Path | None, out: Path | None) -> None:
    """Measure small results of long products with lanes and without."""
    table = Table("product, chunks", "without", "with", "ratio", "lanes", title=f"A: {rows:,} × {COLUMNS}")
    results, wrong = [], False
    with tempfile.TemporaryDirectory(dir=place) as scratch:
        folder = Path(scratch)
        y = folder / "y.zarr"
        ooc_gemm.random(y, (rows, NARROW), chunks=(4096, NARROW), seed=1)
        for name, (chunk, dtype, compressor, product) in CASES.items():
            x = folder / ("x-f64.zarr" if dtype == "float64" else "x.zarr")
            ooc_gemm.random(x, (rows, COLUMNS), chunks=chunk, dtype=dtype, compressor=compressor, force=True)
            runs: dict[str, list[dict[str, Any]]] = {"without": [], "with": []}
            for _ in range(repeat):
                for lanes, some in runs.items():
                    some.append(one(x, y, folder / f"{lanes}.zarr", product, lanes))
            c, d = (zarr.open_array(folder / f"{lanes}.zarr")[:] for lanes in runs)
            differs = float(np.abs(c - d).max() / np.abs(c).max())
            right = differs <= TOLERANCE
            wrong |= not right
            seconds = {
                lanes: statistics.median(run["seconds"] for run in some) for lanes, some in runs.items()
            }
            ratio = seconds["with"] / seconds["without"]
            results.append(
                {"case": name, "seconds": seconds, "ratio": ratio, "differs": differs, "runs": runs}
            )
            shown = [f"{seconds[lanes]:.3f}" for lanes in runs]
            table.add_row(name, *shown, f"{ratio:.2f}" if right else "wrong", str(runs["with"][0]["lanes"]))
    console.print(table)
    if out:
        report = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"), "version": ooc_gemm.__version__,
            "machine": machine(), "load": os.getloadavg(), "commit": git("rev-parse", "--short", "HEAD"),
            "rows": rows, "results": results,
        }  # fmt: skip
        out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()
