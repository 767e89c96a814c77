"""Launches kernels/wgmma.cu, Hopper's tensor cores: tensor maps, and a grid that stays on the device.
Operands that would have to be turned, for few rows or columns of the other, kernels/mma.cu takes as they lie.
"""

import ctypes
import struct
from typing import Any

import numpy as np

from ..support.errors import DeviceError
from ..support.intervals import round_up
from . import catalog, driver
from .driver import DriverError
from .mma import Mma
from .nvrtc import Config
from .tensor import Operands

_MAP_TYPES = {"float16": 6, "float32": 11, "int8": 0, "uint8": 0}
"""CU_TENSOR_MAP_DATA_TYPE_*; float32 as TF32."""
_SWIZZLE = {64: 2, 128: 3}
"""Bytes of a box's row → CU_TENSOR_MAP_SWIZZLE_*."""
_L2_PROMOTION_128 = 2
_TURN_PAYS = 288
"""How often a turned element is multiplied until wgmma has saved the time of turning it, on an H200."""


class Wgmma(Mma):
    """The kinds fp16x3, fp16, tf32 and int8."""

    def _shipped(self, a_mn: bool, b_mn: bool) -> list[Config]:
        unsigned = (self._types[name] == "uint8" for name in ("a", "b"))
        return catalog.wgmma(self.kind, a_mn, b_mn, *unsigned)

    def _choose(self, m: int, n: int, k: int) -> tuple[Config, int]:
        turned = sum({"a": m, "b": n}[name] for name in self.turned(self.configs[0]))
        if self._chooses and self.kind == "tf32" and m * n < _TURN_PAYS * turned:
            configs = super()._shipped(*self._mn.values())
            return catalog.choose_mma(configs, m, n, k, self._multiprocessors, self._shared)
        return catalog.choose_wgmma(self.configs, m, n, k, self._multiprocessors)

    def _multiply(
        self, config: Config, slices: int, m: int, n: int, k: int, alpha: Any, operands: Operands, beta: Any,
        c: tuple[int, int], exponents: tuple[int, int], skip: int, stream: Any,
    ) -> None:  # fmt: skip
        if config.kernel == "mma":
            super()._multiply(config, slices, m, n, k, alpha, operands, beta, c, exponents, skip, stream)
            return
        maps = [self._map(config, name, k, *operands[name]) for name in ("a", "b")]
        i32, u, cluster = np.int32, np.uintp, config.value("CLUSTER")
        args = (
            *maps, i32(m), i32(n), i32(k), alpha, beta, u(c[0]), np.int64(c[1]),
            u(exponents[0]), u(exponents[1]), u(skip), i32(slices),
        )  # fmt: skip
        at_once = self._multiprocessors // cluster * config.value("RESIDENT")
        grid = min(at_once, config.grid(m, n)[0] * slices) * cluster
        self._function(config)((grid,), config.block, args, stream, config.shared_bytes)

    def _map(self, config: Config, name: str, k: int, ptr: int, ld: int, lines: int) -> Any:
        """The tensor map of an operand, as a kernel argument."""
        tile = {"a": "BM", "b": "BN"}[name]
        parts = config.value("CLUSTER") if name == "b" else 1
        planes = 2 if self.kind == "fp16x3" else 1
        dtype = "float16" if planes == 2 else self._types[name]
        size, depth = np.dtype(dtype).itemsize, config.value("BK")
        if config.value(f"{name.upper()}_MN"):
            width, height, box = lines, k, (128 // size, depth // parts)
        else:
            width, height, box = k, lines, (depth, config.value(tile) // parts)
        if planes == 2:
            width, ld = 2 * round_up(width, 64), 2 * ld
        return tensor_map(dtype, ptr, max(1, width), max(1, height), ld * size, box)


def tensor_map(dtype: str, ptr: int, width: int, height: int, pitch: int, box: tuple[int, int]) -> Any:
    """A CUtensorMap, as a kernel's argument: boxes of `box` (elements along a row, rows) of a matrix of
    height × width elements, its rows `pitch` bytes apart; zeros beyond.

    Raises DeviceError where the driver refuses.
    """
    memory = ctypes.create_string_buffer(128 + 64)
    offset = -ctypes.addressof(memory) % 64
    swizzle = _SWIZZLE[box[0] * np.dtype(dtype).itemsize]
    try:
        driver.call(
            "cuTensorMapEncodeTiled", ctypes.addressof(memory) + offset, _MAP_TYPES[dtype], 2, ptr,
            struct.pack("=2Q", width, height), struct.pack("=Q", pitch), struct.pack("=2I", *box),
            struct.pack("=2I", 1, 1), 0, swizzle, _L2_PROMOTION_128, 0,
        )  # fmt: skip
    except DriverError as error:
        raise DeviceError(
            f"the driver refuses a tensor map of {height}×{width} {dtype} with rows of {pitch} bytes "
            f"({error})"
        ) from error
    return np.frombuffer(memory.raw[offset : offset + 128], "V128")
