"""complex64 by real products on the tensor cores.

as a rule      B is doubled, A taken as it lies; the real product writes C        (embed.cu)
few rows of C  A is prepared, B taken as it lies; C is made of a product's rows   (embed.cu, combine.cu)

α and β are applied to finished sums, as in real products: by the real product itself if both are real, else
by combine.cu, and then the product is made in other memory first.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..support.intervals import ceil_div, round_up
from . import preparations
from .nvrtc import Config
from .tensor import load, split_pays, strips
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
            return load(preparations.embed(mode, *conjugate))["embed"]

        self._double = {
            "a": embed("double n" if trans_a else "double k", conjugate_a, conjugate_b),
            "b": embed("double k" if trans_b else "double n", conjugate_b, conjugate_a),
        }
        self._rows = embed("rows")
        few = preparations.combine("rows" if trans_b else "pairs", conjugate_a, conjugate_b)
        self._combine_few = load(few)["combine"]
        self._combine = load(preparations.combine("elements"))["combine"]

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
        rows: Iterable[tuple[int, int]] = (),
        after: Callable[[int], None] = lambda stop: None,
    ) -> None:
        """C ← α·op(A)·op(B) + β·C; `lower`, `rows` and `after` as TensorGemm has them."""
        if m == 0 or n == 0:
            return
        if alpha == 0:
            alpha, k = 1.0, 0
        if self._chooses and few_rows(m, n, k):
            self._of_few_rows(m, n, k, alpha, a_ptr, lda, b_ptr, ldb, beta, c_ptr, ldc, stream)
            after(m)
            return
        if k and self._trans_a:
            pitch = round_up(m, 64)
            to = self.real.memory("rows of A", 2 * k * pitch * 4)
            _embed(self._rows, k, m, a_ptr, lda, to, pitch, stream)
            a_ptr, lda, in_place = to, pitch, "a" + in_place
        else:
            lda *= 2
        if k:
            depth, cols = (n, k) if self._trans_b else (k, n)
            pitch = round_up(2 * cols, 64)
            to = self.real.memory("embedded B", 2 * depth * pitch * 4)
            _embed(self._double["b"], depth, cols, b_ptr, ldb, to, pitch, stream)
            b_ptr, ldb = to, pitch
        in_place += "b"
        if alpha.imag == beta.imag == 0:
            self.real(
                m, 2 * n, 2 * k, alpha.real, a_ptr, lda, b_ptr, ldb, beta.real, c_ptr, 2 * ldc, stream,
                in_place, lower, rows, after,
            )  # fmt: skip
            return
        product = self.real.memory("product", product_bytes(m, n))
        strips_of_c = list(rows or (strips(m) if lower else [(0, m)]))
        starts = {stop: start for start, stop in strips_of_c}

        def combine(stop: int) -> None:
            start = starts[stop]
            width = n // m * stop if lower else n  # the rest of these rows has not been made
            z, c = product + 8 * start * n, c_ptr + 8 * start * ldc
            _combine(self._combine, stop - start, width, alpha, z, 2 * n, beta, c, ldc, stream)
            after(stop)

        self.real(
            m, 2 * n, 2 * k, 1.0, a_ptr, lda, b_ptr, ldb, 0.0, product, 2 * n, stream, in_place, lower,
            strips_of_c, combine,
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
            _embed(self._double["a"], rows, cols, a_ptr, lda, prepared, pitch_a, stream)
        elif self._trans_a:  # re and im of an element are rows of op(A) already
            prepared, pitch_a = a_ptr, 2 * lda
        else:
            _embed(self._rows, rows, cols, a_ptr, lda, prepared, pitch_a, stream)
        self.real(2 * m, width, depth, 1.0, prepared, pitch_a, b_ptr, 2 * ldb, 0.0, product, pitch, stream)
        _combine(self._combine_few, m, n, alpha, product, pitch, beta, c_ptr, ldc, stream)

    def reserve(self, m: int, n: int, k: int, real: bool = True) -> None:
        """Take the memory for products up to m×n×k now (A in place). `real`: α and β will be."""
        self.real.reserve(m, 2 * n, 2 * k)
        if not real:
            self.real.memory("product", product_bytes(m, n))
        if self._trans_a:
            self.real.memory("rows of A", 2 * k * round_up(m, 64) * 4)
        rows, cols = (n, k) if self._trans_b else (k, n)
        self.real.memory("embedded B", 2 * rows * round_up(2 * cols, 64) * 4)


def few_rows(m: int, n: int, k: int) -> bool:
    """Whether to leave B as it lies. That saves at least 16 bytes for each of its elements, of memory and
    several times of traffic, and costs 16 for each of A, and 40 of C. Where the product would be
    split, planes of B would come on top."""
    return not split_pays(2 * m, 2 * n, 2 * k) and 16 * m * k + 40 * m * n < 16 * k * n


def product_bytes(m: int, n: int) -> int:
    """Of a product that is made beside C, for a complex α or β."""
    return 8 * m * n


def _embed(kernel: Any, rows: int, cols: int, x: int, ldx: int, y: int, ldy: int, stream: Any) -> None:
    i32, i64, u = np.int32, np.int64, np.uintp
    args = i32(rows), i32(cols), u(x), i64(ldx), u(y), i64(ldy)
    kernel((ceil_div(rows, 8) * ceil_div(cols, 32),), (32, 8), args, stream)


def _combine(
    kernel: Any, m: int, n: int, alpha: complex, product: int, pitch: int, beta: complex, c: int, ldc: int,
    stream: Any,
) -> None:  # fmt: skip
    i64, f32, u = np.int64, np.float32, np.uintp
    args = (
        i64(m), np.int32(n), f32(alpha.real), f32(alpha.imag), u(product), i64(pitch),
        f32(beta.real), f32(beta.imag), u(c), i64(ldc),
    )  # fmt: skip
    kernel((ceil_div(m * n, 256),), (256,), args, stream)
