"""Pieces on their way into the panels of one GPU, in its stream for uploads.

slot, or place of a thread ──2-D copy──► panel
slot, or place of a thread ──2-D copy──► area of `Staging` ──convert, transpose, transform──► panel
"""

import ctypes
import math
from collections.abc import Callable, Mapping
from functools import partial
from threading import Lock
from typing import Any

import numpy as np

from ...cuda_kernels import driver
from ...cuda_kernels.driver import TO_DEVICE, WITHIN_DEVICE, Event
from ...cuda_kernels.product import Operand
from ...cuda_kernels.transposition import Transposition
from ...engine.overflow import Overflow
from ...engine.ports import UPLOAD, Array, Operation
from ...planning.ledger import staged_area
from ...planning.plan import Plan
from ...planning.schedule import Piece
from ...support.onward import Onward
from .arrays import copy_2d
from .decoding import Decoded
from .gpu import GPU
from .panels import Layout
from .samples import Samples
from .timing import Timing
from .transforms import Transforms


class Staging:
    """Memory in which pieces lie as they are stored: one area for pieces that come from slots, one after the
    other, and some for pieces that come from places of threads, several at a time."""

    def __init__(self, memory: Any, size: int):
        """memory: an array on the device. size: bytes of an area."""
        self.memory, self.first, self.lock = memory, memory.data.ptr, Lock()
        """The lock is held while work on an area is given to the stream."""
        self.free: list[int] = [self.first + at for at in range(size, memory.size - size + 1, size)]
        """Addresses of the other areas that nobody has."""

    def take(self) -> int | None:
        """Return the address of an area, which is then the caller's; None where all are taken."""
        try:
            return self.free.pop()
        except IndexError:
            return None

    def give(self, at: int) -> None:
        """Give an area back when all work on it has been given to the stream, in which the next copy into it
        follows."""
        self.free.append(at)


class Uploads:
    """The uploads of one run. Methods are those of its session (`Session`)."""

    def __init__(
        self, device: GPU, plan: Plan, operation: Operation, layout: Layout, overflow: Overflow,
        arrays: Mapping[Any, Any], turns: Mapping[str, Transposition], timing: Timing,
        samples: Samples | None, stream: Any, allocate: Callable[[int, np.dtype[Any]], Any],
    ):  # fmt: skip
        """arrays: panels and blocks by name and number, and `staging` where one is needed. turns: what
        transposes, by type. samples: what times copies of threads, which have places then. stream: in which
        all happens."""
        self._device, self._op, self._layout, self._overflow = device, operation, layout, overflow
        self._arrays, self._turns, self._timing, self._samples = arrays, turns, timing, samples
        self._stream, self._step = stream, plan.budget.step
        self._transforms = Transforms(operation, layout, allocate, device.runtime, stream)
        self._staging: Staging | None = None
        if "staging" in arrays:
            self._staging = Staging(arrays["staging"], staged_area(plan.slot_bytes))

    def upload(self, source: Array, piece: Piece, buffer: int) -> Event:
        """Start a 2-D copy into the panel. If the type or the orientation differs, or elements are
        transformed, the copy goes to the staging buffer, from which the device converts it. The stream's
        order keeps the next copy from overtaking the conversion."""
        self._device.use()
        self._overflow.upload(piece, buffer, source)
        stream, size = self._stream, source.itemsize
        start = self._timing.begin_copy(UPLOAD, stream)
        if not self._is_staged(piece.operand, source.dtype, buffer):
            skipped, pitch = self._layout.at(piece.operand, piece.panel, piece.into)
            at = self._arrays[piece.operand, buffer].data.ptr + skipped * size
            copy_2d(TO_DEVICE, at, pitch * size, source.ctypes.data, source.strides[0], source, stream)
        else:
            assert self._staging is not None
            at, cols = self._staging.first, source.shape[1]
            with self._staging.lock:
                copy_2d(TO_DEVICE, at, cols * size, source.ctypes.data, source.strides[0], source, stream)
                self._place_piece(piece, source.dtype, source.shape, at, cols, buffer, self._staging.memory)
        return self._timing.end(
            UPLOAD, start, stream, source.nbytes, operand=piece.operand, chunk=piece.chunk
        )

    def onward(self, piece: Piece, dtype: np.dtype[Any], buffer: int) -> Onward | None:
        """Return the place of a piece in its panel, or in an area from which the device converts it. Where
        threads have no places, one in some pieces is left to `upload`, which times it."""
        operand, staging = piece.operand, None
        looks = self._overflow.looks
        if (looks and dtype.kind not in "iu") or (not self._samples and self._timing.times(UPLOAD)):
            return None
        self._device.use()
        size, stream, arrived = dtype.itemsize, self._stream.ptr, self._timing.points.make()
        if self._is_staged(operand, dtype, buffer):
            staging = self._staging
            assert staging is not None
            if (at := staging.take()) is None:
                return None
            pitch = piece.shape[1]
        else:
            skipped, pitch = self._layout.at(operand, piece.panel, piece.into)
            at = self._arrays[operand, buffer].data.ptr + skipped * size
        nbytes = math.prod(piece.shape) * size
        largest = ctypes.c_uint64()
        if self._samples:
            self._samples.take(UPLOAD, nbytes)

        def sent() -> Event:
            self._timing.count(UPLOAD, nbytes)
            if looks:
                self._overflow.found(piece, buffer, largest.value, dtype)
            if staging is None:
                return arrived
            self._device.use()
            with staging.lock:
                self._place_piece(piece, dtype, piece.shape, at, pitch, buffer, staging.memory)
                placed = self._timing.points.record(stream)
            staging.give(at)
            return placed

        integers = (size if dtype.kind == "u" else -size) if looks else 0
        packed = driver.place(
            self._device.index, stream, arrived, at, pitch * size, integers, ctypes.addressof(largest)
        )
        return Onward(packed, sent, partial(staging.give, at) if staging else lambda: None, self._step)

    def place(self, decoded: Decoded) -> None:
        """Start to bring a piece that was decoded on the device to its panel. One thread at a time may call
        this."""
        piece, dtype, buffer, at, pitch = decoded
        if self._is_staged(piece.operand, dtype, buffer):
            self._place_piece(piece, dtype, piece.shape, at, pitch, buffer, self._arrays["decoding"])
            return
        (rows, cols), size = piece.shape, dtype.itemsize
        skipped, row = self._layout.at(piece.operand, piece.panel, piece.into)
        to = self._arrays[piece.operand, buffer].data.ptr + skipped * size
        driver.copy(WITHIN_DEVICE, to, row * size, at, pitch * size, cols * size, rows, self._stream.ptr)

    def _is_staged(self, operand: str, dtype: np.dtype[Any], buffer: int) -> bool:
        """Whether the device converts, transposes or transforms elements of a stored type on their way into a
        panel."""
        changed = operand in self._op.transforms or self._layout.turned(operand)
        return changed or self._arrays[operand, buffer].dtype != dtype

    def _place_piece(
        self, piece: Piece, dtype: np.dtype[Any], shape: tuple[int, ...], at: int, pitch: int, buffer: int,
        holder: Any,
    ) -> None:  # fmt: skip
        """Start to convert, transpose or transform a piece into its panel. It lies at the address `at` in the
        memory of `holder`, an array of bytes, as it is stored, with `pitch` elements from one row to the
        next, and has this type and shape. One thread at a time may call this."""
        memory, (row, col), (rows, cols) = self._arrays[piece.operand, buffer], piece.into, shape
        if piece.operand in self._op.transforms:
            self._transforms.place(piece, dtype, (rows, cols), Operand(at, pitch), memory.data.ptr)
        elif memory.dtype == dtype:
            skipped, ld = self._layout.at(piece.operand, piece.panel, piece.into)
            panel = Operand(memory.data.ptr + skipped * dtype.itemsize, ld)
            self._turns[dtype.name](rows, cols, Operand(at, pitch), panel, self._stream)
        else:
            first = at - holder.data.ptr
            staged = holder[first : first + rows * pitch * dtype.itemsize]
            target = self._layout.panel(memory, piece.operand, piece.panel)
            with self._stream:
                self._device.cupy.copyto(
                    target[row : row + rows, col : col + cols],
                    staged.view(dtype).reshape(rows, pitch)[:, :cols],
                    casting="unsafe",
                )
