"""Chunks that zarr decodes, with codecs that stay within bounds."""

import os
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from zarr.abc.store import RangeByteRequest
from zarr.storage import StorePath, WrapperStore, ZipStore

from ...planning.problem import Matrix
from ...planning.schedule import Piece
from ...support.buffers import Bytes, give_back
from ...support.errors import StoreError, remedy
from ..format import documents
from ..format.bounded import HELD_BY_ZARR, bounded, work_of_zarr
from ..io import files
from ..io.answers import Answers
from ..io.folder import Folder
from ..io.zarr_internals import use_fast_codecs
from .metadata import array_at
from .source import Source

Array = npt.NDArray[Any]


class DecodedSource(Source):
    """Chunks that zarr decodes: remote ones, of foreign byte order, of several codecs, or of codecs unknown
    here."""

    def __init__(
        self,
        name: str,
        array: zarr.Array[Any],
        matrix: Matrix,
        counter: "_CountingStore | None",
        folder: Folder | None = None,
        most: int = 0,
    ):
        """`folder`: the folder of the files, where they are local. `most`: the most bytes of a file."""
        matrix = replace(matrix, whole=True, held=HELD_BY_ZARR)
        super().__init__(name, array.dtype.newbyteorder("="), matrix)
        self._array, self._counter, self._fortran = array, counter, matrix.transposed
        self._folder, self._most = folder, most
        store = array.store_path.store
        self._answers = Answers(getattr(store, "_store", store), matrix.chunk_bytes)
        give_back()

    def read(self, piece: Piece, slot: Bytes) -> tuple[Array, int]:
        """Lets zarr decode the chunk, and keeps the piece. The bytes read are those of the stored chunk."""
        place = self._place(piece, slot)
        rows, cols = slice(*piece.rows), slice(*piece.cols)
        try:
            found, nbytes = self._decoded(piece, (cols, rows) if self._fortran else (rows, cols))
        except (MemoryError, StoreError):
            raise
        except TimeoutError as error:
            raise StoreError(
                f"{self.name}: chunk {self._key(piece)} cannot be fetched ({error}); "
                "check its store, then run again"
            ) from error
        except Exception as error:
            raise StoreError(
                f"{self.name}: chunk {self._key(piece)} cannot be read or decoded "
                f"({documents.short(error)}); {remedy(error, 'write it again')}"
            ) from error
        np.copyto(place, found.T if self._fortran else found)
        return place, nbytes

    def _decoded(self, piece: Piece, part: tuple[slice, slice]) -> tuple[Array, int]:
        """Return a part of the array that lies in one chunk, and the bytes read. Raises whatever the store
        and the codecs raise."""
        if self._folder is not None:
            files.check(self._folder.path(self._key(piece)), self._most)
        found: Any = self._answers.of(self._array.async_array.getitem(part))
        if self._folder is not None and not os.path.exists(self._folder.path(self._key(piece))):
            self._missing(piece, self._key(piece))
        if self._counter is not None:
            return found, self._counter.taken()
        return found, self.matrix.stored_size(*piece.chunk)

    def cancel(self) -> None:
        """Wakes all threads that wait for a chunk."""
        self._answers.cancel()

    def _key(self, piece: Piece) -> str:
        """Return the key of the file that holds a chunk: its own, or that of its shard."""
        element = (piece.cols[0], piece.rows[0]) if self._fortran else (piece.rows[0], piece.cols[0])
        stored = self._array.shards or self._array.chunks
        return str(self._array.metadata.encode_chunk_key(tuple(map(int.__floordiv__, element, stored))))


class _CountingStore(WrapperStore[Any]):
    """A store that counts the bytes which reads bring into the process, for chunks that are not files."""

    def __init__(self, store: Any, most: int):
        """`most`: longer files are not read, because an index may ask for any size."""
        super().__init__(store)
        self.total, self._most = 0, most
        self._lock = threading.Lock()

    def taken(self) -> int:
        """Return the bytes read since the last call. With several readers a byte may count for another
        reader."""
        with self._lock:
            total, self.total = self.total, 0
        return total

    def with_read_only(self, read_only: bool = False) -> Any:
        """Return a read-only view of the store, which zarr asks for when it opens one."""
        return self

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """As the store's own. Raises ValueError where that is too much, or more than there is."""
        wanted = byte_range.end - byte_range.start if isinstance(byte_range, RangeByteRequest) else 0
        if wanted > self._most:
            raise ValueError(f"its index asks for {wanted} bytes")
        if byte_range is None and isinstance(self._store, ZipStore):  # a file in it may unpack to any size
            byte_range = RangeByteRequest(0, self._most + 1)
        found = await super().get(key, prototype, byte_range)
        if found is not None:
            if len(found) > self._most:
                raise ValueError(f"it holds more than {self._most} bytes")
            if len(found) < wanted:  # of nothing zarr makes the fill value
                raise ValueError("its index asks for bytes behind its end")
            with self._lock:
                self.total += len(found)
        return found


def decoded_source(name: str, array: zarr.Array[Any], s: Matrix, folder: Folder | None = None) -> Source:
    """Return a source of chunks that zarr decodes with bounded codecs. The `zarrs` pipeline has no bounds, so
    it decodes only what no codec can exceed. It refuses types of foreign byte order (v2), and decodes parts
    of chunks in foreign byte order (v3) to wrong complex numbers, so it is not used for these."""
    metadata, at = array.metadata, array.store_path
    decodes, encodes = work_of_zarr(metadata)
    s = replace(s, decodes=decodes, encodes=encodes)
    described, most = bounded(metadata)
    counter = _CountingStore(at.store, most) if folder is None else None
    fast = described is metadata and array.dtype.isnative and array.dtype.kind != "c"
    # What zarr returns lies in C order: the codec pipelines are for that.
    array = array_at(described, StorePath(counter, at.path) if counter else at, {"order": "C"})
    if fast:
        use_fast_codecs(array)
    return DecodedSource(name, array, s, counter, folder, most)
