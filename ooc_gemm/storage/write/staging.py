"""How C's metadata and chunks reach their places.

folder          write chunk.pending ──► flush the disk ──► chunk.pending → chunk        staging_folder.py
object store    put chunk: one request, it is there whole or not at all                 staging_store.py
                of an updated C: only over the old chunk, with a mark                   marks.py
other stores    put chunk, by zarr                                                      staging_store.py
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from ...support.buffers import Bytes
from ...support.errors import InputError, StoreError
from ...support.intervals import ceil_div
from ..format.unfinished import PARTIAL
from ..io.stamps import Stamp, Stamps
from .journal import ANEW, Chunk

Notice = Callable[[str], None]
Done = Mapping[Chunk, tuple[Stamp, Stamp]]


class Staging:
    """Where C's metadata and chunks are written. The methods defined here suit a store in which a chunk is in
    its place, and durable, as soon as it is written. Every method may raise OSError, and what a store's
    client raises."""

    far = True
    """Whether C is in a store, not on a disk of this machine."""
    background = False
    """Whether writes continue in the background once they are started."""
    at_once = True
    """Whether chunks are in their places when they are written, so that only the journal keeps other runs
    away."""

    def begin(self, key: str, metadata: bytes | None, keep: bool, notice: Notice | None) -> None:
        """Mark C as unfinished: its metadata get the name `key` with `PARTIAL`. An old C stops being an
        array, durably, before any chunk is changed.

        key: the name of C's metadata. metadata: those of a new C; None where an existing C is updated. keep:
        False for a C that need not survive a power cut. notice: called before an old array is removed that
        cannot be kept until C is finished.
        """
        raise NotImplementedError

    def proceed(self, done: Done) -> list[Chunk]:
        """Continue an interrupted run, and return the chunks that are not in their places yet. Raises
        InputError where C was changed since."""
        raise NotImplementedError

    def read(self, key: str) -> bytes | None:
        """Return a document of C; None where there is none."""
        raise NotImplementedError

    def put(self, key: str, document: bytes) -> None:
        """Replace a document of C in one step."""
        raise NotImplementedError

    def write(self, chunk: Chunk, data: Bytes | bytes) -> None:
        """Write the stored bytes of a chunk."""
        raise NotImplementedError

    def expect(self, was: Callable[[Chunk], Stamp]) -> None:
        """Replace from now on only chunks that have the stamp that `was` returns, where chunks are written to
        their places at once. Where they are not, `stamps` tells in time that one has another."""

    def start(self, chunk: Chunk, data: Bytes) -> Callable[[], bool]:
        """Begin to write in the background. The function returned waits for the end, and returns whether the
        chunk was written."""
        self.write(chunk, data)
        return lambda: True

    def written(self, chunk: Chunk) -> None:
        """Let the next `flush` cover a chunk that was written."""

    def stamps(self, chunk: Chunk) -> tuple[Stamp, Stamp]:
        """Return the stamp of a chunk that was written, and that of the one which it replaces."""
        raise NotImplementedError

    def flush(self, everything: bool = True) -> None:
        """Make durable what was written. `everything`: as of `durable.Disk.flush`."""

    @property
    def failed(self) -> OSError | None:
        """The error of a flush that failed; what was written since the flush before may be lost."""
        return None

    def settle(self, chunks: list[Chunk]) -> None:
        """Move chunks that were written to their places. Those that are there are taken off the list. Raises
        OSError."""
        chunks.clear()

    def drop(self, chunk: Chunk) -> None:
        """Remove a chunk that was written and is not in its place."""

    def all_stamps(self, grid: Chunk) -> Stamps | None:
        """Return the stamps of all chunks, in row-major order; None where they cannot be had."""
        return None

    def identities(self) -> npt.NDArray[np.int64] | None:
        """Return for each chunk the identity that it had when it went to its place, or 0; None where stamps
        tell all changes."""
        return None

    def publish(self, key: str, metadata: bytes) -> None:
        """Give C's metadata their final name when everything else is durable."""
        self.put(key, metadata)

    def finish(self, key: str) -> str | None:
        """Remove the marks of an unfinished C, and the array that C replaces. Returns what to tell the user
        where a part of that array cannot be removed."""
        raise NotImplementedError

    def discard(self) -> None:
        """Remove a C that can be neither finished nor continued, as far as that is possible."""

    def kept(self) -> str | None:
        """Return what to tell the user about the array that C was to replace, where the run ends before C is
        finished."""
        return None

    def close(self) -> None:
        """Release files and locks that are open."""

    def cancel(self) -> None:
        """Wake all threads that wait for an answer."""


def grid_of(array: zarr.Array[Any]) -> Chunk:
    """Return how many files of chunks C has down and across: of shards, where it has some."""
    shape = array.shards or array.chunks
    down, across = (ceil_div(n, max(1, step)) for n, step in zip(array.shape, shape, strict=True))
    return down, across


def document(staging: Staging, keys: tuple[str, ...], name: str) -> bytes:
    """Read the first of these documents of C that exists. `name`: how messages call C. Raises StoreError
    where none does."""
    for key in keys:
        if found := staging.read(key):
            return found
    key = keys[0].removesuffix(PARTIAL)
    raise StoreError(f"{name}: {key} is gone; somebody else changed C while it was being written")


def touched(name: str, key: str, when: str) -> StoreError:
    """Return the error of a run that finds a chunk changed. `when`: what was done with C at that time."""
    return StoreError(
        f"{name}: somebody else has changed its chunk {key} while C was being {when}, so C is not finished; "
        f"{ANEW}"
    )


def changed(name: str, key: str, said: str) -> InputError:
    """Return the error of a run that cannot be continued because a chunk is not as the run has left it."""
    return InputError(f"{name} cannot be continued: its chunk {key} was {said}; {ANEW}")
