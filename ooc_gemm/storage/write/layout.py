"""How a new C is stored: its shape, type, chunks, shards and compressor."""

import contextlib
import math
import operator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from ...planning.problem import Work
from ...support.errors import InputError
from ..format import codec, codec_memory


@dataclass(frozen=True)
class Output:
    """Shape, type, chunks, shards and compressor of a new C."""

    shape: tuple[int, int]
    dtype: np.dtype[Any]
    chunks: tuple[int, int]
    shards: tuple[int, int] | None = None
    compressor: str = "none"
    dimensions: tuple[str, str] | None = None
    """Names of the dimensions; None where they have none."""

    @property
    def encoded(self) -> bool:
        """Whether chunks are compressed, or lie in shards."""
        return self.shards is not None or self.compressor != "none"

    @property
    def work(self) -> Work:
        """The memory that encoding takes in addition to a chunk, or shard, and its encoded form."""
        codecs = [one.to_dict() for one in compressors(self.compressor) or ()]
        each = [codec_memory.encoding(one["name"], one["configuration"]) for one in codecs]
        work = reduce(Work.__add__, each, Work())
        if self.shards is None:
            return work
        chunk = math.prod(self.chunks) * self.dtype.itemsize  # one, what is stored of it, and a copy of that
        return Work(fixed=work.bytes_for(chunk) + 3 * codec.longest(chunk))


def compressors(text: str) -> Any:
    """Return zarr's codecs for `none`, `zstd`, `zstd:LEVEL` or `blosc`. Raises InputError."""
    from zarr.codecs import BloscCodec, ZstdCodec

    name, _, level = str(text).partition(":")
    if str(text) == "none":
        return None
    if str(text) == "blosc":
        return [BloscCodec(cname="zstd", clevel=3, shuffle="bitshuffle")]
    with contextlib.suppress(ValueError):
        if name == "zstd":
            return [ZstdCodec(level=int(level or 3))]
    raise InputError(f"{text!r} is not a compressor; choose none, zstd, zstd:LEVEL (up to 22) or blosc")


def check_layout(chunks: tuple[int, int] | None, shards: tuple[int, int] | None, compressor: str) -> None:
    """Refuse chunks, shards or a compressor that a new array cannot have. Raises InputError."""
    compressors(compressor)
    pair("chunks", chunks)
    pair("shards", shards)
    if shards is not None and (chunks is None or any(s % c for s, c in zip(shards, chunks, strict=True))):
        raise InputError(
            f"shards {shards} need chunks that divide them; give both, such as chunks=(512, 512)"
        )


def pair(name: str, sizes: Any) -> tuple[int, int] | None:
    """Return the sides of chunks or shards as two Python integers; None for None.

    name: how messages call them. Raises InputError where they are no two positive whole numbers."""
    if sizes is None:
        return None
    try:
        first, second = map(operator.index, sizes)
    except (TypeError, ValueError):
        first = second = 0
    if min(first, second) < 1:
        raise InputError(f"{name} {sizes} must be two positive numbers; write for example 2048,2048")
    return first, second
