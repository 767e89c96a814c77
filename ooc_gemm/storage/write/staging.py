"""How C's metadata and chunks reach their places.

folder          write chunk.pending ──► flush the disk ──► chunk.pending → chunk
object store    put chunk                                  one request: it is there whole or not at all
other stores    put chunk                                  by zarr; nothing is known of what was there
"""

import contextlib
import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import zarr

from ...support.buffers import Bytes
from ...support.errors import InputError, StoreError
from ..format import documents
from ..format.chunks import Chunks
from ..format.unfinished import ASIDE, JOURNAL, METADATA, PARTIAL
from ..io import durable, files
from ..io.answers import Answers
from ..io.folder import Folder
from ..io.objects import Objects
from ..io.stamps import Stamp, Stamps, identity, stamp_of
from ..io.zarr_internals import default_buffer_prototype
from . import ownership
from .journal import ANEW, Chunk
from .share import RUN, revoke

PENDING = ".pending"
"""A chunk's file until it goes to its place."""
DIRECT_BYTES = 256 << 20
"""A C this large is written past the page cache, as fast as the disk is. A smaller one takes no time either
way, and is likely to be read next."""

Notice = Callable[[str], None]
Done = Mapping[Chunk, tuple[Stamp, Stamp]]


class Staging(Protocol):
    """Where C is written. Every method may raise OSError, and what a store's client raises."""

    far: bool
    """C is in a store, not on a disk of this machine."""
    background: bool
    """Writes go on by themselves when they are begun."""
    at_once: bool
    """Chunks are in their places when they are written, and only the journal keeps other runs away."""

    def begin(self, key: str, metadata: bytes | None, keep: bool, notice: Notice | None) -> None:
        """Mark C as unfinished: its metadata, or that of the new C, stands aside under the name `key` with
        `PARTIAL`; an old C is no array, and that is durable before any chunk is changed. metadata: of a new
        C; None: C is there and updated. keep: False for a C that need not survive a power cut. notice: called
        before an old array is removed that cannot be kept until C is finished."""

    def proceed(self, done: Done) -> list[Chunk]:
        """Go on where a run was interrupted; the chunks that are not in their places yet. Raises InputError
        where C was changed since."""

    def read(self, key: str) -> bytes | None:
        """A document of C's, None where there is none."""

    def put(self, key: str, document: bytes) -> None:
        """Replace a document of C's in one step."""

    def write(self, chunk: Chunk, data: Bytes | bytes) -> None:
        """Write what is stored of a chunk. `written` is to follow."""

    def start(self, chunk: Chunk, data: Bytes) -> Callable[[], bool]:
        """Begin to write in the background. To be called for the end: whether it was written."""

    def written(self, chunk: Chunk) -> None:
        """A chunk was written; it counts for the next `flush`."""

    def stamps(self, chunk: Chunk) -> tuple[Stamp, Stamp]:
        """The stamps of a chunk that was written, and of the one which it replaces."""

    def flush(self, everything: bool = True) -> None:
        """Make durable what was written. `everything`: as `durable.Disk.flush`."""

    def failure(self) -> OSError | None:
        """What a flush has failed with: what was written since the one before may be lost."""

    def settle(self, chunk: Chunk) -> None:
        """A chunk that was written goes to its place."""

    def drop(self, chunk: Chunk) -> None:
        """Remove a chunk that was written, and is not in its place."""

    def all_stamps(self, grid: Chunk) -> Stamps | None:
        """The stamps of all chunks, in row-major order; None where they cannot be had."""

    def identity(self, chunk: Chunk) -> int:
        """That of a chunk when it went to its place, 0 where it is not known."""

    def publish(self, key: str, metadata: bytes) -> None:
        """C's metadata take their name when all else is durable."""

    def finish(self, key: str) -> str | None:
        """Remove what said that C is not finished, and what C replaces. What to tell the user of what is left
        of that."""

    def discard(self) -> None:
        """Remove a C that can be neither finished nor continued, as far as that is possible."""

    def kept(self) -> str | None:
        """What to tell users of the array that C is to replace, where the run ends before C is finished."""

    def close(self) -> None:
        """Nothing more will be written."""

    def cancel(self) -> None:
        """Wake all threads that wait for an answer."""


class FolderStaging:
    """A local folder (`Staging`)."""

    far, at_once = False, False

    def __init__(self, folder: Folder, array: zarr.Array[Any], name: str):
        """name: how messages call C."""
        self.root = Path(folder.root)
        self._folder, self._name = folder, name
        self._chunks = Chunks(folder, array.metadata)
        self._direct = array.nbytes >= DIRECT_BYTES
        self.background = folder.traits.asynchronous
        self._folders: set[str] = set()
        self._disk: durable.Disk | None = None
        """What flushes the files of this C; None where C is not kept."""
        self._placed: dict[Chunk, int] = {}

    def begin(self, key: str, metadata: bytes | None, keep: bool, notice: Notice | None) -> None:
        """An old array was set aside before (`ownership`)."""
        root = self.root
        if keep:
            self._disk = durable.Disk(root)
        if metadata is None:
            self._check_links()
            if os.path.lexists(root / key) or not os.path.lexists(root / (key + PARTIAL)):
                os.replace(root / key, root / (key + PARTIAL))
        else:
            new = durable.prepare(root / (key + PARTIAL), metadata, flush=False)
            os.replace(new, root / (key + PARTIAL))
            if self._disk:
                self._disk.wrote(str(root / (key + PARTIAL)))
        old = [one for one in METADATA if os.path.lexists(root / one)]
        for one in old:
            (root / one).unlink()
        if old or metadata is None:
            durable.flush_folders(root)

    def proceed(self, done: Done) -> list[Chunk]:
        """Removes what the run has left that does not count."""
        try:
            self._check_links()
        except OSError as error:
            raise InputError(f"{self._name} cannot be continued: {error.strerror}; {ANEW}") from error
        self._disk = durable.Disk(self.root)
        waiting, known = list[Chunk](), set[str]()
        for chunk, (now, _) in done.items():
            path = self._folder.path(self._chunks.key(*chunk))
            if stamp_of(path + PENDING) == now:
                waiting.append(chunk)
            elif stamp_of(path) == now:
                self._placed[chunk] = identity(os.stat(path))
            else:
                sizes = {stamp_of(each)[0] for each in (path, path + PENDING)}
                said = "changed or removed since"
                if now[0] in sizes:
                    said = "changed since, or copied without its times (cp -a and rsync -a keep them)"
                raise _changed(self._name, self._chunks.key(*chunk), said)
            known.add(path + PENDING)
        metadata = {key + PARTIAL for key in METADATA}
        for left in (*self.root.rglob("*" + PENDING), *self.root.glob("*" + PARTIAL)):
            if str(left) not in known and left.name not in metadata:
                left.unlink()
        for folder in self.root.glob(RUN + "*"):
            revoke(folder)
        return waiting

    def read(self, key: str) -> bytes | None:
        """Reads a file."""
        return self._folder.read(key, documents.MAX_BYTES)

    def put(self, key: str, document: bytes) -> None:
        """Replaces a file."""
        durable.replace(self.root / key, document)

    def path(self, chunk: Chunk) -> str:
        """The path of a chunk's file; its folder is made."""
        path = self._folder.path(self._chunks.key(*chunk))
        folder = path.rpartition("/")[0]
        if folder not in self._folders:
            os.makedirs(folder, exist_ok=True)
            check_real(folder, str(self.root))
            self._folders.add(folder)
        return path

    def write(self, chunk: Chunk, data: Bytes | bytes) -> None:
        """Writes a file beside the chunk's place."""
        files.write(self.path(chunk) + PENDING, data, self._direct)

    def start(self, chunk: Chunk, data: Bytes) -> Callable[[], bool]:
        """Begins to write that file."""
        return files.start_write(self.path(chunk) + PENDING, data)

    def take(self, chunk: Chunk, file: str) -> None:
        """A file that somebody else has written becomes that file."""
        os.replace(file, self.path(chunk) + PENDING)

    def written(self, chunk: Chunk) -> None:
        """Remembers the file."""
        if self._disk:
            self._disk.wrote(self.path(chunk) + PENDING)

    def stamps(self, chunk: Chunk) -> tuple[Stamp, Stamp]:
        """Looks at the file beside the chunk's place, and at the one in it."""
        path = self.path(chunk)
        return stamp_of(path + PENDING, self.background), stamp_of(path, self.background)

    def flush(self, everything: bool = True) -> None:
        """Flushes the disk."""
        if self._disk:
            self._disk.flush(everything)

    def failure(self) -> OSError | None:
        """What the first flush that failed has failed with."""
        return self._disk.failed if self._disk else None

    def settle(self, chunk: Chunk) -> None:
        """Renames the file."""
        path = self.path(chunk)
        os.replace(path + PENDING, path)
        if self._disk:
            self._placed[chunk] = identity(os.stat(path))

    def drop(self, chunk: Chunk) -> None:
        """Removes the file beside the chunk's place."""
        with contextlib.suppress(OSError):
            os.unlink(self.path(chunk) + PENDING)

    def all_stamps(self, grid: Chunk) -> Stamps:
        """Lists the folder."""
        return self._chunks.stamps(grid)

    def identity(self, chunk: Chunk) -> int:
        """That of the file in the chunk's place."""
        return self._placed.get(chunk, 0)

    def publish(self, key: str, metadata: bytes) -> None:
        """Flushes the names of all files first, and that of the metadata after."""
        root = self.root
        if self._disk is None:
            durable.replace(root / key, metadata)
            return
        new = durable.prepare(root / key, metadata)
        above = {str(parent) for folder in self._folders for parent in Path(folder).parents}
        above = {folder for folder in above if root in Path(folder).parents}
        self._disk.flush_names({*self._folders, *above, str(root)})
        os.replace(new, root / key)
        durable.flush_folders(root)

    def finish(self, key: str) -> str | None:
        """Removes the array that was set aside."""
        (self.root / (key + PARTIAL)).unlink(missing_ok=True)
        self.close()
        return ownership.drop(self.root)

    def discard(self) -> None:
        """An array that was set aside is there again."""
        self.close()
        with contextlib.suppress(OSError, InputError):
            ownership.discard(self.root, self._name)

    def kept(self) -> str | None:
        """Where the array that was set aside lies."""
        if not ownership.is_kept(self.root):
            return None
        aside = self.root / ASIDE
        return f"the array that {self._name} is to replace is kept as {aside} until {self._name} is finished"

    def close(self) -> None:
        """Closes what flushes the disk."""
        if self._disk:
            self._disk.close()

    def cancel(self) -> None:
        """Local files always answer."""

    def _check_links(self) -> None:
        """Raises OSError where C's chunks are to go through a link, which may lead to another array."""
        for folder in self._folder.folders(self._chunks.pattern):
            check_real(folder, str(self.root))


class ObjectStaging:
    """An address in an object store (`Staging`)."""

    far, background, at_once = True, False, True

    def __init__(self, objects: Objects, array: zarr.Array[Any], name: str):
        """name: how messages call C."""
        self._objects, self._name = objects, name
        self._chunks = Chunks(objects, array.metadata)
        self._partial: dict[str, bytes] = {}
        """The metadata of the C that this run has begun, by key."""
        self._put: dict[Chunk, Stamp] = {}

    def begin(self, key: str, metadata: bytes | None, keep: bool, notice: Notice | None) -> None:
        """Removes an old array, what makes it an array first."""
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
        """What belongs to the array that stands there, finished or not. Raises InputError."""
        keys = [key for key, _ in self._objects.list()]
        found = dict[str, Any]()
        for key in (*METADATA, *(key + PARTIAL for key in METADATA)):
            text = self._objects.read(key, documents.MAX_BYTES) if key in keys else None
            with contextlib.suppress(InputError):
                if text is not None:
                    described = documents.parse(self._name, text)
                    found |= {key: described} if documents.kind(key, described) == "array" else {}
        return ownership.owned(keys, found, self._name)

    def proceed(self, done: Done) -> list[Chunk]:
        """Looks at all chunks."""
        if done:
            grid = max(i for i, _ in done) + 1, max(j for _, j in done) + 1
            stamps = self._chunks.stamps(grid)
            for (i, j), (now, _) in done.items():
                if (*stamps[i * grid[1] + j, :2],) != now:
                    raise _changed(self._name, self._chunks.key(i, j), "changed or removed since")
        if any(self._objects.has(key + PARTIAL) for key in METADATA):  # else C was finished
            self._objects.delete(METADATA)
        return []

    def read(self, key: str) -> bytes | None:
        """Asks for an object, but for metadata that this run has put."""
        return self._partial.get(key) or self._objects.read(key, documents.MAX_BYTES)

    def put(self, key: str, document: bytes) -> None:
        """Puts an object."""
        self._objects.put(key, document)

    def write(self, chunk: Chunk, data: Bytes | bytes) -> None:
        """Puts the object of the chunk."""
        self._put[chunk] = self._objects.put(self._chunks.key(*chunk), data)

    def start(self, chunk: Chunk, data: Bytes) -> Callable[[], bool]:
        """Puts it."""
        self.write(chunk, data)
        return lambda: True

    def written(self, chunk: Chunk) -> None:
        """It is durable already."""

    def stamps(self, chunk: Chunk) -> tuple[Stamp, Stamp]:
        """What the store has said when it was put; what was there before is not known."""
        return self._put.pop(chunk), (0, 0)

    def flush(self, everything: bool = True) -> None:
        """All is durable."""

    def failure(self) -> OSError | None:
        """Returns None."""

    def settle(self, chunk: Chunk) -> None:
        """It is in its place."""
        self._put.pop(chunk, None)

    def drop(self, chunk: Chunk) -> None:
        """It stays."""

    def all_stamps(self, grid: Chunk) -> Stamps:
        """Lists the objects."""
        return self._chunks.stamps(grid)

    def identity(self, chunk: Chunk) -> int:
        """Tags tell all changes."""
        return 0

    def publish(self, key: str, metadata: bytes) -> None:
        """Puts them."""
        self._objects.put(key, metadata)

    def finish(self, key: str) -> str | None:
        """Removes the metadata of the unfinished C."""
        self._objects.delete([key + PARTIAL])
        return None

    def discard(self) -> None:
        """All stays as it is."""

    def kept(self) -> str | None:
        """An old array is not kept."""

    def close(self) -> None:
        """Nothing is open."""

    def cancel(self) -> None:
        """Wakes them."""
        self._objects.cancel()


class StoreStaging:
    """Any other store that zarr can write to (`Staging`)."""

    far, background, at_once = True, False, True

    def __init__(self, array: zarr.Array[Any], name: str, nbytes: int):
        """name: how messages call C. nbytes: of a chunk."""
        self._place, self._metadata, self._name = array.store_path, array.metadata, name
        self._answers = Answers(array.store_path.store, nbytes)

    def begin(self, key: str, metadata: bytes | None, keep: bool, notice: Notice | None) -> None:
        """Chunks of an old array stay until they are replaced."""
        self.put(key + PARTIAL, metadata or document(self, (key, key + PARTIAL), self._name))
        for one in METADATA:
            self._delete(one)

    def proceed(self, done: Done) -> list[Chunk]:
        """There is no journal here."""
        raise NotImplementedError

    def read(self, key: str) -> bytes | None:
        """Asks the store."""
        found = self._answers.of((self._place / key).get())
        return None if found is None else bytes(found.to_bytes())

    def put(self, key: str, document: bytes) -> None:
        """Sets a value."""
        self._answers.of((self._place / key).set(default_buffer_prototype().buffer.from_bytes(document)))

    def write(self, chunk: Chunk, data: Bytes | bytes) -> None:
        """Sets a value of its own, for the store may keep what it is given."""
        self.put(self._metadata.encode_chunk_key(chunk), bytes(data))

    def start(self, chunk: Chunk, data: Bytes) -> Callable[[], bool]:
        """Sets it."""
        self.write(chunk, data)
        return lambda: True

    def written(self, chunk: Chunk) -> None:
        """Nothing is known of how the store keeps it."""

    def stamps(self, chunk: Chunk) -> tuple[Stamp, Stamp]:
        """There is no journal here."""
        raise NotImplementedError

    def flush(self, everything: bool = True) -> None:
        """Nothing can be flushed."""

    def failure(self) -> OSError | None:
        """Returns None."""

    def settle(self, chunk: Chunk) -> None:
        """It is in its place."""

    def drop(self, chunk: Chunk) -> None:
        """It stays."""

    def all_stamps(self, grid: Chunk) -> None:
        """Returns None."""

    def identity(self, chunk: Chunk) -> int:
        """Returns 0."""
        return 0

    def publish(self, key: str, metadata: bytes) -> None:
        """Sets them."""
        self.put(key, metadata)

    def finish(self, key: str) -> str | None:
        """Removes the metadata of the unfinished C."""
        self._delete(key + PARTIAL)
        return None

    def discard(self) -> None:
        """All stays as it is."""

    def kept(self) -> str | None:
        """An old array is not kept."""

    def close(self) -> None:
        """Nothing is open."""

    def cancel(self) -> None:
        """Wakes them."""
        self._answers.cancel()

    def _delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._answers.of((self._place / key).delete())


def document(staging: Staging, keys: tuple[str, ...], name: str) -> bytes:
    """The first of C's documents that is there. `name`: how messages call C. Raises StoreError where none
    is."""
    for key in keys:
        if found := staging.read(key):
            return found
    key = keys[0].removesuffix(PARTIAL)
    raise StoreError(f"{name}: {key} is gone; somebody else changed C while it was being written")


def check_real(folder: str, root: str) -> None:
    """Raises OSError where a folder, or one of those between it and C's own, `root`, is a link: another array
    would be written."""
    while len(folder) > len(root):
        if os.path.islink(folder):
            name = folder[len(root) + 1 :]
            raise OSError(errno.ELOOP, f"its folder {name} is a link, and what it leads to is not C's")
        folder = folder.rpartition("/")[0]


def _changed(name: str, key: str, said: str) -> InputError:
    return InputError(f"{name} cannot be continued: its chunk {key} was {said}; {ANEW}")
