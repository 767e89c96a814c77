"""kernels/check.cu against NumPy; fit to be run under compute-sanitizer."""

import numpy as np
import pytest
from conftest import gpu_missing

from ooc_gemm.cuda_kernels import preparations
from ooc_gemm.devices.cuda.check import DEPTH, ROWS, THREADS
from ooc_gemm.support.intervals import ceil_div, round_up

CONFIGS = [
    preparations.check(*which)
    for which in (
        ("float16", False, 8), ("float32", False, 4), ("complex64", False, 1), ("int8", True, 16),
        ("int32", True, 4), ("float64", True, 1), ("int8", True, 16, True), ("uint8", True, 1, True),
    )
]  # fmt: skip
"""Some: each takes its time to be compiled."""
SHAPES = ((1, 1), (3, 257), (130, 5), (9, 4099), (300, 31), (257, 2048))


def test_its_numbers_are_those_of_the_launch():
    from ooc_gemm.cuda_kernels.compile import kernel_source

    source = kernel_source("check")
    assert f"THREADS = {THREADS}, WARPS = THREADS / 32;" in source
    assert f"ROWS = {ROWS};" in source
    assert f"DEPTH = {DEPTH};" in source
    assert "WIDTH = 32 * VEC;" in source


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(str(value) for _, value in c.macros))
def test_it_agrees_with_numpy(config):
    if why := gpu_missing():
        pytest.skip(why)
    import cupy

    from ooc_gemm.cuda_kernels.launch import load

    kernels, dtype = load(config, "rows", "columns", "signs"), np.dtype(config.dtype)
    exact, vec, rng = config.value("KIND") == 3, config.value("VEC"), np.random.default_rng(1)
    wide = np.dtype(
        ("i8" if config.value("WIDE") else "i4") if exact else "c16" if dtype.kind == "c" else "f8"
    )
    rounding = 2.0**-22 if dtype == np.float16 else 1e-12
    i64, u, i32 = np.int64, np.uintp, np.int32

    def random(shape, dtype):
        if exact:  # 32 bits wrap around
            top = 100 if dtype.itemsize == 1 else 2**30 if dtype.itemsize == 4 else 2**15
            return rng.integers(0 if dtype.kind == "u" else -top, top, shape).astype(dtype)
        x = rng.standard_normal(shape)
        return (x + 1j * rng.standard_normal(shape) if dtype.kind == "c" else x).astype(dtype)

    for (rows, cols), conjugate, norms in zip(SHAPES, (0, 1) * 3, (1, 1, 0) * 2, strict=True):
        pitch = round_up(cols, vec) + vec
        full = np.full((rows, pitch), 77, dtype)
        full[:, :cols] = x = random((rows, cols), dtype)
        if not exact:
            full[:, cols:] = np.nan
        matrix = cupy.asarray(full)
        op = (x.conj() if conjugate else x).astype(wide)
        for name in ("rows", "columns"):
            lines, deep = (rows, cols) if name == "rows" else (cols, rows)
            v, out = random(deep, wide), random(lines, wide)
            at, to, squares = cupy.asarray(v), cupy.asarray(out), cupy.ones(lines)
            tail = u(to.data.ptr), u(squares.data.ptr if norms else 0), i32(conjugate)
            stored = u(matrix.data.ptr), i64(pitch), u(at.data.ptr)
            if name == "rows":
                width = 64 * vec
                grid, args = (ceil_div(rows, 8 * ROWS), ceil_div(cols, width)), (i64(width),)
            else:
                grid, args = (ceil_div(cols, 32 * vec) * ceil_div(rows, DEPTH),), ()
            args = (i64(rows), i64(cols), *args, *stored, *tail)
            kernels[name](grid, (THREADS,), args, cupy.cuda.get_current_stream())
            wanted = out + (op @ v if name == "rows" else op.T @ v)
            found, case = to.get(), f"{name} {rows}×{cols}"
            if exact:
                assert np.array_equal(found, wanted), case
            else:
                most = 1 + (np.abs(op) @ np.abs(v) if name == "rows" else np.abs(op.T) @ np.abs(v)).max()
                assert np.abs(found - wanted).max() <= rounding * most, case
                axis = 1 if name == "rows" else 0
                expected = 1 + norms * (np.abs(op) ** 2).sum(axis=axis)
                assert np.allclose(squares.get(), expected, rtol=rounding, atol=0), case
    signs = cupy.zeros(100_001, wide)
    args = (i64(signs.size), np.uint64(5), u(signs.data.ptr))
    kernels["signs"]((ceil_div(signs.size, THREADS),), (THREADS,), args, cupy.cuda.get_current_stream())
    found = signs.get()
    assert set(found.tolist()) == {-1, 1}
    assert abs(int(found.real.sum())) < 6 * signs.size**0.5
    assert abs(int((found[1:] * found[:-1]).real.sum())) < 6 * signs.size**0.5
