"""Checks of the blocks that the CPU makes: products of panels with vectors, by the same workers.

A worker takes some rows, converts them piece by piece to float64 in memory that its cache holds, and reads
them there for the product and for the norms. Integers that float64 might not add up exactly are converted to
int64 instead, which NumPy multiplies without BLAS.

float32 is not converted, because conversion would cost more than all the rest (3 % of the product of 4096³):
pieces are multiplied and squared as they are, which the tolerance allows for, and added up in float64. A
piece whose sums leave the range of float32 is done again in float64. Integers of 8 bits are multiplied in
float32, modulo a prime, and mostly stored so.
"""

import queue
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from ...engine.check import Sums, Verdict
from ...engine.ports import Array, Operation
from ...planning.ledger import check_bytes
from ...planning.plan import Plan
from ...support.intervals import ceil_div, ranges

TILE_ELEMENTS = 1 << 16
"""Elements of a converted piece: 512 KiB, twice that if complex."""
DIRECT_TIMES = 8
"""Pieces that are not converted are larger by this factor, because Python's own time for each piece
counts."""
DEPTH = 4096
"""The most columns of a piece."""
SAFE = 1e-30, 1e38
"""Squared norms between these are right in float32: no square that counts has left its range."""
MODULUS = 251
"""Panels of 8-bit integers are checked modulo this. Their products with y = op(B)·x are then small enough
for float32 to add up hundreds of them exactly, in one pass without a conversion. A flipped bit never changes
a sum by a multiple of a prime; any other error passes with a probability of at most 1/2 + 1/251."""
LEAST_DEPTH = 64
"""Least columns of a piece for which the conversion to float64 pays."""

BLAS_DEPTH = 1024
"""The most terms that BLAS adds up in one register: the depth of a panel that it packs at a time."""

Run = Callable[[Callable[[slice], None], Iterator[tuple[slice]]], None]
"""A function that lets workers do something for slices."""


class Checks:
    """The check of one block at a time."""

    def __init__(self, plan: Plan, operation: Operation, run: Run, threads: int):
        self._op, self._run, self._k = operation, run, plan.problem.k
        dtype = operation.arithmetic.check_type
        sums, _ = check_bytes(plan.problem, plan.bm, plan.bn, plan.bk)
        self._sums = Sums.within(np.empty(sums, np.uint8), plan.bm, plan.bk, dtype)
        self._x, self._y = np.empty(plan.bn, dtype), np.empty(plan.bk, dtype)
        self._random = np.random.default_rng()
        self._threads = threads
        self._scratch: queue.SimpleQueue[Array] = queue.SimpleQueue()
        for _ in range(threads):
            self._scratch.put(np.empty(TILE_ELEMENTS, dtype))
        self._rounding = operation.arithmetic.rounding(min(plan.bk, BLAS_DEPTH))
        if operation.arithmetic.exact and _is_small(operation.arithmetic.panel):
            self._rounding = replace(self._rounding, modulus=MODULUS)
        elif operation.arithmetic.panel == np.float32:
            self._rounding = replace(self._rounding, check=(2.0**-24, DEPTH))

    def begin(self, c: Array) -> None:
        """Begin a block: draw a new vector x, and multiply the old C by it."""
        rows, cols = c.shape
        self._x[:cols] = 1 - 2 * self._random.integers(0, 2, cols, np.int8)
        for x in (self._sums.product, self._sums.a, self._sums.old, self._sums.c):
            x[:rows] = 0
        self._sums.b[:] = 0
        if self._op.beta != 0:
            self._times(c, self._x, _largest(c), self._sums.old, self._sums.c)

    def add(self, a: Array, b: Array, largest: tuple[int, int] = (0, 0)) -> None:
        """Add the products of a pair of panels with x. `largest`: no integer in the panel of op(A), or of
        op(B), exceeds it."""
        if self._op.alpha == 0:  # then NaN in A and B is none in C
            return
        k = len(b)
        self._y[:k] = 0
        self._times(b, self._x, max(1, largest[1]), self._y, self._sums.b)
        most = max(1, largest[1]) * b.shape[1]
        if self._rounding.modulus:
            most = MODULUS // 2
            self._y[:k] = (self._y[:k] + most) % MODULUS - most
        self._times(a, self._y, max(1, largest[0]) * most, self._sums.product, self._sums.a)

    def end(self, c: Array) -> Verdict:
        """Multiply the finished block by x, and compare."""
        rows, cols = c.shape
        self._sums.found[:rows] = 0
        self._times(c, self._x, _largest(c), self._sums.found, None)
        op = self._op
        return self._sums.verdict(rows, self._k, cols, op.alpha, op.beta, self._rounding)

    def _times(self, matrix: Array, vector: Array, largest: int, out: Array, squares: Array | None) -> None:
        """Compute out += matrix·vector, and squares += squared norms of the rows. `largest`: no product of
        integers exceeds it."""
        count, cols = matrix.shape
        if 0 in (count, cols):
            return
        exact, dtype = out.dtype.kind == "i", out.dtype
        depth, direct, small = min(DEPTH, cols), matrix.dtype == np.float32, _is_small(matrix.dtype)
        if exact:
            depth = min(depth, 2 ** (24 if small else 53) // largest)
            if depth >= min(LEAST_DEPTH, cols):
                dtype = np.dtype(np.float32 if small else np.float64)
            else:
                depth = min(DEPTH, cols)
        along = matrix.strides[1] == matrix.itemsize
        if not along:  # rows of the tile are columns here: these should be long
            depth = min(depth, 64)
        height = TILE_ELEMENTS // depth
        if direct and along:  # without scratch: higher, as long as all workers have some
            height = max(height, min(DIRECT_TIMES * height, ceil_div(count, 4 * self._threads)))
        vector = vector[:cols].astype(dtype, copy=False)
        single = vector.astype(np.float32) if direct else vector

        def work(strip: slice) -> None:
            scratch = self._scratch.get()
            try:
                for start, stop in ranges(cols, depth):
                    source = matrix[strip, start:stop]
                    if direct and exact:
                        out[strip] += (source @ single[start:stop]).astype(out.dtype)
                        continue
                    if direct and self._add_single(source, single[start:stop], out, squares, strip, along):
                        continue
                    for first, last in ranges(len(source), TILE_ELEMENTS // depth):
                        some, rows = source[first:last], slice(strip.start + first, strip.start + last)
                        flat = scratch.view(dtype)[: some.size]
                        tile = flat.reshape(some.shape) if along else flat.reshape(some.shape[::-1]).T
                        with np.errstate(all="ignore"):
                            np.copyto(tile, some, casting="unsafe")
                            product = tile @ vector[start:stop]
                            out[rows] += product.astype(out.dtype, copy=False)
                            if squares is self._sums.b and not exact:  # their sum is enough
                                squares[rows.start] += _squares(flat[None, :], True)[0]
                            elif squares is not None and not exact:
                                squares[rows] += _squares(tile, along)
            finally:
                self._scratch.put(scratch)

        self._run(work, ((slice(*strip),) for strip in ranges(count, height)))

    def _add_single(
        self, source: Array, vector: Array, out: Array, squares: Array | None, strip: slice, along: bool
    ) -> bool:
        """Add a piece's products and norms in float32. Returns False, and adds nothing, if float32 cannot
        hold them."""
        with np.errstate(all="ignore"):
            product = source @ vector
            if not np.isfinite(product).all():
                return False
            if squares is not None:
                total = squares is self._sums.b
                norms = _squares(source.T if total and not along else source, along or total)
                if not (norms.min() > SAFE[0] and norms.max() < SAFE[1]):
                    return False
                if total:
                    squares[strip.start] += norms.sum(dtype=np.float64)
                else:
                    squares[strip] += norms
            out[strip] += product
        return True


def _squares(tile: Array, along: bool) -> Array:
    """Return the squared norms of the rows; `along`: rows are contiguous. If the square of a part is too
    large, the norm is infinite; the complex product x̄·x would make it NaN."""
    found: Array
    if along:
        parts = tile.view(tile.real.dtype)
        found = np.vecdot(parts, parts)
    elif tile.dtype.kind == "c":
        found = _squares(tile.real, along) + _squares(tile.imag, along)
    else:
        found = np.square(tile) @ np.ones(tile.shape[1], tile.dtype)
    return found


def _is_small(panel: np.dtype[np.generic]) -> bool:
    """Whether a panel holds numbers of which float32 adds up hundreds exactly if they are 8-bit integers."""
    return panel == np.float32 or panel.itemsize == 1


def _largest(block: Array) -> int:
    """The largest magnitude that an integer in a block can have."""
    return 2**31 if block.dtype == np.int32 else 2**63
