"""Which GPUs there are, and what each of them is."""

import subprocess
import sys
from functools import cache as remembered
from typing import Any

from ...cuda_kernels.roofline import peak_flops
from ...support import cache
from ...support.errors import InputError

CLOCK_RATE, _MEMORY_CLOCK_RATE, _MEMORY_BUS_WIDTH = 13, 36, 37
"""cudaDeviceAttr. Their values are in kHz, kHz and bits."""
CUDA_FULL, CUBLAS_FULL = 2, 3
"""The status of CUDA, and of cuBLAS, after an allocation that failed."""


def _ask() -> tuple[Any, int, str]:
    """Return CuPy or None, the number of GPUs, and why they cannot be used; an empty reason if they can."""
    cache.guard_cupy()
    try:
        import cupy
    except ImportError:
        return None, 0, "there is no CuPy; install it with pip install 'ooc-gemm[cuda13]'"
    try:
        return cupy, int(cupy.cuda.runtime.getDeviceCount()), ""
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return cupy, 0, f"there is no usable GPU ({error})"


def require_cupy(what: str) -> Any:
    """Return CuPy. Raises InputError if there is no GPU to use it with. `what` begins the message."""
    cupy, found, why = _ask()
    if not found:
        raise InputError(f"{what} on an NVIDIA GPU, and {why or 'there is no GPU'}")
    return cupy


def open_cupy() -> tuple[Any, int]:
    """Return CuPy and the number of GPUs. Raises InputError if CuPy is missing or does not work."""
    cupy, found, why = _ask()
    if why:
        raise InputError(f"{why} or use device='cpu'" if cupy is None else f"{why}; use device='cpu'")
    return cupy, found


def count() -> int:
    """Return the number of GPUs. Raises InputError if CuPy is missing or does not work."""
    return open_cupy()[1]


_ANSWER = "import cupy, sys; cupy.cuda.Device(int(sys.argv[1])).use(); assert cupy.arange(8).sum() == 28"


def answering(indices: list[int]) -> list[int]:
    """Return the numbers of those GPUs that compute in a fresh process. This takes seconds."""
    command = [sys.executable, "-c", _ANSWER]
    asked = {i: subprocess.Popen([*command, str(i)], stderr=subprocess.DEVNULL) for i in indices}
    return [index for index, process in asked.items() if process.wait() == 0]


@remembered
def properties(runtime: Any, index: int) -> dict[str, Any]:
    """Return what CUDA says of a GPU. It is asked once, because that takes a millisecond. `runtime`: CUDA's,
    as CuPy has it."""
    return dict(runtime.getDeviceProperties(index))


@remembered
def attribute(runtime: Any, number: int, index: int) -> int:
    """Return an attribute of a GPU, by its number. CUDA is asked once, because that takes half a
    millisecond."""
    return int(runtime.deviceGetAttribute(number, index))


def memory_bandwidth(runtime: Any, index: int) -> int:
    """Return the highest bandwidth of a GPU's memory in bytes per second; 0 if the driver reports none.
    `runtime`: CUDA's, as CuPy has it."""
    clock, bits = (attribute(runtime, number, index) for number in (_MEMORY_CLOCK_RATE, _MEMORY_BUS_WIDTH))
    return 2 * 1000 * clock * bits // 8  # two transfers a clock


def devices() -> list[dict[str, Any]]:
    """Describe each GPU. Clocks are the highest ones, and peaks are those at these clocks. Raises InputError
    if there is no GPU."""
    cupy, there = open_cupy()
    found = []
    for index in range(there):
        p = properties(cupy.cuda.runtime, index)
        clock, memory_clock = (
            attribute(cupy.cuda.runtime, number, index) for number in (CLOCK_RATE, _MEMORY_CLOCK_RATE)
        )
        capability = p["major"], p["minor"]
        with cupy.cuda.Device(index):
            free, total = cupy.cuda.runtime.memGetInfo()
        found.append(
            {
                "name": p["name"].decode(),
                "compute_capability": f"{p['major']}.{p['minor']}",
                "multiprocessors": p["multiProcessorCount"],
                "memory_bytes": total,
                "free_bytes": free,
                "l2_cache_bytes": p["l2CacheSize"],
                "shared_memory_per_block_bytes": p["sharedMemPerBlockOptin"],
                "shared_memory_per_multiprocessor_bytes": p["sharedMemPerMultiprocessor"],
                "registers_per_multiprocessor": p["regsPerMultiprocessor"],
                "warp_size": p["warpSize"],
                "clock_hertz": clock * 1000,
                "memory_clock_hertz": memory_clock * 1000,
                "memory_bandwidth_bytes_per_second": memory_bandwidth(cupy.cuda.runtime, index),
                "peak": {
                    f"{name}_flops": rate
                    for name, rate in peak_flops(capability, p["multiProcessorCount"], clock * 1e3).items()
                },
            }
        )
    return found
