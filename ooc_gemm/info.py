"""What this machine has, and how fast it is."""

import os
import platform
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import psutil

from .devices.blas import gemm
from .devices.cpu import CPU
from .limits import default_memory_limit

SIZE = 64 << 20


def collect() -> dict[str, Any]:
    """Devices and memory, sizes in bytes."""
    from threadpoolctl import threadpool_info

    blas = [info for info in threadpool_info() if info["user_api"] == "blas"]
    found: dict[str, Any] = {
        "processor": platform.processor() or platform.machine(),
        "cores": CPU().threads,
        "memory_bytes": psutil.virtual_memory().total,
        "default_memory_limit_bytes": default_memory_limit(),
        "blas": ", ".join(f"{info['internal_api']} {info['version']}" for info in blas) or "not found",
        "in_place_gemm": gemm("f")[0],
    }
    try:
        from .devices.cuda import devices

        found["gpus"] = devices()
    except Exception as error:
        found["gpu"] = f"none ({error})"
    return found


def measured(folder: str) -> dict[str, float]:
    """Rates in bytes and floating-point operations a second: what `multiply` can at best run at."""
    cores = CPU().threads
    block = np.random.default_rng(0).integers(0, 255, SIZE, dtype=np.uint8)
    target = np.zeros_like(block)
    rates = {"copy_one_thread_bytes_per_second": SIZE / _best(lambda: np.copyto(target, block))}
    with tempfile.TemporaryDirectory(dir=folder) as scratch, ThreadPoolExecutor(max(4, cores)) as pool:
        files = [os.path.join(scratch, str(index)) for index in range(8)]
        rates["write_bytes_per_second"] = (
            len(files) * SIZE / _best(lambda: list(pool.map(block.tofile, files)), 1)
        )
        buffers = [np.empty_like(block) for _ in files]
        rates["read_bytes_per_second"] = (
            len(files) * SIZE / _best(lambda: list(pool.map(_load, files, buffers)))
        )
    for char, name in (("f", "float32"), ("d", "float64")):
        a, b = (np.random.default_rng(seed).random((2048, 2048)).astype(char) for seed in (1, 2))
        rates[f"{name}_flops"] = 2 * 2048**3 / _best(partial(np.matmul, a, b))
    return rates


def _load(path: str, into: Any) -> None:
    with open(path, "rb", buffering=0) as file:
        file.readinto(into)


def _best(work: Any, times: int = 3) -> float:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
