"""Where the lines of a journal are kept: a locked file, or an object that is replaced only by the run that
put it."""

import contextlib
import errno
import os
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Protocol

from ...support.errors import InputError, StoreError, remedy
from ..format.unfinished import JOURNAL
from ..io import background, durable, files, locks
from ..io.objects import Objects, why


class Log(Protocol):
    """Lines to which one process at a time may add."""

    @property
    def life(self) -> str:
        """A text that names a start of the system, or a run. Lines that were not flushed count while it is
        the same."""

    @property
    def pause(self) -> float:
        """Seconds that should pass before the next `flush`."""

    @property
    def failed(self) -> OSError | None:
        """The error after which nothing more can be added, because it is unknown which lines the disk has."""

    def read(self) -> bytes:
        """Return the lines that an earlier run has left."""

    def append(self, lines: bytes) -> int:
        """Add all of these lines or none, and return the byte at which they begin. Raises OSError."""

    def replace(self, lines: bytes) -> None:
        """Replace all lines by these, which are durable when this returns."""

    def flush(self) -> None:
        """Wait until all lines are durable. Raises OSError; then nothing more can be added."""

    def blank(self, spans: Iterable[tuple[int, int]]) -> None:
        """Overwrite lines with spaces, which takes no room on the disk. Each span is the first byte of a line
        and the one behind its end. Nothing more can be added. Raises OSError."""

    def remove(self) -> None:
        """Remove the lines, and let other processes begin."""

    def close(self) -> None:
        """Keep the lines, and let other processes continue."""


class LockedFile:
    """A file in C's folder (`Log`). The process that opens it holds a lock (`locks.py`)."""

    pause = 0.0

    def __init__(self, folder: Path, name: str, create: bool):
        """folder: C's folder. name: how messages call C. create: whether to create the file if it is missing.
        Raises InputError where another process holds the lock, and OSError."""
        self._path, self._name = folder / JOURNAL, name
        self._size = 0
        """Bytes of all complete lines."""
        self.failed: OSError | None = None
        """The error of the first flush that failed, or of lines that were written in part."""
        self._in_background = False
        self._owner: Path | None = None
        self._file = self._open(create)

    def _open(self, create: bool) -> BinaryIO:
        while True:
            # Who made the folder may have put anything there: to write through a link would harm others.
            flags = os.O_RDWR | os.O_APPEND | files.NOFOLLOW | files.NONBLOCK | (os.O_CREAT if create else 0)
            file = os.fdopen(os.open(self._path, flags, 0o666), "r+b", buffering=0)
            try:
                files.check_is_file(os.fstat(file.fileno()))
                owner = locks.hold(file, self._path.parent, self._name)
                if _is_at(file, self._path):
                    self._in_background, self._owner = files.in_background(self._path.parent), owner
                    return file
            except BaseException:
                file.close()
                raise
            file.close()  # whoever held it has replaced or removed it in between
            locks.release(owner)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever written to the file."""
        return os.fstat(self._file.fileno()).st_size == 0

    @property
    def life(self) -> str:
        """Identifies this start of the system, which keeps what a killed process has written."""
        return locks.boot_id()

    def read(self) -> bytes:
        """Reads the whole file. Raises OSError."""
        return self._file.read()

    def append(self, lines: bytes) -> int:
        """Removes what was written of the lines where not all of it could be."""
        if self.failed:
            raise OSError(self.failed.errno, self.failed.strerror)
        try:
            if self._in_background and background.THERE:
                background.append(self._file.fileno(), lines, str(self._path))
            else:
                durable.write_all(self._file.fileno(), lines)
        except OSError as error:
            try:
                self._file.truncate(self._size)
            except OSError:  # a line would follow a part of this one
                self.failed = error
            raise
        self._size += len(lines)
        return self._size - len(lines)

    def replace(self, lines: bytes) -> None:
        """Writes a new file, which takes over the name and the lock. Raises OSError."""
        new = self._path.with_name(JOURNAL + durable.NEW)
        if self.is_empty:
            durable.write_all(self._file.fileno(), lines)
            os.fsync(self._file.fileno())
        else:
            file = os.fdopen(durable.create_new(new), "r+b", buffering=0)
            try:
                durable.write_all(file.fileno(), lines)
                os.fsync(file.fileno())
                if self._owner is None:
                    locks.hold(file, self._path.parent, self._name)
                os.replace(new, self._path)
            except BaseException:
                file.close()
                new.unlink(missing_ok=True)
                raise
            self._file.close()
            self._file = file
        self._size = len(lines)
        durable.flush_folders(self._path.parent)

    def flush(self) -> None:
        """Flushes the file."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self.failed = error
            raise

    def blank(self, spans: Iterable[tuple[int, int]]) -> None:
        """Opens the file again, because this descriptor can only append."""
        self.failed = self.failed or OSError(errno.EIO, os.strerror(errno.EIO))
        file = os.open(self._path, os.O_WRONLY | files.NOFOLLOW)
        try:
            for start, stop in spans:
                os.pwrite(file, b" " * (stop - start - 1), start)
            os.fsync(file)
        finally:
            os.close(file)

    def remove(self) -> None:
        """Removes the file, and a new one that a killed process has left."""
        with contextlib.suppress(FileNotFoundError):
            self._path.with_name(JOURNAL + durable.NEW).unlink()
        self._path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Releases the lock."""
        self._file.close()
        owner, self._owner = self._owner, None
        locks.release(owner)


class ObjectLog:
    """An object beside C's chunks (`Log`), which is put whole at each flush, and only while it is the one
    that this run has put last. So a run that takes C over keeps the earlier run away."""

    def __init__(self, objects: Objects, name: str, version: Any, lines: bytes = b""):
        """objects: those at C's address. name: how messages call C. version: of the object that this run may
        replace, or `create`, or `overwrite` for any. lines: what that object holds."""
        self._objects, self._name, self._version = objects, name, version
        self._lines, self._lock = bytearray(lines), Lock()
        self._closed = False
        self.failed = None
        self.life = uuid.uuid4().hex
        self.pause = 0.0
        """Ten times the seconds that the last flush took."""

    def read(self) -> bytes:
        """Returns the lines in memory."""
        return bytes(self._lines)

    def append(self, lines: bytes) -> int:
        """Adds to the lines in memory. Raises ValueError when the log is closed, as a file does."""
        with self._lock:
            if self._closed:
                raise ValueError("the journal is closed")
            self._lines += lines
            return len(self._lines) - len(lines)

    def replace(self, lines: bytes) -> None:
        """Raises InputError where another run has C, and what the store raises."""
        with self._lock:
            self._lines = bytearray(lines)
        self._put()

    def flush(self) -> None:
        """Raises StoreError, also where another run has taken C over."""
        start = time.monotonic()
        try:
            self._put()
        except InputError as error:
            raise StoreError(str(error)) from None
        except Exception as error:
            raise StoreError(
                f"{self._name}: its journal cannot be written ({why(error)}); "
                f"{remedy(error, 'check its store')} and continue with resume=True"
            ) from error
        self.pause = 10 * (time.monotonic() - start)

    def _put(self) -> None:
        lines = self.read()
        try:
            self._version = self._objects.exchange(JOURNAL, lines, self._version)
        except Exception as error:
            if self._objects.cannot(error):
                self._version = self._objects.exchange(JOURNAL, lines, "overwrite")
                return
            if not self._objects.changed(error):
                raise
            found = self._objects.read_version(JOURNAL)  # our own, whose answer got lost?
            if found is None or found[0] != lines:
                raise InputError(
                    f"{self._name} is being written by another process; wait for it, or stop it"
                ) from error
            self._version = found[1]

    def blank(self, spans: Iterable[tuple[int, int]]) -> None:
        """Does nothing: an object that was put is durable."""

    def remove(self) -> None:
        """Removes the object."""
        self._objects.delete([JOURNAL])
        self.close()

    def close(self) -> None:
        """Drops later changes of this run; the next run that puts the object owns it."""
        self._closed = True


def is_held(folder: Path) -> bool:
    """Whether a process works on the C in this folder."""
    try:
        with open(files.open_file(folder / JOURNAL)[0], "rb") as file:
            return locks.is_held(file, folder)
    except OSError:
        return False


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False
