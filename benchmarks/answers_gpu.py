"""Statistics on one GPU, beside what the hardware allows.

    python benchmarks/answers_gpu.py [--rows M] [--cols N] [--repeat R] [--tmpfs DIR] [--out FILE]

`pca`: components of M×N float32 (low rank plus noise, with means), whose singular values are compared with
those of the exact Gram matrix in float64. It runs warm in this process, and by the command line in fresh
ones, once for each device memory limit. Its own limit is the time of its passes at the rate of reading,
which is measured in the same run. Panels that fit the device memory limit are read in the first pass alone,
but count here as if every pass read them. Exit status 1: a bar was missed or the result is wrong.
"""

import json
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import local
from typing import Any

import click
import cupy
import cupyx
import numpy as np
import zarr
from heads import head

import ooc_gemm
from ooc_gemm.statistics.components import planned

RESULTS = Path(__file__).resolve().parent / "results"
BAR = 1.25
"""Largest ratio of the time to the limit."""
ERROR = 1e-4
"""Largest relative error of a singular value."""
AFTER_WARM = 2.0
"""Seconds that a command in a fresh process may take longer than a warm call."""
STRIP_BYTES = 1 << 30
"""Bytes of the rows that are made at a time."""
THREADS = 16
RANK = 60
"""Number of directions that stand out from the noise."""
_TO_HOST = 2
"""cudaMemcpyKind."""
_own = local()
Run = dict[str, Any]


def make(path: Path, shape: tuple[int, int], chunks: tuple[int, int]) -> Any:
    """Write the matrix as raw chunks, by several threads. Returns its singular values when centred, exactly,
    in descending order."""
    (rows, cols), (high, wide) = shape, chunks
    zarr.create_array(
        str(path), shape=shape, chunks=chunks, dtype="f4", compressors=None, filters=None, fill_value=0
    )
    cupy.random.seed(1)
    strength = cupy.asarray(2 + 20 * 0.93 ** np.arange(RANK), "f4")
    directions = cupy.linalg.qr(cupy.random.standard_normal((cols, RANK), dtype="f4"))[0]
    directions = (directions * strength).T
    offset = 5 * cupy.random.standard_normal(cols, dtype="f4")
    gram, total = cupy.zeros((cols, cols)), cupy.zeros(cols)
    step = max(1, STRIP_BYTES // (cols * 4) // high) * high
    with ThreadPoolExecutor(THREADS) as pool:
        for start in range(0, rows, step):
            count = min(step, rows - start)
            strip = cupy.random.standard_normal((count, cols), dtype="f4")
            strip += cupy.random.standard_normal((count, RANK), dtype="f4") @ directions
            strip += offset
            cupy.cuda.get_current_stream().synchronize()
            jobs = [
                pool.submit(store, path, strip, start, row, col, chunks)
                for row in range(0, count, high)
                for col in range(0, cols, wide)
            ]
            exact = strip.astype("f8")
            gram += exact.T @ exact
            total += exact.sum(axis=0)
            del exact
            for job in jobs:
                job.result()
    gram -= cupy.outer(total, total / rows)
    values = cupy.linalg.eigvalsh(gram)[::-1]
    found = np.sqrt(np.maximum(values.get(), 0.0))
    del gram, values, strip
    cupy.get_default_memory_pool().free_all_blocks()
    return found


def store(path: Path, strip: Any, start: int, row: int, col: int, chunks: tuple[int, int]) -> None:
    """Write one chunk of a strip that begins at row `start`. Chunks at edges are stored whole."""
    if not hasattr(_own, "buffer"):
        _own.buffer = cupyx.empty_pinned(chunks, "f4")
        _own.buffer[...] = 0
        _own.stream = cupy.cuda.Stream(non_blocking=True)
    count, width = min(chunks[0], len(strip) - row), min(chunks[1], strip.shape[1] - col) * 4
    cupy.cuda.runtime.memcpy2DAsync(
        _own.buffer.ctypes.data, chunks[1] * 4, strip.data.ptr + (row * strip.shape[1] + col) * 4,
        strip.shape[1] * 4, width, count, _TO_HOST, _own.stream.ptr,
    )  # fmt: skip
    _own.stream.synchronize()
    file = path / "c" / str((start + row) // chunks[0]) / str(col // chunks[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "wb", buffering=0) as out:
        left = memoryview(_own.buffer).cast("B")
        while left:
            left = left[out.write(left) :]


def rates(place: Path, nbytes: int) -> Any:
    """Measure the device and the folder; the rates with which `nbytes` there are read and uploaded."""
    from ooc_gemm.bench import info
    from ooc_gemm.devices import open_device
    from ooc_gemm.run.rates import known

    device, kind = open_device("cuda"), np.dtype("f4")
    info.measure_with(device, [place], dtypes=["float32"])
    arithmetic = device.arithmetic(kind, kind, kind, (64, 64, 64), 0, "cublas", "highest")
    return known(device, arithmetic, [(place, nbytes)], (None, 0))


def fresh(a: Path, s: Path, components: int, iterations: int, limits: dict[str, str]) -> Run:
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "ooc_gemm.cli", "pca", str(a), str(s), "-f", "--json", "-d", "cuda"]
    command += ["-k", str(components), "--iterations", str(iterations)]
    command += ["-M", limits["memory_limit"], "-D", limits["device_memory_limit"]]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    wall = time.perf_counter() - start
    if done.returncode:
        return {"problem": done.stderr[-500:], "wall_seconds": wall}
    said = json.loads(done.stdout)
    names = "seconds", "peak_host_bytes", "peak_device_bytes"
    return {"wall_seconds": wall} | {name: said[name] for name in names}


def measure(
    place: Path, shape: tuple[int, int], chunks: tuple[int, int], components: int, iterations: int,
    repeat: int, all_limits: list[dict[str, Any]],
) -> list[Run]:  # fmt: skip
    """Make the matrix, and measure `pca` within each pair of limits."""
    speed, start = rates(place, shape[0] * shape[1] * 4), time.perf_counter()
    wanted = make(place / "a", shape, chunks)[:components]
    click.echo(f"made {shape[0]}×{shape[1]} in {time.perf_counter() - start:.1f} s")
    return [
        {"name": "pca", "rows": shape[0], "cols": shape[1], "chunks": chunks, "components": components}
        | compare(place, shape[0] * shape[1] * 4, wanted, iterations, repeat, limits, speed)
        for limits in all_limits
    ]


def compare(
    place: Path, nbytes: int, wanted: Any, iterations: int, repeat: int, limits: dict[str, Any], speed: Any,
) -> Run:  # fmt: skip
    """Run `pca` warm and fresh, and compare singular values. nbytes: bytes of the matrix. wanted: its
    singular values."""
    a, s, components = place / "a", place / "s", len(wanted)
    found = [
        ooc_gemm.pca(
            str(a), components, iterations=iterations, scores=str(s), force=True, device="cuda", **limits
        )
        for _ in range(repeat + 1)
    ]
    best = sorted(found[1:], key=lambda one: one.seconds)[repeat // 2]
    cold = [fresh(a, s, components, iterations, limits) for _ in range(repeat)]
    moved = best.passes * nbytes
    error = float(np.abs(best.singular_values / wanted - 1).max())
    return {
        "limits": limits,
        "passes": best.passes,
        "seconds": best.seconds,
        "all_seconds": [one.seconds for one in found],
        "read_bytes_per_second": speed.read,
        "upload_bytes_per_second": speed.upload,
        "limit_seconds": moved / speed.read,
        "upload_seconds": moved / speed.upload,
        "ratio": best.seconds * speed.read / moved,
        "ratio_to_upload": best.seconds * speed.upload / moved,
        "bytes_read": best.bytes_read,
        "bytes_planned": planned(
            str(a), None, components, True, iterations, device="cuda", notice=click.echo, **limits
        ).bytes_read,
        "peak_host_bytes": best.peak_host_bytes,
        "peak_device_bytes": best.peak_device_bytes,
        "fresh": cold,
        "error": error,
    }


def judge(row: Run) -> list[str]:
    """Return which bars are missed."""
    from ooc_gemm.support.memory import parse_size

    limits = row["limits"]
    cold = statistics.median(one.get("seconds", float("inf")) for one in row["fresh"])
    held = max(one.get("peak_host_bytes", 0) for one in row["fresh"])
    on_device = max(one.get("peak_device_bytes", 0) for one in row["fresh"])
    missed = {
        f"error {row['error']:.1e}": not row["error"] <= ERROR,
        f"{row['ratio']:.2f} of the limit > {BAR}": row["ratio"] > BAR,
        f"fresh {cold:.2f} s": cold > row["seconds"] + AFTER_WARM,
        f"{held} bytes of host memory": held > parse_size(limits["memory_limit"]),
        f"{on_device} bytes of device memory": on_device > parse_size(limits["device_memory_limit"]),
        f"{row['bytes_read']} bytes read": row["bytes_read"] != row["bytes_planned"],
    }
    return [what for what, is_missed in missed.items() if is_missed]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rows", default=4_000_000, show_default=True)
@click.option("--cols", default=4096, show_default=True)
@click.option("--chunks", type=(int, int), default=(4096, 1024), show_default=True)
@click.option("--components", default=50, show_default=True)
@click.option("--iterations", default=4, show_default=True)
@click.option("--repeat", default=3, show_default=True)
@click.option("--memory-limit", default="8GiB", show_default=True)
@click.option(
    "--device-memory-limit", "on_device", multiple=True, default=("8GiB", "64GiB"), show_default=True
)
@click.option("--tmpfs", type=click.Path(path_type=Path), default=Path("/dev/shm"), show_default=True)
@click.option("--commit", help="What is measured, where there is no git repository.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS / "answers_h200.json")
def main(
    rows: int, cols: int, chunks: tuple[int, int], components: int, iterations: int, repeat: int,
    memory_limit: str, on_device: tuple[str, ...], tmpfs: Path, commit: str | None, out: Path,
) -> None:  # fmt: skip
    """Run the case, and write the results."""
    free, wanted = shutil.disk_usage(tmpfs).free, rows * (cols + 2 * components) * 4
    if free < wanted:
        raise click.ClickException(
            f"{tmpfs} has {free} bytes free, and {wanted} are needed; give fewer --rows"
        )
    place = tmpfs / "ooc-gemm-answers"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    limits: list[Run] = [{"memory_limit": memory_limit, "device_memory_limit": one} for one in on_device]
    try:
        cases = measure(place, (rows, cols), chunks, components, iterations, repeat, limits)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    for row in cases:
        row["missed"] = judge(row)
    report = head("gpu answers", commit) | {
        "repeat": repeat,
        "cases": cases,
    }
    out.write_text(json.dumps(report, indent=1) + "\n")
    for row in cases:
        cold = [round(one.get("seconds", float("nan")), 2) for one in row["fresh"]]
        click.echo(
            f"pca within {row['limits']['device_memory_limit']}: {row['seconds']:.2f} s for {row['passes']} "
            f"passes = {row['ratio']:.2f} of reading at {row['read_bytes_per_second'] / 1e9:.1f} GB/s, "
            f"{row['ratio_to_upload']:.2f} of uploading at {row['upload_bytes_per_second'] / 1e9:.1f} GB/s, "
            f"{row['bytes_read'] / 1e9:.0f} GB read, fresh {cold}, error {row['error']:.1e}, "
            f"missed: {'; '.join(row['missed']) or 'nothing'}"
        )
    sys.exit(1 if any(row["missed"] for row in cases) else 0)


if __name__ == "__main__":
    main()
