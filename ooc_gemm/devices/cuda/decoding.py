"""Chunks that come to a GPU as they are stored, and are decoded there (kernels/prepare/zstd.cu
and blosc.cu).

slot ──copy──► stored │ stored │ …  ──all at once──► decoded │ decoded │ …  ──one by one──► panel

Copies have a stream of their own, and stored chunks two places, so some arrive while others are decoded.
Everything else happens in the stream for uploads, so memory is used again as soon as work on it has been
given to the stream.
"""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from ...cuda_kernels import driver, preparations
from ...cuda_kernels.driver import TO_DEVICE, Event
from ...cuda_kernels.launch import load
from ...engine.ports import UPLOAD, Array
from ...planning.ledger import (
    DECODING_PADDING,
    DECODING_ROOM,
    MOST_DECODED,
    STAGED_ALIGN,
    decoders,
    parts_of,
)
from ...planning.plan import Plan
from ...planning.schedule import Piece
from ...support.buffers import Bytes
from ...support.intervals import round_up
from ...support.trace import DECODE
from .gpu import GPU
from .timing import Timing

UNIT = 16
"""Bytes in which kernels count where chunks begin."""
_TO_HOST = 2


class UndecodedError(Exception):
    """A chunk could not be decoded."""


class Decoded(NamedTuple):
    """A piece of a decoded chunk in the memory of the device."""

    piece: Piece
    dtype: np.dtype[Any]
    buffer: int
    """The panel to which it goes."""
    at: int
    """Address of its first element."""
    pitch: int
    """Elements from one of its rows to the next."""


@dataclass
class _Place:
    """One of two places for stored chunks. Some arrive in one while those in the other are decoded."""

    at: int
    """Its address."""
    free: Event | None = None
    """The event after which others may arrive there, if they must wait for one."""


class Decoding:
    """Decodes the chunks of one run. Any thread may call its methods."""

    def __init__(
        self, device: GPU, plan: Plan, memory: Any, host: Bytes, timing: Timing, stream: Any, copies: Any,
        place: Callable[[Decoded], None],
    ):  # fmt: skip
        """memory: of the device, as much as `Decoders` say. host: some pinned memory. stream: for uploads.
        copies: the one for copies of stored chunks. place: starts to bring a decoded piece to its panel, in
        the stream for uploads."""
        p, self._device, self._timing, self._stream = plan.problem, device, timing, stream
        self._copies, self._place, self._lock = copies, place, Lock()
        self._most, self._parts, stored, self._decoded_area = decoders(p, plan.budget)
        self._matrices = {"a": p.a, "b": p.b}
        self._types = {name: np.dtype(dtype) for name, dtype in zip("ab", p.types, strict=False)}
        self._failed, self._found = memory.data.ptr, host[:4].view(np.uint32)
        first, self._room = self._failed + STAGED_ALIGN, self._most * stored
        self._arriving, self._other = _Place(first), _Place(first + self._room)
        self._decoded = first + 2 * self._room
        self._rooms = self._decoded + self._most * self._decoded_area
        self._found[0] = 0
        driver.fill(self._failed, 0, 4, stream)
        # Of two sizes of chunks those of the larger ones: others have parts without blocks.
        self._parts_of = {s.encoded: parts_of(s) for s in sorted(p.encoded, key=parts_of)}
        names = sorted(self._parts_of)
        configs = {name: preparations.decode(name, device.shared_bytes) for name in names}
        self._kernels = {name: (config, load(config)[name]) for name, config in configs.items()}
        self._waiting: list[Decoded] = []
        self._chunks = {name: list[tuple[int, int, int, int]]() for name in configs}
        """Where chunks lie that are waiting, by what has compressed them: in what is stored and in what is
        decoded, in units of UNIT bytes, and how long both are."""
        self._used = 0

    def takes(self, piece: Piece) -> bool:
        """Whether pieces of its operand are decoded here."""
        return piece.source in self._matrices and bool(self._matrices[piece.source].encoded)

    def upload(self, data: Array, piece: Piece, buffer: int) -> Event:
        """Start to copy a chunk as it is stored, of which a piece goes to a panel. `data` may change once the
        event has completed. The chunk is decoded with others."""
        stream, size = self._copies, len(data)
        s, dtype = self._matrices[piece.source], self._types[piece.source]
        (i, j), row, col = piece.chunk, piece.rows[0], piece.cols[0]
        with self._lock:
            if len(self._waiting) == self._most or self._used + size + DECODING_PADDING > self._room:
                self._decode()
            place = self._arriving
            if place.free:
                driver.wait(stream.ptr, place.free)
                place.free = None
            number, at = len(self._waiting), place.at + self._used
            start = self._timing.begin_copy(UPLOAD, stream)
            driver.copy(TO_DEVICE, at, size, data.ctypes.data, size, size, 1, stream.ptr)
            copied = self._timing.end(UPLOAD, start, stream, size, operand=piece.operand, chunk=piece.chunk)
            to = number * self._decoded_area
            self._chunks[s.encoded].append((self._used // UNIT, size, to // UNIT, s.chunk_bytes))
            first = (row - i * s.chunk_rows) * s.chunk_cols + col - j * s.chunk_cols
            address = self._decoded + to + first * dtype.itemsize
            self._waiting.append(Decoded(piece, dtype, buffer, address, s.chunk_cols))
            self._used += round_up(size + DECODING_PADDING, UNIT)
        return copied

    def complete(self) -> None:
        """Start to decode all chunks that have been uploaded, and to bring them to their panels."""
        with self._lock:
            self._decode()

    def _decode(self) -> None:
        stream = self._stream
        if not self._waiting:
            return
        driver.wait(stream.ptr, self._timing.points.record(self._copies.ptr))
        start = self._timing.begin(stream)
        memory = (
            np.uintp(self._arriving.at), np.uintp(self._decoded), np.uintp(self._rooms),
            np.uint32(DECODING_ROOM), np.uintp(self._failed),
        )  # fmt: skip
        for name, chunks in self._chunks.items():
            if not chunks:
                continue
            config, kernel = self._kernels[name]
            table = np.zeros((MOST_DECODED, 4), np.uint32)
            table[: len(chunks)] = chunks
            parts = self._parts_of[name]
            args = np.void(table.tobytes()), np.int32(len(chunks)), np.int32(parts), *memory
            grid = (min(self._parts, len(chunks) * parts),)
            kernel(grid, config.block, args, stream, config.shared_bytes)
            chunks.clear()
        self._arriving.free = self._timing.points.record(stream.ptr)
        self._device.runtime.memcpyAsync(self._found.ctypes.data, self._failed, 4, _TO_HOST, stream.ptr)
        for decoded in self._waiting:
            self._place(decoded)
        self._timing.end(DECODE, start, stream, 0)
        self._arriving, self._other = self._other, self._arriving
        self._waiting.clear()
        self._used = 0

    def check(self) -> None:
        """Raise UndecodedError where a chunk could not be decoded of those whose work has completed."""
        if self._found[0]:
            raise UndecodedError(f"{self._device.name} could not decode some of the chunks that it was given")
