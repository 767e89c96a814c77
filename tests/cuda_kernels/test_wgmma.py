"""Hopper's tensor cores against NumPy; what can be checked of them without a GPU."""

import shutil
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from precision import always
from products import as_product

from ooc_gemm.cuda_kernels import catalog, tensor_tiles
from ooc_gemm.cuda_kernels.product import Stay, Strips, diagonal_strips

KINDS = {"fp16x3": "float32", "fp16": "float16", "tf32": "float32", "int8": "int8"}
EPS = {"fp16x3": 2.0**-22, "fp16": 2.0**-20, "tf32": 2.0**-10}
"""Largest relative error of a product of two elements, with room for how they are added up."""
SHAPES = (
    (1, 1, 1), (2, 3, 17), (129, 193, 65), (128, 192, 64), (257, 385, 129), (300, 70, 1023), (1, 2000, 3),
    (2000, 1, 3), (130, 200, 0), (513, 257, 64),
)  # fmt: skip
TILES = [(kind, i) for kind in KINDS for i in range(len(tensor_tiles.wgmma(kind, False, False)))]
PADS = 0, 3
"""Columns of C past its last: with either, some of SHAPES have rows that start at multiples of 16 bytes, of
which some end in between."""
TRANS = tuple(product((False, True), repeat=2))


@pytest.fixture
def cupy() -> Any:
    """CuPy, on a machine with a Hopper GPU."""
    from conftest import gpu_missing

    if why := gpu_missing():
        pytest.skip(why)
    import cupy

    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("wgmma exists on compute capability 9.0 only")
    return cupy


def _stored(cupy: Any, values: np.ndarray, dtype: str) -> Any:
    """On the device, in rows of a multiple of 256 bytes, poison past their ends and below the last."""
    size = np.dtype(dtype).itemsize
    pitch = -(-max(1, values.shape[1] * size) // 256) * 256 // size
    full = np.full((values.shape[0] + 1, pitch), 99 if dtype == "int8" else np.nan, dtype)
    full[:-1, : values.shape[1]] = values
    return cupy.asarray(full)


def _random(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    if dtype == "int8":
        return rng.integers(-128, 128, shape, "int8")
    return rng.standard_normal(shape).astype(dtype)


@pytest.mark.gpu
def test_a_panel_that_is_split_is_not_looked_at_again(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as the host has learned of it. Another panel in its buffer is looked at."""
    from ooc_gemm.cuda_kernels import driver
    from ooc_gemm.cuda_kernels.wgmma import Wgmma

    launched, launch = list[str](), driver.Kernel.__call__

    def noting(self: Any, *args: Any) -> None:
        launched.append(self._name)
        launch(self, *args)

    monkeypatch.setattr(driver.Kernel, "__call__", noting)
    m, n, k = 384, 512, 640
    rng, stream = np.random.default_rng(5), cupy.cuda.Stream(non_blocking=True)
    gemm = Wgmma("fp16x3", False, False, "float32", "float32")
    gemm.reserve(m, n, k, "ab", (1, 2))
    b = _random(rng, (k, n), "float32")
    right, c = _stored(cupy, b, "float32"), cupy.zeros((m, n), "float32")
    for first, sweeps in ((0, 2), (0, 0), (m, 1), (m, 0)):
        if sweeps:
            a = _random(rng, (m, k), "float32")
            left = _stored(cupy, a, "float32")
        cupy.cuda.runtime.deviceSynchronize()
        launched.clear()
        operands = ((x.data.ptr, x.shape[1]) for x in (left, right, c))
        (a_ptr, lda), (b_ptr, ldb), (c_ptr, ldc) = operands
        product = as_product(m, n, k, 1, a_ptr, lda, b_ptr, ldb, 0, c_ptr, ldc)
        gemm(replace(product, stay=(Stay(0, first), Stay(1, 0))), stream)
        stream.synchronize()
        assert (
            launched.count("survey")
            == launched.count("row_lines") + launched.count("column_counts")
            == sweeps
        )
        assert np.allclose(c.get(), a @ b, rtol=0, atol=1e-3)
    assert gemm.lost.tolist() == [0]


@pytest.mark.gpu
@pytest.mark.parametrize(("trans_a", "trans_b"), TRANS)
@pytest.mark.parametrize(("kind", "tile"), TILES)
def test_agrees_with_numpy(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, kind: str, trans_a: bool, trans_b: bool, tile: int
) -> None:
    from ooc_gemm.cuda_kernels.wgmma import Wgmma

    always(monkeypatch, "split")
    dtype = KINDS[kind]
    out = "int32" if kind == "int8" else "float32"
    wide = "int64" if kind == "int8" else "float64"
    config = catalog.KERNELS[kind].configs(dtype, trans_a, trans_b)[tile]
    gemm = Wgmma(kind, trans_a, trans_b, dtype, dtype, config)
    rng = np.random.default_rng(7)
    stream = cupy.cuda.Stream(non_blocking=True)
    cases = product(SHAPES, ((1, 0), (2, -3), (0, 2)), ("", "ab"), PADS)
    for (m, n, k), (alpha, beta), in_place, pad in cases:
        a = _random(rng, (k, m) if trans_a else (m, k), dtype)
        b = _random(rng, (n, k) if trans_b else (k, n), dtype)
        c = _random(rng, (m, n + pad), "int8").astype(out)
        if beta == 0:
            c[:] = -(2**31) if kind == "int8" else np.nan
        da, db, dc = _stored(cupy, a, dtype), _stored(cupy, b, dtype), cupy.asarray(c)
        cupy.cuda.runtime.deviceSynchronize()
        left, right, target = ((x.data.ptr, x.shape[1]) for x in (da, db, dc))
        gemm(as_product(m, n, k, alpha, *left, *right, beta, *target), stream, in_place)
        stream.synchronize()
        found = dc.get()
        x, y = (a.T if trans_a else a).astype(wide), (b.T if trans_b else b).astype(wide)
        old = c[:, :n].astype(wide) * beta if beta else 0
        case = f"m={m} n={n} k={k} α={alpha} β={beta} in place={in_place} pad={pad}"
        assert kind != "fp16x3" or k * alpha == 0 or not gemm.fell_back(), case
        if kind == "int8":
            assert np.array_equal(found[:, :n], alpha * (x @ y) + old), case
        else:
            bound = EPS[kind] * (abs(alpha) * (abs(x) @ abs(y)) + np.abs(old)) + 1e-30
            assert (abs(found[:, :n] - (alpha * (x @ y) + old)) <= 2 * bound).all(), case
        assert np.array_equal(found[:, n:], c[:, n:], equal_nan=kind != "int8"), f"padding of C, {case}"


DEEP = (65, 66, 12_000)
"""Too few tiles to go round, and deep: k is cut in slices whatever the tile, which none of SHAPES is."""


@pytest.mark.parametrize(("kind", "tile"), TILES)
def test_the_deep_shape_is_cut_in_slices(kind: str, tile: int) -> None:
    config = tensor_tiles.wgmma(kind, False, False)[tile]
    assert tensor_tiles.choose_wgmma([config], *DEEP, 132)[1] > 1
    assert all(tensor_tiles.choose_wgmma([config], *shape, 132)[1] == 1 for shape in SHAPES)


@pytest.mark.gpu
@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize(("kind", "tile"), TILES)
def test_slices_of_k_are_added_up(cupy: Any, kind: str, trans: bool, tile: int) -> None:
    from ooc_gemm.cuda_kernels.wgmma import Wgmma

    dtype, (m, n, k) = KINDS[kind], DEEP
    out, wide = ("int32", "int64") if kind == "int8" else ("float32", "float64")
    config = catalog.KERNELS[kind].configs(dtype, trans, trans)[tile]
    gemm = Wgmma(kind, trans, trans, dtype, dtype, config)
    assert gemm.choose(m, n, k)[1] > 1
    rng, stream = np.random.default_rng(7), cupy.cuda.Stream(non_blocking=True)
    a, b = _random(rng, (k, m) if trans else (m, k), dtype), _random(rng, (n, k) if trans else (k, n), dtype)
    x, y = (a.T if trans else a).astype(wide), (b.T if trans else b).astype(wide)
    for alpha, beta in ((1, 0), (2, -3)):
        c = _random(rng, (m, n + 3), "int8").astype(out)
        if beta == 0:
            c[:] = -(2**31) if kind == "int8" else np.nan
        da, db, dc = _stored(cupy, a, dtype), _stored(cupy, b, dtype), cupy.asarray(c)
        cupy.cuda.runtime.deviceSynchronize()
        left, right, target = ((z.data.ptr, z.shape[1]) for z in (da, db, dc))
        gemm(as_product(m, n, k, alpha, *left, *right, beta, *target), stream)
        stream.synchronize()
        found, old = dc.get(), c[:, :n].astype(wide) * beta if beta else 0
        want, bound = alpha * (x @ y) + old, 0
        if kind != "int8":
            bound = 2 * EPS[kind] * (abs(alpha) * (abs(x) @ abs(y)) + np.abs(old))
        assert (abs(found[:, :n] - want) <= bound).all(), f"{alpha} {beta}"
        assert np.array_equal(found[:, n:], c[:, n:], equal_nan=kind != "int8")


Pair = tuple[np.ndarray, np.ndarray]


def _pair(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    return rng.standard_normal((m, k)), rng.standard_normal((k, n))


def _in_units(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    """Columns of A in units that B's rows have the inverse of: metres beside pascals."""
    (a, b), units = _pair(rng, m, k, n), 2.0 ** rng.integers(-20, 21, k)
    return a * units, b / units[:, None]


def _one_column(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    a, b = _pair(rng, m, k, n)
    a[:, 7] *= 2.0**24
    b[7] *= 2.0**-24
    return a, b


def _meets_zeros(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    a, b = _pair(rng, m, k, n)
    a[:, 7] *= 1e7
    b[7] = 0
    return a, b


def _rows_of_all_magnitudes(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    a, b = _pair(rng, m, k, n)
    return a * 2.0 ** rng.integers(-50, 51, (m, 1)), b * 2.0 ** rng.integers(-50, 51, (1, n))


def _one_huge_element_a_row(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    a, b = _pair(rng, m, k, n)
    a[np.arange(m), rng.integers(0, k, m)] = 1e9
    return a, b


INPUTS = {
    "N(0,1)": (_pair, "split"),
    "U(0,1)": (lambda rng, m, k, n: (rng.random((m, k)), rng.random((k, n))), "split"),
    "columns in different units": (_in_units, "split"),
    "one column and its row": (_one_column, "split"),
    "a large column meets zeros": (_meets_zeros, "split"),
    "rows of all magnitudes": (_rows_of_all_magnitudes, "split"),
    "exponents ±40": (
        lambda rng, m, k, n: tuple(x * 2.0 ** rng.integers(-40, 41, x.shape) for x in _pair(rng, m, k, n)),
        "fallback",
    ),
    "one huge element a row": (_one_huge_element_a_row, "fallback"),
    "lognormal, sigma 4": (
        lambda rng, m, k, n: tuple(np.exp(4 * x) for x in _pair(rng, m, k, n)), "fallback"
    ),
}  # fmt: skip
"""How A and B are made, and the path that fp16x3 takes for them."""


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1024, 8192])
@pytest.mark.parametrize("kernel", ["fp16x3", "mma-fp16x3"])
@pytest.mark.parametrize("name", INPUTS)
def test_fp16x3_is_no_less_accurate_than_sgemm(cupy: Any, name: str, kernel: str, k: int) -> None:
    """benchmarks/accuracy.py has many more."""
    from ooc_gemm.cuda_kernels.mma import Mma
    from ooc_gemm.cuda_kernels.wgmma import Wgmma

    rng, (m, n) = np.random.default_rng(3), (2048, 2304)
    draw, path = INPUTS[name]
    a, b = (x.astype("f4") for x in draw(rng, m, k, n))
    da, db, found = cupy.asarray(a), cupy.asarray(b), cupy.full((m, n), np.nan, "f4")
    want, size = da.astype("f8") @ db.astype("f8"), abs(da).astype("f8") @ abs(db).astype("f8")
    sgemm = da @ db
    gemm = (Wgmma if kernel == "fp16x3" else Mma)(kernel, False, False, "float32", "float32")
    gemm(
        as_product(m, n, k, 1, da.data.ptr, k, db.data.ptr, n, 0, found.data.ptr, n),
        cupy.cuda.get_current_stream(),
    )

    def errors(x: Any) -> tuple[float, float]:
        difference = abs(x - want)
        return float(cupy.linalg.norm(difference) / cupy.linalg.norm(want)), float((difference / size).max())

    (norm, largest), (their_norm, their_largest) = errors(found), errors(sgemm)
    print(f"{name}, k = {k}: {norm:.3e} and {largest:.3e}, SGEMM {their_norm:.3e} and {their_largest:.3e}")
    assert gemm.fell_back() == (path == "fallback")
    assert norm <= their_norm
    assert largest <= 1.5 * their_largest


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["fp16x3", "mma-fp16x3"])
def test_integers_are_exact_where_float32_is(cupy: Any, kernel: str) -> None:
    from ooc_gemm.cuda_kernels.mma import Mma
    from ooc_gemm.cuda_kernels.wgmma import Wgmma

    rng, (m, n, k) = np.random.default_rng(3), (2048, 2304, 4096)
    a, b = (rng.integers(-60, 61, shape).astype("f4") for shape in ((m, k), (k, n)))
    da, db, found = cupy.asarray(a), cupy.asarray(b), cupy.full((m, n), np.nan, "f4")
    gemm = (Wgmma if kernel == "fp16x3" else Mma)(kernel, False, False, "float32", "float32")
    gemm(
        as_product(m, n, k, 1, da.data.ptr, k, db.data.ptr, n, 0, found.data.ptr, n),
        cupy.cuda.get_current_stream(),
    )
    assert not gemm.fell_back()
    assert bool((found == da.astype("f8") @ db.astype("f8")).all())


@pytest.mark.gpu
@pytest.mark.parametrize(("trans_a", "trans_b"), TRANS)
def test_the_fallback_rounds_once(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, trans_a: bool, trans_b: bool
) -> None:
    """At ragged shapes, and with every layout of C."""
    from ooc_gemm.cuda_kernels.wgmma import Wgmma

    always(monkeypatch, "fallback")
    config = catalog.KERNELS["fp16x3"].configs("float32", trans_a, trans_b)[
        0
    ]  # or it would not be split at all
    gemm = Wgmma("fp16x3", trans_a, trans_b, "float32", "float32", config)
    rng, stream = np.random.default_rng(7), cupy.cuda.Stream(non_blocking=True)
    for (m, n, k), (alpha, beta), pad in product(SHAPES, ((1, 0), (2, -3), (0, 2)), PADS):
        a = _random(rng, (k, m) if trans_a else (m, k), "float32")
        b = _random(rng, (n, k) if trans_b else (k, n), "float32")
        c = _random(rng, (m, n + pad), "float32")
        if beta == 0:
            c[:] = np.nan
        da, db, dc = _stored(cupy, a, "float32"), _stored(cupy, b, "float32"), cupy.asarray(c)
        cupy.cuda.runtime.deviceSynchronize()
        left, right, target = ((x.data.ptr, x.shape[1]) for x in (da, db, dc))
        gemm(as_product(m, n, k, alpha, *left, *right, beta, *target), stream, "ab")
        stream.synchronize()
        case = f"m={m} n={n} k={k} α={alpha} β={beta} pad={pad}"
        assert k * alpha == 0 or gemm.fell_back(), case
        x, y = (a.T if trans_a else a).astype("f8"), (b.T if trans_b else b).astype("f8")
        want = alpha * (x @ y) + (c[:, :n].astype("f8") * beta if beta else 0)
        bound = 2.0**-24 * abs(want) + 2.0**-50 * (abs(alpha) * (abs(x) @ abs(y)) + abs(want))
        found = dc.get()
        assert (abs(found[:, :n] - want) <= bound).all(), case
        assert np.array_equal(found[:, n:], c[:, n:], equal_nan=True), f"padding of C, {case}"


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "above"), [(1025, 0), (2500, 0), (4097, 0), (1100, 3000), (2050, 257)])
@pytest.mark.parametrize(("kind", "tile"), TILES)
def test_a_symmetric_product_is_made_in_one_launch(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, kind: str, tile: int, m: int, above: int
) -> None:
    """Also its last rows alone. Tiles far above the diagonal are left out."""
    from ooc_gemm.cuda_kernels.wgmma import Wgmma

    always(monkeypatch, "split")
    n, k, dtype, stream = above + m, 200, KINDS[kind], cupy.cuda.Stream(non_blocking=True)
    out, wide = ("int32", "int64") if kind == "int8" else ("float32", "float64")
    config = catalog.KERNELS[kind].configs(dtype, False, True)[tile]
    gemm = Wgmma(kind, False, True, dtype, dtype, config)
    monkeypatch.setattr(gemm, "_multiply", None)  # strips are not multiplied one by one
    x = _random(np.random.default_rng(1), (n, k), dtype)
    dx, dc = _stored(cupy, x, dtype), cupy.full((m, n), 77, out)
    cupy.cuda.runtime.deviceSynchronize()
    ld = dx.shape[1]
    product = as_product(m, n, k, 2, dx[above:].data.ptr, ld, dx.data.ptr, ld, 0, dc.data.ptr, n)
    gemm(product, stream, strips=Strips(lower=True, above=above))
    stream.synchronize()
    found, wide_x = dc.get(), x.astype(wide)
    want, counts = 2 * (wide_x[above:] @ wide_x.T), np.tri(m, n, above, dtype=bool)
    bound = 0 if kind == "int8" else 4 * EPS[kind] * (abs(wide_x[above:]) @ abs(wide_x.T)) + 1e-30
    assert ((abs(found - want) <= bound) | ~counts).all()
    assert kind != "fp16x3" or not gemm.fell_back()
    least = 2 * config.bm * 4  # groups of rows of tiles are no higher
    far = ~np.tri(m, n, above + least + config.bn, dtype=bool)
    assert (found[far] == 77).all()


TILE_ORDER = """
#define __device__
#define __forceinline__ inline
#include "common/tile_order.cuh"
#include <cstdio>
#include <cstdlib>
int main(int count, char** words) {
    int x[6];
    for (int i = 0; i < 6; ++i) x[i] = atoi(words[i + 1]);
    const LowerTiles<4> tiles{x[0], x[1], x[2], x[3], x[4], x[5]};
    for (int t = 0; t < tiles.count(); ++t) printf("%d %d\\n", tiles.place(t).row, tiles.place(t).col);
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_tiles_of_a_symmetric_matrix(tmp_path: Path) -> None:
    """Each that reaches the diagonal is made once; of the others, those in the same four rows of tiles."""
    (tmp_path / "order.cc").write_text(TILE_ORDER)
    made = tmp_path / "order"
    folder = Path(__file__).resolve().parents[2] / "kernels"
    subprocess.run(["g++", "-w", f"-I{folder}", tmp_path / "order.cc", "-o", made], check=True)
    for m, above, high, wide, per_row in (
        (1, 0, 256, 256, 1), (1025, 0, 256, 256, 1), (2500, 0, 256, 192, 2), (700, 3000, 128, 64, 1),
        (4096, 4096, 256, 256, 1), (900, 1, 64, 64, 1), (3000, 0, 64, 256, 2),
    ):  # fmt: skip
        n = per_row * (above + m)
        down, across = -(-m // high), -(-n // wide)
        args = down, across, high, wide, above, per_row
        out = subprocess.run([made, *map(str, args)], capture_output=True, text=True, check=True).stdout
        found = [tuple(map(int, line.split())) for line in out.splitlines()]
        assert len(set(found)) == len(found)
        needed = {
            (i, j)
            for i, j in product(range(down), range(across))
            if wide * j < per_row * (above + min(m, (i + 1) * high))
        }
        allowed = {
            (i, j)
            for i, j in product(range(down), range(across))
            if wide * j < per_row * (above + high * min(down, i // 4 * 4 + 4))
        }
        assert needed <= set(found) <= allowed


@pytest.mark.gpu
def test_an_operand_and_its_transpose_are_prepared_once(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `gram` multiplies: of C only strips up to the diagonal."""
    from ooc_gemm.cuda_kernels.wgmma import Wgmma

    rng, (m, k), stream = np.random.default_rng(3), (2048, 1500), cupy.cuda.get_current_stream()
    a = (rng.standard_normal((m, k)) * 2.0 ** rng.integers(-20, 21, (m, 1))).astype("f4")
    da, found = _stored(cupy, a, "float32"), cupy.zeros((m, m), "f4")
    gemm = Wgmma("fp16x3", False, True, "float32", "float32")
    at = da.data.ptr, da.shape[1]
    gemm(as_product(m, m, k, 1, *at, *at, 0, found.data.ptr, m), stream, strips=Strips(lower=True))
    assert not gemm.fell_back()
    x = a.astype("f8")
    # Twice the usual bound: on the diagonal all terms are positive, and truncation makes each sum smaller.
    wrong = np.tril(abs(found.get() - x @ x.T)) > 4 * EPS["fp16x3"] * (abs(x) @ abs(x.T))
    assert not wrong.any()


@pytest.mark.gpu
@pytest.mark.parametrize("trans_b", [False, True])
def test_fp16x3_keeps_nan_and_infinity_where_numpy_has_them(cupy: Any, trans_b: bool) -> None:
    from ooc_gemm.cuda_kernels.wgmma import Wgmma

    rng, (m, n, k) = np.random.default_rng(3), (200, 320, 192)
    a, b = rng.standard_normal((m, k)).astype("f4"), rng.standard_normal((k, n)).astype("f4")
    a[3, 4], b[7, 8], b[9, 10] = np.nan, np.inf, -np.inf
    da, db = _stored(cupy, a, "float32"), _stored(cupy, b.T if trans_b else b, "float32")
    found = cupy.zeros((m, n), "f4")
    config = catalog.KERNELS["fp16x3"].configs("float32", False, trans_b)[
        0
    ]  # or it would not be split at all
    gemm = Wgmma("fp16x3", False, trans_b, "float32", "float32", config)
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
@pytest.mark.parametrize(
    ("m", "n", "k"), [(64, 2000, 700), (2000, 64, 700), (900, 1000, 64), (1500, 1400, 300)]
)
def test_fp16x3_at_any_shape(cupy: Any, m: int, n: int, k: int) -> None:
    """By split, or by the fallback where that would not pay."""
    from ooc_gemm.cuda_kernels.wgmma import Wgmma

    rng, stream = np.random.default_rng(4), cupy.cuda.get_current_stream()
    a, b = rng.standard_normal((m, k)).astype("f4"), rng.standard_normal((k, n)).astype("f4")
    da, db, found = _stored(cupy, a, "float32"), _stored(cupy, b, "float32"), cupy.full((m, n), np.nan, "f4")
    gemm = Wgmma("fp16x3", False, False, "float32", "float32")
    gemm(
        as_product(m, n, k, 1, da.data.ptr, da.shape[1], db.data.ptr, db.shape[1], 0, found.data.ptr, n),
        stream,
    )
    want = a.astype("f8") @ b.astype("f8")
    assert (abs(found.get() - want) <= 2 * EPS["fp16x3"] * (abs(a).astype("f8") @ abs(b))).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("trans_a", "trans_b"), TRANS)
def test_tf32_at_any_shape(cupy: Any, trans_a: bool, trans_b: bool) -> None:
    """Also where the kernel without transposition is chosen."""
    from ooc_gemm.cuda_kernels.wgmma import Wgmma

    rng, stream = np.random.default_rng(4), cupy.cuda.get_current_stream()
    gemm = Wgmma("tf32", trans_a, trans_b, "float32", "float32")
    for m, n, k in ((64, 2001, 703), (2001, 66, 703), (63, 65, 5000), (900, 1000, 64)):
        a = _random(rng, (k, m) if trans_a else (m, k), "float32")
        b = _random(rng, (n, k) if trans_b else (k, n), "float32")
        da, db, found = (
            _stored(cupy, a, "float32"),
            _stored(cupy, b, "float32"),
            cupy.full((m, n), np.nan, "f4"),
        )
        gemm(
            as_product(m, n, k, 1, da.data.ptr, da.shape[1], db.data.ptr, db.shape[1], 0, found.data.ptr, n),
            stream,
        )
        x, y = (a.T if trans_a else a).astype("f8"), (b.T if trans_b else b).astype("f8")
        assert (abs(found.get() - x @ y) <= 2 * EPS["tf32"] * (abs(x) @ abs(y))).all(), (m, n, k)
    turned_b = not trans_b
    assert gemm.choose(64, 8192, 8192)[0].kernel == ("mma" if turned_b else "wgmma")
    assert gemm.choose(8192, 8192, 8192)[0].kernel == "wgmma"


def test_few_rows_leave_b_as_it_lies() -> None:
    from ooc_gemm.cuda_kernels.complex_gemm import few_rows

    assert few_rows(64, 8192, 8192)
    assert few_rows(1, 3000, 40)
    assert not few_rows(8192, 8192, 8192)
    assert not few_rows(131072, 64, 4096)
    assert not few_rows(8192, 8192, 64)
    assert not few_rows(64, 8192, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("conjugate", TRANS)
@pytest.mark.parametrize(("trans_a", "trans_b"), TRANS)
@pytest.mark.parametrize("chosen", [False, True])
def test_complex_agrees_with_numpy(
    cupy: Any,
    monkeypatch: pytest.MonkeyPatch,
    trans_a: bool,
    trans_b: bool,
    conjugate: tuple[bool, bool],
    chosen: bool,
) -> None:
    from ooc_gemm.cuda_kernels.complex_gemm import ComplexGemm

    if not chosen:
        always(monkeypatch, "split")
    rng, stream = np.random.default_rng(9), cupy.cuda.Stream(non_blocking=True)
    config = None if chosen else catalog.KERNELS["fp16x3"].configs("float32", trans_a, trans_b)[0]
    gemm = ComplexGemm(trans_a, trans_b, *conjugate, config)

    def draw(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype("c8")

    shapes = (*SHAPES, (5, 1001, 130), (66, 700, 900)) if chosen else SHAPES
    for (m, n, k), (alpha, beta) in product(shapes, ((1, 0), (2 - 1j, -3j), (1j, 2))):
        a, b = draw(*((k, m) if trans_a else (m, k))), draw(*((n, k) if trans_b else (k, n)))
        c = draw(m, n + 3)
        if beta == 0:
            c[:] = np.nan
        da, db, dc = _stored(cupy, a, "complex64"), _stored(cupy, b, "complex64"), cupy.asarray(c)
        cupy.cuda.runtime.deviceSynchronize()
        left, right, target = ((x.data.ptr, x.shape[1]) for x in (da, db, dc))
        gemm(as_product(m, n, k, alpha, *left, *right, beta, *target), stream, "a")
        stream.synchronize()
        found, wide = dc.get(), (a.T if trans_a else a, b.T if trans_b else b)
        x, y = (
            z.conj().astype("c16") if flag else z.astype("c16")
            for z, flag in zip(wide, conjugate, strict=True)
        )
        old = c[:, :n].astype("c16") * beta if beta else 0
        bound = 2 * EPS["fp16x3"] * (abs(alpha) * (abs(x) @ abs(y)) + np.abs(old)) + 1e-30
        assert (abs(found[:, :n] - (alpha * (x @ y) + old)) <= bound).all(), f"{m}x{n}x{k} {alpha} {beta}"
        assert np.array_equal(found[:, n:], c[:, n:], equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("m", [7, 300])
def test_complex_keeps_nan_and_infinity_where_the_formula_has_them(cupy: Any, m: int, trans_b: bool) -> None:
    """With few rows, and by B embedded."""
    from ooc_gemm.cuda_kernels.complex_gemm import ComplexGemm, few_rows

    rng, stream, (n, k) = np.random.default_rng(3), cupy.cuda.get_current_stream(), (320, 192)
    assert few_rows(m, n, k) == (m == 7)
    # B is embedded with a configuration that is given; else so small a product would not be split either.
    config = None if m == 7 else catalog.KERNELS["fp16x3"].configs("float32", False, trans_b)[0]
    a, b = (
        (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype("c8")
        for shape in ((m, k), (k, n))
    )
    a[3, 4], b[7, 8], b[9, 10] = complex(np.nan, 1), complex(1, np.inf), -np.inf
    da, db = _stored(cupy, a, "complex64"), _stored(cupy, b.T if trans_b else b, "complex64")
    found = cupy.zeros((m, n), "c8")
    gemm = ComplexGemm(False, trans_b, config=config)
    gemm(
        as_product(m, n, k, 1, da.data.ptr, da.shape[1], db.data.ptr, db.shape[1], 0, found.data.ptr, n),
        stream,
    )
    x, y, got = a.astype("c16"), b.astype("c16"), found.get()
    with np.errstate(invalid="ignore"):
        parts = (x.real @ y.real - x.imag @ y.imag, got.real), (x.real @ y.imag + x.imag @ y.real, got.imag)
    for want, part in parts:
        finite = np.isfinite(want)
        assert np.array_equal(np.isnan(want), np.isnan(part))
        assert np.array_equal(want[np.isinf(want)], part[np.isinf(want)])
        assert np.allclose(part[finite], want[finite], rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize(("alpha", "beta"), [(1e30, 0), (1e30 - 2e30j, 1), (1e-30j, 0.5 - 1j), (1e-30, 2)])
@pytest.mark.parametrize("chosen", [False, True])
def test_complex_alpha_and_beta_come_last(
    cupy: Any, chosen: bool, alpha: complex, beta: complex, lower: bool
) -> None:
    """α·A and α·B alone would overflow, or lose digits; also where C is made in strips, or of a symmetric one
    only what lies on and below the diagonal."""
    from ooc_gemm.cuda_kernels.complex_gemm import ComplexGemm

    rng, stream, (m, k) = np.random.default_rng(3), cupy.cuda.Stream(non_blocking=True), (2500, 300)
    n = m if lower else 1400
    config = None if chosen else catalog.KERNELS["fp16x3"].configs("float32", False, True)[0]
    gemm, size = ComplexGemm(False, True, config=config), float(abs(alpha) ** -0.5)

    def draw(rows: int, cols: int) -> np.ndarray:
        return rng.standard_normal((rows, cols)) + 1j * rng.standard_normal((rows, cols))

    a = (draw(m, k) * size).astype("c8")
    b = a if lower else (draw(n, k) * size).astype("c8")
    c = draw(m, n).astype("c8")
    da, dc = _stored(cupy, a, "complex64"), cupy.asarray(c)
    db = da if lower else _stored(cupy, b, "complex64")
    cupy.cuda.runtime.deviceSynchronize()
    rows = [(0, 1024), (1024, 2048), (2048, 2500)]
    stops: list[int] = []
    left, right = ((x.data.ptr, x.shape[1]) for x in (da, db))
    strips = Strips(() if lower else rows, lower, stops.append)
    gemm(as_product(m, n, k, alpha, *left, *right, beta, dc.data.ptr, n), stream, strips=strips)
    stream.synchronize()
    made = list(diagonal_strips(m)) if lower else rows
    assert stops == [stop for _, stop in made]
    want = alpha * (a.astype("c16") @ b.T.astype("c16")) + (beta * c.astype("c16") if beta else 0)
    found = dc.get()
    for start, stop in made:
        part = np.s_[start:stop, : stop if lower else n]
        apart = found[part] - want[part]
        apart = np.tril(apart, start) if lower else apart
        assert np.linalg.norm(apart) <= 1e-6 * np.linalg.norm(want[part])
