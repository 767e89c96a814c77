"""kernels/prepare/best.cu against a sort: on the emulator of kernels, and on a GPU."""

from itertools import cycle

import numpy as np
import pytest
from conftest import gpu_missing
from emulator import ORDERS, SIGNATURE, Emulator, Problem, compiler_missing, whole_source

from ooc_gemm.cuda_kernels import preparations
from ooc_gemm.cuda_kernels.config import Config
from ooc_gemm.engine.reduction import Best

KINDS = {"float32": "float32", "float64": "float64", "int32": "float64", "int64": "float64"}
"""Types of C, and of scores."""
CASES = [
    # rows, cols, keep, column of row 0 itself (or none), what is special
    (3, 700, 1, None, ""), (5, 3000, 16, -2, "scaled"), (2, 40, 100, 30, ""), (2, 2000, 128, None, "ties"),
    (3, 2600, 7, 2598, "equal"), (2, 1, 3, 0, ""), (3, 5000, 10, None, "nothing"),
    (2, 1500, 20, None, "known"), (2, 4000, 20, None, "known and equal"),
]  # fmt: skip
SOURCE = """
static int atomicAdd(int* at, int x) {{ const int old = *at; *at += x; return old; }}
{kernel}
extern "C" __global__ void called({signature}) {{
    best(k, reinterpret_cast<const T*>(A), lda, {scaled} ? B : nullptr, {scaled} ? B + ldb : nullptr,
         {others}, {diagonal}, {keep}, {fresh}, -S(__builtin_inf()), const_cast<S*>(B) + 2 * ldb,
         reinterpret_cast<char*>(C), ldc * sizeof(S));
}}
"""
"""Gives the kernel the arguments of a product: C as A; scale, shift and what is known as rows of B; records
as C."""


class Case:
    """A block, and what is known of its rows."""

    def __init__(self, dtype, rows, cols, keep, diagonal, special):
        rng, scores = np.random.default_rng(4), np.dtype(KINDS[dtype])
        self.c = rng.integers(-(10**6), 10**6, (rows, cols)).astype(dtype)
        if "ties" in special:
            self.c //= 10**5
        if "equal" in special:
            self.c[1:] = 3
        if special == "nothing":
            assert np.dtype(dtype).kind != "f" or not np.isnan(self.c).any()
            self.c[0, 7:] = np.nan if np.dtype(dtype).kind == "f" else 0
        self.scale = self.shift = None
        if special == "scaled":
            self.scale, self.shift = (rng.integers(1, 9, cols).astype(scores) for _ in range(2))
            self.shift[::3] = np.inf
        self.fresh = "known" not in special
        self.least = np.full(rows, 3 if "equal" in special else 9 * 10**5, scores)
        self.others, self.diagonal = diagonal is not None, diagonal or 0
        self.best = Best(keep, scores, self.scale, self.shift, self.others)

    def expected(self):
        """Scores and columns, best first, and what is known of each row at least."""
        x, rows = self.c.astype(self.best.dtype), np.arange(len(self.c))
        with np.errstate(invalid="ignore"):
            if self.scale is not None:
                x = x * self.scale - self.shift
        if self.others:
            x[rows[:, None] + self.diagonal == np.arange(x.shape[1])] = -np.inf
        x[np.isnan(x)] = -np.inf
        if not self.fresh:
            x[x < self.least[:, None]] = -np.inf
        columns = np.broadcast_to(np.arange(x.shape[1]), x.shape)
        order = np.lexsort((columns, -x), axis=1)[:, : self.best.keep]
        found = np.take_along_axis(x, order, 1)
        more = self.best.keep - order.shape[1]
        found = np.pad(found, ((0, 0), (0, more)), constant_values=-np.inf)
        columns = np.where(np.isneginf(found), -1, np.pad(order, ((0, 0), (0, more))))
        known = np.full(len(x), -np.inf) if self.fresh else self.least
        return found, columns, np.where(columns[:, -1] >= 0, found[:, -1], known)

    def check(self, records):
        scores, columns, _ = self.expected()
        found = self.best.records(records, len(self.c))
        np.testing.assert_array_equal(found[0], scores)
        np.testing.assert_array_equal(found[1], columns)


def wrapped(index, dtype, case):
    """A configuration and a source that the emulator takes."""
    config, given = preparations.best(dtype, KINDS[dtype]), Case(dtype, *case)
    scores = dict(config.macros)["SCORE"]
    signature = SIGNATURE.replace("T ", f"{scores} ").replace("T*", f"{scores}*")
    source = SOURCE.format(
        kernel=whole_source("best"), signature=signature, scaled=int(given.scale is not None),
        others=int(given.others), diagonal=given.diagonal, keep=given.best.keep, fresh=int(given.fresh),
    )  # fmt: skip
    macros = (*config.macros, ("best", f"best{index}"))
    # A block of threads for each row.
    return Config("called", KINDS[dtype], 1, 1 << 20, config.block, macros), source


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KINDS)
def test_it_agrees_with_a_sort_on_the_emulator(tmp_path, dtype):
    if why := compiler_missing():
        pytest.skip(why)
    emulator = Emulator(tmp_path, {str(case): wrapped(i, dtype, case) for i, case in enumerate(CASES)})
    for case, order in zip(CASES, cycle(ORDERS), strict=False):
        given = Case(dtype, *case)
        rows, cols = given.c.shape
        vectors = np.zeros((4, max(rows, cols)), given.best.dtype)
        if given.scale is not None:
            vectors[0], vectors[1] = given.scale, given.shift
        vectors[2, :rows] = given.least
        width = -(-given.best.record_bytes // vectors.itemsize)
        room = np.zeros((rows, width), vectors.dtype)
        c = np.pad(given.c, ((0, 0), (0, 3)))
        (found,) = emulator.run(str(case), [Problem(rows, width, cols, 1, c, vectors, 0, room, order)])
        assert given.best.record_bytes == width * vectors.itemsize
        given.check(found.reshape(-1).view("u1"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_agrees_with_a_sort_on_a_gpu(dtype, case):
    if why := gpu_missing():
        pytest.skip(why)
    import cupy

    from ooc_gemm.cuda_kernels.launch import load

    given, config = Case(dtype, *case), preparations.best(dtype, KINDS[dtype])
    rows, cols = given.c.shape
    c, least = cupy.asarray(given.c), cupy.asarray(given.least)
    records = cupy.full(rows * given.best.record_bytes, 7, "u1")
    vectors = [None if one is None else cupy.asarray(one) for one in (given.scale, given.shift)]
    scale, shift = (np.uintp(0 if one is None else one.data.ptr) for one in vectors)
    args = (
        np.int32(cols), np.uintp(c.data.ptr), np.int64(cols), scale, shift,
        np.int32(given.others), np.int64(given.diagonal), np.int32(given.best.keep), np.int32(given.fresh),
        given.best.dtype.type(-np.inf), np.uintp(least.data.ptr), np.uintp(records.data.ptr),
        np.int64(given.best.record_bytes),
    )  # fmt: skip
    load(config)["best"]((rows,), config.block, args, cupy.cuda.get_current_stream())
    given.check(records.get())
    np.testing.assert_array_equal(least.get(), given.expected()[2])
