"""complex64 by real products on the tensor cores."""

from typing import Any

import numpy as np

from . import catalog
from .nvrtc import Config
from .tensor import load
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
        self._trans_a, self._trans_b = trans_a, trans_b
        self.real = Wgmma("fp16x3", trans_a, trans_b, "float32", "float32", config)
        mode = "double k" if trans_b else "double n"
        self._double = load(catalog.embed(mode, conjugate_b, conjugate_a))["embed"]
        self._rows = load(catalog.embed("rows"))["embed"] if trans_a else None

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
        lower: bool = False,
    ) -> None:
        """C ← α·op(A)·op(B) + β·C; `lower` as TensorGemm has it."""
        if m == 0 or n == 0:
            return
        if alpha == 0:
            k = 0
        if beta.imag:
            _scale(c_ptr, m, n, ldc, beta, stream)
            beta = 1.0
        if k and self._rows is not None:
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
            _embed(self._double, rows, cols, b_ptr, ldb, to, pitch, alpha, stream)
            b_ptr, ldb = to, pitch
        self.real(
            m, 2 * n, 2 * k, 1.0, a_ptr, lda, b_ptr, ldb, beta.real, c_ptr, 2 * ldc, stream, in_place + "b",
            lower,
        )  # fmt: skip

    def reserve(self, m: int, n: int, k: int) -> None:
        """Take the memory for products up to m×n×k now (A in place)."""
        self.real.reserve(m, 2 * n, 2 * k)
        if self._rows is not None:
            self.real.memory("rows of A", 2 * k * round_up(m, 64) * 4)
        rows, cols = (n, k) if self._trans_b else (k, n)
        self.real.memory("embedded B", 2 * rows * round_up(2 * cols, 64) * 4)


def _embed(
    kernel: Any, rows: int, cols: int, x: int, ldx: int, y: int, ldy: int, alpha: complex, stream: Any
) -> None:
    i32, i64, f32, u = np.int32, np.int64, np.float32, np.uintp
    args = (i32(rows), i32(cols), u(x), i64(ldx), u(y), i64(ldy), f32(alpha.real), f32(alpha.imag))
    kernel((ceil_div(rows, 8) * ceil_div(cols, 32),), (32, 8), args, stream=stream)


def _scale(ptr: int, m: int, n: int, ld: int, beta: complex, stream: Any) -> None:
    import cupy

    memory = cupy.cuda.UnownedMemory(ptr, 8 * ((m - 1) * ld + n), None)
    with stream:
        matrix = cupy.ndarray((m, n), "c8", cupy.cuda.MemoryPointer(memory, 0), strides=(8 * ld, 8))
        matrix *= np.complex64(beta)
