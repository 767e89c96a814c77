"""The tensor cores as a warp uses them (dmma.cu, mma.cu) against NumPy; that they compile, without a GPU."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from precision import always
from products import as_product

from ooc_gemm.cuda_kernels import catalog
from ooc_gemm.cuda_kernels.config import Config
from ooc_gemm.cuda_kernels.tensor_tiles import folded_sums

TRANS = tuple(product((False, True), repeat=2))
TYPES = {
    # kernel: types of A and B, of C, of the oracle
    "dmma": (("float64", "float64"), "float64", np.float64),
    "mma-fp16x3": (("float32", "float32"), "float32", np.float64),
    "mma-fp16": (("float16", "float16"), "float32", np.float64),
    "mma-tf32": (("float32", "float32"), "float32", np.float64),
    "mma-int8": (("int8", "uint8"), "int32", np.int64),
}
EPS = {"dmma": 2.0**-49, "mma-fp16x3": 2.0**-21, "mma-fp16": 2.0**-19, "mma-tf32": 2.0**-10, "mma-int8": 0.0}
"""Largest error of a product of two elements, relative, with room for how they are added up."""
SHAPES = (
    (1, 1, 1), (2, 3, 17), (129, 193, 65), (128, 192, 64), (257, 385, 129), (300, 70, 1025), (1, 2000, 3),
    (2000, 1, 3), (130, 200, 0), (65, 66, 5000),
)  # fmt: skip
FACTORS = ((1, 0), (2, -3), (0, 2))


@pytest.fixture
def cupy() -> Any:
    """CuPy, on a machine with a GPU that has these instructions."""
    from conftest import gpu_missing

    if why := gpu_missing():
        pytest.skip(why)
    import cupy

    if int(cupy.cuda.Device().compute_capability) < 80:
        pytest.skip("these instructions exist from compute capability 8.0")
    return cupy


def _stored(cupy: Any, values: np.ndarray, dtype: str, pad: int | None) -> Any:
    """On the device, with poison past the ends of the rows, `pad` elements or up to 256 bytes, and below."""
    rows, cols = values.shape
    size = np.dtype(dtype).itemsize
    pitch = -(-max(1, cols * size) // 256) * 256 // size if pad is None else cols + pad
    full = np.full((rows + 1, pitch), 99 if dtype[-4:] == "int8" else np.nan, dtype)
    full[:-1, :cols] = values
    return cupy.asarray(full)


def _random(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    if dtype[-4:] == "int8":
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    return rng.standard_normal(shape).astype(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("trans_a", "trans_b"), TRANS)
@pytest.mark.parametrize("kernel", TYPES)
def test_agrees_with_numpy(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, kernel: str, trans_a: bool, trans_b: bool
) -> None:
    from ooc_gemm.cuda_kernels.mma import Mma

    always(monkeypatch, "split")
    types, out, wide = TYPES[kernel]
    rng, stream = np.random.default_rng(7), cupy.cuda.Stream(non_blocking=True)
    for config in (None, *Mma(kernel, trans_a, trans_b, *types).configs):
        gemm = Mma(kernel, trans_a, trans_b, *types, config)
        for i, ((m, n, k), (alpha, beta)) in enumerate(product(SHAPES, FACTORS)):
            a = _random(rng, (k, m) if trans_a else (m, k), types[0])
            b = _random(rng, (n, k) if trans_b else (k, n), types[1])
            c = _random(rng, (m, n + 3), "int8").astype(out)
            if beta == 0:
                c[:] = -(2**31) if out == "int32" else np.nan
            pads = [i % 3, (i + i // 3) % 3] if kernel == "dmma" else [None, None]
            da, db, dc = (
                _stored(cupy, a, types[0], pads[0]), _stored(cupy, b, types[1], pads[1]), cupy.asarray(c)
            )  # fmt: skip
            cupy.cuda.runtime.deviceSynchronize()
            left, right, target = ((x.data.ptr, x.shape[1]) for x in (da, db, dc))
            gemm(as_product(m, n, k, alpha, *left, *right, beta, *target), stream, "ab" if i % 2 else "")
            stream.synchronize()
            found = dc.get()
            x, y = (a.T if trans_a else a).astype(wide), (b.T if trans_b else b).astype(wide)
            old = c[:, :n].astype(wide) * beta if beta else np.zeros((m, n), wide)
            case = f"{config} m={m} n={n} k={k} α={alpha} β={beta}"
            assert kernel != "mma-fp16x3" or config is None or k * alpha == 0 or not gemm.fell_back(), case
            bound = 2 * EPS[kernel] * (abs(alpha) * (abs(x) @ abs(y)) + abs(old)) + (
                1e-30 if EPS[kernel] else 0
            )
            # Written so that NaN fails.
            assert (abs(found[:, :n] - (alpha * (x @ y) + old)) <= bound).all(), case
            assert np.array_equal(found[:, n:], c[:, n:], equal_nan=out != "int32"), f"padding of C, {case}"


@pytest.mark.gpu
def test_three_products_keep_nan_and_infinity_where_numpy_has_them(cupy: Any) -> None:
    from ooc_gemm.cuda_kernels.mma import Mma

    rng, (m, n, k) = np.random.default_rng(3), (200, 320, 192)
    a, b = rng.standard_normal((m, k)).astype("f4"), rng.standard_normal((k, n)).astype("f4")
    a[3, 4], b[7, 8], b[9, 10] = np.nan, np.inf, -np.inf
    da, db = (_stored(cupy, x, "float32", None) for x in (a, b))
    found = cupy.zeros((m, n), "f4")
    # Without a configuration the block would be too thin for a split.
    config = catalog.KERNELS["mma-fp16x3"].configs("float32", False, False)[0]
    gemm = Mma("mma-fp16x3", False, False, "float32", "float32", config)
    gemm(
        as_product(m, n, k, 1, da.data.ptr, da.shape[1], db.data.ptr, db.shape[1], 0, found.data.ptr, n),
        cupy.cuda.get_current_stream(),
        "ab",
    )
    assert gemm.fell_back()
    with np.errstate(invalid="ignore"):
        want = a.astype("f8") @ b.astype("f8")
    finite, got = np.isfinite(want), found.get()
    assert np.array_equal(np.isnan(want), np.isnan(got))
    assert np.array_equal(want[np.isinf(want)], got[np.isinf(want)])
    assert np.allclose(got[finite], want[finite], rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("config", folded_sums(), ids=lambda config: f"{config.bm}x{config.bn}")
def test_what_folded_sums_round_away_is_added_in_the_end(cupy: Any, config: Config) -> None:
    """And a sum that is infinite, or no number, is what NumPy makes of it."""
    from ooc_gemm.cuda_kernels.launch import load

    m, n, k = 130, 70, 64 * 40
    a = np.zeros((m, k))
    a[:, ::64] = 1 + np.arange(m)[:, None]
    a[:, 0], a[:, -64], a[:, -1] = 2.0**60, 0, -(2.0**60)
    a[1, 200], a[2, 300], a[3, 400] = np.inf, -np.inf, np.nan
    a[4, 100], a[4, 2000] = np.inf, -np.inf
    b = np.ones((n, k))
    da, db, dc, flag = cupy.asarray(a), cupy.asarray(b), cupy.zeros((m, n)), cupy.ones(1, "u4")
    args = (
        *map(np.int64, (m, n, k)), np.float64(1), np.uintp(da.data.ptr), np.int64(k), np.uintp(db.data.ptr),
        np.int64(k), np.float64(0), np.uintp(dc.data.ptr), np.int64(n), np.uintp(flag.data.ptr),
    )  # fmt: skip
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    load(config)["dmma"](config.grid(m, n), config.block, args, stream, config.shared_bytes)
    stream.synchronize()
    want = 38.0 * (1 + np.arange(m))
    want[1:5] = np.inf, -np.inf, np.nan, np.nan
    assert np.array_equal(dc.get(), np.repeat(want[:, None], n, 1), equal_nan=True)
