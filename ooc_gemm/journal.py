"""What is done of a C that is being made, so that an interrupted run can be continued.

A file in C's folder; each line is one of

    {"version": 1, "options": …, "inputs": …}               what is made, of what; the first line
    {"boot": …, "undone": […]}                              a run begins; what is not done after all
    {"chunk": [i, j], "now": [size, time], "was": […]}      a chunk of C is written; its file now, and before
    {"durable": n}                                          the first n of the lines on chunks hold for good

A chunk is written to a file beside its place. The line that says so is what makes it done; it goes to its
place later, after the next `durable` line:

    write chunk.pending ──► line ──┬──► … ──► flush the disk ──► durable line, flush ──► chunk.pending → chunk
                                   └── from here on it is done; chunk still holds what it held

So β·C reads what it should until the chunk is done, and never again. A process that is killed loses what was
being written and no more, for the system keeps what it was given. When the system itself goes down, lines
that no `durable` one covers count for nothing: the files that they name may be empty, and have no place yet.

The lock on the file keeps a second process away, and goes with the process that holds it.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from . import background, files
from .errors import InputError

NAME = "ooc-gemm.journal"
VERSION = 1
ANEW = "start over with -f (force=True), or where beta is not 0 from a C as it was"
Chunk = tuple[int, int]
Stamp = tuple[int, int]
"""Size of a file in bytes, and when it was changed last in ns; (0, 0) where there is none."""


def stamp(path: str | Path, in_background: bool = False) -> Stamp:
    """Of a file."""
    try:
        if in_background and background.THERE:
            return background.stamp(str(path))
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return 0, 0
    return found.st_size, found.st_mtime_ns


def digest(parts: Iterable[bytes]) -> str:
    """A short name for contents."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part)
    return found.hexdigest()


class Journal:
    """The journal of one C, locked for this process until `close` or `remove`. `done`: for every chunk that
    is done, the stamp of its file, and that of the file it replaces."""

    def __init__(self, folder: Path, name: str, create: bool):
        """`name`: how messages call C. Raises InputError where another process holds it, and OSError."""
        self._path, self._name, self._lock = folder / NAME, name, Lock()
        self.head: dict[str, Any] = {}
        self.done: dict[Chunk, tuple[Stamp, Stamp]] = {}
        self.count = 0
        """Lines on chunks."""
        self._in_background = False
        self._file = self._open(create)

    @classmethod
    def create(cls, folder: Path, name: str, head: dict[str, Any]) -> "Journal":
        """A new one; what an older one says is gone. Raises InputError and OSError."""
        os.makedirs(folder, exist_ok=True)
        journal = cls(folder, name, create=True)
        try:
            journal._begin(head)
        except BaseException:
            journal.remove()
            raise
        return journal

    def _begin(self, head: dict[str, Any]) -> None:
        self.head = {"version": VERSION, **head}
        self._file.truncate(0)
        self._append(self.head, {"boot": self._boot(), "undone": []})

    @classmethod
    def resume(cls, folder: Path, name: str) -> "Journal":
        """The one that an interrupted run has left. Raises InputError where there is none, or it cannot be
        used."""
        try:
            journal = cls(folder, name, create=False)
        except FileNotFoundError:
            raise InputError(
                f"{name} has no journal of what was done, so it cannot be continued; {ANEW}"
            ) from None
        except OSError as error:
            said = error.strerror or error
            raise InputError(f"the journal of {name} cannot be used: {said}; {ANEW}") from error
        journal._continue()
        return journal

    def _continue(self) -> None:
        try:
            self._read()
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            self.close()
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"the journal of {self._name} is damaged, so it cannot be continued; {ANEW}"
            ) from error

    def _open(self, create: bool) -> BinaryIO:
        while True:
            # Who made the folder may have put anything there: to write through a link would harm others.
            flags = os.O_RDWR | os.O_APPEND | files.NOFOLLOW | files.NONBLOCK | (os.O_CREAT if create else 0)
            file = os.fdopen(os.open(self._path, flags, 0o666), "r+b", buffering=0)
            try:
                files.check_is_file(os.fstat(file.fileno()))
                _hold(file, self._name)
                if _is_at(file, self._path):
                    self._in_background = files.in_background(self._path.parent)
                    return file
            except BaseException:
                file.close()
                raise
            file.close()  # whoever held it has removed it in between

    def _read(self) -> None:
        """All lines up to the first that is not whole: those of a process that was killed, or of a system
        that went down, end so."""
        text = self._file.read()
        whole, boot, held, order = 0, "", 0, list[Chunk]()
        for line in text.split(b"\n")[:-1]:
            try:
                entry = json.loads(line)
            except ValueError:
                break
            if not self.head:
                self.head = entry
                if entry["version"] != VERSION:
                    raise InputError(f"{self._name} was begun by another version of ooc-gemm; {ANEW}")
            elif "boot" in entry:
                boot = entry["boot"]
                for i, j in entry["undone"]:
                    del self.done[i, j]
            elif "durable" in entry:
                held = entry["durable"]
            else:
                (i, j), (now, was) = entry["chunk"], ((*entry["now"],), (*entry["was"],))
                self.done[i, j] = now, was
                order.append((i, j))
            whole += len(line) + 1
        if not self.head or b'"durable"' in text[whole:]:
            raise ValueError
        self.count = len(order)
        lost = (
            [] if boot and boot == self._boot() else [chunk for chunk in order[held:] if chunk in self.done]
        )
        for chunk in lost:
            del self.done[chunk]
        self._file.truncate(whole)
        self._append({"boot": self._boot(), "undone": lost})

    def add(self, chunk: Chunk, now: Stamp, was: Stamp) -> None:
        """That chunk is written."""
        with self._lock:
            self.done[chunk] = now, was
            self.count += 1
            self._append({"chunk": chunk, "now": now, "was": was})

    def durable(self, count: int) -> None:
        """The chunks of the first `count` lines are on the disk."""
        with self._lock:
            self._append({"durable": count})
        os.fsync(self._file.fileno())

    def _boot(self) -> str:
        """What chunks that nobody has flushed live as long as."""
        return boot_id()

    def _append(self, *entries: dict[str, Any]) -> None:
        lines = b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)
        if self._in_background and background.THERE:
            background.append(self._file.fileno(), lines, str(self._path))
        else:
            self._file.write(lines)

    def remove(self) -> None:
        """C is finished."""
        self._path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Let others have it."""
        self._file.close()


def is_journal(text: bytes | None) -> bool:
    """Whether this is how a journal begins, or all that a killed process has written of it."""
    begin = b'{"version": '
    return text is not None and text[: len(begin)] == begin[: len(text)]


def is_held(folder: Path) -> bool:
    """Whether a process is at work on the C in this folder."""
    try:
        with open(files.open_file(folder / NAME)[0], "rb") as file:
            _hold(file, "")
    except InputError:
        return True
    except OSError:
        pass
    return False


def _hold(file: BinaryIO, name: str) -> None:
    """Lock it, where the file system can. Raises InputError where another process has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{name} is being written by another process; wait for it, or stop it") from None
    except OSError:
        pass


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def boot_id() -> str:
    """Which start of the system this is; "" where it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
