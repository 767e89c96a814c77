"""The workers of a run on the CPU, and the pieces of a product that are dealt to them.

The product of two panels is cut into tiles of the block. A small block has too few tiles for all workers, and
smaller ones would be slow. So its panels are also cut along k: the sums of the first range go to the block,
those of each other range to memory beside it, and then they are added to the block in the order of k. So the
result does not depend on which worker is done first.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, Lock
from typing import Any, NamedTuple

from ...engine.ring import Stopped
from ...planning.schedule import DIAGONAL_STRIPS
from ...support.intervals import ceil_div, ranges
from .blas import room_for_a_first_call

LEAST_TILE = 256
"""Least side of the tiles of a block that is larger. BLAS is slower on smaller tiles."""
LEAST_RANGE = 1024
"""Least depth of a range of k, for which adding up the sums takes about a percent of the time."""
SHARES = 4
"""Pieces for each worker: if one loses its core to a reader or writer for a while, it does fewer of them."""

Tile = tuple[slice, slice]
"""Some rows and some columns of a block."""


class Cut(NamedTuple):
    """What a product of panels is cut into."""

    tiles: list[Tile]
    ranges: list[slice]
    """What the panels are cut into along k."""


class Workers:
    """Threads that do the pieces of one thing at a time, and that can be stopped. Address space for the first
    call of BLAS is reserved for each, until it begins to work."""

    def __init__(self, threads: int):
        self.threads, self._cancelled = threads, False
        self._pool = ThreadPoolExecutor(threads, "ooc-gemm worker")
        started = Barrier(threads + 1)
        try:
            for _ in range(threads):
                self._pool.submit(started.wait)
            started.wait()
            self._rooms = [room_for_a_first_call() for _ in range(threads)]
        except BaseException:
            started.abort()
            self.close()
            raise

    def run(self, work: Callable[..., None], pieces: Iterable[tuple[Any, ...]]) -> None:
        """Let each worker take the next piece until there are none, and wait for all workers. Raises Stopped
        after `cancel`."""
        lock, given = Lock(), [(work, iter(pieces))]

        def run() -> None:
            ((work, left),) = given
            self.begin_calls()
            while True:
                with lock:
                    piece = next(left, None)
                if piece is None:
                    return
                if self._cancelled:
                    raise Stopped
                work(*piece)

        jobs = [self._pool.submit(run) for _ in range(self.threads)]
        for job in jobs:
            job.exception()  # waits for its end
        given.clear()  # an error keeps `run`, and all that it knows
        for job in jobs:
            job.result()

    def begin_calls(self) -> None:
        """Give back the address space for the first call of BLAS of one more thread, if there is any left."""
        with suppress(IndexError):
            self._rooms.pop().close()

    def run_slices(self, work: Callable[[slice], None], extent: int) -> None:
        """Let the workers do something for all slices of an extent."""
        self.run(work, ((some,) for some in slices(extent, max(1, ceil_div(extent, SHARES * self.threads)))))

    def cancel(self) -> None:
        """Stop each worker after its current piece."""
        self._cancelled = True

    def close(self) -> None:
        """Wait for the workers to end."""
        self._pool.shutdown()


def cut(shape: tuple[int, int], k: int, side: int, threads: int, room: int, lower: bool) -> Cut:
    """Cut a product into several pieces for each of the workers.

    shape: of the block. k: depth of the panels. side: the largest that a tile may have. room: for how many
    elements there is memory beside the block. lower: only tiles that reach the diagonal or lie below it are
    wanted."""
    if 0 in shape:
        return Cut([], [slice(0, k)])
    wanted = math.isqrt(shape[0] * shape[1] // (SHARES * threads))
    if lower:
        wanted = min(wanted, shape[0] // DIAGONAL_STRIPS)
    side = max(LEAST_TILE, min(side, wanted))
    down, across = (ceil_div(extent, side) for extent in shape)
    count = down * (down + 1) // 2 if lower else down * across
    most = 1 + room // (shape[0] * shape[1])
    deep = max(1, min(ceil_div(SHARES * threads, count), k // LEAST_RANGE, most))
    if not lower and deep == 1:
        across = _even(down, across, threads)
    steps = ceil_div(shape[0], down), ceil_div(shape[1], across)
    tiles = ((rows, cols) for rows in slices(shape[0], steps[0]) for cols in slices(shape[1], steps[1]))
    return Cut(
        [tile for tile in tiles if not lower or tile[1].start < tile[0].stop],
        list(slices(k, max(1, ceil_div(k, deep)))) or [slice(0, 0)],
    )


def beside(threads: int, block: int) -> int:
    """Return how many elements of sums may lie beside blocks of up to `block` elements: those of the smallest
    tiles of which there are enough for all workers, and none where blocks are larger."""
    most = SHARES * threads * LEAST_TILE**2
    return most if block <= most else 0


def _even(down: int, across: int, threads: int) -> int:
    """Return the number of tile columns, a few more than `across` if fewer workers are then without a tile in
    the last round: nine tiles take two workers as long as ten."""

    def rounds(columns: int) -> float:
        tiles = down * columns
        return ceil_div(tiles, threads) * threads / tiles

    return min(range(across, across + threads), key=rounds)


def slices(extent: int, step: int) -> Iterator[slice]:
    """Cut [0, extent) every `step`."""
    return (slice(*r) for r in ranges(extent, step))
