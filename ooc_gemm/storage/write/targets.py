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
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import zarr
from zarr.storage import LocalStore, MemoryStore, StorePath

from ...planning.plan import Part
from ...planning.problem import Matrix, Work
from ...support.buffers import Bytes, give_back, scratch
from ...support.errors import Error, InputError, RangeError, StoreError, remedy
from ..format import codec, codec_memory, documents, shards
from ..format.zarr_internals import default_buffer_prototype, sync
from ..io import durable, files
from ..io.remote import Objects, RemoteFolder, RemoteJournal, why
from ..read.local import Folder, Source, Stamps, identity
from ..read.store import (
    ASIDE,
    METADATA,
    PARTIAL,
    Answers,
    Array,
    array_at,
    compression_of,
    describe,
    document_at,
    explained,
    inner_chunks,
    is_begun,
    is_fortran,
    is_partial,
    kind_at,
    local_path,
    look_at,
    objects_at,
    only_compressor,
    open_array,
    remote_place,
    same_place,
    zarr_source,
)
from . import journal, ownership, provenance
from .consolidated import Consolidated, above, above_objects
from .conversion import convert
from .journal import Journal

PENDING = ".pending"
"""A chunk's file until it goes to its place."""
RUN = ".ooc-gemm-run-"
"""How the folder in C's begins where the workers of a cluster put the chunks that they make."""
SAVED_SECONDS = 2.0
"""After so long what was written is made durable. What takes less is sooner done again."""
DIRECT_BYTES = 256 << 20
"""A C this large is written past the page cache, as fast as the disk is. A smaller one takes no time either
way, and is likely to be read next."""


@dataclass(frozen=True)
class Output:
    """How a new C is stored."""

    shape: tuple[int, int]
    dtype: np.dtype[Any]
    chunks: tuple[int, int]
    shards: tuple[int, int] | None = None
    compressor: str = "none"

    @property
    def encoded(self) -> bool:
        """Whether chunks are stored otherwise than as their elements."""
        return self.shards is not None or self.compressor != "none"

    @property
    def work(self) -> Work:
        """What encoding takes beside a chunk, or shard, and what is stored of it."""
        codecs = [one.to_dict() for one in compressors(self.compressor) or ()]
        each = [codec_memory.encoding(one["name"], one["configuration"]) for one in codecs]
        work = reduce(Work.__add__, each, Work())
        if self.shards is None:
            return work
        chunk = math.prod(self.chunks) * self.dtype.itemsize  # one, what is stored of it, and a copy of that
        return Work(fixed=work.bytes_for(chunk) + 3 * codec.longest(chunk))


def compressors(text: str) -> Any:
    """zarr's codecs for `none`, `zstd`, `zstd:LEVEL` or `blosc`. Raises InputError."""
    from zarr.codecs import BloscCodec, ZstdCodec

    name, _, level = text.partition(":")
    if text == "none":
        return None
    if text == "blosc":
        return [BloscCodec(cname="zstd", clevel=3, shuffle="bitshuffle")]
    with contextlib.suppress(ValueError):
        if name == "zstd":
            return [ZstdCodec(level=int(level or 3))]
    raise InputError(f"{text!r} is not a compressor; choose none, zstd, zstd:LEVEL (up to 22) or blosc")


def check_layout(chunks: tuple[int, int] | None, shards: tuple[int, int] | None, compressor: str) -> None:
    """Refuse a layout of a new array that cannot be. Raises InputError."""
    compressors(compressor)
    for name, sizes in (("chunks", chunks), ("shards", shards)):
        if sizes is not None and (len(sizes) != 2 or min(sizes) < 1):
            raise InputError(f"{name} {sizes} must be two positive numbers; write for example 2048,2048")
    if shards is not None and (chunks is None or any(s % c for s, c in zip(shards, chunks, strict=True))):
        raise InputError(
            f"shards {shards} need chunks that divide them; give both, such as chunks=(512, 512)"
        )


def check_output(spec: Any, inputs: list[Any], force: bool, reads: bool) -> None:
    """Refuse a C that cannot or must not be written; changes nothing. Raises InputError."""
    name = describe(spec)
    for other in inputs:
        if same_place(spec, other):
            raise InputError(
                f"{name} is, contains or lies inside the input {describe(other)}; write C somewhere else"
            )
    place = local_path(spec)
    if place is None:
        if not isinstance(spec, str | zarr.Array):
            raise InputError(f"{name} cannot be written to; give a path, a URL or a zarr.Array as C")
        if not reads and not (isinstance(spec, str) and _is_free(name, spec)):
            kind = kind_at(spec, name) if isinstance(spec, str) else "array"
            _check_replaced(name, kind, force)
            if kind is None:
                _check_begun(name, str(spec), force)
        return
    if reads:
        if not os.access(place, os.W_OK):
            raise InputError(f"{name} cannot be written: permission denied; choose another C")
        return
    for folder in place.parents:
        if _kind_there(folder) == "array":
            raise InputError(f"{name} lies inside the Zarr array {folder}; choose another place")
    if os.path.exists(place):
        found = _kind_there(place)
        if journal.is_held(place):
            raise InputError(f"{name} is being written by another process; wait for it, or stop it")
        partial = ownership.is_unfinished(place, name)
        ours = place.is_dir() and os.access(place, os.R_OK) and ownership.is_ours(place)
        if found is None and not (partial or ours):
            raise InputError(
                f"{name} exists and cannot be opened as a Zarr array; it is left alone, choose another place"
            )
        if partial and not force:
            raise InputError(
                f"{name} is the unfinished result of an interrupted run; continue it with "
                "resume=True, or give force=True to replace it"
            )
        _check_replaced(name, found, force)
        if not ours:
            ownership.survey(place, name)
    parent = place
    while not os.path.exists(parent):
        parent = parent.parent
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise InputError(f"{name} cannot be created: {parent} is not a writable folder; choose another place")


def check_filled(
    array: zarr.Array[Any], shape: tuple[int, int], dtype: np.dtype[Any], given: dict[str, Any], force: bool
) -> None:
    """Refuse an open array that cannot be filled with a result; changes nothing.

    shape, dtype: of the result. given: `chunks`, `shards` and `compressor` as the user gave them, None where
    not. force: an unfinished C is begun anew. Raises InputError.
    """
    name, place = describe(array), local_path(array)
    if array.read_only:
        raise InputError(f"{name} is open for reading only; open it with mode='r+'")
    with explained(name, remote=place is None):
        if place is not None:
            unfinished = is_partial(place)
        else:
            unfinished = bool((there := objects_at(array)) and not _has_metadata(there) and is_begun(there))
    if unfinished and not force:
        raise InputError(
            f"{name} is the unfinished result of an interrupted run; continue it with resume=True, or begin "
            "again with force=True"
        )
    if tuple(array.shape) != shape:
        raise InputError(
            f"{name} has shape {tuple(array.shape)} but the result is {shape[0]}×{shape[1]}; give an array "
            "of that shape"
        )
    if array.dtype.newbyteorder("=") != dtype:
        raise InputError(
            f"{name} holds {array.dtype.name} but the result is {dtype}; give an array of that type, or "
            f"out_dtype={array.dtype.name!r}"
        )
    there_now = {"chunks": tuple(array.chunks), "shards": array.shards and tuple(array.shards)}
    for key, value in given.items():
        if key in ("chunks", "shards", "compressor") and value is not None:
            if key in there_now and tuple(value) == there_now[key]:
                continue
            raise InputError(f"{name} is an open array, which keeps its {key}; leave out {key}")


def _has_metadata(there: Objects) -> bool:
    return any(there.has(key) for key in METADATA)


def _is_free(name: str, spec: str) -> bool:
    """Whether there is nothing at an address, where that can be told."""
    with explained(name, remote=True):
        there = objects_at(spec)
        return there is not None and not there.has_any()


def _check_begun(name: str, spec: str, force: bool) -> None:
    """At an address where no array is there may be an unfinished one, or what is somebody's."""
    with explained(name, remote=True):
        there = objects_at(spec)
        if there is None:
            return
        if not is_begun(there):
            raise InputError(
                f"{name} exists and cannot be opened as a Zarr array; it is left alone, choose another place"
            )
        if not force:
            raise InputError(
                f"{name} is the unfinished result of a run that was interrupted, or still goes on; continue "
                "it with resume=True, or give force=True to replace it"
            )


def _check_replaced(name: str, found: str | None, force: bool) -> None:
    """`found` is the kind of what stands at C's place, None for nothing."""
    if found == "group":
        raise InputError(f"{name} is a Zarr group; name an array inside it, such as {name}/c")
    if found is not None and not force:
        raise InputError(f"{name} exists; give force=True to replace it, or choose another place")


def _kind_there(place: Path) -> str | None:
    """`kind_at` of a folder; None also where it cannot be opened."""
    with contextlib.suppress(InputError):
        return kind_at(str(place), str(place))
    return None


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
        self._folder = Folder(place, array.metadata) if place else None
        as_it_is = self._plain and not self._compressor and array.dtype == block and block.kind in "fc"
        self.background = as_it_is and self._folder is not None and self._folder.background
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
            path = self._folder.path(*chunk)
            if journal.stamp(path + PENDING) == now:
                self._waiting.append(chunk)
            elif journal.stamp(path) == now:
                self._note(chunk, path)
            else:
                sizes = {journal.stamp(each)[0] for each in (path, path + PENDING)}
                said = "changed or removed since"
                if now[0] in sizes:
                    said = "changed since, or copied without its times (cp -a and rsync -a keep them)"
                raise InputError(
                    f"{self.name} cannot be continued: its chunk {self._folder.key(*chunk)} was {said}; "
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
                    path = self._folder.path(*chunks[-1])
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
                    os.unlink(self._folder.path(*chunk) + PENDING)

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
            said = self.groups.enter(*_entry(self._array, self.name))
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
        stamps = provenance.stamps_of(self._array, self.name, self._grid)
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
        stamps = self._folder.stamps(self._grid)
        for (i, j), (now, _) in self._log.done.items():
            at = i * self._grid[1] + j
            noted = 0 if self._placed is None else self._placed[at]
            if (*stamps[at, :2],) != now or noted not in (0, stamps[at, 2]):
                return self._folder.key(i, j)
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
        path = self._folder.path(*chunk)
        folder = path.rpartition("/")[0]
        if folder not in self._folders:
            os.makedirs(folder, exist_ok=True)
            check_real(folder, str(self._folder.root))
            self._folders.add(folder)
        return path

    def _check_links(self) -> None:
        """Raises OSError where C's chunks are to go through a link, which may lead to another array."""
        assert self._folder
        for folder in self._folder.folders():
            check_real(folder, str(self._folder.root))

    def _written(self, chunk: tuple[int, int], path: str) -> None:
        """Its file stands beside its place."""
        if self._disk:
            self._disk.wrote(path + PENDING)
        if self._log is None:
            os.replace(path + PENDING, path)
            return
        now, was = (journal.stamp(each, self.background) for each in (path + PENDING, path))
        if (
            self._old is not None
            and self._folder
            and was != (*self._old[chunk[0] * self._grid[1] + chunk[1], :2],)
        ):
            raise StoreError(
                f"{self.name}: somebody else has changed its chunk {self._folder.key(*chunk)} while C was "
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
        self._chunks = RemoteFolder(objects, name, array.metadata)
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
        left = {*old} - {self._key + PARTIAL, journal.NAME}
        self._objects.delete(sorted(left, key=lambda key: key not in METADATA))

    def _find(self, key: str) -> bytes | None:
        return (key == self._key + PARTIAL and self._described) or super()._find(key)

    def _survey(self) -> list[str]:
        """What belongs to the array that stands there, finished or not. Raises InputError."""
        keys = [key for key, _, _ in self._objects.list()]
        found = dict[str, Any]()
        for key in (*METADATA, *(key + PARTIAL for key in METADATA)):
            text = self._objects.document(key, documents.MAX_BYTES) if key in keys else None
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
        self._objects.delete([self._key + PARTIAL, journal.NAME])
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
        now = self._objects.put(self._chunks.key(*chunk), data)[0]
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


def check_fits(values: Array, dtype: np.dtype[Any], name: str) -> None:
    """Raises RangeError where an integer does not fit the type."""
    if values.size == 0 or np.can_cast(values.dtype, dtype):
        return
    info, low, high = np.iinfo(dtype), values.min(), values.max()
    if int(low) < int(info.min) or int(high) > int(info.max):
        value = low if int(low) < int(info.min) else high
        raise RangeError(f"{name}: the exact value {value} does not fit {dtype}; give a wider out_dtype")


def create_target(
    spec: Any,
    output: Output,
    block: np.dtype[Any],
    head: dict[str, Any] | None = None,
    force: bool = False,
    notice: Callable[[str], None] | None = None,
    keep: bool = True,
) -> Target:
    """A new C, unfinished. An array that stood at its place is set aside, in an object store removed. With
    `head` one in a folder or an object store has a journal, which begins so; `force`: also where another
    run's is there; `notice`: called where the array cannot be set aside and is removed; `keep`: as
    `Target.begin`. Raises InputError where C cannot be begun; then all is as it was."""
    blank = zarr.create_array(
        MemoryStore(),
        shape=output.shape,
        dtype=output.dtype,
        chunks=output.chunks,
        shards=output.shards,
        compressors=compressors(output.compressor),
        filters=None,
    )
    with _begun(spec, head, "cannot be created: {}; choose another place") as log, _forgotten(spec) as groups:
        described = sync((blank.store_path / METADATA[0]).get())
        moved = _set_aside(spec, math.prod(output.shape) * output.dtype.itemsize, notice)
        if log is None and (place := local_path(spec)) is not None:
            ownership.forget_journal(place)
        at = spec.store_path if isinstance(spec, zarr.Array) else _writable_place(spec)
        array = array_at(blank.metadata, at)
        if head and (objects := objects_at(array)):
            log = RemoteJournal.begin(objects, describe(spec), head, force)
        target = target_at(array, describe(spec), block, log)
        target.groups = groups
        try:
            target.begin(described.to_bytes() if described else b"", keep, notice)
        except BaseException as error:
            if moved:
                ownership.restore(moved, [METADATA[0] + PARTIAL])
            if isinstance(log, RemoteJournal) and isinstance(error, InputError):  # nothing was begun
                log.remove()
            raise
    return target


def _set_aside(spec: Any, nbytes: int, notice: Callable[[str], None] | None) -> Path | None:
    """Make room for a C of so many bytes; its folder, where an array was moved that can be moved back."""
    place = local_path(spec)
    if place is None or not os.path.exists(place):
        return None
    keep = ownership.has_room(place, nbytes)
    if not keep and notice and _kind_there(place) == "array":
        notice(
            f"there is no room for another array beside {describe(spec)}: it is removed before its "
            "replacement is made"
        )
    return place if ownership.set_aside(place, describe(spec), keep) else None


def update_target(
    spec: Any, block: np.dtype[Any], head: dict[str, Any] | None, fills: bool = False, force: bool = False
) -> Target:
    """A C that exists, unfinished from now on; as `create_target`. `fills`: what it held is of no account, so
    that it can be continued also in an object store."""
    said = "cannot be updated: {}; it is as it was, see to its disk"
    with _begun(spec, head, said) as log, _forgotten(spec) as groups:
        array = open_existing(spec)
        if fills and head and (objects := objects_at(array)):
            log = RemoteJournal.begin(objects, describe(spec), head, force)
        target = target_at(array, describe(spec), block, log)
        target.groups = groups
        target.begin(None)
    return target


def continued_target(spec: Any, block: np.dtype[Any], log: Journal) -> Target:
    """A C whose run was interrupted. Raises InputError where it was changed since."""
    target = target_at(open_partial(spec), describe(spec), block, log)
    target.proceed()
    with _forgotten(spec) as groups:
        target.groups = groups
    return target


@contextlib.contextmanager
def _forgotten(spec: Any) -> Iterator[Consolidated]:
    """The groups above C, which have no entry of it any more; they have it again where the body fails and C
    is still an array. Raises InputError."""
    groups = groups_of(spec)
    groups.forget()
    try:
        yield groups
    except BaseException:
        enter(spec, groups)
        raise


def groups_of(spec: Any) -> Consolidated:
    """What the groups above C hold of it. Raises InputError."""
    name, place = describe(spec), local_path(spec)
    with explained(name, remote=place is None):
        if place is not None:
            spelled = os.fspath(spec) if isinstance(spec, str | os.PathLike) else ""
            return Consolidated(above(place, None if "://" in spelled else spelled), name)
        objects = objects_at(spec)
        return Consolidated(above_objects(objects) if objects else [], name)


def enter(spec: Any, groups: Consolidated) -> str | None:
    """Give the groups above C the metadata of the array that is there, if it is one. What to tell the user
    where that cannot be."""
    with contextlib.suppress(Error):
        return groups.enter(*_entry(spec, describe(spec)))
    return None


def _entry(spec: Any, name: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The metadata of an array, and its attributes where they stand apart. Raises InputError."""
    at, key, described = look_at(spec, name)
    if documents.kind(key, described) != "array":
        raise InputError(f"{name} is not a Zarr array; check the path")
    if key == METADATA[0]:
        return described, None
    return described, documents.parse(name, document_at(at, ".zattrs") or b"{}")


@contextlib.contextmanager
def _begun(spec: Any, head: dict[str, Any] | None, said: str) -> Iterator[Journal | None]:
    """The journal of a C that is begun inside, if it has one; where that fails, nobody holds it. `said`: what
    to say of an OSError."""
    place, name, log = local_path(spec), describe(spec), None
    missing = [one for one in (place, *place.parents) if not os.path.exists(one)] if place else []
    try:
        with explained(name, remote=place is None):
            try:
                log = Journal.create(place, name, head) if place and head else None
                yield log
            except OSError as error:
                if isinstance(error, Error):
                    raise
                failed, _, usual = said.format(error.strerror or error).partition("; ")
                raise InputError(f"{name} {failed}; {remedy(error, usual)}") from error
    except BaseException:
        if log and place and not is_partial(place):
            log.remove()
        elif log:
            log.close()
        for one in missing:
            with contextlib.suppress(OSError):
                one.rmdir()
        raise


def scratch_folder(spec: Any) -> Path:
    """Where to put what is needed only while C is made: beside C where that is local."""
    place = local_path(spec)
    if place is None:
        return Path(tempfile.gettempdir())
    return next(folder for folder in place.parents if folder.exists())


def target_at(array: zarr.Array[Any], name: str, block: np.dtype[Any], log: Journal | None) -> Target:
    """An unfinished C."""
    objects = objects_at(array, math.prod(array.shards or array.chunks) * array.dtype.itemsize)
    return RemoteTarget(array, name, block, log, objects) if objects else Target(array, name, block, log)


def continued(spec: Any, beta: complex) -> RemoteJournal | provenance.Finished | None:
    """The journal of a run whose C is not in a folder, or C where it is finished; None where it can be begun.
    Raises InputError."""
    name = describe(spec)
    with explained(name, remote=True):
        there = objects_at(spec) if isinstance(spec, str | zarr.Array) else None
        if there is None:
            raise InputError(
                f"{name} cannot be continued, only a C in a local folder or an object store such as s3:// "
                "can; leave out resume=True"
            )
        if not is_begun(there):
            if done := provenance.finished(spec):
                return done
            if beta != 0 or isinstance(spec, zarr.Array) or kind_at(spec, name):
                raise InputError(
                    f"{name} is not the unfinished result of an interrupted run; leave out resume=True"
                )
            return None
        if beta != 0 or not there.has(journal.NAME):
            raise InputError(
                f"{name} cannot be continued: in an object store chunks may have had their beta already; "
                f"{journal.ANEW}"
            )
        log = RemoteJournal.go_on(there, name)
        if log.done or any(there.has(key + PARTIAL) for key in METADATA):
            return log
        log.remove()  # killed before it began: C is what it was, or not there
        return None


def _writable_place(spec: str | os.PathLike[str]) -> StorePath:
    """A local store's folder is made."""
    if place := local_path(spec):
        return StorePath(Answers(LocalStore(place)).of(LocalStore.open(place)))
    return remote_place(os.fspath(spec))


def open_existing(spec: Any) -> zarr.Array[Any]:
    """The C that β·C needs, for reading and writing. Raises InputError."""
    if isinstance(spec, zarr.Array):
        return spec
    name = describe(spec)
    array = open_array(spec, name)
    with explained(name, remote=local_path(spec) is None):
        documents.parse(name, document_at(array.store_path, ".zattrs") or b"{}")  # they are kept
        return array_at(array.metadata, _writable_place(spec))


def open_partial(spec: Any) -> zarr.Array[Any]:
    """A C that is not finished. Raises InputError."""
    name = describe(spec)
    with explained(name, remote=local_path(spec) is None):
        at = spec.store_path if isinstance(spec, zarr.Array) else _writable_place(spec)
        for key in METADATA:
            for path in (key + PARTIAL, key):
                document = document_at(at, path)
                if document is not None:
                    described = documents.check(name, documents.parse(name, document), key)
                    return array_at(described, at)
    raise InputError(f"{name} was hardly begun; {journal.ANEW}")


class ArrayTarget:
    """C as a NumPy array in memory."""

    background = False

    def __init__(self, out: Array, matrix: Matrix, block: np.dtype[Any]):
        self._out, self._matrix, self._block = out, matrix, block
        self.overflowed, self._lock = 0, threading.Lock()

    def cancel(self) -> None:
        """Nobody ever waits."""

    def view(self, part: Part, slot: Bytes) -> Array:
        """Dense at the front of the slot."""
        return (
            slot[: part.rows * part.cols * self._block.itemsize]
            .view(self._block)
            .reshape(part.rows, part.cols)
        )

    def start(self, part: Part, slot: Bytes) -> Callable[[], int]:
        """Nothing yet."""
        return partial(self.write, part, slot)

    def write(self, part: Part, slot: Bytes) -> int:
        """Convert and copy. Raises RangeError for integers that do not fit."""
        inside = self.view(part, slot)
        if self._out.dtype.kind in "iu":
            check_fits(inside, self._out.dtype, "the result")
        row, col = part.chunk[0] * self._matrix.chunk_rows, part.chunk[1] * self._matrix.chunk_cols
        if found := convert(inside, self._out[row : row + part.rows, col : col + part.cols]):
            with self._lock:
                self.overflowed += found
        return part.rows * part.cols * self._out.itemsize
