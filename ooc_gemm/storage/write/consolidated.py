"""Consolidated metadata of the groups that C lies in.

A group may hold copies of the metadata of all arrays below it. While C is unfinished such a copy would make
it look like an array, and afterwards like the array that C has replaced. So C's entry is removed when a run
begins, and written again when C is finished. That goes for every group above C, of version 3 (in `zarr.json`)
and of version 2 (`.zmetadata`).
"""

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...support.errors import Error, InputError, StoreError
from ..format import documents
from ..format.unfinished import METADATA
from ..io import files
from ..io.objects import Objects, why
from ..io.requests import side_by_side
from ..read.addresses import describe, local_path, objects_at
from ..read.metadata import document_at, explained, look_at

DOCUMENTS = ("zarr.json", ".zmetadata")
"""What holds consolidated metadata, of version 3 and of version 2."""
MARKS = (b'"consolidated_metadata"', b'"metadata"')
"""Texts of which a document with consolidated metadata holds at least one."""
MAX_BYTES = 32 << 20
"""Most bytes of a document that is changed. Below a group with a longer one no C is begun."""
TRIES = 20
"""How often a document in an object store is read and changed again because another process has replaced
it."""


class Group(Protocol):
    """A place above C where there may be a group."""

    @property
    def key(self) -> str:
        """The path of C relative to this group."""

    def read(self, document: str) -> bytes | None:
        """Return a document of the group; None where there is none. Raises what the store raises."""

    def change(self, document: str, change: Callable[[bytes], bytes | None]) -> None:
        """Replace a document by the result of `change`; None leaves it as it is. Raises what the store
        raises."""


@dataclass(frozen=True)
class LocalGroup:
    """A group whose metadata is a file in a local folder."""

    folder: Path
    key: str

    def read(self, document: str) -> bytes | None:
        """Reads the file of that name in the folder."""
        try:
            return files.read_small(self.folder / document, MAX_BYTES)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EINVAL, errno.ELOOP):
                return None  # nobody can read C through that group, or it is no file
            raise

    def change(self, document: str, change: Callable[[bytes], bytes | None]) -> None:
        """Replaces the file in one step and flushes it, while a lock on the folder keeps other processes
        away."""
        with self._alone():
            text = self.read(document)
            new = None if text is None else change(text)
            if new is None:
                return
            path = self.folder / document
            beside = path.with_name(f"{document}.ooc-gemm-{os.getpid()}.new")
            fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | files.NOFOLLOW, 0o666)
            try:
                with open(fd, "wb") as file:
                    with contextlib.suppress(OSError):
                        os.fchmod(fd, os.stat(path).st_mode & 0o777)
                    file.write(new)
                    file.flush()
                    os.fsync(fd)
                os.replace(beside, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    beside.unlink()
                raise
            self._flush()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        fd = os.open(self.folder, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _flush(self) -> None:
        fd = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@dataclass(frozen=True)
class RemoteGroup:
    """A group whose metadata is an object in an object store."""

    objects: Objects
    key: str

    def read(self, document: str) -> bytes | None:
        """Returns None also where the credentials do not allow reading the object."""
        found = self._version(document)
        return found and found[0]

    def _version(self, document: str) -> tuple[bytes, Any] | None:
        try:
            return self.objects.read_version(document)
        except Exception as error:
            if self.objects.forbids(error):
                return None
            raise

    def change(self, document: str, change: Callable[[bytes], bytes | None]) -> None:
        """Puts the object only where nobody has replaced it in between, else changes the new one."""
        for left in reversed(range(TRIES)):
            found = self._version(document)
            new = None if found is None else change(found[0])
            if found is None or new is None:
                return
            try:
                self.objects.exchange(document, new, found[1])
            except Exception as error:
                if self.objects.cannot(error):
                    self.objects.put(document, new)
                elif not self.objects.changed(error) or not left:
                    raise
                else:
                    continue
            return


def above(place: Path | None, spelled: str | None) -> list[Group]:
    """Return the places above a folder where groups may be. place: the folder, with links resolved. spelled:
    its path as given."""
    paths = [path for path in (place, Path(os.path.abspath(spelled)) if spelled else None) if path]
    found = {(parent, path.relative_to(parent).as_posix()): None for path in paths for parent in path.parents}
    return [LocalGroup(folder, key) for folder, key in found]


def above_objects(objects: Objects) -> list[Group]:
    """Returns the places above an address where groups may be, the nearest first."""
    parts = objects.path.split("/") if objects.path else []
    return [
        RemoteGroup(objects.at("/".join(parts[:count])), "/".join(parts[count:]))
        for count in reversed(range(len(parts)))
    ]


class Consolidated:
    """The entries of one C in the consolidated metadata of the groups above it."""

    def __init__(self, groups: list[Group], name: str):
        """groups: the places above C. name: how messages call C. Raises InputError where one of them cannot
        be read."""
        self._name = name
        looks = [(group, document) for group in groups for document in DOCUMENTS]

        def look(one: tuple[Group, str]) -> bool:
            text = one[0].read(one[1])
            return text is not None and MARKS[DOCUMENTS.index(one[1])] in text

        if any(isinstance(group, RemoteGroup) for group in groups):
            held = side_by_side([lambda one=one: look(one) for one in looks])  # type: ignore[misc]
        else:
            held = [look(one) for one in looks]
        self._holders = [one for one, holds in zip(looks, held, strict=True) if holds]

    def forget(self) -> None:
        """Remove the entry of C from all groups, because C is begun. Raises InputError where a group cannot
        be changed."""
        for group, document in self._holders:
            try:
                group.change(document, lambda text, key=group.key: _without(text, key))  # type: ignore[misc]
            except Exception as error:
                raise InputError(
                    f"{self._name} cannot be begun: a group above it holds its metadata in {document}, which "
                    f"cannot be changed ({_said(error)}); make it writable, or choose another place"
                ) from error

    def enter(self, entry: dict[str, Any], attributes: dict[str, Any] | None) -> str | None:
        """Write the entry of C into all groups, because C is finished. entry: the contents of C's zarr.json
        or .zarray. attributes: those of its .zattrs, None for version 3. Returns what to tell the user where
        a group cannot be changed."""
        said = None
        for group, document in self._holders:
            try:
                group.change(
                    document,
                    lambda text, key=group.key: _with(text, key, entry, attributes),  # type: ignore[misc]
                )
            except Exception as error:
                said = (
                    f"{self._name} is finished, but is missing in the consolidated metadata of a group above "
                    f"it, which cannot be changed ({_said(error)}); consolidate them again"
                )
        return said


@contextlib.contextmanager
def forgotten(spec: Any) -> Iterator[Consolidated]:
    """Remove the entry of C from the groups above it, and write it again where the body fails and C is still
    an array. Raises InputError."""
    groups = groups_of(spec)
    groups.forget()
    try:
        yield groups
    except BaseException:
        enter(spec, groups)
        raise


def groups_of(spec: Any) -> Consolidated:
    """Find the groups above C that hold its metadata. Raises InputError."""
    name, place = describe(spec), local_path(spec)
    with explained(name, remote=place is None):
        if place is not None:
            spelled = os.fspath(spec) if isinstance(spec, str | os.PathLike) else ""
            return Consolidated(above(place, None if "://" in spelled else spelled), name)
        objects = objects_at(spec)
        return Consolidated(above_objects(objects) if objects else [], name)


def enter(spec: Any, groups: Consolidated) -> str | None:
    """Write the metadata of the array at C's place into the groups above it, if there is an array. Returns
    what to tell the user where a group cannot be changed."""
    with contextlib.suppress(Error):
        return groups.enter(*entry_of(spec, describe(spec)))
    return None


def entry_of(spec: Any, name: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Read the metadata of an array, and for version 2 its attributes. Raises InputError."""
    at, key, described = look_at(spec, name)
    if documents.kind(key, described) != "array":
        raise InputError(f"{name} is not a Zarr array; check the path")
    if key == METADATA[0]:
        return described, None
    return described, documents.parse(name, document_at(at, ".zattrs") or b"{}")


def _said(error: Exception) -> str:
    return getattr(error, "strerror", None) or why(error)


def _entries(text: bytes) -> tuple[dict[str, Any], dict[str, Any], bool] | None:
    """Return a document, its entries, and whether they are of version 3; None where it has none. Raises
    StoreError where it is too long."""
    if len(text) > MAX_BYTES:
        raise StoreError(f"it takes more than {MAX_BYTES >> 20} MiB")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    inline = found.get("consolidated_metadata")
    new = found.get("zarr_format") == 3
    entries = inline.get("metadata") if new and isinstance(inline, dict) else found.get("metadata")
    return (found, entries, new) if isinstance(entries, dict) else None


def _without(text: bytes, key: str) -> bytes | None:
    """Return the document without the entries of C and of everything below it; None where it has none."""
    if (parsed := _entries(text)) is None:
        return None
    found, entries, _ = parsed
    gone = [one for one in entries if one == key or one.startswith(f"{key}/")]
    for one in gone:
        del entries[one]
    return json.dumps(found, indent=2).encode() if gone else None


def _with(text: bytes, key: str, entry: dict[str, Any], attributes: dict[str, Any] | None) -> bytes | None:
    """Return the document with C's entry; None where it has no place for one."""
    if (parsed := _entries(text)) is None:
        return None
    found, entries, new = parsed
    between = [key[:at] for at, letter in enumerate(key) if letter == "/"]
    if new != (attributes is None) or any(
        one + ("" if new else "/.zgroup") not in entries for one in between
    ):
        return None
    made = {key: entry} if attributes is None else {f"{key}/.zarray": entry, f"{key}/.zattrs": attributes}
    if all(entries.get(one) == value for one, value in made.items()):
        return None
    entries.update(made)
    return json.dumps(found, indent=2).encode()
