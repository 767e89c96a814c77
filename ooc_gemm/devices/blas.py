"""In-place GEMM (C ← α·op(A)·op(B) + β·C) from the BLAS library that NumPy has loaded.

`numpy.matmul` cannot accumulate: it needs a temporary and one more pass over C for every panel. The
library behind it can, so its CBLAS interface is called directly. Where it is not found (a BLAS that
exports no CBLAS), NumPy with a temporary does the same, slower.
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Gemm = Callable[[Array, Array, Array, complex, complex], None]

_LETTER = {"f": "s", "d": "d", "F": "c", "D": "z"}
_ROW_MAJOR, _NO_TRANS, _TRANS = 101, 111, 112


@lru_cache
def _library() -> tuple[ctypes.CDLL, str, str] | None:
    """The loaded BLAS with a CBLAS interface, and how its names are decorated."""
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


@lru_cache
def gemm(char: str) -> tuple[str, Gemm]:
    """(name, function) for a dtype character. The function takes (a, b, c, α, β): a and b are 2-D, each
    C-contiguous in rows or the transpose of such a view; c likewise but never transposed."""
    found = _library()
    if found is None:
        return "numpy", _with_temporary
    library, prefix, suffix = found
    function = getattr(library, f"{prefix}{_LETTER[char]}gemm{suffix}")
    integer = ctypes.c_int64 if suffix else ctypes.c_int
    is_complex = char in "FD"
    pointer = ctypes.c_void_p
    scalar = pointer if is_complex else {"f": ctypes.c_float, "d": ctypes.c_double}[char]
    function.restype = None
    function.argtypes = [ctypes.c_int] * 3 + [integer] * 3
    function.argtypes += [scalar, pointer, integer, pointer, integer, scalar, pointer, integer]

    def run(a: Array, b: Array, c: Array, alpha: complex, beta: complex) -> None:
        (m, n), k = c.shape, a.shape[1]
        trans_a, lda = _layout(a)
        trans_b, ldb = _layout(b)
        ldc = max(1, c.strides[0] // c.itemsize, n)
        scalars = np.array([alpha, beta], dtype="D").astype(char) if is_complex else None
        if scalars is None:
            x, y = alpha.real, beta.real
        else:
            x, y = scalars[:1].ctypes.data, scalars[1:].ctypes.data
        data_a, data_b, data_c = a.ctypes.data, b.ctypes.data, c.ctypes.data
        function(_ROW_MAJOR, trans_a, trans_b, m, n, k, x, data_a, lda, data_b, ldb, y, data_c, ldc)

    return "blas", run


def _layout(x: Array) -> tuple[int, int]:
    """CBLAS transposition flag and leading dimension of a view. The stride of an axis of one element means
    nothing, and BLAS wants a leading dimension no smaller than a row."""
    if x.strides[1] == x.itemsize or x.shape[1] == 1:
        return _NO_TRANS, max(1, x.strides[0] // x.itemsize, x.shape[1])
    return _TRANS, max(1, x.strides[1] // x.itemsize, x.shape[0])


def _with_temporary(a: Array, b: Array, c: Array, alpha: complex, beta: complex) -> None:
    product = np.matmul(a, b)
    if alpha != 1:
        product *= c.dtype.type(alpha)
    if beta == 0:
        c[...] = product
        return
    if beta != 1:
        c *= c.dtype.type(beta)
    c += product
