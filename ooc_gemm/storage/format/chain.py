"""The codecs that the metadata of an array list, and which chunks can be decoded without zarr."""

import sys
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


def inner_chunks(metadata: Any) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]] | None:
    """Return how shards are made and how their chunks are compressed; None where only zarr can tell."""
    described = [one.to_dict() for one in metadata.codecs]
    if len(described) != 1 or described[0]["name"] != "sharding_indexed":
        return None
    configuration = described[0]["configuration"]
    compression = _beyond_bytes(list(configuration["codecs"]))
    return None if compression is None or not shards.is_known(configuration) else (configuration, compression)
