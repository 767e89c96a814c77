"""Makes the bytes that are stored of a chunk or a shard: its elements as they are, or encoded."""

from typing import Any

import numpy as np
import zarr
from zarr.storage import MemoryStore, StorePath

from ...support.buffers import Bytes, give_back, scratch
from ..format import codec, shards
from ..format.chain import Inner, compression_of, inner_chunks, is_fortran, only_compressor
from ..io.zarr_internals import sync
from ..read.metadata import array_at
from ..read.source import Array


class Encoder:
    """Encodes whole chunks, or shards, of one array."""

    def __init__(self, array: zarr.Array[Any]):
        self._array = array
        compression = compression_of(array.metadata)
        self._compressor = only_compressor(compression)
        plain = array.dtype.isnative and not is_fortran(array.metadata) and array.shards is None
        self._plain = plain and (compression == [] or self._compressor is not None)
        inner = inner_chunks(array.metadata) if array.shards and array.dtype.isnative else None
        known = inner and (inner.compression == [] or only_compressor(inner.compression))
        self._inner = inner if known else None
        """How the chunks of a shard are stored, where shards are made here and not by zarr."""
        if not self.copies:
            give_back()

    @property
    def copies(self) -> bool:
        """Whether elements are stored as they are, without an encoder."""
        return self._plain and self._compressor is None

    def encode(self, data: Array) -> Bytes | bytes:
        """Return what is stored of a whole chunk, or shard. It lies in `data` itself, or in memory that the
        next call of this thread may reuse."""
        if self._plain:
            return self._compressor.encode(data) if self._compressor else data.reshape(-1).view(np.uint8)
        if self._inner:
            return self._shard(data, self._inner)
        # zarr's work, in an array of one chunk.
        metadata = {**self._array.metadata.to_dict(), "shape": data.shape}
        described = type(self._array.metadata).from_dict(metadata)
        alone = array_at(described, StorePath(MemoryStore()), {"write_empty_chunks": True})
        alone[...] = data
        made = sync((alone.store_path / alone.metadata.encode_chunk_key((0, 0))).get())
        assert made
        return made.to_bytes()

    def _shard(self, data: Array, inner: Inner) -> Bytes:
        (height, width), compressor = self._array.chunks, only_compressor(inner.compression)
        down, across = (size // step for size, step in zip(data.shape, (height, width), strict=True))
        most = codec.longest(height * width * data.itemsize)
        chunks = (
            np.ascontiguousarray(data[i * height : (i + 1) * height, j * width : (j + 1) * width])
            for i in range(down)
            for j in range(across)
        )
        encode = compressor.encode if compressor else lambda chunk: chunk.reshape(-1).view(np.uint8)
        into = scratch("shard", shards.most_bytes(inner.index, most))
        return shards.make(chunks, encode, inner.index, into)
