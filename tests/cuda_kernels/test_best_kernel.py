"""kernels/prepare/best.cu against a sort: on the emulator of kernels, and on a GPU."""

from itertools import cycle

import numpy as np
import pytest
from conftest import gpu_missing

from ooc_gemm.cuda_kernels import preparations
from ooc_gemm.cuda_kernels.config import Config
from ooc_gemm.engine.reduction import Best
from ooc_gemm.ladder.emulator import ORDERS, SIGNATURE, Emulator, Problem, compiler_missing, whole_source

KINDS = {"float32": "float32", "float64": "float64", "int32": "float64", "int64": "float64"}
"""Types of C, and of scores."""
CASES = [
    # rows, columns of the block, and before it, keep, column of row 0 itself (or none), what is special
    (3, 700, 0, 1, None, ""), (5, 3000, 0, 16, -2, "scaled"), (2, 40, 0, 100, 30, ""),
    (2, 2000, 0, 128, None, "ties"), (3, 2600, 0, 7, 2598, "equal"), (2, 1, 0, 3, 0, ""),
    (3, 5000, 0, 10, None, "nothing"), (2, 1500, 900, 20, None, ""), (2, 4000, 30, 20, None, "equal"),
    (2, 3000, 5, 20, 7, "equal"), (2, 300, 70, 128, 299, "ties"), (2, 300, 1, 2, 3, "scaled"),
]  # fmt: skip
SOURCE = """
static int atomicAdd(int* at, int x) {{ const int old = *at; *at += x; return old; }}
{kernel}
extern "C" __global__ void called({signature}) {{
    best(k, reinterpret_cast<const T*>(A), lda, {scaled} ? B : nullptr, {scaled} ? B + ldb : nullptr,
         {others}, {first}, {diagonal}, {keep}, {fresh}, -S(__builtin_inf()), reinterpret_cast<char*>(C),
         ldc * sizeof(S));
}}
"""
"""Gives the kernel the arguments of a product: C as A; scale and shift as rows of B; records as C."""


class Case:
    """A block of C, and what was found in the columns before it."""

    def __init__(self, dtype, rows, cols, before, keep, diagonal, special):
        rng, scores = np.random.default_rng(4), np.dtype(KINDS[dtype])
        self.c = rng.integers(-(10**6), 10**6, (rows, cols)).astype(dtype)
        self.past = rng.integers(-(10**6), 10**6, (rows, before)).astype(scores)
        if special == "ties":
            self.c //= 10**5
            self.past //= 10**5
        if special == "equal":
            self.c[1:] = self.past[:, :2] = 3
        if special == "nothing":
            self.c[0, 7:] = np.nan if np.dtype(dtype).kind == "f" else 0
        self.scale = self.shift = None
        if special == "scaled":
            self.scale, self.shift = (rng.integers(1, 9, cols).astype(scores) for _ in range(2))
            self.shift[::3] = np.inf
        self.others, self.diagonal = diagonal is not None, diagonal or 0
        self.best = Best(keep, scores, self.scale, self.shift, self.others)

    @property
    def records(self):
        """What the kernel is given: bytes."""
        records = np.full(len(self.c) * self.best.record_bytes, 7, "u1")
        if self.past.shape[1]:
            scores, columns = self.best.records(records, len(self.c))
            scores[...], columns[...] = self._best_of(self.past)
        return records

    def _best_of(self, x):
        """Scores and columns, best first."""
        keep = self.best.keep
        x = np.pad(x, ((0, 0), (0, keep)), constant_values=-np.inf)
        order = np.lexsort((np.broadcast_to(np.arange(x.shape[1]), x.shape), -x), axis=1)[:, :keep]
        scores = np.take_along_axis(x, order, 1)
        return scores, np.where(np.isneginf(scores), -1, order)

    def check(self, records):
        x, rows = self.c.astype(self.best.dtype), np.arange(len(self.c))
        with np.errstate(invalid="ignore"):
            if self.scale is not None:
                x = x * self.scale - self.shift
        if self.others:
            x[rows[:, None] + self.diagonal == np.arange(x.shape[1])] = -np.inf
        x[np.isnan(x)] = -np.inf
        scores, columns = self._best_of(np.hstack([self.past, x]))
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
        others=int(given.others), diagonal=given.diagonal, keep=given.best.keep,
        first=given.past.shape[1], fresh=int(not given.past.size),
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
        vectors = np.zeros((3, max(rows, cols)), given.best.dtype)
        if given.scale is not None:
            vectors[0], vectors[1] = given.scale, given.shift
        width = -(-given.best.record_bytes // vectors.itemsize)
        room = given.records.view(vectors.dtype).reshape(rows, width)
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
    c, records = cupy.asarray(given.c), cupy.asarray(given.records)
    vectors = [None if one is None else cupy.asarray(one) for one in (given.scale, given.shift)]
    scale, shift = (np.uintp(0 if one is None else one.data.ptr) for one in vectors)
    args = (
        np.int32(cols), np.uintp(c.data.ptr), np.int64(cols), scale, shift,
        np.int32(given.others), np.int32(given.past.shape[1]), np.int64(given.diagonal),
        np.int32(given.best.keep), np.int32(not given.past.size), given.best.dtype.type(-np.inf),
        np.uintp(records.data.ptr), np.int64(given.best.record_bytes),
    )  # fmt: skip
    load(config)["best"]((rows,), config.block, args, cupy.cuda.get_current_stream())
    given.check(records.get())
