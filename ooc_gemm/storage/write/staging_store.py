"""C in an object store, or in another store of zarr's: chunks are put to their places at once."""

import contextlib
from collections.abc import Callable
from typing import Any

import zarr

from ...support.buffers import Bytes
from ...support.errors import InputError
from ..format import documents
from ..format.chunks import Chunks
from ..format.unfinished import JOURNAL, METADATA, PARTIAL
from ..io.answers import Answers
from ..io.objects import Objects
from ..io.stamps import Stamp, Stamps
from ..io.zarr_internals import default_buffer_prototype
from ..read.addresses import in_memory, is_transactional, objects_at
from . import ownership
from .journal import Chunk
from .marks import Marks
from .staging import Done, Notice, Staging, changed, document, touched


class ObjectStaging(Staging):
    """Objects below an address of an object store."""

    def __init__(self, objects: Objects, array: zarr.Array[Any], name: str, run: str):
        """objects: those at C's address. array: C. name: how messages call C. run: marks the chunks of this
        run where C is updated."""
        self._objects, self._array, self._name = objects, array, name
        self._marks = Marks(objects, run)
        self._keeps = in_memory(array)
        self._was: Callable[[Chunk], Stamp] | None = None
        self._chunks = Chunks(objects, array.metadata)
        self._partial: dict[str, bytes] = {}
        """The metadata of the C that this run has begun, by key."""
        self._put: dict[Chunk, tuple[Stamp, Stamp]] = {}
        """The stamps of chunks that were put and are not noted yet, and of those that they replace."""

    def begin(self, key: str, metadata: bytes | None, keep: bool, notice: Notice | None) -> None:
        """Removes the objects of an old array, its metadata first."""
        old = list(METADATA) if metadata is None else self._survey()
        if notice and metadata is not None and any(one in METADATA for one in old):
            notice(
                f"the array at {self._name} is removed before its replacement is made: an object store "
                "cannot set it aside"
            )
        described = metadata or document(self, (key, key + PARTIAL), self._name)
        self._objects.put(key + PARTIAL, described)
        self._partial[key + PARTIAL] = described
        left = {*old} - {key + PARTIAL, JOURNAL}
        self._objects.delete(sorted(left, key=lambda one: one not in METADATA))

    def _survey(self) -> list[str]:
        """Return the keys of what belongs to an array at C's address, finished or not. Raises InputError."""
        keys = list(self._objects.all_keys())
        found = dict[str, Any]()
        for key in (*METADATA, *(key + PARTIAL for key in METADATA)):
            text = self._objects.read(key, documents.MAX_BYTES) if key in keys else None
            with contextlib.suppress(InputError):
                if text is not None:
                    described = documents.parse(self._name, text)
                    found |= {key: described} if documents.kind(key, described) == "array" else {}
        return ownership.owned(keys, found, self._name)

    def proceed(self, done: Done) -> list[Chunk]:
        """Compares the stamps of all chunks; removes metadata that a new C was to replace."""
        if done:
            grid = max(i for i, _ in done) + 1, max(j for _, j in done) + 1
            stamps = self._chunks.stamps(grid)
            for (i, j), (now, _) in done.items():
                if (*stamps[i * grid[1] + j, :2],) != now:
                    raise changed(self._name, self._chunks.key(i, j), "changed or removed since")
        if any(self._objects.has(key + PARTIAL) for key in METADATA):  # else C was finished
            self._objects.delete(METADATA)
        return []

    def read(self, key: str) -> bytes | None:
        """Gets an object; metadata that this run has put are in memory."""
        return self._partial.get(key) or self._objects.read(key, documents.MAX_BYTES)

    def put(self, key: str, document: bytes) -> None:
        """Puts the document as an object."""
        self._objects.put(key, document)

    def expect(self, was: Callable[[Chunk], Stamp]) -> None:
        """Lets `Marks` put the chunks."""
        self._was = was

    def write(self, chunk: Chunk, data: Bytes | bytes) -> None:
        """Puts the object of the chunk, or a copy where the store keeps what it is given. Raises StoreError
        where an expected chunk is not there."""
        key, data = self._chunks.key(*chunk), bytes(data) if self._keeps else data
        if self._was is None:
            self._put[chunk] = self._objects.put(key, data), (0, 0)
            return
        was = self._was(chunk)
        now = self._marks.put(key, data, was)
        if now is None:
            raise touched(self._name, key, "updated")
        self._put[chunk] = now, was

    def stamps(self, chunk: Chunk) -> tuple[Stamp, Stamp]:
        """Returns what the store answered when the chunk was put. What was there before is known of an
        updated C only."""
        return self._put.pop(chunk)

    def settle(self, chunks: list[Chunk]) -> None:
        """Does nothing: chunks are in their places already."""
        for chunk in chunks:
            self._put.pop(chunk, None)
        chunks.clear()

    def all_stamps(self, grid: Chunk) -> Stamps:
        """Lists the objects."""
        return self._chunks.stamps(grid)

    def finish(self, key: str) -> str | None:
        """Removes the metadata of the unfinished C."""
        self._objects.delete([key + PARTIAL])
        return None

    def discard(self) -> None:
        """Removes all objects of C. An array that it was to replace is gone."""
        self._objects = objects_at(self._array) or self._objects  # the run has cancelled its requests
        with contextlib.suppress(Exception):  # what is left says that it is unfinished
            self._objects.delete([key for key in self._survey() if key != JOURNAL])

    def cancel(self) -> None:
        """Cancels the requests under way."""
        self._objects.cancel()


class StoreStaging(Staging):
    """Any other store that zarr can write to. An interrupted run cannot be continued there."""

    def __init__(self, array: zarr.Array[Any], name: str, nbytes: int):
        """array: C. name: how messages call C. nbytes: the bytes of a chunk."""
        self._place, self._metadata, self._name = array.store_path, array.metadata, name
        self._answers = Answers(array.store_path.store, nbytes)
        self._transactional = is_transactional(array.store_path.store)

    def begin(self, key: str, metadata: bytes | None, keep: bool, notice: Notice | None) -> None:
        """Leaves chunks of an old array until they are replaced. Metadata keep their name where nobody else
        sees C before it is committed."""
        described = metadata or document(self, (key, key + PARTIAL), self._name)
        if self._transactional:
            self.put(key, described)
            return
        self.put(key + PARTIAL, described)
        for one in METADATA:
            self._delete(one)

    def read(self, key: str) -> bytes | None:
        """Gets a value of the store."""
        if key.endswith(PARTIAL) and self._transactional:
            return None
        found = self._answers.of((self._place / key).get())
        return None if found is None else bytes(found.to_bytes())

    def put(self, key: str, document: bytes) -> None:
        """Sets a value of the store."""
        self._answers.of((self._place / key).set(default_buffer_prototype().buffer.from_bytes(document)))

    def write(self, chunk: Chunk, data: Bytes | bytes) -> None:
        """Sets a copy of the data, because the store may keep what it is given."""
        self.put(self._metadata.encode_chunk_key(chunk), bytes(data))

    def finish(self, key: str) -> str | None:
        """Removes the metadata of the unfinished C."""
        if not self._transactional:
            self._delete(key + PARTIAL)
        return None

    def cancel(self) -> None:
        """Cancels the requests under way."""
        self._answers.cancel()

    def _delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._answers.of((self._place / key).delete())
