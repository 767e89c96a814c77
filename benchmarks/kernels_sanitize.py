"""Our CUDA kernels at ragged shapes, made to be run under compute-sanitizer:

    compute-sanitizer --tool memcheck  python benchmarks/kernels_sanitize.py
    compute-sanitizer --tool racecheck python benchmarks/kernels_sanitize.py --one-shape ffma dmma

Every matrix is an allocation of its own, of exactly the bytes it has, so that a step over its end is seen.
Every result is compared with NumPy's.
"""

from itertools import product
from typing import Any

import click
import cupy
import numpy as np

from ooc_gemm.bench.gpu import open_gemm, out_dtype
from ooc_gemm.bench.measure import poison, random, rounding
from ooc_gemm.cuda_kernels import scales, split
from ooc_gemm.cuda_kernels.catalog import KERNELS
from ooc_gemm.cuda_kernels.split import PITCH_BYTES
from ooc_gemm.support.intervals import round_up

SHAPES = (
    (129, 257, 71), (1, 1, 1), (17, 3, 2), (257, 65, 64), (1, 300, 33), (300, 1, 33), (66, 130, 0),
    (70, 66, 1100),
)  # fmt: skip
FACTORS = ((2, -3), (1, 0))
"""Pairs of α and β."""


def stored(values: np.ndarray, pitch: int) -> Any:
    """Copy a matrix to the device, with rows `pitch` elements apart and poison between them. The allocation
    ends with the last row."""
    rows, cols = values.shape
    full = np.full((rows, pitch), poison(values.dtype), values.dtype)
    full[:, :cols] = values
    flat = cupy.asarray(full.ravel()[: max(0, (rows - 1) * pitch + cols)])
    return cupy.ndarray(
        (rows, cols), values.dtype, flat.data, strides=(pitch * values.itemsize, values.itemsize)
    )


THRESHOLDS = {"split": (1e30, 0.0, 0.0), "fallback": (-1.0, 1e30, 0.0)}
"""Path of fp16x3 → values of LOW_SHARE, LEAST_TERMS and LEAST_DENSITY (split.py) with which all inputs take
it."""


TOLERANCES = {"residues": 1e30, "float64": 0.0}
"""The same for ozaki2 → values of TOLERANCE (scales.py)."""


def paths(kernel: str, dtype: str) -> tuple[str, ...]:
    if kernel == "ozaki2" and "int" not in dtype:
        return tuple(TOLERANCES)
    return tuple(THRESHOLDS) if kernel.endswith("fp16x3") else ("",)


def take(path: str) -> None:
    """Set which path fp16x3 or ozaki2 takes from now on."""
    if path in TOLERANCES:
        scales.TOLERANCE = TOLERANCES[path]
    elif path:
        split.LOW_SHARE, split.LEAST_TERMS, split.LEAST_DENSITY = THRESHOLDS[path]


def worst(
    kernel: str, dtype: str, trans: tuple[bool, bool], config: Any, shape: Any, factors: Any, pad: int
) -> float:
    """Compare one launch with NumPy. Returns the largest ratio of an error to its bound, which must be at
    most 1."""
    (m, n, k), (alpha, beta), rng = shape, factors, np.random.Generator(np.random.SFC64(1))
    out = np.dtype(out_dtype(kernel, dtype))
    a, b = (random(rng, *size, dtype) for size in ((m, k), (k, n)))
    if kernel.endswith("fp16x3"):  # units along k, which are made alike first
        units = np.ldexp(np.float32(1), rng.integers(-20, 21, k))
        a, b = (a * units).astype(dtype), (b / units[:, None]).astype(dtype)
    c = random(rng, m, n, "int8" if out.kind == "i" else out.name).astype(out)
    wide = np.result_type(a, np.int64 if out.kind == "i" else np.float64)
    product_, magnitude = a.astype(wide) @ b.astype(wide), abs(a).astype("f8") @ abs(b).astype("f8")
    want = alpha * product_ + (beta * c.astype(wide) if beta else 0)
    if beta == 0:
        c[:] = poison(out)
    prepared = KERNELS[kernel].launcher != "launch" and kernel != "dmma"
    unit = PITCH_BYTES // np.dtype(dtype).itemsize if prepared else 1

    def pitch(cols: int) -> int:
        return round_up(max(1, cols), unit) + pad * unit

    left, right = a.T.copy() if trans[0] else a, b.T.copy() if trans[1] else b
    da, db, dc = stored(left, pitch(left.shape[1])), stored(right, pitch(right.shape[1])), stored(c, n + pad)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    open_gemm(kernel, dtype, *trans, m, n, k, config)(alpha, da, db, beta, dc, stream)
    stream.synchronize()
    error = abs(dc.get() - want)
    if out.kind == "i":
        return 0.0 if not error.any() else np.inf
    bound = rounding(kernel, dtype, k) * (abs(alpha) * magnitude + abs(beta) + 1)
    return float((error / bound).max())  # NaN where the result is


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--one-shape", is_flag=True, help="Only the first shape, and the first of α and β.")
@click.argument("kernels", nargs=-1)
def main(one_shape: bool, kernels: tuple[str, ...]) -> None:
    """Check KERNELS, by default all, at ragged shapes. Exit status 1: a result is wrong."""
    cupy.cuda.set_allocator(None)  # one cudaMalloc a matrix: a pool would hide a step into a neighbour
    failed = ran = 0
    for name in kernels or KERNELS:
        kernel = KERNELS[name]
        for dtype, trans in product(kernel.dtypes, product((False, True), (False, True))):
            if any(trans) and not kernel.transposes:
                continue
            for config in kernel.configs(dtype, *trans):
                cases = product(
                    SHAPES[:1] if one_shape else SHAPES,
                    FACTORS[:1] if one_shape else FACTORS,
                    (0, 3),
                    paths(name, dtype),
                )
                for shape, factors, pad, path in cases:
                    take(path)
                    found = worst(name, dtype, trans, config, shape, factors, pad)
                    ran += 1
                    if not found <= 1:  # so that NaN fails
                        failed += 1
                        case = f"{shape} {factors} pad {pad} {path}"
                        print(f"FAIL {name} {dtype} {trans} {config} {case}: {found:.2g}")
        print(f"{name}: {ran} launches so far, {failed} failed", flush=True)
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
