"""Compressed chunks, each decoded by one thread straight to its place, and encoded from it.

The compressors of numcodecs release the interpreter lock while they work, so as many chunks are decoded at a
time as there are threads. What each of them takes for granted about sizes is checked here.
"""

import bz2
import lzma
import zlib
from dataclasses import dataclass
from typing import Any

import numcodecs
import numpy as np
import numpy.typing as npt
from numcodecs import blosc

from ...planning.problem import MiB
from ...support.buffers import Bytes
from . import codec_memory, zstd
from .documents import COMPRESSORS

SHUFFLES = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}
BLOSC_VERSION, BLOSC_ZSTD, BLOSC_NOT_COMPRESSED = 2, 4, 2
"""What a device decodes has in its header: the version, the number of zstd, and not this flag."""
BLOSC_LARGEST = 1 << 20
"""The most bytes of a block of blosc that a device decodes."""
INFLATED = 1 << 20
"""Bytes that are fed to zlib at a time, and most that come out at a time."""
LZMA_BYTES = 128 << 20
"""Memory in bytes that lzma may use for its window; its strongest preset needs half of it."""


@dataclass(frozen=True)
class Compressor:
    """A compressor of numcodecs that decodes a chunk straight to its place."""

    name: str
    """Name of the compressor: zstd, blosc, lz4, gzip or zlib."""
    codec: Any
    """The object of numcodecs that encodes and decodes."""

    def decode(self, data: Bytes, out: Bytes) -> None:
        """Decode `data` into `out`. Raises ValueError where `data` does not decode to exactly the size of
        `out`, and what the compressor raises for data that it did not make."""
        if self.name == "zstd" and zstd.decode(data, out):
            return
        if self.name in ("gzip", "zlib"):
            found = _inflate(data, out)
        else:
            promised = _promised(self.name, data)
            found = len(out) if promised is None else promised  # it fails where that does not fill `out`
            if found == len(out):
                self.codec.decode(data, out=out)
        if found != len(out):
            raise ValueError(f"it decodes to {found} bytes instead of {len(out)}")

    @property
    def sends(self) -> bool:
        """Whether a device can decode what this compressor makes (kernels/prepare/zstd.cu and blosc.cu)."""
        if self.name == "zstd":
            return not self.codec.checksum
        return self.name == "blosc" and bool(self.codec.cname == "zstd")

    def can_send(self, data: Bytes, size: int) -> bool:
        """Whether a device can decode a chunk of `size` bytes, by its first bytes."""
        if self.name == "zstd":
            return zstd.is_plain(data)
        if len(data) < 16:
            return False
        (version, _, flags, itemsize), numbers = data[:4].tolist(), data[4:16].view("<u4").tolist()
        simple = version == BLOSC_VERSION and flags >> 5 == BLOSC_ZSTD and not flags & BLOSC_NOT_COMPRESSED
        nbytes, block, stored = numbers
        fits = 0 < block <= min(size, BLOSC_LARGEST)
        return bool(simple and itemsize and nbytes == size and stored == len(data) and fits)

    def encode(self, values: npt.NDArray[Any]) -> bytes:
        """Return a chunk as it is stored."""
        return bytes(self.codec.encode(values.reshape(-1)))


def find(name: str, configuration: dict[str, Any]) -> Compressor | None:
    """Return the compressor of a name and a configuration in Zarr's metadata, of either version; None for an
    unknown one."""
    name, configuration = name.removeprefix("numcodecs."), dict(configuration)
    if name not in ("zstd", "blosc", "lz4", "gzip", "zlib"):
        return None
    if name == "blosc":
        configuration.pop("typesize", None)  # that of the elements that are encoded
        shuffle = configuration.get("shuffle", 1)
        configuration["shuffle"] = SHUFFLES.get(str(shuffle), shuffle)
    try:
        return Compressor(name, numcodecs.get_codec({**configuration, "id": name}))
    except Exception:
        return None


def missing_here(compression: list[tuple[str, dict[str, Any]]] | None) -> str | None:
    """Return the compressor that blosc uses in a chain of codecs, where this build of numcodecs lacks it (as
    it lacks snappy); None where there is nothing to say."""
    for name, configuration in compression or ():
        inside = configuration.get("cname")
        if name.removeprefix("numcodecs.") == "blosc" and inside not in (None, *blosc.list_compressors()):
            return str(inside)
    return None


def longest(size: int) -> int:
    """Return the most bytes that a compressor makes of `size` bytes."""
    return size + size // 8 + (64 << 10)


@dataclass(frozen=True)
class Bounded:
    """A codec that refuses to decode to more than a given number of bytes. (The codecs themselves believe
    their input: a megabyte of gzip may hold a gigabyte of zeros.)"""

    name: str
    """Name of the codec, without the prefix `numcodecs.`."""
    codec: Any
    """The object of numcodecs that decodes."""
    most: int
    """The most bytes that it may decode to."""
    exact: bool
    """Whether it must decode to exactly `most` bytes."""

    def decode(self, data: Any, out: Any = None) -> Any:
        """Decode as the codec of numcodecs does. Raises ValueError before more memory is taken than `most`
        bytes, and what the codec raises for data that it did not make."""
        found = self._unpacked(data) if self.name in COMPRESSORS else self._filtered(data)
        size = np.asarray(found).nbytes
        if size > self.most or (self.exact and size != self.most):
            raise ValueError(f"it decodes to {size} bytes instead of {self.most}")
        return found

    def get_config(self) -> dict[str, Any]:
        """Return the configuration of the codec of numcodecs."""
        return dict(self.codec.get_config())

    def _filtered(self, data: Any) -> Any:
        """Decode with a filter, which makes as many elements of another type."""
        made, into = (
            next((np.dtype(getattr(self.codec, key)) for key in keys if hasattr(self.codec, key)), None)
            for keys in (("encode_dtype", "astype"), ("decode_dtype", "dtype"))
        )
        if made and into and np.asarray(data).nbytes // made.itemsize * into.itemsize > self.most:
            raise ValueError(f"it decodes to more than {self.most} bytes")
        return self.codec.decode(data)

    def _unpacked(self, data: Any) -> Bytes:
        data = np.frombuffer(data, np.uint8)
        if self.name in ("bz2", "lzma"):
            engine: Any = bz2.BZ2Decompressor() if self.name == "bz2" else self._lzma()
            decoded = engine.decompress(data, max_length=self.most + 1)
            if len(decoded) <= self.most and (not engine.eof or engine.unused_data):
                raise ValueError("it is cut off, or longer than it should be")
            return np.frombuffer(decoded, np.uint8)
        if self.name in ("gzip", "zlib"):
            out = np.empty(self.most, np.uint8)
            if (found := _inflate(data, out)) > self.most:
                raise ValueError(f"it decodes to more than {self.most} bytes")
            return out[:found]
        promised = _promised(self.name, data)
        if promised is None:
            if not self.exact:
                raise ValueError("it does not say how much it holds")
            promised = self.most
        if promised > self.most:
            raise ValueError(f"it decodes to {promised} bytes instead of {self.most}")
        out = np.empty(promised, np.uint8)
        self.codec.decode(data, out=out)
        return out

    def _lzma_bytes(self) -> int:
        """Return the memory that the ledger counts for lzma: that of the dictionary in the metadata, or of
        the default preset."""
        usual = codec_memory.lzma_dictionary({})
        return max(usual, codec_memory.lzma_dictionary(self.codec.get_config())) + 2 * MiB

    def _lzma(self) -> lzma.LZMADecompressor:
        if self.codec.format != lzma.FORMAT_RAW:
            return lzma.LZMADecompressor(self.codec.format, memlimit=min(LZMA_BYTES, self._lzma_bytes()))
        chain = list(self.codec.filters)
        if sum(one.get("dict_size", 0) for one in chain) > LZMA_BYTES:
            raise ValueError("its codec wants too much memory")
        return lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=chain)


def bounded(name: str, configuration: dict[str, Any], most: int, exact: bool) -> Bounded:
    """Return the codec for a name and a configuration in Zarr's metadata of version 3. Raises what numcodecs
    raises."""
    name = name.removeprefix("numcodecs.")
    kept = configuration if name == "lzma" else {}  # others decode without
    return Bounded(name, numcodecs.get_codec({**kept, "id": name}), most, exact)


def _promised(name: str, data: Bytes) -> int | None:
    """The decoded size that the header of `data` states, in bytes; None where it states none. A decoder that
    gets a buffer of this size fills it or fails. Raises ValueError where the header is incomplete."""
    if name == "lz4":  # numcodecs writes the decoded size before the data
        return _integer(data, 0, 4)
    if name == "blosc":
        if _integer(data, 12, 4) != len(data):
            raise ValueError("it is cut off, or longer than it should be")
        return _integer(data, 4, 4)
    # zstd: RFC 8878, 3.1.1.1
    if data[:4].tobytes() != zstd.MAGIC:
        raise ValueError("it is no zstd frame")
    descriptor = _integer(data, 4, 1)
    single = descriptor >> 5 & 1
    width = (single, 2, 4, 8)[descriptor >> 6]
    if width == 0:
        return None
    at = 5 + (1 - single) + (0, 1, 2, 4)[descriptor & 3]
    return _integer(data, at, width) + (256 if width == 2 else 0)


def _integer(data: Bytes, at: int, width: int) -> int:
    """A field of a header: `width` bytes from byte `at`, the least significant first. Raises ValueError where
    `data` ends before it does."""
    if len(data) < at + width:
        raise ValueError("it is cut off")
    return int.from_bytes(data[at : at + width].tobytes(), "little")


def _inflate(data: Bytes, out: Bytes) -> int:
    """Decode gzip or zlib into `out`. Returns the number of decoded bytes; one more than `out` holds where
    there are more."""
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
