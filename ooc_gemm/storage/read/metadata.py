"""Reads and checks the metadata of an array, and explains errors to users."""

import collections
import contextlib
import itertools
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zarr
from zarr.abc.store import RangeByteRequest
from zarr.storage import LocalStore, ObjectStore, StorePath

from ...support.errors import NO_MEMORY, Error, InputError, OutOfMemoryError, no_memory, remedy
from ...support.shared import Shared
from ..format import documents
from ..format.documents import SUPPORTED
from ..format.unfinished import METADATA, is_begun, is_partial
from ..io import files
from ..io.answers import Answers
from ..io.folder import Folder
from ..io.objects import Objects, why
from ..io.zarr_internals import default_buffer_prototype
from .addresses import is_transactional, local_path, objects_at, remote_place

MOST_LISTED = 8
"""Arrays of a group that a message lists."""
MOST_LOOKED_AT = 200
"""Entries of a group that are looked at for this list."""


def open_array(spec: str | os.PathLike[str], name: str, flat: bool = False) -> zarr.Array[Any]:
    """Open a Zarr array as it is stored. `flat`: it may have one dimension. Raises InputError."""
    place = local_path(spec)
    if place is not None:
        if not os.path.exists(place):
            raise InputError(f"{name} does not exist; check the path")
        if is_partial(Folder(place)):
            raise InputError(
                f"{name} is the unfinished result of an interrupted run; continue that with "
                "resume=True, or make it again"
            )
    found = stored_at(os.fspath(spec) if place is None else str(place), name, flat)
    if found is None:
        with explained(name, remote=place is None):
            if place is None and (there := objects_at(spec)) and is_begun(there):
                raise InputError(
                    f"{name} is the unfinished result of an interrupted run; continue that with "
                    "resume=True, or make it again"
                )
        raise InputError(f"{name} is not a Zarr array; check the path")
    if isinstance(found, str):
        raise InputError(f"{name} is a Zarr group, not an array; {_one_of(spec, name)}")
    return found


def _one_of(spec: str | os.PathLike[str], name: str) -> str:
    """Return the advice to name one of the arrays in a group, which it lists."""
    known: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # the advice is right without the list
        at, _, described = look_at(spec, name)
        known = _arrays_in(at, described, name)
    return advice(known, f"{name.rstrip('/')}/")


def advice(known: dict[str, Any], begin: str, what: str = "the arrays in it") -> str:
    """Return the advice to name one of these arrays, which it lists, matrices first. known: the metadata of
    each by its path. begin: what stands before the path. what: how it calls the arrays."""
    shapes = {
        documents.short(path): one["shape"]
        for path, one in itertools.islice(known.items(), MOST_LOOKED_AT)
        if isinstance(one, dict) and isinstance(one.get("shape"), list)
    }
    if not shapes:
        return f"name one of {what}"
    found = sorted(shapes.items(), key=lambda entry: (len(entry[1]) != 2, entry[0]))
    some = [f"{path} ({_shape(shape)})" for path, shape in found[:MOST_LISTED]]
    listed = ", ".join(some + (["…"] if found[MOST_LISTED:] else []))
    return f"name one of {what}, such as {begin}{found[0][0]}. It holds {listed}"


def _arrays_in(at: StorePath, described: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the metadata of the arrays in a group by their paths: of what its consolidated metadata say, or
    of what lies in its local folder, at most `MOST_LOOKED_AT` nodes."""
    inline = described.get("consolidated_metadata") or {}
    known: dict[str, Any] = inline.get("metadata") or {}
    if not known and "zarr_format" in described and (text := document_at(at, ".zmetadata")):
        end, entries = "/.zarray", documents.parse(name, text)["metadata"]
        known = {key.removesuffix(end): one for key, one in entries.items() if key.endswith(end)}
    if not known and isinstance(at.store, LocalStore):
        known = dict(_nodes(Path(at.store.root) / at.path, name))
    return known


def _nodes(group: Path, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the paths and metadata of arrays below a folder."""
    folders = collections.deque([""])
    left = MOST_LOOKED_AT
    while folders:
        below = folders.popleft()
        with os.scandir(group / below) as entries:
            for entry in entries:
                if left == 0:
                    return
                left -= 1
                if not entry.is_dir():
                    continue
                path = f"{below}{entry.name}"
                _, key, described = look_at(str(group / path), name)
                if documents.kind(key, described) == "array":
                    yield path, described
                elif key:
                    folders.append(f"{path}/")


def _shape(shape: list[Any]) -> str:
    return "×".join(documents.short(extent) for extent in shape[:8]) or "one number"


def stored_at(place: str | StorePath, name: str, flat: bool) -> zarr.Array[Any] | str | None:
    """Return the Zarr array at a place; "group" for a group, None for neither. Raises InputError."""
    with explained(name, remote=isinstance(place, str) and "://" in place):
        at, key, described = look_at(place, name)
        if documents.kind(key, described) == "group":
            return "group"
        if key == METADATA[1]:
            described["attributes"] = _attributes(at, name)
        return array_at(documents.check(name, described, key, flat), at) if key else None


def _attributes(at: StorePath, name: str) -> dict[str, Any]:
    """Return the attributes of version 2, which are a document of their own. An array can be read without
    them, so errors in them are ignored."""
    try:
        return documents.parse(name, document_at(at, ".zattrs") or b"{}")
    except (InputError, OSError):
        return {}


def kind_at(path: str | os.PathLike[str], name: str) -> str | None:
    """Return whether there is an "array" or a "group"; None for neither. The array need not be a matrix.
    Raises InputError."""
    with explained(name, remote="://" in os.fspath(path)):
        return documents.kind(*look_at(path, name)[1:])


@Shared
@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def explained(name: str, remote: bool = False) -> Iterator[None]:
    """Turn whatever goes wrong while an array is opened or begun into an InputError with one sentence, and
    silence warnings."""
    try:
        with _without_warnings:
            yield
    except Error:
        raise
    except Exception as error:
        raise _unusable(name, error, remote) from error


def look_at(spec: Any, name: str) -> tuple[StorePath, str, dict[str, Any]]:
    """Return the place of an array or a group, the key of its metadata, and the metadata; an empty key where
    there is neither. Unlike zarr.open it limits what it reads. Raises InputError."""
    if isinstance(spec, StorePath):
        at = spec
    elif isinstance(spec, zarr.Array):
        at = spec.store_path
    elif (place := local_path(spec)) is not None:
        at = StorePath(LocalStore(place, read_only=True))
    else:
        at = remote_place(os.fspath(spec))
    for key in (*METADATA, ".zgroup"):
        document = document_at(at, key)
        if document is not None:
            return at, key, documents.parse(name, document)
    return at, "", {}


def document_at(at: StorePath, key: str, limit: int = documents.MAX_BYTES) -> bytes | None:
    """Return a metadata document, at most one byte more of it than `limit`. Raises OSError."""
    if isinstance(at.store, LocalStore):
        return files.read_small(Path(at.store.root) / at.path / key, limit)
    if isinstance(at.store, ObjectStore):
        return Objects(at.store.store, at.path, Answers(at.store)).read(key, limit)
    most = None if is_transactional(at.store) else RangeByteRequest(0, limit + 1)
    found = Answers(at.store).of((at / key).get(default_buffer_prototype(), most))
    return None if found is None else bytes(found.to_bytes())


def _unusable(name: str, error: Exception, remote: bool) -> Error:
    """Return an InputError that says what went wrong when an array was opened or begun, and what to do."""
    if no_memory(error):
        return OutOfMemoryError(NO_MEMORY)
    if isinstance(error, ImportError):
        return InputError(f"{name} needs a package that is not installed: {error}")
    if isinstance(error, PermissionError) and not remote:
        return InputError(f"{name} cannot be read: permission denied; change its permissions")
    if what := remedy(error, ""):
        return InputError(f"{name} cannot be opened ({_one_line(error)}); {what}")
    if "data type" in str(error):
        return InputError(
            f"{name} holds elements that cannot be multiplied ({_one_line(error)}); "
            f"convert it to one of {SUPPORTED}"
        )
    if remote:
        return InputError(f"{name} cannot be reached ({_one_line(error)}); check its address and credentials")
    return InputError(
        f"{name}: its Zarr metadata cannot be used ({_one_line(error)}); repair or rewrite the array"
    )


def _one_line(error: Exception) -> str:
    return documents.short(f"{type(error).__name__}: {why(error)}")


def array_at(metadata: Any, place: StorePath, config: Any = None) -> zarr.Array[Any]:
    """Return a zarr array of this metadata at a place where it need not be stored yet. `config`: the settings
    of an open array that differ from zarr's defaults, such as `order`."""
    return zarr.Array(zarr.AsyncArray(metadata, place, config))
