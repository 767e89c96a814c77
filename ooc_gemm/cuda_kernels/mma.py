"""Launches kernels/dmma.cu and kernels/mma.cu, the tensor cores as a warp uses them."""

from typing import Any

import numpy as np

from . import catalog
from .nvrtc import Config
from .tensor import Operands, TensorGemm


class Mma(TensorGemm):
    """dmma, mma-fp16x3, mma-fp16, mma-tf32 and mma-int8."""

    def _shipped(self, a_mn: bool, b_mn: bool) -> list[Config]:
        if self.kind == "dmma":
            return catalog.dmma("float64", a_mn, not b_mn)
        unsigned = (self._types[name] == "uint8" for name in ("a", "b"))
        return catalog.mma(self.kind, a_mn, b_mn, *unsigned)

    def _choose(self, m: int, n: int, k: int) -> tuple[Config, int]:
        return catalog.choose_mma(self.configs, m, n, k, self._multiprocessors, self._shared)

    def _multiply(
        self, config: Config, slices: int, m: int, n: int, k: int, alpha: Any, operands: Operands, beta: Any,
        c: tuple[int, int], exponents: tuple[int, int], skip: int, stream: Any,
    ) -> None:  # fmt: skip
        (a, lda, _), (b, ldb, _) = operands["a"], operands["b"]
        i64, u = np.int64, np.uintp
        args: tuple[Any, ...] = (
            i64(m), i64(n), i64(k), alpha, u(a), i64(lda), u(b), i64(ldb), beta, u(c[0]), i64(c[1]),
        )  # fmt: skip
        if self.kind == "fp16x3":
            args += u(exponents[0]), u(exponents[1]), u(skip)
        grid = (*config.grid(m, n), slices)
        self._function(config)(grid, config.block, args, stream, config.shared_bytes)
