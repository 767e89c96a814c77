"""complex64 by real products on the tensor cores.

as a rule      B is doubled, A taken as it lies; the real product writes C        (embed.cu)
few rows of C  A is prepared, B taken as it lies; C is made of a product's rows   (embed.cu, combine.cu)
"""

from typing import Any

import numpy as np

from . import catalog
from .nvrtc import Config
from .tensor import load, split_pays
from .tiles import ceil_div, round_up
from .wgmma import Wgmma


class ComplexGemm:
    """complex64 by a float32 product of twice the sizes (kernels/embed.cu); called like Wgmma, with leading
    dimensions in complex elements. `conjugate_a`, `conjugate_b`: the adjoint, where also transposed."""

    def __init__(
        self,
        trans_a: bool,
        trans_b: bool,
        conjugate_a: bool = False,
        conjugate_b: bool = False,
        config: Config | None = None,
    ):
        self._trans_a, self._trans_b, self._chooses = trans_a, trans_b, config is None
        self.real = Wgmma("fp16x3", trans_a, trans_b, "float32", "float32", config)

        def embed(mode: str, *conjugate: bool) -> Any:
            return load(catalog.embed(mode, *conjugate))["embed"]

        self._double = {
            "a": embed("double n" if trans_a else "double k", conjugate_a, conjugate_b),
            "b": embed("double k" if trans_b else "double n", conjugate_b, conjugate_a),
        }
        self._rows = embed("rows")
        self._combine = load(catalog.combine(not trans_b, conjugate_a, conjugate_b))["combine"]

    def __call__(
        self,
        m: int,
        n: int,
        k: int,
        alpha: complex,
        a_ptr: int,
        lda: int,
        b_ptr: int,
        ldb: int,
        beta: complex,
        c_ptr: int,
        ldc: int,
        stream: Any,
        in_place: str = "",
        **options: Any,
    ) -> None:
        """C ← α·op(A)·op(B) + β·C; `options` as TensorGemm has them."""
        if m == 0 or n == 0:
            return
        if alpha == 0:
            k = 0
        if self._chooses and few_rows(m, n, k):
            self._of_few_rows(m, n, k, alpha, a_ptr, lda, b_ptr, ldb, beta, c_ptr, ldc, stream)
            return
        if beta.imag:
            _scale(c_ptr, m, n, ldc, beta, stream)
            beta = 1.0
        if k and self._trans_a:
            pitch = round_up(m, 64)
            to = self.real.memory("rows of A", 2 * k * pitch * 4)
            _embed(self._rows, k, m, a_ptr, lda, to, pitch, 1.0, stream)
            a_ptr, lda, in_place = to, pitch, "a" + in_place
        else:
            lda *= 2
        if k:
            rows, cols = (n, k) if self._trans_b else (k, n)
            pitch = round_up(2 * cols, 64)
            to = self.real.memory("embedded B", 2 * rows * pitch * 4)
            _embed(self._double["b"], rows, cols, b_ptr, ldb, to, pitch, alpha, stream)
            b_ptr, ldb = to, pitch
        self.real(
            m, 2 * n, 2 * k, 1.0, a_ptr, lda, b_ptr, ldb, beta.real, c_ptr, 2 * ldc, stream, in_place + "b",
            **options,
        )  # fmt: skip

    def _of_few_rows(
        self, m: int, n: int, k: int, alpha: complex, a_ptr: int, lda: int, b_ptr: int, ldb: int,
        beta: complex, c_ptr: int, ldc: int, stream: Any,
    ) -> None:  # fmt: skip
        """A, prepared, and the real product take less memory than an embedded B (`few_rows`)."""
        rows, cols = (k, m) if self._trans_a else (m, k)
        width, depth = (n, 2 * k) if self._trans_b else (2 * n, k)
        pitch = round_up(width, 64)
        pitch_a = round_up(2 * cols if self._trans_b else cols, 64)
        product = self.real.memory("embedded B", 8 * m * pitch + 8 * rows * pitch_a)
        prepared = product + 8 * m * pitch
        if self._trans_b:
            _embed(self._double["a"], rows, cols, a_ptr, lda, prepared, pitch_a, 1.0, stream)
        elif self._trans_a:  # re and im of an element are rows of op(A) already
            prepared, pitch_a = a_ptr, 2 * lda
        else:
            _embed(self._rows, rows, cols, a_ptr, lda, prepared, pitch_a, 1.0, stream)
        self.real(2 * m, width, depth, 1.0, prepared, pitch_a, b_ptr, 2 * ldb, 0.0, product, pitch, stream)
        i64, f32, u = np.int64, np.float32, np.uintp
        args = (
            i64(m), np.int32(n), f32(alpha.real), f32(alpha.imag), u(product), i64(pitch),
            f32(beta.real), f32(beta.imag), u(c_ptr), i64(ldc),
        )  # fmt: skip
        self._combine((ceil_div(m * n, 256),), (256,), args, stream)

    def reserve(self, m: int, n: int, k: int) -> None:
        """Take the memory for products up to m×n×k now (A in place)."""
        self.real.reserve(m, 2 * n, 2 * k)
        if self._trans_a:
            self.real.memory("rows of A", 2 * k * round_up(m, 64) * 4)
        rows, cols = (n, k) if self._trans_b else (k, n)
        self.real.memory("embedded B", 2 * rows * round_up(2 * cols, 64) * 4)


def few_rows(m: int, n: int, k: int) -> bool:
    """Whether to leave B as it lies. That saves at least 16 bytes for each of its elements, of memory and
    several times of traffic, and costs 16 for each of A, and 40 of C. Where the product would be
    split, planes of B would come on top."""
    return not split_pays(2 * m, 2 * n, 2 * k) and 16 * m * k + 40 * m * n < 16 * k * n


def _embed(
    kernel: Any, rows: int, cols: int, x: int, ldx: int, y: int, ldy: int, alpha: complex, stream: Any
) -> None:
    i32, i64, f32, u = np.int32, np.int64, np.float32, np.uintp
    args = (i32(rows), i32(cols), u(x), i64(ldx), u(y), i64(ldy), f32(alpha.real), f32(alpha.imag))
    kernel((ceil_div(rows, 8) * ceil_div(cols, 32),), (32, 8), args, stream)


def _scale(ptr: int, m: int, n: int, ld: int, beta: complex, stream: Any) -> None:
    import cupy

    memory = cupy.cuda.UnownedMemory(ptr, 8 * ((m - 1) * ld + n), None)
    with stream:
        matrix = cupy.ndarray((m, n), "c8", cupy.cuda.MemoryPointer(memory, 0), strides=(8 * ld, 8))
        matrix *= np.complex64(beta)
