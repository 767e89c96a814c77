"""How finished blocks leave a GPU: in strips, in the type of C, to slots or straight to files.

last product ──► strip ──mirrored, converted──► finished ──download stream──► slot, or places of threads
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any

import numpy as np

from ...cuda_kernels import driver
from ...cuda_kernels.driver import TO_HOST, Event
from ...cuda_kernels.product import Operand, Strips
from ...cuda_kernels.transposition import Transposition
from ...engine.ports import COMPUTE, DOWNLOAD, Array, Lost, Operation
from ...planning.plan import Plan
from ...planning.schedule import DIAGONAL_ELEMENTS, Block, Part
from ...support.buffers import Bytes
from ...support.onward import Inward
from .arrays import copy_2d
from .gemm import early_strips
from .gpu import GPU
from .narrowing import Narrowing
from .reduction import Found, Reducer
from .samples import Samples
from .timing import Timing

Strip = tuple[int, int, Event]
"""The first row of a strip, the row where it stops, and the event that completes when it is finished."""


class Leaving:
    """The blocks of one run on their way from the device. `download`, `inward`, `lost` and `brings` are those
    of its session (`Session`)."""

    def __init__(
        self, device: GPU, plan: Plan, operation: Operation, arrays: Mapping[Any, Any],
        turns: Mapping[str, Transposition], timing: Timing, samples: Samples | None,
        streams: Mapping[str, Any], prepare: Callable[[Bytes], None],
        allocate: Callable[[dict[Any, tuple[int, np.dtype[Any]]]], dict[Any, Any]],
    ):  # fmt: skip
        """arrays: blocks by number, `lost` of each where C is converted, and `mirrored` for a symmetric C.
        turns: what transposes, by type. samples: what times copies of threads, which have places then.
        prepare: pins host memory. allocate: allocates arrays."""
        self._device, self._op, self._arrays, self._turns = device, operation, arrays, turns
        self._timing, self._samples, self._step = timing, samples, plan.budget.step
        self._computing, self._stream = streams[COMPUTE], streams[DOWNLOAD]
        self._chunk = plan.problem.c.chunk_rows, plan.problem.c.chunk_cols
        self._waited_for = plan.c_buffers == 1
        shared = len(plan.budget.weights) > 1  # then above the diagonal of a block, too
        self._mirrors = plan.problem.symmetric and (shared or not all(one.diagonal for one in plan.blocks()))
        """Whether some parts of C are transposed before they leave."""
        self._narrowing: Narrowing | None = None
        if operation.narrowed:
            lost = [arrays["lost", c] for c in range(plan.c_buffers)]
            self._narrowing = Narrowing(plan, operation, lost, prepare, device.runtime)
        self._reducer: Reducer | None = None
        if operation.ranked:
            self._reducer = Reducer(
                plan, operation.ranked, operation.arithmetic.block, allocate, device.runtime, self._computing
            )
        self._early: dict[int, list[Strip]] = {}
        self.finished: dict[int, list[Strip]] = {}
        """The strips of each block that is finished, in the order in which they were made."""
        self._lock = Lock()

    def strips(self, block: Block, c: int, last: bool) -> Strips:
        """Return the strips in which a product makes block c, and what is done with each of them. last: no
        other product is added to it. Nothing hides the writes of the last block, nor those for which the next
        block waits, so their strips leave one after the other."""
        early = self._early[c] = []
        rows = self._rows(block) if last and (block.last or self._waited_for) else []

        def after(stop: int) -> None:
            if not rows:
                return
            start = rows[len(early)][0] if block.diagonal else early[-1][1] if early else 0
            if block.diagonal:
                self._mirror(block, c, (start, stop))
            self._leave(block, c, early, (start, stop))

        return Strips(rows, lower=block.diagonal, after=after)

    def _rows(self, block: Block) -> list[tuple[int, int]]:
        """Return the strips of rows in which a block is finished, in order. On the diagonal the last one is
        complete without the others, and each of those before it only needs what is below it."""
        strips = early_strips(block.rows, block.cols)
        if not block.diagonal:
            return strips
        few = self._reducer or block.rows * block.cols < DIAGONAL_ELEMENTS
        return [] if few else strips[::-1]

    def _mirror(self, block: Block, c: int, rows: tuple[int, int]) -> None:
        """Copy what some rows, [start, stop), of a block on the diagonal hold below the diagonal to above it:
        to rows before them, and to themselves."""
        (start, stop), out, pitch = rows, self._arrays["c", c], block.cols
        turn, first = self._turns[self._op.arithmetic.block.name], start * pitch * out.itemsize
        left, above = (Operand(out.data.ptr + at, pitch) for at in (first, start * out.itemsize))
        if start:
            turn(stop - start, start, left, above, self._computing)
        turn.mirror(stop - start, left.moved(start * out.itemsize), self._computing)

    def is_mirrored(self, block: Block, c: int) -> bool:
        """Return whether strips of a block on the diagonal were mirrored one by one. Those of a band, which
        others complete, do not leave."""
        if block.diagonal and self._early.get(c):
            return True
        self._early.pop(c, None)
        return False

    def finish(self, block: Block, c: int) -> None:
        """Note that all work on a block has been given to the compute stream. Without strips, or if it is
        reduced, which happens now, it is finished at the end of that stream."""
        rows, stream = self._early.pop(c, []), self._computing
        if self._reducer:
            rows = []
            start = self._timing.begin(stream)
            self._reducer.reduce(block, self._arrays["c", c].data.ptr)
            self._timing.end(COMPUTE, start, stream, 0, block=block.index)
        if not rows:
            self._leave(block, c, rows, (0, block.rows))
        self.finished[c] = rows

    def _leave(self, block: Block, c: int, left: list[Strip], rows: tuple[int, int]) -> None:
        """Convert some rows, [start, stop), of a block to the type in which they leave, and add them to
        `left`, with their event. This happens in the compute stream: a kernel of another stream would wait
        for multiplications that fill the device."""
        if self._narrowing:
            self._narrowing.pack(block, self._arrays["c", c], c, rows, not left, self._computing)
        left.append((*rows, self._timing.points.record(self._computing.ptr)))

    def download(self, block: Block, part: Part, c: int, target: Array) -> Event | Found:
        """Make a 2-D copy out of the block, whose rows begin where those of its sums began. A mirrored part
        is transposed before, into memory for one chunk. Of a block that was reduced what was found is copied,
        and handed to the reduction."""
        if self._reducer:
            return self._download_found(self._reducer, block, part, c, target)
        at, width, done = self._place(block, part, c, target.itemsize)
        with self._lock:  # so that the two events enclose this copy and no other
            driver.wait(self._stream.ptr, done)
            start = self._timing.begin_copy(DOWNLOAD, self._stream)
            if part.mirrored:
                to = self._arrays["mirrored"].data.ptr
                square = Operand(at, width // target.itemsize)
                turn = self._turns[self._op.leaves.name]
                turn(part.cols, part.rows, square, Operand(to, part.cols), self._stream)
                at, width = to, part.cols * target.itemsize
            copy_2d(TO_HOST, target.ctypes.data, target.strides[0], at, width, target, self._stream)
            return self._timing.end(DOWNLOAD, start, self._stream, target.nbytes, chunk=part.chunk)

    def _place(self, block: Block, part: Part, c: int, size: int) -> tuple[int, int, Event]:
        """Return the address of a part whose elements have `size` bytes, the bytes from row to row, and the
        event after which it is there."""
        row, col = (part.col, part.row) if part.mirrored else (part.row, part.col)
        last = row + (part.cols if part.mirrored else part.rows)
        *_, done = (event for start, stop, event in self.finished[c] if start < last and row < stop)
        width = block.cols * self._op.arithmetic.block.itemsize
        return self._arrays["c", c].data.ptr + row * width + col * size, width, done

    def _download_found(
        self, reducer: Reducer, block: Block, part: Part, c: int, target: Array
    ) -> Event | Found:
        """Start to copy what the reduction has found in the rows of a part, if other blocks of the row do not
        add to it."""
        stream = self._stream
        if not reducer.leaves(block):
            return self._timing.points.record(stream.ptr)
        with self._lock:
            (*_, done), *_ = self.finished[c]
            driver.wait(stream.ptr, done)
            start = self._timing.begin_copy(DOWNLOAD, stream)
            nbytes = reducer.download(block, part, target, stream)
            copied = self._timing.end(DOWNLOAD, start, stream, nbytes, chunk=part.chunk)
        return reducer.handing(copied, block, part, target)

    @property
    def brings(self) -> bool:
        """Whether parts are neither found nor transposed on the device, and there are places."""
        return bool(self._samples) and not (self._reducer or self._mirrors)

    def inward(self, block: Block, parts: Sequence[Part], c: int) -> Inward | None:
        """Return the place of parts that are neither found nor transposed."""
        if not (self._samples and self.brings):
            return None
        self._device.use()
        (rows, cols), first, size = self._chunk, parts[0], self._op.leaves.itemsize
        held = first.rows, first.cols * size
        nbytes = len(parts) * math.prod(held)
        self._samples.take(DOWNLOAD, nbytes)
        at, width, done = self._place(block, first, c, size)
        packed = driver.place(self._device.index, self._stream.ptr, done, at, width)
        count = partial(self._timing.count, DOWNLOAD, nbytes)
        return Inward(packed, (rows, cols * size), held, held[1], done, self._step, count)

    def lost(self, block: Block, part: Part, c: int) -> Lost:
        """Read what the device has counted."""
        return self._narrowing.lost(block, part, c) if self._narrowing else Lost()
