"""A group of arrays that is made in a local folder.

It is made in a hidden folder beside its place and moved there when it is finished; a group that it replaces
stays until then. A file is written beside its place, flushed and renamed. The file `HEAD` says which run
makes the group, and holds its lock.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zarr.storage import LocalStore, StorePath

from ...support.errors import InputError, StoreError, remedy
from ..io import durable, files
from ..io.folder import Folder
from .checks import kind_there
from .opening import try_place
from .provenance import differences, recorded

HEAD = "ooc-gemm.head"
"""The file that says which run makes the group."""
SUFFIX = ".ooc-gemm-unfinished"
PARTS = "parts"
"""The folder inside the group for what is only needed until the group is finished."""


class FolderMaking:
    """The files of the group (`rows.Making`)."""

    def __init__(self, place: Path, name: str, file: int):
        """place: of the group. name: how messages call it. file: the open file that holds the lock."""
        self._place, self._name, self._file = place, name, file
        self.temporary = staging(place)
        self._folder, self._disk = Folder(self.temporary), durable.Disk(self.temporary)

    @property
    def at(self) -> StorePath:
        """The hidden folder."""
        return StorePath(LocalStore(self.temporary, read_only=True))

    def keys(self) -> set[str]:
        """Lists the folder."""
        return set(self._folder.all_keys())

    def put(self, key: str, data: bytes, flush: bool = True) -> None:
        """Creates the file's folders, too."""
        path = self.temporary / key
        with self._explained(f"its file {key} cannot be written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(durable.prepare(path, data, flush), path)
            if flush:
                durable.flush_folders(path.parent, path.parent.parent)
            else:
                self._disk.wrote(str(path))

    def drop(self, keys: Iterable[str]) -> None:
        """Removes one file after the other."""
        with self._explained("what an earlier run has left cannot be removed"):
            self._folder.delete(keys)

    def read(self, key: str, most: int) -> bytes:
        """Reads the file."""
        with self._explained(f"its file {key} cannot be read"):
            return files.read_small(self.temporary / key, most) or b""

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turn an OSError into a StoreError."""
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"{self._name}: {what} ({error.strerror}); {remedy(error, 'check its disk')}, then continue "
                "with resume=True"
            ) from error

    def publish(self, documents: Mapping[str, bytes]) -> None:
        """Moves the folder to its place."""
        for key, text in documents.items():
            self.put(key, text, flush=False)
        try:
            self._disk.flush(everything=False)
            shutil.rmtree(self.temporary / PARTS, ignore_errors=True)
            self._disk.flush_names([top for top, _, _ in os.walk(self.temporary)])
            (self.temporary / HEAD).unlink()
            old = self._place.with_name(f".{self._place.name}.ooc-gemm-replaced")
            if self._place.exists():
                shutil.rmtree(old, ignore_errors=True)
                os.replace(self._place, old)
            os.replace(self.temporary, self._place)
            durable.flush_folders(self._place.parent)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            raise StoreError(
                f"{self._name} cannot be put in its place ({error.strerror}); check its folder"
            ) from error

    def close(self) -> None:
        """Releases the lock."""
        self._disk.close()
        os.close(self._file)


class InFolder:
    """The place of a group in a local folder (`rows.GroupPlace`)."""

    connection = 0

    def __init__(self, place: Path, name: str):
        """place: the folder. name: how messages call it."""
        self.name, self._place = name, place

    @property
    def at(self) -> Path:
        """The folder."""
        return self._place

    def check(self, force: bool, resume: bool) -> None:
        """Also looks at the folder above."""
        name, place = self.name, self._place
        if _is_there(place, name):
            if kind_there(place) != "group" or self.record() is None:
                raise InputError(
                    f"{name} exists and is no such result; it is left alone, choose another place"
                )
            if not (force or resume):
                raise InputError(f"{name} exists; give force=True to replace it, or choose another place")
        elif _is_there(staging(place), name) and not (force or resume):
            raise InputError(
                f"{name} is the unfinished result of an interrupted run; continue it with resume=True, or "
                "give force=True to replace it"
            )
        parent = next(folder for folder in place.parents if _is_there(folder, name))
        if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
            raise InputError(
                f"{name} cannot be created: {parent} is not a writable folder; choose another place"
            )

    def try_out(self) -> None:
        """Begins an array in the hidden folder, where there is none."""
        try_place(staging(self._place))

    def is_begun(self) -> bool:
        """Looks for the file that says which run it was."""
        return (staging(self._place) / HEAD).exists()

    def record(self) -> dict[str, Any] | None:
        """Reads the attributes of the group."""
        return recorded(str(self._place), self.name)

    def begin(self, head: dict[str, Any] | None, resume: bool, notice: Callable[[str], None]) -> FolderMaking:
        """Keeps what it replaces."""
        name, folder = self.name, staging(self._place)
        try:
            if resume and self.is_begun():
                file = _locked(folder, name)
                before = json.loads((folder / HEAD).read_text("utf-8") or "null")
                other = differences(before, head) if before and head else ["its inputs cannot be known again"]
                if other:
                    os.close(file)
                    raise InputError(
                        f"{name} cannot be continued: {'; '.join(other)}; start over with force=True"
                    )
                return FolderMaking(self._place, name, file)
            if self.is_begun():
                os.close(_locked(folder, name))
            shutil.rmtree(folder, ignore_errors=True)
            durable.make_folders(folder)
            durable.replace(folder / HEAD, json.dumps(head).encode())
            durable.flush_folders(folder)
            return FolderMaking(self._place, name, _locked(folder, name))
        except OSError as error:
            raise InputError(
                f"{name} cannot be created ({error.strerror}); {remedy(error, 'choose another place')}"
            ) from error


def staging(place: Path) -> Path:
    """Return the folder in which the group for a place is made."""
    return place.with_name(f".{place.name}{SUFFIX}")


def _is_there(path: Path, name: str) -> bool:
    """Whether there is something. name: what messages call the group. Raises InputError where nobody can
    know, as where a part of the path is too long."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise InputError(
            f"{name} cannot be created ({error.strerror}); {remedy(error, 'choose another place')}"
        ) from error
    return True


def _locked(folder: Path, name: str) -> int:
    """The open file that holds the lock of a run. Raises InputError where another process has it."""
    file = os.open(folder / HEAD, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise InputError(f"{name} is being written by another process; wait for it, or stop it") from None
    except OSError:  # a file system without locks
        pass
    return file
