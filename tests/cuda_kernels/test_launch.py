"""Kernels that share the signature of the ladder: what they are launched with, and their results on a GPU."""

import warnings
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from products import as_product

from ooc_gemm.cuda_kernels.catalog import KERNELS
from ooc_gemm.cuda_kernels.compile import arch_of, compile_kernel
from ooc_gemm.cuda_kernels.config import Config
from ooc_gemm.cuda_kernels.ffma import ffma
from ooc_gemm.cuda_kernels.launch import launch, load_module

TRANS = tuple(product((False, True), repeat=2))
SMALL = ffma("float32", False, False)[-1]


@pytest.fixture
def cupy() -> Any:
    """CuPy, on a machine with a GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns about machines without CUDA
        try:
            import cupy

            count = cupy.cuda.runtime.getDeviceCount()
        except Exception as error:
            pytest.skip(f"no CUDA device: {error}")
    if count == 0:
        pytest.skip("no CUDA device")
    return cupy


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, *call: Any) -> None:
        self.calls.append(call)


def test_launch_passes_typed_arguments() -> None:
    function = _Recorder()
    config = Config("some", "float32", 32, 32, (64, 1), ())
    launch(function, config, as_product(33, 32, 0, 2, 256, 5, 512, 6, 0.5, 2**63, 7), stream="s")
    ((grid, block, args, stream, shared),) = function.calls
    assert (grid, block, shared, stream) == ((2,), (64, 1), 0, "s")
    assert [arg.dtype.char for arg in args] == ["l", "l", "l", "f", "L", "l", "L", "l", "f", "L", "l"]
    assert args == (33, 32, 0, 2, 256, 5, 512, 6, 0.5, 2**63, 7)


def test_nothing_is_launched_for_an_empty_result() -> None:
    function = _Recorder()
    launch(function, SMALL, as_product(0, 32, 8, 1, 0, 8, 0, 32, 0, 0, 32), stream=None)
    launch(function, SMALL, as_product(32, 0, 8, 1, 0, 8, 0, 1, 0, 0, 1), stream=None)
    assert function.calls == []


def test_int64_takes_integer_factors_only() -> None:
    half = as_product(1, 1, 1, 0.5, 0, 1, 0, 1, 0, 0, 1)
    with pytest.raises(ValueError, match="integers"):
        launch(_Recorder(), replace(SMALL, dtype="int64"), half, None)


SHAPES = (
    (1, 1, 1), (2, 3, 2), (3, 17, 129), (17, 2, 3), (129, 257, 17), (257, 129, 8), (128, 128, 64),
    (130, 1, 257), (1, 258, 9), (129, 130, 0), (4100, 5, 7), (5, 4100, 7),
)  # fmt: skip
FACTORS = ((1, 0), (2, -3), (-1, 1), (0, 2))
LAUNCHED = [
    (name, dtype, *trans)
    for name, kernel in KERNELS.items()
    if kernel.launcher == "launch" and kernel.transposes  # the ladder: test_ladder.py
    for dtype in kernel.dtypes
    for trans in (TRANS if kernel.transposes else TRANS[:1])
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype", "trans_a", "trans_b"), LAUNCHED)
def test_kernel_agrees_with_numpy(cupy: Any, name: str, dtype: str, trans_a: bool, trans_b: bool) -> None:
    arch = arch_of(cupy.cuda.Device().compute_capability)
    for config in KERNELS[name].configs(dtype, trans_a, trans_b):
        function = load_module(compile_kernel(config, arch), config)[config.kernel]
        rng = np.random.default_rng(5)
        for (m, n, k), (alpha, beta), pad in product(SHAPES, FACTORS, (0, 3)):
            a = _stored(rng, (k, m) if trans_a else (m, k), pad, dtype)
            b = _stored(rng, (n, k) if trans_b else (k, n), pad, dtype)
            c = _stored(rng, (m, n), pad, dtype)
            if beta == 0:
                c[:] = _poison(dtype)
            before = c.copy()
            with cupy.cuda.Stream(non_blocking=True) as stream:
                da, db, dc = (cupy.asarray(x) for x in (a, b, c))
                left, right, out = ((x.data.ptr, x.shape[1]) for x in (da, db, dc))
                launch(function, config, as_product(m, n, k, alpha, *left, *right, beta, *out), stream)
                c = dc.get(stream=stream)
                stream.synchronize()
            want, bound = _oracle(a, b, before, m, n, k, alpha, beta, trans_a, trans_b)
            case = f"{config} m={m} n={n} k={k} α={alpha} β={beta} pad={pad}"
            # Written so that NaN fails.
            assert (abs(c[:, :n] - want) <= bound).all(), case
            assert np.array_equal(c[:, n:], before[:, n:], equal_nan=dtype[0] == "f"), f"padding of C, {case}"


def _poison(dtype: str) -> float:
    return np.nan if dtype[0] == "f" else np.iinfo(dtype).max // 3


def _stored(rng: np.random.Generator, shape: tuple[int, int], pad: int, dtype: str) -> np.ndarray:
    """Random rows, with `pad` poisoned columns to their right."""
    rows, cols = shape
    full = np.full((rows, cols + pad), _poison(dtype), dtype)
    largest = {"int32": 2**9, "int64": 2**25}.get(dtype)
    random = rng.standard_normal(shape) if largest is None else rng.integers(-largest, largest, shape)
    full[:, :cols] = random
    return full


def _oracle(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    m: int,
    n: int,
    k: int,
    alpha: int,
    beta: int,
    ta: bool,
    tb: bool,
) -> tuple[np.ndarray, np.ndarray | int]:
    """The result by NumPy in float64 or int64, and how far each element may be from it: the rounding
    of k + 2 operations on magnitudes, and the oracle's own."""
    wide = np.int64 if a.dtype.kind == "i" else np.float64
    left = (a[:, :m].T if ta else a[:, :k]).astype(wide)
    right = (b[:, :k].T if tb else b[:, :n]).astype(wide)
    old = c[:, :n].astype(wide) * beta if beta else np.zeros((m, n), wide)
    want = alpha * (left @ right) + old
    if wide is np.int64:
        return want, 0
    return want, 2 * (k + 3) * np.finfo(a.dtype).eps * (abs(alpha) * (abs(left) @ abs(right)) + abs(old))
