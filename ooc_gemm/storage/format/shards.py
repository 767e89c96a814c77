"""Where the chunks of a sharded array lie in its files: the indices, which are read once each, and made.

A shard's index is a table of (offset, length) of its chunks in row-major order, all ones for a missing one,
before or behind them, in either byte order and usually with a checksum (Zarr's sharding_indexed codec,
version 1.0).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from ...support.buffers import Bytes
from ..io.place import InputPlace

MISSING = np.uint64(2**64 - 1)
Extents = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Index:
    """How the index of a shard is stored."""

    count: int
    """How many chunks a shard has."""
    at_end: bool
    """Whether the index follows the chunks or precedes them."""
    order: str = "<"
    """Its byte order, as NumPy spells it."""
    checksums: int = 1
    """How many checksums follow it. Each is one of all before it."""

    @property
    def nbytes(self) -> int:
        """Size of an index in bytes, with its checksums."""
        return 16 * self.count + 4 * self.checksums

    def decode(self, data: bytes) -> Extents:
        """Return the (offset, length) of each chunk as they are stored. Raises ValueError where a checksum is
        wrong."""
        for _ in range(self.checksums):
            data, said = data[:-4], data[-4:]
            if google_crc32c.value(data) != int.from_bytes(said, "little"):
                raise ValueError("the checksum of its index is wrong")
        return np.frombuffer(data, f"{self.order}u8").astype(np.uint64).reshape(self.count, 2)

    def encode(self, extents: Extents) -> bytes:
        """Return the index as it is stored. extents: the (offset, length) of each chunk."""
        made = extents.astype(f"{self.order}u8").tobytes()
        for _ in range(self.checksums):
            made += google_crc32c.value(made).to_bytes(4, "little")
        return made


def index_of(configuration: dict[str, Any], count: int) -> Index | None:
    """Return how the indices of such shards, of `count` chunks each, are stored; None for one that cannot
    be."""
    names = [one["name"] for one in configuration["index_codecs"]]
    if names[:1] != ["bytes"] or not set(names[1:]) <= {"crc32c"}:
        return None
    first = configuration["index_codecs"][0].get("configuration", {})
    order = {"little": "<", "big": ">"}.get(str(first.get("endian")))
    if order is None:
        return None
    return Index(count, configuration["index_location"] == "end", order, len(names) - 1)


def read_index(place: InputPlace, key: str, index: Index) -> Extents | None:
    """Read the (offset, length) of each chunk of a shard; length 0 for a missing chunk, None for a missing
    shard. Raises ValueError where the index is damaged, and OSError."""
    try:
        with place.open(key, direct=False) as file:
            size = file.size
            if size < index.nbytes:
                raise ValueError("it is shorter than its index")
            data = np.empty(index.nbytes, np.uint8)
            file.read(data, size - len(data) if index.at_end else 0)
    except FileNotFoundError:
        return None
    found = index.decode(data.tobytes())
    found[found[:, 0] == MISSING] = 0
    offsets, lengths = found.T
    most = np.uint64(size)
    if (lengths > most).any() or (offsets > most - lengths).any():  # so that no sum can wrap around
        raise ValueError("its index points past its end")
    return found


def most_bytes(index: Index, longest: int) -> int:
    """Return the memory that `make` needs for a shard whose chunks take up to `longest` bytes each."""
    return index.count * longest + index.nbytes


def make(chunks: Iterable[Any], encode: Callable[[Any], Any], index: Index, into: Bytes) -> Bytes:
    """Put all chunks of a shard together at the front of `into`, and return the bytes to store. chunks:
    arrays, in row-major order. encode: makes the stored bytes of one. into: memory of `most_bytes`."""
    at, extents = 0 if index.at_end else index.nbytes, np.empty((index.count, 2), np.uint64)
    for number, chunk in enumerate(chunks):
        made = np.frombuffer(encode(chunk), np.uint8)
        into[at : at + len(made)] = made
        extents[number] = at, len(made)
        at += len(made)
    start = at if index.at_end else 0
    into[start : start + index.nbytes] = np.frombuffer(index.encode(extents), np.uint8)
    return into[: at + index.nbytes if index.at_end else at]
