"""Products of 8-bit integers as they are, by onnxruntime (Microsoft's MLAS), where it is installed.

Processors with VNNI, or the dot products of ARM, multiply bytes and add them up in 32 bits several times as
fast as float32. The fast product takes op(A) without signs and op(B) with signs (`matmul_integer`). Elements
of the other kind get their highest bit flipped, which adds 128 to them or subtracts it, and the library is
told what stands for zero.
"""

from collections.abc import Callable, Iterator

import numpy as np

from ...engine.ports import Arithmetic, Array
from ...support.intervals import round_up
from .matmul_integer import model
from .tiles import ALIGNMENT, STRIP, TILE, Scratch, Tiles

KERNEL = "int8"
DEPTH = 2048
"""Most elements along k of what is multiplied at a time. Sums stay far below 2^31."""
LEAST_OPERATIONS = 1 << 34
"""Fewest operations of a product for which the library is loaded, which takes 50 ms."""
_PACKED_BYTES = 1 << 20
"""Memory of each worker into which the library packs operands, in bytes."""
_FLIPPED = 128


def scratch_bytes(arithmetic: Arithmetic) -> int:
    """Bytes that each worker needs: parts of panels, which the library may have to transpose, a tile of
    products, and a strip of it."""
    strip = STRIP * TILE * arithmetic.block.itemsize
    sizes = [*[TILE * DEPTH] * 4, TILE**2 * 4, strip, _PACKED_BYTES]
    return sum(round_up(size, ALIGNMENT) for size in sizes)


class EightBit(Tiles):
    """Multiplies tiles of panels that hold 8-bit integers."""

    def __init__(self, arithmetic: Arithmetic, threads: int):
        own = scratch_bytes(arithmetic) - 2 * TILE * DEPTH - _PACKED_BYTES  # the library allocates the others
        super().__init__(np.dtype(np.int32), threads, own)

    def tile(self, a: Array, b: Array, alpha: int, beta: int, out: Array) -> Callable[[slice, slice], None]:
        """Return a function that computes out ← α·a·b + β·out for some rows and columns of a block."""
        zeros = _FLIPPED * (a.dtype == np.int8), -_FLIPPED * (b.dtype == np.uint8)
        run = model(a.strides[1] != 1, b.strides[1] != 1, *zeros)

        def multiply(a: Array, b: Array, room: Array, products: Array, scratch: Scratch) -> Iterator[int]:
            left, right = _flipped(a, np.int8, scratch), _flipped(b, np.uint8, scratch)
            run(left.view(np.uint8), right.view(np.int8), products)
            yield 0

        return self._work(a, b, DEPTH, alpha, beta, out, multiply)


def _flipped(x: Array, wrong: type, scratch: Scratch) -> Array:
    """Return a copy of a part of a panel as it is stored, with the highest bits flipped if its type is the
    wrong one."""
    stored = (x if x.strides[1] == 1 else x.T).view(np.uint8)
    found = scratch.take((stored.shape[0], stored.shape[1]), np.dtype(np.uint8))
    if x.dtype == wrong:
        np.bitwise_xor(stored, np.uint8(_FLIPPED), out=found)
    else:
        np.copyto(found, stored)
    return found
