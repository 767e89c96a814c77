"""The device `cuda` on machines without a GPU: cupy_on_cpu.py stands in for CuPy and the driver."""

import cupy_on_cpu
import numpy as np
import pytest
import zarr
from conftest import make
from faults import with_blocks
from sessions import device_with, noting_strips

import ooc_gemm
from ooc_gemm.cuda_kernels import complex_gemm, split, tensor  # noqa: F401 (replaced in part)
from ooc_gemm.devices.cuda import (
    check,  # noqa: F401
    gemm,
    leaving,
    session,
)
from ooc_gemm.devices.cuda.device import CUDA
from ooc_gemm.devices.cuda.rates import CONTEXT_BYTES
from ooc_gemm.devices.cuda.session import CUDASession
from ooc_gemm.devices.several import Several
from ooc_gemm.run import prepare
from ooc_gemm.support import memory

RNG = np.random.default_rng(3)


@pytest.fixture
def capability(request, monkeypatch):
    cupy_on_cpu.install(monkeypatch, getattr(request, "param", "90"))


def random(shape, dtype):
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return RNG.integers(0 if dtype.kind == "u" else -9, 9, shape).astype(dtype)
    real = RNG.standard_normal(shape)
    return (real + 1j * RNG.standard_normal(shape) if dtype.kind == "c" else real).astype(dtype)


KERNELS = [
    ("cublas", "f4"),
    ("cublas", "f8"),
    ("cublas", "c8"),
    ("cublas", "c16"),
    ("cublas", "f2"),
    ("cublas", "i1"),
    ("ffma", "f4"),
    ("ffma", "f8"),
    ("ffma", "i8"),
    ("dmma", "f8"),
    ("mma-fp16", "f2"),
    ("mma-tf32", "f4"),
    ("mma-int8", "i1"),
    ("mma-fp16x3", "f4"),
    ("tiled", "f4"),
]


def test_a_product_like_the_one_before_is_not_planned_again(capability, monkeypatch):
    """A little more of both memories is in use then."""
    x, found = random((60, 60), "f4"), []
    for host, free in (1030, 120_000), (1075, 119_800):
        monkeypatch.setattr(memory, "resident_bytes", lambda held=host << 20: held)
        monkeypatch.setattr(CUDA, "free_bytes", lambda self, free=free << 20: free)
        result = ooc_gemm.multiply(x, x, device=CUDA(), memory_limit="4GiB")
        found.append((result.plan.budget, prepare._remembered.cache_info().misses))
        assert 0.98 * 0.9 * (free << 20) < result.plan.budget.device - CONTEXT_BYTES <= 0.9 * (free << 20)
    assert found[0] == found[1]


@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
@pytest.mark.parametrize("transpose", ["", "a", "b", "ab"])
def test_products_are_right(tmp_path, capability, kernel, dtype, transpose):
    a, b, c = random((300, 230), dtype), random((230, 270), dtype), random((300, 270), dtype)
    out = {"i1": "i4", "f2": "f4"}.get(dtype, dtype)
    c = c.astype(out)
    make(tmp_path / "c", c, chunks=(100, 90))
    beta = 0 if kernel == "mma-int8" else -1  # 2·A·B − C might pass int32
    want = 2 * (a.astype("c16") @ b.astype("c16")) + beta * c
    operands = [x.T.copy() if name in transpose else x for name, x in (("a", a), ("b", b))]
    result = ooc_gemm.multiply(
        *operands,
        str(tmp_path / "c"),
        alpha=2,
        beta=beta,
        transpose_a="a" in transpose,
        transpose_b="b" in transpose,
        kernel=kernel,
        device=CUDA(),
        verify=True,
        out_dtype=out,
        force=beta == 0,
        precision="medium" if "tf32" in kernel else "highest",
    )
    assert result.verified
    assert np.abs(zarr.open_array(tmp_path / "c")[...] - want).max() < (
        1e-10 if dtype in ("f8", "c16") else 2e-3
    )
    assert cupy_on_cpu.Kernel.launched


def cut(monkeypatch, bm, bn, bk):
    """Plans of blocks of these sizes."""
    monkeypatch.setattr("ooc_gemm.run.prepare.make_plan", with_blocks(bm, bn, bk))


@pytest.mark.parametrize("kernel", ["cublas", "ffma"])
def test_blocks_panels_and_strips(capability, monkeypatch, kernel):
    """Rows of the last block leave before others are finished."""
    cut(monkeypatch, 300, 270, 64)
    monkeypatch.setattr(gemm, "STRIP_ELEMENTS", 1 << 12)
    a, b, strips = random((600, 230), "f4"), random((230, 540), "f4"), []
    device = device_with(noting_strips(strips), CUDA)()
    result = ooc_gemm.multiply(a, b, kernel=kernel, device=device, chunks=(100, 90))
    assert np.abs(result.array - a @ b).max() < 1e-3
    assert len(strips[-1]) > 1


@pytest.mark.parametrize("large", [False, True])
def test_large_panels_are_freed_before_the_last_block_has_left(capability, monkeypatch, large):
    """Small ones are freed with all the rest."""
    monkeypatch.setattr(session, "FREED_EARLY", 0 if large else 1 << 30)
    left = []

    class Watching(CUDASession):
        def free_panels(self):
            super().free_panels()
            left.append({key[0] for key in self._arrays if key[0] in ("a", "b")})

        def close(self):
            super().close()
            left.append({*self._arrays})

    a = random((300, 230), "f4")
    result = ooc_gemm.multiply(a, a.T.copy(), device=device_with(Watching, CUDA)(), chunks=(100, 90))
    assert np.abs(result.array - a @ a.T).max() < 1e-3
    assert left == [set() if large else {"a", "b"}, set()]


SYMMETRIC = [
    ("cublas", "f4", "f4"),
    ("ffma", "f4", "f4"),
    ("mma-fp16x3", "f4", "f2"),
    ("mma-int8", "i1", "i4"),
    ("dmma", "f8", "f4"),
    ("cublas", "c8", "c8"),
]


@pytest.mark.parametrize(("kernel", "dtype", "out"), SYMMETRIC)
@pytest.mark.parametrize("transpose", [False, True])
def test_rows_of_a_symmetric_block_leave_from_below(
    capability, monkeypatch, tmp_path, kernel, dtype, out, transpose
):
    """Each strip is complete when it leaves, with what lies above the diagonal."""
    monkeypatch.setattr(gemm, "STRIP_ELEMENTS", 1 << 12)
    monkeypatch.setattr(leaving, "DIAGONAL_ELEMENTS", 1 << 14)
    cut(monkeypatch, 500, 500, 64)
    a, strips = random((500, 230), dtype), []

    class Watching(noting_strips(strips)):
        def finish(self, block, c):
            super().finish(block, c)
            size = block.rows * block.cols
            made = self._arrays["c", c][:size].reshape(block.rows, block.cols)
            assert self._op.narrowed or np.array_equal(made, made.T)

    result = ooc_gemm.gram(
        a.T.copy() if transpose else a, str(tmp_path / "c"), transpose=transpose, kernel=kernel,
        out_dtype=out, device=device_with(Watching, CUDA)(), chunks=(90, 90),
    )  # fmt: skip
    wide = {"i": "i8", "c": "c16"}.get(a.dtype.kind, "f8")
    want = a.astype(wide) @ a.astype(wide).T
    error = np.abs(zarr.open_array(tmp_path / "c")[...].astype(wide) - want).max()
    assert error <= (0 if dtype == "i1" else 0.5 if out == "f2" else 1e-3)
    assert strips == [[(384, 500), (256, 384), (128, 256), (0, 128)]]
    (block,) = result.plan.blocks()
    rows = [part.chunk[0] for part in result.plan.parts(block)]
    assert rows == sorted(rows, reverse=True)


def test_what_does_not_fit_is_counted_from_below(capability, monkeypatch):
    monkeypatch.setattr(gemm, "STRIP_ELEMENTS", 1 << 12)
    monkeypatch.setattr(leaving, "DIAGONAL_ELEMENTS", 1 << 14)
    cut(monkeypatch, 500, 500, 64)
    a = random((500, 230), "f4")
    a[[3, 140, 141, 499]] *= 200
    with pytest.warns(UserWarning, match="are infinite in C"):
        result = ooc_gemm.gram(a, device=CUDA(), kernel="ffma", out_dtype="f2", chunks=(90, 90))
    too_large = np.abs(a.astype("f8") @ a.astype("f8").T) > 65519
    assert too_large[[3, 140, 499]].any(1).all()
    assert result.overflowed == too_large.sum() == np.isinf(result.array).sum()


@pytest.mark.parametrize("kernel", ["cublas", "ffma", "mma-tf32"])
@pytest.mark.parametrize("transpose", [False, True])
def test_a_symmetric_product_is_made_in_half(capability, monkeypatch, kernel, transpose):
    monkeypatch.setattr("ooc_gemm.cuda_kernels.product.LEAST_STRIP", 64)
    a = random((400, 230), "f4")
    result = ooc_gemm.gram(
        a,
        device=CUDA(),
        kernel=kernel,
        transpose=transpose,
        chunks=(100, 100),
        precision="medium",
        verify=True,
    )
    assert {"transpose", "mirror"} & set(cupy_on_cpu.Kernel.launched)
    want = a @ a.T if result.array.shape == (400, 400) else a.T @ a
    assert np.abs(result.array - want).max() < 1e-3


def test_bands_of_a_symmetric_block_are_mirrored(capability, monkeypatch):
    """Each device multiplies its rows whole, and what it adds up may differ above the diagonal."""
    cut(monkeypatch, 500, 500, 64)
    mirrored, a = [], random((500, 230), "f4")

    class Watching(CUDASession):
        def mirror(self, block, c, col=0):
            out = self._arrays["c", c][: block.rows * block.cols].reshape(block.rows, block.cols)
            square = out[:, col : col + block.rows]
            square[np.triu_indices(block.rows, 1)] += 1
            super().mirror(block, c, col)
            mirrored.append(np.array_equal(square, square.T))

    device = device_with(Watching, CUDA)
    result = ooc_gemm.gram(a, device=Several([device(), device()]), kernel="ffma", chunks=(90, 90))
    assert mirrored == [True, True]
    assert np.abs(result.array - a @ a.T).max() < 1e-3


def test_integers_that_a_panel_holds_as_floats(capability):
    """They are staged on the device, and converted there."""
    a, b = random((130, 90), "i2"), random((90, 110), "i2")
    result = ooc_gemm.multiply(a, b, device=CUDA(), out_dtype="i8")
    assert np.array_equal(result.array, a.astype("i8") @ b)


@pytest.mark.parametrize("k", [0, 3])
def test_an_old_c_times_beta_never_wraps(tmp_path, capability, k):
    ones = np.ones((4, k), "i8"), np.ones((k, 4), "i8")
    path = make(tmp_path / "c", np.full((4, 4), 2**62), chunks=(4, 4))
    with pytest.raises(ooc_gemm.RangeError, match="may exceed int64"):
        ooc_gemm.multiply(*ones, path, beta=2, device="cuda")
