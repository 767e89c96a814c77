"""Inputs, opened: who reads their chunks, and what is refused. What is not Zarr's is opened by arrays.py, or
other_files.py where it is a file.

A chunk is *raw* where its file, or its part of a shard, holds nothing but the elements in native
order: no codec but `bytes` (and a transposition, which makes it the transpose of a C-order matrix). Raw
chunks (raw.py), and those that one known compressor has made of raw ones (compressed.py), are read without
zarr. Everything else is decoded by zarr (decoded.py, and held.py where it lies in shards).
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.storage import LocalStore, ObjectStore, ZipStore

from ...planning.problem import Matrix
from ...support.errors import InputError
from ..format import codec, codec_memory, conventions, documents
from ..format.chain import compression_of, inner_chunks, is_fortran, only_compressor
from ..format.chunks import Chunks, Shards
from ..format.limits import MAX_ARRAY_BYTES, MAX_CHUNK_BYTES, MAX_CHUNKS, check_matrix
from ..io.answers import Answers
from ..io.archive import Archive
from ..io.folder import Folder
from ..io.objects import Objects
from ..io.place import InputPlace
from ..io.zarr_internals import archive_of
from . import other_files
from .addresses import address_of, describe, local_path
from .arrays import open_other
from .compressed import CompressedSource
from .decoded import decoded_source
from .hdf5 import dimensions
from .held import HeldSource
from .metadata import explained, open_array
from .npy import Npy
from .raw import RawSource
from .sizes import sized
from .source import Opened, Snapshot, Source


def open_input(spec: Any, name: str | None = None, sizes: bool = True) -> Opened:
    """Open an input from a path, URL, zarr.Array, or anything with shape, dtype and slicing; an opened input
    is returned as it is. `name`: how messages call it, where `spec` has no name. `sizes`: as of `open_zarr`.
    Raises InputError where it is missing, no array, not 2-D, of a type that cannot be multiplied, or has
    metadata that cannot be read."""
    name = name or describe(spec)
    if isinstance(spec, Opened):
        return spec
    if isinstance(spec, str | os.PathLike):
        with explained(name):
            held = other_files.open_file(spec, name)
        if isinstance(held, zarr.Array):
            return other_files.watched(open_input(held, name, sizes), spec)
        if held is not None:
            return other_files.watched(open_held(held, name), spec)
        array = open_array(spec, name)
    elif isinstance(spec, zarr.Array):
        array = spec
    elif hasattr(getattr(spec, "_meta", spec), "nnz"):  # scipy.sparse, sparse, dask arrays of those
        raise InputError(
            f"{name} is sparse ({type(spec).__name__}), and only dense matrices are multiplied; "
            "give it as a dense one, such as x.toarray() or x.todense()"
        )
    elif all(hasattr(spec, part) for part in ("shape", "dtype", "__getitem__")):
        return open_held(spec, name)
    else:
        made = "x.to_numpy()" if hasattr(spec, "to_numpy") else "numpy.asarray(x)"
        raise InputError(f"{name} is no array (its type is {type(spec).__name__}); give one, such as {made}")
    check_matrix(name, array.shape, array.dtype)
    with explained(name):
        found = open_zarr(name, array, sizes=sizes)
    place, attributes = local_path(array), documents.attributes(dict(array.metadata.attributes))
    fill = array.fill_value if array.metadata.zarr_format == 2 else None
    # In version 2, xarray stores _FillValue as the fill value of the array.
    packing = attributes if fill is None else {"_FillValue": fill, **attributes}
    dims = getattr(array.metadata, "dimension_names", None) or attributes.get(documents.DIMENSIONS)
    return replace(
        found,
        place=place,
        address=str(place or address_of(spec if isinstance(spec, str) else array)),
        attributes=attributes,
        packing=packing,
        dims=documents.dimensions(dims, 2),
        undecoded=conventions.ignored(array, packing if _fills_mean(fill, attributes) else attributes),
    )


def _fills_mean(fill: Any, attributes: Mapping[str, Any]) -> bool:
    """Whether the fill value of an array of version 2 stands for missing elements. It does where xarray has
    written the array, or it is packed; 0 may be nothing but zarr's default."""
    described = any(key in attributes for key in (documents.DIMENSIONS, *documents.PACKING))
    return described and fill is not None and bool(fill != 0)


def open_held(array: Any, name: str) -> Opened:
    """Open an array that is not Zarr's: anything with shape, dtype and slicing, or a file of NumPy's. Raises
    InputError."""
    if isinstance(array, Npy):
        return other_files.open_npy(array, name)
    check_matrix(name, tuple(array.shape), array.dtype)
    given, dims = getattr(array, "attrs", {}), getattr(array, "dims", None)
    packing = documents.attributes(dict(given)) if hasattr(given, "keys") else {}
    return replace(
        open_other(name, array),
        packing=packing,
        dims=documents.dimensions(dims if isinstance(dims, tuple) else dimensions(array), 2),
        undecoded=conventions.ignored(array, given),
    )


def open_zarr(name: str, array: zarr.Array[Any], tail: str = "", sizes: bool = True) -> Opened:
    """Open a zarr.Array as an input. tail: as of `Chunks`. sizes: whether a store is asked how large chunks
    are that zarr reads. Only plans need that (`sized`). Raises InputError where its chunks or sizes cannot be
    right."""
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
        raise InputError(
            f"{name} has {down}×{across} chunks, and a run looks at {MAX_CHUNKS} at most; "
            "rechunk it to larger ones"
        )
    outer = matrix
    if array.shards is not None:  # which zarr says where they are all that is done to the elements
        outer = replace(matrix, chunk_rows=array.shards[0], chunk_cols=array.shards[1])
        _check_shards(name, matrix, outer)
    place: InputPlace
    if isinstance(at.store, LocalStore):
        place = Folder(Path(at.store.root) / at.path)
    elif isinstance(at.store, ObjectStore):
        place = Objects(at.store.store, at.path, Answers(at.store, outer.chunk_bytes), name)
    elif isinstance(at.store, ZipStore) and at.store.read_only:
        place = Archive(archive_of(at.store), at.path)
    else:
        matrix = sized(array, matrix, outer) if sizes else replace(matrix, estimated=True)
        return _opened(decoded_source(name, array, matrix))
    return _stored(name, array, matrix, outer, Chunks(place, array.metadata, fortran, tail))


def _opened(source: Source, snapshot: Snapshot | None = None) -> Opened:
    return Opened(source, source.matrix, snapshot)


def _check_shards(name: str, s: Matrix, outer: Matrix) -> None:
    """Refuse shards with too many chunks, because their indices are held in memory, also of parts beyond the
    array."""
    chunks = math.prod(outer.grid) * (outer.chunk_rows // s.chunk_rows) * (outer.chunk_cols // s.chunk_cols)
    if outer.chunk_bytes > MAX_CHUNK_BYTES or chunks > MAX_CHUNKS:
        raise InputError(f"{name}: shards of {chunks} chunks cannot be right; repair its metadata")


def _stored(name: str, array: zarr.Array[Any], s: Matrix, outer: Matrix, stored: Chunks) -> Opened:
    """Open an array whose chunks are files or objects, or parts of them. outer: the matrix in the chunks that
    are files or objects. stored: where these lie."""
    metadata, dtype, chunks, place = array.metadata, array.dtype, stored, stored.place
    inner, sizes, snapshot = None, (1,) * math.prod(outer.grid), None
    if place.traits.listable:
        stamps = stored.stamps(outer.grid)
        sizes = tuple(np.maximum(stamps[:, 0], stamps.any(axis=1)).tolist())  # an empty file is there, too
        snapshot = Snapshot(_description(metadata), stamps, lambda: stored.stamps(outer.grid))
    elif array.shards is None:
        return _opened(decoded_source(name, array, replace(s, traits=place.traits, estimated=True)))
    traits = replace(place.traits, asynchronous=False)  # its latency is known now
    # A file that is packed is unpacked from its beginning on, so it is read as a whole: shards, too.
    packed = isinstance(place, Archive) and place.packs(stored.pattern)
    if packed and array.shards:
        files = replace(outer, traits=traits, stored=sizes)
        return _opened(HeldSource(name, array, files, stored, metadata, sizes), snapshot)
    s = replace(s, traits=traits)
    if array.shards:
        inner = inner_chunks(metadata)
        if inner is None:
            raise InputError(
                f"{name}: the index of its shards is neither plain nor with a checksum; repair its metadata"
            )
        chunks = shards = Shards(stored, s, outer, sizes, inner.index)
        sizes = shards.sizes
    compression = inner.compression if inner else compression_of(metadata)
    if lacking := codec.missing_here(compression):
        raise InputError(
            f"{name} is compressed with {lacking} in blosc, which numcodecs cannot decode here; write it "
            "again with another compressor"
        )
    compressor = only_compressor(compression)
    source: Source
    if dtype.isnative and (compression == [] or compressor):
        fill = dtype.type(0) if array.fill_value is None else array.fill_value
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
            source.codec = _spelled(name_of, configuration, dtype)
        else:
            whole = set(sizes) <= {0, s.chunk_bytes}
            s = replace(s, whole=True, stored=sizes) if packed else _with_missing(s, sizes)
            source = RawSource(name, dtype, fill, s, chunks, whole)
    elif inner and isinstance(chunks, Shards):
        source = HeldSource(name, array, replace(s, stored=sizes), chunks, inner.alone, chunks.sizes)
    else:
        folder = place if isinstance(place, Folder) else None
        source = decoded_source(name, array, replace(s, stored=sizes), folder)
    return _opened(source, snapshot)


def _spelled(compressor: str, configuration: Mapping[str, Any], dtype: np.dtype[Any]) -> str:
    """Return what decides how fast chunks are decoded, such as "blosc lz4 5 shuffle float32"."""
    said = (configuration[key] for key in ("cname", "clevel", "level", "shuffle") if key in configuration)
    return " ".join([compressor.removeprefix("numcodecs."), *map(str, said), dtype.name])


def _description(metadata: Any) -> bytes:
    """Return the metadata of an array without what may change while its elements stay."""
    described = {**metadata.to_dict(), "attributes": {}}
    described.pop("dimension_names", None)
    return json.dumps(described, default=str).encode()


def _with_missing(s: Matrix, sizes: tuple[int, ...]) -> Matrix:
    return s if all(sizes) else replace(s, stored=tuple(s.chunk_bytes if size else 0 for size in sizes))
