"""What becomes of an array that stands at C's place when a new C replaces it.

Files that do not belong to the array, and arrays that lie below it, stay. The old array's files are moved
into a folder inside C's, and removed when the new C is finished:

    c/zarr.json     ──►  c/.ooc-gemm-replaced/zarr.json.partial     first: from now on C is no array
    c/c/…           ──►  c/.ooc-gemm-replaced/c/…
                         c/.ooc-gemm-replaced/zarr.json             last: the old array is complete there

So a run that is killed at any time leaves the old array, or an unfinished C with the old array in that
folder.
"""

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ..format.unfinished import ASIDE, METADATA, PARTIAL
from ..io.durable import flush_folders
from ..io.trees import remove_tree
from .ownership import Files, survey


def set_aside(place: Path, name: str, keep: bool) -> bool:
    """Clear C's folder of the array that stands there, finished or not.

    place: C's folder. name: how messages call C. keep: whether a finished array is kept in `ASIDE` until
    `drop`, or removed at once. Returns whether this call has moved one there, which `restore` can undo.
    Raises InputError and OSError; nothing is changed then.
    """
    aside, moved = place / ASIDE, False
    finished = any((place / key).exists() for key in METADATA)
    if finished and aside.exists():  # the run that has made this array was killed before it was removed
        remove_tree(aside)
    if finished or _is_incomplete(aside):
        moved = True
        try:
            _move(survey(place, name), place, aside)
        except BaseException:
            restore(place)
            raise
    old = survey(place, name)
    for path in (*old.chunks, *old.attributes, *old.litter):
        _remove(path)
    if not keep and aside.exists():
        remove_tree(aside)
        return False
    return moved


def _is_incomplete(aside: Path) -> bool:
    return any((aside / (key + PARTIAL)).exists() for key in METADATA)


def _move(old: Files, place: Path, aside: Path) -> None:
    aside.mkdir(exist_ok=True)
    for path in old.metadata:
        os.replace(path, aside / (path.name + PARTIAL))
    flush_folders(place, aside)
    for path in (*old.attributes, *old.chunks):
        to = aside / path.relative_to(place)
        to.parent.mkdir(parents=True, exist_ok=True)
        os.rename(path, to)
    flush_folders(place, aside)
    for key in METADATA:
        with suppress(FileNotFoundError):
            os.replace(aside / (key + PARTIAL), aside / key)
    flush_folders(aside)


def restore(place: Path, new: Iterable[str] = ()) -> None:
    """Move the array that was set aside back, before any chunk of the new C was written. `new`: files of the
    new C."""
    aside = place / ASIDE
    for name in new:
        (place / name).unlink(missing_ok=True)
    with suppress(OSError):
        _put_back(aside, place)
        for key in METADATA:
            for name in (key, key + PARTIAL):
                with suppress(FileNotFoundError):
                    os.replace(aside / name, place / key)
        flush_folders(place)
        aside.rmdir()


def discard(place: Path, name: str) -> None:
    """Remove a C that can be neither finished nor continued, and move the array that it was to replace back.
    `name`: how messages call C. Raises InputError and OSError."""
    new = survey(place, name)
    for path in (*new.chunks, *new.attributes, *new.litter):
        if path.name != ASIDE:
            _remove(path)
    if is_kept(place):
        restore(place, [key + PARTIAL for key in METADATA])
        return
    for key in METADATA:
        (place / (key + PARTIAL)).unlink(missing_ok=True)
    with suppress(OSError):  # there are files of others
        place.rmdir()


def _put_back(folder: Path, to: Path) -> None:
    for entry in list(os.scandir(folder)):
        target = to / entry.name
        if entry.name in METADATA or entry.name.endswith(PARTIAL):
            continue
        if entry.is_dir(follow_symlinks=False) and target.is_dir():
            _put_back(Path(entry.path), target)
            os.rmdir(entry.path)
        else:
            os.rename(entry.path, target)


def is_kept(place: Path) -> bool:
    """Whether an array that C replaces is kept, completely or in part."""
    return (place / ASIDE).is_dir()


def drop(place: Path) -> str | None:
    """Remove the array that a finished C has replaced. Returns what to tell the user where that fails."""
    aside = place / ASIDE
    if not aside.is_dir():
        return None
    try:
        remove_tree(aside)
    except OSError as error:
        return f"the array that was replaced cannot be removed from {aside} ({error.strerror or error})"
    return None


def has_room(place: Path, nbytes: int) -> bool:
    """Whether the disk has room for `nbytes` more."""
    while not place.exists():
        place = place.parent
    try:
        return shutil.disk_usage(place).free >= nbytes
    except OSError:
        return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)
