"""Coordinates of C's dimensions: copies of what the group of an operand holds, in the group of C.

data.zarr/station  ──►  data.zarr/station_0, data.zarr/station_1        beside data.zarr/r

What is stored is copied as it is: nothing is decoded, so whatever a coordinate is made of, its copy is the
same.
"""

import json
import os
from typing import Any, NamedTuple

import zarr
from zarr.storage import MemoryStore, StorePath

from ...support.errors import Error, remedy
from ...support.intervals import ceil_div
from ..format import documents
from ..format.unfinished import METADATA
from ..io.zarr_internals import default_buffer_prototype, sync
from ..read.addresses import describe, local_path
from ..read.metadata import document_at, explained, look_at
from . import consolidated
from .reopen import writable_place

MOST_BYTES = 4 << 20
"""Most stored bytes of a chunk of a coordinate that is copied. One is held at a time."""
MOST_CHUNKS = 4096
"""Most chunks of a coordinate."""


class Wanted(NamedTuple):
    """A dimension of C, and where its coordinate may be found."""

    array: Any
    """The operand: its address, a zarr.Array, or coordinates as xarray.Dataset."""
    dimension: str
    """The name of the operand's dimension."""
    name: str
    """The name of C's."""
    extent: int


def write_coordinates(spec: Any, wanted: list[Wanted]) -> str | None:
    """Copy the coordinates of C's dimensions into the group that C lies in, where that is of version 3 and
    nothing has the name of a coordinate.

    spec: the path or URL of C, which is finished. Returns what to tell the user where one cannot be copied.
    """
    group, said = _group_of(spec), None
    if group is None:
        return None
    for one in wanted:
        try:
            with explained(describe(spec)):
                if _is_group(group) and not _taken(f"{group}/{one.name}") and (found := _found(one)):
                    _write(f"{group}/{one.name}", *found)
        except (Error, OSError) as error:
            what = remedy(error, "check its store")
            said = (
                f"{describe(spec)} is finished, but the coordinate {one.name} cannot be written beside it "
                f"({error}); {what}, or copy the coordinate yourself"
            )
    return said


def _group_of(spec: Any) -> str | None:
    """Return the address above C's; None where C was given open."""
    if not isinstance(spec, str | os.PathLike):
        return None
    if (place := local_path(spec)) is not None:
        return str(place.parent)
    return os.fspath(spec).rstrip("/").rpartition("/")[0]


def _is_group(group: str) -> bool:
    _, key, described = look_at(group, group)
    return key == METADATA[0] and documents.kind(key, described) == "group"


def _taken(address: str) -> bool:
    """Whether something is at an address, even if it is no array."""
    place = local_path(address)
    return os.path.lexists(place) if place is not None else bool(look_at(address, address)[1])


def _found(wanted: Wanted) -> tuple[StorePath, dict[str, Any], list[str]] | None:
    """Return the place of a coordinate, the metadata of its copy, and the keys of its chunks; None where
    there is none that can be copied."""
    names = wanted.dimension, wanted.name
    if any("/" in name or "\\" in name or name.startswith(("__", ".")) for name in names):
        return None
    if (at := _place(wanted)) is None:
        return None
    _, key, described = look_at(at, wanted.dimension)
    if key != METADATA[0] or documents.kind(key, described) != "array":
        return None
    chunks = _chunk_keys(described, wanted)
    if chunks is None or any(len(document_at(at, one, MOST_BYTES) or b"") > MOST_BYTES for one in chunks):
        return None
    return at, {**described, "dimension_names": [wanted.name]}, chunks


def _place(wanted: Wanted) -> StorePath | None:
    """Return where the coordinate would be: beside the operand, or in what xarray writes of its own."""
    array = wanted.array
    if isinstance(array, str | os.PathLike) or (isinstance(array, zarr.Array) and local_path(array)):
        group = _group_of(local_path(array) or array)
        return look_at(f"{group}/{wanted.dimension}", wanted.dimension)[0]
    if isinstance(array, zarr.Array):
        parent, between, _ = array.store_path.path.rpartition("/")
        path = f"{parent}{between}{wanted.dimension}"
        return StorePath(array.store_path.store, path) if array.store_path.path else None
    if not hasattr(array, "to_zarr"):
        return None
    if array.nbytes > MOST_BYTES:
        return None
    store = MemoryStore()
    array.to_zarr(store, zarr_format=3, consolidated=False)
    return StorePath(store, wanted.dimension)


def _chunk_keys(described: dict[str, Any], wanted: Wanted) -> list[str] | None:
    """Return the keys of a coordinate's chunks; None where it is none of this dimension, or has too many."""
    try:
        (size,) = described["chunk_grid"]["configuration"]["chunk_shape"]
        right = described["shape"] == [wanted.extent] and described["dimension_names"] == [wanted.dimension]
        if not right or described["chunk_grid"]["name"] != "regular":
            return None
        count, encoding = ceil_div(wanted.extent, int(size)), described["chunk_key_encoding"]
        between = (encoding.get("configuration") or {}).get("separator", "/")
        if between not in ("/", ".") or encoding["name"] not in ("default", "v2") or count > MOST_CHUNKS:
            return None
    except (LookupError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        return None
    before = f"c{between}" if encoding["name"] == "default" else ""
    return [f"{before}{i}" for i in range(count)]


def _write(address: str, old: StorePath, described: dict[str, Any], chunks: list[str]) -> None:
    """Copy a coordinate, its metadata last, so that it is an array only when it is whole."""
    at, make = writable_place(address), default_buffer_prototype().buffer.from_bytes
    for key in chunks:
        if (data := document_at(old, key, MOST_BYTES)) is not None:
            sync((at / key).set(make(data)))
    sync((at / METADATA[0]).set(make(json.dumps(described, indent=2).encode())))
    consolidated.enter(address, consolidated.groups_of(address))
