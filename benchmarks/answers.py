"""Statistics beside what people compute them with today: each side in fresh processes, in turns, results
compared.

    python benchmarks/answers.py                     # all cases
    python benchmarks/answers.py corrcoef --small    # one case at a small size, as a trial

A case makes its data, names the commands of both sides and compares what they have written. A bar is the
largest ratio of our time to the other's. Seconds are of whole processes, from start to exit, medians of the
rounds; the processor's seconds, which other work on the machine disturbs less, stand beside them. Exit
status 1: a bar or an accuracy was missed.

The case grm needs plink2 (Debian: apt install plink2), the others dask (`pip install
'ooc-gemm[benchmarks]'`).
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from engine import git
from zarr.codecs import BloscCodec

CORES = 2
LIMIT = "512MiB"
OURS = [sys.executable, "-m", "ooc_gemm.cli"]


@dataclass(frozen=True)
class Case:
    """One statistic, computed by us and by others."""

    name: str
    make: Callable[[Path, bool], None]
    """Makes the data in a folder; true: a small one."""
    ours: list[str]
    """The command, run in that folder."""
    theirs: list[str]
    error: Callable[[Path], float]
    """How far both results are from each other, or ours is from the truth."""
    accuracy: float
    """The largest error that passes."""
    bar: float
    """The largest ratio of our seconds to theirs that passes."""


def make_genotypes(folder: Path, small: bool) -> None:
    """Write genotypes of variants × samples with 1 % missing, as blosc chunks in Zarr and as plink's bed."""
    variants, samples, step = (4_000, 200, 1_000) if small else (200_000, 2_000, 10_000)
    rng = np.random.default_rng(0)
    codec = BloscCodec(cname="zstd", clevel=5, shuffle="bitshuffle", typesize=1)
    stored = zarr.create_array(
        folder / "g.zarr",
        shape=(variants, samples),
        chunks=(step, samples // 2),
        dtype="i1",
        compressors=codec,
    )
    code = np.array([3, 2, 0, 1], np.uint8)  # of 0, 1 and 2 alleles, and of a missing genotype
    with open(folder / "g.bed", "wb") as bed:
        bed.write(bytes([0x6C, 0x1B, 1]))
        for start in range(0, variants, step):
            share = rng.uniform(0.05, 0.5, (step, 1)).astype(np.float32)
            draw = rng.random((step, samples), np.float32)
            g = (draw < share * share).astype(np.int8) + (draw < share * (2 - share)).astype(np.int8)
            g[rng.random(g.shape, np.float32) < 0.01] = -1
            stored[start : start + step] = g
            four = code[g].reshape(step, samples // 4, 4)  # −1 is the last
            bed.write((four << np.array([0, 2, 4, 6], np.uint8)).sum(axis=2).astype(np.uint8).tobytes())
    lines = (f"1\tv{v}\t0\t{v + 1}\tA\tC\n" for v in range(variants))
    (folder / "g.bim").write_text("".join(lines))
    (folder / "g.fam").write_text("".join(f"f{i} s{i} 0 0 1 -9\n" for i in range(samples)))


def grm_error(folder: Path) -> float:
    """The largest difference between our matrix and plink2's."""
    ours = zarr.open_array(folder / "k.zarr", mode="r")[:]
    theirs = np.fromfile(folder / "k.rel.bin").reshape(ours.shape)
    return float(np.abs(ours - theirs).max())


def make_table(folder: Path, small: bool) -> None:
    """Write a table of float32 whose columns are correlated and have means of up to 10⁴ deviations."""
    rows, cols, step = (20_000, 64, 4_000) if small else (1_000_000, 512, 16_384)
    rng = np.random.default_rng(0)
    mix = np.eye(cols, dtype=np.float32) + rng.standard_normal((cols, cols), np.float32) / cols**0.5
    means = 1e4 * rng.standard_normal(cols, np.float32)
    stored = zarr.create_array(
        folder / "x.zarr", shape=(rows, cols), chunks=(step, cols), dtype="f4", compressors=None
    )
    for start in range(0, rows, step):
        count = min(step, rows - start)
        stored[start : start + count] = rng.standard_normal((count, cols), np.float32) @ mix + means


def corrcoef_error(folder: Path) -> float:
    """The largest difference between our matrix and the correlations in float64, found part by part."""
    x = zarr.open_array(folder / "x.zarr", mode="r")
    parts = [slice(start, start + 16_384) for start in range(0, x.shape[0], 16_384)]
    mean = sum(x[part].sum(axis=0, dtype=np.float64) for part in parts) / x.shape[0]
    products = np.zeros((x.shape[1],) * 2)
    for part in parts:
        apart = x[part] - mean
        products += apart.T @ apart
    deviation = np.sqrt(np.diag(products))
    wanted = products / deviation / deviation[:, None]
    return float(np.abs(zarr.open_array(folder / "r.zarr", mode="r")[:] - wanted).max())


def make_rows(folder: Path, small: bool) -> None:
    """Write float32 rows of rank 30, and noise."""
    rows, cols, step = (8_000, 200, 2_000) if small else (400_000, 2_000, 2_000)
    rng = np.random.default_rng(0)
    mix = rng.standard_normal((30, cols), np.float32) * np.linspace(4, 1, 30, dtype=np.float32)[:, None]
    stored = zarr.create_array(
        folder / "x.zarr", shape=(rows, cols), chunks=(step, cols), dtype="f4", compressors=None
    )
    for start in range(0, rows, step):
        part = rng.standard_normal((step, 30), np.float32) @ mix
        stored[start : start + step] = part + rng.standard_normal((step, cols), np.float32)


def pca_error(folder: Path) -> float:
    """The largest relative error of our singular values, which are the norms of the scores, and of dask's
    beside the roots of the eigenvalues of AᵀA in float64."""
    x = zarr.open_array(folder / "x.zarr", mode="r")
    sums, products = np.zeros(x.shape[1]), np.zeros((x.shape[1],) * 2)
    for start in range(0, x.shape[0], 16_000):
        part = x[start : start + 16_000].astype(np.float64)
        sums += part.sum(axis=0)
        products += part.T @ part
    products -= np.outer(sums, sums) / x.shape[0]
    wanted = np.sqrt(np.linalg.eigvalsh(products)[::-1][:COMPONENTS])
    scores = zarr.open_array(folder / "scores.zarr", mode="r")[:].astype(np.float64)
    theirs = np.load(folder / "s.npy")
    print("dask: relative error of the singular values", np.abs(theirs / wanted - 1).max())
    return float(np.abs(np.linalg.norm(scores, axis=0) / wanted - 1).max())


COMPONENTS, ITERATIONS = 20, 4
DASK = """
import dask, dask.array as da, numpy as np
with dask.config.set(scheduler="threads", num_workers=2):
    np.save("r.npy", da.corrcoef(da.from_zarr("x.zarr"), rowvar=False).compute())
"""
DASK_PCA = f"""
import dask, dask.array as da, numpy as np
with dask.config.set(scheduler="threads", num_workers=2):
    x = da.from_zarr("x.zarr")
    x = x - x.mean(axis=0)
    options = dict(n_power_iter={ITERATIONS}, iterator="QR", compute=True)
    u, s, v = da.linalg.svd_compressed(x, {COMPONENTS}, **options)
    u, s = dask.compute(u * s, s)
    np.save("u.npy", u), np.save("s.npy", s)
"""
"""`iterator="power"` overflows in float32."""
CASES = [
    Case(
        "grm",
        make_genotypes,
        [*OURS, "grm", "g.zarr", "k.zarr", "-f", "-M", LIMIT],
        ["plink2", "--bfile", "g", "--make-rel", "square", "bin", "--threads", "2", "--out", "k"],
        grm_error,
        accuracy=1e-5,
        bar=1.0,
    ),
    Case(
        "corrcoef",
        make_table,
        [*OURS, "corrcoef", "x.zarr", "r.zarr", "--no-rowvar", "-f", "-M", LIMIT],
        [sys.executable, "-c", DASK],
        corrcoef_error,
        accuracy=1e-5,
        bar=0.5,
    ),
    Case(
        "pca",
        make_rows,
        [*OURS, "pca", "x.zarr", "scores.zarr", "-k", f"{COMPONENTS}", "-f", "-M", LIMIT],
        [sys.executable, "-c", DASK_PCA],
        pca_error,
        accuracy=1e-4,
        bar=0.5,
    ),
]


def run(command: list[str], folder: Path) -> dict[str, float]:
    """Run a process to its end: its seconds, its processor's seconds, and its peak memory in bytes."""
    start = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, cwd=folder, stdout=said, stderr=said)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise SystemExit(f"{command[0]} failed:\n{said.read().decode(errors='replace')[-2000:]}")
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "peak_bytes": used.ru_maxrss * 1024.0,
    }


def measure(case: Case, folder: Path, rounds: int, small: bool) -> dict[str, Any]:
    """Both sides of a case in turns, and whether it keeps its bars."""
    case.make(folder, small)
    runs: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
    for _ in range(rounds):
        for side, command in (("ours", case.ours), ("theirs", case.theirs)):
            runs[side].append(run(command, folder))
    found: dict[str, Any] = {
        side: {key: statistics.median(one[key] for one in some) for key in some[0]}
        for side, some in runs.items()
    }
    for key in ("seconds", "cpu_seconds"):
        found[f"ratio_{key}"] = found["ours"][key] / found["theirs"][key]
    found |= {"error": case.error(folder), "accuracy": case.accuracy, "bar": case.bar}
    found["kept"] = found["error"] <= case.accuracy and (small or found["ratio_seconds"] <= case.bar)
    return found


def main() -> int:
    """Run the cases; 1 if one misses its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(names)}; by default all")
    parser.add_argument("--small", action="store_true", help="small data, which show no speed: no bar counts")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side (3)")
    parser.add_argument("--folder", type=Path, help="where data are made (a temporary folder there)")
    parser.add_argument("--json", type=Path, help="file for the results")
    given = parser.parse_args()
    if unknown := set(given.cases) - set(names):
        parser.error(f"{', '.join(sorted(unknown))}: no such case; choose from {', '.join(names)}")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    results: dict[str, Any] = {}
    for case in CASES:
        if given.cases and case.name not in given.cases:
            continue
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            found = results[case.name] = measure(case, Path(folder), given.rounds, given.small)
        ours, theirs = found["ours"], found["theirs"]
        print(
            f"{case.name}: {ours['seconds']:.1f} s ({ours['cpu_seconds']:.1f} s of processors, "
            f"{ours['peak_bytes'] / 2**20:.0f} MiB) beside {theirs['seconds']:.1f} s "
            f"({theirs['cpu_seconds']:.1f}, {theirs['peak_bytes'] / 2**20:.0f} MiB): "
            f"{found['ratio_seconds']:.2f}, bar {case.bar}; error {found['error']:.1e}, at most "
            f"{case.accuracy:.0e}: {'kept' if found['kept'] else 'MISSED'}",
            flush=True,
        )
    if given.json:
        machine = {"cores": CORES, "processor": platform.processor(), "python": platform.python_version()}
        versions = {name: version(name) for name in ("ooc-gemm", "numpy", "zarr", "dask")}
        when = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": git("rev-parse", "HEAD")}
        report = when | {"machine": machine | versions, "cases": results}
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(found["kept"] for found in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
