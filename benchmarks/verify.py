"""Measures what `--verify` costs on the CPU: whole processes with and without it, in turns that change
places.

    python benchmarks/verify.py [--size N] [--pairs P] [--memory SIZE] [--dir DIR] [--out FILE]

Wall and processor seconds of each; ratios of medians, and the median of the pairs' ratios. Exit status 1: the
second of these passes 1.03 in wall time.
"""

import json
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import click
import numpy as np
import zarr
from engine import git, machine

import ooc_gemm

BAR = 1.03


def run(folder: Path, dtype: str, memory: str, verify: bool) -> tuple[float, float]:
    """Run one process, and return the seconds of the multiplication and the processor seconds of the
    process."""
    shutil.rmtree(folder / "c", ignore_errors=True)
    operands = (str(folder / f"{dtype}-{name}") for name in "ab")
    command = [sys.executable, "-m", "ooc_gemm.cli", "multiply", *operands, str(folder / "c")]
    options = ["-d", "cpu", "-M", memory, "--json", "-Q", *(["--verify"] if verify else [])]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*command, *options], check=True, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stdout)["seconds"], used


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size", default=8192, show_default=True)
@click.option("--pairs", default=9, show_default=True)
@click.option("--memory", default="512MiB", show_default=True)
@click.option("--dir", "place", type=click.Path(file_okay=False, exists=True), help="For arrays.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="The figures, as JSON.")
def main(size: int, pairs: int, memory: str, place: str | None, out: Path | None) -> None:
    """Measure both sides in one run."""
    rows, missed = {}, False
    with tempfile.TemporaryDirectory(prefix="ooc-gemm-verify-", dir=place) as name:
        folder = Path(name)
        for dtype in ("float32", "int8"):
            for operand in "ab":
                ooc_gemm.random(
                    folder / f"{dtype}-{operand}",
                    (size, size),
                    dtype=dtype,
                    chunks=(1024, 1024),
                    seed=ord(operand),
                )
            found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
            for pair in range(pairs):
                for verify in (pair % 2 == 1, pair % 2 == 0):
                    found[verify].append(run(folder, dtype, memory, verify))
            row = rows[dtype] = {"without": found[False], "with": found[True]}
            for index, what in enumerate(("seconds", "processor_seconds")):
                each = [[times[index] for times in found[verify]] for verify in (True, False)]
                of_pairs = statistics.median(a / b for a, b in zip(*each, strict=True))
                medians = statistics.median(each[0]) / statistics.median(each[1])
                row[what] = {"median_of_ratios": of_pairs, "ratio_of_medians": medians}
                click.echo(f"{dtype} {what}: median of ratios {of_pairs:.4f}, ratio of medians {medians:.4f}")
            missed |= row["seconds"]["median_of_ratios"] > BAR
    if out:
        versions = {"python": platform.python_version(), "numpy": np.__version__, "zarr": zarr.__version__}
        about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
        commit = git("rev-parse", "--short", "HEAD")
        about |= {"commit": commit, "versions": versions, "size": size, "memory": memory}
        out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n", "utf-8")
    raise SystemExit(missed)


if __name__ == "__main__":
    main()
