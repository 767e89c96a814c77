"""Products of operands that are centred, scaled, weighted and have missing elements, on GPUs and on several
devices, against NumPy in float64. Without a GPU, cupy_on_cpu.py stands in for CuPy and the driver."""

import cupy_on_cpu
import numpy as np
import pytest
from arrays import assert_close, matrix
from conftest import gpu_missing, make
from faults import with_blocks

import ooc_gemm
from ooc_gemm import Operand
from ooc_gemm.cuda_kernels import complex_gemm, split, tensor  # noqa: F401 (replaced in part)
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.devices.cuda import check, transforms  # noqa: F401
from ooc_gemm.devices.cuda.device import CUDA
from ooc_gemm.devices.several import Several


class Apart(CPU):
    """Nobody reaches its memory."""

    def reaches(self, other):
        return False


DEVICES = {
    "stand-in": CUDA,
    "several": lambda: Several([CPU(1), CPU(1), CPU(1)], [2, 1, 3]),
    "apart": lambda: Several([Apart(1), Apart(1)]),
    "cuda": CUDA,
}


@pytest.fixture(params=["stand-in", "several", "apart", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    if request.param == "cuda" and (why := gpu_missing()):
        pytest.skip(why)
    if request.param == "stand-in":
        cupy_on_cpu.install(monkeypatch)
    return DEVICES[request.param]()


@pytest.fixture
def blocks(monkeypatch):
    """Several blocks and panels, with edges that are not those of chunks."""
    monkeypatch.setattr("ooc_gemm.run.prepare.make_plan", with_blocks(96, 64, 48))


def changed(x, missing=None, shift=0.0, scale=1.0):
    """(x − shift)·scale, and 0 where x is missing."""
    gone = np.isnan(x) if missing is not None and np.isnan(missing) else x == missing
    with np.errstate(invalid="ignore"):
        return np.where(gone if missing is not None else False, 0.0, (x.astype("f8") - shift) * scale)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("transpose", ["", "a", "b", "ab"])
@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "i8", "f2", "f4", "f8"])
def test_products_of_every_type(device, tmp_path, dtype, transpose):
    rng = np.random.default_rng(3)
    x, y = matrix((230, 190), dtype, 1), matrix((190, 170), dtype, 2)
    missing = 7.0 if x.dtype.kind in "iu" else np.nan
    x[::3, ::5] = y[::7, ::2] = missing
    rows, cols, k = rng.standard_normal(230), 1 + rng.random(170), rng.standard_normal(190)
    a, b = x.T.copy() if "a" in transpose else x, y.T.copy() if "b" in transpose else y
    a, b = (make(tmp_path / name, v, chunks=(32, 48)) for name, v in (("a", a), ("b", b)))
    found = ooc_gemm.multiply(
        Operand(
            a,
            "a" in transpose,
            center=("columns" if "a" in transpose else "rows", rows),
            weights=k,
            missing=missing,
        ),
        Operand(
            b, "b" in transpose, scale=("rows" if "b" in transpose else "columns", cols), missing=missing
        ),
        device=device,
        chunks=(32, 32),
        verify=True,
    )
    wanted = changed(x, missing, rows[:, None], k) @ changed(y, missing, 0.0, 1 / cols)
    assert_close(found.array.astype("f8"), wanted, 2e-6)
    assert found.verified
    assert found.array.dtype == ("f8" if dtype in ("i4", "i8", "f8") else "f4")
    if found.plan.device_ledger:
        size = found.array.dtype.itemsize
        assert found.plan.device_ledger["transforms"] == size * (2 * 230 + 190 + 170)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_a_symmetric_product(device, monkeypatch, axis, transpose):
    """With a mean that is large beside deviations, found by a pass over the array."""
    monkeypatch.setattr("ooc_gemm.run.prepare.make_plan", with_blocks(96, 96, 48))
    x = matrix((200, 170), "f4", 4) + np.float32(1000)
    x[5, 7] = x[100, 60] = np.nan
    asked = Operand(x, center=axis, scale=axis, missing=np.nan)
    found = ooc_gemm.gram(asked, device=device, transpose=transpose, chunks=(32, 32), verify=True)
    k, wide = (0 if axis == "columns" else 1), x.astype("f8")
    wide = (wide - np.nanmean(wide, k, keepdims=True)) / np.nanstd(wide, k, keepdims=True)
    wide[np.isnan(wide)] = 0
    assert found.plan.problem.symmetric
    assert_close(found.array.astype("f8"), wide.T @ wide if transpose else wide @ wide.T, 2e-6)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("gone", [np.inf, -np.inf, np.nan, 1e30])
def test_values_that_are_no_numbers(device, gone):
    """Those that are not missing reach C, as NumPy has it."""
    x, y = matrix((130, 100), "f4", 5), np.abs(matrix((100, 120), "f4", 6)) + 1
    x[3, 4], x[50, 60], x[99, 1] = np.inf, np.nan, -np.inf
    x[::4, ::9] = gone
    asked = Operand(x, center=("columns", np.arange(100.0)), missing=gone)
    found = ooc_gemm.multiply(asked, y, device=device, chunks=(32, 32)).array
    with np.errstate(invalid="ignore"):
        wanted = changed(x, gone, np.arange(100.0)) @ y.astype("f8")
    finite = np.isfinite(wanted)
    assert np.array_equal(found[~finite], wanted[~finite].astype("f4"), equal_nan=True)
    assert finite.any()
    assert np.abs(found[finite] - wanted[finite]).max() < 2e-6 * np.abs(wanted[finite]).max()


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("other", ["c8", "c16"])
def test_beside_a_complex_operand(device, other):
    x, y = matrix((130, 100), "i1", 7), matrix((100, 120), other, 8)
    asked = Operand(x, center=("rows", np.arange(130.0)), missing=-3)
    found = ooc_gemm.multiply(asked, y, device=device, chunks=(32, 32)).array
    wanted = changed(x, -3, np.arange(130.0)[:, None]) @ y.astype("c16")
    assert_close(found.astype("c16"), wanted, 2e-6)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("kernel", ["cublas", "ffma", "tiled", "mma-fp16x3", "mma-tf32", "fp16x3", "tf32"])
@pytest.mark.parametrize("transpose", ["", "ab"])
def test_every_kernel_for_float32(request, device, kernel, transpose):
    """Some take panels that are transposed against what is stored."""
    if not isinstance(device, CUDA):
        pytest.skip("kernels of GPUs")
    if kernel in ("fp16x3", "tf32") and (device.capability != 90 or "stand-in" in request.node.name):
        pytest.skip("needs Hopper's instructions")
    x, y = matrix((230, 190), "i1", 9), matrix((190, 170), "f4", 10)
    rows, cols = np.linspace(-5, 5, 230), np.linspace(1, 2, 170)
    turned = bool(transpose)
    found = ooc_gemm.multiply(
        Operand(
            x.T.copy() if turned else x, turned, center=("columns" if turned else "rows", rows), missing=-1
        ),
        Operand(y.T.copy() if turned else y, turned, scale=("rows" if turned else "columns", cols)),
        device=device,
        chunks=(32, 32),
        kernel=kernel,
        precision="medium" if "tf32" in kernel else "highest",
    )
    wanted = changed(x, -1, rows[:, None]) @ changed(y, None, 0.0, 1 / cols)
    assert found.kernel == kernel
    assert_close(found.array.astype("f8"), wanted, 2e-3 if "tf32" in kernel else 2e-6)


def test_statistics(device):
    x = matrix((700, 40), "f4", 11) + np.float32(100)
    assert_close(
        ooc_gemm.cov(x, rowvar=False, device=device).array, np.cov(x.astype("f8"), rowvar=False), 2e-6
    )
    found = ooc_gemm.corrcoef(x, rowvar=False, device=device).array
    assert_close(found, np.corrcoef(x.astype("f8"), rowvar=False), 2e-6)
    weights = np.arange(700) % 5
    wanted = np.cov(x.astype("f8"), rowvar=False, aweights=weights)
    assert_close(ooc_gemm.cov(x, rowvar=False, aweights=weights, device=device).array, wanted, 2e-6)


@pytest.mark.parametrize("impute", [False, True])
@pytest.mark.parametrize("samples", [0, 1])
def test_relationships(device, samples, impute):
    rng = np.random.default_rng(12)
    g = rng.binomial(2, rng.uniform(0.1, 0.5, (300, 1)), (300, 70)).astype("i1")
    g[rng.random(g.shape) < 0.05] = -1
    known = np.ma.masked_equal(g, -1).astype("f8")
    p = known.mean(1, keepdims=True) / 2
    z = ((known - 2 * p) / np.sqrt(2 * p * (1 - p))).filled(0)
    there = (g != -1).astype("f8")
    wanted = z.T @ z / (300 if impute else there.T @ there)
    stored = g.T.copy() if samples == 0 else g
    found = ooc_gemm.grm(stored, samples=samples, meanimpute=impute, device=device).array
    assert_close(found.astype("f8"), wanted, 2e-6)
