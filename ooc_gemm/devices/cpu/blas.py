"""In-place GEMM (C ← α·op(A)·op(B) + β·C) and SYRK (C ← α·A·Aᵀ + β·C) by the BLAS library that NumPy has
loaded.

`numpy.matmul` cannot accumulate: it needs a temporary and one more pass over C for every panel. The
library behind it can, so its CBLAS interface is called directly. If that is not found (some BLAS libraries
export no CBLAS), NumPy does the same with a temporary, more slowly.
"""

import ctypes
import math
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import threadpoolctl
from threadpoolctl import threadpool_limits

from ...support.intervals import ranges
from ...support.shared import Shared

Array = npt.NDArray[Any]
Gemm = Callable[[Array, Array, Array, complex, complex], None]
Syrk = Callable[[Array, Array, complex, complex], None]

_LETTER = {"f": "s", "d": "d", "F": "c", "D": "z"}
_ROW_MAJOR, _NO_TRANS, _TRANS, _LOWER = 101, 111, 112, 122
FIRST_CALL_BYTES = 64 << 20
"""Address space that a thread takes at most when it calls BLAS for the first time. OpenBLAS takes a buffer of
32 MiB."""
_PART = 256
"""Rows, columns and depth of the blocks that `by_parts` multiplies."""


@lru_cache
def _library() -> tuple[ctypes.CDLL, str, str] | None:
    """Return the loaded BLAS that has a CBLAS interface, with the prefix and the suffix of its names."""
    from threadpoolctl import threadpool_info

    for info in threadpool_info():
        if info["user_api"] != "blas":
            continue
        library = ctypes.CDLL(info["filepath"])
        for prefix in ("scipy_cblas_", "cblas_"):
            for suffix in ("64_", "_64", ""):
                if hasattr(library, f"{prefix}sgemm{suffix}"):
                    return library, prefix, suffix
    return None


def _routine(
    library: tuple[ctypes.CDLL, str, str], name: str, char: str, operands: int
) -> tuple[Callable[..., None], int]:
    """Return a routine of the library that multiplies one operand, or two, and the largest size that it
    takes."""
    loaded, prefix, suffix = library
    function = getattr(loaded, f"{prefix}{_LETTER[char]}{name}{suffix}")
    integer = ctypes.c_int64 if suffix else ctypes.c_int
    pointer = ctypes.c_void_p
    scalar = {"f": ctypes.c_float, "d": ctypes.c_double}.get(char, pointer)
    function.restype = None
    function.argtypes = [ctypes.c_int] * 3 + [integer] * (operands + 1)
    function.argtypes += [scalar, *[pointer, integer] * operands, scalar, pointer, integer]
    return function, 2 ** (8 * ctypes.sizeof(integer) - 1) - 1


@lru_cache
def gemm(char: str) -> tuple[str, Gemm]:
    """Return (name, function) for a dtype character. The function takes (a, b, c, α, β): a and b are 2-D,
    each C-contiguous in rows or the transpose of such a view; c likewise but never transposed.

    A complex product follows the formula, re·re − im·im and re·im + im·re, even if a part of it is infinite.
    So an α or β that is real, or has no real part, does not turn the other part into NaN."""
    found = _library()
    if found is None:
        return "numpy", partial(_complex, _with_temporary) if char in "FD" else _with_temporary
    is_complex = char in "FD"
    function, most = _routine(found, "gemm", char, 2)

    def run(a: Array, b: Array, c: Array, alpha: complex, beta: complex) -> None:
        (m, n), k = c.shape, a.shape[1]
        trans_a, lda = _layout(a)
        trans_b, ldb = _layout(b)
        ldc = max(1, c.strides[0] // c.itemsize, n)
        if max(m, n, k, lda, ldb, ldc) > most:  # ctypes would pass on the lowest 32 bits
            _with_temporary(a, b, c, alpha, beta)
            return
        scalars = np.array([alpha, beta], dtype="D").astype(char) if is_complex else None
        if scalars is None:
            x, y = alpha.real, beta.real
        else:
            x, y = scalars[:1].ctypes.data, scalars[1:].ctypes.data
        data_a, data_b, data_c = a.ctypes.data, b.ctypes.data, c.ctypes.data
        function(_ROW_MAJOR, trans_a, trans_b, m, n, k, x, data_a, lda, data_b, ldb, y, data_c, ldc)

    return "blas", partial(_complex, run) if is_complex else run


@lru_cache
def syrk(char: str) -> Syrk | None:
    """Return what multiplies a matrix by its transpose, or None where nothing is faster than `gemm`. The
    function takes (a, c, α, β), arrays as those of `gemm`, and computes α·a·aᵀ + β·c on the diagonal of c and
    below it. What is above the diagonal does not matter afterwards."""
    found = _library()
    if found is None or char in "FD":
        return None
    function, most = _routine(found, "syrk", char, 1)

    def run(a: Array, c: Array, alpha: complex, beta: complex) -> None:
        n, k = a.shape
        trans, lda = _layout(a)
        ldc = max(1, c.strides[0] // c.itemsize, n)
        if max(n, k, lda, ldc) > most:
            _with_temporary(a, a.T, c, alpha, beta)
            return
        data_a, data_c = a.ctypes.data, c.ctypes.data
        function(_ROW_MAJOR, _LOWER, trans, n, k, alpha.real, data_a, lda, beta.real, data_c, ldc)

    return run


def scale_in_place(x: Array, factor: complex) -> None:
    """Compute x ← factor·x. A factor of 0 turns every element into zero. If the factor is real or has no real
    part, a complex x is multiplied part by part, since inf·(2 + 0i) would contain 0·inf, which is NaN."""
    with np.errstate(all="ignore"):
        if factor == 0:
            x[...] = 0
        elif factor == 1:
            return
        elif x.dtype.kind != "c":
            x *= x.dtype.type(factor.real)
        elif factor.imag == 0:
            for part in (x.real, x.imag):
                part *= factor.real
        elif factor.real == 0:
            real = x.real * factor.imag
            np.multiply(x.imag, -factor.imag, out=x.real)
            x.imag = real
        else:
            x *= x.dtype.type(factor)


def by_parts_bytes(dtype: np.dtype[Any]) -> int:
    """Bytes that `by_parts` takes."""
    return 5 * _PART**2 * dtype.itemsize


def by_parts(a: Array, b: Array, c: Array, alpha: complex, beta: complex) -> None:
    """Compute c ← α·a·b + β·c of complex numbers by real products of their parts; β is 0 or 1.

    The library multiplies each sum by α + 0i even if α is 1, and so turns the real part of a sum into NaN if
    its imaginary part is infinite, and vice versa."""
    real = c.real.dtype
    _, run = gemm(real.char)
    for rows in ranges(c.shape[0], _PART):
        for cols in ranges(c.shape[1], _PART):
            out = c[slice(*rows), slice(*cols)]
            product = np.zeros(out.shape, c.dtype)
            sums = np.zeros((2, *out.shape), real)
            for deep in ranges(a.shape[1], _PART):
                left, right = a[slice(*rows), slice(*deep)], b[slice(*deep), slice(*cols)]
                # BLAS wants contiguous matrices, and the parts of complex numbers are not.
                (p, q), (r, s) = ([np.ascontiguousarray(y) for y in (x.real, x.imag)] for x in (left, right))
                for x, y, to, sign in ((p, r, 0, 1.0), (q, s, 0, -1.0), (p, s, 1, 1.0), (q, r, 1, 1.0)):
                    run(x, y, sums[to], sign, 1.0)
            product.real, product.imag = sums
            scale_in_place(product, alpha)
            if beta == 0:
                out[...] = product
            else:
                with np.errstate(all="ignore"):
                    out += product


def _complex(run: Gemm, a: Array, b: Array, c: Array, alpha: complex, beta: complex) -> None:
    """Multiply by `run`, or by `by_parts` if a sum might not be finite."""
    if beta not in (0, 1):
        scale_in_place(c, beta)
        beta = 1.0
    (p, q), most = (_parts(x) for x in (a, b)), float(np.finfo(c.dtype).max) / 4  # the rest is for rounding
    # Two bounds of all sums: the first one takes half the time, the second one holds for larger numbers.
    if _norm(p) * _norm(q) < most or 2.0 * a.shape[1] * _largest(p) * _largest(q) < most:
        run(a, b, c, alpha, beta)
    else:  # also where they are NaN
        by_parts(a, b, c, alpha, beta)


def _parts(x: Array) -> Array:
    """View real and imaginary parts as elements of one matrix."""
    along = x if x.strides[1] == x.itemsize else x.T
    if along.strides[1] != along.itemsize:  # of one row, or one column
        along = np.ascontiguousarray(along)
    return along.view(x.real.dtype)


def _norm(x: Array) -> float:
    """‖x‖_F; infinite if the squares are too large."""
    with np.errstate(all="ignore"):
        return math.sqrt(float(np.vecdot(x, x).sum(dtype=np.float64)))


def _largest(x: Array) -> float:
    """The largest magnitude; NaN if x holds one."""
    with np.errstate(all="ignore"):
        return max(float(x.max()), -float(x.min())) if x.size else 0.0


def _layout(x: Array) -> tuple[int, int]:
    """Return the CBLAS transposition flag and the leading dimension of a view. The stride of an axis of one
    element means nothing, and BLAS requires a leading dimension no smaller than a row."""
    if x.strides[1] == x.itemsize or x.shape[1] == 1:
        return _NO_TRANS, max(1, x.strides[0] // x.itemsize, x.shape[1])
    return _TRANS, max(1, x.strides[1] // x.itemsize, x.shape[0])


def _with_temporary(a: Array, b: Array, c: Array, alpha: complex, beta: complex) -> None:
    with np.errstate(all="ignore"):
        product = np.matmul(a, b)
        scale_in_place(product, alpha)
        if beta == 0:
            c[...] = product
            return
        scale_in_place(c, beta)
        c += product


def room_for_a_first_call() -> mmap.mmap:
    """Reserve address space for the first call of BLAS on a thread, until what this returns is closed. It
    takes no memory. OpenBLAS ends the process where it finds too little. Raises OSError where there is too
    little."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return mmap.mmap(-1, FIRST_CALL_BYTES, **private)


@Shared
@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Make BLAS use only the thread that calls it, in the whole process, while any thread is in this
    context."""
    _let_any_thread_limit()
    limits = threadpool_limits(limits=1, user_api="blas")
    try:
        yield
    finally:
        _let_any_thread_limit()
        limits.restore_original_limits()
        _let_any_thread_limit()


def _let_any_thread_limit() -> None:
    """Allow any thread to change the limit. In threadpoolctl 3.8 only the first thread that limits OpenBLAS
    may, and calls of others are ignored silently. Here the last thread to leave lifts the limit; `Shared`
    serializes them."""
    clear = getattr(threadpoolctl.OpenBLASController, "clear_controlling_thread", None)
    if clear is not None:
        clear(force=True)
