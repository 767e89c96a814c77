"""Launches dmma.cu and mma.cu of kernels/production/, in which each warp uses the tensor cores by itself."""

from typing import Any

import numpy as np

from . import tensor_tiles
from .config import Config
from .product import Product
from .split import Split
from .tensor import TensorGemm


class Mma(TensorGemm):
    """The kernels dmma, mma-fp16x3, mma-fp16, mma-tf32 and mma-int8."""

    def _shipped(self, a_mn: bool, b_mn: bool) -> list[Config]:
        if self.kind == "dmma":
            return tensor_tiles.dmma("float64", a_mn, not b_mn)
        unsigned = (self._types[name] == "uint8" for name in ("a", "b"))
        return tensor_tiles.mma(self.kind, a_mn, b_mn, *unsigned)

    def _choose(self, m: int, n: int, k: int) -> tuple[Config, int]:
        return tensor_tiles.choose_mma(self.configs, m, n, k, self._multiprocessors, self._shared)

    def _multiply(self, config: Config, slices: int, product: Product, split: Split, stream: Any) -> None:
        m, n, a, b, c = product.m, product.n, product.a, product.b, product.c
        i64, u = np.int64, np.uintp
        alpha, beta = self._factors(product)
        args: tuple[Any, ...] = (
            i64(m), i64(n), i64(product.k), alpha, u(a.ptr), i64(a.ld), u(b.ptr), i64(b.ld), beta,
            u(c.ptr), i64(c.ld),
        )  # fmt: skip
        if self.kind == "fp16x3":
            args += u(split.a), u(split.b), u(split.flag)
        grid = (*config.grid(m, n), slices)
        self._function(config)(grid, config.block, args, stream, config.shared_bytes)
