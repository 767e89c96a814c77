"""What is checked before anything of C is written: the place of a new C, and an open array that is filled."""

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from ...support.errors import InputError
from ..format.unfinished import TRIAL, is_begun, is_partial
from ..io.folder import Folder
from ..read import other_files
from ..read.addresses import describe, local_path, objects_at, place_of, same_place
from ..read.metadata import explained, kind_at
from . import ownership
from .logs import is_held


def check_place(spec: Any) -> None:
    """Refuse a C that is no place to write to. Raises InputError."""
    if not isinstance(spec, str | os.PathLike | zarr.Array):
        raise InputError(f"{describe(spec)} cannot be written to; give a path, a URL or a zarr.Array as C")
    if isinstance(spec, zarr.Array) and not spec.store_path.store.supports_deletes:
        raise InputError(
            f"{describe(spec)} is in an archive or another store where nothing can be replaced, and C is not "
            "written there; give a path, or an array in another store"
        )


def check_new(spec: Any) -> None:
    """Refuse what is no path or address of a new array or group, such as an open array, which would not see
    the one that replaces it. Raises InputError."""
    if not isinstance(spec, str | os.PathLike):
        raise InputError(
            f"{describe(spec)} is no place for this result; give a path, or an address such as s3://…"
        )


def check_output(spec: Any, inputs: list[Any], force: bool, reads: bool) -> None:
    """Refuse a C that cannot or must not be written; changes nothing. Raises InputError."""
    check_place(spec)
    name = describe(spec)
    for other in inputs:
        if same_place(spec, other):
            raise InputError(
                f"{name} is, contains or lies inside the input {describe(other)}; write C somewhere else"
            )
    place = local_path(spec)
    if place is None:
        if reads:
            _check_updated(name, spec, force)
        elif not (isinstance(spec, str) and _is_free(name, spec)):
            kind = kind_at(spec, name) if isinstance(spec, str) else "array"
            _check_replaced(name, kind, force)
            if kind is None:
                _check_begun(name, str(spec), force)
        return
    if not os.path.exists(place) and isinstance(spec, str | os.PathLike) and other_files.split(spec):
        raise InputError(
            f"{name} is inside of a file, and C is written as a Zarr array; choose another place"
        )
    if reads:
        if not os.access(place, os.W_OK):
            raise InputError(f"{name} cannot be written: permission denied; choose another C")
        return
    for folder in place.parents:
        if kind_there(folder) == "array":
            raise InputError(f"{name} lies inside the Zarr array {folder}; choose another place")
    if os.path.exists(place):
        found = kind_there(place)
        if is_held(place):
            raise InputError(f"{name} is being written by another process; wait for it, or stop it")
        partial = is_partial(Folder(place))
        ours = place.is_dir() and os.access(place, os.R_OK) and ownership.is_ours(place)
        if found is None and not (partial or ours):
            raise InputError(
                f"{name} exists and cannot be opened as a Zarr array; it is left alone, choose another place"
            )
        if partial and not force:
            raise InputError(
                f"{name} is the unfinished result of an interrupted run; continue it with "
                "resume=True, or give force=True to replace it"
            )
        _check_replaced(name, found, force)
        if not ours:
            ownership.survey(place, name)
    parent = place
    while not os.path.exists(parent):
        parent = parent.parent
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise InputError(f"{name} cannot be created: {parent} is not a writable folder; choose another place")


def check_filled(
    array: zarr.Array[Any], shape: tuple[int, int], dtype: np.dtype[Any], given: dict[str, Any], force: bool
) -> None:
    """Refuse an open array that cannot be filled with a result; changes nothing.

    shape, dtype: of the result. given: `chunks`, `shards` and `compressor` as the user gave them, None where
    not. force: an unfinished C is begun anew. Raises InputError.
    """
    name, place = describe(array), local_path(array)
    if array.read_only:
        raise InputError(f"{name} is open for reading only; open it with mode='r+'")
    with explained(name, remote=place is None):
        there = place_of(array)
        unfinished = there is not None and is_partial(there)
    if unfinished and not force:
        raise InputError(
            f"{name} is the unfinished result of an interrupted run; continue it with resume=True, or begin "
            "again with force=True"
        )
    if tuple(array.shape) != shape:
        raise InputError(
            f"{name} has shape {tuple(array.shape)} but the result is {shape[0]}×{shape[1]}; give an array "
            "of that shape"
        )
    if array.dtype.newbyteorder("=") != dtype:
        raise InputError(
            f"{name} holds {array.dtype.name} but the result is {dtype}; give an array of that type, or "
            f"out_dtype={array.dtype.name!r}"
        )
    there_now = {"chunks": tuple(array.chunks), "shards": array.shards and tuple(array.shards)}
    for key, value in given.items():
        if key in ("chunks", "shards", "compressor") and value is not None:
            if key in there_now and tuple(value) == there_now[key]:
                continue
            raise InputError(f"{name} is an open array, which keeps its {key}; leave out {key}")


def _is_free(name: str, spec: str) -> bool:
    """Whether a store that can be listed holds nothing at an address."""
    with explained(name, remote=True):
        there = objects_at(spec)
        return there is not None and not there.has_any(TRIAL)


def _check_updated(name: str, spec: Any, force: bool) -> None:
    """Refuse to update an array beside which the journal of a run lies, unless `force` is given. Raises
    InputError."""
    with explained(name, remote=True):
        there = objects_at(spec)
        if there is not None and is_begun(there) and not force:
            raise InputError(
                f"{name} has the journal of a run that was interrupted, or still goes on; continue it with "
                "resume=True, or update the array as it is with force=True"
            )


def _check_begun(name: str, spec: str, force: bool) -> None:
    """Refuse an address without an array that holds an unfinished C, unless `force` is given, or objects of
    somebody else. Raises InputError."""
    with explained(name, remote=True):
        there = objects_at(spec)
        if there is None:
            return
        if not is_begun(there):
            raise InputError(
                f"{name} exists and cannot be opened as a Zarr array; it is left alone, choose another place"
            )
        if not force:
            raise InputError(
                f"{name} is the unfinished result of a run that was interrupted, or still goes on; continue "
                "it with resume=True, or give force=True to replace it"
            )


def _check_replaced(name: str, found: str | None, force: bool) -> None:
    """Refuse to replace a group, and an array unless `force` is given. `found`: the kind of what stands at
    C's place, None for nothing. Raises InputError."""
    if found == "group":
        raise InputError(f"{name} is a Zarr group; name an array inside it, such as {name}/c")
    if found is not None and not force:
        raise InputError(f"{name} exists; give force=True to replace it, or choose another place")


def kind_there(place: Path) -> str | None:
    """`kind_at` of a folder; None also where it cannot be opened."""
    with contextlib.suppress(InputError):
        return kind_at(str(place), str(place))
    return None
