"""What zarr reads of each chunk of an array in a store that is no folder, no object store and no archive that
is open for reading: in memory, in a file system of fsspec's, in a repository of Icechunk. Plans are made with
it, and nothing else depends on it.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from zarr.abc.store import RangeByteRequest, Store, SuffixByteRequest
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ObjectStore, ZipStore

from ...planning.problem import Matrix
from ..format.chain import inner_chunks
from ..format.limits import MAX_CHUNK_BYTES
from ..format.shards import MISSING, Index
from ..format.unfinished import METADATA
from ..io.answers import Answers
from ..io.zarr_internals import archive_of, default_buffer_prototype, unwrapped

MOST_ASKED = 1 << 14
"""Most files of an array whose sizes are all found out. Of more, those of a sample are."""
SAMPLE = 1 << 10
"""How many files are asked for where the sizes of all are not found out."""
FAR = 1 << 8
"""Both numbers where each question is a request over a network."""
AT_ONCE, BATCH = 64, 1 << 10
"""Questions that are under way at a time, and those for which the store has one time limit."""

NEAR = {"file", "local", "memory"}
"""Protocols of file systems of fsspec's that are on this machine."""

Sizes = npt.NDArray[np.int64]
"""Bytes that are read for each chunk in a file, in the order of their grid there."""
Look = Callable[[str], Awaitable[Sizes | int | None]]
"""Finds out what is read for the chunks in the file with a key; None where the store does not say."""


def sized(array: zarr.Array[Any], s: Matrix, outer: Matrix) -> Matrix:
    """Return a matrix with what is read of its chunks, as far as the store says so without reading them.

    s: the matrix in chunks. outer: the matrix in files, which are chunks or shards.
    """
    (down, across), per = outer.grid, (outer.chunk_rows // s.chunk_rows, outer.chunk_cols // s.chunk_cols)
    count = down * across
    encode = array.metadata.encode_chunk_key
    answers = Answers(array.store_path.store)
    try:
        look, most = _look(array, answers, per, count <= MOST_ASKED)
        some = min(most, SAMPLE)
        asked = range(count) if count <= most else sorted(random.Random(0).sample(range(count), some))
        places = (divmod(at, across) for at in asked)
        keys = (encode(place[::-1] if s.fortran else place) for place in places)
        found = look and _asked(answers, look, (_below(array.store_path.path, key) for key in keys))
        sizes = None if found is None else np.array(found, np.int64).reshape(len(asked), *per)
    except MemoryError:
        raise
    except Exception:  # reading the array will tell why
        sizes = None
    if sizes is None or (sizes < 0).any():
        return replace(s, estimated=True)
    # Older versions of zarr read the index of a shard with each of its chunks, newer ones less often.
    s = replace(s, estimated=len(asked) < count or per != (1, 1))
    if (sizes == s.chunk_bytes).all():
        return s
    every = np.full((count, *per), round(sizes.mean()) if len(asked) else 0, np.int64)
    every[list(asked)] = sizes
    matrix = every.reshape(*outer.grid, *per).swapaxes(1, 2).reshape(down * per[0], across * per[1])
    stored = tuple(matrix[: s.grid[0], : s.grid[1]].ravel().tolist())
    return replace(s, stored=stored)


def _below(path: str, key: str) -> str:
    """Return the key of something below a path, either of which may be empty."""
    return "/".join(filter(None, (path, key)))


def _look(
    array: zarr.Array[Any], answers: Answers, per: tuple[int, int], lists: bool
) -> tuple[Look | None, int]:
    """Return what finds out how much of a file is read, None where the store does not say; and the most files
    that it is asked for. per: chunks of a file. lists: whether files may be listed."""
    store = array.store_path.store
    if per != (1, 1):
        inner = inner_chunks(array.metadata)
        most = FAR if _far(store) is not False else MOST_ASKED
        return partial(_by_index, store, inner.index, per) if inner else None, most
    most = FAR if _far(store) else MOST_ASKED
    if (listed := _listed(array, answers, lists)) is not None:
        unknown = sum(size is None for size in listed.values())
        return partial(_in_list, store, listed), most if unknown > most else MOST_ASKED
    if isinstance(store, FsspecStore):
        return partial(_by_name, store), most
    told = isinstance(store, MemoryStore) or type(store).getsize is not Store.getsize
    return partial(_by_size, store) if told else None, most  # zarr's own method reads the whole file


def _far(store: Store) -> bool | None:
    """Return whether each question to a store is a request over a network; None where that is not known.
    Icechunk knows sizes itself, but not what is in a file."""
    store = unwrapped(store)
    if isinstance(store, FsspecStore):
        protocol = store.fs.protocol
        return NEAR.isdisjoint((protocol,) if isinstance(protocol, str) else protocol)
    if isinstance(store, MemoryStore | ZipStore | LocalStore):
        return False
    return True if isinstance(store, ObjectStore) else None


async def _by_index(store: Store, index: Index, per: tuple[int, int], key: str) -> Sizes:
    """Look at the index of a shard, which zarr may read with each of its chunks."""
    where = SuffixByteRequest(index.nbytes) if index.at_end else RangeByteRequest(0, index.nbytes)
    data = await store.get(key, default_buffer_prototype(), where)
    if data is None:
        return np.zeros(per, np.int64)
    offsets, lengths = index.decode(data.to_bytes()).T
    sizes = np.where(offsets == MISSING, 0, np.minimum(lengths, np.uint64(MAX_CHUNK_BYTES)))
    return sizes.astype(np.int64).reshape(per) + index.nbytes


async def _in_list(store: Store, listed: Mapping[str, int | None], key: str) -> int | None:
    size = listed.get(key, 0)
    return await _by_name(store, key) if size is None and isinstance(store, FsspecStore) else size


async def _by_name(store: FsspecStore, key: str) -> int | None:
    """Ask a file system. The store's own method would read a file whose size it does not know."""
    try:
        found = await store.fs._info(_below(store.path.rstrip("/"), key))
    except store.allowed_exceptions:
        return 0
    size: int | None = found.get("size")
    return size


async def _by_size(store: Store, key: str) -> int:
    try:
        return await store.getsize(key)
    except FileNotFoundError:
        return 0


def _listed(array: zarr.Array[Any], answers: Answers, lists: bool) -> Mapping[str, int | None] | None:
    """Return the sizes of an array's files by their keys, None for those that the store does not say; None
    where there is no such list. lists: whether files may be listed."""
    store, path = array.store_path.store, array.store_path.path
    if isinstance(store, ZipStore):
        return {entry.filename: entry.file_size for entry in archive_of(store).infolist()}
    if not isinstance(store, FsspecStore) or not lists:
        return None
    root = store.path.rstrip("/")
    try:
        found = answers.of(store.fs._find(_below(root, path), detail=True))
    except TimeoutError:  # it would not answer other questions, either
        raise
    except (OSError, NotImplementedError):
        return None
    root = root.lstrip("/")
    listed = {name.lstrip("/").removeprefix(root).lstrip("/"): one.get("size") for name, one in found.items()}
    # A server that lists nothing seems to have no files.
    return listed if any(_below(path, name) in listed for name in METADATA) else None


def _asked(answers: Answers, look: Look, keys: Iterator[str]) -> list[Sizes | int] | None:
    """Return what is found out about files, in their order; None where the store does not say it of one."""
    found = list[Sizes | int]()
    while some := list(islice(keys, BATCH)):
        for one in answers.of(_side_by_side(look, some)):
            if one is None:
                return None
            found.append(one)
    return found


async def _side_by_side(look: Look, keys: Sequence[str]) -> list[Sizes | int | None]:
    found: list[Sizes | int | None] = [None] * len(keys)
    left = list(enumerate(keys))[::-1]

    async def work() -> None:
        while left:
            at, key = left.pop()
            found[at] = await look(key)
            if found[at] is None:
                left.clear()

    try:
        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    finally:
        left.clear()  # where one has failed, nothing more is asked
    return found
