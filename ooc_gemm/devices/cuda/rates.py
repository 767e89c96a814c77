"""What memory a GPU has for a plan, and how fast it is expected to be where nothing was measured."""

from typing import Any

from ...engine.ports import Arithmetic, Limits
from ...planning.machine import Rates
from ...planning.problem import MiB

HOST_BASELINE = 704 * MiB
"""Resident set of a process with a CUDA context, CuPy and cuBLAS loaded (measured 480 to 560 MiB)."""
CONTEXT_BYTES = 528 * MiB
"""Device memory of a context (measured 527 MiB on an H200)."""
LIBRARY_BYTES = 144 * MiB
"""Device memory of cuBLAS: its handle and workspace (measured 132 MiB)."""
MODULE_BYTES = 48 * MiB
"""Device memory of our own kernels, loaded, of CuPy's that convert and turn, and what a dozen allocations are
rounded up by, to 2 MiB (with 32 MiB a product within the smallest limit passed it by 7 MB)."""

_FULL_FLOAT64 = (6, 0), (7, 0), (8, 0), (9, 0), (10, 0)
"""Compute capabilities whose float64 is as fast as float32, or half as fast."""
_FACTORS = {
    "cublas": 1.0, "fp16x3": 4.4, "fp16": 1.5, "tf32": 7.0, "int8": 400.0, "dmma": 0.9, "mma-fp16x3": 2.9
}  # fmt: skip
"""Rates of kernels as multiples of SGEMM, DGEMM … on an H200 (benchmarks/results); 0.75 for others."""


def limits(arithmetic: Arithmetic, free: int, device_memory_limit: int | None) -> Limits:
    """Memory limits of a device that has `free` bytes left beside its context: of these 90 % unless the user
    gives a limit, in bytes."""
    allowed = CONTEXT_BYTES + int(0.9 * free) if device_memory_limit is None else device_memory_limit
    code = LIBRARY_BYTES if arithmetic.kernel == "cublas" else MODULE_BYTES
    return Limits(
        host_baseline=HOST_BASELINE,
        device=allowed,
        device_baseline=CONTEXT_BYTES + code,
        workspace=0,
        readers=16,
        writers=8,
    )


def rates(properties: dict[str, Any], arithmetic: Arithmetic) -> Rates:
    """Default rates (not measured): three quarters of the peak by multiprocessors and clock; those of bus and
    disk are constants. `properties`: of CUDA's runtime."""
    p = properties
    clock = (p.get("clockRate") or 1_500_000) * 1e3
    lanes = p["multiProcessorCount"] * 128 * 2 * clock * 0.75
    full64 = (p["major"], p["minor"]) in _FULL_FLOAT64
    float64 = 1.0 if full64 else 1 / 32
    times = {"e": 8.0, "f": 1.0, "d": float64, "F": 0.25, "D": float64 / 4}
    flops = lanes * times.get(arithmetic.panel.char, 1 / 16)
    flops *= _FACTORS.get(arithmetic.kernel, 0.75)
    return Rates(flops, 3e9, 3e9, 50e9, 50e9, shared=False)
