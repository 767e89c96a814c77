"""Calls cuBLAS on row-major matrices."""

from typing import Any

import numpy as np

from .product import Product

_TYPES = {
    "float16": 2, "float32": 0, "float64": 1, "int8": 3, "int32": 10, "complex64": 4, "complex128": 5
}  # fmt: skip
"""NumPy's name of a type → cudaDataType."""
_COMPUTE = {"float64": 70, "complex128": 70, "int32": 72}
_COMPUTE_32F, _COMPUTE_TF32 = 68, 77
"""cublasComputeType. For types of C that _COMPUTE does not hold it is _COMPUTE_32F."""
_DEFAULT_ALGORITHM = -1


def operation(transpose: bool, conjugate: bool = False) -> int:
    """Return the cublasOperation for an operand as it is stored. cuBLAS conjugates only what it
    transposes."""
    return (2 if conjugate else 1) if transpose else 0


def gemm(
    cuda: Any,
    product: Product,
    stream: Any,
    *,
    operations: tuple[int, int],
    types: tuple[str, str],
    tf32: bool = False,
) -> None:
    """Start a product in a CuPy stream of the current device. Returns at once.

    `cuda`: CuPy's module of that name. `operations`: of A and of B, see `operation`. `types`: NumPy's names
    for the type of A and B, and for that of C, α and β. `tf32`: whether float32 may be rounded to TF32.
    cuBLAS is column-major, so it is asked for Cᵀ = op(B)ᵀ·op(A)ᵀ, each as it lies.
    """
    a, b, c, (dtype, out) = product.a, product.b, product.c, types
    alpha, beta = _scalars(product, out)
    compute = _COMPUTE_TF32 if tf32 else _COMPUTE.get(out, _COMPUTE_32F)
    handle = cuda.device.get_cublas_handle()  # the calling thread's
    with stream:  # CuPy sets cuBLAS's stream to the current one in every call
        cuda.cublas.gemmEx(
            handle, operations[1], operations[0], product.n, product.m, product.k, alpha.ctypes.data,
            b.ptr, _TYPES[dtype], b.ld, a.ptr, _TYPES[dtype], a.ld, beta.ctypes.data,
            c.ptr, _TYPES[out], c.ld, compute, _DEFAULT_ALGORITHM,
        )  # fmt: skip


def gemm_batch(
    cuda: Any,
    product: Product,
    stream: Any,
    *,
    operations: tuple[int, int],
    dtype: str,
    count: int,
    steps: tuple[int, int, int],
) -> None:
    """Start `count` products of one shape, as `gemm` starts one. `product`: the first. `dtype`: NumPy's name
    for the type of all elements. `steps`: elements from the first of A, B and C to those of the next
    product."""
    a, b, c, kind = product.a, product.b, product.c, _TYPES[dtype]
    alpha, beta = _scalars(product, dtype)
    handle = cuda.device.get_cublas_handle()
    with stream:
        cuda.cublas.gemmStridedBatchedEx(
            handle, operations[1], operations[0], product.n, product.m, product.k, alpha.ctypes.data,
            b.ptr, kind, b.ld, steps[1], a.ptr, kind, a.ld, steps[0], beta.ctypes.data,
            c.ptr, kind, c.ld, steps[2], count, _COMPUTE.get(dtype, _COMPUTE_32F), _DEFAULT_ALGORITHM,
        )  # fmt: skip


def _scalars(product: Product, out: str) -> tuple[Any, Any]:
    """Return arrays of one element, α and β, in the type of C."""
    total = np.dtype(out)
    scalars = np.array([product.alpha, product.beta], dtype="D")
    scalars = scalars.astype(total) if total.kind == "c" else scalars.real.astype(total)
    return scalars[:1], scalars[1:]
