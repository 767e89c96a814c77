"""What memory a GPU has for a plan, and how fast it is expected to be if nothing was measured."""

from typing import Any

import numpy as np

from ...cuda_kernels import residues
from ...cuda_kernels.integers import SCRATCH_BYTES, plane_pairs
from ...engine.ports import Arithmetic, Limits
from ...planning.machine import Rates
from ...planning.problem import MiB
from ...support.intervals import power_of_two
from .. import GPU_HOST_BYTES

CONTEXT_BYTES = 528 * MiB
"""Device memory of a context (measured 527 MiB on an H200)."""
LIBRARY_BYTES = 144 * MiB
"""Device memory of cuBLAS: its handle and workspace (measured 132 MiB)."""
MODULE_BYTES = 48 * MiB
"""Device memory of our own kernels and of CuPy's that convert and transpose, and what a dozen allocations
lose by being rounded up to 2 MiB. With 32 MiB a product within the smallest limit exceeded it by 7 MB."""

SHARE_OF_FREE = 0.9
"""Share of the free memory of a device that a plan may use by default. The rest is for other programs, and
for what the driver allocates later."""
ROUNDED = 64
"""What a plan may use by default is rounded down by up to one in so many bytes."""
READERS = 16
"""Threads that read for one device. They read cached chunks at 72 to 75 GB/s, which is more than the 55 GB/s
that one device takes over its bus (H200 machine)."""
WRITERS = 8
"""Threads that write for one device: half as many, because a run reads panels many times and writes C
once."""

MOST_KEPT = 128
"""Most elements of a row of C that best.cu finds fast: half as many as its threads."""

LANES = 128
"""Multiply-adds of float32 that a multiprocessor starts per clock cycle on most architectures. 7.5 and 8.0
start half as many, of which plans learn when rates are measured."""
CLOCK_KILOHERTZ = 1_500_000
"""Clock rate that is assumed if the driver reports none."""
REACHED = 0.75
"""Share of the peak of float32 that a large product in SGEMM is expected to reach."""
DISK, BUS = 3e9, 50e9
"""Bytes per second of reading or writing files, and of copies in one direction between host and device."""
_FULL_FLOAT64 = (6, 0), (7, 0), (8, 0), (9, 0), (10, 0)
"""Compute capabilities whose float64 is as fast as float32, or half as fast."""
_SLOW_FLOAT64 = 1 / 32
"""Rate of float64 on other devices, as a multiple of that of float32."""
_BY_TYPE = {"e": 8.0, "f": 1.0, "d": 1.0, "F": 0.25, "D": 0.25}
"""Type of panels (NumPy's character) → rate of cuBLAS as a multiple of SGEMM's. A complex multiplication and
addition count as two operations, and are eight real ones. float64 and complex128 are then slowed down on
devices without full float64."""
_OTHER_TYPE = 1 / 16
"""The same for integers, which are multiplied without tensor cores."""
_BY_KERNEL = {
    "cublas": 1.0, "fp16x3": 4.4, "fp16": 1.5, "tf32": 7.0, "int8": 400.0, "dmma": 0.9, "mma-fp16x3": 2.9,
    "mma-int8": 240.0,
}  # fmt: skip
"""Kernel → its rate as a multiple of that of cuBLAS for the same panels on an H200 (benchmarks/results). For
int8 and mma-int8 it is a multiple of the rate of other integers, because cuBLAS takes none."""
_OTHER_KERNEL = 0.75
"""The same for kernels without tensor cores."""
UNPACK = 2.3e8
"""Decoded bytes per second of one part of a chunk beside others (H200, 128 parts at a time: rounded float32
numbers 2.3e8, genotypes 2.1e8 to 5e8, normal float32 numbers 3.7e8; 2026-11-28)."""
BANDWIDTH = 1e12
"""Bytes per second of device memory that are assumed if the driver reports none."""
BANDWIDTH_REACHED = 0.5
"""Share of the bandwidth of device memory at which kernels read and write C. They do it when the products of
a tile are finished (H200, fp16x3: the time of 440 products of each element, measured)."""


def limits(
    arithmetic: Arithmetic, free: int, device_memory_limit: int | None, multiprocessors: int = 0
) -> Limits:
    """Return the limits of a device that has `free` bytes left beside its context. By default a plan may use
    SHARE_OF_FREE of them, rounded: a little more or less is free before each product, and the plan for one
    limit is remembered."""
    allowed = device_memory_limit
    if allowed is None:
        share = int(SHARE_OF_FREE * free)
        step = power_of_two(share // ROUNDED)
        allowed = CONTEXT_BYTES + share // step * step
    code = LIBRARY_BYTES if arithmetic.kernel == "cublas" else MODULE_BYTES
    return Limits(
        host_baseline=GPU_HOST_BYTES,
        device=allowed,
        device_baseline=CONTEXT_BYTES + code,
        workspace=_workspace(arithmetic),
        readers=READERS,
        writers=WRITERS,
        transforms=True,
        narrows=True,
        decodes=multiprocessors,
        most_kept=MOST_KEPT,
    )


def _workspace(arithmetic: Arithmetic) -> int:
    """Return the bytes of scratch memory of a kernel that do not depend on the plan."""
    if arithmetic.kernel == "ozaki2":
        return residues.SCRATCH_BYTES
    return SCRATCH_BYTES if adds_up(arithmetic) else 0


def adds_up(arithmetic: Arithmetic) -> bool:
    """Whether partial sums in int32 are added to C in another pass (`WideIntegers`)."""
    return arithmetic.kernel.endswith("int8") and arithmetic.block == np.int64


def panel_depth(flops: float, arithmetic: Arithmetic, bandwidth: float) -> float:
    """Return the depth of a panel whose products take as long as reading and writing C does (`Rates.thin`).
    `flops`: operations per second of the kernel. `bandwidth`: bytes per second of device memory."""
    moved = 2 * arithmetic.block.itemsize
    if adds_up(arithmetic):
        moved = (moved + 2 * 4) * len(plane_pairs(arithmetic.panel.itemsize))
    if arithmetic.kernel == "ozaki2":  # residues of sums are written and read
        moved += 2 * arithmetic.scratch[0]
    return max(Rates.thin, flops / 2 * moved / (BANDWIDTH_REACHED * bandwidth))


def rates(properties: dict[str, Any], arithmetic: Arithmetic, bandwidth: float = BANDWIDTH) -> Rates:
    """Return default rates (not measured). Those of products follow from the number of multiprocessors and
    the clock; what a panel costs besides, from what is read and written of C; those of bus and disk are
    constants. `properties`: of CUDA's runtime. `bandwidth`: bytes per second of device memory."""
    p, panel = properties, arithmetic.panel.char
    clock = 1e3 * (p.get("clockRate") or CLOCK_KILOHERTZ)
    flops = REACHED * 2 * LANES * p["multiProcessorCount"] * clock
    if arithmetic.kernel == "ozaki2":  # a product of 8-bit integers for each residue
        flops *= _OTHER_TYPE * _BY_KERNEL["int8"] / arithmetic.scratch[0]
    else:
        flops *= _BY_TYPE.get(panel, _OTHER_TYPE) * _BY_KERNEL.get(arithmetic.kernel, _OTHER_KERNEL)
    if adds_up(arithmetic):
        flops /= len(plane_pairs(arithmetic.panel.itemsize))
    if panel in "dD" and (p["major"], p["minor"]) not in _FULL_FLOAT64:
        flops *= _SLOW_FLOAT64
    thin = panel_depth(flops, arithmetic, bandwidth)
    return Rates(flops, DISK, DISK, BUS, BUS, shared=False, thin=thin, unpack=UNPACK)
