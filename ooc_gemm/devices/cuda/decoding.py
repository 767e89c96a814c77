"""Chunks that come to a GPU as they are stored, and are decoded there (kernels/prepare/zstd.cu
and blosc.cu).

slot ──copies──► stored │ stored │ …  ──all at once──► decoded │ decoded │ …  ──piece by piece──► panel

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
from ...support.intervals import overlaps, round_up
from ...support.trace import DECODE
from .gpu import GPU
from .timing import Timing

UNIT = 16
"""Bytes in which kernels count where chunks begin."""
_TO_HOST = 2


def _taken(size: int) -> int:
    """Return the bytes that a stored chunk takes on the device."""
    return round_up(size + DECODING_PADDING, UNIT)


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
        """Start to copy the chunks of a piece as they are stored, without gaps, from which the piece goes to
        a panel. `data` may change once the event has completed. The chunks are decoded with others."""
        s, stream, at = self._matrices[piece.source], self._copies, data.ctypes.data
        rest = [
            ((row, stop), s.stored_size(i, piece.chunk[1]))
            for i, row, stop in overlaps(*piece.rows, s.chunk_rows)
        ]
        if len(rest) == 1:  # which may have changed since its array was opened
            rest = [(piece.rows, len(data))]
        assert sum(size for _, size in rest) == len(data), "all others are as long as they were"
        with self._lock:
            start = self._timing.begin_copy(UPLOAD, stream)
            while rest:
                fitting, used = 0, self._used
                for _, size in rest[: self._most - self._count()]:
                    if used + size + DECODING_PADDING > self._room:
                        break
                    fitting, used = fitting + 1, used + _taken(size)
                self._take(rest[:fitting], at, piece, buffer)
                at += sum(size for _, size in rest[:fitting])
                rest = rest[fitting:]
                if rest or self._count() == self._most:
                    self._decode()
            return self._timing.end(
                UPLOAD, start, stream, len(data), operand=piece.operand, chunk=piece.chunk
            )

    def _take(
        self, chunks: list[tuple[tuple[int, int], int]], source: int, piece: Piece, buffer: int
    ) -> None:
        """Start to copy some chunks of a piece from the address `source`, and note where their elements will
        be. `chunks`: the rows of each that belong to the piece, and its stored bytes."""
        s, dtype, stream = self._matrices[piece.source], self._types[piece.source], self._copies
        if chunks and self._arriving.free:
            driver.wait(stream.ptr, self._arriving.free)
            self._arriving.free = None
        gapless, first = s.chunk_bytes == self._decoded_area, self._count()
        for number, ((row, stop), size) in enumerate(chunks):
            driver.copy(TO_DEVICE, self._arriving.at + self._used, size, source, size, size, 1, stream.ptr)
            to = (first + number) * self._decoded_area
            self._chunks[s.encoded].append((self._used // UNIT, size, to // UNIT, s.chunk_bytes))
            if not (gapless and number):
                skipped = row % s.chunk_rows * s.chunk_cols + piece.cols[0] % s.chunk_cols
                into = piece.into[0] + row - piece.rows[0], piece.into[1]
                part = piece._replace(rows=(row, chunks[-1][0][1] if gapless else stop), into=into)
                address = self._decoded + to + skipped * dtype.itemsize
                self._waiting.append(Decoded(part, dtype, buffer, address, s.chunk_cols))
            self._used, source = self._used + _taken(size), source + size

    def _count(self) -> int:
        """Return how many chunks are waiting to be decoded."""
        return sum(map(len, self._chunks.values()))

    def complete(self, pair: tuple[int, int] | None) -> None:
        """Start to decode all chunks that have been uploaded, and to bring them to their panels, unless none
        of them goes to the panels in these buffers: a few chunks take as long as many.

        pair: the buffers of a panel of op(A) and one of op(B); None: any.
        """
        with self._lock:
            if pair is None or self._has_waiting(pair):
                self._decode()

    def gathers(self, pair: tuple[int, int]) -> bool:
        """Whether chunks for the panels in these buffers wait to be decoded while others are: then chunks
        that come until those are decoded can be decoded with them."""
        with self._lock:
            decoded = self._other.free  # the event after those that are being decoded
            return bool(decoded and decoded.pending and self._has_waiting(pair))

    def _has_waiting(self, pair: tuple[int, int]) -> bool:
        """Whether chunks for the panels in these buffers wait to be decoded."""
        panels = {("a", pair[0]), ("b", pair[1])}
        return any((one.piece.operand, one.buffer) in panels for one in self._waiting)

    def _decode(self) -> None:
        """Start to decode all chunks that wait for it."""
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
