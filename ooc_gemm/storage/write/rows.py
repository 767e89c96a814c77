"""A Zarr group of arrays that are written some rows at a time: what a reduction keeps of C.

Chunks are files, each of which is there whole or not at all. So those that are there say what a run that was
interrupted has done. The group's metadata come when all chunks are there:

folder          made in a hidden folder beside its place, and moved there at the end         rows_folder.py
object store    made at its place; chunks carry a mark of their run, metadata come last      rows_store.py
"""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import zarr
from zarr.storage import MemoryStore, StorePath

from ...support.errors import InputError
from ..format.unfinished import METADATA
from ..read.addresses import describe, local_path, objects_at, same_place
from ..read.metadata import array_at, document_at, explained
from .checks import check_new
from .provenance import ATTRIBUTE, differences
from .rows_folder import InFolder
from .rows_store import InStore

Array = npt.NDArray[Any]
Arrays = Mapping[str, tuple[tuple[int, int], np.dtype[Any]]]
"""Shape and type of each array of a group."""
Sparse = tuple[Array, Array, Array]
"""Some rows of a sparse matrix: data, columns, and elements of each row."""

SPARSE_CHUNK = 1 << 18
"""Elements of a chunk of a sparse matrix."""


class Making(Protocol):
    """The files of a group while it is made, by key. Every method raises StoreError."""

    @property
    def temporary(self) -> Path:
        """A local folder for temporary files."""

    @property
    def at(self) -> StorePath:
        """Where zarr finds the chunks."""

    def keys(self) -> set[str]:
        """Return the keys of the files that interrupted runs have left, and that count."""

    def put(self, key: str, data: bytes, flush: bool = True) -> None:
        """Write a file. `flush`: it is durable when this returns, otherwise when the group is published."""

    def drop(self, keys: Iterable[str]) -> None:
        """Remove files."""

    def read(self, key: str, most: int) -> bytes:
        """Return the contents of a file of at most so many bytes."""

    def publish(self, documents: Mapping[str, bytes]) -> None:
        """Write the metadata by key, those of the group last, and remove what is only needed until then."""

    def close(self) -> None:
        """Let other processes write the group."""


class GroupPlace(Protocol):
    """Where a group goes."""

    @property
    def name(self) -> str:
        """How messages call it."""

    @property
    def connection(self) -> int:
        """Memory in bytes that each thread takes that writes there."""

    @property
    def at(self) -> Any:
        """What zarr opens the finished group by."""

    def check(self, force: bool, resume: bool) -> None:
        """Raise InputError where a group cannot, or must not, be written."""

    def try_out(self) -> None:
        """Write something, and remove it, so that a place where nothing can be written is refused before the
        work. Changes nothing that stays, also where the process is killed. Raises InputError."""

    def is_begun(self) -> bool:
        """Whether a run was interrupted, which may have been to replace what is there."""

    def record(self) -> dict[str, Any] | None:
        """Return what a finished group says of the run that made it; None where there is no such group."""

    def begin(self, head: dict[str, Any] | None, resume: bool, notice: Callable[[str], None]) -> Making:
        """Begin a group, or continue it. head: what identifies the run; None where nobody could tell whether
        the inputs are still the same. notice: called before a group is removed that cannot be kept until the
        new one is finished. Raises InputError where that cannot be."""


class RowArrays:
    """The group while it is made."""

    def __init__(self, making: Making, arrays: Arrays, chunk_rows: int):
        """making: its files. arrays: those that are written by rows. chunk_rows: rows of a chunk."""
        self.making, self._chunk_rows, self._arrays = making, chunk_rows, arrays
        self._blank: Any = zarr.create_group(MemoryStore())
        """The group with its metadata alone."""
        self._nodes = list[str]()
        for key, (shape, dtype) in arrays.items():
            self._create(key, shape, dtype, (chunk_rows, max(1, shape[1])))

    def _create(
        self, key: str, shape: tuple[int, ...], dtype: np.dtype[Any], chunks: tuple[int, ...]
    ) -> None:
        """Describe an array of the group."""
        self._blank.create_array(
            key, shape=shape, dtype=dtype, chunks=chunks, compressors=None, filters=None, overwrite=True
        )
        self._nodes.append(key)

    def done(self) -> set[int]:
        """Numbers of the chunks of rows that are there, of all arrays. Those of which some arrays are there
        are removed, because another device may find other rows. Raises StoreError."""
        there, found, halves = self.making.keys(), set[int](), set[str]()
        rows = max((shape[0] for shape, _ in self._arrays.values()), default=0)
        for number in range(-(-rows // self._chunk_rows)):
            chunks = {f"{name}/c/{number}/0" for name in self._arrays}
            if chunks <= there:
                found.add(number)
            else:
                halves |= chunks & there
        self.making.drop(halves)
        return found

    def write(self, row: int, arrays: Mapping[str, Array]) -> int:
        """Write rows of each array that begin with a chunk; bytes of the elements. Raises StoreError."""
        number, written = row // self._chunk_rows, 0
        for name, values in arrays.items():
            whole = np.zeros((self._chunk_rows, values.shape[1]), values.dtype.newbyteorder("<"))
            whole[: len(values)] = values
            self.making.put(f"{name}/c/{number}/0", whole.tobytes())
            written += values.nbytes
        return written

    def read(self, name: str, start: int, stop: int) -> Array:
        """Rows [start, stop) of an array, which have been written."""
        return np.asarray(self._open(name)[start:stop])

    def sparse(self) -> dict[str, Any]:
        """The arrays of a sparse matrix that has been written to the group itself, open for reading."""
        return {name: self._open(name) for name in ("data", "indices", "indptr")}

    def _open(self, name: str) -> Any:
        return array_at(self._blank[name].metadata, self.making.at / name)

    def write_sparse(
        self, key: str, shape: tuple[int, int], dtype: np.dtype[Any], parts: Iterable[Sparse]
    ) -> int:
        """Write a sparse matrix in compressed rows, as anndata stores it, to a group inside the group, or to
        the group itself if `key` is empty; bytes of the elements. parts: (data, columns, elements of each
        row) of its rows in order. Raises StoreError."""
        group, within = self._blank, ""
        if key:
            group, within = self._blank.create_group(key, overwrite=True), f"{key}/"
            self._nodes.append(key)
        types = {"data": dtype, "indices": np.dtype(np.int64), "indptr": np.dtype(np.int64)}
        data, columns, ends = (_Growing(self.making, within + name, kind) for name, kind in types.items())
        ends.add(np.zeros(1, np.int64))
        written = 0
        for values, indices, counts in parts:
            ends.add(data.size + np.cumsum(counts))
            data.add(values)
            columns.add(indices)
            written += values.nbytes + indices.nbytes
        for grown in (data, columns, ends):
            grown.finish()
            self._create(grown.key, (grown.size,), grown.dtype, (SPARSE_CHUNK,))
        group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": list(shape)})
        return written + 8 * (shape[0] + 1)

    def commit(self, record: dict[str, Any]) -> None:
        """Finish the group, all of whose chunks are there. record: what its attributes say of the run. Raises
        StoreError."""
        self._blank.attrs[ATTRIBUTE] = record
        documents = {}
        for node in (*self._nodes, ""):
            at = self._blank.store_path / node if node else self._blank.store_path
            documents[f"{node}/{METADATA[0]}".lstrip("/")] = document_at(at, METADATA[0]) or b""
        self.making.publish(documents)

    def close(self) -> None:
        """Let other processes write the group."""
        self.making.close()


class _Growing:
    """An array of one dimension, whose elements come in order, and of which nobody knows how many."""

    def __init__(self, making: Making, key: str, dtype: np.dtype[Any]):
        """making: where its chunks go. key: of the array."""
        self.key, self.dtype, self.size = key, dtype, 0
        self._making, self._chunk = making, np.zeros(SPARSE_CHUNK, dtype.newbyteorder("<"))

    def add(self, values: Array) -> None:
        """Take the next elements. Raises StoreError."""
        done, most = 0, len(self._chunk)
        while done < len(values):
            at = self.size % most
            some = values[done : done + most - at]
            self._chunk[at : at + len(some)] = some
            done, self.size = done + len(some), self.size + len(some)
            if self.size % most == 0:
                self._put()

    def finish(self) -> None:
        """Write the last chunk. Raises StoreError."""
        if self.size % len(self._chunk):
            self._put()

    def _put(self) -> None:
        number = (self.size - 1) // len(self._chunk)
        self._making.put(f"{self.key}/c/{number}", self._chunk.tobytes(), flush=False)
        self._chunk[:] = 0


def check(spec: Any, inputs: list[Any], force: bool, resume: bool) -> GroupPlace:
    """Return the place of a new group. Raises InputError where it cannot, or must not, be written."""
    name, folder = describe(spec), local_path(spec)
    check_new(spec)
    for other in inputs:
        if same_place(spec, other):
            raise InputError(
                f"{name} is, contains or lies inside the input {describe(other)}; choose another place"
            )
    place: GroupPlace
    if folder is not None:
        place = InFolder(folder, name)
    elif objects := objects_at(spec):
        place = InStore(os.fspath(spec), objects, name)
    else:
        raise InputError(
            f"{name} is neither a local folder nor in an object store, where this result has to go; give a "
            "path, or an address such as s3://bucket/result"
        )
    place.check(force, resume)
    return place


def is_result(place: GroupPlace, head: dict[str, Any]) -> bool:
    """Whether the group at a place is finished, and what a run with this head makes. Raises InputError where
    it is something else."""
    record = place.record()
    if record is None:
        return False
    if other := differences(record, head):
        raise InputError(
            f"{place.name} is finished, and another result: {'; '.join(other)}; leave out resume=True"
        )
    return True


def open_arrays(place: GroupPlace) -> dict[str, Any]:
    """Return the arrays of a finished group, open for reading. Raises InputError."""
    with explained(place.name, remote=place.connection > 0):
        return dict(zarr.open_group(place.at, mode="r").arrays())
