"""Codecs for chunks that zarr decodes. They refuse to make more of a chunk than its metadata allows."""

import asyncio
import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from zarr.abc.codec import ArrayArrayCodec, BytesBytesCodec
from zarr.codecs import ShardingCodec

from ...planning.problem import Work
from . import codec, codec_memory, documents

ELEMENT_BYTES = 16
"""The most bytes that a codec makes of one element in an intermediate step."""
HELD_BY_ZARR = 5
"""Memory that zarr takes to decode or encode a chunk or shard, what it returns included, in multiples of its
size: 2.0 to 4.4 were measured over its codecs, byte orders and versions with noise."""


@dataclass(frozen=True, eq=False)
class _BoundedCodec(BytesBytesCodec):
    """A codec of zarr's that decodes with a `Bounded` compressor."""

    codec: codec.Bounded
    is_fixed_size = False

    async def _decode_single(self, data: Any, spec: Any) -> Any:
        found = await asyncio.to_thread(self.codec.decode, data.as_numpy_array())
        return spec.prototype.buffer.from_array_like(found)

    def compute_encoded_size(self, input_byte_length: int, _chunk_spec: Any) -> int:
        """Raises NotImplementedError, because the size is not known."""
        raise NotImplementedError


def bounded(metadata: Any) -> tuple[Any, int]:
    """Return the metadata with codecs that cannot make more of a chunk than it may be, and the most bytes of
    a file. Where no codec could, the metadata are returned as they are."""
    if metadata.zarr_format == 3:
        elements = math.prod(metadata.chunk_grid.chunk_shape)
        codecs, most, _ = _bounded_chain(metadata.codecs, elements, metadata.data_type.item_size)
        if codecs == metadata.codecs:
            return metadata, most
        metadata = copy.copy(metadata)
        object.__setattr__(metadata, "codecs", codecs)
        return metadata, most
    most = math.prod(metadata.chunks) * (ELEMENT_BYTES if metadata.filters else metadata.dtype.item_size)
    room, filters, one = codec.longest(most), metadata.filters, metadata.compressor
    if not filters and one is None:
        return metadata, room
    metadata = copy.copy(metadata)
    if filters:
        bounded = tuple(codec.Bounded(each.codec_id, each, room, False) for each in filters)
        object.__setattr__(metadata, "filters", bounded)
    if one is not None:
        one = codec.Bounded(one.codec_id, one, room if filters else most, not filters)
        object.__setattr__(metadata, "compressor", one)
    return metadata, room


def _bounded_chain(chain: tuple[Any, ...], elements: int, itemsize: int) -> tuple[tuple[Any, ...], int, bool]:
    """Return the bounded codecs, the most bytes that they make of so many elements, and whether they always
    make as many."""
    made, size, exact = [], elements * itemsize, True
    for one in chain:
        described = one.to_dict()
        known = described["name"].removeprefix("numcodecs.")
        if isinstance(one, ShardingCodec):
            inner = math.prod(one.chunk_shape)
            codecs, most, _ = _bounded_chain(one.codecs, inner, itemsize)
            size, exact = elements // inner * (most + 16) + 4, False
            one = one if codecs == one.codecs else replace(one, codecs=codecs)
        elif isinstance(one, ArrayArrayCodec) and known != "transpose":
            size, exact = elements * ELEMENT_BYTES, False
        elif known in documents.COMPRESSORS:
            configuration = dict(described.get("configuration", {}))
            one = _BoundedCodec(codec.bounded(known, configuration, size, exact))
            size, exact = codec.longest(size), False
        elif known in documents.CHECKSUMS:
            size += 4
        made.append(one)
    return tuple(made), size, exact


def work_of_zarr(metadata: Any) -> tuple[Work, Work]:
    """Return the memory that the compressors of an array take where zarr decodes its chunks, and where it
    encodes them. HELD_BY_ZARR already has room for most decompressors."""
    if metadata.zarr_format == 2:
        described = [one.get_config() for one in (*(metadata.filters or ()), metadata.compressor) if one]
        chain = [(str(one["id"]), one) for one in described]
    else:
        chain = list(_flat([one.to_dict() for one in metadata.codecs]))
    large = [one for one in chain if one[0].removeprefix("numcodecs.") in ("bz2", "lzma")]
    return (
        reduce(Work.__add__, (codec_memory.decoding(*one) for one in large), Work()),
        reduce(Work.__add__, (codec_memory.encoding(*one) for one in chain), Work()),
    )


def _flat(chain: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names and configurations of all codecs, also of those inside shards."""
    for one in chain:
        configuration = dict(one.get("configuration", {}))
        yield str(one["name"]), configuration
        if one["name"] == "sharding_indexed":
            yield from _flat(list(configuration["codecs"]))
