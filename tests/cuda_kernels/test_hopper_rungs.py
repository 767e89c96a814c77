"""The last rungs of the ladder, on Hopper's tensor cores. (That they compile: test_compile.py.)"""

from itertools import product
from typing import Any

import numpy as np
import pytest
from products import as_product

from ooc_gemm.cuda_kernels.build import shipped
from ooc_gemm.cuda_kernels.catalog import KERNELS
from ooc_gemm.cuda_kernels.compile import kernel_source
from ooc_gemm.cuda_kernels.config import Config
from ooc_gemm.cuda_kernels.product import Strips
from ooc_gemm.devices.cuda.choice import Case, arithmetic, fastest

RUNGS = "warpgroup", "ring", "producer", "clusters"
CONFIGS = [
    pytest.param(name, config, id=f"{name}-{config.value('BM')}x{config.bn}")
    for name in RUNGS
    for config in KERNELS[name].configs("float16", False, False)
]
SHAPES = (
    (1, 1, 1), (2, 3, 17), (129, 193, 65), (128, 256, 64), (257, 385, 129), (300, 70, 1025), (1, 2000, 3),
    (2000, 1, 3), (130, 200, 0), (513, 257, 640), (4099, 2051, 331),
)  # fmt: skip
"""The last one has more tiles than a device has multiprocessors."""
FACTORS = ((1, 0), (2, -3), (0, 2))
PADS = 0, 3
"""Columns of C past its last: with either, some of SHAPES have rows that start at multiples of 8 bytes."""
EPS = 2.0**-20
"""Error of a sum, relative to |A|·|B|, with room for how the tensor cores add up."""


def test_they_follow_the_classical_ladder_in_short_files() -> None:
    names = list(KERNELS)
    at = names.index("warptile") + 1
    assert tuple(names[at : at + len(RUNGS)]) == RUNGS
    assert all(kernel_source(name).count("\n") <= 220 for name in RUNGS)


@pytest.mark.parametrize("name", RUNGS)
def test_they_are_taken_only_where_they_are_named(name: str) -> None:
    half, single = np.dtype("float16"), np.dtype("float32")

    def case_of(dtype: Any, capability: int) -> Case:
        return Case(dtype, dtype, single, (8192, 8192, 8192), 0, "high", capability)

    case = case_of(half, 90)
    assert fastest(case).kernel not in RUNGS
    assert name not in {config.kernel for config in shipped("sm_90a")}
    found = arithmetic(name, case, "named")
    assert found
    assert (found.panel, found.block, found.along_k) == (half, single, (True, False))
    assert arithmetic(name, case_of(half, 80), "named") is None
    assert arithmetic(name, case_of(single, 90), "named") is None


@pytest.fixture
def cupy() -> Any:
    """CuPy, on a machine with a Hopper GPU."""
    from conftest import gpu_missing

    if why := gpu_missing():
        pytest.skip(why)
    import cupy

    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("wgmma exists on compute capability 9.0 only")
    return cupy


def stored(cupy: Any, values: np.ndarray) -> Any:
    """On the device, in rows of a multiple of 256 bytes, poison past their ends and below the last."""
    full = np.full((values.shape[0] + 1, -(-max(1, values.shape[1]) // 128) * 128), np.nan, values.dtype)
    full[:-1, : values.shape[1]] = values
    return cupy.asarray(full)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "config"), CONFIGS)
def test_agrees_with_numpy(cupy: Any, name: str, config: Config) -> None:
    from ooc_gemm.cuda_kernels.wgmma import open_tensor_gemm

    gemm = open_tensor_gemm(name, False, False, "float16", "float16", config)
    rng, stream = np.random.default_rng(7), cupy.cuda.Stream(non_blocking=True)
    for m, n, k in SHAPES:
        a, b = rng.standard_normal((m, k)).astype("f2"), rng.standard_normal((k, n)).astype("f2")
        da, db = stored(cupy, a), stored(cupy, b)
        x, y = a.astype("f8"), b.astype("f8")
        exact, magnitude = x @ y, abs(x) @ abs(y)
        for (alpha, beta), pad in product(FACTORS, PADS):
            # Two rows more, above and below what the kernel is given.
            before = rng.standard_normal((m + 2, n + pad)).astype("f4")
            before[[0, -1]] = before[:, n:] = np.nan
            if beta == 0:
                before[:] = np.nan
            out = cupy.asarray(before)
            cupy.cuda.runtime.deviceSynchronize()
            left, right, target = ((x.data.ptr, x.shape[1]) for x in (da, db, out[1:]))
            gemm(as_product(m, n, k, alpha, *left, *right, beta, *target), stream)
            stream.synchronize()
            after, old = out.get(), before[1:-1, :n].astype("f8") * beta if beta else np.zeros((m, n))
            error = abs(after[1:-1, :n] - (alpha * exact + old))
            case = f"m={m} n={n} k={k} α={alpha} β={beta} pad={pad}"
            bound = 2 * EPS * (abs(alpha) * magnitude + abs(old)) + 1e-30
            assert (error <= bound).all(), case  # False where NaN
            after[1:-1, :n] = before[1:-1, :n] = 0
            assert np.array_equal(after, before, equal_nan=True), f"around C, {case}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", RUNGS)
def test_a_symmetric_result_is_made_up_to_the_diagonal(cupy: Any, name: str) -> None:
    from ooc_gemm.cuda_kernels.wgmma import open_tensor_gemm

    rng, (m, k), stream = np.random.default_rng(3), (1500, 200), cupy.cuda.get_current_stream()
    a = rng.standard_normal((m, k)).astype("f2")
    da, db, found = stored(cupy, a), stored(cupy, np.ascontiguousarray(a.T)), cupy.zeros((m, m), "f4")
    left, right = ((x.data.ptr, x.shape[1]) for x in (da, db))
    given = as_product(m, m, k, 1, *left, *right, 0, found.data.ptr, m)
    open_tensor_gemm(name, False, False, "float16", "float16")(given, stream, strips=Strips(lower=True))
    x = a.astype("f8")
    assert not np.tril(abs(found.get() - x @ x.T) > 2 * EPS * (abs(x) @ abs(x.T))).any()
