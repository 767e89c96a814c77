"""Where the chunks of a sharded array lie in its files: the indices, which are read once each, and made.

A shard's index is a table of (offset, length) of its chunks in row-major order, all ones for a missing one,
before or behind them, with a checksum (Zarr's sharding_indexed codec, version 1.0).
"""

from collections.abc import Callable, Iterable
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from ...support.buffers import Bytes
from ..io.place import Place

MISSING = np.uint64(2**64 - 1)
Extents = npt.NDArray[np.uint64]


def is_known(configuration: dict[str, Any]) -> bool:
    """Whether the indices of such shards can be read without zarr."""
    index = [(one["name"], dict(one.get("configuration", {}))) for one in configuration["index_codecs"]]
    return index == [("bytes", {"endian": "little"}), ("crc32c", {})]


def read_index(place: Place, key: str, count: int, at_end: bool) -> Extents | None:
    """Read the (offset, length) of each chunk of a shard; length 0 for a missing chunk, None for a missing
    shard. Raises ValueError where the index is damaged, and OSError."""
    nbytes = 16 * count
    try:
        with place.open(key, direct=False) as file:
            if file.size < nbytes + 4:
                raise ValueError("it is shorter than its index")
            data = np.empty(nbytes + 4, np.uint8)
            file.read(data, file.size - len(data) if at_end else 0)
            size = np.uint64(file.size)
    except FileNotFoundError:
        return None
    if google_crc32c.value(data[:nbytes].tobytes()) != int.from_bytes(data[nbytes:].tobytes(), "little"):
        raise ValueError("the checksum of its index is wrong")
    found = data[:nbytes].view("<u8").astype(np.uint64).reshape(count, 2)
    found[found[:, 0] == MISSING] = 0
    offsets, lengths = found.T
    if (lengths > size).any() or (offsets > size - lengths).any():  # so that no sum can wrap around
        raise ValueError("its index points past its end")
    return found


def most_bytes(count: int, longest: int) -> int:
    """Return the memory that `make` needs for a shard of so many chunks, each of up to `longest` bytes."""
    return count * (longest + 16) + 4


def make(chunks: Iterable[Any], encode: Callable[[Any], Any], count: int, at_end: bool, into: Bytes) -> Bytes:
    """Put all chunks of a shard together at the front of `into`, and return the bytes to store. chunks:
    arrays, in row-major order. encode: makes the stored bytes of one. count: the number of chunks. at_end:
    whether the index follows the chunks or precedes them. into: memory of `most_bytes`."""
    nbytes = 16 * count + 4
    at, extents = 0 if at_end else nbytes, np.empty((count, 2), "<u8")
    for index, chunk in enumerate(chunks):
        made = np.frombuffer(encode(chunk), np.uint8)
        into[at : at + len(made)] = made
        extents[index] = at, len(made)
        at += len(made)
    start = at if at_end else 0
    table = extents.tobytes()
    table += google_crc32c.value(table).to_bytes(4, "little")
    into[start : start + nbytes] = np.frombuffer(table, np.uint8)
    return into[: at + nbytes if at_end else at]
