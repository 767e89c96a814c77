"""Zarr's metadata, looked through before anything acts on it: it is input like any other.

    zarr.json, .zarray ──► bytes, at most 2 MiB ──► JSON ──► `check` ──► zarr

What passes has two sane extents, chunks in a regular grid, numbers that can be multiplied, keys that stay
below the array's folder, and codecs of which it is known how much can come out of them (codec.py). Most
attributes, and names of dimensions that are no names, are left out. All else is left to zarr to refuse.

Standard library only.
"""

import json
import re
from typing import Any

from ...support.errors import InputError

MAX_BYTES = 2 << 20
"""Most bytes of a metadata document. As Python objects, JSON takes up to 33 times its size."""
MAX_NESTED = 1 << 16
"""Most lists and objects in a document, counted by brackets, also those in strings. Parsing many takes long,
because each may start a garbage collection."""
MAX_EXTENT = 1 << 62
MAX_CODECS = 16
"""Most codecs in a chain, each of which may take memory."""
SUPPORTED = "float16, float32, float64, complex64, complex128 and integers of 8 to 64 bits"

NUMBERS = re.compile(r"(u?int(8|16|32|64)|float(16|32|64)|complex(64|128))")
NUMBERS_2 = re.compile(r"[<>|=]?([iu][1248]|f[248]|c8|c16)")
COMPRESSORS = frozenset({"zstd", "blosc", "lz4", "gzip", "zlib", "bz2", "lzma"})
"""Codecs whose output may be much longer than their input."""
CHECKSUMS = frozenset({"crc32c", "crc32", "adler32", "fletcher32", "jenkins_lookup3"})
DIMENSIONS = "_ARRAY_DIMENSIONS"
"""The attribute with the names of dimensions, in version 2."""
MAX_NAME = 256
"""Most letters of the name of a dimension."""
PACKING = "scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned"
ATTRIBUTES = ("ooc-gemm", *PACKING, DIMENSIONS)
"""Attributes that are read: what made C (recorded.py), how values are packed (conventions.py), and the names
of dimensions."""
FILTERS = frozenset({"shuffle", "delta", "fixedscaleoffset", "quantize", "bitround", "astype"})
"""Codecs that keep the number of elements."""
OTHERS = frozenset({"bytes", "endian", "transpose", "sharding_indexed", "scale_offset", "cast_value"})


def parse(name: str, document: bytes) -> dict[str, Any]:
    """Parse a document and return its JSON object. Raises InputError."""
    if len(document) > MAX_BYTES:
        raise InputError(
            f"{name}: its metadata takes more than {MAX_BYTES >> 20} MiB; remove attributes from it"
        )
    if document.count(b"[") + document.count(b"{") > MAX_NESTED:
        raise InputError(
            f"{name}: its metadata has more than {MAX_NESTED} lists and objects; remove attributes from it"
        )
    try:
        found = json.loads(document)
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, a number of too many digits
        raise _bad(name, f"it is not JSON ({short(error)})") from error
    if not isinstance(found, dict):
        raise _bad(name, "it is not a JSON object")
    return found


def short(what: Any) -> str:
    """Return one line of limited length and of printable characters, whatever the metadata hold."""
    text = " ".join(str(what)[:1000].split())[:300]
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _bad(name: str, why: str) -> InputError:
    return InputError(f"{name}: its Zarr metadata cannot be used: {why}; repair or rewrite the array")


def kind(key: str, described: dict[str, Any]) -> str | None:
    """Return whether the document of this key describes an `array` or a `group`; None for neither. The rest
    of the document is not checked."""
    if key == ".zgroup" or described.get("node_type") == "group":
        return "group"
    return "array" if isinstance(described.get("shape"), list) else None


def check(name: str, described: dict[str, Any], key: str, flat: bool = False) -> dict[str, Any]:
    """Check the document of this key, and return what zarr is to make an array of. `flat`: one dimension is
    enough. Raises InputError."""
    version = 3 if key == "zarr.json" else 2
    if type(described.get("zarr_format")) is not int or described["zarr_format"] != version:
        raise _bad(name, f"zarr_format is not {version}")
    return (_version_3 if version == 3 else _version_2)(name, described, flat)


def _version_3(name: str, described: dict[str, Any], flat: bool) -> dict[str, Any]:
    shape = _extents(name, "shape", described.get("shape"))
    grid = described.get("chunk_grid")
    if not isinstance(grid, dict) or grid.get("name") != "regular":
        raise InputError(f"{name} has irregular chunks; rechunk it to a regular grid")
    chunks = _extents(name, "chunk_shape", _configuration(name, grid).get("chunk_shape"))
    kind = described.get("data_type")
    if not (isinstance(kind, str) and NUMBERS.fullmatch(kind)):
        raise _no_numbers(name, kind)
    _two(name, shape, chunks, flat)
    keys = described.get("chunk_key_encoding")
    if isinstance(keys, dict):
        separator = keys.get("separator", _configuration(name, keys).get("separator"))
        _key(name, keys.get("name"), separator)
    elif keys is not None:
        _key(name, keys, None)
    _check_chain(name, described.get("codecs"), len(shape))
    _check_fill(name, described.get("fill_value"))
    if not isinstance(described.get("attributes"), dict | None):
        raise _bad(name, "attributes is not a JSON object")
    names = dimensions(described.get("dimension_names"), len(shape))
    return {**described, "dimension_names": names, "attributes": attributes(described.get("attributes"))}


def dimensions(found: Any, count: int) -> tuple[str | None, ...] | None:
    """Return the names of so many dimensions, each None where it has none; None where they have no names at
    all, or `found` is not a list of names."""
    if not isinstance(found, list | tuple) or len(found) != count:
        return None
    names = tuple(one if isinstance(one, str) and 0 < len(one) <= MAX_NAME else None for one in found)
    return names if any(names) else None


def attributes(found: Any) -> dict[str, Any]:
    """Return those attributes that this package reads."""
    return {key: found[key] for key in ATTRIBUTES if key in found} if isinstance(found, dict) else {}


def _version_2(name: str, described: dict[str, Any], flat: bool) -> dict[str, Any]:
    shape = _extents(name, "shape", described.get("shape"))
    chunks = _extents(name, "chunks", described.get("chunks"))
    kind = described.get("dtype")
    if not (isinstance(kind, str) and NUMBERS_2.fullmatch(kind)):
        raise _no_numbers(name, kind)
    _two(name, shape, chunks, flat)
    _key(name, "v2", described.get("dimension_separator"))
    if described.get("order", "C") not in ("C", "F"):
        raise _bad(name, f"order {short(described['order'])!r} is neither C nor F")
    filters, compressor = described.get("filters"), described.get("compressor")
    if filters is not None and not isinstance(filters, list):
        raise _bad(name, "filters is not a list")
    if len(filters or []) > MAX_CODECS:
        raise _bad(name, f"it has more than {MAX_CODECS} codecs")
    for one in [*(filters or []), *([] if compressor is None else [compressor])]:
        if not isinstance(one, dict):
            raise _bad(name, "a codec is not a JSON object")
        if str(one.get("id")) not in COMPRESSORS | CHECKSUMS | FILTERS:
            raise _unknown(name, one.get("id"))
        _check_types(name, one)
    _check_fill(name, described.get("fill_value"))
    known = ("zarr_format", "shape", "chunks", "dtype", "order", "fill_value", "dimension_separator")
    kept = {key: described[key] for key in known if key in described}
    kept["attributes"] = attributes(described.get("attributes"))
    return {**kept, "filters": filters or None, "compressor": compressor}


def _configuration(name: str, described: dict[str, Any]) -> dict[str, Any]:
    found = described.get("configuration", {})
    if not isinstance(found, dict):
        raise _bad(name, f"the configuration of {short(described.get('name'))} is not a JSON object")
    return found


def _extents(name: str, what: str, found: Any) -> list[int]:
    if not isinstance(found, list) or any(type(x) is not int or not 0 <= x < MAX_EXTENT for x in found[:32]):
        raise _bad(name, f"{what} {short(found)} cannot be right")
    return found


def _two(name: str, shape: list[int], chunks: list[int], flat: bool = False) -> None:
    if len(shape) != 2 and not (flat and len(shape) == 1):
        what = tuple(shape) if len(shape) < 32 else f"of {len(shape)} numbers"
        raise InputError(f"{name} has shape {what}, but a matrix has two dimensions; reshape it")
    if len(chunks) != len(shape):
        raise _bad(name, f"chunks of {len(chunks)} dimensions cannot be right")
    if any(extent and not size for extent, size in zip(shape, chunks, strict=True)):  # zarr 3.4 takes them
        raise _bad(name, f"chunks of {short(chunks)} cannot be right")


def _no_numbers(name: str, kind: Any) -> InputError:
    if isinstance(kind, dict):
        kind = str(kind.get("name")).removeprefix("numpy.")
    return InputError(
        f"{name} holds {short(kind)}, which cannot be multiplied; convert it to one of {SUPPORTED}"
    )


def _key(name: str, encoding: Any, separator: Any) -> None:
    """Check the separator and encoding of chunk keys. Only known ones pass, so no key leads out of the
    array's folder. Raises InputError."""
    if encoding not in ("default", "v2") or separator not in (None, ".", "/"):
        raise _bad(name, f"keys of chunks made by {short(encoding)} with {short(separator)!r} are not known")


def _check_chain(name: str, chain: Any, dims: int, depth: int = 0) -> None:
    """Check the codecs of an array of so many dimensions. Raises InputError."""
    if not isinstance(chain, list):
        raise _bad(name, "codecs is not a list")
    if len(chain) > MAX_CODECS or depth > 2:
        raise _bad(name, f"it has more than {MAX_CODECS} codecs, or too many inside each other")
    for one in chain:
        if isinstance(one, str):
            one = {"name": one}
        if not isinstance(one, dict):
            raise _bad(name, "a codec is not a JSON object")
        known, configuration = one.get("name"), _configuration(name, one)
        if not isinstance(known, str) or known.removeprefix("numcodecs.") not in (
            COMPRESSORS | CHECKSUMS | FILTERS | OTHERS
        ):
            raise _unknown(name, known)
        _check_types(name, configuration)
        if known == "sharding_indexed":
            _two(name, [1] * dims, _extents(name, "chunk_shape", configuration.get("chunk_shape")), flat=True)
            _check_chain(name, configuration.get("codecs"), dims, depth + 1)
            index = configuration.get("index_codecs")
            _check_chain(name, index, dims, depth + 1)
            if any((x if isinstance(x, str) else x["name"]) not in ("bytes", "crc32c") for x in index or []):
                raise _bad(name, "the index of its shards is neither plain nor with a checksum")


def _unknown(name: str, codec: Any) -> InputError:
    return InputError(
        f"{name} is stored with the codec {short(codec)}, which is not known here; "
        "rewrite it with zstd, blosc, gzip or none"
    )


def _check_types(name: str, configuration: dict[str, Any]) -> None:
    """Refuse a codec that turns elements into something that is not a number. Raises InputError."""
    for key in ("dtype", "astype", "encode_dtype", "decode_dtype", "data_type"):
        kind = configuration.get(key)
        if kind is None:
            continue
        if not isinstance(kind, str) or not (NUMBERS.fullmatch(kind) or NUMBERS_2.fullmatch(kind)):
            raise _bad(name, f"a codec makes {short(kind)} of its elements")


def _check_fill(name: str, value: Any) -> None:
    parts = value if isinstance(value, list) else [value]
    if len(parts) > 2 or any(not isinstance(x, str | int | float | None) or len(str(x)) > 400 for x in parts):
        raise _bad(name, "its fill value is not a number")
