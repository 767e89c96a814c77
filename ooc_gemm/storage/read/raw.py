"""Raw chunks: their files, or their parts of shards, hold nothing but the elements in native order.

file ──► slot                  any rectangle of a chunk, read to its place
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ...planning.problem import Matrix
from ...planning.schedule import Piece
from ...support.buffers import Bytes
from ...support.errors import StoreError, remedy
from ...support.intervals import ceil_div, overlaps
from ...support.onward import Onward
from ..format.chunks import Chunks
from ..io import background, files
from ..io.background import Job
from ..io.folder import Folder
from .source import Source

Array = npt.NDArray[Any]

LEAST_ROW = 4 << 10
"""Fewest bytes of each row that are worth a read in the background."""


class RawSource(Source):
    """Raw chunks in local files or objects."""

    def __init__(
        self, name: str, dtype: np.dtype[Any], fill: Any, matrix: Matrix, chunks: Chunks, whole: bool = False
    ):
        """`whole`: whether every stored chunk had its full size when the array was opened."""
        traits = chunks.place.traits
        apart, self._local = whole and traits.asynchronous, whole and not traits.remote
        # Longer reads of a disk go past the page cache, where each chunk of a stack would have to be aligned.
        self._short = self._local and matrix.chunk_bytes < files.LEAST_DIRECT
        traits = replace(matrix.traits, asynchronous=apart, stackable=apart or self._short)
        super().__init__(name, dtype, replace(matrix, traits=traits))
        self._chunks, self._fill, self._lends = chunks, fill, False

    def lending(self) -> "RawSource":
        """Returns a source that leaves pieces of whole rows in memory of the remote store's client."""
        if not self.matrix.traits.remote:
            return self
        other = copy.copy(self)
        other._lends = True
        return other

    def cancel(self) -> None:
        """Wakes all threads that wait for a chunk."""
        self._chunks.place.cancel()

    def start(
        self, piece: Piece, slot: Bytes, onward: Onward | None = None
    ) -> Callable[[], tuple[Array, int]]:
        """Reads in the background, or all chunks with few calls, where one read of each is enough. Parts of
        rows take one call for all rows of a chunk."""
        return self._begin(piece, slot, onward, self.asynchronous)

    def read(self, piece: Piece, slot: Bytes) -> tuple[Array, int]:
        """Reads all chunks with few calls, where one read of each is enough."""
        return self._begin(piece, slot, None, False)()

    def _begin(
        self, piece: Piece, slot: Bytes, onward: Onward | None, aside: bool
    ) -> Callable[[], tuple[Array, int]]:
        """Read a piece, or start to. aside: read in the background, where rows are not too short for that."""
        s, j, (start, stop) = self.matrix, piece.chunk[1], piece.span
        read, folder = partial(self._one_by_one, piece, slot), self._chunks.place
        line, width, skipped = (
            n * s.itemsize for n in (s.chunk_cols, stop - start, start - j * s.chunk_cols)
        )
        by_rows = width != line
        in_background = aside and not (by_rows and width < LEAST_ROW)
        few_calls = self._short or self.asynchronous
        if by_rows:
            few_calls = self._local and background.THERE and width < files.LEAST_DIRECT
        if not (in_background or few_calls) or not isinstance(folder, Folder):
            return read
        rows, jobs = piece.rows[1] - piece.rows[0], list[Job]()
        chunks = range(piece.rows[0] // s.chunk_rows, ceil_div(piece.rows[1], s.chunk_rows))
        data, root = slot[: rows * width], folder.path("")
        try:
            if not s.stores(chunks, j):
                return read
            column, parts = self._chunks.column(chunks, j), overlaps(*piece.rows, s.chunk_rows)
            for (key, base, size), (i, row, row_stop) in zip(column, parts, strict=True):
                if size == 0:
                    return read
                offset, count = base + (row - i * s.chunk_rows) * line + skipped, row_stop - row
                shape = (width, count, line) if by_rows else (count * line,)
                jobs.append(Job(root + key, offset, *shape))
            first, last = ((col - start) * s.itemsize for col in piece.cols)
            columns = width, first, last - first
            if in_background:
                end = files.start_read(jobs, data, onward, columns)
            else:
                end = partial(files.read, jobs, data)
        except (OSError, ValueError):
            return read

        def done() -> tuple[Array, int]:
            if not end():
                if onward:
                    onward.taken = False
                return read()  # or it says what the matter is
            place = data.view(self.dtype).reshape(rows, stop - start)
            return place[:, piece.cols[0] - start : piece.cols[1] - start], rows * width

        return done

    def _one_by_one(self, piece: Piece, slot: Bytes) -> tuple[Array, int]:
        """Read one chunk after the other."""
        s, (i, j), (first, stop) = self.matrix, piece.chunk, piece.rows
        if stop <= (i + 1) * s.chunk_rows:
            return self._read(piece, slot)
        place, nbytes = self._place(piece, slot), 0
        for i, row, row_stop in overlaps(first, stop, s.chunk_rows):
            part = place[row - first : row_stop - first].reshape(-1).view(np.uint8)
            nbytes += self._read(piece._replace(chunk=(i, j), rows=(row, row_stop)), part)[1]
        return place[:, piece.cols[0] - piece.span[0] : piece.cols[1] - piece.span[0]], nbytes

    def _read(self, piece: Piece, slot: Bytes) -> tuple[Array, int]:
        """Read exactly the wanted rows; one read where they are contiguous in the file."""
        s, (i, j) = self.matrix, piece.chunk
        key = self._chunks.key(i, j)
        place = self._place(piece, slot)
        row, col = piece.rows[0] - i * s.chunk_rows, piece.span[0] - j * s.chunk_cols
        line, width = s.chunk_cols * s.itemsize, place.shape[1] * s.itemsize
        cols = slice(piece.cols[0] - piece.span[0], piece.cols[1] - piece.span[0])
        data = place.reshape(-1).view(np.uint8)
        try:
            base, size = self._chunks.extent(i, j)
            if size == 0:
                raise FileNotFoundError
            with self._chunks.open(i, j) as file:
                size = file.size if size is None else size
                if size != s.chunk_bytes:
                    raise StoreError(
                        f"{self.name}: chunk {key} holds {size} bytes instead of {s.chunk_bytes}; "
                        "it is truncated or corrupt, write it again"
                    )
                step = len(data) if width == line else width
                if self._lends and step == len(data):
                    data = file.read_range(data, base + row * line + col * s.itemsize, step)
                    return data.view(self.dtype).reshape(place.shape)[:, cols], place.nbytes
                for start in range(0, len(data), step):
                    at = base + (row + start // width) * line + col * s.itemsize
                    file.read(data[start : start + step], at)
        except FileNotFoundError:
            self._missing(piece, key)
            place[:, cols] = self._fill
            return place[:, cols], 0
        except ValueError as error:
            raise StoreError(f"{self.name}: chunk {key} cannot be read ({error}); write it again") from error
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            what = remedy(error, "check its disk, or write it again")
            raise StoreError(
                f"{self.name}: chunk {key} cannot be read: {error.strerror or error}; {what}"
            ) from error
        return place[:, cols], size if s.whole else place.nbytes
