"""Exact products of integers by BLAS, in float32 or float64.

A float type of p bits adds up d products of numbers of at most x and y exactly, in any order, if x·y·d ≤ 2^p.
So a pair of panels is multiplied in parts along k, each of a depth for which that holds, and the partial sums
are added up in integers. The depth follows from the largest elements of the two panels, and not from their
types: products of values of 0 to 2 in float32 are exact up to a depth of four million.

Where such parts would be too shallow in float64, the elements y of the panel with the larger ones are cut:

    y = hi·2^s + lo,  0 ≤ lo < 2^s        x·y = (x·hi)·2^s + x·lo

Two products do for all panels whose sums fit int64. With x·y·d ≤ 2^63 and x ≤ y there is an s for which both
partial sums stay below 2^53, as long as x·d ≤ 2^43. Sums are added up modulo 2^64, which is right for all
that fit int64; `Overflow` (engine/overflow.py) refuses those that might not.

Where parts would be too shallow in float32 because elements are not negative, half of the largest one is
subtracted from all of a panel. Its elements are then half as large, and parts twice as deep:

    Σ (x + p)(y + q) = Σ x·y + q·Σ x + p·Σ y + p·q·k
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ...engine.ports import Arithmetic, Array
from ...support.intervals import ranges, round_up
from .blas import gemm
from .tiles import ALIGNMENT, STRIP, TILE, Scratch, Tiles, like

SLICE_DEPTH = 512
"""Largest depth of a part whose elements are cut, or converted from int64."""
LEAST_DEPTH = 128
"""Least depth of a part for which one product of float64 is faster than two of cut elements."""
SHALLOW = 1024
"""Depth below which parts take longer because of additions in integers."""
EXACT_BITS = {"f": 24, "d": 53}
"""Integers up to 2 to this power are exact."""


@dataclass(frozen=True)
class Parts:
    """How a pair of panels is multiplied."""

    depth: int
    """Depth of a part along k."""
    cut: int | None = None
    """Number of the operand whose elements are cut: 0 is op(A), 1 is op(B). None: neither."""
    shift: int = 0
    """Bits of the lower half of an element that is cut: s in the formula above."""


def parts_of(panel: np.dtype[np.generic], largest: tuple[int, int], k: int) -> Parts:
    """Choose how panels of this type and of depth `k` are multiplied exactly. `largest`: no element of
    op(A), or of op(B), exceeds it in magnitude."""
    x, y = (max(1, value) for value in largest)
    k = max(1, k)
    exact = 1 << EXACT_BITS.get(panel.char, 53)
    depth = min(k, exact // (x * y))
    if panel.kind == "i":  # elements are converted part by part
        depth = min(depth, SLICE_DEPTH)
    if depth >= min(k, LEAST_DEPTH) or panel.char == "f":
        return Parts(depth)
    small, large = sorted((x, y))
    depth = min(k, SLICE_DEPTH, exact // small)
    while True:
        most = exact // (small * depth)
        shift = most.bit_length() - 1
        if (large >> shift) + 1 <= most:
            return Parts(depth, int(y >= x), shift)
        depth //= 2


def scratch_bytes(arithmetic: Arithmetic) -> int:
    """Bytes that each worker needs: a tile of products, a strip of it as integers, and parts of panels."""
    if not arithmetic.exact:
        return 0
    panel, itemsize = arithmetic.panel, arithmetic.block.itemsize
    converted = 0 if arithmetic.kernel == "blas" else 3 if panel.kind == "i" else 2
    sizes = [TILE**2 * panel.itemsize, STRIP * TILE * itemsize] + [TILE * SLICE_DEPTH * 8] * converted
    return sum(round_up(size, ALIGNMENT) for size in sizes)


@dataclass(frozen=True)
class Centred:
    """What is to be added to the product of two panels from whose elements numbers were subtracted."""

    by: tuple[int, int]
    """What was subtracted from op(A), and from op(B): p and q of the formula above."""
    rows: Array
    """Sum of each row of op(A) after that, as int64."""
    cols: Array
    """Sum of each column of op(B) after that, as int64."""
    k: int

    def add(self, rows: slice, cols: slice, alpha: int, out: Array) -> None:
        """Add it to a part of the block, times α. Sums wrap around."""
        p, q = self.by
        down = alpha * (q * self.rows[rows] + p * q * self.k)
        across = alpha * p * self.cols[cols]
        for start, stop in ranges(len(out), STRIP):
            out[start:stop] += (down[start:stop, None] + across).astype(out.dtype)


class Integers(Tiles):
    """Multiplies tiles of panels that hold integers, by BLAS."""

    def __init__(self, arithmetic: Arithmetic, threads: int):
        self._panel = arithmetic.panel
        self._type = np.dtype(np.float64) if arithmetic.panel.kind == "i" else arithmetic.panel
        super().__init__(self._type, threads, scratch_bytes(arithmetic))
        _, self._run = gemm(self._type.char)
        of_bytes = arithmetic.panel.char == "f"
        self._positive = [of_bytes and most == np.iinfo(np.uint8).max for most in arithmetic.largest]

    def centred(
        self,
        a: Array,
        b: Array,
        largest: tuple[int, int],
        deal: Callable[[Callable[[slice], None], int], None],
    ) -> tuple[Centred | None, tuple[int, int]]:
        """Subtract numbers from the elements of two panels, in place, if their parts would be too shallow.

        deal: lets workers do something for all slices of an extent. Returns what is then to be added to the
        product, and the largest magnitudes that are left. A panel that is both operands is changed once.
        """
        k, same = a.shape[1], np.may_share_memory(a, b)
        fits = max(largest) * k < 1 << EXACT_BITS["f"]  # sums of rows are exact
        if not (fits and any(self._positive)) or parts_of(self._panel, largest, k).depth >= min(k, SHALLOW):
            return None, largest
        p, q = (most // 2 if positive else 0 for most, positive in zip(largest, self._positive, strict=True))
        rows, cols, ones = np.empty(len(a)), np.empty(b.shape[1]), np.ones(k, self._type)

        def left(some: slice) -> None:
            a[some] -= self._type.type(p)
            rows[some] = a[some] @ ones

        def right(some: slice) -> None:
            if not same:
                b[:, some] -= self._type.type(q)
            cols[some] = ones @ b[:, some]

        deal(left, len(a))
        deal(right, b.shape[1])
        found = Centred((p, q), rows.astype(np.int64), cols.astype(np.int64), k)
        return found, (largest[0] - p, largest[1] - q)

    def tile(
        self,
        a: Array,
        b: Array,
        largest: tuple[int, int],
        alpha: int,
        beta: int,
        out: Array,
        centred: Centred | None = None,
    ) -> Callable[[slice, slice], None]:
        """Return a function that computes out ← α·a·b + β·out for some rows and columns of a block. centred:
        what is to be added to a·b."""
        how = parts_of(self._panel, largest, a.shape[1])

        def multiply(a: Array, b: Array, room: Array, products: Array, scratch: Scratch) -> Iterator[int]:
            for left, right, shift in self._operands(how, a, b, room, scratch):
                self._run(left, right, products, 1.0, 0.0)
                yield shift

        def finish(rows: slice, cols: slice) -> None:
            if centred:
                centred.add(rows, cols, alpha, out[rows, cols])

        return self._work(a, b, how.depth, alpha, beta, out, multiply, finish)

    def _operands(
        self, how: Parts, a: Array, b: Array, room: Array, scratch: Scratch
    ) -> list[tuple[Array, Array, int]]:
        """Return the products that make up a·b: two operands of BLAS, and the bits by which their product is
        shifted. `room` is overwritten."""
        if how.cut is None:
            return [(self._converted(a, scratch), self._converted(b, scratch), 0)]
        if how.cut == 0:
            right = self._converted(b, scratch)
            hi, lo = self._halves(a, how.shift, room, scratch)
            return [(hi, right, how.shift), (lo, right, 0)]
        left = self._converted(a, scratch)
        hi, lo = self._halves(b, how.shift, room, scratch)
        return [(left, hi, how.shift), (left, lo, 0)]

    def _converted(self, x: Array, scratch: Scratch) -> Array:
        """Return a part of a panel in the type that BLAS multiplies."""
        if x.dtype == self._type:
            return x
        found = scratch.like(x, self._type)
        np.copyto(found, x, casting="unsafe")
        return found

    def _halves(self, x: Array, shift: int, room: Array, scratch: Scratch) -> tuple[Array, Array]:
        """Cut the elements of x: hi and lo of the formula above."""
        hi, lo = scratch.like(x, self._type), scratch.like(x, self._type)
        if x.dtype.kind == "i":
            whole = like(x, room[: x.size].view(x.dtype))
            np.right_shift(x, shift, out=whole)
            np.copyto(hi, whole, casting="unsafe")
            np.bitwise_and(x, (1 << shift) - 1, out=whole)
            np.copyto(lo, whole, casting="unsafe")
        else:
            np.multiply(x, 2.0**-shift, out=hi)
            np.floor(hi, out=hi)
            np.multiply(hi, -(2.0**shift), out=lo)
            np.add(lo, x, out=lo)
        return hi, lo
