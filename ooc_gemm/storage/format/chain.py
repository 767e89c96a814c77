"""The codecs that the metadata of an array list, and which chunks can be decoded without zarr."""

import math
import sys
from dataclasses import dataclass
from typing import Any

from zarr.abc.codec import Codec
from zarr.codecs import TransposeCodec

from . import codec, shards


def is_fortran(metadata: Any) -> bool:
    """Whether chunks hold the transpose of the array in C order."""
    if metadata.zarr_format == 2:
        return bool(metadata.order == "F")
    codecs: tuple[Codec, ...] = metadata.codecs
    return isinstance(codecs[0], TransposeCodec) and tuple(codecs[0].order) == (1, 0)


def only_compressor(compression: list[tuple[str, dict[str, Any]]] | None) -> codec.Compressor | None:
    """Return the compressor if it is known and no codec but those of plain chunks stands beside it."""
    return codec.find(*compression[0]) if compression and len(compression) == 1 else None


def compression_of(metadata: Any) -> list[tuple[str, dict[str, Any]]] | None:
    """Return the names and configurations of the codecs that turn elements in native order, possibly
    transposed, into a file. Returns None where another codec changes the elements first."""
    if metadata.zarr_format == 2:
        if metadata.filters:
            return None
        described = [metadata.compressor.get_config()] if metadata.compressor is not None else []
        return [(one.pop("id"), one) for one in described]
    return _beyond_bytes([one.to_dict() for one in metadata.codecs[1 if is_fortran(metadata) else 0 :]])


def _beyond_bytes(chain: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]] | None:
    """Return the codecs after `bytes` in native order; None where that is not the first codec."""
    described = [(str(one["name"]), dict(one.get("configuration", {}))) for one in chain]
    if not described or described[0] not in (("bytes", {}), ("bytes", {"endian": sys.byteorder})):
        return None
    return described[1:]


@dataclass(frozen=True)
class Inner:
    """How shards are made of their chunks."""

    index: shards.Index
    """How the index of a shard is stored."""
    compression: list[tuple[str, dict[str, Any]]] | None
    """The names and configurations of the codecs that turn elements in native order into what is stored of a
    chunk; None where another codec changes the elements first."""
    alone: Any
    """The metadata of an array whose files hold one chunk each, stored in the same way."""


def inner_chunks(metadata: Any) -> Inner | None:
    """Return how shards are made, where they are all that is done to the elements; None where that cannot
    be told of their index."""
    (sharding,) = (one.to_dict() for one in metadata.codecs)
    configuration, shape = sharding["configuration"], metadata.chunk_grid.chunk_shape
    codecs, chunk = list(configuration["codecs"]), configuration["chunk_shape"]
    index = shards.index_of(configuration, math.prod(shape) // math.prod(chunk))
    if index is None:
        return None
    grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
    alone = type(metadata).from_dict({**metadata.to_dict(), "chunk_grid": grid, "codecs": codecs})
    return Inner(index, _beyond_bytes(codecs), alone)
