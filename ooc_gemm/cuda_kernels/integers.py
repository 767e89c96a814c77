"""Products of integers whose sums may pass int32: exact partial sums of 8-bit integers, added up in int64.

    A, B ──bytes.cu──► planes of bytes ──int8 kernel, k cut where──► partial sums ──sum.cu──► C, int64
         of wider types                   int32 might overflow        in int32       · 256ⁱ⁺ʲ
                                                                     (a tile of C at a time)

An integer of w bytes is x = Σ xᵢ·256ⁱ, so a product of two matrices is the sum of the products of planes i of
A and j of B, times 256ⁱ⁺ʲ. Sums wrap around at 64 bits, which is right for all that fit int64, and makes the
products with i + j ≥ 8 superfluous.
"""

from dataclasses import dataclass, replace
from itertools import product as pairs
from typing import Any

import numpy as np

from ..support.intervals import ceil_div, ranges, round_up
from . import preparations
from .launch import load
from .product import Operand, Product, Strips, Tile
from .scratch import Scratch
from .tensor import TensorGemm
from .wgmma import open_tensor_gemm

TILE_ELEMENTS = 1 << 25
"""Most elements of C whose partial sums are held at a time. A tile of this size has several rounds of work
for each multiprocessor of an H200."""
TILE_COLUMNS = 1 << 16
"""Most columns of such a tile."""
SCRATCH_BYTES = 4 * TILE_ELEMENTS
"""Bytes of device memory for partial sums."""
_DEPTH_STEP = 256
"""Parts of k begin at multiples of this many bytes, as rows of operands do."""
_THREADS = 256
"""Threads of a block of bytes.cu and sum.cu."""
_PER_THREAD = 4
"""Elements that a thread of bytes.cu cuts."""


def exact_depth(a_type: str, b_type: str) -> int:
    """Return the largest depth, a multiple of 256, of a sum of products that int32 holds whatever the
    elements are. `a_type`, `b_type`: NumPy's names of the operands' types, int8 or uint8."""
    largest = 1
    for name in (a_type, b_type):
        info = np.iinfo(name)
        largest *= max(-int(info.min), int(info.max))
    return (2**31 - 1) // largest // _DEPTH_STEP * _DEPTH_STEP


def plane_pairs(size: int) -> list[tuple[int, int]]:
    """Return the pairs of planes whose products make up a product of integers of `size` bytes."""
    return [(i, j) for i, j in pairs(range(size), repeat=2) if i + j < 8]


@dataclass(frozen=True)
class _Part:
    """A product of two planes."""

    a: Operand
    b: Operand
    gemm: TensorGemm
    depth: int
    """Depth up to which int32 holds its sums."""
    factor: int
    """What its sums are multiplied by: 256 to the power of both planes' numbers."""


class WideIntegers:
    """C ← α·op(A)·op(B) + β·C by the kernel int8 or mma-int8, on the current device. C is int64. A is stored
    m×k, B n×k, and their rows start at multiples of 16 elements."""

    def __init__(self, kernel: str, a_type: str, b_type: str, spared: int = 0):
        """`kernel`: its name in the catalog. `a_type`, `b_type`: NumPy's names of the types of A and B, which
        are integers of the same size. `spared`: as of `TensorGemm`."""
        self._types = [np.dtype(name) for name in (a_type, b_type)]
        self._size = self._types[0].itemsize
        self._gemms = {
            types: open_tensor_gemm(kernel, False, True, *types, spared=spared)
            for types in {self._plane_types(i, j) for i, j in plane_pairs(self._size)}
        }
        self._add = load(preparations.sum_slices("int64", "int32"))["sum"]
        self._cut = load(preparations.cut(self._size), "cut")["cut"] if self._size > 1 else None
        self._scratch = Scratch()
        for gemm in self._gemms.values():  # which work one after the other
            gemm.scratch = self._scratch

    def _plane_types(self, i: int, j: int) -> tuple[str, str]:
        """Return the types of plane i of A and of plane j of B."""
        a, b = (
            "int8" if dtype.kind == "i" and plane == self._size - 1 else "uint8"
            for dtype, plane in zip(self._types, (i, j), strict=True)
        )
        return a, b

    def reserve(self, m: int, n: int, k: int) -> None:
        """Load the kernel, and allocate scratch memory for products up to m×n×k."""
        for types, gemm in self._gemms.items():
            gemm.reserve(min(m, TILE_ELEMENTS), min(n, TILE_COLUMNS), min(k, exact_depth(*types)))
        self._scratch.at("parts", SCRATCH_BYTES)
        if self._size > 1:
            for name, lines in (("a", m), ("b", n)):
                self._scratch.at(name, lines * round_up(k, 16) * self._size)

    def __call__(self, product: Product, stream: Any, strips: Strips | None = None) -> None:
        """Start the product in a CuPy stream of the current device. Returns at once. `strips`: the strips in
        which C is made, by default one. Only the real parts of α and β are used."""
        if product.m == 0 or product.n == 0:
            return
        if product.alpha == 0:
            product = replace(product, k=0)
        strips = strips or Strips()
        parts = self._parts(product, stream)
        for made, tiles in strips.tiled(product.m, product.n, TILE_ELEMENTS, TILE_COLUMNS):
            for tile in tiles:
                self._tile(product, parts, tile, stream)
            strips.after(made[-1][1])

    def _parts(self, product: Product, stream: Any) -> list[_Part]:
        """Return the products that make up a product, after cutting its operands into planes. One of depth 0
        is a single product, which multiplies nothing."""
        a = self._planes("a", product.a, product.m, product.k, stream)
        same = product.a.ptr == product.b.ptr
        b = a if same else self._planes("b", product.b, product.n, product.k, stream)
        found = []
        for i, j in plane_pairs(self._size)[: None if product.k else 1]:
            types = self._plane_types(i, j)
            found.append(_Part(a[i], b[j], self._gemms[types], exact_depth(*types), 256 ** (i + j)))
        return found

    def _planes(self, name: str, x: Operand, lines: int, k: int, stream: Any) -> list[Operand]:
        """Cut an operand into planes, which lie as it does. `name`: a or b. `lines`: its rows."""
        if self._cut is None or k == 0:
            return [x] * self._size
        plane = lines * x.ld
        at, fours = self._scratch.at(name, plane * self._size), plane // _PER_THREAD
        args = np.int64(fours), np.uintp(x.ptr), np.uintp(at)
        self._cut((ceil_div(fours, _THREADS),), (_THREADS,), args, stream)
        return [Operand(at + number * plane, x.ld) for number in range(self._size)]

    def _tile(self, product: Product, parts: list[_Part], tile: Tile, stream: Any) -> None:
        """Start the product for a tile of C. Its partial sums fit the scratch memory."""
        rows, cols = tile.rows, tile.cols
        m, n, c = rows[1] - rows[0], cols[1] - cols[0], product.c
        sums = Operand(self._scratch.at("parts", SCRATCH_BYTES), n)
        out = c.moved(8 * (rows[0] * c.ld + cols[0]))
        beta, strips = product.beta, Strips(lower=tile.lower, above=tile.above)
        for part in parts:
            a, b = part.a.moved(rows[0] * part.a.ld), part.b.moved(cols[0] * part.b.ld)
            for start, stop in ranges(product.k, part.depth) if product.k else [(0, 0)]:
                depth = stop - start
                one = Product(m, n, depth, 1.0, a.moved(start), b.moved(start), 0.0, sums)
                part.gemm(one, stream, strips=strips)
                self._accumulate(replace(product, m=m, n=n, beta=beta, c=out), sums, part.factor, stream)
                beta = 1.0

    def _accumulate(self, product: Product, sums: Operand, factor: int, stream: Any) -> None:
        """Start C ← α·factor·(partial sums) + β·C."""
        m, n, c = product.m, product.n, product.c
        alpha = int(product.alpha.real) * factor % 2**64
        args = (
            np.int64(m), np.int32(n), np.int32(1), np.uint64(alpha).astype(np.int64), np.uintp(sums.ptr),
            np.int64(int(product.beta.real)), np.uintp(c.ptr), np.int64(c.ld), np.uintp(0),
        )  # fmt: skip
        self._add((ceil_div(m * n, _THREADS),), (_THREADS,), args, stream)
