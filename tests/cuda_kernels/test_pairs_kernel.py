"""kernels/prepare/pairs.cu against NumPy: on the emulator of kernels, and with what calls it on a GPU."""

from itertools import product

import numpy as np
import pytest
from conftest import gpu_missing

from ooc_gemm.cuda_kernels import preparations
from ooc_gemm.cuda_kernels.config import Config
from ooc_gemm.engine.reduction import Pairs
from ooc_gemm.ladder.emulator import ORDERS, SIGNATURE, Emulator, Problem, compiler_missing, whole_source

TYPES = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]

ROWS, OTHERS, KEEP = 5, 37, 11
CASES = list(product((("float32", "float32"), ("int8", "float64"), ("float64", "uint16")), (1, 70)))
"""Types of rows of A and of B, and elements of a row."""
SOURCE = """
template <class X> static X __shfl_xor_sync(unsigned, X x, int apart) {{
    static X lanes[256];
    lanes[threadIdx.x] = x;
    __syncwarp();
    const X found = lanes[threadIdx.x ^ apart];
    __syncwarp();
    return found;
}}
{kernel}
extern "C" __global__ void called({signature}) {{
    const auto left = reinterpret_cast<const LEFT*>(A);
    const auto right = reinterpret_cast<const RIGHT*>(B);
    const auto columns = reinterpret_cast<const int*>(B + {columns});
    {call};
}}
"""
"""Gives the kernels the arguments of a product. A: rows of A. B: rows of B, then columns and norms."""
CALLS = {
    "products": "pairs({keep}, {depth}, left, right, columns, 0, C, C + {pairs})",
    "differences": "pairs({keep}, {depth}, left, right, columns, 1, C, nullptr)",
    "squares": "squares({others}, {depth}, right, C)",
    "totals": "totals({others}, {depth}, right, B + {norms}, C)",
}


def whole(*arrays):
    """Arrays one behind the other as float64, each in a whole number of them; and where each begins."""
    parts = [np.frombuffer(x.tobytes() + bytes(-x.nbytes % 8), "f8") for x in arrays]
    return np.concatenate(parts), np.cumsum([0, *map(len, parts)])


@pytest.mark.slow
def test_it_agrees_with_numpy_on_the_emulator(tmp_path):
    if why := compiler_missing():
        pytest.skip(why)
    rng, kernels, problems = np.random.default_rng(6), {}, []
    for number, ((types, depth), (name, call)) in enumerate(product(CASES, CALLS.items())):
        a, b = (
            (rng.random((rows, depth)) * 90).astype(kind)
            for rows, kind in zip((ROWS, OTHERS), types, strict=True)
        )
        columns = rng.integers(-1, OTHERS, (ROWS, KEEP)).astype("i4")
        norms = np.square(b.astype("f8")).sum(1)
        norms[3] = np.inf
        (left, _), (right, starts) = whole(a), whole(b, columns, norms)
        size = max(len(right), ROWS * KEEP + ROWS, depth)
        x, y = a.astype("f8")[:, None], b.astype("f8")[columns]
        there = columns >= 0
        expected = {
            "products": [((x * y).sum(2) * there).ravel(), np.square(x).sum((1, 2))],
            "differences": [(np.square(x - y).sum(2) * there).ravel()],
            "squares": [np.square(b.astype("f8")).sum(1)],
            "totals": [b.astype("f8")[np.arange(OTHERS) != 3].sum(0)],
        }[name]
        config = preparations.pairs(*types)
        values = {"keep": KEEP, "depth": depth, "pairs": ROWS * KEEP, "others": OTHERS, "norms": starts[2]}
        source = SOURCE.format(
            kernel=whole_source("pairs"),
            signature=SIGNATURE.replace("T ", "double ").replace("T*", "double*"),
            columns=starts[1], call=call.format(**values),
        )  # fmt: skip
        own = [(kernel, f"{kernel}{number}") for kernel in ("pairs", "squares", "totals")]
        kernels[f"{number}"] = (
            Config("called", "float64", 1, 1 << 20, config.block, (*config.macros, *own)),
            source,
        )
        blocks = {"squares": -(-OTHERS // 8), "totals": 1}.get(name, ROWS)
        room = np.full((1, size), np.nan)
        given = Problem(
            blocks, size, len(left), 1, left[None], np.pad(right, (0, size - len(right)))[None], 0, room,
            ORDERS[number % 3],
        )  # fmt: skip
        problems.append((given, np.concatenate(expected)))
    emulator = Emulator(tmp_path, kernels)
    for number, (given, expected) in enumerate(problems):
        (found,) = emulator.run(f"{number}", [given])
        np.testing.assert_allclose(found[0, : len(expected)], expected, rtol=1e-13)
        assert np.isnan(found[0, len(expected) :]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [1, 31, 700])
@pytest.mark.parametrize("right", TYPES)
@pytest.mark.parametrize("left", [None, "f4", "f2"])
def test_it_agrees_with_numpy_on_a_gpu(left, right, depth):
    if why := gpu_missing():
        pytest.skip(why)
    from ooc_gemm.devices.cuda.device import CUDA

    rng = np.random.default_rng(5)
    b = (rng.standard_normal((333, depth)) * 50).astype(right)
    if b.dtype.kind == "f":
        b[7, -1], b[9, 0] = np.inf, np.nan
    a = b if left is None else rng.standard_normal((40, depth)).astype(left)
    scorer = CUDA().scorer(Pairs((len(a), 333), depth, b.dtype, left and a.dtype, 11))
    try:
        for start in range(0, 333, 100):  # in pieces, of which one is stored transposed
            part = b[start : start + 100]
            half = depth // 2
            scorer.put("right", part[:, :half], start, 0)
            scorer.put("right", np.asfortranarray(part)[:, half:], start, half)
        norms, totals = scorer.norms()
        with np.errstate(all="ignore"):
            wide, expected = b.astype("f8"), np.square(b.astype("f8")).sum(1)
            np.testing.assert_allclose(norms, expected, rtol=1e-13)
            np.testing.assert_allclose(totals, wide[np.isfinite(expected)].sum(0), rtol=1e-11, atol=1e-9)
        for first in (0,) if left else (0, 20, 300):
            some = a[first : first + 33]
            if left:
                scorer.put("left", some, 0, 0)
            columns = rng.integers(-1, 333, (len(some), 11))
            for differences in (False, True):
                sums, squares = scorer.sums(columns, first, differences)
                with np.errstate(all="ignore"):
                    x, y = some.astype("f8")[:, None], wide[columns]
                    pairs = np.where(columns[..., None] < 0, 0, np.square(x - y) if differences else x * y)
                    np.testing.assert_allclose(sums, pairs.sum(2), rtol=1e-11, atol=1e-9)
                    np.testing.assert_allclose(squares, np.square(some.astype("f8")).sum(1), rtol=1e-13)
    finally:
        scorer.close()
