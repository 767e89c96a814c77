"""Chunks that one known compressor has made of raw ones, read without zarr.

file ──► scratch ──► slot      decoded to its place where the whole chunk is wanted
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from ...planning.problem import Matrix
from ...planning.schedule import Piece
from ...support.buffers import PAGE, Bytes, scratch
from ...support.errors import StoreError, remedy
from ..format.chunks import Chunks
from ..format.codec import Compressor, longest
from ..io.files import room
from .source import Source

Array = npt.NDArray[Any]


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
        super().__init__(name, dtype, matrix)
        self._chunks, self._fill = chunks, fill
        self.compressor, self._most = compressor, longest(matrix.chunk_bytes)
        self._room = min(max(matrix.stored or (0,)), self._most) + 2 * PAGE

    def cancel(self) -> None:
        """Wakes all threads that wait for a chunk."""
        self._chunks.place.cancel()

    def encoded(self, i: int, j: int) -> Bytes | None:
        """Return a chunk as it is stored, or None where it is missing. The memory is reused by the thread's
        next call. Raises OSError and ValueError."""
        offset, size = self._chunks.extent(i, j)
        if size == 0:
            return None
        try:
            with self._chunks.open(i, j) as file:
                size = file.size if size is None else size
                if size > self._most:
                    raise ValueError(f"it takes {size} bytes, more than {self._most}")
                return file.read_range(scratch("encoded", room(offset, size), self._room), offset, size)
        except FileNotFoundError:
            return None

    def read(self, piece: Piece, slot: Bytes) -> tuple[Array, int]:
        """Decodes a whole chunk to its place, and a part of one through scratch memory."""
        s, (i, j) = self.matrix, piece.chunk
        place = self._place(piece, slot)
        whole = place.nbytes == s.chunk_bytes
        out = (
            place.reshape(-1).view(np.uint8) if whole else scratch("decoded", s.chunk_bytes)[: s.chunk_bytes]
        )
        try:
            data = self.encoded(i, j)
            if data is None:
                self._missing(piece, self._chunks.key(i, j))
                place[...] = self._fill
                return place, 0
            self.compressor.decode(data, out)
        except (MemoryError, StoreError):
            raise
        except Exception as error:
            key = self._chunks.key(i, j)
            raise StoreError(
                f"{self.name}: chunk {key} cannot be read or decoded ({error}); "
                f"{remedy(error, 'write it again')}"
            ) from error
        if not whole:
            row, col = i * s.chunk_rows, j * s.chunk_cols
            chunk = out.view(self.dtype).reshape(s.chunk_rows, s.chunk_cols)
            rows = slice(piece.rows[0] - row, piece.rows[1] - row)
            np.copyto(place, chunk[rows, piece.cols[0] - col : piece.cols[1] - col])
        return place, len(data)
