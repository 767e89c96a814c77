"""complex64 by real products on the tensor cores.

as a rule      B is doubled, A taken as it lies; the real product writes C        (embed.cu)
few rows of C  A is prepared, B taken as it lies; C is made of a product's rows   (embed.cu, combine.cu)

α and β are applied to finished sums, as in real products: by the real product itself if both are real, else
by combine.cu. Then the product is made in other memory first.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from ..support.intervals import ceil_div, round_up
from . import preparations
from .config import Config
from .driver import Kernel
from .launch import load
from .product import Operand, Product, Strips
from .split import split_pays
from .wgmma import Wgmma

_PITCH = 64
"""Rows of prepared matrices start at multiples of this many float32 elements: `PITCH_BYTES`."""
_COMBINE_THREADS = 256
"""Threads of a block of combine.cu."""


class ComplexGemm:
    """complex64 by a float32 product of twice the sizes (kernels/prepare/embed.cu). It is called as Wgmma is,
    with leading dimensions in complex elements."""

    def __init__(
        self,
        trans_a: bool,
        trans_b: bool,
        conjugate_a: bool = False,
        conjugate_b: bool = False,
        config: Config | None = None,
        spared: int = 0,
    ):
        """`trans_a`, `trans_b`: whether A is stored k×m, and B n×k. `conjugate_a`, `conjugate_b`: whether
        op() conjugates. `config`: the only configuration to use for the real product. `spared`: as of
        `TensorGemm`."""
        self._trans_a, self._trans_b, self._chooses = trans_a, trans_b, config is None
        self.real = Wgmma("fp16x3", trans_a, trans_b, "float32", "float32", config, spared)

        def embed(mode: str, *conjugate: bool) -> Kernel:
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
        self, product: Product, stream: Any, in_place: str = "", strips: Strips | None = None
    ) -> None:
        """Start the product in a CuPy stream of the current device, as `TensorGemm` does. Returns at once."""
        m, n = product.m, product.n
        if m == 0 or n == 0:
            return
        if product.alpha == 0:
            product = replace(product, alpha=1.0, k=0)
        strips = strips or Strips()
        if self._chooses and not product.stay[0] and few_rows(m, n, product.k):
            self._of_few_rows(product, stream)
            strips.after(m)
            return
        real, alpha, beta, c = self._doubled(product, stream), product.alpha, product.beta, product.c
        if product.k and self._trans_a:
            in_place = "a" + in_place
        in_place += "b"
        if alpha.imag == beta.imag == 0:
            self.real(replace(real, c=Operand(c.ptr, 2 * c.ld)), stream, in_place, strips)
            return
        z = Operand(self.real.scratch.at("product", product_bytes(m, n)), 2 * n)
        found = {stop: (start, width) for start, stop, width in strips.of(m, n)}

        def combine(stop: int) -> None:
            """Make a strip of C of a strip of the product. The rest of its rows has not been made."""
            start, width = found[stop]
            part = replace(product, m=stop - start, n=width, c=c.moved(8 * start * c.ld))
            _combine(self._combine, part, z.moved(8 * start * n), stream)
            strips.after(stop)

        rows = [(start, stop) for stop, (start, _) in found.items()]
        sums = replace(real, alpha=1.0, beta=0.0, c=z)
        self.real(sums, stream, in_place, Strips(rows, strips.lower, combine))

    def _doubled(self, product: Product, stream: Any) -> Product:
        """Embed B, and A if it lies along m. Returns the real product of what is then there."""
        m, n, k, a, b = product.m, product.n, product.k, product.a, product.b
        stay = None if self._trans_a else product.stay[0], None  # what is embedded does not stay
        if k and self._trans_a:
            pitch = round_up(m, _PITCH)
            rows = Operand(self.real.scratch.at("rows of A", 2 * k * pitch * 4), pitch)
            _embed(self._rows, k, m, a, rows, stream)
            a = rows
        else:
            a = Operand(a.ptr, 2 * a.ld)
        if k:
            depth, cols = (n, k) if self._trans_b else (k, n)
            pitch = round_up(2 * cols, _PITCH)
            embedded = Operand(self.real.scratch.at("embedded B", 2 * depth * pitch * 4), pitch)
            _embed(self._double["b"], depth, cols, b, embedded, stream)
            b = embedded
        return replace(product, n=2 * n, k=2 * k, a=a, b=b, stay=stay)

    def _of_few_rows(self, product: Product, stream: Any) -> None:
        """Prepare A and take B as it lies: A and the real product take less memory than an embedded B."""
        m, n, k, a, b = product.m, product.n, product.k, product.a, product.b
        rows, cols = (k, m) if self._trans_a else (m, k)
        width, depth = (n, 2 * k) if self._trans_b else (2 * n, k)
        pitch = round_up(width, _PITCH)
        pitch_a = round_up(2 * cols if self._trans_b else cols, _PITCH)
        z = Operand(self.real.scratch.at("embedded B", 8 * m * pitch + 8 * rows * pitch_a), pitch)
        prepared = Operand(z.ptr + 8 * m * pitch, pitch_a)
        if self._trans_b:
            _embed(self._double["a"], rows, cols, a, prepared, stream)
        elif self._trans_a:  # re and im of an element are rows of op(A) already
            prepared = Operand(a.ptr, 2 * a.ld)
        else:
            _embed(self._rows, rows, cols, a, prepared, stream)
        self.real(Product(2 * m, width, depth, 1.0, prepared, Operand(b.ptr, 2 * b.ld), 0.0, z), stream)
        _combine(self._combine_few, product, z, stream)

    def reserve(
        self, m: int, n: int, k: int, in_place: str = "a", real: bool = True, stay: tuple[int, int] = (0, 0)
    ) -> None:
        """Allocate scratch memory for products up to m×n×k. `in_place`: as in calls. `real`: α and β will be
        real. `stay`: numbers of panels of A and B that stay on the device; those of A that are not embedded
        are split where they lie."""
        scratch, stay = self.real.scratch, (0 if self._trans_a else stay[0], 0)
        self.real.reserve(m, 2 * n, 2 * k, "ab" if self._trans_a or "a" in in_place else "b", stay)
        if not real:
            scratch.at("product", product_bytes(m, n))
        if self._trans_a:
            scratch.at("rows of A", 2 * k * round_up(m, _PITCH) * 4)
        rows, cols = (n, k) if self._trans_b else (k, n)
        scratch.at("embedded B", 2 * rows * round_up(2 * cols, _PITCH) * 4)


def few_rows(m: int, n: int, k: int) -> bool:
    """Return whether to leave B as it lies. For each element of B that saves at least 16 bytes of memory, and
    several times as much traffic. It costs 16 bytes for each element of A, and 40 for each of C. If the
    product were split, planes of B would be needed, too."""
    return not split_pays(2 * m, 2 * n, 2 * k) and 16 * m * k + 40 * m * n < 16 * k * n


def product_bytes(m: int, n: int) -> int:
    """Return the bytes of a product that is made beside C, for a complex α or β."""
    return 8 * m * n


def _embed(kernel: Kernel, rows: int, cols: int, x: Operand, y: Operand, stream: Any) -> None:
    """Write the embedding `y` of a complex matrix `x` of rows × cols."""
    i32, i64, u = np.int32, np.int64, np.uintp
    args = i32(rows), i32(cols), u(x.ptr), i64(x.ld), u(y.ptr), i64(y.ld)
    kernel((ceil_div(rows, 8) * ceil_div(cols, 32),), (32, 8), args, stream)


def _combine(kernel: Kernel, product: Product, z: Operand, stream: Any) -> None:
    """Make C of the real product `z`, with α and β."""
    i64, f32, u = np.int64, np.float32, np.uintp
    m, n, alpha, beta, c = product.m, product.n, product.alpha, product.beta, product.c
    args = (
        i64(m), np.int32(n), f32(alpha.real), f32(alpha.imag), u(z.ptr), i64(z.ld),
        f32(beta.real), f32(beta.imag), u(c.ptr), i64(c.ld),
    )  # fmt: skip
    kernel((ceil_div(m * n, _COMBINE_THREADS),), (_COMBINE_THREADS,), args, stream)
