"""Products of 8-bit integers whose sums may pass int32: exact partial sums, added up in int64.

A, B ──int8 kernel, k cut where int32 might overflow──► partial sums in int32 ──sum.cu──► C, int64
                                                         (a tile of C at a time)
"""

from dataclasses import replace
from typing import Any

import numpy as np

from ..support.intervals import ceil_div, ranges
from . import preparations
from .launch import load
from .product import Operand, Product, Strips
from .scratch import Scratch
from .wgmma import open_tensor_gemm

TILE_ELEMENTS = 1 << 25
"""Most elements of C whose partial sums are held at a time. A tile of this size has several rounds of work
for each multiprocessor of an H200."""
TILE_COLUMNS = 1 << 16
"""Most columns of such a tile."""
SCRATCH_BYTES = 4 * TILE_ELEMENTS
"""Bytes of device memory for partial sums."""
_TILE_STEP = 256
"""Rows of such a tile are a multiple of this, which is the height of the largest tile of a kernel."""
_DEPTH_STEP = 256
"""Parts of k begin at multiples of this many bytes, as rows of operands do."""
_SUM_THREADS = 256
"""Threads of a block of sum.cu."""


def exact_depth(a_type: str, b_type: str) -> int:
    """Return the largest depth, a multiple of 256, of a sum of products that int32 holds whatever the
    elements are. `a_type`, `b_type`: NumPy's names of the operands' types."""
    largest = 1
    for name in (a_type, b_type):
        info = np.iinfo(name)
        largest *= max(-int(info.min), int(info.max))
    return (2**31 - 1) // largest // _DEPTH_STEP * _DEPTH_STEP


class WideIntegers:
    """C ← α·op(A)·op(B) + β·C by the kernel int8 or mma-int8, on the current device. C is int64. A is stored
    m×k, B n×k, and their rows start at multiples of 16 bytes."""

    def __init__(self, kernel: str, a_type: str, b_type: str):
        """`kernel`: its name in the catalog. `a_type`, `b_type`: NumPy's names of the types of A and B."""
        self._gemm = open_tensor_gemm(kernel, False, True, a_type, b_type)
        self._add = load(preparations.sum_slices("int64", "int32"))["sum"]
        self._depth = exact_depth(a_type, b_type)
        self._scratch = Scratch()

    def reserve(self, m: int, n: int, k: int) -> None:
        """Load the kernel, and allocate scratch memory for products up to m×n×k."""
        self._gemm.reserve(min(m, TILE_ELEMENTS), min(n, TILE_COLUMNS), min(k, self._depth))
        self._scratch.at("parts", SCRATCH_BYTES)

    def __call__(self, product: Product, stream: Any, strips: Strips | None = None) -> None:
        """Start the product in a CuPy stream of the current device. Returns at once. `strips`: the strips in
        which C is made, by default one. Only the real parts of α and β are used."""
        if product.m == 0 or product.n == 0:
            return
        if product.alpha == 0:
            product = replace(product, k=0)
        strips = strips or Strips()
        for start, stop, width in strips.of(product.m, product.n):
            cols = min(width, TILE_COLUMNS)
            rows = TILE_ELEMENTS // cols // _TILE_STEP * _TILE_STEP
            for top, bottom in ranges(stop - start, rows):
                for left, right in ranges(width, cols):
                    self._tile(product, (start + top, start + bottom), (left, right), stream)
            strips.after(stop)

    def _tile(self, product: Product, rows: tuple[int, int], cols: tuple[int, int], stream: Any) -> None:
        """Start the product for a tile of C. Its partial sums fit the scratch memory."""
        a, b, c = product.a, product.b, product.c
        m, n = rows[1] - rows[0], cols[1] - cols[0]
        parts = Operand(self._scratch.at("parts", SCRATCH_BYTES), n)
        out = c.moved(8 * (rows[0] * c.ld + cols[0]))
        a, b = a.moved(rows[0] * a.ld), b.moved(cols[0] * b.ld)
        beta = product.beta
        for start, stop in ranges(product.k, self._depth) if product.k else [(0, 0)]:
            part = Product(m, n, stop - start, 1.0, a.moved(start), b.moved(start), 0.0, parts)
            self._gemm(part, stream)
            self._accumulate(replace(product, m=m, n=n, beta=beta, c=out), parts, stream)
            beta = 1.0

    def _accumulate(self, product: Product, parts: Operand, stream: Any) -> None:
        """Start C ← α·(partial sums) + β·C."""
        m, n, c = product.m, product.n, product.c
        alpha, beta = np.int64(int(product.alpha.real)), np.int64(int(product.beta.real))
        args = (
            np.int64(m), np.int32(n), np.int32(1), alpha, np.uintp(parts.ptr), beta, np.uintp(c.ptr),
            np.int64(c.ld), np.uintp(0),
        )  # fmt: skip
        self._add((ceil_div(m * n, _SUM_THREADS),), (_SUM_THREADS,), args, stream)
