"""The product that replaces fp16x3 or ozaki2 where products of planes would be inaccurate, or do not pay."""

from dataclasses import replace
from typing import Any

import numpy as np

from ..support.intervals import ceil_div, ranges
from . import preparations
from .ffma import choose_ffma, ffma, guarded
from .launch import Functions, launch, load
from .product import Operand, Product
from .scratch import Scratch
from .tensor_tiles import choose_mma, float64_sums, folded_sums

FLOAT64_AT_FULL_RATE = ("80", "90", "100")
"""Compute capabilities whose float64 tensor cores are as fast as float32 arithmetic."""
FALLBACK_SLICES = 8
"""Slices of k, at most, of the fallback in plain float32. One sum over all of k would be less accurate than
SGEMM's, which is made of several."""
_LEAST_SLICE = 1024
"""Least k of a slice of the fallback in plain float32."""
_COMBINE_THREADS = 256
"""Threads of a block of combine.cu."""


class Fallback:
    """Products of float32 with sums in float64, or in plain float32 where float64 is much slower; of float64,
    along k, with compensated sums in float64. They do nothing unless a flag on the device is set."""

    def __init__(
        self,
        mn: dict[str, bool],
        multiprocessors: int,
        shared: int,
        function: Functions,
        dtype: str = "float32",
    ):
        """`mn`: whether operand a, or b, is contiguous along m or n, and not along k. `shared`: bytes of
        shared memory of a multiprocessor. `function`: loaded kernels, which others may share.
        `dtype`: NumPy's name for the type of A, B and C."""
        from cupy.cuda import Device

        self._mn, self._multiprocessors, self._shared, self._function = mn, multiprocessors, shared, function
        trans_a, trans_b = mn["a"], not mn["b"]
        full_rate = Device().compute_capability in FLOAT64_AT_FULL_RATE
        self._float64 = dtype == "float64" or full_rate
        if dtype == "float64":
            self._configs = folded_sums()
        elif full_rate:
            self._configs = float64_sums(trans_a, trans_b)
        else:
            self._configs = [guarded(config) for config in ffma("float32", trans_a, trans_b)]

    def reserve(self) -> None:
        """Load a kernel now."""
        self._function(self._configs[0])

    def __call__(self, product: Product, flag: int, stream: Any) -> None:
        """Start the product. `flag`: address of the flag."""
        if self._float64:
            self._in_float64(product, flag, stream)
        else:
            self._in_float32(product, flag, stream)

    def _in_float64(self, product: Product, flag: int, stream: Any) -> None:
        m, n, k, a, b, c = product.m, product.n, product.k, product.a, product.b, product.c
        config, _ = choose_mma(self._configs, m, n, k, self._multiprocessors, self._shared, most_slices=1)
        i64, f64, u = np.int64, np.float64, np.uintp
        args = (
            i64(m), i64(n), i64(k), f64(product.alpha.real), u(a.ptr), i64(a.ld), u(b.ptr), i64(b.ld),
            f64(product.beta.real), u(c.ptr), i64(c.ld), u(flag),
        )  # fmt: skip
        blocks = config.grid(m, n)[0]
        if not config.value("FOLD"):
            blocks = min(blocks, self._multiprocessors * config.value("RESIDENT"))
        self._function(config)((blocks,), config.block, args, stream, config.shared_bytes)

    def _in_float32(self, product: Product, flag: int, stream: Any) -> None:
        a, b, k = product.a, product.b, product.k
        config = choose_ffma(self._configs, product.m, product.n, k, self._multiprocessors)
        depth = max(_LEAST_SLICE, ceil_div(k, FALLBACK_SLICES))
        for start, stop in list(ranges(k, depth)) or [(0, 0)]:
            part = replace(
                product,
                k=stop - start,
                a=a.moved(4 * start * (a.ld if self._mn["a"] else 1)),
                b=b.moved(4 * start * (b.ld if self._mn["b"] else 1)),
                beta=product.beta if start == 0 else 1.0,
            )
            launch(self._function(config), config, part, stream, flag)


class ComplexFallback:
    """Products of complex128 along k by one real product of twice the sizes (embed.cu). They do nothing
    unless a flag on the device is set. They are called as `Fallback` is, after `embed`."""

    def __init__(self, real: Fallback, conjugate: tuple[bool, bool], scratch: Scratch):
        """`real`: float64 products of operands along k. `conjugate`: whether op() conjugates A, and B.
        `scratch` holds the embedding of B where residues of B lie, which nobody needs then."""
        self._real, self._scratch = real, scratch
        turned = conjugate[1], conjugate[0]
        self._embed = load(preparations.embed("double k", *turned, dtype="complex128"))["embed"]
        self._combine = load(preparations.combine("elements", dtype="complex128"))["combine"]

    def reserve(self) -> None:
        """Load a kernel now."""
        self._real.reserve()

    def embed(self, product: Product, flag: int, stream: Any) -> Product:
        """Embed B. Returns the real product of A as it lies and of what is then there, for the same C."""
        n, k, b, i32, i64, u = product.n, product.k, product.b, np.int32, np.int64, np.uintp
        embedded = Operand(self._scratch.at("planes b", 32 * n * k), 2 * k)
        args = i32(n), i32(k), u(b.ptr), i64(b.ld), u(embedded.ptr), i64(embedded.ld), u(flag)
        if k:
            self._embed((ceil_div(n, 8) * ceil_div(k, 32),), (32, 8), args, stream)
        return replace(product, b=embedded)

    def __call__(self, product: Product, flag: int, stream: Any) -> None:
        """Start a product whose B is embedded. `flag`: address of the flag."""
        m, n, alpha, beta, c = product.m, product.n, product.alpha, product.beta, product.c
        a = Operand(product.a.ptr, 2 * product.a.ld)
        real = replace(product, n=2 * n, k=2 * product.k, a=a, c=Operand(c.ptr, 2 * c.ld))
        if alpha.imag == beta.imag == 0:
            self._real(real, flag, stream)
            return
        z = Operand(self._scratch.at("product", complex_product_bytes(m, n)), 2 * n)
        self._real(replace(real, alpha=1.0, beta=0.0, c=z), flag, stream)
        i64, f64, u = np.int64, np.float64, np.uintp
        args = (
            i64(m), np.int32(n), f64(alpha.real), f64(alpha.imag), u(z.ptr), i64(z.ld), f64(beta.real),
            f64(beta.imag), u(c.ptr), i64(c.ld), u(flag),
        )  # fmt: skip
        self._combine((ceil_div(m * n, _COMBINE_THREADS),), (_COMBINE_THREADS,), args, stream)


def complex_product_bytes(m: int, n: int) -> int:
    """Return the bytes of a product of complex128 that is made beside C, for a complex α or β."""
    return 16 * m * n
