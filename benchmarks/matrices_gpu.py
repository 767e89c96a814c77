"""Matrices of every type, layout and compression on one GPU, Zarr to Zarr, beside what the hardware allows.

    python benchmarks/matrices_gpu.py [--only NAME ...] [--repeat R] [--tmpfs DIR] [--out FILE]

Every case runs in this process, warm, and by the command line in fresh ones: with the rates that were
measured, and with none, as on a machine where nothing was measured. The limit of a case is the
longest of bytes ÷ rate and operations ÷ rate, with rates measured in the same run. `store` is the part of
the host: all bytes that come and go, where reads, writes and copies share its memory as much as they did in
the same run without any product. `decode` is what 16 threads need that do nothing but decode chunks of the
case, from memory to memory. Sampled rows of every result are compared with float64, those of integers
exactly. Exit status 1: a bar was missed or a result is wrong.
"""

import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import cupy
import numpy as np
import zarr
from heads import environment, head

import ooc_gemm
from ooc_gemm.run.rates import FILE
from ooc_gemm.support import cache

RESULTS = Path(__file__).resolve().parent / "results"
LIMITS = {"memory_limit": "8GiB", "device_memory_limit": "8GiB"}
ERROR = {"e": 1e-3, "f": 2e-6, "d": 1e-13, "F": 2e-6, "D": 1e-13}
"""Largest relative Frobenius error of sampled rows, by the type of C."""
UNMEASURED = 1.3
"""The longest that a case may take where no rates are remembered, in times of a run with measured ones."""
AGAIN_SECONDS = 3.0
"""Seconds in which the rates of memory are measured again before each case, and halfway through its warm
runs: on a machine that others use, they change within minutes. The limit is the mean of both."""
SHORT = 0.05
"""Seconds of a warm call that is so short that its fresh processes run more than twice as often: what they do
before it takes .2 to .4 s, and differs by as much from one to the next."""
THREADS = 16
"""Threads whose rate of decoding is the limit where chunks are compressed."""
ROWS = 8
"""Rows of C that are compared."""
Run = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A product A·B, or AᵀA where B has no shape, and the largest ratio of its time to the limit."""

    name: str
    dtype: str
    a: tuple[int, int]
    chunks_a: tuple[int, int]
    bar: float
    b: tuple[int, int] | None = None
    chunks_b: tuple[int, int] | None = None
    codec: str = "none"
    rate: float = 0.0
    """The least operations per second of the stage that computes."""
    out_dtype: str | None = None
    """The type of C, where sums may not fit the usual one."""
    after_warm: float = 0.4
    """Seconds that a call in a fresh process may take longer than a warm one."""


def square(
    name: str,
    n: int,
    dtype: str,
    bar: float,
    chunks: tuple[int, int],
    chunks_b: Any = None,
    codec: str = "none",
) -> Case:
    return Case(name, dtype, (n, n), chunks, bar, (n, n), chunks_b or chunks, codec)


RAW = 2048, 2048
CASES = (
    square("float32", 32768, "float32", 1.25, RAW),
    square("float32-512", 32768, "float32", 1.4, (512, 512)),
    square("float32-rows", 32768, "float32", 1.4, (128, 32768)),
    square("float32-misaligned", 32768, "float32", 1.3, (3000, 1700), (1900, 2300)),
    square("float32-zstd", 32768, "float32", 1.25, (0, 0), codec="zstd"),
    square("float32-blosc", 32768, "float32", 1.25, RAW, codec="blosc"),
    square("float16", 32768, "float16", 1.4, RAW),
    square("float64", 16384, "float64", 1.4, RAW),
    square("complex64", 16384, "complex64", 1.4, RAW),
    square("complex128", 8192, "complex128", 1.4, (1024, 1024)),
    Case("gram-int8", "int8", (131072, 16384), (4096, 4096), 1.5, rate=6e14),
    Case("gram-int8-blosc", "int8", (131072, 16384), (1000, 10000), 1.3, codec="blosc", rate=6e14),
    Case("gram-uint8", "uint8", (1_000_000, 8192), (4096, 4096), float("inf"), rate=6e14, out_dtype="int64"),
    Case("gram-thin", "float32", (262144, 768), (4096, 768), 2.0),
)


def values(rows: int, cols: int, dtype: np.dtype[Any], codec: str) -> Any:
    """Random values on the GPU: genotypes for int8, all values for uint8, else N(0, 1), rounded where they
    are compressed."""
    if dtype.kind in "iu":
        return (cupy.random.random((rows, cols), dtype="f4") * (3 if dtype.kind == "i" else 256)).astype(
            dtype
        )
    found = cupy.random.standard_normal((rows, cols), dtype="f4")
    found = cupy.rint(found * 16) / 16 if codec != "none" else found
    return (found + 1j * found[::-1] if dtype.kind == "c" else found).astype(dtype)


def make(path: Path, shape: tuple[int, int], chunks: tuple[int, int], case: Case, seed: int) -> None:
    """Write an array of random values by many threads, a few rows of chunks at a time."""
    blosc = zarr.codecs.BloscCodec(cname="zstd", clevel=3, shuffle="bitshuffle")
    compressors: dict[str, Any] = {"none": None, "zstd": "auto", "blosc": blosc}
    given: dict[str, Any] = {"chunks": chunks} if chunks[0] else {}
    array = zarr.create_array(
        str(path), shape=shape, dtype=case.dtype, compressors=compressors[case.codec], fill_value=0, **given
    )
    cupy.random.seed(seed)
    high, wide = array.chunks
    step = -(-4096 // high) * high

    def write(row: int, strip: np.ndarray[Any, Any], col: int) -> None:
        array[row : row + len(strip), col : col + wide] = strip[:, col : col + wide]

    with ThreadPoolExecutor(16) as pool:
        for start in range(0, shape[0], step):
            strip = values(min(step, shape[0] - start), shape[1], array.dtype, case.codec).get()
            jobs = [
                pool.submit(write, start + row, strip[row : row + high], col)
                for row in range(0, len(strip), high)
                for col in range(0, shape[1], wide)
            ]
            for job in jobs:
                job.result()


def error_of(a: Path, b: Path | None, c: Path) -> float:
    """Relative Frobenius error of sampled rows of C; for integers the number of wrong elements."""
    x, z = (zarr.open_array(str(path), mode="r") for path in (a, c))
    y = zarr.open_array(str(b), mode="r") if b else x
    rows = np.linspace(0, z.shape[0] - 1, ROWS).astype(int)
    wide = "D" if z.dtype.kind == "c" else "d"
    left = (
        None if b is None else cupy.asarray(np.stack([np.asarray(x[int(row)]) for row in rows])).astype(wide)
    )
    wanted = cupy.zeros((ROWS, z.shape[1]), wide)
    step = -(-4096 // y.chunks[0]) * y.chunks[0]
    for start in range(0, y.shape[0], step):
        strip = cupy.asarray(np.asarray(y[start : start + step]))
        some = strip[:, rows].T.astype(wide) if left is None else left[:, start : start + step]
        for col in range(0, strip.shape[1], 8192):  # float64 of a few columns at a time
            wanted[:, col : col + 8192] += some @ strip[:, col : col + 8192].astype(wide)
    found = cupy.asarray(np.stack([np.asarray(z[int(row)]) for row in rows])).astype(wide)
    if z.dtype.kind in "iu":
        return float((found != wanted).sum())
    return float(cupy.linalg.norm(found - wanted) / cupy.linalg.norm(wanted))


def limits_of(result: Any, decoded: Sequence[Path] = ()) -> dict[str, float]:
    """Seconds that each part of the hardware needs at least. decoded: arrays whose chunks must be decoded, at
    the rate of those of the first one."""
    from ooc_gemm.bench.engine import limit_seconds
    from ooc_gemm.bench.io import decode_rate

    found = limit_seconds(result, result.plan.used_rates)
    if decoded:
        rate, arrays = decode_rate(str(decoded[0]), THREADS), [zarr.open_array(path) for path in decoded]
        chunks = sum(math.prod(x.cdata_shape) * math.prod(x.chunks) * x.dtype.itemsize for x in arrays)
        found["decode"] = chunks / rate
    return found


def fresh(command: list[str], c: Path, folder: Path | None = None) -> Run:
    """Run a command that writes C in a process of its own. As for the warm runs, there is no C before.
    folder: for what is remembered, instead of the usual."""
    shutil.rmtree(c, ignore_errors=True)
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment(folder))
    wall = time.perf_counter() - start
    if done.returncode:
        return {"problem": done.stderr[-500:], "wall_seconds": wall}
    said = json.loads(done.stdout)
    return {"wall_seconds": wall, "seconds": said["seconds"], "predicted": said["plan"]["predicted_seconds"]}


def measure(case: Case, place: Path, repeat: int, measure_rates: Callable[[], Any]) -> Run:
    """Run a case warm and fresh, and compare what it made. `measure_rates`: measures the rates of memory."""
    a, b, c = place / "a", place / "b", place / "c"
    make(a, case.a, case.chunks_a, case, 1)
    options: Run = LIMITS | {"out_dtype": case.out_dtype}
    if case.b is None:
        call, names, flags = ooc_gemm.gram, [str(a), str(c)], ["gram", "--transpose"]
        options |= {"transpose": True}
    else:
        make(b, case.b, case.chunks_b or case.chunks_a, case, 2)
        call, names, flags = ooc_gemm.multiply, [str(a), str(b), str(c)], ["multiply"]
    found, both = [], list[dict[str, float]]()
    arrays = [a, b] if case.b else [a]
    for _ in range(2):
        measure_rates()
        some = []
        for _ in range(repeat + 1):  # the first one finds a plan with these rates
            shutil.rmtree(c, ignore_errors=True)
            some.append(call(*names, **options))
        found += some[1:]
        both.append(limits_of(found[-1], arrays if case.codec != "none" else ()))
    warm = sorted(found, key=lambda result: result.seconds)
    result = warm[len(warm) // 2]
    limits = {stage: statistics.mean(each[stage] for each in both) for stage in both[0]}
    by = max(limits, key=lambda stage: limits[stage])
    error = error_of(a, b if case.b else None, c)
    command = [
        sys.executable,
        "-m",
        "ooc_gemm.cli",
        *flags,
        *names,
        "--json",
        "-M",
        "8GiB",
        "-D",
        "8GiB",
    ]
    command += ["--out-dtype", case.out_dtype] if case.out_dtype else []
    cold, unmeasured = list[Run](), list[Run]()
    with tempfile.TemporaryDirectory() as name:
        kernels = Path(name) / "cache"
        for _ in range(repeat if result.seconds > SHORT else 2 * repeat + 1):  # in turns: hosts change
            cold.append(fresh(command, c))
            shutil.rmtree(kernels, ignore_errors=True)  # the run before has learned rates
            shutil.copytree(cache.folder(), kernels, ignore=shutil.ignore_patterns(FILE))
            unmeasured.append(fresh(command, c, kernels))
    rate = result.plan.problem.flops / max(1e-9, result.stage_seconds["compute"])
    for path in (a, b, c):
        shutil.rmtree(path, ignore_errors=True)
    exact = np.dtype(result.out_dtype).kind in "iu"
    return asdict(case) | {
        "kernel": result.kernel,
        "seconds": result.seconds,
        "all_seconds": [each.seconds for each in found],
        "predicted_seconds": result.plan.predicted_seconds,
        "limit_seconds": limits[by],
        "limit_by": by,
        "limits": limits,
        "limits_of_each_half": both,
        "ratio": result.seconds / limits[by],
        "compute_rate": rate,
        "stage_seconds": result.stage_seconds,
        "bytes_as_predicted": result.bytes_read == result.plan.bytes_read,
        "fresh": cold,
        "unmeasured": unmeasured,
        "error": error,
        "right": error == 0 if exact else error <= ERROR[np.dtype(result.out_dtype).char],
        "plan": result.plan.to_dict(),
    }


def judge(row: Run) -> list[str]:
    """Return which bars a case misses."""
    cold, unmeasured = (
        statistics.median(each.get("seconds", float("inf")) for each in row[which])
        for which in ("fresh", "unmeasured")
    )
    ratios = [each["predicted"] / each["seconds"] for each in row["fresh"] if "seconds" in each]
    missed = {
        "wrong": not row["right"],
        "bytes": not row["bytes_as_predicted"],
        f"{row['ratio']:.2f} of the limit > {row['bar']}": row["ratio"] > row["bar"],
        f"{row['compute_rate'] / 1e12:.0f} TOP/s": row["compute_rate"] < row["rate"],
        f"fresh {cold:.2f} s": cold > row["seconds"] + row["after_warm"],
        f"unmeasured {unmeasured:.2f} s = {unmeasured / cold:.2f}": unmeasured > UNMEASURED * cold,
        "prediction": abs(row["predicted_seconds"] / row["seconds"] - 1) > 0.15,
        "fresh prediction": not ratios or abs(statistics.median(ratios) - 1) > 0.15,
    }
    return [what for what, is_missed in missed.items() if is_missed]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", multiple=True, help="A case: " + ", ".join(case.name for case in CASES))
@click.option("--repeat", default=3, show_default=True)
@click.option("--tmpfs", type=click.Path(path_type=Path), default=Path("/dev/shm"), show_default=True)
@click.option("--commit", help="What is measured, where there is no git repository.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS / "matrices_h200.json"
)
def main(only: tuple[str, ...], repeat: int, tmpfs: Path, commit: str | None, out: Path) -> None:
    """Measure rates, run the cases, and write the results."""
    from ooc_gemm.bench import info
    from ooc_gemm.devices import open_device

    place = tmpfs / "ooc-gemm-matrices"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    start, device = time.perf_counter(), open_device("cuda")
    info.measure_with(device, [place])
    click.echo(f"measured rates: {time.perf_counter() - start:.1f} s")
    again = partial(info.measure_places, device, [place], seconds=AGAIN_SECONDS)
    report: Run = head("gpu matrices", commit) | {
        "repeat": repeat,
        "cases": [],
    }
    bad = 0
    try:
        for case in CASES:
            if only and case.name not in only:
                continue
            row = measure(case, place, repeat, again)
            report["cases"].append(row)
            row["missed"] = judge(row)
            bad += len(row["missed"])
            cold, unmeasured = (
                [round(each.get("seconds", float("inf")), 3) for each in row[which]]
                for which in ("fresh", "unmeasured")
            )
            click.echo(
                f"{case.name}: {row['kernel']}, {row['seconds']:.2f} s = {row['ratio']:.2f} of the limit "
                f"{row['limit_seconds']:.2f} ({row['limit_by']}), predicted {row['predicted_seconds']:.2f}, "
                f"fresh {cold}, unmeasured {unmeasured}, {row['compute_rate'] / 1e12:.0f} TFLOP/s, "
                f"error {row['error']:.1e} "
                f"missed: {'; '.join(row['missed']) or 'nothing'}"
            )
            out.write_text(json.dumps(report, indent=1) + "\n")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
