"""Transposes matrices on the device (kernels/prepare/transpose.cu)."""

from typing import Any

import numpy as np

from ..support.intervals import ceil_div
from . import preparations
from .launch import load
from .product import Operand

_MIRRORED = 32
"""Side of the tiles of `mirror`."""


class Transposition:
    """Transposes matrices of one type on the current device."""

    def __init__(self, dtype: str):
        """`dtype`: NumPy's name for the type."""
        self._config = preparations.transpose(dtype)
        self._kernels = load(self._config, "transpose", "mirror")

    def __call__(self, rows: int, cols: int, x: Operand, y: Operand, stream: Any) -> None:
        """Start to write the transpose of `x`, of rows × cols, to `y` in a CuPy stream. Returns at once."""
        i32, i64, u = np.int32, np.int64, np.uintp
        args = i32(rows), i32(cols), u(x.ptr), i64(x.ld), u(y.ptr), i64(y.ld)
        self._kernels["transpose"](self._config.grid(rows, cols), self._config.block, args, stream)

    def mirror(self, n: int, c: Operand, stream: Any) -> None:
        """Start to copy the lower triangle of `c`, of n × n, to the upper one in place."""
        args = np.int32(n), np.uintp(c.ptr), np.int64(c.ld)
        self._kernels["mirror"]((ceil_div(n, _MIRRORED) ** 2,), self._config.block, args, stream)
