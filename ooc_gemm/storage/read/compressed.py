"""Chunks that one known compressor has made of raw ones, read without zarr.

file ──► scratch ──► slot      decoded to its place where the whole chunk is wanted
"""

from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ...planning.problem import STACKED, Matrix
from ...planning.schedule import Piece
from ...support.buffers import PAGE, Bytes, scratch
from ...support.errors import StoreError, remedy
from ...support.intervals import overlaps
from ...support.onward import Onward
from ..format.chunks import Chunks, Shards
from ..format.codec import Compressor, longest
from ..io import files, short
from ..io.background import Job
from ..io.folder import Folder
from .source import Source

Array = npt.NDArray[Any]

STACKED_BYTES = 256 << 10
"""Bytes of the largest decoded chunks of which a piece has several. What a larger one takes besides its
decoding is less than a tenth, and pieces of several would keep fewer readers busy."""


LEAST_SENT, LARGEST_SENT = 16 << 10, 16 << 20
"""Bytes of the smallest and of the largest decoded chunks that are handed on to a device. It decodes many at
a time, and each no faster than a core does (1 GiB in chunks of 16 KiB on an H200: 2.1 s, by 16 cores 5.0;
2026-11-29)."""

SENT = 16
"""One in so many pieces of an array that a device decodes may hold a chunk that is as large as before it was
compressed; where a piece has several chunks, also one that is missing. These pieces are decoded by the
host."""


class CompressedSource(Source):
    """Chunks in local files or objects that one known compressor has made of plain elements."""

    def __init__(
        self,
        name: str,
        dtype: np.dtype[Any],
        fill: Any,
        matrix: Matrix,
        chunks: Chunks,
        compressor: Compressor,
    ):
        self._folder = chunks.place if isinstance(chunks.place, Folder) else None
        stackable = self._folder is not None and matrix.chunk_bytes <= STACKED_BYTES
        super().__init__(name, dtype, replace(matrix, traits=replace(matrix.traits, stackable=stackable)))
        self._chunks, self._fill, self._alone = chunks, fill, not isinstance(chunks, Shards)
        self.compressor, self._most = compressor, longest(matrix.chunk_bytes)
        self._room = min(max(matrix.stored or (0,)), self._most) + 2 * PAGE

    @property
    def sends(self) -> str:
        """Returns the name of the compressor, if a device can decode what it makes, and chunks are read from
        files into slots."""
        return self.compressor.name if self._folder and self.compressor.sends and self.sent_at_once else ""

    @cached_property
    def sent_at_once(self) -> int:
        """The most chunks of a piece that is handed on: several if they are small, or in memory, from which
        one thread begins all reads. 0 where chunks are too small or too large, or the host would have to
        decode many pieces."""
        s = self.matrix
        if s.stored is None or not LEAST_SENT <= s.chunk_bytes <= LARGEST_SENT:
            return 0
        sizes = np.reshape(s.stored, s.grid)
        odd, missing = sizes >= s.chunk_bytes, sizes == 0

        def few(stack: int) -> bool:
            """Whether the host must decode few pieces if these have so many chunks."""
            rows = range(0, s.grid[0], stack)
            pieces = np.logical_or.reduceat(odd | missing, rows) if stack > 1 else odd
            return bool(pieces.sum() * SENT <= pieces.size)

        if s.traits.stackable:
            return STACKED if few(STACKED) else 0
        if not few(1):
            return 0
        stack = LARGEST_SENT // s.chunk_bytes
        return stack if self.in_memory and few(stack) else 1

    def sending(self) -> "Source":
        """Returns a source that hands chunks on."""
        return EncodedSource(self)

    def stored(self, piece: Piece, slot: Bytes) -> Bytes | None:
        """Return the chunk of a piece as it is stored, in the slot. None where it is missing, does not fit,
        has grown, cannot be read, or has what others cannot decode: `read` says what the matter is."""
        try:
            data = self._chunks.encoded(*piece.chunk, self._most, self._room, slot)
        except Exception:
            return None
        if data is None or len(data) > self.matrix.largest_stored or not np.may_share_memory(data, slot):
            return None
        return data if self.compressor.can_send(data, self.matrix.chunk_bytes) else None

    def file_of(self, i: int, j: int) -> Job | None:
        """Return where a chunk was stored when the array was opened; None where it was not, or that is not
        known. Raises ValueError where the index of its shard is damaged."""
        size = self.matrix.stored_size(i, j)
        if self.matrix.stored is None or not size or self._folder is None:
            return None
        offset, _ = self._chunks.extent(i, j)
        return Job(self._folder.path(self._chunks.key(i, j)), offset, size)

    @property
    def in_memory(self) -> bool:
        """Whether files can be read in the background."""
        return self._folder is not None and self._folder.traits.asynchronous

    def cancel(self) -> None:
        """Wakes all threads that wait for a chunk."""
        self._chunks.place.cancel()

    def encoded(self, i: int, j: int) -> Bytes | None:
        """Return a chunk as it is stored, or None where it is missing. The memory is reused by the thread's
        next call. Raises OSError and ValueError."""
        return self._chunks.encoded(i, j, self._most, self._room)

    def read(self, piece: Piece, slot: Bytes) -> tuple[Array, int]:
        """Decodes one chunk after the other."""
        s, (i, j), (first, stop) = self.matrix, piece.chunk, piece.rows
        if stop <= (i + 1) * s.chunk_rows:
            return self._read(piece, slot)
        place, nbytes = self._place(piece, slot), 0
        line = place.shape[1] * self.dtype.itemsize
        with closing(self._short(piece)) as found:
            for (i, row, row_stop), data in zip(overlaps(first, stop, s.chunk_rows), found, strict=True):
                out = slot[(row - first) * line : (row_stop - first) * line]
                one = piece._replace(chunk=(i, j), rows=(row, row_stop))
                if data is None or not self._decodes(data, one, out):
                    nbytes += self._read(one, out)[1]
                else:
                    nbytes += len(data)
        return place, nbytes

    def _short(self, piece: Piece) -> Generator[Bytes | None, None, None]:
        """Yield the chunks of a piece as they are stored, where they are short and as long as they were; None
        for any other."""
        j, most = piece.chunk[1], min(files.LEAST_DIRECT, self._most)
        found = [self.file_of(i, j) for i, *_ in overlaps(*piece.rows, self.matrix.chunk_rows)]
        jobs = [job if job and job.nbytes < most else None for job in found]
        return short.parts(jobs, scratch("encoded", self._room), self._alone)

    def _decodes(self, data: Bytes, piece: Piece, place: Bytes) -> bool:
        try:
            self._decode(data, piece, place)
        except Exception:  # `_read` meets it again, and says what the matter is
            return False
        return True

    def _decode(self, data: Bytes, piece: Piece, place: Bytes) -> None:
        """Decode what is stored of a chunk: to its place where the whole chunk is wanted, otherwise through
        scratch memory. `place`: as many bytes as the piece has."""
        s, (i, j) = self.matrix, piece.chunk
        if len(place) == s.chunk_bytes:
            self.compressor.decode(data, place)
            return
        out = scratch("decoded", s.chunk_bytes)[: s.chunk_bytes]
        self.compressor.decode(data, out)
        row, col = i * s.chunk_rows, j * s.chunk_cols
        chunk = out.view(self.dtype).reshape(s.chunk_rows, s.chunk_cols)
        rows = slice(piece.rows[0] - row, piece.rows[1] - row)
        np.copyto(self._place(piece, place), chunk[rows, piece.cols[0] - col : piece.cols[1] - col])

    def _read(self, piece: Piece, slot: Bytes) -> tuple[Array, int]:
        """Reads and decodes one chunk, or a part of it."""
        (i, j), place = piece.chunk, self._place(piece, slot)
        try:
            data = self.encoded(i, j)
            if data is None:
                self._missing(piece, self._chunks.key(i, j))
                place[...] = self._fill
                return place, 0
            self._decode(data, piece, slot[: place.nbytes])
        except (MemoryError, StoreError):
            raise
        except Exception as error:
            key = self._chunks.key(i, j)
            raise StoreError(
                f"{self.name}: chunk {key} cannot be read or decoded ({error}); "
                f"{remedy(error, 'write it again')}"
            ) from error
        return place, len(data)


class EncodedSource(Source):
    """Hands chunks of another source on as they are stored, for a device that decodes them."""

    def __init__(self, source: CompressedSource):
        several = source.sent_at_once > 1
        traits = replace(source.matrix.traits, asynchronous=source.in_memory, stackable=several)
        matrix = replace(source.matrix, encoded=source.sends, traits=traits)
        super().__init__(source.name, source.dtype, matrix)
        self.codec, self._source = source.codec, source

    def cancel(self) -> None:
        """Wakes all threads that wait for a chunk."""
        self._source.cancel()

    def start(
        self, piece: Piece, slot: Bytes, onward: Onward | None = None
    ) -> Callable[[], tuple[Array, int]]:
        """Reads files in memory in the background."""
        jobs = self._jobs(piece, slot) if self.asynchronous else []
        with suppress(OSError):
            if jobs:
                end = files.start_read(jobs, slot[: _total(jobs)])
                return partial(self._ended, end, jobs, piece, slot)
        return partial(self.read, piece, slot)

    def _jobs(self, piece: Piece, slot: Bytes) -> list[Job]:
        """Return where the chunks of a piece are stored; an empty list where one is missing, that is not
        known, or the slot does not hold them."""
        found, j = list[Job | None](), piece.chunk[1]
        with suppress(OSError, ValueError):
            found = [self._source.file_of(i, j) for i, *_ in overlaps(*piece.rows, self.matrix.chunk_rows)]
        jobs = [job for job in found if job]
        return jobs if len(jobs) == len(found) and _total(jobs) <= len(slot) else []

    def _ended(
        self, end: Callable[[], bool], jobs: list[Job], piece: Piece, slot: Bytes
    ) -> tuple[Array, int]:
        """Return what `read` returns of chunks that are being read to the front of a slot."""
        if not end():
            return self.read(piece, slot) if len(jobs) == 1 else self._source.read(piece, slot)
        compressor, size, at = self._source.compressor, self.matrix.chunk_bytes, 0
        for job in jobs:
            if not compressor.can_send(slot[at : at + job.nbytes], size):
                return self._source.read(piece, slot)
            at += job.nbytes
        return slot[:at], at

    def read(self, piece: Piece, slot: Bytes) -> tuple[Array, int]:
        """Returns the stored bytes of the chunks, in one dimension and without gaps, or decodes what cannot
        be handed on."""
        if piece.rows[1] <= (piece.chunk[0] + 1) * self.matrix.chunk_rows:
            data = self._source.stored(piece, slot)
            return self._source.read(piece, slot) if data is None else (data, len(data))
        jobs = self._jobs(piece, slot)
        if not jobs:
            return self._source.read(piece, slot)
        return self._ended(partial(files.read, jobs, slot[: _total(jobs)]), jobs, piece, slot)


def _total(jobs: list[Job]) -> int:
    """Return the bytes of all jobs."""
    return sum(job.nbytes for job in jobs)
