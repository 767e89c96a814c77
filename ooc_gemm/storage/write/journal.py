"""What is done of a C that is being made, so that an interrupted run can be continued.

A file in C's folder; each line is one of

    {"version": 1, "options": …, "inputs": …}               what is made, of what; the first line
    {"boot": …, "undone": […]}                              a run begins; what is not done after all
    {"chunk": [i, j], "now": [size, time], "was": […]}      a chunk of C is written; its file now, and before
    {"durable": n, "save": s}                               the first n of the lines on chunks hold for good;
                                                            s counts these lines

A chunk is written to a file beside its place. The line that says so is what makes it done; it goes to its
place later, after the next `durable` line:

    write chunk.pending ──► line ──┬──► … ──► flush the disk ──► durable line, flush ──► chunk.pending → chunk
                                   └── from here on it is done; chunk still holds what it held

So β·C reads what it should until the chunk is done, and never again. A process that is killed loses what was
being written and no more, for the system keeps what it was given. When the system itself goes down, lines
that no `durable` one covers count for nothing: the files that they name may be empty, and have no place yet.
After a flush has failed they count for nothing either: nobody knows which of these files the disk has.

The journal is on the disk before anything of C changes, and is removed when C's metadata are on the disk. It
is written whole, under another name, when a run begins or goes on; then lines are added.

The lock on the file keeps a second process away, and goes with the process that holds it (`locks.py`).
"""

import contextlib
import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from ...support.errors import InputError
from ..format.unfinished import JOURNAL
from ..io import background, durable, files, locks
from ..io.locks import boot_id as boot_id
from ..io.stamps import Stamp

OURS = (JOURNAL, JOURNAL + durable.NEW, locks.OWNER)
"""Files that a run keeps beside C's."""
VERSION = 1
ANEW = "start over with force=True, or where beta is not 0 from a C as it was"
Chunk = tuple[int, int]


class Journal:
    """The journal of one C, locked for this process until `close` or `remove`. `done`: for every chunk that
    is done, the stamp of its file, and that of the file it replaces."""

    def __init__(self, folder: Path, name: str, create: bool):
        """`name`: how messages call C. Raises InputError where another process holds it, and OSError."""
        self._path, self._name, self._lock = folder / JOURNAL, name, Lock()
        self.head: dict[str, Any] = {}
        """Empty where the run that made the journal was killed before it had said what it makes."""
        self.done: dict[Chunk, tuple[Stamp, Stamp]] = {}
        self.count = 0
        """Lines on chunks."""
        self._saves = 0
        """Lines that say what is durable."""
        self._size = 0
        """Bytes of whole lines."""
        self._loose: list[tuple[Chunk, int, int]] = []
        """Chunks of the lines that are not durable, and where these lines begin and end."""
        self._failed: OSError | None = None
        self._in_background = False
        self._owner: Path | None = None
        self._file = self._open(create)

    @classmethod
    def create(cls, folder: Path, name: str, head: dict[str, Any]) -> "Journal":
        """A new one, which is on the disk before anything else is changed; what an older one says is gone.
        Raises InputError and OSError; then an older one is as it was."""
        durable.make_folders(folder)
        journal = cls(folder, name, create=True)
        is_new = os.fstat(journal._file.fileno()).st_size == 0
        try:
            journal._begin(head)
        except BaseException:
            if is_new:
                journal.remove()
            else:
                journal.close()
            raise
        return journal

    def _begin(self, head: dict[str, Any]) -> None:
        self.head = {"version": VERSION, **head}
        self._rewrite(self.head, {"boot": self._boot(), "undone": []})

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
        try:
            journal._continue()
        except OSError as error:
            journal.close()
            said = error.strerror or error
            raise InputError(f"the journal of {name} cannot be written: {said}; see to its disk") from error
        return journal

    def _continue(self) -> None:
        try:
            order, held = self._read()
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            self.close()
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"the journal of {self._name} is damaged, so it cannot be continued; {ANEW}"
            ) from error
        if not self.head:
            return
        # Whole again, and on the disk, whatever a short write or a power cut has left of it.
        kept, loose = order[:held], order[held:]
        self.count, self._saves = len(order), 1 if kept else 0
        lines: list[dict[str, Any]] = [self.head, {"boot": self._boot(), "undone": []}]
        lines += [self._line(chunk) for chunk in kept]
        if kept:
            lines.append({"durable": held, "save": 1})
        self._rewrite(*lines, *(self._line(chunk) for chunk in loose))
        stop = self._size
        for chunk in reversed(loose):
            start = stop - len(_lines([self._line(chunk)]))
            self._loose.insert(0, (chunk, start, stop))
            stop = start

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

    def _read(self) -> tuple[list[Chunk], int]:
        """The chunks that are done, in the order of their lines, and how many of them are on the disk for
        good. What follows the first line that is not whole is ignored: a process that was killed or had no
        room for all of a line, and a system that went down, leave such. Only a line that was flushed, as the
        ones that follow it show, cannot be missing for that reason. Raises ValueError and the like."""
        text = self._file.read()
        if b"\n" not in text:  # not even the first line: nothing was begun
            return [], 0
        whole, boot, held, order = 0, "", 0, list[Chunk]()
        for line in text.split(b"\n")[:-1]:
            if not line.strip():  # one that was struck out
                whole += len(line) + 1
                continue
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
                self._saves = entry.get("save", self._saves + 1)
            else:
                (i, j), (now, was) = entry["chunk"], ((*entry["now"],), (*entry["was"],))
                self.done[i, j] = now, was
                order.append((i, j))
            whole += len(line) + 1
        if not self.head or self._is_damaged(text[whole:]):
            raise ValueError
        # A chunk that was undone and done again counts where it was done last.
        last = {chunk: at for at, chunk in enumerate(order) if chunk in self.done}
        kept = [chunk for chunk, at in last.items() if at < held]
        loose = [chunk for chunk, at in last.items() if at >= held]
        if not boot or boot != self._boot():
            for chunk in loose:
                del self.done[chunk]
            loose = []
        return kept + loose, len(kept)

    def _is_damaged(self, rest: bytes) -> bool:
        """Whether a line in what follows the first one that is not whole shows that this one was flushed:
        that is so for all before the last line on what is durable, and maybe for this one."""
        for line in rest.split(b"\n")[1:-1]:
            if b'"durable"' in line:
                try:
                    if json.loads(line)["save"] > self._saves + 1:
                        return True
                except (ValueError, LookupError, TypeError):
                    return True
        return False

    def add(self, chunk: Chunk, now: Stamp, was: Stamp) -> None:
        """That chunk is written. Raises OSError."""
        with self._lock:
            self.done[chunk] = now, was
            start = self._size
            try:
                self._append(self._line(chunk))
            except OSError:
                del self.done[chunk]
                raise
            self._loose.append((chunk, start, self._size))
            self.count += 1

    def _line(self, chunk: Chunk) -> dict[str, Any]:
        now, was = self.done[chunk]
        return {"chunk": chunk, "now": now, "was": was}

    def durable(self, count: int) -> None:
        """The chunks of the first `count` lines are on the disk. Raises OSError; then nothing can be added
        any more."""
        with self._lock:
            self._append({"durable": count, "save": self._saves + 1})
            self._saves += 1
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self._failed = error
            raise
        with self._lock:
            del self._loose[: len(self._loose) - (self.count - count)]

    def undo(self) -> list[Chunk]:
        """What is not durable is not done after all; these chunks. Their lines are struck out where they
        stand, which takes no room on the disk. Nothing can be added any more. Raises OSError where that
        fails."""
        with self._lock:
            self._failed = self._failed or OSError(errno.EIO, os.strerror(errno.EIO))
            loose, self._loose = self._loose, []
            for chunk, _, _ in loose:
                self.done.pop(chunk, None)
            file = os.open(self._path, os.O_WRONLY | files.NOFOLLOW)
            try:
                for _, start, stop in loose:
                    os.pwrite(file, b" " * (stop - start - 1), start)
                os.fsync(file)
            finally:
                os.close(file)
        return [chunk for chunk, _, _ in loose]

    def _boot(self) -> str:
        """What chunks that nobody has flushed live as long as."""
        return boot_id()

    def _rewrite(self, *entries: dict[str, Any]) -> None:
        """Replace all lines at once, durably; the lock goes with the name. Raises OSError."""
        lines, new = _lines(entries), self._path.with_name(JOURNAL + durable.NEW)
        if os.fstat(self._file.fileno()).st_size == 0:
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

    def _append(self, *entries: dict[str, Any]) -> None:
        """All of these lines, or none. Raises OSError."""
        if self._failed:
            raise OSError(self._failed.errno, self._failed.strerror)
        lines = _lines(entries)
        try:
            self._write(lines)
        except OSError as error:
            try:
                self._file.truncate(self._size)
            except OSError:  # a line would follow a part of this one
                self._failed = error
            raise
        self._size += len(lines)

    def _write(self, lines: bytes) -> None:
        if self._in_background and background.THERE:
            background.append(self._file.fileno(), lines, str(self._path))
        else:
            durable.write_all(self._file.fileno(), lines)

    def remove(self) -> None:
        """C is finished."""
        with contextlib.suppress(FileNotFoundError):
            self._path.with_name(JOURNAL + durable.NEW).unlink()
        self._path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Let others have it."""
        self._file.close()
        owner, self._owner = self._owner, None
        locks.release(owner)


def _lines(entries: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


def is_held(folder: Path) -> bool:
    """Whether a process is at work on the C in this folder."""
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
