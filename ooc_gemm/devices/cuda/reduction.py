"""The reduction of finished blocks on a GPU: kernels/prepare/best.cu, on the compute stream.

C block ──best──► a record for each row ──download──► slot ──► Ranked.add, on the host
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...cuda_kernels import driver, preparations
from ...cuda_kernels.driver import TO_HOST
from ...cuda_kernels.launch import load
from ...engine.ports import Array
from ...engine.reduction import Ranked
from ...engine.ring import Event
from ...planning.plan import Plan
from ...planning.schedule import Block, Part

_HOST_TO_DEVICE = 1
"""cudaMemcpyKind."""


@dataclass(frozen=True)
class Found:
    """The download of what was found. When it has completed, it goes to the reduction."""

    copied: Event
    reduction: Ranked
    memory: Array
    """On the host."""
    place: tuple[int, int]
    """Number of rows, and the first one in C."""

    @property
    def done(self) -> bool:
        return self.copied.done

    def synchronize(self) -> None:
        """The thread that waits for the download hands over what it has brought. Only one does, once."""
        self.copied.synchronize()
        rows, row = self.place
        self.reduction.add(*self.reduction.wanted.records(self.memory, rows), row)


class Reducer:
    """The reduction of one run, with its vectors and what is found of each block on the device."""

    def __init__(
        self, plan: Plan, reduction: Ranked, block: np.dtype[Any], allocate: Any, runtime: Any, stream: Any
    ):
        """`block`: type of a block. `allocate`: {name: (elements, dtype)} → device arrays. `runtime`: CUDA's,
        as CuPy has it. `stream`: in which blocks are reduced."""
        self._reduction, self._wanted, self._stream = reduction, reduction.wanted, stream
        config = preparations.best(block.name, self._wanted.dtype.name)
        self._kernel, self._config = load(config)[config.kernel], config
        dtype, nbytes = self._wanted.dtype, plan.bm * self._wanted.record_bytes
        given = {"scale": self._wanted.scale, "shift": self._wanted.shift}
        vectors = {name: np.ascontiguousarray(one, dtype) for name, one in given.items() if one is not None}
        self._memory = allocate(
            {name: (len(one), dtype) for name, one in vectors.items()}
            | {c: (nbytes, np.dtype(np.uint8)) for c in range(plan.c_buffers)}
        )
        for name, one in vectors.items():
            at = self._memory[name].data.ptr
            runtime.memcpyAsync(at, one.ctypes.data, one.nbytes, _HOST_TO_DEVICE, stream.ptr)
        stream.synchronize()
        self._last = {block.row: block.index for block in plan.blocks()}
        """The last block of each row of blocks, by its first row. What was found leaves with it."""
        self._buffers, self._number = plan.c_buffers, -1
        """Rows of blocks take turns with as many buffers as there are blocks: one is used again when the last
        block before has been written. The number of the row of blocks that is reduced."""
        self._at: dict[int, int] = {}
        """Where what is found of each row of blocks lies, by its first row."""

    def reduce(self, block: Block, out: int) -> None:
        """Start to find the best of each row of a block, which lies at the address `out`, and of the blocks
        of its row before it."""
        size, u, i32, i64 = self._wanted.dtype.itemsize, np.uintp, np.int32, np.int64
        memory = self._memory
        scale, shift = (
            memory[name].data.ptr + block.col * size if name in memory else 0 for name in ("scale", "shift")
        )
        fresh = block.row not in self._at
        if fresh:
            self._number += 1
            self._at[block.row] = memory[self._number % self._buffers].data.ptr
        args = (
            i32(block.cols), u(out), i64(block.cols), u(scale), u(shift), i32(self._wanted.others),
            i32(block.col), i64(block.row - block.col), i32(self._wanted.keep), i32(fresh),
            self._wanted.dtype.type(-np.inf), u(self._at[block.row]), i64(self._wanted.record_bytes),
        )  # fmt: skip
        self._kernel((block.rows,), self._config.block, args, self._stream)

    def leaves(self, block: Block) -> bool:
        """Return whether what was found of a row of blocks leaves with this block."""
        return self._last[block.row] == block.index

    def download(self, block: Block, part: Part, target: Array, stream: Any) -> int:
        """Start to copy what was found in the rows of a part to the beginning of `target`, which is bytes.
        Returns the number of bytes."""
        nbytes = part.rows * self._wanted.record_bytes
        at = self._at[block.row] + part.row * self._wanted.record_bytes
        driver.copy(TO_HOST, target.ctypes.data, nbytes, at, nbytes, nbytes, 1, stream.ptr)
        return nbytes

    def handing(self, copied: Event, block: Block, part: Part, target: Array) -> Found:
        """Return the event after which the reduction has what came."""
        return Found(copied, self._reduction, target, (part.rows, block.row + part.row))
