"""Exact scores of pairs of rows on a GPU: kernels/prepare/pairs.cu, in a stream of its own.

B ──put──► rows on the device ──► their norms
columns ──► pairs: sums in float64 ──► host
"""

from math import prod
from mmap import PAGESIZE
from typing import Any

import numpy as np

from ...cuda_kernels import driver, preparations
from ...cuda_kernels.driver import TO_DEVICE, TO_HOST
from ...cuda_kernels.launch import load
from ...engine.ports import Array
from ...engine.reduction import ALIGN, SCORER_BYTES, Pairs
from ...support.buffers import Bytes
from ...support.intervals import ceil_div, ranges, round_up
from .gpu import FIRST, GPU
from .pinned import HostMemory


class Scorer:
    """Rows of B on a GPU, and a strip of rows of A."""

    def __init__(self, device: GPU, pairs: Pairs):
        """Allocates all memory."""
        device.use()
        self._device, self._pairs, self._host = device, pairs, HostMemory(device)
        self._config = preparations.pairs((pairs.left or pairs.right).name, pairs.right.name)
        self._kernels = load(self._config, "pairs", "squares", "totals")
        self._buffers, self._at = pairs.buffers, dict[str, int]()
        cuda = device.cupy.cuda
        self._memory: Any = cuda.Memory(pairs.device_bytes - SCORER_BYTES)
        at = self._memory.ptr
        for name, (shape, dtype) in self._buffers.items():
            self._at[name] = at
            at += round_up(prod(shape) * dtype.itemsize, ALIGN)
        self._stream: Any = cuda.Stream(non_blocking=True, priority=FIRST)
        (self._staging,) = self.host_buffers(1, pairs.staging_bytes)
        self._norms = np.empty(0)

    def host_buffers(self, count: int, nbytes: int) -> list[Bytes]:
        """Returns pinned memory."""
        found = self._host.host_buffers(count, nbytes)
        for buffer in found:
            buffer[::PAGESIZE] = 0
            self._host.prepare(buffer)
        return found

    def put(self, side: str, values: Array, row: int, col: int) -> None:
        """Makes a 2-D copy and waits for it. Columns of what is stored transposed are collected on the
        host."""
        self._device.use()
        (_, depth), dtype = self._buffers[side]
        if values.shape[1] > 1 and values.strides[1] != dtype.itemsize:
            values = np.ascontiguousarray(values)
        height, width = values.shape[0], values.shape[1] * dtype.itemsize
        pitch = depth * dtype.itemsize
        at = self._at[side] + row * pitch + col * dtype.itemsize
        if values.size:
            self._copy(TO_DEVICE, at, pitch, values.ctypes.data, max(width, values.strides[0]), width, height)

    def norms(self) -> tuple[Array, Array]:
        """Launches two kernels: the second needs to know which norms are finite."""
        self._device.use()
        p, i64, u, threads = self._pairs, np.int64, np.uintp, self._config.block[0]
        size, at = (i64(p.shape[1]), i64(p.depth), u(self._at["right"])), self._at
        warps = threads // 32
        self._launch("squares", (ceil_div(p.shape[1], warps),), *size, u(at["norms"]))
        self._launch("totals", (ceil_div(p.depth, threads), p.parts), *size, u(at["norms"]), u(at["totals"]))
        totals = self._bring("totals", p.parts * p.depth).reshape(p.parts, p.depth)
        self._norms = self._bring("norms", p.shape[1])
        return self._norms, totals.sum(axis=0)

    def sums(self, columns: Array, first: int, differences: bool) -> tuple[Array, Array]:
        """Uploads the columns and downloads the sums, in pinned memory."""
        self._device.use()
        p, (rows, keep), at, u = self._pairs, columns.shape, self._at, np.uintp
        given = self._staging[: 4 * columns.size].view(np.int32)
        given[...] = columns.reshape(-1)
        self._copy(TO_DEVICE, at["columns"], given.nbytes, given.ctypes.data, given.nbytes, given.nbytes, 1)
        left, norms = at["left"], at["left norms"]
        if p.left is None:
            left, norms = at["right"] + first * p.depth * p.right.itemsize, 0
        self._launch(
            "pairs", (rows,), np.int32(keep), np.int64(p.depth), u(left), u(at["right"]), u(at["columns"]),
            np.int32(differences), u(at["sums"]), u(norms),
        )  # fmt: skip
        found = self._bring("sums", rows * keep).reshape(rows, keep)
        return found, self._bring("left norms", rows) if norms else self._norms[first : first + rows]

    def close(self) -> None:
        """Waits for the stream and frees everything."""
        if self._memory is None:
            return
        try:
            self._device.use()
            self._stream.synchronize()
        finally:
            self._memory = None
            self._host.close()

    def _launch(self, name: str, grid: tuple[int, ...], *args: Any) -> None:
        self._kernels[name](grid, self._config.block, args, self._stream)

    def _copy(
        self, to: tuple[int, int], target: int, pitch: int, source: int, source_pitch: int, width: int,
        rows: int,
    ) -> None:  # fmt: skip
        """Make a 2-D copy, and wait for it without the interpreter."""
        driver.copy(to, target, pitch, source, source_pitch, width, rows, self._stream.ptr)
        self._device.points.record(self._stream.ptr).synchronize()

    def _bring(self, name: str, count: int) -> Array:
        """Download the first numbers of an array of float64."""
        found, at = np.empty(count), self._staging.ctypes.data
        for start, stop in ranges(count, len(self._staging) // 8):
            nbytes = 8 * (stop - start)
            self._copy(TO_HOST, at, nbytes, self._at[name] + 8 * start, nbytes, nbytes, 1)
            found[start:stop] = self._staging[:nbytes].view(np.float64)
        return found
