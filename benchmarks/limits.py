"""The engine beside what the hardware allows, on one GPU, Zarr to Zarr, in a warm process:

    python benchmarks/limits.py [--only NAME ...] [--repeat R] [--disk DIR] [--tmpfs DIR] [--out FILE]

Every case prints what it took, what it moved, what the plan had said, the limit and the ratio to it, and the
bar it has to meet. Limits come from rates measured in the same run. Caches are dropped before runs from disk.
Results are verified. Exit status 1: a bar was missed, a limit passed or a result is wrong.
"""

import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import cupy
import numpy as np
import zarr

import ooc_gemm

RESULTS = Path(__file__).resolve().parent / "results"
CHUNK, GiB = 2048, 1 << 30
Run = dict[str, Any]


def make(path: str, rows: int, cols: int, seed: int, zstd: bool = False) -> str:
    """A float32 array of N(0, 1) in chunks of 2048², written by many threads; zstd: rounded to sixteenths,
    so that there is something to compress."""
    from numcodecs import Zstd

    shutil.rmtree(path, ignore_errors=True)
    options: dict[str, Any] = {} if zstd else {"compressors": None}
    array = zarr.create_array(path, shape=(rows, cols), chunks=(CHUNK, CHUNK), dtype="f4", **options)
    codec = Zstd(level=1)
    cupy.random.seed(seed)

    def write(i: int, j: int, chunk: Any) -> None:
        data = np.ascontiguousarray(chunk)
        file = Path(f"{path}/{array.metadata.encode_chunk_key((i, j))}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(codec.encode(data) if zstd else data.data)

    with ThreadPoolExecutor(16) as pool:
        for i in range(rows // CHUNK):
            line = cupy.random.standard_normal((CHUNK, cols), dtype="f4")
            strip = (cupy.rint(line * 16) / 16 if zstd else line).get()
            jobs = [
                pool.submit(write, i, j, strip[:, j * CHUNK : (j + 1) * CHUNK]) for j in range(cols // CHUNK)
            ]
            for job in jobs:
                job.result()
    return path


def drop_caches() -> None:
    """What is on disk is only there."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def sgemm_seconds(size: int) -> float:
    """cuBLAS SGEMM alone, all three matrices on the GPU."""
    a, b = (cupy.random.standard_normal((size, size), dtype="f4") for _ in range(2))
    c = cupy.empty_like(a)
    cupy.matmul(a[:2048, :2048], b[:2048, :2048])
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    cupy.matmul(a, b, out=c)
    stop.record()
    stop.synchronize()
    seconds = float(cupy.cuda.get_elapsed_time(start, stop)) / 1e3
    del a, b, c
    cupy.get_default_memory_pool().free_all_blocks()
    return seconds


@contextmanager
def timed(what: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    click.echo(f"  ({what}: {time.perf_counter() - start:.1f} s)")


class Suite:
    """Runs cases, prints them, and keeps what they found."""

    def __init__(self, repeat: int):
        self.repeat, self.rows, self.missed = repeat, dict[str, Run](), list[str]()

    def run(
        self,
        name: str,
        job: Callable[[], Any],
        *,
        prepare: Callable[[], None] = lambda: None,
        repeat: int | None = None,
    ) -> Run:
        """Median of some runs of a multiplication, beside its plan and its limit; C is removed before each."""
        from ooc_gemm.bench_engine import limit_seconds

        found = []
        for _ in range(repeat or self.repeat):
            prepare()
            found.append(job())
        result = sorted(found, key=lambda result: result.seconds)[len(found) // 2]
        limits = limit_seconds(result, result.plan.used_rates)
        by = max(limits, key=lambda stage: limits[stage])
        seconds = statistics.median(result.seconds for result in found)
        plan = result.plan
        row = {
            "kernel": result.kernel,
            "seconds": seconds,
            "all_seconds": [result.seconds for result in found],
            "predicted_seconds": plan.predicted_seconds,
            "limit_seconds": limits[by],
            "limit_by": by,
            "ratio": seconds / limits[by],
            "bytes_read": result.bytes_read,
            "bytes_written": result.bytes_written,
            "lower_bound_bytes": result.lower_bound_bytes,
            "peak_host_bytes": result.peak_host_bytes,
            "peak_device_bytes": result.peak_device_bytes,
            "stage_seconds": result.stage_seconds,
            "plan": plan.to_dict(),
        }
        self.rows[name] = row
        click.echo(
            f"{name}: {seconds:.2f} s, {row['ratio']:.2f} of the limit {limits[by]:.2f} s ({by}); "
            f"predicted {plan.predicted_seconds:.2f} s; read {result.bytes_read / 1e9:.1f} GB, "
            f"{result.bytes_read / result.lower_bound_bytes:.3f} of the bound; "
            f"{plan.block_count} blocks of {plan.bm}×{plan.bn}, cache {plan.cache_slots}"
        )
        self.bar(f"{name}: bytes read as predicted", float(result.bytes_read != plan.bytes_read), 0)
        return row

    def bar(self, what: str, found: float, most: float) -> None:
        """Say whether it holds."""
        held = found <= most
        click.echo(f"    {'held  ' if held else 'MISSED'} {what}: {found:.3f} (at most {most})")
        if not held:
            self.missed.append(f"{what}: {found:.3f} > {most}")

    def close_to(self, name: str, share: float) -> None:
        """Predicted seconds are within a share of the measured ones."""
        row = self.rows[name]
        self.bar(f"{name}: prediction off by", abs(row["predicted_seconds"] / row["seconds"] - 1), share)
