"""kernels/prepare/centre.cu against NumPy: on the emulator of kernels, and on a GPU."""

from itertools import cycle, product

import numpy as np
import pytest
from conftest import gpu_missing

from ooc_gemm.cuda_kernels import preparations
from ooc_gemm.cuda_kernels.config import Config
from ooc_gemm.ladder.emulator import ORDERS, SIGNATURE, Emulator, Problem, compiler_missing, whole_source

SHAPES = ((1, 1), (3, 70), (130, 5), (32, 64), (65, 97))
"""The tiles are of 32×32."""
CASES = list(product(("float32", "float64"), ("rows", "cols", "both")))
CALL = """
extern "C" __global__ void called({signature}) {{
    const double* const v = reinterpret_cast<const double*>(B);
    centre(m, n, C, ldc, {rows}, {cols}, double(alpha));
}}
"""
"""Gives the kernel the arguments of a product: X as C, the means as rows of B, the scale as α."""


def wrapped(index, dtype, which):
    """A configuration and a source that the emulator takes."""
    config = preparations.centre(dtype)
    signature = SIGNATURE.replace("T ", "ELEMENT ").replace("T*", "ELEMENT*")
    rows = "nullptr" if which == "cols" else "v"
    cols = "nullptr" if which == "rows" else f"v + ldb * sizeof(ELEMENT) / {8}"
    macros = (*config.macros, ("centre", f"centre{index}"))
    call = CALL.format(signature=signature, rows=rows, cols=cols)
    return Config("called", dtype, config.bm, config.bn, config.block, macros), whole_source("centre") + call


def given(shape, dtype, which, scale):
    """X with padded rows, means that are large beside the deviations, and what is left of X."""
    rng = np.random.default_rng(3)
    means = np.zeros((2, max(shape)))
    means[0, : shape[0]], means[1, : shape[1]] = (1e4 * (1 + rng.random(extent)) for extent in shape)
    by_row, by_col = means[0, : shape[0], None] * (which != "cols"), means[1, : shape[1]] * (which != "rows")
    x = np.full((shape[0] + 1, shape[1] + 3), 7, dtype)
    inside = x[: shape[0], : shape[1]]
    inside[...] = rng.standard_normal(shape) + (by_row + by_col) * scale
    inside[0, 0], inside[-1, -1] = np.nan, np.inf
    wanted = x.copy()
    wanted[: shape[0], : shape[1]] = inside.astype(np.float64) - by_row * scale - by_col * scale
    return x, means, wanted


def check(found, wanted):
    """Both subtractions round in float64, once more than NumPy's here may."""
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-11)


@pytest.mark.slow
def test_it_agrees_with_numpy_on_the_emulator(tmp_path):
    if why := compiler_missing():
        pytest.skip(why)
    kernels = {str(case): wrapped(i, *case) for i, case in enumerate(CASES)}
    emulator = Emulator(tmp_path, kernels)
    for (dtype, which), label in zip(CASES, kernels, strict=True):
        problems, right = [], []
        for shape, order in zip(SHAPES, cycle(ORDERS), strict=False):
            x, means, wanted = given(shape, dtype, which, 0.5)
            vectors = np.zeros((3, max(shape)), np.float64)  # all of two rows reach the kernel
            vectors[:2] = means
            a = np.zeros((shape[0], 1), dtype)
            problems.append(Problem(*shape, 1, 0.5, a, vectors.view(dtype), 0, x, order))
            right.append(wanted)
        for result, wanted in zip(emulator.run(label, problems), right, strict=True):
            check(result, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "which"), CASES)
def test_it_agrees_with_numpy_on_a_gpu(dtype, which):
    if why := gpu_missing():
        pytest.skip(why)
    import cupy

    from ooc_gemm.cuda_kernels.launch import load

    config, i64, u = preparations.centre(dtype), np.int64, np.uintp
    for shape in (*SHAPES, (1000, 3), (2, 70_001)):
        x, means, wanted = given(shape, dtype, which, 0.25)
        there, rows, cols = cupy.asarray(x), *(cupy.asarray(line) for line in means)
        args = (
            i64(shape[0]), i64(shape[1]), u(there.data.ptr), i64(x.shape[1]),
            u(0 if which == "cols" else rows.data.ptr), u(0 if which == "rows" else cols.data.ptr),
            np.float64(0.25),
        )  # fmt: skip
        load(config)["centre"](config.grid(*shape), config.block, args, cupy.cuda.get_current_stream())
        check(there.get(), wanted)
