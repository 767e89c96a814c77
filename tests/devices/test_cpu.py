"""The CPU as a device: its arithmetic, its limits, and products by BLAS."""

import numpy as np
import pytest
from arrays import assert_close, matrix

from ooc_gemm import InputError
from ooc_gemm.devices.cpu import blas
from ooc_gemm.devices.cpu.blas import one_blas_thread
from ooc_gemm.devices.cpu.device import CPU

BOUND = {"f": 1e-6, "d": 1e-14, "F": 1e-6, "D": 1e-14}


def arithmetic(a, b, out, bound=1, kernel="auto"):
    return CPU().arithmetic(*map(np.dtype, (a, b, out)), (10, 10, 10), bound, kernel, "highest")


@pytest.mark.parametrize("char", BOUND)
@pytest.mark.parametrize(("alpha", "beta"), [(1, 0), (2, -3), (-1, 1), (0, 2), (0.5, 0.5)])
def test_blas_multiplies_and_accumulates(char, alpha, beta):
    """Also views whose rows lie apart, and transposed ones; C is not read where β is 0."""
    _, run = blas.gemm(char)
    wide = "D" if char in "FD" else "d"
    for m, n, k in ((1, 1, 1), (3, 5, 7), (300, 2, 290), (4, 6, 0)):
        a, b = matrix((m + 2, k + 3), char, 1)[:m, :k], matrix((n, k), char, 2).T
        c = np.full((m, n), np.nan, char) if beta == 0 else matrix((m, n), char, 3)
        want = alpha * (a.astype(wide) @ b.astype(wide)) + (beta * c.astype(wide) if beta else 0)
        run(a, b, c, complex(alpha), complex(beta))
        assert_close(c, want, BOUND[char])


@pytest.mark.parametrize("char", BOUND)
def test_without_a_blas_library_numpy_multiplies(char, monkeypatch):
    monkeypatch.setattr(blas, "_library", lambda: None)
    name, run = blas.gemm.__wrapped__(char)
    a, b, c = (matrix(shape, char, i) for i, shape in enumerate(((20, 30), (30, 10), (20, 10))))
    wide = "D" if char in "FD" else "d"
    want = 2 * (a.astype(wide) @ b.astype(wide)) - c
    run(a, b, c, 2 + 0j, -1 + 0j)
    assert name == "numpy"
    assert_close(c, want, BOUND[char])


@pytest.mark.parametrize("char", "FD")
def test_complex_products_follow_the_formula_where_parts_are_infinite(char):
    _, run = blas.gemm(char)
    a, b = np.array([[complex(np.inf, 1)]], char), np.array([[2 + 0j]], char)
    c = np.zeros((1, 1), char)
    run(a, b, c, 1 + 0j, 0j)
    assert c[0, 0].real == np.inf
    assert np.isnan(c[0, 0].imag)  # ∞·0 + 1·2
    big = np.array([[complex(np.finfo(char).max, 0)]], char)
    run(big, np.array([[2 + 0j]], char), c, 1 + 0j, 0j)
    assert c[0, 0].real == np.inf
    assert c[0, 0].imag == 0


@pytest.mark.parametrize(("factor", "want"), [(0, 0), (1, np.inf), (2, np.inf), (-1, -np.inf)])
def test_scaling_keeps_what_is_infinite(factor, want):
    x = np.array([complex(np.inf, 3)])
    blas.scale_in_place(x, complex(factor))
    assert x[0].real == want
    assert x[0].imag == 3 * factor


def test_scaling_by_an_imaginary_number():
    x = np.array([complex(np.inf, 3)])
    blas.scale_in_place(x, 2j)
    assert (x[0].real, x[0].imag) == (-6, np.inf)


def test_integers_are_multiplied_exactly():
    """As many products at a time as the panel's type adds up exactly."""
    small, large = arithmetic("i1", "i1", "i4"), arithmetic("i2", "i1", "i8", 2**40)
    assert (small.panel, small.block, small.exact) == (np.float32, np.int32, True)
    assert (large.panel, large.block, large.exact) == (np.float64, np.int64, True)
    assert arithmetic("i4", "i1", "i8").panel == np.float64
    assert arithmetic("i1", "u8", "i8").panel == np.int64
    assert arithmetic("f2", "f2", "f4").panel == np.float32


def test_a_kernel_that_the_cpu_does_not_have_is_refused():
    with pytest.raises(InputError, match="kernel 'cublas' cannot multiply float32 by float32 on the CPU"):
        arithmetic("f4", "f4", "f4", kernel="cublas")
    found = arithmetic("f4", "f4", "f4")
    assert arithmetic("f4", "f4", "f4", kernel=found.kernel) == found


def test_memory_and_rates_follow_the_number_of_threads():
    chosen = arithmetic("f4", "f4", "f4")
    one, four = CPU(threads=1), CPU(threads=4)
    assert one.limits(chosen, None).device is None
    assert four.limits(chosen, None).workspace == 4 * one.limits(chosen, None).workspace
    assert four.rates(chosen).flops == 4 * one.rates(chosen).flops
    assert four.rates(chosen).flops < four.most_flops("blas", "float32")
    assert four.model.endswith("4 threads")


def test_blas_has_its_threads_back():
    from threadpoolctl import threadpool_info

    before = threadpool_info()
    with one_blas_thread:
        assert {info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas"} == {1}
    assert threadpool_info() == before
