"""The ten nearest neighbours of each row of 1,000,000×768 float16, beside the product that they need.

    python benchmarks/answers_topk_gpu.py [--rows N] [--repeat R] [--tmpfs DIR] [--json FILE]

The time is compared with that of the product alone, which follows from the kernel's rate and from what a
panel costs beside, measured in the same run. Sampled rows are compared with all scores in float64. Exit
status 1: a run takes more than 2.0 times the product, the device holds more than its limit, or a neighbour
is wrong.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import cupy
import numpy as np
import zarr

import ooc_gemm
from ooc_gemm.bench.kernel_rate import kernel_rate
from ooc_gemm.devices.cuda.device import CUDA

DEPTH, K, BAR = 768, 10, 2.0
CHUNK, SAMPLES = 4096, 200
LIMITS: dict[str, Any] = {"memory_limit": "8GiB", "device_memory_limit": "40GiB"}
CLOSE = 1e-5
"""Scores of rows of norm 1 that differ by less count as equal: values are stored in float32."""
Record = dict[str, Any]


def make(path: Path, rows: int) -> None:
    """Write rows of norm 1 around 1,000 centres to raw chunks."""
    array = zarr.create_array(
        str(path), shape=(rows, DEPTH), dtype="f2", chunks=(CHUNK, DEPTH), compressors=None, filters=None
    )
    cupy.random.seed(1)
    centres = cupy.random.standard_normal((1000, DEPTH), dtype="f4")

    def write(start: int, values: Any) -> None:
        array[start : start + len(values)] = values

    with ThreadPoolExecutor(8) as pool:
        jobs = []
        for start in range(0, rows, 16 * CHUNK):
            count = min(16 * CHUNK, rows - start)
            values = cupy.random.standard_normal((count, DEPTH), dtype="f4")
            values += centres[cupy.random.randint(0, len(centres), count)]
            values /= cupy.linalg.norm(values, axis=1, keepdims=True)
            found = values.astype("f2").get()
            jobs += [pool.submit(write, start + i, found[i : i + CHUNK]) for i in range(0, count, CHUNK)]
        for job in jobs:
            job.result()
    cupy.get_default_memory_pool().free_all_blocks()


def product_seconds(device: CUDA, rows: int) -> Record:
    """What the product takes alone, by the kernel's rate and what a panel costs beside."""
    rate, _ = kernel_rate(device, "float16", "highest", "auto", 8192, 1.0)
    seconds = 2 * rows * rows * (DEPTH + rate["thin"]) / rate["flops"]
    return {**rate, "seconds": seconds, "kernel_alone_seconds": 2 * rows * rows * DEPTH / rate["flops"]}


def wrong_rows(path: Path, found: Any, metric: str) -> int:
    """How many sampled rows have a neighbour whose score is lower than that of the K-th best in float64."""
    array = zarr.open_array(str(path), mode="r")
    count = array.shape[0]
    samples = np.sort(np.random.default_rng(2).choice(count, min(SAMPLES, count), replace=False))
    left = cupy.asarray(np.stack([array[int(row)] for row in samples])).astype("f8")
    if metric == "cosine":
        left /= cupy.linalg.norm(left, axis=1, keepdims=True)
    scores = np.empty((len(samples), count))
    step = 16 * CHUNK
    for start in range(0, count, step):
        right = cupy.asarray(array[start : start + step]).astype("f8")
        some = left @ right.T
        if metric == "cosine":
            some /= cupy.linalg.norm(right, axis=1)
        scores[:, start : start + step] = some.get()
    scores[np.arange(len(samples)), samples] = -np.inf
    indices, values = np.asarray(found.indices)[samples], np.asarray(found.values)[samples]
    last = np.partition(scores, count - K, axis=1)[:, count - K]
    of_found = np.take_along_axis(scores, indices, axis=1)
    wrong = (of_found < last[:, None] - CLOSE).any(1) | (np.abs(of_found - values) > CLOSE).any(1)
    wrong |= (np.sort(indices)[:, 1:] == np.sort(indices)[:, :-1]).any(1) | (indices == samples[:, None]).any(
        1
    )
    return int(wrong.sum())


def timed(path: Path, metric: Any) -> tuple[Any, dict[str, float]]:
    """Run `topk`; its result, and the busy seconds of each stage."""
    traces: list[Any] = []
    keep: Callable[..., None] = lambda fraction, plan, trace: traces.append(trace)  # noqa: E731
    found = ooc_gemm.topk(str(path), k=K, metric=metric, device="cuda", progress=keep, **LIMITS)
    return found, traces[-1].stage_seconds()


def measure(path: Path, metric: str, alone: Record, repeat: int) -> Record:
    """Run `topk` once to compile and to get memory, then `repeat` times."""
    runs = [timed(path, metric) for _ in range(repeat + 1)]
    found, stages = min(runs[1:], key=lambda run: run[0].seconds)
    limit = found.plan.budget.device
    row: Record = {
        "metric": metric,
        "seconds": found.seconds,
        "all_seconds": [run[0].seconds for run in runs],
        "ratio": found.seconds / alone["seconds"],
        "predicted_seconds": found.plan.predicted_seconds,
        "stage_seconds": stages,
        "kernel": found.kernel,
        "blocks": [found.plan.block_count, found.plan.bm, found.plan.bn],
        "bytes_read": found.bytes_read,
        "peak_host_bytes": found.peak_host_bytes,
        "peak_device_bytes": found.peak_device_bytes,
        "rows_close": found.rows_close,
        "kept_bytes": found.plan.problem.kept_bytes,
        "wrong_rows": wrong_rows(path, found, metric),
    }
    missed = {
        f"{row['ratio']:.2f} times the product": row["ratio"] > BAR,
        "device memory": row["peak_device_bytes"] > (limit or 0),
        "host memory": row["peak_host_bytes"] > found.plan.budget.host,
        f"{row['wrong_rows']} rows are wrong": row["wrong_rows"] > 0,
    }
    row["missed"] = [what for what, is_missed in missed.items() if is_missed]
    return row


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rows", default=1_000_000, show_default=True)
@click.option("--repeat", default=2, show_default=True)
@click.option("--tmpfs", type=click.Path(path_type=Path), default=Path("/dev/shm"), show_default=True)
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write the results to this file.")
@click.option("--commit", help="What is measured, where there is no git repository.")
def main(rows: int, repeat: int, tmpfs: Path, out: Path | None, commit: str | None) -> None:
    """Find the nearest neighbours of many rows, and compare the time with that of the product."""
    place = tmpfs / "ooc-gemm-topk"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    device = CUDA()
    report: Record = {
        "suite": "topk on a GPU",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit or subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip(),
        "device": device.model,
        "rows": rows,
        "depth": DEPTH,
        "k": K,
        **LIMITS,
        "cases": [],
    }
    try:
        start = time.perf_counter()
        make(place / "x", rows)
        click.echo(f"{rows} rows written: {time.perf_counter() - start:.1f} s")
        report["product"] = alone = product_seconds(device, rows)
        click.echo(
            f"the product alone: {alone['seconds']:.2f} s ({alone['flops'] / 1e12:.0f} TFLOP/s, a panel "
            f"costs as much as {alone['thin']:.0f} of depth)"
        )
        for metric in ("cosine", "dot"):
            row = measure(place / "x", metric, alone, repeat)
            report["cases"].append(row)
            click.echo(
                f"{metric}: {row['seconds']:.2f} s = {row['ratio']:.2f} of the product (all: "
                f"{', '.join(f'{one:.2f}' for one in row['all_seconds'])}), predicted "
                f"{row['predicted_seconds']:.2f}, busy {row['stage_seconds']}, blocks {row['blocks']}, "
                f"device {row['peak_device_bytes'] / 2**30:.1f} GiB, "
                f"host {row['peak_host_bytes'] / 2**30:.2f} GiB, close {row['rows_close']}, "
                f"missed: {'; '.join(row['missed']) or 'nothing'}"
            )
            if out:
                out.write_text(json.dumps(report, indent=1) + "\n")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    sys.exit(any(row["missed"] for row in report["cases"]))


if __name__ == "__main__":
    main()
