"""Zarr arrays as the engine sees them; it is zarr's only importer, but for what writes C (targets.py).

A chunk is *raw* where its file, or its part of a shard, holds nothing but the elements in native
order: a local store, no codec but `bytes` (and a transposition, which makes it the transpose of a C-order
matrix). Raw chunks, and those that one known compressor has made of raw ones, are read without zarr
(local.py). Everything else is decoded by zarr.
"""

import asyncio
import contextlib
import copy
import json
import math
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt
import zarr
from zarr.abc.codec import ArrayArrayCodec, BytesBytesCodec, Codec
from zarr.abc.store import RangeByteRequest
from zarr.codecs import ShardingCodec, TransposeCodec
from zarr.storage import FsspecStore, LocalStore, ObjectStore, StorePath, WrapperStore, ZipStore

from ...planning.problem import Matrix, Work
from ...planning.schedule import Piece
from ...support import redact
from ...support.buffers import Bytes, give_back
from ...support.errors import NO_MEMORY, Error, InputError, OutOfMemoryError, StoreError, no_memory, remedy
from ...support.shared import Shared
from ..format import codec, codec_memory, conventions, documents, shards
from ..format.chunks import Chunks, Shards
from ..format.documents import SUPPORTED
from ..format.unfinished import METADATA, is_begun, is_partial
from ..io import answers, files
from ..io.answers import Answers
from ..io.client import address, connect, normal, speaks
from ..io.client import secrets_of as remote_secrets
from ..io.folder import Folder
from ..io.objects import Objects, why
from ..io.place import Place
from ..io.zarr_internals import default_buffer_prototype
from ..io.zarr_internals import refuse_event_loop as refuse_event_loop
from .arrays import open_other
from .local import CompressedSource, RawSource, Source

Array = npt.NDArray[Any]

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


def describe(spec: Any) -> str:
    """How messages name an array: its path or URL as given, or what it is."""
    if isinstance(spec, str | os.PathLike):
        return redact.url(os.fspath(spec)) or "''"
    if isinstance(spec, zarr.Array):
        path = local_path(spec)
        redact.keep_secret(*secrets_of(spec))
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
    """The same array for another process to open: a path where it is local, else a URL or an open array.
    None where another process cannot find it, or would be sent credentials with it."""
    if (place := local_path(spec)) is not None:
        return str(place)
    at = spec.store_path if isinstance(spec, zarr.Array) else None
    if at and isinstance(at.store, FsspecStore):  # by which dask opens paths
        system: Any = getattr(at.store.fs, "sync_fs", at.store.fs)
        if "file" in np.atleast_1d(system.protocol):
            return os.path.join(at.store.path, at.path).rstrip("/")
    known = isinstance(spec, str) or (at and isinstance(at.store, FsspecStore | ObjectStore | ZipStore))
    return spec if known and next(secrets_of(spec), None) is None else None


def secrets_of(spec: Any) -> Iterator[Any]:
    """What an address holds, or the store of an open array, that may be a credential. An open array would be
    pickled with it."""
    if isinstance(spec, str):
        yield from redact.secrets_in({"endpoint": redact.without_container(spec)})
    if not isinstance(spec, zarr.Array):
        return
    store = spec.store_path.store
    if isinstance(store, ObjectStore):
        yield from remote_secrets(store.store)
    elif isinstance(store, FsspecStore):
        yield from redact.secrets_in({"path": store.path})
        system = getattr(store.fs, "sync_fs", store.fs)
        yield from redact.secrets_in([system.storage_args, system.storage_options])


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


def objects_at(spec: Any, nbytes: int = 0) -> Objects | None:
    """What lies at an address, or where an array is, in a store that tells what it has and when that changes;
    None for all else. `nbytes` come or go at a time."""
    if isinstance(spec, zarr.Array):
        at = spec.store_path
    elif local_path(spec) is None and speaks(os.fspath(spec)):
        at = remote_place(os.fspath(spec))
    else:
        return None
    if not isinstance(at.store, ObjectStore):
        return None
    found = Objects(at.store.store, at.path, Answers(at.store, nbytes))
    return found if found.traits.listable else None


def remote_place(url: str) -> StorePath:
    """By obstore where it speaks the scheme, else by fsspec."""
    redact.keep_secrets_of(url)
    if speaks(url):
        client, path = connect(url, answers.TIMEOUT)
        return StorePath(ObjectStore(client), path)
    return StorePath(FsspecStore.from_url(url))


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
                files.check(self._folder.path(self._key(piece)), self._most)
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
                f"({documents.short(error)}); {remedy(error, 'write it again')}"
            ) from error
        if self._folder is not None and not os.path.exists(self._folder.path(self._key(piece))):
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
        """As the store's own. Raises ValueError where that is too much, or more than there is."""
        wanted = byte_range.end - byte_range.start if isinstance(byte_range, RangeByteRequest) else 0
        if wanted > self._most:
            raise ValueError(f"its index asks for {wanted} bytes")
        found = await super().get(key, prototype, byte_range)
        if found is not None:
            if len(found) < wanted:  # of nothing zarr makes the fill value
                raise ValueError("its index asks for bytes behind its end")
            with self._lock:
                self.total += len(found)
        return found


def role(spec: Any, name: str) -> str:
    """How messages name an operand: what it is stored as, or which it is (`A`)."""
    return describe(spec) if isinstance(spec, str | os.PathLike | zarr.Array) else name


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
        array = open_array(spec, name)
    elif hasattr(getattr(spec, "_meta", spec), "nnz"):  # scipy.sparse, sparse, dask arrays of those
        raise InputError(
            f"{name} is sparse ({type(spec).__name__}), and only dense matrices are multiplied; "
            "give it as a dense one, such as x.toarray() or x.todense()"
        )
    elif all(hasattr(spec, part) for part in ("shape", "dtype", "__getitem__")):
        check_matrix(name, tuple(spec.shape), spec.dtype)
        other = open_other(name, spec)
        other.undecoded = conventions.ignored(spec, getattr(spec, "attrs", {}))
        return other
    else:
        raise InputError(f"{name} is not an array: it has no shape, dtype and slicing")
    check_matrix(name, array.shape, array.dtype)
    with explained(name):
        source = zarr_source(name, array)
    source.place = local_path(array)
    source.whereabouts = str(source.place or _address(spec if isinstance(spec, str) else array))
    source.attributes = documents.attributes(dict(array.metadata.attributes))
    source.undecoded = conventions.ignored(array, source.attributes)
    return source


def open_array(spec: str | os.PathLike[str], name: str) -> zarr.Array[Any]:
    """As it is stored. Raises InputError."""
    place = local_path(spec)
    if place is not None:
        if not os.path.exists(place):
            raise InputError(f"{name} does not exist; check the path")
        if is_partial(place):
            raise InputError(
                f"{name} is the unfinished result of an interrupted run; continue that with "
                "resume=True, or make it again"
            )
    found = _open(os.fspath(spec) if place is None else str(place), name)
    if found is None:
        with explained(name, remote=place is None):
            if place is None and (there := objects_at(spec)) and is_begun(there):
                raise InputError(
                    f"{name} is the unfinished result of an interrupted run; continue that with "
                    "resume=True, or make it again"
                )
        raise InputError(f"{name} is not a Zarr array; check the path")
    if isinstance(found, str):
        raise InputError(f"{name} is a Zarr group, not an array; name one of the arrays in it")
    return found


def _open(path: str, name: str) -> zarr.Array[Any] | str | None:
    """The Zarr array there, "group", None where there is neither. Raises InputError."""
    with explained(name, remote="://" in path):
        at, key, described = look_at(path, name)
        if documents.kind(key, described) == "group":
            return "group"
        if key == METADATA[1]:
            described["attributes"] = _attributes(at, name)
        return array_at(documents.check(name, described, key), at) if key else None


def _attributes(at: StorePath, name: str) -> dict[str, Any]:
    """Of version 2, where they are a document of their own. An array can be read without: so nothing that is
    wrong with them is an error."""
    try:
        return documents.parse(name, document_at(at, ".zattrs") or b"{}")
    except (InputError, OSError):
        return {}


def kind_at(path: str, name: str) -> str | None:
    """Whether there is an "array", a "group" or neither; an array need be no matrix. Raises InputError."""
    with explained(name, remote="://" in path):
        return documents.kind(*look_at(path, name)[1:])


@Shared
@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def explained(name: str, remote: bool = False) -> Iterator[None]:
    """Whatever goes wrong when an array is opened or begun is said in a sentence, and warnings are not."""
    try:
        with _without_warnings:
            yield
    except Error:
        raise
    except Exception as error:
        raise _unusable(name, error, remote) from error


def look_at(spec: Any, name: str) -> tuple[StorePath, str, dict[str, Any]]:
    """Where there may be an array or a group, the key of its metadata, and that. An empty key where there is
    neither. (zarr.open, which does this and more, reads and believes all there is.) Raises InputError."""
    if isinstance(spec, zarr.Array):
        at = spec.store_path
    elif (place := local_path(spec)) is not None:
        at = StorePath(LocalStore(place, read_only=True))
    else:
        at = remote_place(os.fspath(spec))
    for key in (*METADATA, ".zgroup"):
        document = document_at(at, key)
        if document is not None:
            return at, key, documents.parse(name, document)
    return at, "", {}


def document_at(at: StorePath, key: str) -> bytes | None:
    """One of the metadata documents, or more than there may be of it. Raises OSError."""
    if isinstance(at.store, LocalStore):
        return files.read_small(Path(at.store.root) / at.path / key, documents.MAX_BYTES)
    if isinstance(at.store, ObjectStore):
        return Objects(at.store.store, at.path, Answers(at.store)).read(key, documents.MAX_BYTES)
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
    if what := remedy(error, ""):
        return InputError(f"{name} cannot be opened ({_one_line(error)}); {what}")
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


def zarr_source(name: str, array: zarr.Array[Any]) -> Source:
    try:
        chunk = tuple(int(c) for c in array.chunks)
    except Exception as error:
        raise InputError(f"{name} has irregular chunks; rechunk it to a regular grid") from error
    at, fortran = array.store_path, is_fortran(array.metadata)
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
    place: Place
    if isinstance(at.store, LocalStore):
        place = Folder(Path(at.store.root) / at.path)
    elif isinstance(at.store, ObjectStore):
        place = Objects(at.store.store, at.path, Answers(at.store, outer.chunk_bytes), name)
    else:
        return _decoded_source(name, array, matrix)
    matrix = replace(matrix, remote=place.traits.remote)
    if place.traits.listable:
        source = _stored_source(name, array, matrix, outer, Chunks(place, array.metadata, fortran))
    else:
        source = _decoded_source(name, array, matrix)
    source.latency = place.traits.latency
    return source


def _check_shards(name: str, s: Matrix, outer: Matrix) -> None:
    """Their indices are held in memory, also where the shards reach far beyond the array."""
    chunks = math.prod(outer.grid) * (outer.chunk_rows // s.chunk_rows) * (outer.chunk_cols // s.chunk_cols)
    if outer.chunk_bytes > MAX_CHUNK_BYTES or chunks > MAX_CHUNKS:
        raise InputError(f"{name}: shards of {chunks} chunks cannot be right; repair its metadata")


def _stored_source(name: str, array: zarr.Array[Any], s: Matrix, outer: Matrix, stored: Chunks) -> Source:
    """outer: the matrix in chunks that are files, or objects. stored: where these lie."""
    metadata, dtype, shard, chunks = array.metadata, array.dtype, array.shards, stored
    stamps = stored.stamps(outer.grid)
    sizes = tuple(np.maximum(stamps[:, 0], stamps.any(axis=1)).tolist())  # an empty file is there, too
    inner = inner_chunks(metadata) if shard else None
    compression = inner[1] if inner else None if shard else compression_of(metadata)
    compressor = only_compressor(compression)
    source: Source
    if dtype.isnative and (compression == [] or compressor):
        fill = dtype.type(0) if array.fill_value is None else array.fill_value
        if inner and shard:
            at_end = inner[0]["index_location"] == "end"
            chunks = shards_of = Shards(stored, s, outer, sizes, at_end)
            sizes = shards_of.sizes
        if compressor:
            name_of, configuration = (compression or [("", {})])[0]
            s = replace(
                s,
                whole=True,
                stored=sizes,
                decodes=codec_memory.decoding(name_of, configuration),
                encodes=codec_memory.encoding(name_of, configuration),
            )
            source = CompressedSource(name, dtype, fill, s, chunks, compressor)
        else:
            whole = set(sizes) <= {0, s.chunk_bytes}
            source = RawSource(name, dtype, fill, _with_missing(s, sizes), chunks, whole)
    else:
        s = replace(s, stored=_shares(s, outer, sizes) if shard else sizes)
        source = _decoded_source(name, array, s, stored.place if isinstance(stored.place, Folder) else None)
    source.stamps, source.look = stamps, lambda: stored.stamps(outer.grid)
    source.description = json.dumps({**metadata.to_dict(), "attributes": {}}, default=str).encode()
    return source


def _decoded_source(name: str, array: zarr.Array[Any], s: Matrix, folder: Folder | None = None) -> Source:
    """Chunks that zarr decodes, with codecs that stay within bounds. Its `zarrs` pipeline, which knows no
    bounds, has those that no codec could exceed; it refuses types of foreign byte order (v2 has them), and of
    a part of a chunk in foreign byte order (v3) it gives wrong complex numbers, without a word."""
    metadata, at = array.metadata, array.store_path
    decodes, encodes = _work_of_zarr(metadata)
    s = replace(s, decodes=decodes, encodes=encodes)
    bounded, most = _bounded(metadata)
    counter = _CountingStore(at.store, most) if folder is None or array.shards else None
    fast = bounded is metadata and array.dtype.isnative and array.dtype.kind != "c"
    with _fast_codecs() if fast else contextlib.nullcontext():
        # What zarr returns lies in C order: the codec pipelines are for that.
        array = array_at(bounded, StorePath(counter, at.path) if counter else at, {"order": "C"})
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


def _work_of_zarr(metadata: Any) -> tuple[Work, Work]:
    """What the compressors of an array take where zarr decodes its chunks, and where it encodes them. Most
    decompressors take less than what HELD_BY_ZARR has room for."""
    if metadata.zarr_format == 2:
        described = [one.get_config() for one in (*(metadata.filters or ()), metadata.compressor) if one]
        chain = [(str(one["id"]), one) for one in described]
    else:
        chain = list(_flat([one.to_dict() for one in metadata.codecs]))
    large = [one for one in chain if one[0].removeprefix("numcodecs.") in ("bz2", "lzma")]
    return (
        reduce(Work.__add__, (codec_memory.decoding(*one) for one in large), Work()),
        reduce(Work.__add__, (codec_memory.encoding(*one) for one in chain), Work()),
    )


def _flat(chain: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and configurations of all codecs, those inside of shards among them."""
    for one in chain:
        configuration = dict(one.get("configuration", {}))
        yield str(one["name"]), configuration
        if one["name"] == "sharding_indexed":
            yield from _flat(list(configuration["codecs"]))


def array_at(metadata: Any, place: StorePath, config: Any = None) -> zarr.Array[Any]:
    """An array of this metadata at a place where none is stored (yet). `config`: zarr's settings of an open
    array that are not as usual, such as `order`."""
    return zarr.Array(zarr.AsyncArray(metadata, place, config))


def is_fortran(metadata: Any) -> bool:
    """Whether chunks hold the transpose, in C order."""
    if metadata.zarr_format == 2:
        return bool(metadata.order == "F")
    codecs: tuple[Codec, ...] = metadata.codecs
    return isinstance(codecs[0], TransposeCodec) and tuple(codecs[0].order) == (1, 0)


def only_compressor(compression: list[tuple[str, dict[str, Any]]] | None) -> codec.Compressor | None:
    """The compressor, where it is known and the only codec beside those of plain chunks."""
    return codec.find(*compression[0]) if compression and len(compression) == 1 else None


def compression_of(metadata: Any) -> list[tuple[str, dict[str, Any]]] | None:
    """Names and configurations of the codecs that make a file of the elements in native order, which may
    have been transposed; None where the elements are made something else of first."""
    if metadata.zarr_format == 2:
        if metadata.filters:
            return None
        described = [metadata.compressor.get_config()] if metadata.compressor is not None else []
        return [(one.pop("id"), one) for one in described]
    return _beyond_bytes([one.to_dict() for one in metadata.codecs[1 if is_fortran(metadata) else 0 :]])


def _beyond_bytes(chain: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]] | None:
    """The codecs behind `bytes` in native order; None where that is not the first."""
    described = [(str(one["name"]), dict(one.get("configuration", {}))) for one in chain]
    if not described or described[0] not in (("bytes", {}), ("bytes", {"endian": sys.byteorder})):
        return None
    return described[1:]


def inner_chunks(metadata: Any) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]] | None:
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
