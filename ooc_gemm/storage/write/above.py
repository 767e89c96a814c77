"""The places above C where there may be groups: folders, and addresses in an object store."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..io import durable, files
from ..io.objects import Objects

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

    @property
    def name(self) -> str:
        """The last part of the group's path."""

    def change(self, document: str, change: Callable[[bytes], bytes | None]) -> None:
        """Replace a document by the result of `change`; None leaves it as it is. Raises what the store
        raises."""

    def make(self, document: str, text: bytes) -> None:
        """Write a document where there is none; one that is there stays. Raises what the store raises."""


@dataclass(frozen=True)
class LocalGroup:
    """A group whose metadata is a file in a local folder."""

    folder: Path
    key: str

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.name

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
            durable.flush_folders(self.folder)

    def make(self, document: str, text: bytes) -> None:
        """Flushes the file before it has its name."""
        with self._alone():
            if not os.path.lexists(self.folder / document):
                durable.replace(self.folder / document, text)
                durable.flush_folders(self.folder)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        fd = os.open(self.folder, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


@dataclass(frozen=True)
class RemoteGroup:
    """A group whose metadata is an object in an object store."""

    objects: Objects
    key: str

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.objects.path.rpartition("/")[2]

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

    def make(self, document: str, text: bytes) -> None:
        """Leaves an object that another process has put meanwhile."""
        if self._version(document) is not None:
            return
        try:
            self.objects.exchange(document, text, "create")
        except Exception as error:
            if self.objects.cannot(error):
                self.objects.put(document, text)
            elif not self.objects.changed(error):
                raise


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
