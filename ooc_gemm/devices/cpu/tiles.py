"""Products of panels of integers, tile by tile and part by part along k, which are added up in integers."""

import queue
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np

from ...engine.ports import Array
from ...support.buffers import Bytes
from ...support.intervals import ranges, round_up
from .blas import scale_in_place

TILE = 1024
"""Largest side of what is multiplied at a time: its products fit the temporary of a worker."""
STRIP = 64
"""Rows of a tile that are converted to integers at a time, so that they stay in the processor's cache."""
ALIGNMENT = 64
"""Arrays in a worker's scratch begin at multiples of this many bytes."""


class Scratch:
    """Memory of a worker, from which arrays are taken one after the other. A `with` block gives back what is
    taken in it."""

    def __init__(self, memory: Bytes):
        self._memory, self._start = memory, 0
        self._marks: list[int] = []

    def __enter__(self) -> None:
        self._marks.append(self._start)

    def __exit__(self, *_: object) -> None:
        self._start = self._marks.pop()

    def take(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        """Return the next part of the memory as an array in C order."""
        start, nbytes = self._start, shape[0] * shape[1] * dtype.itemsize
        self._start += round_up(nbytes, ALIGNMENT)
        return self._memory[start : start + nbytes].view(dtype).reshape(shape)

    def like(self, x: Array, dtype: np.dtype[np.generic]) -> Array:
        """Return an array of the shape of x, whose rows or columns are contiguous as those of x are."""
        return like(x, self.take((1, x.size), dtype)[0])


Multiply = Callable[[Array, Array, Array, Array, Scratch], Iterator[int]]
"""A function that multiplies parts of two panels. It is also given a flat temporary for a tile and the
beginning of that as a matrix, which holds a product each time the function yields by how many bits that is to
be shifted."""


class Tiles:
    """Multiplies tiles of panels. Each worker has scratch of its own."""

    def __init__(self, products: np.dtype[np.generic], threads: int, nbytes: int):
        """products: the type of products of parts. nbytes: size of each worker's scratch."""
        self._products = products
        self._scratch: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        for _ in range(threads):
            self._scratch.put(np.empty(nbytes, np.uint8))

    def _work(
        self,
        a: Array,
        b: Array,
        depth: int,
        alpha: int,
        beta: int,
        out: Array,
        multiply: Multiply,
        finish: Callable[[slice, slice], None] = lambda rows, cols: None,
    ) -> Callable[[slice, slice], None]:
        """Return a function that computes out ← α·a·b + β·out for some rows and columns of a block. depth: of
        the parts. finish: called with these rows and columns at the end."""

        def tile(a: Array, b: Array, out: Array, scratch: Scratch) -> None:
            room = scratch.take((1, TILE**2), self._products)[0]
            products = room[: out.size].reshape(out.shape)
            strip = scratch.take((min(STRIP, len(out)), out.shape[1]), out.dtype)
            if beta != 0:
                scale_in_place(out, beta)
            fresh = beta == 0
            for part in ranges(a.shape[1], depth):
                k = slice(*part)
                with scratch:
                    for shift in multiply(a[:, k], b[k], room, products, scratch):
                        add(products, shift, alpha, out, strip, fresh)
                        fresh = False

        def work(rows: slice, cols: slice) -> None:
            memory = self._scratch.get()
            try:
                whole, left, right = out[rows, cols], a[rows], b[:, cols]
                for down, across in product(ranges(len(whole), TILE), ranges(whole.shape[1], TILE)):
                    r, c = slice(*down), slice(*across)
                    tile(left[r], right[:, c], whole[r, c], Scratch(memory))
                finish(rows, cols)
            finally:
                self._scratch.put(memory)

        return work


def like(x: Array, flat: Array) -> Array:
    """View a flat array in the shape of x, whose rows or columns are contiguous as those of x are."""
    return flat.reshape(x.shape) if x.strides[1] == x.itemsize else flat.reshape(x.shape[::-1]).T


def add(products: Array, shift: int, alpha: int, out: Array, strip: Array, fresh: bool) -> None:
    """Compute out ← α·products·2^shift + (0 if fresh else out)."""
    for start, stop in ranges(len(out), STRIP):
        whole = out[start:stop] if fresh else strip[: stop - start]
        np.copyto(whole, products[start:stop], casting="unsafe")
        if shift:
            np.left_shift(whole, shift, out=whole)
        if alpha != 1:
            np.multiply(whole, alpha, out=whole)
        if not fresh:
            out[start:stop] += whole
