"""Launches kernels/production/wgmma.cu, which uses Hopper's tensor cores: tensor maps, and a grid that stays
on the device; and the rungs of the ladder that lead to it. Where an operand would be transposed for only a
few rows or columns of the other, mma.cu takes it as it lies.
"""

import ctypes
import struct
from typing import Any

import numpy as np

from ..planning.schedule import LEAST_STRIP
from ..support.errors import DeviceError
from ..support.intervals import round_up
from . import driver, tensor_tiles
from .catalog import KERNELS
from .config import Config
from .driver import DriverError
from .mma import Mma
from .product import Operand, Product, Strips
from .split import Split

_MAP_TYPES = {"float16": 6, "float32": 11, "int8": 0, "uint8": 0}
"""CU_TENSOR_MAP_DATA_TYPE_*; float32 as TF32."""
_SWIZZLE = {64: 2, 128: 3}
"""Bytes of a box's row → CU_TENSOR_MAP_SWIZZLE_*."""
_L2_PROMOTION_128 = 2
_TURN_PAYS = 288
"""Products of an element from which wgmma is faster than mma, although it must transpose the operand
(H200)."""


class Wgmma(Mma):
    """The kinds fp16x3, fp16, tf32 and int8."""

    def _shipped(self, a_mn: bool, b_mn: bool) -> list[Config]:
        unsigned = (self._types[name] == "uint8" for name in ("a", "b"))
        return tensor_tiles.wgmma(self.kind, a_mn, b_mn, *unsigned)

    def _choose(self, m: int, n: int, k: int) -> tuple[Config, int]:
        turned = sum({"a": m, "b": n}[name] for name in self.turned(self.configs[0]))
        if self._chooses and self.kind == "tf32" and m * n < _TURN_PAYS * turned:
            configs = super()._shipped(*self._mn.values())
            return tensor_tiles.choose_mma(configs, m, n, k, self._multiprocessors, self._shared)
        return tensor_tiles.choose_wgmma(self.configs, m, n, k, self._multiprocessors)

    def _makes_triangle(self, product: Product, split: Split, strips: Strips, stream: Any) -> bool:
        """Leaves a C that is one strip, or needs slices of k, to `_multiply`."""
        m, n = product.m, product.n
        if not strips.lower or strips.rows or m <= LEAST_STRIP:
            return False
        config, slices = self.choose(m, n, product.k)
        if slices > 1 or config.kernel != "wgmma":
            return False
        product = self._turn_operands(config, product, stream)
        self._launch(config, 1, product, split, stream, (strips.per_row(m, n), strips.above))
        return True

    def _multiply(self, config: Config, slices: int, product: Product, split: Split, stream: Any) -> None:
        if config.kernel == "mma":
            super()._multiply(config, slices, product, split, stream)
        else:
            self._launch(config, slices, product, split, stream)

    def _launch(
        self, config: Config, slices: int, product: Product, split: Split, stream: Any,
        lower: tuple[int, int] = (0, 0),
    ) -> None:  # fmt: skip
        """Start the kernel. `lower`: of a symmetric C, the columns for each row, and the rows above it."""
        m, n, k, c = product.m, product.n, product.k, product.c
        maps = (
            self._map(config, "a", k, product.a, m),
            self._map(config, "b", k, product.b, n),
        )
        alpha, beta = self._factors(product)
        i32, u, cluster = np.int32, np.uintp, config.value("CLUSTER")
        args = (
            *maps, i32(m), i32(n), i32(k), u(self.scratch.drawn(stream)), alpha, beta, u(c.ptr),
            np.int64(c.ld), u(split.a), u(split.b), u(split.flag), i32(slices), *map(i32, lower),
        )  # fmt: skip
        at_once = self._multiprocessors // cluster * config.value("RESIDENT")
        grid = min(at_once, config.grid(m, n)[0] * slices) * cluster
        self._function(config)((grid,), config.block, args, stream, config.shared_bytes)

    def _map(self, config: Config, name: str, k: int, operand: Operand, lines: int) -> Any:
        """Return the tensor map of an operand, as a kernel argument. `lines`: rows of op(A), or columns of
        op(B)."""
        tile, ld = {"a": "BM", "b": "BN"}[name], operand.ld
        shared = "a" if config.value("ALONG_N") else "b"
        parts = config.value("CLUSTER") if name == shared else 1
        planes = 2 if self.kind == "fp16x3" else 1
        dtype = "float16" if planes == 2 else self._types[name]
        size, depth = np.dtype(dtype).itemsize, config.value("BK")
        if config.value(f"{name.upper()}_MN"):
            width, height, box = lines, k, (128 // size, depth // parts)
        else:
            width, height, box = k, lines, (depth, config.value(tile) // parts)
        if planes == 2:
            width, ld = 2 * round_up(width, 64), 2 * ld
        return tensor_map(dtype, operand.ptr, max(1, width), max(1, height), ld * size, box)


class Rung(Wgmma):
    """The rungs warpgroup, ring, producer and clusters of the ladder, which take A and B as stored."""

    def _shipped(self, a_mn: bool, b_mn: bool) -> list[Config]:
        return KERNELS[self.kind].configs(self._types["a"], False, False)

    def _choose(self, m: int, n: int, k: int) -> tuple[Config, int]:
        return self.configs[0], 1

    def _multiply(self, config: Config, slices: int, product: Product, split: Split, stream: Any) -> None:
        m, n, k, c, i32 = product.m, product.n, product.k, product.c, np.int32
        maps = self._map(config, "a", k, product.a, m), self._map(config, "b", k, product.b, n)
        alpha, beta = self._factors(product)
        args = *maps, i32(m), i32(n), i32(k), alpha, beta, np.uintp(c.ptr), np.int64(c.ld)
        cluster, (grid,) = config.value("CLUSTER"), config.grid(m, n)
        if self.kind == "clusters":  # they stay for many tiles
            grid = min(self._multiprocessors // cluster, grid)
        self._function(config)((grid * cluster,), config.block, args, stream, config.shared_bytes)


def open_tensor_gemm(
    kernel: str,
    trans_a: bool,
    trans_b: bool,
    a_type: str,
    b_type: str,
    config: Config | None = None,
    spared: int = 0,
) -> Mma:
    """Open a kernel of the catalog whose launcher is not `launch`. The arguments are those of
    `TensorGemm`."""
    kinds: dict[str, type[Mma]] = {"rung": Rung, "wgmma": Wgmma, "mma": Mma}
    return kinds[KERNELS[kernel].launcher](kernel, trans_a, trans_b, a_type, b_type, config, spared)


def tensor_map(dtype: str, ptr: int, width: int, height: int, pitch: int, box: tuple[int, int]) -> Any:
    """Return a CUtensorMap, as a kernel's argument, of a matrix of height × width elements whose rows start
    `pitch` bytes apart. A copy brings `box` (elements along a row, rows), with zeros beyond the matrix.

    Raises DeviceError if the driver refuses.
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
