"""What is done of a C that is being made, so that an interrupted run can be continued.

A file or an object beside C's chunks; each line is one of

    {"version": 1, "options": …, "inputs": …}               what is made, of what; the first line
    {"boot": …, "undone": […]}                              a run begins; what is not done after all
    {"chunk": [i, j], "now": [size, time], "was": […]}      a chunk of C is written; its file now, and before
    {"durable": n, "save": s}                               the first n of the lines on chunks hold for good;
                                                            s counts these lines
    {"spoiled": name}                                       an input was written to while chunks were made of
                                                            it: nobody can tell which of them are right

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

In an object store a chunk is in its place when it is written, and the journal is an object that is put whole
at each `durable` line (`logs.py`). The first line also names the run, as `run`. Chunks of an updated C carry
that name, so those whose lines were not put count, too (`marks.py`).
"""

import json
import uuid
from collections.abc import Iterable, MutableMapping
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any

from ...support.errors import InputError
from ..format.unfinished import JOURNAL
from ..io import durable
from ..io.objects import Objects
from ..io.stamps import Stamp
from .done import Chunk as Chunk
from .done import Done
from .logs import LockedFile, Log, ObjectLog

VERSION = 1
ANEW = "start over with force=True, or where beta is not 0 from a C as it was"


class Journal:
    """The journal of one C. It keeps other processes away from C until `close` or `remove`."""

    def __init__(self, log: Log, name: str):
        """log: where the lines are kept. name: how messages call C."""
        self._log, self._name, self._lock = log, name, Lock()
        self.head: dict[str, Any] = {}
        """What C is made of; empty where the run that made the journal was killed before it wrote that."""
        self.done: MutableMapping[Chunk, tuple[Stamp, Stamp]] = {}
        """For every finished chunk the stamp of its file, and the stamp of the file that it replaces."""
        self.count = 0
        """Number of lines about chunks."""
        self._saves = 0
        """Number of lines that say which chunks are durable."""
        self._loose: list[tuple[Chunk, int, int]] = []
        """Chunks that are not durable yet, with the first byte of their line and the one behind its end."""

    @property
    def run(self) -> str:
        """What marks chunks in an object store as those of this run, and of the runs that continue it."""
        return str(self.head.get("run", ""))

    @property
    def pause(self) -> float:
        """Seconds that should pass before the next call of `durable`."""
        return self._log.pause

    @property
    def failed(self) -> OSError | None:
        """The error of a flush of the journal that failed; nothing more can be added."""
        return self._log.failed

    def begin(self, head: dict[str, Any]) -> None:
        """Replace all lines by the head, which says what C is made of. Raises what `Log.replace` raises."""
        self.head = {"version": VERSION, **head}
        self._log.replace(_lines([self.head, {"boot": self._log.life, "undone": []}]))

    def arrange(self, grid: Chunk) -> None:
        """Hold what is done in little memory, because the size of C is known. grid: number of chunks down and
        across. Raises InputError where the journal names chunks that C does not have."""
        held = Done(grid)
        try:
            held.update(self.done)
        except (LookupError, TypeError, ValueError) as error:
            raise InputError(
                f"the journal of {self._name} is damaged, so it cannot be continued; {ANEW}"
            ) from error
        self.done = held

    def go_on(self) -> None:
        """Read what an interrupted run has left, and write it again without the lines that a power cut or a
        short write has damaged. Raises InputError where it cannot be used, and what `Log.replace` raises."""
        try:
            order, held = self._read()
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"the journal of {self._name} is damaged, so it cannot be continued; {ANEW}"
            ) from error
        if not self.head:
            return
        kept, loose = order[:held], order[held:]
        self.count, self._saves = len(order), 1 if kept else 0
        lines = bytearray(_lines([self.head, {"boot": self._log.life, "undone": []}]))
        for chunk in kept:
            lines += _lines([self._line(chunk)])
        if kept:
            lines += _lines([{"durable": held, "save": 1}])
        for chunk in loose:
            line = _lines([self._line(chunk)])
            self._loose.append((chunk, len(lines), len(lines) + len(line)))
            lines += line
        self._log.replace(bytes(lines))

    def _read(self) -> tuple[list[Chunk], int]:
        """Return the finished chunks in the order of their lines, and how many of them are durable.

        Lines after the first incomplete one are ignored: a process that was killed or had no room for a whole
        line leaves such, and so does a system that went down. Only a line that was flushed, as later ones
        show, cannot be missing for that reason. Raises ValueError and the like.
        """
        text = self._log.read()
        if b"\n" not in text:  # not even the first line: nothing was begun
            return [], 0
        whole, boot, held, order = 0, "", 0, list[Chunk]()
        for line in BytesIO(text):
            if not line.strip():  # one that was struck out
                whole += len(line)
                continue
            try:
                if not line.endswith(b"\n"):
                    raise ValueError
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
            elif "spoiled" in entry:
                raise InputError(
                    f"{self._name} cannot be continued: {entry['spoiled']} was changed while C was made of "
                    f"it, so that chunks may be wrong; {ANEW}"
                )
            elif "durable" in entry:
                held = entry["durable"]
                self._saves = entry.get("save", self._saves + 1)
            else:
                (i, j), (now, was) = entry["chunk"], ((*entry["now"],), (*entry["was"],))
                order.append((i, j))
                self.done[order[-1]] = now, was
            whole += len(line)
        if not self.head or self._is_damaged(text[whole:]):
            raise ValueError
        # A chunk that was undone and done again counts where it was done last.
        last = {chunk: at for at, chunk in enumerate(order) if chunk in self.done}
        kept = [chunk for chunk, at in last.items() if at < held]
        loose = [chunk for chunk, at in last.items() if at >= held]
        if not boot or boot != self._log.life:
            for chunk in loose:
                del self.done[chunk]
            loose = []
        return kept + loose, len(kept)

    def _is_damaged(self, rest: bytes) -> bool:
        """Whether a line after the first incomplete one shows that this one was flushed. All lines before the
        last one about durable chunks were flushed."""
        for line in rest.split(b"\n")[1:-1]:
            if b'"durable"' in line:
                try:
                    if json.loads(line)["save"] > self._saves + 1:
                        return True
                except (ValueError, LookupError, TypeError):
                    return True
        return False

    def add(self, chunk: Chunk, now: Stamp, was: Stamp) -> None:
        """Note a chunk that is written. now: the stamp of its file. was: the stamp of the file that it
        replaces. Raises OSError."""
        with self._lock:
            self.done[chunk] = now, was
            line = _lines([self._line(chunk)])
            try:
                start = self._log.append(line)
            except OSError:
                del self.done[chunk]
                raise
            self._loose.append((chunk, start, start + len(line)))
            self.count += 1

    def _line(self, chunk: Chunk) -> dict[str, Any]:
        now, was = self.done[chunk]
        return {"chunk": chunk, "now": now, "was": was}

    def durable(self, count: int) -> None:
        """Note that the chunks of the first `count` lines are durable. Raises OSError; then nothing more can
        be added."""
        with self._lock:
            self._log.append(_lines([{"durable": count, "save": self._saves + 1}]))
            self._saves += 1
        self._log.flush()
        with self._lock:
            del self._loose[: len(self._loose) - (self.count - count)]

    def hold(self) -> None:
        """Raise StoreError where another run has taken over a C in an object store."""
        self._log.flush()

    def spoil(self, name: str) -> None:
        """Note that no run may continue this one, because an input was written to. `name`: how messages call
        the input. Raises OSError."""
        with self._lock:
            self._log.append(_lines([{"spoiled": name}]))
        self._log.flush()

    def undo(self) -> list[Chunk]:
        """Strike out the lines of all chunks that are not durable, and return these chunks. Nothing more can
        be added. Raises OSError where that fails."""
        with self._lock:
            loose, self._loose = self._loose, []
            for chunk, _, _ in loose:
                self.done.pop(chunk, None)
            self._log.blank([(start, stop) for _, start, stop in loose])
        return [chunk for chunk, _, _ in loose]

    def remove(self) -> None:
        """Remove the journal, because C is finished."""
        self._log.remove()

    def close(self) -> None:
        """Keep the journal, and let other processes continue it."""
        self._log.close()


def _lines(entries: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


def begin_in_folder(folder: Path, name: str, head: dict[str, Any]) -> Journal:
    """Create a journal, which is on the disk before anything else is changed, and replaces an older one.
    `name`: how messages call C. Raises InputError and OSError; then an older one is unchanged."""
    durable.make_folders(folder)
    file = LockedFile(folder, name, create=True)
    is_new, journal = file.is_empty, Journal(file, name)
    try:
        journal.begin(head)
    except BaseException:
        if is_new:
            journal.remove()
        else:
            journal.close()
        raise
    return journal


def begin_in_store(objects: Objects, name: str, head: dict[str, Any], replace: bool) -> Journal:
    """Create a journal in an object store. `replace`: also where another one exists. `name`: how messages
    call C. Raises InputError where another process was first, and what the store raises."""
    journal = Journal(ObjectLog(objects, name, "overwrite" if replace else "create"), name)
    journal.begin({**head, "run": uuid.uuid4().hex})
    return journal


def resume_in_folder(folder: Path, name: str) -> Journal:
    """Open the journal that an interrupted run has left. `name`: how messages call C. Raises InputError where
    there is none or it cannot be used."""
    try:
        journal = Journal(LockedFile(folder, name, create=False), name)
    except FileNotFoundError:
        raise _missing(name) from None
    except OSError as error:
        said = error.strerror or error
        raise InputError(f"the journal of {name} cannot be used: {said}; {ANEW}") from error
    try:
        journal.go_on()
    except OSError as error:
        journal.close()
        said = error.strerror or error
        raise InputError(f"the journal of {name} cannot be written: {said}; check its disk") from error
    except BaseException:
        journal.close()
        raise
    return journal


def resume_in_store(objects: Objects, name: str) -> Journal:
    """Open the journal that an interrupted run has left, and take it over from any other run. `name`: how
    messages call C. Raises InputError where there is none or it cannot be used, and what the store raises."""
    found = objects.read_version(JOURNAL)
    if found is None:
        raise _missing(name)
    lines, version = found
    journal = Journal(ObjectLog(objects, name, version, lines), name)
    journal.go_on()
    if not journal.head:
        raise _missing(name)
    return journal


def _missing(name: str) -> InputError:
    return InputError(f"{name} has no journal of what was done, so it cannot be continued; {ANEW}")
