"""kernels/prepare/standardize.cu against NumPy, bit by bit: on the emulator of kernels, and on a GPU."""

from itertools import cycle, product

import numpy as np
import pytest
from conftest import gpu_missing

from ooc_gemm.cuda_kernels import preparations
from ooc_gemm.cuda_kernels.config import Config
from ooc_gemm.engine.standardize import MARGIN
from ooc_gemm.ladder.emulator import ORDERS, SIGNATURE, Emulator, Problem, compiler_missing, whole_source

SHAPES = ((1, 1), (3, 70), (33, 65), (64, 300), (70, 5))
"""Places along k, and elements of each."""
LEAST = 0.15
CASES = list(product(("float32", "float64"), (False, True), (-1.0, np.nan, None), (True, False)))
"""Type, whether k lies along rows, what is missing, whether elements are scaled."""
WRAP = """
extern "C" __global__ void called({signature}) {{
    double* const shares = reinterpret_cast<double*>(C + m * ldc);
    unsigned long long* const lacking = reinterpret_cast<unsigned long long*>(shares + {places});
    signed char* const marks = reinterpret_cast<signed char*>(lacking + 1);
    standardize(int({places}), int({elements}), C, ldc, {gone}, Real({missing}), {least}, {scaled}, shares,
                marks, n + 3, lacking);
}}
"""
"""Gives the kernel the arguments of a product: X, m×n, and behind it what is found, as C."""
BEFORE = """
inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long more) {
    return *at += more, *at - more;
}
inline double sqrt(double x) { return __builtin_sqrt(x); }
"""
"""What the emulator lacks."""


def as_numbered(missing):
    """What is missing, as the kernel numbers it, and the number."""
    return (0, 0.0) if missing is None else (2, 0.0) if np.isnan(missing) else (1, missing)


def wrapped(index, dtype, along_k, missing, scaled):
    """A configuration and a source that the emulator takes."""
    config, (gone, number) = preparations.standardize(dtype, along_k), as_numbered(missing)
    signature = SIGNATURE.replace("T ", "REAL ").replace("T*", "REAL*")
    call = WRAP.format(
        signature=signature,
        places="n" if along_k else "m",
        elements="m" if along_k else "n",
        gone=gone,
        missing=number,
        least=LEAST,
        scaled=int(scaled),
    )
    macros = (*config.macros, ("standardize", f"standardize{index}"))
    tile = (1 << 20, 32) if along_k else (1, 1 << 20)
    return Config("called", dtype, *tile, config.block, macros), BEFORE + whole_source("standardize") + call


def given(shape, dtype, missing):
    """A line for each place: numbers from 0 to 2, some missing; among them places without variation, and some
    with one element that is no such number."""
    rng, (k, m) = np.random.default_rng(4), shape
    x = rng.binomial(2, rng.random((k, 1)), (k, m)).astype(dtype)
    if missing is not None:
        x[rng.random(x.shape) < 0.2] = missing
        x[2 % k] = missing
    x[1 % k] = 2
    for place, outside in enumerate((-9, 2.01, np.inf, np.nan), 5):
        if place < k:
            x[place, m // 2] = outside
    x[9:10, 0] = 2 + MARGIN / 2
    return x


def expected(x, missing, scaled):
    """Lines, marks, shares and the number of missing elements."""
    lacks = np.zeros(x.shape, bool) if missing is None else np.isnan(x) if np.isnan(missing) else x == missing
    with np.errstate(all="ignore"):
        inside = (x >= -MARGIN) & (x <= 2 + MARGIN)
        p = np.where(lacks, 0, np.where(inside, x, np.float64(1e300))).sum(1, dtype="f8") / (
            2.0 * (~lacks).sum(1)
        )
        counts = ~(np.minimum(p, 1 - p) < LEAST)
        mean = np.where(counts & ~np.isnan(p), 2 * p, 0)
        variance = mean * (1 - mean / 2)
        by = np.where(counts & (variance > 0), 1 / np.sqrt(variance) if scaled else 1.0, 0)
    high, low = mean.astype(x.dtype), (mean - mean.astype(x.dtype)).astype(x.dtype)
    with np.errstate(all="ignore"):
        made = np.where(lacks, 0, (x - high[:, None] - low[:, None]) * by.astype(x.dtype)[:, None])
    return made.astype(x.dtype), (lacks & counts[:, None]).astype("i1"), p, int(lacks[counts].sum())


def room_for(x, along_k):
    """X with padded rows, and behind it room for shares, the number and marks, as one array of its type."""
    lines = x.T if along_k else x
    padded = np.full((lines.shape[0], lines.shape[1] + 2 + lines.shape[1] % 2), 7, x.dtype)  # whole words
    padded[:, : lines.shape[1]] = lines
    rest = 8 * len(x) + 8 + lines.shape[0] * (lines.shape[1] + 3)
    count = 1 + -(-rest // (padded.shape[1] * x.itemsize))
    behind = np.zeros((count, padded.shape[1]), x.dtype)
    return np.concatenate([padded, behind])


def check(found, x, missing, scaled, along_k):
    """Bit by bit, but NaN is NaN."""
    made, marks, p, lacking = expected(x, missing, scaled)
    shape = x.shape[::-1] if along_k else x.shape
    lines = found[: shape[0], : shape[1]]
    assert np.array_equal(lines.T if along_k else lines, made, equal_nan=True)
    assert (found[: shape[0], shape[1] :] == 7).all()
    rest = np.ascontiguousarray(found[shape[0] :]).view("u1").reshape(-1)
    k = len(x)
    assert np.array_equal(rest[: 8 * k].view("f8"), p, equal_nan=True)
    assert rest[8 * k : 8 * k + 8].view("u8")[0] == lacking
    marked = rest[8 * k + 8 :][: shape[0] * (shape[1] + 3)].view("i1").reshape(shape[0], -1)[:, : shape[1]]
    assert np.array_equal(marked.T if along_k else marked, marks)


@pytest.mark.slow
def test_it_agrees_with_numpy_on_the_emulator(tmp_path):
    if why := compiler_missing():
        pytest.skip(why)
    kernels = {str(case): wrapped(i, *case) for i, case in enumerate(CASES)}
    emulator = Emulator(tmp_path, kernels)
    for (dtype, along_k, missing, scaled), label in zip(CASES, kernels, strict=True):
        problems, lines = [], []
        for shape, order in zip(SHAPES, cycle(ORDERS), strict=False):
            x = given(shape, dtype, missing)
            nothing = np.zeros((1, 1), dtype)
            extents = shape[::-1] if along_k else shape
            room = room_for(x, along_k)
            problems.append(Problem(*extents, 1, 1.0, nothing, nothing, 0.0, room, order))
            lines.append(x)
        for found, x in zip(emulator.run(label, problems), lines, strict=True):
            check(found, x, missing, scaled, along_k)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "along_k", "missing", "scaled"), CASES)
def test_it_agrees_with_numpy_on_a_gpu(dtype, along_k, missing, scaled):
    if why := gpu_missing():
        pytest.skip(why)
    import cupy

    from ooc_gemm.cuda_kernels.launch import load

    config, i32, i64, u = preparations.standardize(dtype, along_k), np.int32, np.int64, np.uintp
    gone, number = as_numbered(missing)
    for shape in (*SHAPES, (1000, 3), (5, 70_001)):
        x = given(shape, dtype, missing)
        there, (k, m) = cupy.asarray(room_for(x, along_k)), shape
        rows, cols = shape[::-1] if along_k else shape
        shares = there.data.ptr + rows * there.shape[1] * x.itemsize
        lacking = shares + 8 * k
        args = (
            i32(k), i32(m), u(there.data.ptr), i64(there.shape[1]), i32(gone), x.dtype.type(number),
            np.float64(LEAST), i32(scaled), u(shares), u(lacking + 8), i64(cols + 3), u(lacking),
        )  # fmt: skip
        grid = (-(-k // (32 if along_k else 1)),)
        load(config)["standardize"](grid, config.block, args, cupy.cuda.get_current_stream())
        check(there.get(), x, missing, scaled, along_k)
