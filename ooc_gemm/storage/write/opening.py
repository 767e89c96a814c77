"""Opens the target of a new C, of one that is updated or filled, and of one whose run was interrupted."""

import contextlib
import math
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.storage import MemoryStore

from ...support.errors import Error, InputError, remedy
from ..format.unfinished import METADATA, PARTIAL, TRIAL, is_begun, is_partial
from ..io.folder import Folder
from ..io.objects import Objects
from ..io.zarr_internals import default_buffer_prototype
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
    """Begin a new C, and return its target. An array at its place is set aside; in an object store it is
    removed.

    spec: path, URL or zarr.Array. output: how C is stored. block: the type of sums. head: what C is made of;
    with it a C in a folder or an object store has a journal. force: begin also where the journal of another
    run is. notice: called where an array cannot be set aside and is removed. keep: as of `Staging.begin`.
    Raises InputError where C cannot be begun; then everything is as it was.
    """
    blank = zarr.create_array(
        MemoryStore(),
        shape=output.shape,
        dtype=output.dtype,
        chunks=output.chunks,
        shards=output.shards,
        compressors=compressors(output.compressor),
        filters=None,
        dimension_names=output.dimensions,
    )
    folders = _missing(spec)
    with _begun(spec, head, "cannot be created: {}; choose another place") as log, forgotten(spec) as groups:
        if notice and (said := groups.unseen()):
            notice(said)
        described = blank.metadata.to_buffer_dict(default_buffer_prototype())[METADATA[0]]
        moved = _set_aside(spec, math.prod(output.shape) * output.dtype.itemsize, notice)
        if log is None and (place := local_path(spec)) is not None:
            ownership.forget_journal(place)
        at = spec.store_path if isinstance(spec, zarr.Array) else writable_place(spec)
        array = array_at(blank.metadata, at)
        if head and (objects := objects_at(array)):
            log = journal.begin_in_store(objects, describe(spec), head, force)
        target = target_at(array, describe(spec), block, log)
        target.sink.groups, target.sink.folders = groups, folders
        try:
            target.sink.begin(described.to_bytes(), keep, notice)
        except BaseException as error:
            if moved:
                replaced.restore(moved, [METADATA[0] + PARTIAL])
            if log and target.sink.far and isinstance(error, InputError):  # nothing was begun
                log.remove()
            raise
    return target


def try_place(spec: Any) -> None:
    """Begin a C of one element where nothing is yet, and remove it, so that a place where none can be created
    is refused before the work. Does nothing for what exists. Raises InputError."""
    if spec is None or isinstance(spec, zarr.Array):
        return
    place, name = local_path(spec), describe(spec)
    if place is None:
        with explained(name, remote=True):
            there = objects_at(spec)
            free = kind_at(spec, name) is None if there is None else not there.has_any(TRIAL)
    if os.path.lexists(place) if place else not free:
        return
    byte = np.dtype(np.uint8)
    sink = create_target(spec, Output((1, 1), byte, (1, 1)), byte, keep=False).sink
    sink.staging.finish(METADATA[0])
    sink.discard()


def _missing(spec: Any) -> list[Path]:
    """Return the folder of a C and those above it that do not exist, from below."""
    place = local_path(spec)
    return [one for one in (place, *place.parents) if not os.path.exists(one)] if place else []


def _set_aside(spec: Any, nbytes: int, notice: Notice | None) -> Path | None:
    """Make room for a C of `nbytes`. Returns its folder where an array was moved that can be moved back;
    otherwise None."""
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
    spec: Any, block: np.dtype[Any], head: dict[str, Any] | None, force: bool = False
) -> Target[Publication]:
    """Mark an existing C as unfinished, and return its target; arguments as of `create_target`."""
    said = "cannot be updated: {}; it is as it was, check its disk"
    with _begun(spec, head, said) as log, forgotten(spec) as groups:
        array = open_existing(spec)
        if head and (objects := objects_at(array)):
            log = journal.begin_in_store(objects, describe(spec), head, force)
        target = target_at(array, describe(spec), block, log)
        target.sink.groups = groups
        target.sink.begin(None)
    return target


def continued_target(spec: Any, block: np.dtype[Any], log: Journal) -> Target[Publication]:
    """Return the target of a C whose run was interrupted. Raises InputError where C was changed since."""
    target = target_at(open_partial(spec), describe(spec), block, log)
    target.sink.proceed()
    with forgotten(spec) as groups:
        target.sink.groups = groups
    return target


@contextlib.contextmanager
def _begun(spec: Any, head: dict[str, Any] | None, said: str) -> Iterator[Journal | None]:
    """Yield the journal of a C that is begun inside, if it has one. If the body fails, the journal is closed
    or removed. `said`: the message for an OSError."""
    place, name, log, missing = local_path(spec), describe(spec), None, _missing(spec)
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
        if log and place and not is_partial(Folder(place)):
            log.remove()
        elif log:
            log.close()
        for one in missing:
            with contextlib.suppress(OSError):
                one.rmdir()
        raise


def scratch_folder(spec: Any) -> Path:
    """Return the folder for temporary arrays: beside C where C is local, otherwise that of the system."""
    place = local_path(spec)
    if place is None:
        return Path(tempfile.gettempdir())
    return next(folder for folder in place.parents if folder.exists())


def target_at(
    array: zarr.Array[Any], name: str, block: np.dtype[Any], log: Journal | None
) -> Target[Publication]:
    """Return the target of a C that is unfinished or about to be. `log`: its journal, if it has one."""
    nbytes = math.prod(array.shards or array.chunks) * array.dtype.itemsize
    if (place := local_path(array)) is not None:
        staging: Staging = FolderStaging(Folder(place), array, name)
    elif objects := objects_at(array, nbytes):
        staging = ObjectStaging(objects, array, name, log.run if log else uuid.uuid4().hex)
    else:
        staging = StoreStaging(array, name, nbytes)
    return Target(array, name, block, Publication(array, name, staging, log))


def continued(spec: Any, beta: complex) -> Journal | provenance.Finished | None:
    """Return the journal of the run that made what stands at C's place, for this run to continue.

    Returns C itself where it is finished and says what it was made of, and None where C can be begun: nothing
    stands there, or a run was killed before it began C. Raises InputError where C is neither, or cannot be
    continued.
    """
    name, place = describe(spec), local_path(spec)
    with explained(name, remote=place is None):
        there: Folder | Objects = _continuable(spec, name) if place is None else Folder(place)
        if not is_begun(there):
            done = provenance.finished(spec)
            if done is None and (beta != 0 or isinstance(spec, zarr.Array) or kind_at(spec, name)):
                raise InputError(
                    f"{name} is not the unfinished result of an interrupted run; leave out resume=True"
                )
            return done
        if isinstance(there, Folder):
            log = journal.resume_in_folder(there.root, name)
        else:
            log = journal.resume_in_store(there, name)
        if log.head and (log.done or is_partial(there)):
            return log
        if isinstance(there, Folder):
            log.close()
        else:
            log.remove()
        return None


def _continuable(spec: Any, name: str) -> Objects:
    """Return the place of a C in an object store. Raises InputError where a C in this store cannot be
    continued."""
    found = objects_at(spec) if isinstance(spec, str | zarr.Array) else None
    if found is None:
        raise InputError(
            f"{name} cannot be continued, only a C in a local folder or an object store such as s3:// can; "
            "leave out resume=True"
        )
    return found
