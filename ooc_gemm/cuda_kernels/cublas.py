"""cuBLAS, on matrices in rows."""

from typing import Any

import numpy as np

_TYPES = {
    "float16": 2, "float32": 0, "float64": 1, "int8": 3, "int32": 10, "complex64": 4, "complex128": 5
}  # fmt: skip
"""NumPy's name of a type → cudaDataType."""
_COMPUTE = {"float64": 70, "complex128": 70, "int32": 72}
_COMPUTE_32F, _COMPUTE_TF32 = 68, 77
"""cublasComputeType; of other types of C it is _COMPUTE_32F."""
_DEFAULT_ALGORITHM = -1


def operation(transpose: bool, conjugate: bool = False) -> int:
    """The cublasOperation of an operand as it is stored. It conjugates only what it transposes."""
    return (2 if conjugate else 1) if transpose else 0


def gemm(
    cuda: Any, m: int, n: int, k: int, alpha: complex, a: int, lda: int, b: int, ldb: int, beta: complex,
    c: int, ldc: int, stream: Any, *, operations: tuple[int, int], types: tuple[str, str], tf32: bool = False,
) -> None:  # fmt: skip
    """C ← α·op(A)·op(B) + β·C on a CuPy stream of the current device; returns at once.

    `cuda`: CuPy's module of that name. `a`, `lda`, …: addresses of row-major matrices, and elements from one
    row to the next. `operations`: of A and of B, see `operation`. `types`: NumPy's names for the type of A
    and B, and for that of C, α and β. `tf32`: float32 may be rounded to TF32. cuBLAS is column-major, so it
    is asked for Cᵀ = op(B)ᵀ·op(A)ᵀ, each as it lies.
    """
    dtype, out = types
    total = np.dtype(out)
    scalars = np.array([alpha, beta], dtype="D")
    scalars = scalars.astype(total) if total.kind == "c" else scalars.real.astype(total)
    compute = _COMPUTE_TF32 if tf32 else _COMPUTE.get(out, _COMPUTE_32F)
    handle = cuda.device.get_cublas_handle()  # the calling thread's
    with stream:  # CuPy sets cuBLAS's stream to the current one in every call
        cuda.cublas.gemmEx(
            handle, operations[1], operations[0], n, m, k, scalars[:1].ctypes.data, b, _TYPES[dtype], ldb,
            a, _TYPES[dtype], lda, scalars[1:].ctypes.data, c, _TYPES[out], ldc, compute, _DEFAULT_ALGORITHM,
        )  # fmt: skip
