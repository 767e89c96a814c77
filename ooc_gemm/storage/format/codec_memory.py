"""How much memory compressors work in, beside a chunk and what is stored of it.

The numbers are those of the compressors' own documentation and sources, checked against measurements by
tests/storage/test_codec_memory.py. Each thread that compresses or decompresses takes this much.
"""

from typing import Any

from ...planning.problem import MiB, Work

ZSTD_TABLES = (
    *((13, 14), (15, 16), (16, 17), (18, 18), (18, 19), (18, 19), (19, 20), (19, 20), (20, 21), (21, 22)),
    *((21, 22), (22, 23), (22, 22), (22, 23), (23, 23), (22, 22), (23, 22), (23, 22), (24, 22), (25, 23)),
    *((26, 24), (27, 25)),
)
"""Base-2 logarithms of the entries of zstd's two largest tables, of 4 bytes each, at levels 1 to 22
(zstd 1.5, `ZSTD_defaultCParameters`, where the source is larger than 256 KiB)."""
ZSTD_DEFAULT = 3
"""The level that zstd uses for level 0. Negative levels need less memory."""
ZSTD_PER_BYTE = 16
"""The most entries of either table for each byte of the source, whose size is rounded up to a power of
two."""
ZSTD_BUFFERS = 2 * MiB
"""Memory in bytes for zstd's sequences, literals and statistics of one block of the source."""
ZSTD_LONG = 16 * MiB
"""Memory in bytes for the search for distant matches, which level 22 makes in sources of more than 64 MiB."""

BLOSC_BLOCK = 2 * MiB
"""Largest block that blosc cuts a chunk into; it holds two of them beside what compresses them."""
BLOSC_ZSTD_LEVELS = (1, 1, 3, 5, 7, 9, 11, 13, 15, 22)
"""Level that blosc gives zstd for each of its own, 0 to 9."""

LZMA_DICTIONARIES = (18, 20, 21, 22, 22, 23, 23, 24, 25, 26)
"""Base-2 logarithms of the dictionary's bytes in xz's presets 0 to 9."""
LZMA_PRESET = 6
"""The preset that xz uses where none is given."""
LZMA_ENCODES = 12
"""Memory of xz's encoder, in dictionaries (xz(1): 674 MiB for 64 MiB)."""


def decoding(name: str, configuration: dict[str, Any]) -> Work:
    """Return the memory that decompressing takes. `name` and `configuration` are those in Zarr's metadata. An
    unknown codec counts as nothing."""
    name = name.removeprefix("numcodecs.")
    if name == "zstd":  # into memory of the chunk's size: it needs no window of its own
        return Work(fixed=MiB // 4)
    if name == "blosc":
        return Work(fixed=MiB // 4, per_byte=2, most=2 * BLOSC_BLOCK)
    if name in ("gzip", "zlib"):  # what is fed to it at a time, what comes out, and copies of the rest
        return Work(fixed=MiB // 4, per_byte=4, most=6 * MiB)
    if name == "bz2":
        return Work(fixed=4 * MiB)
    if name == "lzma":
        return Work(fixed=2 * MiB + max(lzma_dictionary({}), lzma_dictionary(configuration)))
    return Work(fixed=MiB // 4) if name == "lz4" else Work()


def encoding(name: str, configuration: dict[str, Any]) -> Work:
    """Return the memory that compressing takes. What is stored may exist twice for a moment, which is
    counted."""
    name = name.removeprefix("numcodecs.")
    if name == "zstd":
        return _zstd(int(configuration.get("level", 0)))
    if name == "blosc":
        return _blosc(configuration)
    if name in ("gzip", "zlib"):
        return Work(fixed=MiB // 2, per_byte=1, most=1 << 40)
    if name == "bz2":
        return Work(fixed=8 * MiB, per_byte=1, most=1 << 40)
    if name == "lzma":
        most = LZMA_ENCODES * lzma_dictionary(configuration) + 8 * MiB
        return Work(fixed=most, per_byte=1, most=1 << 40)
    return Work(fixed=MiB // 4) if name == "lz4" else Work()


def lzma_dictionary(configuration: dict[str, Any]) -> int:
    """Return the size in bytes of the dictionary that an lzma codec of this configuration uses."""
    sizes = [
        one["dict_size"] if "dict_size" in one else _lzma_preset(one.get("preset"))
        for one in configuration.get("filters") or [{"preset": configuration.get("preset")}]
    ]
    return int(sum(sizes))


def _lzma_preset(preset: Any) -> int:
    level = LZMA_PRESET if preset is None else int(preset) & 0x1F  # a flag for "extreme" lies above
    return 1 << LZMA_DICTIONARIES[min(level, 9)]


def _zstd(level: int) -> Work:
    level = max(1, min(level or ZSTD_DEFAULT, len(ZSTD_TABLES)))
    chain, table = ZSTD_TABLES[level - 1]
    most = 4 * ((1 << chain) + (1 << table)) + (ZSTD_LONG if level == len(ZSTD_TABLES) else 0)
    return Work(fixed=ZSTD_BUFFERS, per_byte=ZSTD_PER_BYTE, most=most)


def _blosc(configuration: dict[str, Any]) -> Work:
    blocks = Work(fixed=MiB // 2, per_byte=2, most=2 * BLOSC_BLOCK)
    if configuration.get("cname", "lz4") != "zstd":
        return Work(fixed=blocks.fixed + MiB, per_byte=blocks.per_byte, most=blocks.most)
    level = max(0, min(9, int(configuration.get("clevel", 5))))
    zstd = _zstd(BLOSC_ZSTD_LEVELS[level])
    most = min(zstd.most, zstd.per_byte * BLOSC_BLOCK)
    return Work(zstd.fixed + blocks.fixed, zstd.per_byte + blocks.per_byte, most + blocks.most)
