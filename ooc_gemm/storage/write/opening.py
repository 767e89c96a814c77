"""Targets of a new C, of one that is updated or filled, and of one whose run was interrupted."""

import contextlib
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.storage import MemoryStore

from ...support.errors import Error, InputError, remedy
from ..format.unfinished import JOURNAL, METADATA, PARTIAL, is_begun, is_partial
from ..io.folder import Folder
from ..io.zarr_internals import sync
from ..read.addresses import describe, local_path, objects_at
from ..read.metadata import array_at, explained, kind_at
from . import journal, ownership, provenance, replaced
from .checks import kind_there
from .consolidated import forgotten
from .journal import Journal
from .layout import Output, compressors
from .publication import Publication
from .reopen import open_existing, open_partial, writable_place
from .staging import Notice, Staging
from .staging_folder import FolderStaging
from .staging_store import ObjectStaging, StoreStaging
from .target import Target


def create_target(
    spec: Any,
    output: Output,
    block: np.dtype[Any],
    head: dict[str, Any] | None = None,
    force: bool = False,
    notice: Notice | None = None,
    keep: bool = True,
) -> Target[Publication]:
    """A new C, unfinished. An array that stood at its place is set aside, in an object store removed. With
    `head` one in a folder or an object store has a journal, which begins so; `force`: also where another
    run's is there; `notice`: called where the array cannot be set aside and is removed; `keep`: as
    `Staging.begin`. Raises InputError where C cannot be begun; then all is as it was."""
    blank = zarr.create_array(
        MemoryStore(),
        shape=output.shape,
        dtype=output.dtype,
        chunks=output.chunks,
        shards=output.shards,
        compressors=compressors(output.compressor),
        filters=None,
    )
    with _begun(spec, head, "cannot be created: {}; choose another place") as log, forgotten(spec) as groups:
        described = sync((blank.store_path / METADATA[0]).get())
        moved = _set_aside(spec, math.prod(output.shape) * output.dtype.itemsize, notice)
        if log is None and (place := local_path(spec)) is not None:
            ownership.forget_journal(place)
        at = spec.store_path if isinstance(spec, zarr.Array) else writable_place(spec)
        array = array_at(blank.metadata, at)
        if head and (objects := objects_at(array)):
            log = journal.begin_in_store(objects, describe(spec), head, force)
        target = target_at(array, describe(spec), block, log)
        target.sink.groups = groups
        try:
            target.sink.begin(described.to_bytes() if described else b"", keep, notice)
        except BaseException as error:
            if moved:
                replaced.restore(moved, [METADATA[0] + PARTIAL])
            if log and target.sink.far and isinstance(error, InputError):  # nothing was begun
                log.remove()
            raise
    return target


def _set_aside(spec: Any, nbytes: int, notice: Notice | None) -> Path | None:
    """Make room for a C of `nbytes`. Returns its folder where an array was moved that can be moved back."""
    place = local_path(spec)
    if place is None or not os.path.exists(place):
        return None
    keep = replaced.has_room(place, nbytes)
    if not keep and notice and kind_there(place) == "array":
        notice(
            f"there is no room for another array beside {describe(spec)}: it is removed before its "
            "replacement is made"
        )
    return place if replaced.set_aside(place, describe(spec), keep) else None


def update_target(
    spec: Any, block: np.dtype[Any], head: dict[str, Any] | None, fills: bool = False, force: bool = False
) -> Target[Publication]:
    """A C that exists, unfinished from now on; as `create_target`. `fills`: what it held is of no account, so
    that it can be continued also in an object store."""
    said = "cannot be updated: {}; it is as it was, see to its disk"
    with _begun(spec, head, said) as log, forgotten(spec) as groups:
        array = open_existing(spec)
        if fills and head and (objects := objects_at(array)):
            log = journal.begin_in_store(objects, describe(spec), head, force)
        target = target_at(array, describe(spec), block, log)
        target.sink.groups = groups
        target.sink.begin(None)
    return target


def continued_target(spec: Any, block: np.dtype[Any], log: Journal) -> Target[Publication]:
    """A C whose run was interrupted. Raises InputError where it was changed since."""
    target = target_at(open_partial(spec), describe(spec), block, log)
    target.sink.proceed()
    with forgotten(spec) as groups:
        target.sink.groups = groups
    return target


@contextlib.contextmanager
def _begun(spec: Any, head: dict[str, Any] | None, said: str) -> Iterator[Journal | None]:
    """The journal of a C that is begun inside, if it has one; where that fails, nobody holds it. `said`: what
    to say of an OSError."""
    place, name, log = local_path(spec), describe(spec), None
    missing = [one for one in (place, *place.parents) if not os.path.exists(one)] if place else []
    try:
        with explained(name, remote=place is None):
            try:
                log = journal.begin_in_folder(place, name, head) if place and head else None
                yield log
            except OSError as error:
                if isinstance(error, Error):
                    raise
                failed, _, usual = said.format(error.strerror or error).partition("; ")
                raise InputError(f"{name} {failed}; {remedy(error, usual)}") from error
    except BaseException:
        if log and place and not is_partial(place):
            log.remove()
        elif log:
            log.close()
        for one in missing:
            with contextlib.suppress(OSError):
                one.rmdir()
        raise


def scratch_folder(spec: Any) -> Path:
    """The folder for temporary arrays: beside C where C is local, else the system's."""
    place = local_path(spec)
    if place is None:
        return Path(tempfile.gettempdir())
    return next(folder for folder in place.parents if folder.exists())


def target_at(
    array: zarr.Array[Any], name: str, block: np.dtype[Any], log: Journal | None
) -> Target[Publication]:
    """The target of a C that is unfinished, or about to be. `log`: its journal, if it has one."""
    nbytes = math.prod(array.shards or array.chunks) * array.dtype.itemsize
    if (place := local_path(array)) is not None:
        staging: Staging = FolderStaging(Folder(place), array, name)
    elif objects := objects_at(array, nbytes):
        staging = ObjectStaging(objects, array, name)
    else:
        staging = StoreStaging(array, name, nbytes)
    return Target(array, name, block, Publication(array, name, staging, log))


def continued(spec: Any, beta: complex) -> Journal | provenance.Finished | None:
    """The journal of a run whose C is not in a folder, or C where it is finished; None where it can be begun.
    Raises InputError."""
    name = describe(spec)
    with explained(name, remote=True):
        there = objects_at(spec) if isinstance(spec, str | zarr.Array) else None
        if there is None:
            raise InputError(
                f"{name} cannot be continued, only a C in a local folder or an object store such as s3:// "
                "can; leave out resume=True"
            )
        if not is_begun(there):
            if done := provenance.finished(spec):
                return done
            if beta != 0 or isinstance(spec, zarr.Array) or kind_at(spec, name):
                raise InputError(
                    f"{name} is not the unfinished result of an interrupted run; leave out resume=True"
                )
            return None
        if beta != 0 or not there.has(JOURNAL):
            raise InputError(
                f"{name} cannot be continued: in an object store chunks may have had their beta already; "
                f"{journal.ANEW}"
            )
        log = journal.resume_in_store(there, name)
        if log.done or any(there.has(key + PARTIAL) for key in METADATA):
            return log
        log.remove()  # killed before it began: C is what it was, or not there
        return None
