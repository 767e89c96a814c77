"""The product that replaces fp16x3 where three float16 products would be inaccurate, or do not pay."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..support.intervals import ceil_div, ranges
from .config import Config
from .driver import Kernel
from .ffma import choose_ffma, ffma, guarded
from .launch import launch
from .product import Product
from .tensor_tiles import choose_mma, float64_sums

FLOAT64_AT_FULL_RATE = ("80", "90", "100")
"""Compute capabilities whose float64 tensor cores are as fast as float32 arithmetic."""
FALLBACK_SLICES = 8
"""Slices of k, at most, of the fallback in plain float32. One sum over all of k would be less accurate than
SGEMM's, which is made of several."""
_LEAST_SLICE = 1024
"""Least k of a slice of the fallback in plain float32."""


class Fallback:
    """float32 products with sums in float64, or in plain float32 where float64 is much slower. They do
    nothing unless a flag on the device is set."""

    def __init__(
        self, mn: dict[str, bool], multiprocessors: int, shared: int, function: Callable[[Config], Kernel]
    ):
        """`mn`: whether operand a, or b, is contiguous along m or n, and not along k. `shared`: bytes of
        shared memory of a multiprocessor. `function` loads a configuration on the current device."""
        from cupy.cuda import Device

        self._mn, self._multiprocessors, self._shared, self._function = mn, multiprocessors, shared, function
        trans_a, trans_b = mn["a"], not mn["b"]
        self._float64 = Device().compute_capability in FLOAT64_AT_FULL_RATE
        self._configs = (
            float64_sums(trans_a, trans_b)
            if self._float64
            else [guarded(config) for config in ffma("float32", trans_a, trans_b)]
        )

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
        self._function(config)(config.grid(m, n), config.block, args, stream, config.shared_bytes)

    def _in_float32(self, product: Product, flag: int, stream: Any) -> None:
        k, a, b = product.k, product.a, product.b
        config = choose_ffma(self._configs, product.m, product.n, k, self._multiprocessors)
        for start, stop in ranges(k, max(_LEAST_SLICE, ceil_div(k, FALLBACK_SLICES))):
            part = replace(
                product,
                k=stop - start,
                a=a.moved(4 * start * (a.ld if self._mn["a"] else 1)),
                b=b.moved(4 * start * (b.ld if self._mn["b"] else 1)),
                beta=product.beta if start == 0 else 1.0,
            )
            launch(self._function(config), config, part, stream, flag)
