"""Zarr arrays as the engine sees them. The only importer of zarr.

Reading. A chunk is *raw* where its file, or its part of a shard, holds nothing but the elements in native
order: a local store, no codec but `bytes` (and a transposition, which makes it the transpose of a C-order
matrix). Raw chunks, and those that one known compressor has made of raw ones, are read without zarr
(local.py). Everything else is decoded by zarr.

Writing. A chunk is written whole, to a temporary file that is renamed, and never read back. Until the
last one is there, C's metadata stands beside its place under the name `<metadata>.partial`: an
unfinished C is no Zarr array, and nothing can mistake it for a result.
"""

import asyncio
import contextlib
import copy
import errno
import json
import math
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import zarr
from zarr.abc.codec import ArrayArrayCodec, BytesBytesCodec, Codec
from zarr.abc.store import RangeByteRequest
from zarr.codecs import ShardingCodec, TransposeCodec
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import _get_loop, sync
from zarr.storage import LocalStore, MemoryStore, ObjectStore, StorePath, WrapperStore

from . import codec, documents, files, journal, redact, shards
from .documents import SUPPORTED
from .errors import NO_MEMORY, Error, InputError, OutOfMemoryError, RangeError, StoreError, no_memory
from .journal import Journal
from .local import CompressedSource, Folder, RawSource, Shards, Source
from .pages import give_back, scratch
from .plan import Matrix, Part, Piece
from .remote import Objects, RemoteFolder, RemoteJournal, address, connect, normal, speaks, why
from .ring import Bytes
from .shared import Shared

T = TypeVar("T")
Array = npt.NDArray[Any]

METADATA = ("zarr.json", ".zarray")
"""Where the metadata of an array stands, of version 3 and of version 2."""
MAX_CHUNK_BYTES = 1 << 48
"""No file is larger: metadata that says so is corrupt."""
MAX_ARRAY_BYTES = 1 << 60
"""Nor is any array."""
MAX_CHUNKS = 1 << 22
"""Chunks of one array that are looked at one by one."""
ELEMENT_BYTES = 16
"""What codecs make of an element on the way takes no more."""
HELD_BY_ZARR = 5
"""Memory, in chunks or shards, that zarr takes to decode one, or to encode it: 2.0 to 4.4 measured over its
codecs, byte orders and versions, of noise, with what it returns."""
PARTIAL = ".partial"
PENDING = ".pending"
"""A chunk's file until it goes to its place."""
RUN = ".ooc-gemm-run-"
"""How the folder in C's begins where the workers of a cluster put the chunks that they make."""
SAVED_SECONDS = 2.0
"""After so long what was written is made durable. What takes less is sooner done again."""
DIRECT_BYTES = 256 << 20
"""A C this large is written past the page cache, as fast as the disk is. A smaller one takes no time either
way, and is likely to be read next."""
TIMEOUT = 60.0
"""Seconds that a store which is not this machine's may take to answer …"""
SLOWEST = 1 << 20
"""… and the bytes that come each second beyond."""


def describe(spec: Any) -> str:
    """How messages name an array: its path or URL as given, or what it is."""
    if isinstance(spec, str | os.PathLike):
        return redact.url(os.fspath(spec)) or "''"
    if isinstance(spec, zarr.Array):
        path = local_path(spec)
        return str(path) if path else redact.redacted(str(spec.store_path))
    return f"the {type(spec).__name__} given"


def local_path(spec: Any) -> Path | None:
    """The folder of a local array or group, symlinks resolved; None for anything else."""
    if isinstance(spec, zarr.Array):
        store = spec.store_path.store
        return (
            Path(os.path.realpath(Path(store.root) / spec.store_path.path))
            if isinstance(store, LocalStore)
            else None
        )
    if not isinstance(spec, str | os.PathLike):
        return None
    text = os.fspath(spec)
    url = urlsplit(text)
    if url.scheme in ("file", "local"):
        return Path(os.path.realpath(unquote(url.path)))
    return None if "://" in text else Path(os.path.realpath(text))


def portable(spec: Any) -> Any:
    """The same array for another process to open, a path where it is local; None where it cannot."""
    if (place := local_path(spec)) is not None:
        return str(place)
    if isinstance(spec, str):
        return spec
    if not isinstance(spec, zarr.Array) or isinstance(spec.store_path.store, MemoryStore):
        return None
    system: Any = getattr(spec.store_path.store, "fs", None)  # dask opens paths through fsspec
    system = getattr(system, "sync_fs", system)
    if "file" in np.atleast_1d(getattr(system, "protocol", "")):
        return os.path.join(getattr(spec.store_path.store, "path", ""), spec.store_path.path).rstrip("/")
    return spec


def is_array(spec: Any) -> bool:
    """Whether zarr has opened it."""
    return isinstance(spec, zarr.Array)


def is_remote(spec: Any) -> bool:
    """Whether an array is, or will be, where requests take a while."""
    if isinstance(spec, zarr.Array):
        return isinstance(spec.store_path.store, ObjectStore)
    return isinstance(spec, str) and local_path(spec) is None


def same_place(one: Any, other: Any) -> bool:
    """Whether two arrays are one, or one's folder lies inside the other's."""
    a, b = local_path(one), local_path(other)
    if a is None or b is None:
        if (
            isinstance(one, zarr.Array)
            and isinstance(other, zarr.Array)
            and one.store_path == other.store_path
        ):
            return True
        urls = [_address(spec) for spec in (one, other)]
        return bool(urls[0] and urls[1]) and (urls[0].startswith(urls[1]) or urls[1].startswith(urls[0]))
    return a == b or a in b.parents or b in a.parents


def _address(spec: Any) -> str:
    """Of what is not local, one for each place, where that is known; or nothing."""
    if isinstance(spec, zarr.Array):
        at = spec.store_path
        root = address(at.store.store) if isinstance(at.store, ObjectStore) else ""
        return root and normal(f"{root}/{at.path}")
    return normal(spec) if isinstance(spec, str) and "://" in spec else ""


# ---------------------------------------------------------------------------------------------- reading


abandoned = threading.Event()
"""Set when nobody waits any longer for what may still keep a thread of a store's."""


class Answers:
    """zarr's `sync` with a time limit, for stores that may never answer."""

    def __init__(self, store: Any, nbytes: int = 0):
        """`nbytes` come or go at a time."""
        self._seconds = None if isinstance(store, LocalStore) else TIMEOUT + nbytes / SLOWEST
        self._waiting: set[Future[Any]] = set()
        self._cancelled = False
        self._lock = threading.Lock()

    def of(self, question: Coroutine[Any, Any, T]) -> T:
        """Its answer. Raises TimeoutError, and what the store raises. A local store ends what it has begun
        even after Ctrl-C: nothing is written after what cleans up."""
        with self._lock:
            future = asyncio.run_coroutine_threadsafe(question, _get_loop())
            self._waiting.add(future)
            if self._cancelled:
                future.cancel()
        try:
            return future.result(self._seconds)
        except TimeoutError:
            if future.done():
                raise
            raise TimeoutError(f"no answer within {self._seconds:.3g} s") from None
        except Exception as error:  # which may be shown in a traceback
            error.args = tuple(redact.redacted(arg) if isinstance(arg, str) else arg for arg in error.args)
            raise
        finally:
            if self._seconds is None:
                wait([future])
            elif future.cancel():
                abandoned.set()
            with self._lock:
                self._waiting.discard(future)

    def cancel(self) -> None:
        """Wake all who wait, with CancelledError, and let nobody wait again, unless the store is local."""
        if self._seconds is None:
            return
        with self._lock:
            self._cancelled = True
            for future in self._waiting:
                future.cancel()


class DecodedSource(Source):
    """Chunks that zarr decodes: remote, of foreign byte order, of several codecs or unknown ones."""

    def __init__(
        self,
        name: str,
        array: zarr.Array[Any],
        matrix: Matrix,
        counter: "_CountingStore | None",
        folder: Folder | None = None,
        most: int = 0,
    ):
        """`folder`: where its files lie, of `most` bytes each, where they are local ones."""
        matrix = replace(matrix, whole=True, held=HELD_BY_ZARR)
        super().__init__(name, array.dtype.newbyteorder("="), matrix)
        self._array, self._counter, self._fortran = array, counter, matrix.transposed
        self._folder, self._most = folder, most
        store = array.store_path.store
        self._answers = Answers(getattr(store, "_store", store), matrix.chunk_bytes)
        give_back()

    def read(self, piece: Piece, slot: Bytes) -> tuple[Array, int]:
        """zarr decodes the chunk; only the piece is kept. Bytes as they lie in the store."""
        s, (i, j) = self.matrix, piece.chunk
        place = self._place(piece, slot)
        rows, cols = slice(*piece.rows), slice(*piece.cols)
        try:
            if self._folder is not None:
                files.check(f"{self._folder.root}/{self._key(piece)}", self._most)
            part = (cols, rows) if self._fortran else (rows, cols)
            found: Any = self._answers.of(self._array.async_array.getitem(part))
        except MemoryError:
            raise
        except TimeoutError as error:
            raise StoreError(
                f"{self.name}: chunk {self._key(piece)} does not come ({error}); see to its store, run again"
            ) from error
        except Exception as error:
            raise StoreError(
                f"{self.name}: chunk {self._key(piece)} cannot be read or decoded "
                f"({documents.short(error)}); write it again"
            ) from error
        if self._folder is not None and not os.path.exists(f"{self._folder.root}/{self._key(piece)}"):
            self._missing(piece, self._key(piece))
        np.copyto(place, found.T if self._fortran else found)
        if self._counter is not None:
            return place, self._counter.taken()
        return place, s.stored[i * s.grid[1] + j] if s.stored else s.chunk_bytes

    def cancel(self) -> None:
        """Wake who waits for a chunk."""
        self._answers.cancel()

    def _key(self, piece: Piece) -> str:
        """The key of the chunk, or of the shard that holds it."""
        element = (piece.cols[0], piece.rows[0]) if self._fortran else (piece.rows[0], piece.cols[0])
        stored = self._array.shards or self._array.chunks
        return str(self._array.metadata.encode_chunk_key(tuple(map(int.__floordiv__, element, stored))))


class ArraySource(Source):
    """Anything with `shape`, `dtype` and slicing. Bytes are those of the elements taken."""

    def __init__(self, name: str, array: Any, matrix: Matrix):
        super().__init__(name, np.dtype(array.dtype).newbyteorder("="), matrix)
        self._array = array

    def read(self, piece: Piece, slot: Bytes) -> tuple[Array, int]:
        """A slice."""
        place = self._place(piece, slot)
        place[...] = np.asarray(self._array[slice(*piece.rows), slice(*piece.span)])
        return place[:, piece.cols[0] - piece.span[0] : piece.cols[1] - piece.span[0]], place.nbytes


class _CountingStore(WrapperStore[Any]):
    """Counts the bytes that reads bring into the process, for stores whose pieces are not files."""

    def __init__(self, store: Any, most: int):
        """No part of a file that is longer than `most` is read: an index may ask for anything."""
        super().__init__(store)
        self.total, self._most = 0, most
        self._lock = threading.Lock()

    def taken(self) -> int:
        """Bytes since the last call. With several readers a byte may be told to another of them."""
        with self._lock:
            total, self.total = self.total, 0
        return total

    def with_read_only(self, read_only: bool = False) -> Any:
        """zarr asks for a read-only view of the store when it opens one."""
        return self

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """As the store's own. Raises ValueError where that is too much."""
        if isinstance(byte_range, RangeByteRequest) and byte_range.end - byte_range.start > self._most:
            raise ValueError(f"its index asks for {byte_range.end - byte_range.start} bytes")
        found = await super().get(key, prototype, byte_range)
        if found is not None:
            with self._lock:
                self.total += len(found)
        return found


def open_source(spec: Any, name: str | None = None) -> Source:
    """An input from a path, URL, zarr.Array, or anything with shape, dtype and slicing; one that is open
    stays as it is. `name` is what messages call it, where that is not plain from `spec`.

    Raises InputError where it is missing, no array, not 2-D, of a type that cannot be multiplied, or its
    metadata cannot be read.
    """
    name = name or describe(spec)
    if isinstance(spec, Source):
        return spec
    if isinstance(spec, zarr.Array):
        array = spec
    elif isinstance(spec, str | os.PathLike):
        array = _open_array(spec, name)
    elif all(hasattr(spec, part) for part in ("shape", "dtype", "__getitem__")):
        check_matrix(name, tuple(spec.shape), spec.dtype)
        return ArraySource(name, spec, _array_matrix(spec))
    else:
        raise InputError(f"{name} is not an array: it has no shape, dtype and slicing")
    check_matrix(name, array.shape, array.dtype)
    with _said(name):
        source = _zarr_source(name, array)
    source.place = local_path(array)
    return source


def _open_array(spec: str | os.PathLike[str], name: str) -> zarr.Array[Any]:
    place = local_path(spec)
    if place is not None:
        if not os.path.exists(place):
            raise InputError(f"{name} does not exist; check the path")
        if is_partial(place):
            raise InputError(
                f"{name} is the unfinished result of an interrupted run; continue that with --resume "
                "(resume=True), or make it again"
            )
    found = _open(os.fspath(spec) if place is None else str(place), name)
    if found is None:
        with _said(name, remote=place is None):
            if place is None and (there := _objects(spec)) and is_begun(there):
                raise InputError(
                    f"{name} is the unfinished result of an interrupted run; continue that with --resume "
                    "(resume=True), or make it again"
                )
        raise InputError(f"{name} is not a Zarr array; check the path")
    if isinstance(found, str):
        raise InputError(f"{name} is a Zarr group, not an array; name one of the arrays in it")
    return found


def _open(path: str, name: str) -> zarr.Array[Any] | str | None:
    """The Zarr array there, "group", None where there is neither. Raises InputError."""
    with _said(name, remote="://" in path):
        at, key, described = _describe(path, name)
        if documents.kind(key, described) == "group":
            return "group"
        return _array_at(documents.check(name, described, key), at) if key else None


def _kind(path: str, name: str) -> str | None:
    """Whether there is an "array", a "group" or neither; an array need be no matrix. Raises InputError."""
    with _said(name, remote="://" in path):
        return documents.kind(*_describe(path, name)[1:])


@Shared
@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _said(name: str, remote: bool = False) -> Iterator[None]:
    """Whatever goes wrong when an array is opened or begun is said in a sentence, and warnings are not."""
    try:
        with _without_warnings:
            yield
    except Error:
        raise
    except Exception as error:
        raise _unusable(name, error, remote) from error


def _describe(path: str, name: str) -> tuple[StorePath, str, dict[str, Any]]:
    """Where there may be an array or a group, the key of its metadata, and that. An empty key where there is
    neither. (zarr.open, which does this and more, reads and believes all there is.)"""
    at = _remote_place(path) if "://" in path else StorePath(LocalStore(path, read_only=True))
    for key in (*METADATA, ".zgroup"):
        document = _document(at, key)
        if document is not None:
            return at, key, documents.parse(name, document)
    return at, "", {}


def _document(at: StorePath, key: str) -> bytes | None:
    """One of the metadata documents, or more than there may be of it. Raises OSError."""
    if isinstance(at.store, LocalStore):
        return files.read_small(Path(at.store.root) / key, documents.MAX_BYTES)
    if isinstance(at.store, ObjectStore):
        return Objects(at.store.store, at.path, Answers(at.store)).document(key, documents.MAX_BYTES)
    most = RangeByteRequest(0, documents.MAX_BYTES + 1)
    found = Answers(at.store).of((at / key).get(default_buffer_prototype(), most))
    return None if found is None else bytes(found.to_bytes())


def _unusable(name: str, error: Exception, remote: bool) -> Error:
    """What went wrong when an array was opened or begun, and what to do."""
    if no_memory(error):
        return OutOfMemoryError(NO_MEMORY)
    if isinstance(error, ImportError):
        return InputError(f"{name} needs a package that is not installed: {error}")
    if isinstance(error, PermissionError) and not remote:
        return InputError(f"{name} cannot be read: permission denied; change its permissions")
    if "data type" in str(error):
        return InputError(
            f"{name} holds what cannot be multiplied ({_one_line(error)}); convert it to one of {SUPPORTED}"
        )
    if remote:
        return InputError(f"{name} cannot be reached ({_one_line(error)}); check its address and credentials")
    return InputError(
        f"{name}: its Zarr metadata cannot be used ({_one_line(error)}); repair or rewrite the array"
    )


def _one_line(error: Exception) -> str:
    return documents.short(f"{type(error).__name__}: {why(error)}")


@contextlib.contextmanager
def _fast_codecs() -> Iterator[None]:
    """Arrays made inside use the `zarrs` codec pipeline where it is installed: which takes what decompressors
    make, however much that is."""
    try:
        import zarrs  # noqa: F401
    except ImportError:
        yield
        return
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        yield


def matrix_dtype(asked: Any) -> np.dtype[Any]:
    """The native data type a user asks for. Raises InputError where matrices cannot be of it."""
    try:
        dtype: np.dtype[Any] = np.dtype(asked).newbyteorder("=")
        check_matrix("", (1, 1), dtype)
    except (TypeError, ValueError, SyntaxError) as error:
        raise InputError(f"matrices cannot be of type {asked!r}; choose one of {SUPPORTED}") from error
    return dtype


def check_matrix(name: str, shape: tuple[int, ...], dtype: Any) -> None:
    """Refuse what is not 2-D or holds what cannot be multiplied. Raises InputError."""
    if len(shape) != 2:
        raise InputError(f"{name} has shape {tuple(shape)}, but a matrix has two dimensions; reshape it")
    try:
        known = np.dtype(dtype)
    except TypeError:
        known = np.dtype(object)
    if known.kind not in "iufc" or known.name in ("float128", "complex256", "longdouble", "clongdouble"):
        raise InputError(
            f"{name} holds {dtype}, which cannot be multiplied; convert it to one of {SUPPORTED}"
        )


def _array_matrix(array: Any) -> Matrix:
    """Full rows as chunks: slices of those never reach past the array."""
    rows, cols = map(int, array.shape)
    return Matrix(
        rows, cols, np.dtype(array.dtype).itemsize, max(1, min(rows, 1024)), max(1, cols), chunked=False
    )


def _zarr_source(name: str, array: zarr.Array[Any]) -> Source:
    try:
        chunk = tuple(int(c) for c in array.chunks)
    except Exception as error:
        raise InputError(f"{name} has irregular chunks; rechunk it to a regular grid") from error
    at, fortran = array.store_path, _is_fortran(array.metadata)
    shape = array.shape
    if fortran:
        shape, chunk = shape[::-1], chunk[::-1]
    if any(c < 1 <= extent for c, extent in zip(chunk, shape, strict=True)):
        raise InputError(f"{name}: chunks of shape {array.chunks} cannot be right; repair its metadata")
    size, chunk = array.dtype.itemsize, tuple(max(1, c) for c in chunk)
    matrix = Matrix(shape[0], shape[1], size, chunk[0], chunk[1], transposed=fortran, fortran=fortran)
    if matrix.chunk_bytes > MAX_CHUNK_BYTES:
        raise InputError(f"{name}: chunks of {matrix.chunk_bytes} bytes cannot be right; repair its metadata")
    if math.prod(shape) * size > MAX_ARRAY_BYTES:
        raise InputError(f"{name}: a shape of {array.shape} cannot be right; repair its metadata")
    if matrix.grid[0] * matrix.grid[1] > MAX_CHUNKS:
        down, across = matrix.grid[::-1] if fortran else matrix.grid
        raise InputError(f"{name} has {down}×{across} chunks; rechunk it to larger ones")
    outer = matrix
    if array.shards is not None:  # which zarr says where they are all that is done to the elements
        outer = replace(matrix, chunk_rows=array.shards[0], chunk_cols=array.shards[1])
        _check_shards(name, matrix, outer)
    if isinstance(at.store, LocalStore):
        folder = Folder(Path(at.store.root) / at.path, array.metadata, fortran)
        return _folder_source(name, array, matrix, outer, folder)
    if not isinstance(at.store, ObjectStore):
        return _decoded_source(name, array, matrix)
    objects = Objects(at.store.store, at.path, Answers(at.store, outer.chunk_bytes))
    matrix = replace(matrix, remote=True)
    if objects.tells:
        distant = RemoteFolder(objects, name, array.metadata, fortran)
        source = _folder_source(name, array, matrix, outer, distant)
    else:
        source = _decoded_source(name, array, matrix)
    source.latency = objects.latency
    return source


def _check_shards(name: str, s: Matrix, outer: Matrix) -> None:
    """Their indices are held in memory, also where the shards reach far beyond the array."""
    chunks = math.prod(outer.grid) * (outer.chunk_rows // s.chunk_rows) * (outer.chunk_cols // s.chunk_cols)
    if outer.chunk_bytes > MAX_CHUNK_BYTES or chunks > MAX_CHUNKS:
        raise InputError(f"{name}: shards of {chunks} chunks cannot be right; repair its metadata")


def _folder_source(name: str, array: zarr.Array[Any], s: Matrix, outer: Matrix, folder: Folder) -> Source:
    """`outer`: the matrix in chunks that are files, or objects."""
    metadata, dtype, shard = array.metadata, array.dtype, array.shards
    stamps = folder.stamps(outer.grid)
    sizes = tuple(np.maximum(stamps[:, 0], stamps.any(axis=1)).tolist())  # an empty file is there, too
    inner = _inner(metadata) if shard else None
    compression = inner[1] if inner else None if shard else _compression(metadata)
    compressor = _only_compressor(compression)
    source: Source
    if dtype.isnative and (compression == [] or compressor):
        fill = dtype.type(0) if array.fill_value is None else array.fill_value
        if inner and shard:
            at_end = inner[0]["index_location"] == "end"
            folder = shards_of = Shards(folder, s, outer, sizes, at_end)
            sizes = shards_of.sizes
        if compressor:
            s = replace(s, whole=True, stored=sizes)
            source = CompressedSource(name, dtype, fill, s, folder, compressor)
        else:
            source = RawSource(name, dtype, fill, _with_missing(s, sizes), folder)
    else:
        s = replace(s, stored=_shares(s, outer, sizes) if shard else sizes)
        source = _decoded_source(name, array, s, None if s.remote else folder)
    source.stamps = stamps
    source.description = json.dumps({**metadata.to_dict(), "attributes": {}}, default=str).encode()
    return source


def _decoded_source(name: str, array: zarr.Array[Any], s: Matrix, folder: Folder | None = None) -> Source:
    """Chunks that zarr decodes, with codecs that stay within bounds. Its `zarrs` pipeline, which knows no
    bounds, has those that no codec could exceed; it refuses types of foreign byte order (v2 has them), and of
    a part of a chunk in foreign byte order (v3) it gives wrong complex numbers, without a word."""
    metadata, at = array.metadata, array.store_path
    bounded, most = _bounded(metadata)
    counter = _CountingStore(at.store, most) if folder is None or array.shards else None
    fast = bounded is metadata and array.dtype.isnative and array.dtype.kind != "c"
    with _fast_codecs() if fast else contextlib.nullcontext():
        array = _array_at(bounded, StorePath(counter, at.path) if counter else at)
    if array.order == "F":  # how zarr lays out what it returns; the codec pipelines are for C order
        array = array.with_config({"order": "C"})
    return DecodedSource(name, array, s, counter, folder, most)


@dataclass(frozen=True, eq=False)
class _BoundedCodec(BytesBytesCodec):
    """A compressor, for zarr to decode with."""

    codec: codec.Bounded
    is_fixed_size = False

    async def _decode_single(self, data: Any, spec: Any) -> Any:
        found = await asyncio.to_thread(self.codec.decode, data.as_numpy_array())
        return spec.prototype.buffer.from_array_like(found)

    def compute_encoded_size(self, input_byte_length: int, _chunk_spec: Any) -> int:
        """Not known."""
        raise NotImplementedError


def _bounded(metadata: Any) -> tuple[Any, int]:
    """The metadata with codecs that cannot make more of a chunk than it may be, and the most bytes of a file.
    The same metadata where no codec could."""
    if metadata.zarr_format == 3:
        elements = math.prod(metadata.chunk_grid.chunk_shape)
        codecs, most, _ = _bounded_chain(metadata.codecs, elements, metadata.data_type.item_size)
        if codecs == metadata.codecs:
            return metadata, most
        metadata = copy.copy(metadata)
        object.__setattr__(metadata, "codecs", codecs)
        return metadata, most
    most = math.prod(metadata.chunks) * (ELEMENT_BYTES if metadata.filters else metadata.dtype.item_size)
    room, filters, one = codec.longest(most), metadata.filters, metadata.compressor
    if not filters and one is None:
        return metadata, room
    metadata = copy.copy(metadata)
    if filters:
        bounded = tuple(codec.Bounded(each.codec_id, each, room, False) for each in filters)
        object.__setattr__(metadata, "filters", bounded)
    if one is not None:
        one = codec.Bounded(one.codec_id, one, room if filters else most, not filters)
        object.__setattr__(metadata, "compressor", one)
    return metadata, room


def _bounded_chain(chain: tuple[Any, ...], elements: int, itemsize: int) -> tuple[tuple[Any, ...], int, bool]:
    """The codecs, the most bytes they make of so many elements, and whether they always do."""
    made, size, exact = [], elements * itemsize, True
    for one in chain:
        described = one.to_dict()
        known = described["name"].removeprefix("numcodecs.")
        if isinstance(one, ShardingCodec):
            inner = math.prod(one.chunk_shape)
            codecs, most, _ = _bounded_chain(one.codecs, inner, itemsize)
            size, exact = elements // inner * (most + 16) + 4, False
            one = one if codecs == one.codecs else replace(one, codecs=codecs)
        elif isinstance(one, ArrayArrayCodec) and known != "transpose":
            size, exact = elements * ELEMENT_BYTES, False
        elif known in documents.COMPRESSORS:
            configuration = dict(described.get("configuration", {}))
            one = _BoundedCodec(codec.bounded(known, configuration, size, exact))
            size, exact = codec.longest(size), False
        elif known in documents.CHECKSUMS:
            size += 4
        made.append(one)
    return tuple(made), size, exact


def _array_at(metadata: Any, place: StorePath) -> zarr.Array[Any]:
    """An array of this metadata at a place where none is stored (yet)."""
    return zarr.Array(zarr.AsyncArray(metadata, place))


def _is_fortran(metadata: Any) -> bool:
    if metadata.zarr_format == 2:
        return bool(metadata.order == "F")
    codecs: tuple[Codec, ...] = metadata.codecs
    return isinstance(codecs[0], TransposeCodec) and tuple(codecs[0].order) == (1, 0)


def _only_compressor(compression: list[tuple[str, dict[str, Any]]] | None) -> codec.Compressor | None:
    """The compressor, where it is known and the only codec beside those of plain chunks."""
    return codec.find(*compression[0]) if compression and len(compression) == 1 else None


def _compression(metadata: Any) -> list[tuple[str, dict[str, Any]]] | None:
    """Names and configurations of the codecs that make a file of the elements in native order, which may
    have been transposed; None where the elements are made something else of first."""
    if metadata.zarr_format == 2:
        if metadata.filters:
            return None
        described = [metadata.compressor.get_config()] if metadata.compressor is not None else []
        return [(one.pop("id"), one) for one in described]
    return _beyond_bytes([one.to_dict() for one in metadata.codecs[1 if _is_fortran(metadata) else 0 :]])


def _beyond_bytes(chain: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]] | None:
    """The codecs behind `bytes` in native order; None where that is not the first."""
    described = [(str(one["name"]), dict(one.get("configuration", {}))) for one in chain]
    if not described or described[0] not in (("bytes", {}), ("bytes", {"endian": sys.byteorder})):
        return None
    return described[1:]


def _inner(metadata: Any) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]] | None:
    """How shards are made and what their chunks are compressed with; None where only zarr can tell."""
    described = [one.to_dict() for one in metadata.codecs]
    if len(described) != 1 or described[0]["name"] != "sharding_indexed":
        return None
    configuration = described[0]["configuration"]
    compression = _beyond_bytes(list(configuration["codecs"]))
    return None if compression is None or not shards.is_known(configuration) else (configuration, compression)


def _with_missing(s: Matrix, sizes: tuple[int, ...]) -> Matrix:
    return s if all(sizes) else replace(s, stored=tuple(s.chunk_bytes if size else 0 for size in sizes))


def _shares(s: Matrix, outer: Matrix, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """For every chunk an even share of its shard's file."""
    down, across = outer.chunk_rows // s.chunk_rows, outer.chunk_cols // s.chunk_cols
    rows, cols = s.grid
    return tuple(
        sizes[i // down * outer.grid[1] + j // across] // (down * across)
        for i in range(rows)
        for j in range(cols)
    )


# ---------------------------------------------------------------------------------------------- writing


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
        """Whether zarr must encode the chunks."""
        return self.shards is not None or self.compressor != "none"


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
        raise InputError(f"shards {shards} need chunks that divide them; give both, such as --chunks 512,512")


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
            kind = _kind(spec, name) if isinstance(spec, str) else "array"
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
        partial = is_partial(place)
        empty = place.is_dir() and os.access(place, os.R_OK)
        # Of a run that was killed before it had written C's metadata there may be this much.
        empty = empty and all(
            entry.name == journal.NAME or entry.suffix == PARTIAL for entry in place.iterdir()
        )
        if found is None and not (partial or empty):
            raise InputError(
                f"{name} exists and cannot be opened as a Zarr array; it is left alone, choose another place"
            )
        if partial and not force:
            raise InputError(
                f"{name} is the unfinished result of an interrupted run; continue it with --resume "
                "(resume=True), or give -f (force=True) to replace it"
            )
        _check_replaced(name, found, force)
    parent = place
    while not os.path.exists(parent):
        parent = parent.parent
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise InputError(f"{name} cannot be created: {parent} is not a writable folder; choose another place")


def _is_free(name: str, spec: str) -> bool:
    """Whether there is nothing at an address, where that can be told."""
    with _said(name, remote=True):
        there = _objects(spec)
        return there is not None and not there.has_any()


def _check_begun(name: str, spec: str, force: bool) -> None:
    """At an address where no array is there may be an unfinished one, or what is somebody's."""
    with _said(name, remote=True):
        there = _objects(spec)
        if there is None:
            return
        if not is_begun(there):
            raise InputError(
                f"{name} exists and cannot be opened as a Zarr array; it is left alone, choose another place"
            )
        if not force:
            raise InputError(
                f"{name} is the unfinished result of a run that was interrupted, or still goes on; continue "
                "it with --resume (resume=True), or give -f (force=True) to replace it"
            )


def is_begun(there: Objects) -> bool:
    """Whether a C that is not finished stands in an object store, or one is begun."""
    return any(there.has(key) for key in (*(key + PARTIAL for key in METADATA), journal.NAME))


def is_partial(place: Path) -> bool:
    """Whether a C that is not finished stands there."""
    return any(os.path.exists(place / (key + PARTIAL)) for key in METADATA)


def _check_replaced(name: str, found: str | None, force: bool) -> None:
    """`found` is the kind of what stands at C's place, None for nothing."""
    if found == "group":
        raise InputError(f"{name} is a Zarr group; name an array inside it, such as {name}/c")
    if found is not None and not force:
        raise InputError(f"{name} exists; give -f (force=True) to replace it, or choose another place")


def _kind_there(place: Path) -> str | None:
    """`_kind` of a folder; None also where it cannot be opened."""
    with contextlib.suppress(InputError):
        return _kind(str(place), str(place))
    return None


class Target:
    """The stored C while it is being written. With a journal a chunk goes to its place at the next `save`,
    without one at once."""

    def __init__(self, array: zarr.Array[Any], name: str, block: np.dtype[Any], log: Journal | None = None):
        self.name, self._array, self._block, self._log = name, array, block, log
        self._shape = array.shards or array.chunks
        self._key = METADATA[0] if array.metadata.zarr_format == 3 else METADATA[1]
        compression = _compression(array.metadata)
        self._compressor = _only_compressor(compression)
        self._plain = array.dtype.isnative and not _is_fortran(array.metadata) and array.shards is None
        self._plain = self._plain and (compression == [] or self._compressor is not None)
        place = local_path(array)
        self._folder = Folder(place, array.metadata) if place else None
        self._encodes = place is not None
        """Chunks are encoded here and go to their places whole, not by zarr."""
        if not self._plain:
            give_back()
        self._direct = array.nbytes >= DIRECT_BYTES
        self._keeps = isinstance(array.store_path.store, MemoryStore)
        """The store may keep what it is given, not a copy of it."""
        store, unit = array.store_path.store, math.prod(self._shape) * array.dtype.itemsize
        self._answers = Answers(store, unit)
        self._folders: set[str] = set()
        self._waiting: list[str] = []
        """Files that are not in their places yet."""
        self._lock, self._saving, self._saved = threading.Lock(), threading.Lock(), time.monotonic()
        self._durable = False

    def begin(self, metadata: bytes | None) -> None:
        """Mark C as unfinished: its metadata, or that of the new C, stands aside; an old C is no array."""
        self._set(self._key + PARTIAL, self._get(self._key) if metadata is None else metadata)
        for key in METADATA:
            self._delete(key)

    def proceed(self) -> None:
        """Go on where a run was interrupted. Raises InputError where C was changed since."""
        assert self._log
        assert self._folder
        known = set()
        for chunk, (now, _) in self._log.done.items():
            path = self._folder.path(*chunk)
            if journal.stamp(path + PENDING) == now:
                self._waiting.append(path)
            elif journal.stamp(path) != now:
                raise InputError(
                    f"{self.name} cannot be continued: its chunk {self._folder.key(*chunk)} was changed or "
                    f"removed since; {journal.ANEW}"
                )
            known.add(path + PENDING)
        metadata = {key + PARTIAL for key in METADATA}
        root = Path(self._folder.root)
        for left in (*root.rglob("*" + PENDING), *root.glob("*" + PARTIAL)):
            if str(left) not in known and left.name not in metadata:
                left.unlink()
        for folder in root.glob(RUN + "*"):
            _revoke(folder)
        self._durable = bool(self._log.done)

    def clear(self) -> None:
        """Remove what is left of an old C. Raises StoreError."""
        if self._folder is None:
            return
        try:
            for entry in Path(self._folder.root).iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry.name not in (self._key + PARTIAL, journal.NAME):
                    entry.unlink()
        except OSError as error:
            raise StoreError(f"{self.name}: its old chunks cannot be removed: {error}") from error

    def source(self) -> Source:
        """What has been written, to be read although it is no array yet."""
        return _zarr_source(self.name, self._array)

    def save(self, durable: bool) -> None:
        """Chunks that are done go to their places; `durable`: when they are on the disk. Raises OSError."""
        if self._log is None or self._folder is None:
            return
        with self._saving:
            with self._lock:
                paths, self._waiting, count = self._waiting, [], self._log.count
            try:
                if durable:
                    files.flush(self._folder.root)
                    self._log.durable(count)
                while paths:
                    os.replace(paths[-1] + PENDING, paths[-1])
                    paths.pop()
            finally:
                with self._lock:
                    self._waiting += paths
            self._durable |= durable
            self._saved = time.monotonic()

    def pause(self) -> None:
        """The run ends before C is finished: what is done is kept for the next."""
        if self._log:
            with contextlib.suppress(OSError, ValueError):  # the disk is full; the journal closed
                self.save(durable=True)
            self._log.close()

    def commit(self, attributes: dict[str, Any] | None = None) -> None:
        """All chunks are there: C becomes an array, with some attributes more. Raises StoreError."""
        try:
            self.save(self._durable)
            # A run that was killed right here has done so already.
            described = self._find(self._key + PARTIAL) or self._get(self._key)
            if attributes and self._key == METADATA[0]:
                found = json.loads(described)
                found["attributes"] = {**(found.get("attributes") or {}), **attributes}
                described = json.dumps(found, indent=2).encode()
            elif attributes:
                known = json.loads(self._find(".zattrs") or b"{}")
                self._set(".zattrs", json.dumps({**known, **attributes}, indent=2).encode())
            self._set(self._key, described)
            self._finish()
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(
                f"{self.name} cannot be finished: {error.strerror or error}; see to its disk and go on with "
                "--resume (resume=True)"
            ) from error

    def _finish(self) -> None:
        """C is an array: what said that it is not goes."""
        self._delete(self._key + PARTIAL)
        if self._log:
            self._log.remove()

    def cancel(self) -> None:
        """Wake who waits for a store to take a chunk."""
        self._answers.cancel()

    def view(self, part: Part, slot: Bytes) -> Array:
        """A whole chunk's room in `slot`; the part of it that lies inside C."""
        return self._chunk(slot)[: part.rows, : part.cols]

    def _chunk(self, slot: Bytes) -> Array:
        rows, cols = self._shape
        return slot[: rows * cols * self._block.itemsize].view(self._block).reshape(rows, cols)

    def write(self, part: Part, slot: Bytes) -> int:
        """Convert to C's type, encode, write; the bytes moved (decoded ones, where zarr encodes).
        Raises StoreError, and RangeError for integers that do not fit."""
        values = self._chunk(slot)
        inside = values[: part.rows, : part.cols]
        dtype = self._array.dtype
        if dtype.kind in "iu":
            check_fits(inside, dtype, self.name)
        try:
            if not self._encodes:
                row, col = (index * size for index, size in zip(part.chunk, self._shape, strict=True))
                place = slice(row, row + part.rows), slice(col, col + part.cols)
                with np.errstate(over="ignore"):
                    converted = inside.astype(dtype, copy=self._keeps)
                self._answers.of(self._array.async_array.setitem(place, converted))
                return values.size * dtype.itemsize
            values[part.rows :] = 0
            values[: part.rows, part.cols :] = 0
            data = values
            if values.dtype != dtype:
                data = scratch("converted", values.size * dtype.itemsize)[: values.size * dtype.itemsize]
                data = data.view(dtype).reshape(values.shape)
                with np.errstate(over="ignore"):
                    np.copyto(data, values, casting="unsafe")
            self._write_file(part.chunk, self._encoded(data))
            return data.nbytes
        except (MemoryError, StoreError):
            raise
        except Exception as error:
            key = self._array.metadata.encode_chunk_key(part.chunk)
            said = (isinstance(error, OSError) and error.strerror) or why(error)
            full = getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT)
            first = "make room there" if full else "see to its disk" if self._folder else "see to its store"
            then = "go on with --resume (resume=True)" if self._log else "run again with -f (force=True)"
            raise StoreError(
                f"{self.name}: chunk {key} cannot be written: {said}; {first} and {then}"
            ) from error

    def _encoded(self, data: Array) -> Bytes | bytes:
        """A whole chunk, or shard, as it is stored."""
        if self._plain:
            return self._compressor.encode(data) if self._compressor else data.reshape(-1).view(np.uint8)
        # zarr's work, in an array of one chunk.
        metadata = {**self._array.metadata.to_dict(), "shape": data.shape}
        alone = _array_at(type(self._array.metadata).from_dict(metadata), StorePath(MemoryStore()))
        alone.with_config({"write_empty_chunks": True})[...] = data
        made = sync((alone.store_path / alone.metadata.encode_chunk_key((0, 0))).get())
        assert made
        return made.to_bytes()

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
                f"({error.strerror or error}); see to its disk and go on with --resume (resume=True)"
            ) from error

    def _path(self, chunk: tuple[int, int]) -> str:
        """Of its file, whose folder is made."""
        assert self._folder
        path = self._folder.path(*chunk)
        folder = os.path.dirname(path)
        if folder not in self._folders:
            os.makedirs(folder, exist_ok=True)
            self._folders.add(folder)
        return path

    def _written(self, chunk: tuple[int, int], path: str) -> None:
        """Its file stands beside its place."""
        if self._log is None:
            os.replace(path + PENDING, path)
            return
        now, was = journal.stamp(path + PENDING), journal.stamp(path)
        with self._lock:
            self._log.add(chunk, now, was)
            self._waiting.append(path)
        if time.monotonic() > self._saved + SAVED_SECONDS and not self._saving.locked():
            self.save(durable=True)

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

    def _set(self, key: str, value: bytes) -> None:
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

    def proceed(self) -> None:
        """As in a folder."""
        if key := self._changed():
            raise InputError(
                f"{self.name} cannot be continued: its chunk {key} was changed or removed since; "
                f"{journal.ANEW}"
            )
        self._objects.delete(METADATA)

    def begin(self, metadata: bytes | None) -> None:
        """As in a folder, with few requests: `clear` is to follow where C is a new one."""
        self._described = self._get(self._key) if metadata is None else metadata
        self._objects.put(self._key + PARTIAL, self._described)
        if metadata is None:
            self._objects.delete(METADATA)

    def _find(self, key: str) -> bytes | None:
        return (key == self._key + PARTIAL and self._described) or super()._find(key)

    def clear(self) -> None:
        """Remove what is left of an old C, what makes it an array first."""
        left = {key for key, _, _ in self._objects.list()} - {self._key + PARTIAL, journal.NAME}
        self._objects.delete(sorted(left, key=lambda key: key not in METADATA))

    def save(self, durable: bool) -> None:
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
                    f"{self.name}: its journal cannot be written ({why(error)}); see to its store and go on "
                    "with --resume (resume=True)"
                ) from error
            self._saved = time.monotonic()
            self._pause = max(SAVED_SECONDS, 10 * (self._saved - start))

    def commit(self, attributes: dict[str, Any] | None = None) -> None:
        """As in a folder, if all chunks are still this run's: nothing else has kept others away. Raises
        StoreError."""
        try:
            if key := self._changed():
                raise StoreError(
                    f"{self.name}: somebody else has changed chunk {key} while C was being written; run "
                    "again with -f (force=True), or write C elsewhere"
                )
            super().commit(attributes)
        except StoreError:
            raise
        except Exception as error:
            then = "go on with --resume (resume=True)" if self._log else "run again with -f (force=True)"
            raise StoreError(
                f"{self.name} cannot be finished ({why(error)}); see to its store and {then}"
            ) from error

    def _finish(self) -> None:
        self._objects.delete([self._key + PARTIAL, journal.NAME])
        if self._log:
            self._log.close()

    def cancel(self) -> None:
        """Wake who waits for the store to take a chunk."""
        super().cancel()
        self._objects.cancel()

    def _changed(self) -> str | None:
        """The key of a chunk that is not as the journal says."""
        if self._log is None or not self._log.done:
            return None
        down, across = (-(-n // step) for n, step in zip(self._array.shape, self._shape, strict=True))
        stamps = self._chunks.stamps((down, across))
        done = self._log.done.items()
        other = (chunk for chunk, (now, _) in done if (*stamps[chunk[0] * across + chunk[1]],) != now)
        return next((self._chunks.key(*chunk) for chunk in other), None)

    def _write_file(self, chunk: tuple[int, int], data: Bytes | bytes) -> None:
        now = self._objects.put(self._chunks.key(*chunk), data)[0]
        if self._log is None:
            return
        with self._lock:
            self._log.add(chunk, now, (0, 0))
        if time.monotonic() > self._saved + self._pause and not self._saving.locked():
            self.save(durable=True)


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
        self._run = folder
        self.written: list[tuple[tuple[int, int], str]] = []

    def _write_file(self, chunk: tuple[int, int], data: Bytes | bytes) -> None:
        path = str(self._run / uuid4().hex)
        files.write(path, data, self._direct)
        self.written.append((chunk, path))

    def flush(self) -> None:
        """Others that share the disk can rely on what was written. Raises OSError."""
        files.flush(str(self._run))


def check_fits(values: Array, dtype: np.dtype[Any], name: str) -> None:
    """Raises RangeError where an integer does not fit the type."""
    if values.size == 0 or np.can_cast(values.dtype, dtype):
        return
    info, low, high = np.iinfo(dtype), values.min(), values.max()
    if int(low) < int(info.min) or int(high) > int(info.max):
        value = low if int(low) < int(info.min) else high
        raise RangeError(
            f"{name}: the exact value {value} does not fit {dtype}; give a wider --out-dtype (out_dtype)"
        )


def create_target(
    spec: Any,
    output: Output,
    block: np.dtype[Any],
    head: dict[str, Any] | None = None,
    force: bool = False,
) -> Target:
    """A new C, unfinished; what stood at its place is removed. With `head` one in a folder or an object store
    has a journal, which begins so; `force`: also where another run's is there. Raises InputError where it
    cannot be begun."""
    blank = zarr.create_array(
        MemoryStore(),
        shape=output.shape,
        dtype=output.dtype,
        chunks=output.chunks,
        shards=output.shards,
        compressors=compressors(output.compressor),
        filters=None,
    )
    with _begun(spec, head, "cannot be created: {}; choose another place") as log:
        described = sync((blank.store_path / METADATA[0]).get())
        at = spec.store_path if isinstance(spec, zarr.Array) else _writable_place(spec)
        array = _array_at(blank.metadata, at)
        if head and (objects := _objects(array)):
            log = RemoteJournal.begin(objects, describe(spec), head, force)
        target = target_at(array, describe(spec), block, log)
        target.begin(described.to_bytes() if described else b"")
        target.clear()
    return target


def update_target(spec: Any, block: np.dtype[Any], head: dict[str, Any] | None) -> Target:
    """A C that exists, unfinished from now on; as `create_target`."""
    with _begun(spec, head, "cannot be updated: {}; it is as it was, see to its disk") as log:
        target = target_at(open_existing(spec), describe(spec), block, log)
        target.begin(None)
    return target


@contextlib.contextmanager
def _begun(spec: Any, head: dict[str, Any] | None, said: str) -> Iterator[Journal | None]:
    """The journal of a C that is begun inside, if it has one; where that fails, nobody holds it. `said`: what
    to say of an OSError."""
    place, name, log = local_path(spec), describe(spec), None
    try:
        with _said(name, remote=place is None):
            try:
                log = Journal.create(place, name, head) if place and head else None
                yield log
            except OSError as error:
                if isinstance(error, Error):
                    raise
                raise InputError(f"{name} {said.format(error.strerror or error)}") from error
    except BaseException:
        if log:
            log.close()
        raise


def scratch_folder(spec: Any) -> Path:
    """Where to put what is needed only while C is made: beside C where that is local."""
    place = local_path(spec)
    if place is None:
        return Path(tempfile.gettempdir())
    return next(folder for folder in place.parents if folder.exists())


def target_at(array: zarr.Array[Any], name: str, block: np.dtype[Any], log: Journal | None) -> Target:
    """An unfinished C."""
    objects = _objects(array, math.prod(array.shards or array.chunks) * array.dtype.itemsize)
    return RemoteTarget(array, name, block, log, objects) if objects else Target(array, name, block, log)


def _objects(spec: Any, nbytes: int = 0) -> Objects | None:
    """What lies at an address, or where an array is, in a store that tells what it has and when that changes;
    None for all else. `nbytes` come or go at a time."""
    if isinstance(spec, zarr.Array):
        at = spec.store_path
    elif local_path(spec) is None and speaks(os.fspath(spec)):
        at = _remote_place(os.fspath(spec))
    else:
        return None
    if not isinstance(at.store, ObjectStore):
        return None
    found = Objects(at.store.store, at.path, Answers(at.store, nbytes))
    return found if found.tells else None


def continued(spec: Any, beta: complex) -> RemoteJournal | None:
    """The journal of a run whose C is not in a folder; None where it can be begun. Raises InputError."""
    name = describe(spec)
    with _said(name, remote=True):
        there = _objects(spec) if isinstance(spec, str | zarr.Array) else None
        if there is None:
            raise InputError(
                f"{name} cannot be continued, only a C in a local folder or an object store such as s3:// "
                "can; leave out --resume (resume=True)"
            )
        if not is_begun(there):
            if beta != 0 or isinstance(spec, zarr.Array) or _kind(spec, name):
                raise InputError(
                    f"{name} is not the unfinished result of an interrupted run; leave out --resume "
                    "(resume=True)"
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


def _remote_place(url: str) -> StorePath:
    if speaks(url):
        client, path = connect(url, TIMEOUT)
        return StorePath(ObjectStore(client), path)
    from zarr.storage import FsspecStore

    return StorePath(FsspecStore.from_url(url))


def _writable_place(spec: str | os.PathLike[str]) -> StorePath:
    """A local store's folder is made."""
    if place := local_path(spec):
        return StorePath(Answers(LocalStore(place)).of(LocalStore.open(place)))
    return _remote_place(os.fspath(spec))


def open_existing(spec: Any) -> zarr.Array[Any]:
    """The C that β·C needs, for reading and writing. Raises InputError."""
    if isinstance(spec, zarr.Array):
        return spec
    name = describe(spec)
    array = _open_array(spec, name)
    with _said(name, remote=local_path(spec) is None):
        documents.parse(name, _document(array.store_path, ".zattrs") or b"{}")  # they are kept
        return _array_at(array.metadata, _writable_place(spec))


def open_partial(spec: Any) -> zarr.Array[Any]:
    """A C that is not finished. Raises InputError."""
    name = describe(spec)
    with _said(name, remote=local_path(spec) is None):
        at = spec.store_path if isinstance(spec, zarr.Array) else _writable_place(spec)
        for key in METADATA:
            for path in (key + PARTIAL, key):
                document = _document(at, path)
                if document is not None:
                    described = documents.check(name, documents.parse(name, document), key)
                    return _array_at(described, at)
    raise InputError(f"{name} was hardly begun; {journal.ANEW}")


class ArrayTarget:
    """C as a NumPy array in memory."""

    def __init__(self, out: Array, matrix: Matrix, block: np.dtype[Any]):
        self._out, self._matrix, self._block = out, matrix, block

    def cancel(self) -> None:
        """Nobody ever waits."""

    def view(self, part: Part, slot: Bytes) -> Array:
        """Dense at the front of the slot."""
        return (
            slot[: part.rows * part.cols * self._block.itemsize]
            .view(self._block)
            .reshape(part.rows, part.cols)
        )

    def write(self, part: Part, slot: Bytes) -> int:
        """Convert and copy. Raises RangeError for integers that do not fit."""
        inside = self.view(part, slot)
        if self._out.dtype.kind in "iu":
            check_fits(inside, self._out.dtype, "the result")
        row, col = part.chunk[0] * self._matrix.chunk_rows, part.chunk[1] * self._matrix.chunk_cols
        with np.errstate(over="ignore"):
            self._out[row : row + part.rows, col : col + part.cols] = inside
        return part.rows * part.cols * self._out.itemsize
