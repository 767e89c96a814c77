"""Products of integers by their residues modulo small numbers.

    op(A), op(B) ──residues.cu──► planes of bytes ──wgmma.cu, one launch──► planes of sums ──recombine.cu──► C
                                  one for each modulus,                     modulo each,
                                  three of complex numbers                  of a tile of C at a time

Both operands lie along k. float64 and complex128 are scaled to integers on the way, by exponents that
scales.py finds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..support.intervals import ceil_div, round_up
from . import preparations, tensor_tiles
from .launch import load
from .product import Operand, Product, Tile
from .scratch import Scratch
from .wgmma import tensor_map

PITCH = 16
"""Rows of planes start at multiples of this many bytes, as tensor maps demand."""
SCRATCH_BYTES = 1 << 29
"""Bytes of device memory for the planes of sums of a tile of C. With 16 moduli a tile has 2²⁵ elements, which
is several rounds of work for each multiprocessor of an H200 in each of its planes."""
TILE_COLUMNS = 1 << 15
"""Most columns of such a tile: 256 rows of as many planes as there are fit the memory."""
EXPONENT_BYTES = 4
"""Bytes of the exponent of a row or column of C."""
_SIGN = {"a": 1, "b": -1}
"""Sign of d: op(A) is multiplied by it, op(B) divided."""
_THREADS, _CUT, _JOINED = 256, 8, 4
"""Threads of a block of residues.cu and recombine.cu; numbers of each in the one, where a complex element is
two, and elements of each in the other."""


@dataclass(frozen=True, slots=True)
class Scales:
    """Addresses of what scales operands to integers (kernels/common/scales.cuh); 0 for integers."""

    depth: int = 0
    """d of each k."""
    a: int = 0
    """Exponents of the rows of op(A)."""
    b: int = 0
    """Exponents of the columns of op(B)."""
    state: int = 0
    """A `State`."""

    @property
    def moduli(self) -> int:
        """The number of moduli, the second word of a `State`."""
        return self.state + 4 if self.state else 0

    def moved(self, row: int, col: int) -> "Scales":
        """Return what belongs to the part of C that begins at this row and column."""
        if not self.state:
            return self
        return replace(self, a=self.a + EXPONENT_BYTES * row, b=self.b + EXPONENT_BYTES * col)


@dataclass(frozen=True, slots=True)
class Planes:
    """The planes of an operand in device memory, one behind the other."""

    ptr: int
    pitch: int
    """Bytes from row to row."""
    lines: int
    """Rows of a plane: rows of op(A), or columns of op(B)."""
    first: int = 0
    """The first of them that is multiplied."""


class Residues:
    """Makes planes of operands, and C of planes, on the current device. C is float64, complex128 or int64."""

    def __init__(
        self,
        types: tuple[str, str],
        counts: Sequence[int],
        conjugate: tuple[bool, bool],
        multiprocessors: int,
        scratch: Scratch,
    ):
        """`types`: NumPy's names for the types of A and B. `counts`: the numbers of moduli that there may be,
        the largest last; for integers one. `conjugate`: whether op() conjugates A, and B."""
        complex_, floating = (np.dtype(types[0]).kind in kinds for kinds in ("c", "fc"))
        self._out = np.dtype(types[0] if floating else np.int64)
        self._scalar = np.float64 if floating else np.int64
        self._count, self._multiprocessors, self._scratch = counts[-1], multiprocessors, scratch
        self._cut = _THREADS * _CUT // (2 if complex_ else 1)
        self.config = tensor_tiles.of_residues(3 if complex_ else 1)
        self.planes_of_all = self.config.value("PER_MODULUS") * self._count
        """Bytes of all planes for each of their elements."""
        self._multiply = load(self.config)["wgmma"]
        self._make = {
            name: load(preparations.residues(dtype, self._count, turned))["residues"]
            for name, dtype, turned in zip("ab", types, conjugate, strict=True)
        }
        self._recombine = load(preparations.recombine(self._out.name, counts))["recombine"]

    def bytes_of(self, lines: int, k: int) -> int:
        """Return the bytes of the planes of an operand."""
        return self.planes_of_all * lines * round_up(k, PITCH)

    def planes(self, name: str, x: Operand, lines: int, k: int, scales: Scales, stream: Any) -> Planes:
        """Start to write the planes of operand `name`, a or b, of `lines` rows."""
        pitch = round_up(k, PITCH)
        at = self._scratch.at(f"planes {name}", self.bytes_of(lines, k))
        i32, i64, u = np.int32, np.int64, np.uintp
        exponents = scales.a if name == "a" else scales.b
        args = (
            i32(lines), i32(k), u(x.ptr), i64(x.ld), u(scales.depth), i32(_SIGN[name]), u(exponents), u(at),
            i64(pitch // 4), i64(lines * pitch // 4), u(scales.state),
        )  # fmt: skip
        if k:
            self._make[name]((lines * ceil_div(k, self._cut),), (_THREADS,), args, stream)
        return Planes(at, pitch, lines)

    def tile_elements(self) -> int:
        """Return the most elements of a tile of C, with the padding of its rows."""
        return SCRATCH_BYTES // self.planes_of_all

    def tile(self, product: Product, a: Planes, b: Planes, tile: Tile, scales: Scales, stream: Any) -> None:
        """Start to make a tile of C of the planes of both operands."""
        (top, bottom), (left, right), c = tile.rows, tile.cols, product.c
        m, n, pitch = bottom - top, right - left, round_up(right - left, PITCH)
        sums = self._scratch.at("sums", SCRATCH_BYTES)
        moved = c.moved(self._out.itemsize * (top * c.ld + left))
        part = replace(product, m=m, n=n, c=moved)
        below = scales.moved(top, left)
        sides = replace(a, first=top), replace(b, first=left)
        self._products(part, sides, Operand(sums, pitch), tile, scales, stream)
        self._to_c(part, Operand(sums, pitch), below, stream)

    def _products(
        self, product: Product, planes: tuple[Planes, Planes], sums: Operand, tile: Tile,
        scales: Scales, stream: Any,
    ) -> None:  # fmt: skip
        """Start the products of all planes for a tile, which is all of `product`."""
        m, n, config = product.m, product.n, self.config
        i32, i64, u = np.int32, np.int64, np.uintp
        maps = [
            plane_map(x, self.planes_of_all, product.k, name, config)
            for name, x in zip("ab", planes, strict=True)
        ]
        args = (
            *maps, i32(m), i32(n), i32(product.k), u(self._scratch.drawn(stream)), i32(planes[0].lines),
            i32(planes[1].lines), u(sums.ptr), i64(sums.ld), i64(m * sums.ld), u(scales.moduli),
            i32(self._count), i32(tile.lower), i32(tile.above),
        )  # fmt: skip
        cluster = config.value("CLUSTER")
        grid = min(self._multiprocessors // cluster, config.grid(m, n)[0] * self.planes_of_all) * cluster
        self._multiply((grid,), config.block, args, stream, config.shared_bytes)

    def _to_c(self, product: Product, sums: Operand, scales: Scales, stream: Any) -> None:
        """Start to make a tile of C of the residues of its sums."""
        m, n, alpha, beta, c = product.m, product.n, product.alpha, product.beta, product.c
        i32, i64, u, scalar = np.int32, np.int64, np.uintp, self._scalar
        args = (
            i32(m), i32(n), scalar(alpha.real), scalar(alpha.imag), u(sums.ptr), i64(sums.ld // 4),
            i64(m * sums.ld // 4), scalar(beta.real), scalar(beta.imag), u(c.ptr), i64(c.ld), u(scales.a),
            u(scales.b), u(scales.state),
        )  # fmt: skip
        self._recombine((m * ceil_div(n, _THREADS * _JOINED),), (_THREADS,), args, stream)

    def reserve(self, m: int, n: int, k: int) -> None:
        """Allocate scratch memory for products up to m×n×k."""
        self._scratch.at("planes a", self.bytes_of(m, k))
        self._scratch.at("planes b", self.bytes_of(n, k))
        self._scratch.at("sums", SCRATCH_BYTES)


def plane_map(planes: Planes, count: int, k: int, name: str, config: Any) -> Any:
    """Return the tensor map of the planes of operand `name`, a or b, as a kernel's argument. Their rows
    follow each other as if they were one matrix, so that a tile at the edge of one brings rows of the next,
    which count for nothing."""
    high = config.value("BM") if name == "a" else config.value("BN") // config.value("CLUSTER")
    box = config.value("BK"), high
    ptr, rows = planes.ptr + planes.first * planes.pitch, count * planes.lines - planes.first
    return tensor_map("int8", ptr, max(1, k), rows, planes.pitch, box)
