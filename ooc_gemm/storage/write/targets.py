"""C as it is written.

A chunk is written whole, to a temporary file that is renamed, and never read back. Until the last one is
there, C's metadata stands beside its place under the name `<metadata>.partial`: an unfinished C is no Zarr
array, and nothing can mistake it for a result.
"""

import contextlib
import errno
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import zarr
from zarr.storage import MemoryStore, StorePath

from ...planning.schedule import Part
from ...support.buffers import Bytes, give_back, scratch
from ...support.errors import InputError, StoreError, remedy
from ..format import codec, documents, shards
from ..format.chunks import Chunks
from ..format.unfinished import ASIDE, JOURNAL, METADATA, PARTIAL
from ..io import durable, files
from ..io.answers import Answers
from ..io.folder import Folder
from ..io.objects import Objects, why
from ..io.stamps import Stamps, identity, stamp_of
from ..io.zarr_internals import default_buffer_prototype, sync
from ..read.local import Source
from ..read.store import (
    Array,
    array_at,
    compression_of,
    inner_chunks,
    is_fortran,
    local_path,
    only_compressor,
    zarr_source,
)
from . import journal, ownership, provenance
from .consolidated import Consolidated, entry_of
from .conversion import check_fits, convert
from .journal import Journal
from .reopen import open_partial

PENDING = ".pending"
"""A chunk's file until it goes to its place."""
RUN = ".ooc-gemm-run-"
"""How the folder in C's begins where the workers of a cluster put the chunks that they make."""
SAVED_SECONDS = 2.0
"""After so long what was written is made durable. What takes less is sooner done again."""
DIRECT_BYTES = 256 << 20
"""A C this large is written past the page cache, as fast as the disk is. A smaller one takes no time either
way, and is likely to be read next."""


class Target:
    """The stored C while it is being written. With a journal a chunk goes to its place at the next `save`,
    without one at once."""

    def __init__(self, array: zarr.Array[Any], name: str, block: np.dtype[Any], log: Journal | None = None):
        self.name, self._array, self._block, self._log = name, array, block, log
        self._shape = array.shards or array.chunks
        down, across = (-(-n // max(1, step)) for n, step in zip(array.shape, self._shape, strict=True))
        self._grid = down, across
        self._key = METADATA[0] if array.metadata.zarr_format == 3 else METADATA[1]
        compression = compression_of(array.metadata)
        self._compressor = only_compressor(compression)
        self._plain = array.dtype.isnative and not is_fortran(array.metadata) and array.shards is None
        self._plain = self._plain and (compression == [] or self._compressor is not None)
        inner = inner_chunks(array.metadata) if array.shards and array.dtype.isnative else None
        known = inner and (not inner[1] or only_compressor(inner[1]))
        self._inner = inner if known else None
        """How chunks of shards are stored, where shards are made here."""
        place = local_path(array)
        self._folder = Folder(place) if place else None
        self._chunks: Chunks
        """Where the chunks lie; not set where zarr writes them."""
        if self._folder is not None:
            self._chunks = Chunks(self._folder, array.metadata)
        as_it_is = self._plain and not self._compressor and array.dtype == block and block.kind in "fc"
        self.background = as_it_is and self._folder is not None and self._folder.traits.asynchronous
        """Writes go on by themselves when they are begun."""
        self._encodes = place is not None
        """Chunks are encoded here and go to their places whole, not by zarr."""
        if not self._plain or self._compressor:
            give_back()
        self._direct = array.nbytes >= DIRECT_BYTES
        self._keeps = isinstance(array.store_path.store, MemoryStore)
        """The store may keep what it is given, not a copy of it."""
        store, unit = array.store_path.store, math.prod(self._shape) * array.dtype.itemsize
        self._answers = Answers(store, unit)
        self._folders: set[str] = set()
        self._waiting: list[tuple[int, int]] = []
        """Chunks whose files are not in their places yet."""
        self._lock, self._saving, self._saved = threading.Lock(), threading.Lock(), time.monotonic()
        self.groups = Consolidated([], name)
        """Groups above C, where they are to have C's metadata when it is finished."""
        self._disk: durable.Disk | None = None
        """What flushes the files of this C; None where C is not kept, or is not in a folder."""
        self._old: Stamps | None = None
        self._placed: Stamps | None = None
        self.overflowed = 0
        """Finite elements that are infinite in C, because they are too large for its type."""

    def begin(
        self,
        metadata: bytes | None,
        keep: bool = True,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        """Mark C as unfinished: its metadata, or that of the new C, stands aside; an old C is no array, and
        that is on the disk before any chunk is changed. `metadata`: of a new C; None: C is there and updated.
        `keep`: False for a C that need not survive a power cut. `notice`: called before an old array is
        removed that cannot be kept until C is finished. Raises OSError."""
        if self._folder is None:
            self._set(self._key + PARTIAL, self._metadata() if metadata is None else metadata)
            for key in METADATA:
                self._delete(key)
            return
        root = Path(self._folder.root)
        if keep:
            self._disk = durable.Disk(root)
        if metadata is None:
            self._check_links()
            if os.path.lexists(root / self._key) or not os.path.lexists(root / (self._key + PARTIAL)):
                os.replace(root / self._key, root / (self._key + PARTIAL))
        else:
            new = durable.prepare(root / (self._key + PARTIAL), metadata, flush=False)
            os.replace(new, root / (self._key + PARTIAL))
            if self._disk:
                self._disk.wrote(str(root / (self._key + PARTIAL)))
        old = [key for key in METADATA if os.path.lexists(root / key)]
        for key in old:
            (root / key).unlink()
        if old or metadata is None:
            durable.flush_folders(root)

    def proceed(self) -> None:
        """Go on where a run was interrupted. Raises InputError where C was changed since."""
        assert self._log
        assert self._folder
        try:
            self._check_links()
        except OSError as error:
            raise InputError(f"{self.name} cannot be continued: {error.strerror}; {journal.ANEW}") from error
        self._disk = durable.Disk(Path(self._folder.root))
        known = set()
        for chunk, (now, _) in self._log.done.items():
            path = self._folder.path(self._chunks.key(*chunk))
            if stamp_of(path + PENDING) == now:
                self._waiting.append(chunk)
            elif stamp_of(path) == now:
                self._note(chunk, path)
            else:
                sizes = {stamp_of(each)[0] for each in (path, path + PENDING)}
                said = "changed or removed since"
                if now[0] in sizes:
                    said = "changed since, or copied without its times (cp -a and rsync -a keep them)"
                raise InputError(
                    f"{self.name} cannot be continued: its chunk {self._chunks.key(*chunk)} was {said}; "
                    f"{journal.ANEW}"
                )
            known.add(path + PENDING)
        metadata = {key + PARTIAL for key in METADATA}
        root = Path(self._folder.root)
        for left in (*root.rglob("*" + PENDING), *root.glob("*" + PARTIAL)):
            if str(left) not in known and left.name not in metadata:
                left.unlink()
        for folder in root.glob(RUN + "*"):
            _revoke(folder)

    def discard(self) -> None:
        """Remove a C in a folder that can be neither finished nor continued, as far as that is possible."""
        if self._disk:
            self._disk.close()
        if self._folder is not None:
            with contextlib.suppress(OSError, InputError):
                ownership.discard(Path(self._folder.root), self.name)

    def kept(self) -> str | None:
        """What to tell users of the array that C was to replace, where the run ends before C is finished."""
        if self._folder is None or not ownership.is_kept(self._folder.root):
            return None
        aside = self._folder.root / ASIDE
        return f"the array that {self.name} is to replace is kept as {aside} until {self.name} is finished"

    def source(self) -> Source:
        """What has been written, to be read although it is no array yet."""
        return zarr_source(self.name, self._array)

    def save(self, everything: bool = True) -> None:
        """Chunks that are done go to their places when they, and the line of the journal that says so, are on
        the disk. `everything`: as `Disk.flush`. Raises OSError; where it was the flush that failed, the
        chunks that it was for are not done, and nothing more can be saved."""
        if self._log is None or self._disk is None or self._folder is None:
            return
        with self._saving:
            with self._lock:
                chunks, self._waiting, count = self._waiting, [], self._log.count
            try:
                self._disk.flush(everything)
                if (
                    everything or self._old is not None
                ):  # else a chunk in its place may just as well be made again
                    self._log.durable(count)
                while chunks:
                    path = self._folder.path(self._chunks.key(*chunks[-1]))
                    os.replace(path + PENDING, path)
                    self._note(chunks.pop(), path)
            finally:
                with self._lock:
                    self._waiting += chunks
                if self._disk.failed:
                    self._give_up()
            self._saved = time.monotonic()

    def _give_up(self) -> None:
        """A flush has failed: what was written since the one before may be lost, although it still can be
        read. It has to be made again."""
        assert self._log
        assert self._folder
        with self._lock:
            self._waiting = []
        with contextlib.suppress(OSError):
            for chunk in self._log.undo():
                with contextlib.suppress(OSError):
                    os.unlink(self._folder.path(self._chunks.key(*chunk)) + PENDING)

    def pause(self) -> None:
        """The run ends before C is finished: what is done is kept for the next."""
        if self._log:
            with contextlib.suppress(OSError, ValueError):  # the disk is full; the journal closed
                self.save()
            self._log.close()
        if self._disk:
            self._disk.close()

    def commit(self, made: dict[str, Any] | None = None) -> str | None:
        """All chunks are there: C becomes an array. `made`: what it was made of, for its attributes. What is
        left of an array that C replaces, in words. C's metadata take their name when all else is on the disk,
        and the journal goes when they are. Raises StoreError."""
        try:
            self.save(everything=False)
            self._settle()
            attributes = made and {provenance.ATTRIBUTE: {**made, "result": self._mark()}}
            # A run that was killed right here has done so already.
            described = self._find(self._key + PARTIAL) or self._get(self._key)
            if attributes and self._key == METADATA[0]:
                found = json.loads(described)
                found["attributes"] = {**(found.get("attributes") or {}), **attributes}
                described = json.dumps(found, indent=2).encode()
            elif attributes:
                known = json.loads(self._find(".zattrs") or b"{}")
                self._set(".zattrs", json.dumps({**known, **attributes}, indent=2).encode())
            self._publish(described)
            said = self.groups.enter(*entry_of(self._array, self.name))
            return self._finish() or said
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(
                f"{self.name} cannot be finished: {error.strerror or error}; "
                f"{remedy(error, 'see to its disk')} and go on with "
                "resume=True"
            ) from error

    def _mark(self) -> str | None:
        """What the finished C is known by."""
        stamps = provenance.stamps_of(self._array, self._grid)
        return None if stamps is None else provenance.mark(self._array.metadata, stamps)

    def _settle(self) -> None:
        """All chunks are in their places, and as this run, or the one before, has written them. Raises
        OSError and StoreError."""
        if self._disk is None or self._folder is None:
            return
        if self._log is None:
            self._disk.flush(everything=False)
        if key := self._changed():
            raise StoreError(
                f"{self.name}: somebody else has changed its chunk {key} while C was being written, so C is "
                f"not finished; {journal.ANEW}"
            )

    def _changed(self) -> str | None:
        """The key of a chunk that is not as it was when it was put in its place."""
        if self._log is None or not self._log.done or self._folder is None:
            return None
        stamps = self._chunks.stamps(self._grid)
        for (i, j), (now, _) in self._log.done.items():
            at = i * self._grid[1] + j
            noted = 0 if self._placed is None else self._placed[at]
            if (*stamps[at, :2],) != now or noted not in (0, stamps[at, 2]):
                return self._chunks.key(i, j)
        return None

    def _note(self, chunk: tuple[int, int], path: str) -> None:
        """Remember the file of a chunk, which is in its place now."""
        if self._placed is None:
            self._placed = np.zeros(math.prod(self._grid), np.int64)
        self._placed[chunk[0] * self._grid[1] + chunk[1]] = identity(os.stat(path))

    def expect(self, old: Stamps | None) -> None:
        """C is updated: each chunk must be as it was when C was opened until it is written. `old`: the stamps
        of all chunks then."""
        self._old = old

    def _publish(self, described: bytes) -> None:
        """C's metadata take their name. Raises OSError."""
        if self._folder is None:
            self._set(self._key, described)
            return
        root = Path(self._folder.root)
        if self._disk is None:
            durable.replace(root / self._key, described)
            return
        new = durable.prepare(root / self._key, described)
        above = {str(parent) for folder in self._folders for parent in Path(folder).parents}
        above = {folder for folder in above if root in Path(folder).parents}
        self._disk.flush_names({*self._folders, *above, str(root)})
        os.replace(new, root / self._key)
        durable.flush_folders(root)

    def _finish(self) -> str | None:
        """C is an array: what said that it is not goes, and what it replaces."""
        self._delete(self._key + PARTIAL)
        if self._disk:
            self._disk.close()
        left = ownership.drop(self._folder.root) if self._folder else None
        if self._log:
            self._log.remove()
        return left

    def cancel(self) -> None:
        """Wake who waits for a store to take a chunk."""
        self._answers.cancel()

    def view(self, part: Part, slot: Bytes) -> Array:
        """A whole chunk's room in `slot`; the part of it that lies inside C."""
        return self._chunk(slot)[: part.rows, : part.cols]

    def _chunk(self, slot: Bytes) -> Array:
        rows, cols = self._shape
        return slot[: rows * cols * self._block.itemsize].view(self._block).reshape(rows, cols)

    def start(self, part: Part, slot: Bytes) -> Callable[[], int]:
        """Begin to `write`: in the background, where a chunk is stored as it is. To be called for the end,
        whatever happens."""
        write = partial(self.write, part, slot)
        if not self.background:
            return write
        values = self._padded(part, slot)
        try:
            path = self._path(part.chunk)
            end = files.start_write(path + PENDING, values.reshape(-1).view(np.uint8))
        except OSError:
            return write

        def done() -> int:
            if not end():
                return write()  # or it says what the matter is
            with self._explained(part.chunk):
                self._written(part.chunk, path)
            return values.nbytes

        return done

    def _padded(self, part: Part, slot: Bytes) -> Array:
        values = self._chunk(slot)
        if (part.rows, part.cols) != values.shape:
            values[part.rows :] = 0
            values[: part.rows, part.cols :] = 0
        return values

    def write(self, part: Part, slot: Bytes) -> int:
        """Convert to C's type, encode, write; the bytes moved (decoded ones, where zarr encodes).
        Raises StoreError, and RangeError for integers that do not fit."""
        values = self._chunk(slot)
        inside = values[: part.rows, : part.cols]
        dtype = self._array.dtype
        if dtype.kind in "iu":
            check_fits(inside, dtype, self.name)
        with self._explained(part.chunk):
            if not self._encodes:
                row, col = (index * size for index, size in zip(part.chunk, self._shape, strict=True))
                place = slice(row, row + part.rows), slice(col, col + part.cols)
                converted = inside
                if self._keeps or inside.dtype != dtype:
                    converted = np.empty(inside.shape, dtype)
                    self._overflowed(convert(inside, converted))
                self._answers.of(self._array.async_array.setitem(place, converted))
                return values.size * dtype.itemsize
            data = self._padded(part, slot)
            if values.dtype != dtype:
                data = scratch("converted", values.size * dtype.itemsize)[: values.size * dtype.itemsize]
                data = data.view(dtype).reshape(values.shape)
                self._overflowed(convert(values, data))
            self._write_file(part.chunk, self._encoded(data))
            return data.nbytes

    def _overflowed(self, count: int) -> None:
        """So many elements more."""
        if count:
            with self._lock:
                self.overflowed += count

    @contextlib.contextmanager
    def _explained(self, chunk: tuple[int, int]) -> Iterator[None]:
        """What may fail while a chunk is written. Raises StoreError."""
        try:
            yield
        except (MemoryError, StoreError):
            raise
        except Exception as error:
            key = self._array.metadata.encode_chunk_key(chunk)
            said = (isinstance(error, OSError) and error.strerror) or why(error)
            full = getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT)
            first = "make room there" if full else "see to its disk" if self._folder else "see to its store"
            first = remedy(error, first)
            then = "go on with resume=True" if self._log else "run again with force=True"
            raise StoreError(
                f"{self.name}: chunk {key} cannot be written: {said}; {first} and {then}"
            ) from error

    def _encoded(self, data: Array) -> Bytes | bytes:
        """A whole chunk, or shard, as it is stored."""
        if self._plain:
            return self._compressor.encode(data) if self._compressor else data.reshape(-1).view(np.uint8)
        if self._inner:
            return self._shard(data, *self._inner)
        # zarr's work, in an array of one chunk.
        metadata = {**self._array.metadata.to_dict(), "shape": data.shape}
        described = type(self._array.metadata).from_dict(metadata)
        alone = array_at(described, StorePath(MemoryStore()), {"write_empty_chunks": True})
        alone[...] = data
        made = sync((alone.store_path / alone.metadata.encode_chunk_key((0, 0))).get())
        assert made
        return made.to_bytes()

    def _shard(
        self, data: Array, how: dict[str, Any], compression: list[tuple[str, dict[str, Any]]]
    ) -> Bytes:
        """A shard, in memory that the thread's next call takes again."""
        (height, width), compressor = self._array.chunks, only_compressor(compression)
        down, across = (size // step for size, step in zip(data.shape, (height, width), strict=True))
        most = codec.longest(height * width * data.itemsize)
        chunks = (
            np.ascontiguousarray(data[i * height : (i + 1) * height, j * width : (j + 1) * width])
            for i in range(down)
            for j in range(across)
        )
        encode = compressor.encode if compressor else lambda chunk: chunk.reshape(-1).view(np.uint8)
        into = scratch("shard", shards.most_bytes(down * across, most))
        return shards.make(chunks, encode, down * across, how["index_location"] == "end", into)

    def _write_file(self, chunk: tuple[int, int], data: Bytes | bytes) -> None:
        path = self._path(chunk)
        files.write(path + PENDING, data, self._direct)
        self._written(chunk, path)

    @contextlib.contextmanager
    def run_folder(self) -> Iterator[Path]:
        """For the chunks that workers of a cluster make, while they do. C must be local."""
        assert self._folder
        folder = Path(self._folder.root, RUN + uuid4().hex)
        folder.mkdir()
        try:
            yield folder
        finally:
            _revoke(folder)

    def take(self, chunk: tuple[int, int], file: str) -> None:
        """A chunk that a worker has written, from then on as if written here. Raises StoreError."""
        path = self._path(chunk)
        try:
            os.replace(file, path + PENDING)
            self._written(chunk, path)
        except OSError as error:
            raise StoreError(
                f"{self.name}: a chunk that a worker has written cannot be moved to its place "
                f"({error.strerror or error}); {remedy(error, 'see to its disk')} and go on with resume=True"
            ) from error

    def _path(self, chunk: tuple[int, int]) -> str:
        """Of its file, whose folder is made."""
        assert self._folder
        path = self._folder.path(self._chunks.key(*chunk))
        folder = path.rpartition("/")[0]
        if folder not in self._folders:
            os.makedirs(folder, exist_ok=True)
            check_real(folder, str(self._folder.root))
            self._folders.add(folder)
        return path

    def _check_links(self) -> None:
        """Raises OSError where C's chunks are to go through a link, which may lead to another array."""
        assert self._folder
        for folder in self._folder.folders(self._chunks.pattern):
            check_real(folder, str(self._folder.root))

    def _written(self, chunk: tuple[int, int], path: str) -> None:
        """Its file stands beside its place."""
        if self._disk:
            self._disk.wrote(path + PENDING)
        if self._log is None:
            os.replace(path + PENDING, path)
            return
        now, was = (stamp_of(each, self.background) for each in (path + PENDING, path))
        if (
            self._old is not None
            and self._folder
            and was != (*self._old[chunk[0] * self._grid[1] + chunk[1], :2],)
        ):
            raise StoreError(
                f"{self.name}: somebody else has changed its chunk {self._chunks.key(*chunk)} while C was "
                f"being updated, so C is not finished; {journal.ANEW}"
            )
        with self._lock:
            if self._disk and self._disk.failed:
                raise OSError(self._disk.failed.errno, self._disk.failed.strerror)
            self._log.add(chunk, now, was)
            self._waiting.append(chunk)
        if time.monotonic() > self._saved + SAVED_SECONDS and not self._saving.locked():
            self.save()

    def _place(self, key: str) -> StorePath:
        return self._array.store_path / key

    def _find(self, key: str) -> bytes | None:
        found = self._answers.of(self._place(key).get())
        return None if found is None else bytes(found.to_bytes())

    def _get(self, key: str) -> bytes:
        found = self._find(key)
        if found is None:
            raise StoreError(
                f"{self.name}: {key} is gone; somebody else changed C while it was being written"
            )
        return found

    def _metadata(self) -> bytes:
        """Of a C that exists, also where it is unfinished. Raises StoreError."""
        return self._find(self._key) or self._find(self._key + PARTIAL) or self._get(self._key)

    def _set(self, key: str, value: bytes) -> None:
        if self._folder is not None:
            durable.replace(Path(self._folder.root, key), value)
            return
        self._answers.of(self._place(key).set(default_buffer_prototype().buffer.from_bytes(value)))

    def _delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._answers.of(self._place(key).delete())


class RemoteTarget(Target):
    """C in an object store. A chunk goes to its place at once: there it is whole, or is not."""

    def __init__(
        self, array: zarr.Array[Any], name: str, block: np.dtype[Any], log: Journal | None, objects: Objects
    ):
        super().__init__(array, name, block, log)
        self._objects, self._encodes, self._pause = objects, True, SAVED_SECONDS
        self._chunks = Chunks(objects, array.metadata)
        self._described: bytes | None = None
        """C's metadata, where this run has begun it."""
        self._stamps: Any = None
        """Of its chunks, when all of them were looked at last."""

    def proceed(self) -> None:
        """As in a folder."""
        if key := self._changed():
            raise InputError(
                f"{self.name} cannot be continued: its chunk {key} was changed or removed since; "
                f"{journal.ANEW}"
            )
        self._objects.delete(METADATA)

    def begin(
        self,
        metadata: bytes | None,
        keep: bool = True,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        """As in a folder, with few requests. An old array is removed, what makes it an array first."""
        old = list(METADATA) if metadata is None else self._survey()
        if notice and metadata is not None and any(key in METADATA for key in old):
            notice(
                f"the array at {self.name} is removed before its replacement is made: an object store cannot "
                "set it aside"
            )
        self._described = self._metadata() if metadata is None else metadata
        self._objects.put(self._key + PARTIAL, self._described)
        left = {*old} - {self._key + PARTIAL, JOURNAL}
        self._objects.delete(sorted(left, key=lambda key: key not in METADATA))

    def _find(self, key: str) -> bytes | None:
        return (key == self._key + PARTIAL and self._described) or super()._find(key)

    def _survey(self) -> list[str]:
        """What belongs to the array that stands there, finished or not. Raises InputError."""
        keys = [key for key, _ in self._objects.list()]
        found = dict[str, Any]()
        for key in (*METADATA, *(key + PARTIAL for key in METADATA)):
            text = self._objects.read(key, documents.MAX_BYTES) if key in keys else None
            with contextlib.suppress(InputError):
                if text is not None:
                    described = documents.parse(self.name, text)
                    found |= {key: described} if documents.kind(key, described) == "array" else {}
        return ownership.owned(keys, found, self.name)

    def save(self, everything: bool = True) -> None:
        """The journal says what is done. Raises StoreError."""
        if self._log is None:
            return
        with self._saving:
            with self._lock:
                count = self._log.count
            start = time.monotonic()
            try:
                self._log.durable(count)
            except StoreError:
                raise
            except Exception as error:
                raise StoreError(
                    f"{self.name}: its journal cannot be written ({why(error)}); "
                    f"{remedy(error, 'see to its store')} and go on with resume=True"
                ) from error
            self._saved = time.monotonic()
            self._pause = max(SAVED_SECONDS, 10 * (self._saved - start))

    def commit(self, made: dict[str, Any] | None = None) -> str | None:
        """As in a folder, if all chunks are still this run's: nothing else has kept others away. Raises
        StoreError."""
        try:
            if key := self._changed():
                raise StoreError(
                    f"{self.name}: somebody else has changed chunk {key} while C was being written; run "
                    "again with force=True, or write C elsewhere"
                )
            return super().commit(made)
        except StoreError:
            raise
        except Exception as error:
            then = "go on with resume=True" if self._log else "run again with force=True"
            raise StoreError(
                f"{self.name} cannot be finished ({why(error)}); "
                f"{remedy(error, 'see to its store')} and {then}"
            ) from error

    def _finish(self) -> str | None:
        self._objects.delete([self._key + PARTIAL, JOURNAL])
        if self._log:
            self._log.close()
        return None

    def _mark(self) -> str | None:
        return (
            super()._mark() if self._stamps is None else provenance.mark(self._array.metadata, self._stamps)
        )

    def cancel(self) -> None:
        """Wake who waits for the store to take a chunk."""
        super().cancel()
        self._objects.cancel()

    def _changed(self) -> str | None:
        """The key of a chunk that is not as the journal says."""
        if self._log is None or not self._log.done:
            return None
        across = self._grid[1]
        self._stamps = stamps = self._chunks.stamps(self._grid)
        done = self._log.done.items()
        other = (chunk for chunk, (now, _) in done if (*stamps[chunk[0] * across + chunk[1], :2],) != now)
        return next((self._chunks.key(*chunk) for chunk in other), None)

    def _write_file(self, chunk: tuple[int, int], data: Bytes | bytes) -> None:
        now = self._objects.put(self._chunks.key(*chunk), data)
        if self._log is None:
            return
        with self._lock:
            self._log.add(chunk, now, (0, 0))
        if time.monotonic() > self._saved + self._pause and not self._saving.locked():
            self.save()


def _revoke(folder: Path) -> None:
    """Remove the folder of a run. Workers may still be at work there: under that name they find it no more,
    and stop."""
    gone = folder.with_suffix(".gone")
    with contextlib.suppress(OSError):
        os.replace(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)


class Share(Target):
    """What a worker of a cluster makes of C. It changes nothing of that: its chunks go into the folder of the
    run, each under a name of its own, until the process that keeps the journal takes them over."""

    def __init__(self, spec: Any, name: str, block: np.dtype[Any], folder: Path):
        super().__init__(open_partial(spec), name, block)
        self.background = False
        self._run, self._disk = folder, durable.Disk(folder)
        self.written: list[tuple[tuple[int, int], str]] = []

    def _write_file(self, chunk: tuple[int, int], data: Bytes | bytes) -> None:
        path = str(self._run / uuid4().hex)
        files.write(path, data, self._direct)
        self.written.append((chunk, path))

    def flush(self) -> None:
        """Others that share the disk can rely on what was written. Raises OSError."""
        assert self._disk
        self._disk.flush()


def check_real(folder: str, root: str) -> None:
    """Raises OSError where a folder, or one of those between it and C's own, `root`, is a link: another array
    would be written."""
    while len(folder) > len(root):
        if os.path.islink(folder):
            name = folder[len(root) + 1 :]
            raise OSError(errno.ELOOP, f"its folder {name} is a link, and what it leads to is not C's")
        folder = folder.rpartition("/")[0]
