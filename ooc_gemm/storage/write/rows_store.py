"""A group of arrays that is made in an object store.

Its files are put at their places, each once and with a mark of the run (`marks.py`), so a run that
continues knows which are its own. The group's metadata come last. The journal (`logs.py`) holds what
identifies the run, and is its lock. It has no lines about files.
"""

import contextlib
import json
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zarr.storage import StorePath

from ...support.errors import Error, InputError, StoreError, remedy
from ..format.unfinished import JOURNAL, METADATA, TRIAL
from ..io.objects import Objects, why
from ..io.requests import CONNECTION_BYTES
from ..read.addresses import remote_place
from ..read.metadata import explained
from .logs import ObjectLog
from .marks import Marks
from .provenance import differences, recorded
from .rows_folder import PARTS

BEGIN = b'{"rows": 1, '
"""How the journal of such a group begins. Others begin in another way (`unfinished.is_journal`)."""
OURS = ("data", "graph", "indices", "indptr", PARTS, "values")
"""First parts of the keys of all files that such groups have, but for the group's metadata."""


class ObjectMaking:
    """The files of the group (`rows.Making`)."""

    def __init__(self, at: StorePath, objects: Objects, name: str, log: ObjectLog, run: str):
        """at, objects: the address of the group. name: how messages call it. log: its journal. run: marks
        the files."""
        self.at, self._objects, self._name, self._log = at, objects, name, log
        self._marks, self._keys = Marks(objects, run), set[str]()
        self.temporary = Path(tempfile.gettempdir())

    def recover(self) -> None:
        """Find the files that earlier processes of this run have put, and remove others, which would be in
        the way. Raises what the store raises."""
        found = self._marks.look_at_all([key for key in self._objects.all_keys() if _is_ours(key)])
        there = {key: stamps is not None for key, stamps in found}
        self._objects.delete(key for key, mine in there.items() if not mine)
        self._keys = {key for key, mine in there.items() if mine}

    def keys(self) -> set[str]:
        """Returns those that `recover` has found."""
        return self._keys

    def put(self, key: str, data: bytes, flush: bool = True) -> None:
        """Leaves a file that this run has put before: what is in it depends on the inputs alone."""
        with self._explained(f"its file {key} cannot be written"):
            if self._marks.put(key, data, (0, 0)) is None:
                raise StoreError(
                    f"{self._name}: somebody else has put {key} while it was being made; start over with "
                    "force=True"
                )

    def drop(self, keys: Iterable[str]) -> None:
        """Removes the objects."""
        with self._explained("what an earlier run has left cannot be removed"):
            self._objects.delete(keys)

    def read(self, key: str, most: int) -> bytes:
        """Gets the object."""
        with self._explained(f"its file {key} cannot be read"):
            return self._objects.read(key, most) or b""

    def publish(self, documents: Mapping[str, bytes]) -> None:
        """Asks before each step that others can see whether another run has taken the group over."""
        *others, last = documents.items()
        with self._explained("it cannot be finished"):
            for key, text in others:
                self._objects.put(key, text)
            self._log.flush()
            self._objects.put(*last)
            self._objects.delete([key for key in self._objects.all_keys() if key.startswith(f"{PARTS}/")])
            self._log.flush()
            self._log.remove()

    def close(self) -> None:
        """Keeps the journal, unless the group is finished."""
        self._log.close()

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turn an error of the store into a StoreError."""
        try:
            yield
        except (Error, MemoryError):
            raise
        except Exception as error:
            raise StoreError(
                f"{self._name}: {what} ({why(error)}); {remedy(error, 'check its store')}, then continue "
                "with resume=True"
            ) from error


class InStore:
    """The place of a group in an object store (`rows.GroupPlace`)."""

    connection = CONNECTION_BYTES

    def __init__(self, address: str, objects: Objects, name: str):
        """address: as it was given. objects: those there. name: how messages call it."""
        self.name, self._address, self._objects = name, address, objects

    @property
    def at(self) -> StorePath:
        """The store, and the path in it."""
        return remote_place(self._address)

    def check(self, force: bool, resume: bool) -> None:
        """Lists the address where there is no group of ours."""
        name = self.name
        with explained(name, remote=True):
            if self.record() is not None:
                if not (force or resume):
                    raise InputError(f"{name} exists; give force=True to replace it, or choose another place")
            elif self.is_begun():
                if not (force or resume):
                    raise InputError(
                        f"{name} is the unfinished result of a run that was interrupted, or still goes on; "
                        "continue it with resume=True, or give force=True to replace it"
                    )
            elif self._objects.has_any(TRIAL):
                raise InputError(
                    f"{name} exists and is no such result; it is left alone, choose another place"
                )

    def try_out(self) -> None:
        """Puts an object, whatever else is there."""
        with explained(self.name, remote=True):
            self._objects.put(TRIAL, b"1")
            self._objects.delete([TRIAL])

    def is_begun(self) -> bool:
        """Looks at the journal."""
        with explained(self.name, remote=True):
            found = self._objects.read(JOURNAL, len(BEGIN))
        return found is not None and found.startswith(BEGIN)

    def record(self) -> dict[str, Any] | None:
        """Reads the attributes of the group."""
        return recorded(self._address, self.name)

    def begin(self, head: dict[str, Any] | None, resume: bool, notice: Callable[[str], None]) -> ObjectMaking:
        """Removes what it replaces."""
        name, objects = self.name, self._objects
        with explained(name, remote=True):
            found = objects.read_version(JOURNAL)
            run = self._continued(found[0], head) if resume and found else uuid.uuid4().hex
            log = ObjectLog(objects, name, found[1] if found else "create")
            first = {"rows": 1, "run": run, "head": head}
            # The second line differs, so the process whose journal this was can no longer put its own.
            log.replace(b"".join(json.dumps(one).encode() + b"\n" for one in (first, {"boot": log.life})))
            making = ObjectMaking(self.at, objects, name, log, run)
            if objects.has(METADATA[0]) and not (resume and found):
                notice(
                    f"the result at {name} is removed before its replacement is made: an object store cannot "
                    "set it aside"
                )
            objects.delete([METADATA[0]])
            making.recover()
            return making

    def _continued(self, lines: bytes, head: dict[str, Any] | None) -> str:
        """Return the run to which a journal belongs. Raises InputError where this run does not continue
        it."""
        try:
            first = json.loads(lines.partition(b"\n")[0])
            run, before = str(first["run"]), first["head"]
            other = differences(before, head) if before and head else ["its inputs cannot be known again"]
        except (ValueError, LookupError, TypeError, AttributeError):
            other = ["its journal is damaged"]
        if other:
            raise InputError(
                f"{self.name} cannot be continued: {'; '.join(other)}; start over with force=True"
            )
        return run


def _is_ours(key: str) -> bool:
    """Whether such a group has a file of this key."""
    return key.partition("/")[0] in OURS
