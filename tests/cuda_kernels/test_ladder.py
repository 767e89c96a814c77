"""The ladder's kernels on a GPU, in every configuration: the result, and that nothing around it is touched.
(That they compile: test_compile.py; on the CPU: test_emulated.py.)"""

from itertools import product
from typing import Any

import numpy as np
import pytest
from products import as_product

from ooc_gemm.cuda_kernels.catalog import KERNELS
from ooc_gemm.cuda_kernels.config import Config
from ooc_gemm.cuda_kernels.launch import launch, load

LADDER = (
    "naive-uncoalesced", "naive", "tiled", "microtile", "register", "rectangular", "vectorized", "warptile"
)  # fmt: skip
CONFIGS = [
    pytest.param(config, id="-".join((name, dtype, *(str(v) for _, v in config.macros[1:]))))
    for name in LADDER
    for dtype in KERNELS[name].dtypes
    for config in KERNELS[name].configs(dtype, False, False)
]
SHAPES = (
    (1, 1, 1), (2, 3, 5), (17, 129, 3), (129, 257, 17), (128, 256, 64), (300, 260, 77), (130, 66, 0),
    (1, 700, 9), (700, 1, 9),
)  # fmt: skip
FACTORS = ((1, 0), (2, -3), (-1, 1), (0, 2))
PADS = (0, 3, 4)
"""Columns to the right of a matrix that are not part of it: by 4, rows of some shapes begin at 16 bytes."""


def test_the_ladder_comes_first_and_takes_operands_as_stored() -> None:
    assert tuple(KERNELS)[: len(LADDER)] == LADDER
    assert not any(KERNELS[name].transposes for name in LADDER)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
def test_agrees_with_numpy(config: Config) -> None:
    from conftest import gpu_missing

    if why := gpu_missing():
        pytest.skip(why)
    import cupy

    function = load(config)[config.kernel]
    rng = np.random.default_rng(5)
    for (m, n, k), (alpha, beta), pad in product(SHAPES, FACTORS, PADS):
        a, b = stored(rng, m, k, pad, config.dtype), stored(rng, k, n, pad, config.dtype)
        # Two rows more, above and below what the kernel is given.
        before = stored(rng, m + 2, n, pad, config.dtype)
        before[[0, -1]] = poison(config.dtype)
        if beta == 0:
            before[:] = poison(config.dtype)
        want, bound = oracle(a[:, :k], b[:, :n], before[1:-1, :n], alpha, beta)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            left, right, out = (cupy.asarray(x) for x in (a, b, before))
            if alpha == 0:  # then neither is read
                left, right = (cupy.full_like(x, poison(config.dtype)) for x in (left, right))
            given = as_product(
                m, n, k, alpha, left.data.ptr, k + pad, right.data.ptr, n + pad,
                beta, out[1:].data.ptr, n + pad,
            )  # fmt: skip
            launch(function, config, given, stream)
            after = out.get(stream=stream)
            stream.synchronize()
        case = f"m={m} n={n} k={k} α={alpha} β={beta} pad={pad}"
        assert (abs(after[1:-1, :n] - want) <= bound).all(), case  # False where NaN
        after[1:-1, :n] = before[1:-1, :n] = 0
        assert np.array_equal(after, before, equal_nan=config.dtype != "int32"), f"around C, {case}"


def poison(dtype: str) -> float:
    return np.iinfo(dtype).max // 3 if dtype == "int32" else np.nan


def stored(rng: np.random.Generator, rows: int, cols: int, pad: int, dtype: str) -> Any:
    """Random rows, with `pad` poisoned columns to their right."""
    full = np.full((rows, cols + pad), poison(dtype), dtype)
    shape = rows, cols
    full[:, :cols] = rng.integers(-999, 999, shape) if dtype == "int32" else rng.standard_normal(shape)
    return full


def oracle(a: Any, b: Any, c: Any, alpha: int, beta: int) -> tuple[Any, Any]:
    """The result in a wider type, and how far each element may be from it: the rounding of k + 2 operations
    on magnitudes, twice."""
    wide = {"float32": np.float64, "float64": np.longdouble, "int32": np.int64}[a.dtype.name]
    a, b = a.astype(wide), b.astype(wide)
    old = beta * c.astype(wide) if beta else np.zeros(c.shape, wide)
    want = alpha * (a @ b) + old
    if wide is np.int64:
        return want, 0
    unit = np.finfo(c.dtype).eps
    return want, 2 * (a.shape[1] + 3) * unit * (abs(alpha) * (abs(a) @ abs(b)) + abs(old))
