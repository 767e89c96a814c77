"""Packs finished blocks to the type of C before they leave a GPU: kernels/prepare/narrow.cu."""

from typing import Any

import numpy as np

from ...cuda_kernels import driver, preparations
from ...cuda_kernels.launch import load
from ...engine.ports import Lost, Operation
from ...planning.ledger import LOST_BYTES, lost_bytes
from ...planning.plan import Plan
from ...planning.schedule import Block, Part
from ...support.buffers import page_aligned
from ...support.intervals import ceil_div

LOST = np.dtype([("elements", np.uint64), ("least", np.int64), ("greatest", np.int64)])
"""What C's type does not hold of a chunk, as the kernel counts it."""
assert LOST.itemsize == LOST_BYTES


class Narrowing:
    """Blocks of one run, and what C's type does not hold of each of their chunks."""

    def __init__(self, plan: Plan, operation: Operation, found: list[Any], prepare: Any, runtime: Any):
        """`found`: for each block buffer, `lost_bytes` of the device's memory. `prepare` pins host memory.
        `runtime`: CUDA's, as CuPy has it."""
        problem, self._runtime = plan.problem, runtime
        self._sums = operation.arithmetic.block
        self._chunk = problem.c.chunk_rows, problem.c.chunk_cols
        self._config = preparations.narrow(self._sums.name, operation.leaves.name)
        self._kernel = load(self._config)[self._config.kernel]
        self._nbytes, self._found = lost_bytes(problem.c, plan.bm, plan.bn), found
        self._host = page_aligned(plan.c_buffers, self._nbytes)
        for buffer in self._host:
            prepare(buffer)

    def pack(
        self, block: Block, memory: Any, c: int, rows: tuple[int, int], first: bool, stream: Any
    ) -> None:
        """Start to pack some rows, [start, stop), of block c, which lies in `memory`, and to copy to the host
        what does not fit. Each row is packed once. `first`: none of the block was packed before."""
        start, stop = rows
        found, i64, pointer = self._found[c], np.int64, np.uintp
        if first:
            driver.fill(found.data.ptr, 0, self._nbytes, stream)
        height, width = self._chunk
        at = memory.data.ptr + start * block.cols * self._sums.itemsize
        args = (
            i64(block.cols), pointer(at), i64(block.cols), i64(block.row % height + start), i64(height),
            i64(width), i64(ceil_div(block.cols, width)), pointer(found.data.ptr),
        )  # fmt: skip
        if block.cols and stop > start:
            self._kernel((stop - start,), self._config.block, args, stream)
        self._runtime.memcpyAsync(self._host[c].ctypes.data, found.data.ptr, self._nbytes, 2, stream.ptr)

    def lost(self, block: Block, part: Part, c: int) -> Lost:
        """Return what C's type does not hold of a part that has been downloaded."""
        row, col = (part.col, part.row) if part.mirrored else (part.row, part.col)
        height, width = self._chunk
        across = ceil_div(block.cols, width)
        number = (block.row % height + row) // height * across + col // width
        at = number * LOST.itemsize
        return Lost(*self._host[c][at : at + LOST.itemsize].view(LOST)[0].tolist())
