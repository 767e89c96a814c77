"""What a GEMM asks of a device, by formula, and what the device can at best do. Standard library only.

▲ flop/s        ┌──────────── peak of the arithmetic used
│             ╱ │
│           ╱   └ ridge: peak / bandwidth
│         ╱  bandwidth · intensity
└───────────────────────────────────► intensity, flop/byte
 bound by memory │ by compute
"""

import math
from dataclasses import dataclass

from ..support.intervals import ceil_div

ITEM_BYTES = {
    "int8": 1, "uint8": 1, "float16": 2, "int16": 2, "int32": 4, "float32": 4, "int64": 8, "float64": 8,
    "complex64": 8, "complex128": 16,
}  # fmt: skip
OUT_DTYPE = {"float16": "float32", "int8": "int32", "uint8": "int32"}
"""Type of A and B → type of α, β and C, where it is another one."""


@dataclass(frozen=True)
class Work:
    """The work of a product C = A·B with β = 0. Loads and stores are elements that the kernel asks of global
    memory. How many of them a cache answers is not counted."""

    operations: int
    """Number of additions and multiplications of real numbers."""
    loads: int | None
    """Number of elements of A and B; None if the tile is not known (cuBLAS)."""
    stores: int
    """Number of elements of C."""
    nbytes: int | None
    """Bytes of loads and stores."""

    @property
    def accesses_ratio(self) -> float | None:
        """The compute-to-global-memory-access ratio: operations for each element loaded or stored."""
        return None if self.loads is None else _ratio(self.operations, self.loads + self.stores)

    @property
    def intensity(self) -> float | None:
        """The arithmetic intensity: operations for each byte loaded or stored."""
        return None if self.nbytes is None else _ratio(self.operations, self.nbytes)


def work(dtype: str, m: int, n: int, k: int, tile: tuple[int, int] | None, out: str = "") -> Work:
    """A block of BM×BN elements of C reads BM·k elements of A and k·BN of B, less at the edges:

        loads = m·k·⌈n/BN⌉ + k·n·⌈m/BM⌉        stores = m·n

    A naive kernel has a tile of 1×1, and so 2·k loads for each element of C. A complex product counts
    four real multiplications and four additions with its sum. `out`: type of C, by default as usual.
    """
    operations = (8 if dtype.startswith("complex") else 2) * m * n * k
    stores = m * n
    if tile is None:
        return Work(operations, None, stores, None)
    loads = m * k * ceil_div(n, tile[1]) + k * n * ceil_div(m, tile[0])
    nbytes = loads * ITEM_BYTES[dtype] + stores * ITEM_BYTES[out or OUT_DTYPE.get(dtype, dtype)]
    return Work(operations, loads, stores, nbytes)


@dataclass(frozen=True)
class Place:
    """The place of a measured rate under the roof."""

    bound: str
    """"memory" or "compute": which roof is lower at this intensity. "caches": the rate is above what memory
    could feed, so that caches answer many of the loads, and the roof is the peak."""
    roof_flops: float
    """The roof in operations per second."""
    fraction: float
    """The measured rate as a fraction of the roof."""


def place(flops: float, intensity: float | None, peak: float | None, bandwidth: float) -> Place | None:
    """Find the place of a rate. Rates are in operations and bytes per second. Without an intensity the roof
    is the peak; without a peak the result is None."""
    if not peak:
        return None
    slope = peak if intensity is None else bandwidth * intensity
    if slope >= peak:
        return Place("compute", peak, flops / peak)
    return Place("memory", slope, flops / slope) if flops <= slope else Place("caches", peak, flops / peak)


_RATES = ("float32", "float64", "float64_tensor", "tf32", "float16", "int8")
_FMA_PER_CLOCK = {
    (7, 5): (64, 2, 0, 0, 512, 1024),
    (8, 0): (64, 32, 64, 512, 1024, 2048),
    (8, 6): (128, 2, 0, 256, 512, 1024),
    (8, 9): (128, 2, 0, 256, 512, 1024),
    (9, 0): (128, 64, 128, 1024, 2048, 4096),
    (10, 0): (128, 64, 64, 2048, 4096, 8192),
    (12, 0): (128, 2, 0, 256, 512, 1024),
}
"""Fused multiply-adds of one multiprocessor per clock cycle, in the order of _RATES."""


def peak_flops(capability: tuple[int, int], multiprocessors: int, clock_hertz: float) -> dict[str, float]:
    """Operations a second by type, dense, sums in float32 (float16, tf32) or int32 (int8), at the given
    clock; empty for an architecture not in the table.

    float32 and float64: the CUDA C++ Programming Guide, "Arithmetic Instructions", results per clock and
    multiprocessor. Tensor cores: dense peaks in NVIDIA's architecture papers and data sheets, divided by
    multiprocessors and boost clock (T4; A100; RTX A6000; L40S; H100 SXM; B200; RTX PRO 6000 Blackwell).
    GeForce boards of 7.5, 8.6, 8.9 and 12.0 run float16 and tf32 at half of it. Under tensor load the
    clock falls below the highest one: H100's sheet counts 1.83 GHz where its cores can run at 1.98.
    """
    each = _FMA_PER_CLOCK.get(capability, ())
    return {
        name: 2.0 * fma * multiprocessors * clock_hertz
        for name, fma in zip(_RATES, each, strict=False)
        if fma
    }


_SPENT: dict[str, tuple[str, float]] = {
    "cublas-tf32": ("tf32", 1), "tf32": ("tf32", 1), "fp16": ("float16", 1), "fp16x3": ("float16", 3),
    "dmma": ("float64_tensor", 1),
}  # fmt: skip
"""Kernel → the rate that bounds it, and how many products at that rate make one of its products. Other
kernels run at the rate of their type."""
_RESIDUES = {"float64": 15, "complex128": 45 / 4, "int16": 4, "int32": 8}
"""Type → how many products of 8-bit integers make one real product of ozaki2, at least."""


def peak_of(kernel: str, dtype: str, peaks: dict[str, float]) -> tuple[str, float] | None:
    """Return the roof over a kernel, one of `peak_flops`: its name, and operations per second; None if it is
    not known."""
    real = {"complex64": "float32", "complex128": "float64", "uint8": "int8"}.get(dtype, dtype)
    name, products = _SPENT.get(kernel.removeprefix("mma-"), (real, 1))
    if kernel == "ozaki2":
        name, products = "int8", _RESIDUES[dtype.removeprefix("u")]
    if kernel == "cublas" and real == "float64":
        name = "float64_tensor"
    if name == "float64_tensor" and name not in peaks:
        name = "float64"
    if name not in peaks:
        return None
    return (name if products == 1 else f"{name} / {products:g}"), peaks[name] / products


_BOOSTED = (7, 5), (8, 6), (8, 9), (12, 0)
"""Architectures of boards that run up to a tenth faster than the clock they report."""


def most_flops(
    kernel: str, dtype: str, capability: tuple[int, int], multiprocessors: int, clock_hertz: float
) -> float:
    """Operations a second that a kernel cannot exceed on a GPU. A complex multiplication and addition count
    as two operations, as in plans. `dtype`: of the panels that it multiplies. What is not in the tables (an
    architecture, integers of 32 and 64 bits) gets a bound that is far too high; without a clock it is
    infinite."""
    clock_hertz *= 1.1 if capability in _BOOSTED else 1.0
    peaks = peak_flops(capability, multiprocessors, clock_hertz)
    known = peak_of(kernel, dtype, peaks)
    if known:
        _, most = known
    elif peaks:
        most = max(peaks.values())
    else:
        most = 4.0 * max(map(max, _FMA_PER_CLOCK.values())) * multiprocessors * clock_hertz
    return (most / (4 if dtype.startswith("complex") else 1)) or math.inf


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
