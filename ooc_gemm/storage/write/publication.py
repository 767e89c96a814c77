"""C while it is written: unfinished until all of it is there, and continued where a run was interrupted.

begin ──► write … save … write … save ──► commit           pause: the run ends before
"""

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Lock
from typing import Any

import zarr

from ...support.buffers import Bytes
from ...support.errors import StoreError, remedy
from ...support.onward import Inward
from ..format.unfinished import METADATA, PARTIAL
from ..io.objects import why
from ..io.stamps import Stamp, Stamps
from ..read.inputs import open_zarr
from ..read.source import Opened
from . import provenance
from .consolidated import Consolidated, entry_of
from .done import Done
from .journal import Chunk, Journal
from .share import run_folder
from .staging import Notice, Staging, document, grid_of, touched
from .staging_folder import FolderStaging

SAVED_SECONDS = 2.0
"""Seconds after which written chunks are made durable. Making them again takes about as long."""
SOONER = 20
"""How many times as often chunks go to their places if C is in memory, where there is nothing to flush. The
run waits for those that are left at the end (1024 of them: 16 ms on a host of two H200)."""


class Publication:
    """Takes the chunks of one C. With a journal, chunks go to their places at the next `save`; without one,
    at once."""

    def __init__(self, array: zarr.Array[Any], name: str, staging: Staging, log: Journal | None):
        """array: C. name: how messages call C. staging: how chunks reach their places. log: C's journal, if
        it has one."""
        self.name, self.staging, self._array, self._log = name, staging, array, log
        self._grid = grid_of(array)
        if log:
            log.arrange(self._grid)
        self._key = METADATA[0] if array.metadata.zarr_format == 3 else METADATA[1]
        self._waiting: list[Chunk] = []
        """Chunks that are written and not in their places yet."""
        self._lock, self._saving, self._saved = Lock(), Lock(), time.monotonic()
        self.groups = Consolidated([], name)
        """Groups above C that get C's metadata when it is finished."""
        self.folders: list[Path] = []
        """Folders that did not exist before C was begun: its own, then those above it."""
        self._old: Stamps | None = None
        self._stamps: Stamps | None = None
        """Stamps of C's chunks when all of them were last looked at."""

    @property
    def background(self) -> bool:
        """Whether writes continue in the background once they are started."""
        return self.staging.background

    @property
    def far(self) -> bool:
        """Whether C is in a store, not on a disk of this machine."""
        return self.staging.far

    @property
    def afterwards(self) -> str:
        """Depends on whether the run can be continued, and on whether C was updated."""
        if self._log is not None:
            return "continue with resume=True"
        return "run again with force=True" if self._old is None else "start over from a C as it was"

    # ------------------------------------------------------------------------------------------- beginning

    def begin(self, metadata: bytes | None, keep: bool = True, notice: Notice | None = None) -> None:
        """Mark C as unfinished, by `Staging.begin`."""
        self.staging.begin(self._key, metadata, keep, notice)

    def proceed(self) -> None:
        """Continue an interrupted run. Raises InputError where C was changed since."""
        assert self._log
        self._waiting = self.staging.proceed(self._log.done)

    def expect(self, old: Stamps | None) -> None:
        """Require of a C that is updated that each chunk is as it was when C was opened, until it is written.
        `old`: the stamps of all chunks at that time."""
        self._old = old
        if old is not None:
            self.staging.expect(self._was)

    # --------------------------------------------------------------------------------------------- writing

    def write(self, chunk: Chunk, data: Bytes | bytes) -> None:
        """Write the stored bytes of a chunk. Raises OSError, StoreError, and what a store's client raises."""
        self.staging.write(chunk, data)
        self._written(chunk)

    def start(self, chunk: Chunk, data: Bytes) -> Callable[[], bool]:
        """Start to write in the background. The function returned waits for the end, and returns whether the
        chunk was written; it must be called."""
        return self._noted([chunk], self.staging.start(chunk, data))

    def bring(self, chunks: Sequence[Chunk], inward: Inward) -> Callable[[], bool]:
        """Start to write chunks that a device has, as of `start`."""
        assert isinstance(self.staging, FolderStaging), "no other has a background"
        return self._noted(chunks, self.staging.bring(chunks, inward))

    def _noted(self, chunks: Sequence[Chunk], end: Callable[[], bool]) -> Callable[[], bool]:
        def done() -> bool:
            if not end():
                return False
            for chunk in chunks:
                self._written(chunk)
            return True

        return done

    def opened(self, name: str) -> Opened:
        """Open the unfinished C for reading. `name`: how messages call it."""
        return open_zarr(name, self._array)

    def run_folder(self) -> AbstractContextManager[Path]:
        """Yield a folder for the chunks that workers of a cluster make. C must be in a folder."""
        assert isinstance(self.staging, FolderStaging)
        return run_folder(self.staging.root)

    def take(self, chunk: Chunk, file: str) -> None:
        """Take over the file of a chunk that a worker of a cluster has written. Raises StoreError."""
        assert isinstance(self.staging, FolderStaging)
        try:
            self.staging.take(chunk, file)
            self._written(chunk)
        except OSError as error:
            raise StoreError(
                f"{self.name}: a chunk that a worker has written cannot be moved to its place "
                f"({error.strerror or error}); {remedy(error, 'check its disk')} "
                "and continue with resume=True"
            ) from error

    def _written(self, chunk: Chunk) -> None:
        """Note a chunk that the staging has written."""
        self.staging.written(chunk)
        if self._log is None:
            self.staging.settle([chunk])
            return
        now, was = self.staging.stamps(chunk)
        if self._old is not None and was != self._was(chunk):
            raise self._changed(chunk, "updated")
        with self._lock:
            if failed := self._failed:
                raise OSError(failed.errno, failed.strerror)
            self._log.add(chunk, now, was)
            self._waiting.append(chunk)
        pause = max(SAVED_SECONDS / (SOONER if self.background else 1), self._log.pause)
        if time.monotonic() > self._saved + pause and not self._saving.locked():
            self.save()

    def save(self, everything: bool = True) -> None:
        """Move chunks to their places once they, and the line of the journal about them, are durable.
        `everything`: as of `Staging.flush`. Raises OSError; if it was a flush that failed, its chunks are not
        done, and nothing more can be saved."""
        if self._log is None:
            return
        with self._saving:
            with self._lock:
                chunks, self._waiting, count = self._waiting, [], self._log.count
            try:
                self.staging.flush(everything)
                # Else a chunk in its place may just as well be made again.
                if everything or self._old is not None or self.staging.at_once:
                    self._log.durable(count)
                self.staging.settle(chunks)
            finally:
                with self._lock:
                    self._waiting += chunks
                if self._failed:
                    self._give_up()
            self._saved = time.monotonic()

    @property
    def _failed(self) -> OSError | None:
        """The error of the first flush that failed, of chunks or of the journal."""
        return self.staging.failed or (self._log.failed if self._log else None)

    def _give_up(self) -> None:
        """Undo the chunks that were written since the flush before, because a flush has failed: they may be
        lost although they can still be read."""
        assert self._log
        with self._lock:
            self._waiting = []
        with contextlib.suppress(OSError):
            for chunk in self._log.undo():
                self.staging.drop(chunk)

    # ---------------------------------------------------------------------------------------------- ending

    def cancel(self) -> None:
        """Wake all threads that wait for a store to take a chunk."""
        self.staging.cancel()

    def pause(self) -> None:
        """Keep what is done for the next run, because this one ends before C is finished."""
        if self._log:
            with contextlib.suppress(OSError, ValueError):  # the disk is full; the journal closed
                self.save()
            self._log.close()
        self.staging.close()

    def discard(self) -> None:
        """Remove what was begun, as far as possible, because no run can finish it. The array that it was to
        replace is put back."""
        self.staging.discard()
        if self._log:
            with contextlib.suppress(Exception):  # a store may raise anything
                self._log.remove()
        for folder in self.folders:
            with contextlib.suppress(OSError):  # it is gone already, or something else was put into it
                folder.rmdir()

    def spoil(self, name: str) -> None:
        """Note, as far as possible, that no run may continue this one, because an input was written to.
        `name`: how messages call the input."""
        if self._log:
            with contextlib.suppress(OSError):
                self._log.spoil(name)

    def commit(self, made: dict[str, Any] | None = None) -> str | None:
        """Make C an array, because all chunks are written. Its metadata take their final name when everything
        else is durable, and then the journal is removed.

        `made`: what C was made of, for its attributes. Returns what to tell the user of an array that C has
        replaced, or of groups above C. Raises StoreError.
        """
        try:
            self.save(everything=False)
            self._check()
            self._hold()
            # A run that was killed right here has published them already.
            described = document(self.staging, (self._key + PARTIAL, self._key), self.name)
            if made:
                described = self._with_attributes(described, {**made, "result": self._mark()})
            self.staging.publish(self._key, described)
            said = self.groups.enter(*entry_of(self._array, self.name))
            self._hold()
            left = self.staging.finish(self._key)
            if self._log:
                self._log.remove()
            return left or said
        except StoreError:
            raise
        except Exception as error:
            if not (self.far or isinstance(error, OSError)):
                raise
            said = (isinstance(error, OSError) and error.strerror) or why(error)
            what = remedy(error, "check its store" if self.far else "check its disk")
            raise StoreError(
                f"{self.name} cannot be finished: {said}; {what} and {self.afterwards}"
            ) from error

    def _with_attributes(self, described: bytes, made: dict[str, Any]) -> bytes:
        """Put what C was made of into its metadata, or for version 2 into its attributes, and return the
        metadata."""
        attributes = {provenance.ATTRIBUTE: made}
        if self._key == METADATA[0]:
            found = json.loads(described)
            found["attributes"] = {**(found.get("attributes") or {}), **attributes}
            return json.dumps(found, indent=2).encode()
        known = json.loads(self.staging.read(".zattrs") or b"{}")
        self.staging.put(".zattrs", json.dumps({**known, **attributes}, indent=2).encode())
        return described

    def _mark(self) -> str | None:
        """The digest by which a later run knows the finished C (`provenance.mark`)."""
        stamps = self._stamps if self._stamps is not None else self.staging.all_stamps(self._grid)
        return None if stamps is None else provenance.mark(self._array.metadata, stamps)

    def _check(self) -> None:
        """Check that all chunks are as this run, or an interrupted one before it, has written them. Raises
        OSError and StoreError."""
        if self._log is None:
            self.staging.flush(everything=False)
        if self._log is None or not self._log.done:
            return
        self._stamps = stamps = self.staging.all_stamps(self._grid)
        assert stamps is not None
        assert isinstance(self._log.done, Done), "its size is known"
        chunk = self._log.done.differing(stamps, self.staging.identities())
        if chunk is not None:
            raise self._changed(chunk, "written")

    def _hold(self) -> None:
        """Raise StoreError where another run has taken C over, because of which this one must not change C's
        metadata. A lock on a local file keeps other runs away until C is finished."""
        if self._log and self.staging.at_once:
            self._log.hold()

    def _was(self, chunk: Chunk) -> Stamp:
        """The stamp of a chunk of an updated C when C was opened."""
        assert self._old is not None
        size, tag = self._old[self._at(chunk), :2].tolist()
        return size, tag

    def _at(self, chunk: Chunk) -> int:
        return chunk[0] * self._grid[1] + chunk[1]

    def _changed(self, chunk: Chunk, when: str) -> StoreError:
        return touched(self.name, self._array.metadata.encode_chunk_key(chunk), when)
