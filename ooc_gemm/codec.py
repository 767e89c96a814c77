"""Compressed chunks, each decoded by one thread straight to its place, and encoded from it.

The compressors of numcodecs release the interpreter lock while they work, so as many chunks are decoded at a
time as there are threads. What each of them takes for granted about sizes is checked here.
"""

import zlib
from dataclasses import dataclass
from typing import Any

import numcodecs
import numpy as np
import numpy.typing as npt

from .pages import Bytes

SHUFFLES = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}
INFLATED = 1 << 20
"""Bytes that are fed to zlib at a time, and most that come out at a time."""


@dataclass(frozen=True)
class Compressor:
    """One compressor."""

    name: str
    """zstd, blosc, lz4, gzip or zlib."""
    codec: Any
    """numcodecs's object."""

    def decode(self, data: Bytes, out: Bytes) -> None:
        """Fill `out`. Raises ValueError where `data` does not decode to just as many bytes, and what the
        compressor says of data that is none of its own."""
        if self.name in ("gzip", "zlib"):
            found: int | None = _inflate(data, out)
        else:
            found = _promised(self.name, data)
            if found is None:  # a stream that does not say how much it holds
                decoded = np.frombuffer(self.codec.decode(data), np.uint8)
                found = len(decoded)
                if found == len(out):
                    out[:] = decoded
            elif found == len(out):
                self.codec.decode(data, out=out)
        if found != len(out):
            raise ValueError(f"it decodes to {found} bytes instead of {len(out)}")

    def encode(self, values: npt.NDArray[Any]) -> bytes:
        """The chunk as it is stored."""
        return bytes(self.codec.encode(values.reshape(-1)))


def find(name: str, configuration: dict[str, Any]) -> Compressor | None:
    """The codec of a name and configuration in Zarr's metadata, of either version; None for one that is not
    known here."""
    name, configuration = name.removeprefix("numcodecs."), dict(configuration)
    if name not in ("zstd", "blosc", "lz4", "gzip", "zlib"):
        return None
    if name == "blosc":
        configuration.pop("typesize", None)  # that of the elements that are encoded
        shuffle = configuration.get("shuffle", 1)
        configuration["shuffle"] = SHUFFLES.get(shuffle, shuffle)
    try:
        return Compressor(name, numcodecs.get_codec({**configuration, "id": name}))
    except Exception:
        return None


def _promised(name: str, data: Bytes) -> int | None:
    """How many bytes the head of `data` says it holds, None where it does not. A decoder that is given just
    so much room, and fails where it needs more, then fills it."""
    if len(data) < 16:
        raise ValueError("it is cut off")
    if name == "lz4":  # numcodecs puts the size before
        return int.from_bytes(data[:4].tobytes(), "little")
    if name == "blosc":
        if int.from_bytes(data[12:16].tobytes(), "little") != len(data):
            raise ValueError("it is cut off, or longer than it should be")
        return int.from_bytes(data[4:8].tobytes(), "little")
    # zstd: RFC 8878, 3.1.1.1
    if data[:4].tobytes() != b"\x28\xb5\x2f\xfd":
        raise ValueError("it is no zstd frame")
    descriptor = int(data[4])
    single = descriptor >> 5 & 1
    width = (single, 2, 4, 8)[descriptor >> 6]
    if width == 0:
        return None
    at = 5 + (1 - single) + (0, 1, 2, 4)[descriptor & 3]
    return int.from_bytes(data[at : at + width].tobytes(), "little") + (256 if width == 2 else 0)


def _inflate(data: Bytes, out: Bytes) -> int:
    """Decode gzip or zlib into `out`; the bytes there were, one more than there is room for where there were
    more."""
    engine, done, given = zlib.decompressobj(wbits=47), 0, 0
    while not engine.eof and done <= len(out):
        if engine.unconsumed_tail:
            feed: Any = engine.unconsumed_tail
        else:
            feed = data[given : given + INFLATED]
            given += len(feed)
            if len(feed) == 0:
                raise ValueError("it is cut off")
        got = engine.decompress(feed, max_length=min(INFLATED, len(out) - done + 1))
        if done + len(got) <= len(out):
            out[done : done + len(got)] = np.frombuffer(got, np.uint8)
        done += len(got)
    if done <= len(out) and (engine.unused_data or given < len(data)):
        raise ValueError("it is longer than it should be")
    return done
