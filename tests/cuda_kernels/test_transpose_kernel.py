"""kernels/prepare/transpose.cu against NumPy: on the emulator of kernels, and on a GPU."""

from itertools import product

import numpy as np
import pytest
from conftest import gpu_missing

from ooc_gemm.cuda_kernels import preparations
from ooc_gemm.cuda_kernels.config import Config
from ooc_gemm.cuda_kernels.product import Operand
from ooc_gemm.ladder.emulator import ORDERS, SIGNATURE, Emulator, Problem, compiler_missing, whole_source

DTYPES = "int8", "float16", "float32", "int64", "complex128"
SHAPES = ((1, 1), (3, 70), (130, 5), (128, 128), (65, 97), (260, 132), (129, 258))
PADDED = (0, 3, 4)
"""Elements after each row: with 3, rows begin at no whole words."""
CALL = """
extern "C" __global__ void called({signature}) {{
    transpose(m, n, reinterpret_cast<const T*>(A), lda, reinterpret_cast<T*>(C), ldc);
}}
"""
"""Gives the kernel the arguments of a product: X as A, Y as C."""


def values(shape, dtype, padded):
    """Bytes of all values, as rows with some elements behind them."""
    count = shape[0] * (shape[1] + padded) * np.dtype(dtype).itemsize
    found = np.random.default_rng(1).integers(0, 256, count, np.uint8).view(dtype)
    return found.reshape(shape[0], shape[1] + padded)


def check(x, y, shape):
    """Y is the transpose, bit by bit, and nothing else was written to."""
    rows, cols = shape
    assert y[:cols, :rows].tobytes() == np.ascontiguousarray(x[:, :cols].T).tobytes()
    assert (y[:cols, rows:] == 7).all()
    assert (y[cols:] == 7).all()


@pytest.mark.slow
def test_on_the_emulator(tmp_path):
    if why := compiler_missing():
        pytest.skip(why)
    kernels = {}
    for index, dtype in enumerate(DTYPES[:-1]):  # the emulator has no double2
        config = preparations.transpose(dtype)
        macros = (*config.macros, ("transpose", f"transpose{index}"), ("mirror", f"mirror{index}"))
        source = whole_source("transpose") + CALL.format(signature=SIGNATURE)
        kernels[dtype] = Config("called", dtype, config.bm, config.bn, config.block, macros), source
    emulator = Emulator(tmp_path, kernels)
    for dtype in kernels:
        problems, given = [], []
        for (shape, padded), order in zip(product(SHAPES, PADDED), ORDERS * 99, strict=False):
            x = values(shape, dtype, padded)
            y = np.full((shape[1] + 1, max(shape) + padded), 7, dtype)  # as wide as the emulator asks
            problems.append(Problem(*shape, shape[1], 1, x, x, 0, y, order))
            given.append((x, shape))
        for result, (x, shape) in zip(emulator.run(dtype, problems), given, strict=True):
            check(x, result, shape)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu(dtype):
    if why := gpu_missing():
        pytest.skip(why)
    import cupy

    from ooc_gemm.cuda_kernels.transposition import Transposition

    turn = Transposition(dtype)
    for shape, padded, first in product((*SHAPES, (5000, 3), (2, 70_001)), PADDED, (0, 1)):
        x, y = values(shape, dtype, padded), np.full((shape[1] + 1, shape[0] + padded), 7, dtype)
        size = x.itemsize
        there, room = cupy.empty(x.size + 1, dtype), cupy.full(y.size + 1, 7, dtype)
        there[first : first + x.size] = cupy.asarray(x.ravel())
        operands = (
            Operand(there.data.ptr + first * size, x.shape[1]),
            Operand(room.data.ptr + first * size, y.shape[1]),
        )  # fmt: skip
        turn(*shape, *operands, cupy.cuda.get_current_stream())
        check(x, room.get()[first : first + y.size].reshape(y.shape), shape)
