"""What has to survive a power cut: files replaced at once, and flushes not believed after a failure.

The system keeps what a process has written in memory and puts it on the disk later, in any order. What must
be there is flushed, and only then may anything else say that it is there.
"""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from threading import Lock

from . import files

FEW = 16
"""Most files that are flushed one by one. Where there are more, the whole file system is flushed."""
NEW = ".new"
"""Suffix of a file that is about to replace another one."""


def replace(path: Path, data: bytes) -> None:
    """Replace the contents of `path` by `data`. After a power cut, the file holds either these or the old
    ones. The new name is durable after `flush_folders`. Raises OSError; then nothing is changed."""
    os.replace(prepare(path, data), path)


def prepare(path: Path, data: bytes, flush: bool = True) -> Path:
    """Write `data` to a new file beside `path`, which may take its name later. `flush`: the data are on the
    disk when this returns. Raises OSError; then nothing is left behind."""
    new = path.with_name(path.name + NEW)
    file = create_new(new)
    try:
        try:
            write_all(file, data)
            if flush:
                os.fsync(file)
        finally:
            os.close(file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
    return new


def create_new(path: Path) -> int:
    """Create a file for reading and appending, after removing one of that name that a killed process has
    left. Links are not followed. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | files.NOFOLLOW, 0o666)


def write_all(file: int, data: bytes) -> None:
    """Write all of `data`, because one call may write less. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def flush_folders(*folders: str | os.PathLike[str]) -> None:
    """Wait until the names of the files in these folders are on the disk. Raises OSError."""
    for folder in folders:
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def make_folders(folder: Path) -> None:
    """Create a folder and its parents so that they survive a power cut. Raises OSError."""
    there = folder
    while not there.exists():
        there = there.parent
    os.makedirs(folder, exist_ok=True)
    if there != folder:
        between = (parent for parent in folder.parents if parent == there or there in parent.parents)
        flush_folders(*between)


class Disk:
    """Flushes what one run writes below one folder. The system reports a failed write once to each open file,
    and then forgets it. So the folder is opened before the first write and stays open to the end, and so do
    the first few files. After a failed flush every later one fails, too, because nobody knows which data the
    system has given up."""

    def __init__(self, folder: Path):
        """Open the folder. Raises OSError."""
        self._folder: int | None = os.open(folder, os.O_RDONLY)
        self._needless = files.in_memory(os.fstat(self._folder).st_dev)
        self._few: list[int] | None = []
        """The files written so far, while they are few and no flush was made."""
        self.failed: OSError | None = None
        """The error of the first flush that failed."""
        self._lock = Lock()

    def wrote(self, path: str) -> None:
        """Remember a file that was just written, for the next `flush`. Raises OSError."""
        with self._lock:
            if self._few is None or self._needless:
                return
            if len(self._few) < FEW:
                self._few.append(os.open(path, os.O_RDONLY | files.NOFOLLOW | files.NONBLOCK))
                return
        self._forget()

    def flush(self, everything: bool = True) -> None:
        """Wait until all that was written is on the disk. `everything`: flush the whole file system;
        otherwise only the files of this run, if they are few. Raises OSError."""
        if self.failed:
            raise OSError(self.failed.errno, self.failed.strerror)
        if self._needless or self._folder is None:
            return
        try:
            if everything or self._few is None:
                files.flush(self._folder)
            else:
                for file in self._few:
                    os.fsync(file)
        except OSError as error:
            self.failed = error
            raise
        finally:
            self._forget()

    def flush_names(self, folders: Iterable[str | os.PathLike[str]]) -> None:
        """Wait until the names of all files in these folders, and what was written to them, are on the disk.
        Raises OSError."""
        found = list(folders)
        if len(found) > FEW:
            self.flush()
            return
        try:
            if self.failed is None and not self._needless:
                flush_folders(*found)
        except OSError as error:
            self.failed = error
        if self.failed:
            raise OSError(self.failed.errno, self.failed.strerror)

    def close(self) -> None:
        """Close the files and the folder, because nothing more will be written."""
        self._forget()
        folder, self._folder = self._folder, None
        if folder is not None:
            os.close(folder)

    def __del__(self) -> None:
        if getattr(self, "_folder", None) is not None:
            self.close()

    def _forget(self) -> None:
        """Close the files that were remembered; later flushes are of the whole file system."""
        with self._lock:
            few, self._few = self._few, None
        for file in few or ():
            os.close(file)
