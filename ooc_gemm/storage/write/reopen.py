"""Opens a stored C, finished or not, for writing."""

import os
from typing import Any

import zarr
from zarr.storage import LocalStore, StorePath

from ...support.errors import InputError
from ..format import documents
from ..format.unfinished import METADATA, PARTIAL
from ..read.addresses import describe, local_path, remote_place
from ..read.metadata import array_at, document_at, explained, look_at, open_array
from . import journal


def writable_place(spec: str | os.PathLike[str]) -> StorePath:
    """Return C's place for writing. A local folder is created if it is missing."""
    if place := local_path(spec):
        place.mkdir(parents=True, exist_ok=True)
        return StorePath(LocalStore(place))
    return remote_place(os.fspath(spec))


def open_existing(spec: Any) -> zarr.Array[Any]:
    """Open the C that β·C reads, for reading and writing. Raises InputError."""
    if isinstance(spec, zarr.Array):
        return spec
    name = describe(spec)
    array = open_array(spec, name)
    with explained(name, remote=local_path(spec) is None):
        documents.parse(name, document_at(array.store_path, ".zattrs") or b"{}")  # they are kept
        return array_at(array.metadata, writable_place(spec))


def open_result(spec: Any) -> zarr.Array[Any]:
    """Open a finished array for whoever asked for it, for reading and writing, with all of its attributes; an
    open array is returned as it is. Raises InputError."""
    if isinstance(spec, zarr.Array):
        return spec
    name = describe(spec)
    with explained(name, remote=local_path(spec) is None):
        at = writable_place(spec)
        _, _, described = look_at(at, name)
        if described.get("zarr_format") == 2:
            described["attributes"] = documents.parse(name, document_at(at, ".zattrs") or b"{}")
        return array_at(described, at)


def open_partial(spec: Any) -> zarr.Array[Any]:
    """Open an unfinished C. Raises InputError."""
    name = describe(spec)
    with explained(name, remote=local_path(spec) is None):
        at = spec.store_path if isinstance(spec, zarr.Array) else writable_place(spec)
        for key in METADATA:
            for path in (key + PARTIAL, key):
                document = document_at(at, path)
                if document is not None:
                    described = documents.check(name, documents.parse(name, document), key)
                    return array_at(described, at)
    raise InputError(f"{name} has no metadata yet; {journal.ANEW}")
