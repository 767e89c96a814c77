"""What the engine does with a GPU alone, whatever the kernel."""

import pytest
from conftest import gpu_missing
from faults import with_blocks
from test_core import assert_close, matrix

import ooc_gemm
import ooc_gemm.api
from ooc_gemm.devices import cuda
from ooc_gemm.plan import EARLY_STRIPS
from ooc_gemm.tiles import BAND


@pytest.mark.parametrize(
    ("rows", "cols"), [(1, 1), (100, 10**7), (4096, 4096), (70_000, 1000), (40_000, 65_536)]
)
def test_strips_make_every_row_once(rows, cols):
    strips = cuda.early_strips(rows, cols)
    assert [row for start, stop in strips for row in range(start, stop)] == list(range(rows))
    assert len(strips) <= EARLY_STRIPS
    for start, stop in strips[:-1]:
        assert (stop - start) % BAND == 0
        assert (stop - start) * cols >= cuda.STRIP_ELEMENTS


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
    monkeypatch.setattr(cuda, "STRIP_ELEMENTS", 1 << 16)
    monkeypatch.setattr(ooc_gemm.api, "make_plan", with_blocks(1536, 1400, 300))
    a, b, strips = matrix((2560, 700), dtype, 1), matrix((700, 1400), dtype, 2), []

    class Counting(cuda.CUDA):
        def finish(self, block, c):
            super().finish(block, c)
            strips.append(len(self._finished[c]))

    left, right = (a.T.copy(), b.T.copy()) if transpose else (a, b)
    found = ooc_gemm.multiply(
        left, right, transpose_a=transpose, transpose_b=transpose, device=Counting(0), kernel=kernel,
        chunks=(256, 200), precision="medium" if kernel == "tf32" else "highest",
    ).array  # fmt: skip
    exact = a.dtype.kind in "iu"
    wide = {"i": "i8", "c": "c16"}.get(a.dtype.kind, "f8")
    assert_close(found.astype(wide), a.astype(wide) @ b.astype(wide), bound)
    assert strips == [1, 8], "nothing hides the last block's writes"
    assert not exact or found.dtype.kind == "i"
