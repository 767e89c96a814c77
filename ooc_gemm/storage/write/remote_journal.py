"""The journal of a C in an object store."""

import io
import uuid
from pathlib import Path
from typing import Any, BinaryIO

from ...support.errors import InputError, StoreError
from ..format.unfinished import JOURNAL
from ..io.objects import Objects
from .journal import ANEW, Journal


class _Text(io.BytesIO):
    """A file that is only ever added to, and cut."""

    def write(self, data: Any) -> int:
        """At the end."""
        self.seek(0, io.SEEK_END)
        return super().write(data)


class RemoteJournal(Journal):
    """The journal as an object beside C's chunks, put whole now and then: every chunk that it names was there
    before. It is put only where it is still what this run has put last: whoever takes C over, to go on with
    it or to begin anew, so keeps those away who had it."""

    def __init__(self, objects: Objects, name: str):
        self._objects, self._run, self._version = objects, uuid.uuid4().hex, None
        super().__init__(Path(), name, create=True)

    @classmethod
    def begin(cls, objects: Objects, name: str, head: dict[str, Any], replace: bool) -> "RemoteJournal":
        """A new one, in the place of an older one where `replace` says so. Raises InputError where somebody
        else was faster, and what the store raises."""
        journal = cls(objects, name)
        journal._begin(head)
        journal._put("overwrite" if replace else "create")
        return journal

    @classmethod
    def go_on(cls, objects: Objects, name: str) -> "RemoteJournal":
        """The one that an interrupted run has left, which is this run's from now on. Raises InputError where
        there is none, or it cannot be used, and what the store raises."""
        journal = cls(objects, name)
        found = objects.read_version(JOURNAL)
        if found is None:
            raise InputError(f"{name} has no journal of what was done, so it cannot be continued; {ANEW}")
        text, journal._version = found
        journal._file.write(text)
        journal._file.seek(0)
        journal._continue()
        if not journal.head:
            raise InputError(f"{name} has no journal of what was done, so it cannot be continued; {ANEW}")
        journal._put(journal._version)
        return journal

    def durable(self, count: int) -> None:
        """Put it, where chunks were added. Raises StoreError where C is another run's by now."""
        with self._lock:
            self._append({"durable": count, "save": self._saves + 1})
            self._saves += 1
        try:
            self._put(self._version)
        except InputError as error:
            raise StoreError(str(error)) from None

    def remove(self) -> None:
        """C is finished."""
        self._objects.delete([JOURNAL])
        self.close()

    def _open(self, create: bool) -> BinaryIO:
        return _Text()

    def _boot(self) -> str:
        return self._run

    def _rewrite(self, *entries: dict[str, Any]) -> None:
        self._file, self._size = _Text(), 0
        self._append(*entries)

    def _write(self, lines: bytes) -> None:
        self._file.write(lines)

    def _put(self, mode: Any) -> None:
        with self._lock:
            text = self._file.getvalue()  # type: ignore[attr-defined]
        try:
            self._version = self._objects.exchange(JOURNAL, text, mode)
        except Exception as error:
            if self._objects.cannot(error):
                self._version = self._objects.exchange(JOURNAL, text, "overwrite")
                return
            if not self._objects.changed(error):
                raise
            found = self._objects.read_version(JOURNAL)  # our own, whose answer got lost?
            if found is None or found[0] != text:
                raise InputError(
                    f"{self._name} is being written by another process; wait for it, or stop it"
                ) from error
            self._version = found[1]
