"""What the engine does with a GPU alone, whatever the kernel."""

import pytest
from arrays import assert_close, matrix
from conftest import gpu_missing
from faults import with_blocks
from sessions import device_with, noting_strips

import ooc_gemm
import ooc_gemm.run.prepare
from ooc_gemm.cuda_kernels.split import split_pays
from ooc_gemm.devices.cuda import gemm, leaving
from ooc_gemm.devices.cuda.device import CUDA
from ooc_gemm.planning.schedule import EARLY_STRIPS
from ooc_gemm.support.intervals import BAND


@pytest.mark.parametrize(
    ("rows", "cols"), [(1, 1), (100, 10**7), (4096, 4096), (70_000, 1000), (40_000, 65_536)]
)
def test_strips_make_every_row_once(rows, cols):
    strips = gemm.early_strips(rows, cols)
    assert [row for start, stop in strips for row in range(start, stop)] == list(range(rows))
    assert len(strips) <= EARLY_STRIPS
    for start, stop in strips[:-1]:
        assert (stop - start) % BAND == 0
        assert (stop - start) * cols >= gemm.STRIP_ELEMENTS


KERNELS = [
    ("cublas", "f4", 1e-6), ("ffma", "f4", 1e-6), ("fp16x3", "f4", 1e-6), ("fp16", "f2", 1e-3),
    ("tf32", "f4", 1e-3), ("dmma", "f8", 1e-14), ("int8", "i1", 0), ("ffma", "i8", 0), ("auto", "c8", 1e-6),
    ("mma-fp16x3", "f4", 1e-6),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "dtype", "bound"), KERNELS)
@pytest.mark.parametrize("transpose", [False, True])
def test_rows_leave_before_others_are_finished(kernel, dtype, bound, transpose, monkeypatch):
    """The last block's last panels are multiplied strip by strip, and every strip is right when it leaves."""
    if why := gpu_missing():
        pytest.skip(why)
    monkeypatch.setattr(gemm, "STRIP_ELEMENTS", 1 << 16)
    # Also the last block, of 1024 rows, and its last panel are large enough for fp16x3 to split them.
    assert split_pays(1024, 1600, 350)
    monkeypatch.setattr(ooc_gemm.run.prepare, "make_plan", with_blocks(1536, 1600, 350))
    a, b, strips = matrix((2560, 700), dtype, 1), matrix((700, 1600), dtype, 2), []
    left, right = (a.T.copy(), b.T.copy()) if transpose else (a, b)
    device = device_with(noting_strips(strips), CUDA)(0)
    found = ooc_gemm.multiply(
        left, right, transpose_a=transpose, transpose_b=transpose, device=device, kernel=kernel,
        chunks=(256, 200), precision="medium" if kernel == "tf32" else "highest",
    ).array  # fmt: skip
    exact = a.dtype.kind in "iu"
    wide = {"i": "i8", "c": "c16"}.get(a.dtype.kind, "f8")
    assert_close(found.astype(wide), a.astype(wide) @ b.astype(wide), bound)
    assert [len(each) for each in strips] == [1, 8], "nothing hides the last block's writes"
    assert not exact or found.dtype.kind == "i"


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "dtype", "bound"), KERNELS)
@pytest.mark.parametrize("transpose", [False, True])
def test_rows_of_a_symmetric_block_leave_from_below(kernel, dtype, bound, transpose, monkeypatch):
    """Every strip is right when it leaves, also above the diagonal."""
    if why := gpu_missing():
        pytest.skip(why)
    monkeypatch.setattr(gemm, "STRIP_ELEMENTS", 1 << 16)
    monkeypatch.setattr(leaving, "DIAGONAL_ELEMENTS", 1 << 18)
    monkeypatch.setattr(ooc_gemm.run.prepare, "make_plan", with_blocks(2560, 2560, 350))
    a, strips = matrix((2560, 700), dtype, 1), []
    device = device_with(noting_strips(strips), CUDA)(0)
    found = ooc_gemm.gram(
        a.T.copy() if transpose else a, transpose=transpose, device=device, kernel=kernel,
        chunks=(256, 256), precision="medium" if kernel == "tf32" else "highest",
    ).array  # fmt: skip
    wide = a.astype({"i": "i8", "c": "c16"}.get(a.dtype.kind, "f8"))
    assert_close(found.astype(wide.dtype), wide @ wide.T, bound)
    assert strips == [[(start, min(2560, start + 384)) for start in range(2304, -1, -384)]]


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "dtype"), [("fp16x3", "f4"), ("mma-fp16x3", "f4"), ("fp16x3", "c8")])
def test_blocks_of_a_split_product_pass_their_check(kernel, dtype):
    """Smaller ones, as in test_verify_run.py, are made in plain float32."""
    if why := gpu_missing():
        pytest.skip(why)
    assert split_pays(1300, 1400, 600)
    a, b = matrix((1300, 600), dtype, 1), matrix((600, 1400), dtype, 2)
    for alpha, beta in ((1, 0), (1e-20, 0), (2 - 1j, 0)) if dtype == "c8" else ((1, 0), (1e-20, 0)):
        result = ooc_gemm.multiply(a, b, alpha=alpha, beta=beta, device="cuda", kernel=kernel, verify=True)
        assert result.verified
        wide = "c16" if dtype == "c8" else "f8"
        assert_close(result.array.astype(wide) / alpha, a.astype(wide) @ b, 1e-6)
