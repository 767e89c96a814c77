"""The codecs of an array, as its metadata list them: which of them chunks can be read without."""

import sys
from typing import Any

from zarr.abc.codec import Codec
from zarr.codecs import TransposeCodec

from . import codec, shards


def is_fortran(metadata: Any) -> bool:
    """Whether chunks hold the transpose, in C order."""
    if metadata.zarr_format == 2:
        return bool(metadata.order == "F")
    codecs: tuple[Codec, ...] = metadata.codecs
    return isinstance(codecs[0], TransposeCodec) and tuple(codecs[0].order) == (1, 0)


def only_compressor(compression: list[tuple[str, dict[str, Any]]] | None) -> codec.Compressor | None:
    """The compressor, where it is known and the only codec beside those of plain chunks."""
    return codec.find(*compression[0]) if compression and len(compression) == 1 else None


def compression_of(metadata: Any) -> list[tuple[str, dict[str, Any]]] | None:
    """Names and configurations of the codecs that make a file of the elements in native order, which may
    have been transposed; None where the elements are made something else of first."""
    if metadata.zarr_format == 2:
        if metadata.filters:
            return None
        described = [metadata.compressor.get_config()] if metadata.compressor is not None else []
        return [(one.pop("id"), one) for one in described]
    return _beyond_bytes([one.to_dict() for one in metadata.codecs[1 if is_fortran(metadata) else 0 :]])


def _beyond_bytes(chain: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]] | None:
    """The codecs behind `bytes` in native order; None where that is not the first."""
    described = [(str(one["name"]), dict(one.get("configuration", {}))) for one in chain]
    if not described or described[0] not in (("bytes", {}), ("bytes", {"endian": sys.byteorder})):
        return None
    return described[1:]


def inner_chunks(metadata: Any) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]] | None:
    """How shards are made and what their chunks are compressed with; None where only zarr can tell."""
    described = [one.to_dict() for one in metadata.codecs]
    if len(described) != 1 or described[0]["name"] != "sharding_indexed":
        return None
    configuration = described[0]["configuration"]
    compression = _beyond_bytes(list(configuration["codecs"]))
    return None if compression is None or not shards.is_known(configuration) else (configuration, compression)
