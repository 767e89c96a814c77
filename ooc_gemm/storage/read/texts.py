"""Arrays of texts of one dimension, such as names of samples, read with limits on what they may take.

zarr and numcodecs believe what a chunk says about the number and the lengths of its texts, so both formats
are decoded here: texts of variable length (`vlen-utf8`: a count, then each length and the text in UTF-8), and
those of a fixed number of characters (UTF-32).
"""

import re
from typing import Any

import numpy as np
from zarr.storage import StorePath

from ...support.errors import Error, InputError, remedy
from ...support.intervals import ceil_div
from ..format import codec, documents
from .metadata import document_at, explained, look_at

TEXT_BYTES = 256
"""Memory in bytes that a text may take on average."""
MOST = 1 << 24
"""Most texts of an array."""


def read_texts(at: StorePath, name: str, count: int) -> list[str]:
    """Read an array of texts. at: its place. name: how messages call it. count: how many it must hold.

    Raises InputError where it cannot be read, or holds another number.
    """
    with explained(name):
        _, key, described = look_at(at, name)
        shape, chunks, kind, chain, keys = _parts(name, key, described)
        if shape != [count]:
            raise InputError(f"{name} has shape {shape}, but there are {count} samples; repair the array")
        if count > MOST or len(chunks) != 1 or chunks[0] < 1 or (kind and kind > TEXT_BYTES):
            raise _unusable(name, "its chunks are too large")
        found: list[str] = []
        for number in range(ceil_div(count, chunks[0])):
            most = (64 << 10) + TEXT_BYTES * min(chunks[0], max(count, 1 << 16))
            try:
                data = document_at(at, keys.format(number), most)
                texts = [""] * chunks[0] if data is None else _decoded(data, chain, kind, most)
            except (Error, MemoryError):
                raise
            except Exception as error:
                raise InputError(
                    f"{name}: chunk {number} cannot be read ({documents.short(error)}); "
                    f"{remedy(error, 'write it again')}"
                ) from error
            found += texts[: min(chunks[0], count - len(found))]
    if len(found) != count:
        raise _unusable(name, f"it holds {len(found)} texts instead of {count}")
    return found


def _unusable(name: str, why: str) -> InputError:
    return InputError(f"{name} cannot be read: {why}; write it again as texts of variable length")


def _parts(name: str, key: str, described: dict[str, Any]) -> tuple[Any, Any, int | None, Any, str]:
    """Shape, chunks, bytes of a text (None: it varies), compressors, and the key of a chunk as a format."""
    try:
        if key == "zarr.json":
            grid, kind = described["chunk_grid"]["configuration"]["chunk_shape"], described["data_type"]
            chain = [(one["name"], dict(one.get("configuration") or {})) for one in described["codecs"]]
            first, size = chain[0][0], None
            if isinstance(kind, dict) and kind["name"] == "fixed_length_utf32":
                size, kind = int(kind["configuration"]["length_bytes"]), "bytes"
                if chain[0][1].get("endian", "little") != "little":
                    raise ValueError("its texts are big-endian")
            if (kind, first) not in (("string", "vlen-utf8"), ("bytes", "bytes")):
                raise ValueError(f"it holds {kind}")
            encoding = described.get("chunk_key_encoding", {"name": "default"})
            return described["shape"], grid, size, chain[1:], "{}" if encoding["name"] == "v2" else "c/{}"
        filters = [one["id"] for one in described.get("filters") or []]
        fixed = re.fullmatch(r"<U(\d{1,4})", described["dtype"])
        if not (fixed and not filters) and (described["dtype"], filters) != ("|O", ["vlen-utf8"]):
            raise ValueError(f"it holds {described['dtype']}")
        packed = dict(described.get("compressor") or {})
        chain = [(packed.pop("id"), packed)] if packed else []
        return described["shape"], described["chunks"], 4 * int(fixed[1]) if fixed else None, chain, "{}"
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise _unusable(name, documents.short(error)) from error


def _decoded(data: bytes, chain: list[tuple[str, dict[str, Any]]], size: int | None, most: int) -> list[str]:
    """The texts of a chunk. Raises ValueError, and what the compressor raises."""
    for kind, configuration in reversed(chain):
        if kind.removeprefix("numcodecs.") not in documents.COMPRESSORS:
            raise ValueError(f"its codec {documents.short(kind)} is not known")
        data = bytes(codec.bounded(kind, configuration, most, False).decode(data))
    if len(data) > most:
        raise ValueError(f"it takes more than {most} bytes")
    if size is not None:
        return [str(one) for one in np.frombuffer(data, f"<U{size // 4}")] if size else []
    texts, place = list[str](), 4
    for _ in range(int.from_bytes(data[:4], "little")):
        end = place + 4 + int.from_bytes(data[place : place + 4], "little")
        if place + 4 > len(data) or end > len(data):
            raise ValueError("it is cut off")
        texts.append(data[place + 4 : end].decode())
        place = end
    return texts
