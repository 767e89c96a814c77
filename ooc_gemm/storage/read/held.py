"""Chunks that zarr decodes out of memory, each by itself: chunks inside of shards, whose index is not read
again, and files that are packed in an archive, which are unpacked once.

file, or part of a shard ──► scratch ──► an array of one chunk in memory, which zarr reads ──► slot
"""

import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import zarr
from zarr.storage import MemoryStore, StorePath

from ...planning.problem import Matrix
from ...planning.schedule import Piece
from ...support.buffers import PAGE
from ..format.bounded import bounded, work_of_zarr
from ..format.chunks import Chunks
from ..io.zarr_internals import default_buffer_prototype
from .decoded import Array, DecodedSource
from .metadata import array_at


class HeldSource(DecodedSource):
    """Chunks that zarr decodes out of memory."""

    def __init__(
        self,
        name: str,
        array: zarr.Array[Any],
        matrix: Matrix,
        chunks: Chunks,
        metadata: Any,
        sizes: Iterable[int],
    ):
        """`metadata`: those of an array whose files are what `chunks` holds of each chunk. `sizes`: bytes of
        these."""
        decodes, encodes = work_of_zarr(array.metadata)
        super().__init__(name, array, replace(matrix, decodes=decodes, encodes=encodes), None)
        self._chunks, self._here = chunks, threading.local()
        self._described, self._most = bounded(metadata)
        self._room = min(max(sizes, default=0), self._most) + 2 * PAGE

    def _decoded(self, piece: Piece, part: tuple[slice, slice]) -> tuple[Array, int]:
        (i, j), (held, array) = piece.chunk, self._alone()
        data = self._chunks.encoded(i, j, self._most, self._room)
        if data is None:
            self._missing(piece, self._key(piece))  # of nothing zarr makes the fill value
        else:
            key = self._described.encode_chunk_key((j, i) if self._fortran else (i, j))
            held[key] = default_buffer_prototype().buffer.from_array_like(data)
        try:
            found: Any = self._answers.of(array.async_array.getitem(part))
        finally:
            held.clear()
        return found, 0 if data is None else len(data)

    def _alone(self) -> tuple[dict[str, Any], zarr.Array[Any]]:
        """Return an array of the same chunks, each in a file of its own in memory, and these files. They
        belong to the calling thread."""
        here = self._here
        if not hasattr(here, "array"):
            here.held = dict[str, Any]()
            here.array = array_at(self._described, StorePath(MemoryStore(here.held)), {"order": "C"})
        return here.held, here.array

    def cancel(self) -> None:
        """Wakes all threads that wait for a chunk."""
        self._chunks.place.cancel()
        super().cancel()

    def _key(self, piece: Piece) -> str:
        """Returns the key of the file that holds the chunk."""
        return self._chunks.key(*piece.chunk)
