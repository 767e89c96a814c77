"""Times and judges one product on a GPU: `Case` holds the operands and knows the right result, `Stopwatch`
times."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from ..cuda_kernels.split import PITCH_BYTES
from ..support.intervals import round_up
from .gpu import Gemm

ROWS_CHECKED = 1024
WIDE_CHECKED = 16, 256
"""Number of rows and columns of a product of 64-bit types that NumPy checks."""
FLUSH_BYTES = 256 << 20
LONG_ENOUGH = 2e-3
"""Least seconds between two events. A kernel that is shorter is launched several times between them."""
MOST_LAUNCHES = 20
LEAD_SECONDS = 50e-6
"""How long the device is busy for each launch before it is timed, at least; twice as long as the host takes
for it, where that is more."""


def errors(got: Any, want: Any, threshold: float) -> dict[str, float | None]:
    """Return how far `got` is from `want`, which has a wider type. Both are NumPy or CuPy arrays of one
    shape.

    `root_mean_square` is that of `want`. `beyond_percent` is the share of elements whose error exceeds
    threshold × root_mean_square, or is NaN or infinite. The other three numbers are None if an error is NaN
    or infinite.
    """
    if got.size == 0:
        names = "beyond_percent", "root_mean_square", "mean_squared", "largest", "relative_frobenius"
        return dict.fromkeys(names, 0.0)
    difference = abs(got.astype(want.dtype) - want)
    difference = difference.astype(np.float64) if difference.dtype.kind in "iu" else difference
    scale = math.sqrt(float((abs(want).astype(np.float64) ** 2).mean()))
    within = (difference <= threshold * scale) & (difference < math.inf)  # False where NaN
    mean_squared = float((difference**2).mean())
    none = 0.0 if mean_squared == 0 else math.inf
    relative = math.sqrt(mean_squared) / scale if scale else none
    values = {
        "mean_squared": mean_squared,
        "largest": float(difference.max()),
        "relative_frobenius": relative,
    }
    finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
    beyond = 100 * (1 - float(within.mean()))
    return {"beyond_percent": beyond, "root_mean_square": scale if math.isfinite(scale) else None, **finite}


def rounding(kernel: str, dtype: str, k: int) -> float:
    """Return the largest error that rounding may cause in an element of a product of random matrices,
    relative to the root mean square of the product; 0 for integers. A sum of k products (2·k for each part of
    a complex one) loses up to half a unit in each addition, which adds up like √k; 8 and 6 are standard
    deviations, the constants cover small k. TF32 rounds its operands to 11 bits, and tensor cores add with
    three bits less than float32 has."""
    if np.dtype(dtype).kind in "iu":
        return 0.0
    wide, terms = np.dtype(dtype).char in "dD", 2 * k if np.dtype(dtype).kind == "c" else k
    tf32 = kernel.endswith("tf32")
    tensor = dtype == "float16" or tf32
    unit = 2.0**-53 if wide else 2.0**-21 if tensor else 2.0**-24
    operands = 2.0**-11 if tf32 else 0.0
    return operands * (8 + 32 / math.sqrt(k or 1)) + unit * (6 * math.sqrt(terms) + 32)


@dataclass
class Case:
    """The operands and C on the device, and what C should be. Padding at the end of rows is filled with
    NaN."""

    cupy: Any
    stream: Any
    dtype: str
    trans_a: bool
    trans_b: bool
    m: int
    n: int
    k: int
    out: str
    """Type of C."""

    def __post_init__(self) -> None:
        rng = np.random.Generator(np.random.SFC64(1))
        m, n, k = self.m, self.n, self.k
        with self.stream:
            self.a = self._random(rng, *((k, m) if self.trans_a else (m, k)))
            self.b = self._random(rng, *((n, k) if self.trans_b else (k, n)))
            self.c = self._padded(m, n, self.out)
            self.rows, self.cols, self.want = self._reference()
        self.stream.synchronize()

    def _padded(self, rows: int, cols: int, dtype: str) -> Any:
        """Allocate a matrix whose rows begin at multiples of PITCH_BYTES, as those of the engine's panels
        do."""
        unit = PITCH_BYTES // np.dtype(dtype).itemsize
        return self.cupy.full((rows, round_up(cols, unit)), poison(dtype), dtype)[:, :cols]

    def _random(self, rng: np.random.Generator, rows: int, cols: int) -> Any:
        array = self._padded(rows, cols, self.dtype)
        array[...] = self.cupy.asarray(random(rng, rows, cols, self.dtype))
        return array

    def _reference(self) -> tuple[Any, Any, Any]:
        """Return rows, columns, and the product there. It is computed in float64 on the device, in all
        columns; for types of 64 bits, in fewer rows and columns, in NumPy's longest type (int64 stays
        exact)."""
        a = self.a.T if self.trans_a else self.a
        b = self.b.T if self.trans_b else self.b
        kind, nbytes = np.dtype(self.dtype).kind, np.dtype(self.dtype).itemsize
        if nbytes // (2 if kind == "c" else 1) < 8:
            rows, wide = self._some(self.m, ROWS_CHECKED), "complex128" if kind == "c" else "float64"
            return rows, slice(None), self.cupy.matmul(a[rows].astype(wide), b.astype(wide))
        rows, cols = self._some(self.m, WIDE_CHECKED[0]), self._some(self.n, WIDE_CHECKED[1])
        long = {"f": np.longdouble, "c": np.clongdouble}.get(kind, np.int64)
        return rows, cols, a[rows].get().astype(long) @ b[:, cols].get().astype(long)

    def _some(self, extent: int, count: int) -> Any:
        """Choose up to `count` indices, among them the first and the last."""
        return self.cupy.asarray(np.unique(np.linspace(0, max(extent - 1, 0), min(extent, count), dtype=int)))

    def run(self, gemm: Gemm) -> None:
        gemm(1, self.a, self.b, 0, self.c, self.stream)

    def check(self, gemm: Gemm, threshold: float) -> dict[str, Any]:
        """Run once over a poisoned C. Return the errors, and how many elements of C are not finite or, for
        integers, were not written."""
        with self.stream:
            self.c.fill(poison(self.c.dtype))
            self.run(gemm)
            integer = self.c.dtype.kind in "iu"
            bad = self.c == poison(self.c.dtype) if integer else ~self.cupy.isfinite(self.c)
            got = self.c[self.rows][:, self.cols]
            found = errors(got.get() if isinstance(self.want, np.ndarray) else got, self.want, threshold)
            return {
                "threshold": threshold,
                "elements_checked": int(self.want.size),
                **found,
                "not_finite": int(bad.sum()),
            }


def random(rng: np.random.Generator, rows: int, cols: int, dtype: str) -> npt.NDArray[Any]:
    """Return a random matrix: N(0, 1), also for each part of a complex number, or integers over the range of
    int8 or uint8, in any type. It is made on the host, so that the data is the same on every device."""
    kind = np.dtype(dtype).kind
    if kind in "iu":
        small: Any = np.uint8 if kind == "u" else np.int8
        limits = np.iinfo(small)
        return rng.integers(limits.min, limits.max, (rows, cols), small, endpoint=True).astype(dtype)
    if kind == "c":
        return rng.standard_normal((rows, cols, 2), np.float32).view(np.complex64)[..., 0].astype(dtype)
    return rng.standard_normal((rows, cols), np.float32).astype(dtype)


def poison(dtype: Any) -> Any:
    kind = np.dtype(dtype).kind
    return np.iinfo(dtype).min if kind == "i" else np.iinfo(dtype).max if kind == "u" else np.nan


@dataclass(frozen=True)
class Repeated:
    """What is started several times in a row."""

    launch: Callable[[], None]
    """Starts one or more kernels, and returns before they are done."""
    count: int = 1
    host_seconds: float = 0.0
    """How long the host takes for a launch."""


class Stopwatch:
    """Times launches on one stream by events, and knows the bandwidth of device memory."""

    def __init__(self, cupy: Any, stream: Any):
        self._cupy, self._stream = cupy, stream
        self._buffer = cupy.cuda.alloc(FLUSH_BYTES)
        self.bandwidth = 1e12
        self.bandwidth = self._copy_rate()

    def _copy_rate(self) -> float:
        """Return the bytes read and written per second when half of the buffer, which is larger than L2, is
        copied to the other half."""
        half, device_to_device = FLUSH_BYTES // 2, 3
        to, at = self._buffer.ptr, self._buffer.ptr + half

        def copy() -> None:
            self._cupy.cuda.runtime.memcpyAsync(to, at, half, device_to_device, self._stream.ptr)

        copy()
        return 2 * half / median(self.time(Repeated(copy, 10)) for _ in range(5))

    def time(self, repeated: Repeated) -> float:
        """Return the seconds of one of some launches in a row. The device is busy before them, so that it
        does not wait for the host in between. What is read twice may come from L2."""
        lead = repeated.count * max(LEAD_SECONDS, 2 * repeated.host_seconds)
        for _ in range(math.ceil(lead * self.bandwidth / FLUSH_BYTES)):
            self._cupy.cuda.runtime.memsetAsync(self._buffer.ptr, 0, FLUSH_BYTES, self._stream.ptr)
        start, stop = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        start.record(self._stream)
        for _ in range(repeated.count):
            repeated.launch()
        stop.record(self._stream)
        stop.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(start, stop)) / 1e3 / repeated.count

    def repeated(self, launch: Callable[[], None]) -> Repeated:
        """Warm up, and return as many launches as take LONG_ENOUGH."""
        launch()
        self._stream.synchronize()
        start = perf_counter()
        launch()
        once = Repeated(launch, host_seconds=perf_counter() - start)
        self._stream.synchronize()
        return replace(once, count=max(1, min(MOST_LAUNCHES, math.ceil(LONG_ENOUGH / self.time(once)))))
