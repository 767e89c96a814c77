"""A Zarr group of arrays that are written some rows at a time: what a reduction keeps of C.

The group is made in a hidden folder beside its place and moved there when it is finished; a group that it
replaces stays until then. A chunk is a file, written beside its place, flushed and renamed. So the chunks
that are there say what a run that was interrupted has done, and the file `HEAD` says which run it was.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from ...support.errors import InputError, StoreError, remedy
from ..io import durable
from ..read.addresses import describe, local_path, same_place
from .checks import kind_there
from .provenance import ATTRIBUTE, differences

Array = npt.NDArray[Any]

HEAD = "ooc-gemm.head"
"""The file that says which run makes the group."""
SPARSE_CHUNK = 1 << 18
"""Elements of a chunk of a sparse matrix."""
Sparse = tuple[Array, Array, Array]
"""Some rows of a sparse matrix: data, columns, and elements of each row."""
SUFFIX = ".ooc-gemm-unfinished"


class RowArrays:
    """The group while it is made."""

    def __init__(self, place: Path, name: str, chunk_rows: int, file: int):
        self._place, self._name, self._chunk_rows, self._file = place, name, chunk_rows, file
        self._folder = staging(place)

    @property
    def folder(self) -> Path:
        """Where the group is made."""
        return self._folder

    def done(self, arrays: Mapping[str, tuple[tuple[int, int], np.dtype[Any]]]) -> set[int]:
        """Numbers of the chunks of rows that are there, of all arrays."""
        found = [
            {int(one.name) for one in (self._folder / name / "c").glob("*") if (one / "0").exists()}
            for name in arrays
        ]
        return set.intersection(*found) if found else set()

    def write(self, row: int, arrays: Mapping[str, Array]) -> int:
        """Write rows of each array that begin with a chunk; bytes of the elements. Raises StoreError."""
        number = row // self._chunk_rows
        written = 0
        try:
            for name, values in arrays.items():
                whole = np.zeros((self._chunk_rows, values.shape[1]), values.dtype.newbyteorder("<"))
                whole[: len(values)] = values
                file = self._folder / name / "c" / str(number) / "0"
                file.parent.mkdir(parents=True, exist_ok=True)
                durable.replace(file, whole.tobytes())
                durable.flush_folders(file.parent, file.parent.parent)
                written += values.nbytes
        except OSError as error:
            raise StoreError(
                f"{self._name}: rows from {row} cannot be written ({error.strerror}); "
                f"{remedy(error, 'check its disk')}, then continue with resume=True"
            ) from error
        return written

    def read(self, name: str, start: int, stop: int) -> Array:
        """Rows [start, stop) of an array, which have been written."""
        return np.asarray(zarr.open_array(self._folder / name, mode="r")[start:stop])

    def sparse(self) -> dict[str, Any]:
        """The arrays of a sparse matrix that has been written to the group itself, open for reading."""
        return {
            name: zarr.open_array(self._folder / name, mode="r") for name in ("data", "indices", "indptr")
        }

    def write_sparse(
        self, key: str, shape: tuple[int, int], dtype: np.dtype[Any], parts: Iterable[Sparse]
    ) -> int:
        """Write a sparse matrix in compressed rows, as anndata stores it, to a group inside the group, or to
        the group itself if `key` is empty; bytes of the elements. parts: (data, columns, elements of each
        row) of its rows in order."""
        group = zarr.open_group(self._folder, mode="r+")
        group = group.create_group(key, overwrite=True) if key else group
        written = 0

        def create(name: str, size: int, kind: Any) -> Any:
            chunks = (SPARSE_CHUNK,)
            return group.create_array(
                name, shape=(size,), dtype=kind, chunks=chunks, compressors=None, overwrite=True
            )

        data, columns = create("data", 0, dtype), create("indices", 0, np.int64)
        ends = create("indptr", shape[0] + 1, np.int64)
        ends[0] = 0
        row = total = 0
        for values, indices, counts in parts:
            data.append(values)
            columns.append(indices)
            ends[row + 1 : row + 1 + len(counts)] = total + np.cumsum(counts)
            row, total = row + len(counts), total + len(values)
            written += values.nbytes + indices.nbytes
        group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": list(shape)})
        return written + 8 * (shape[0] + 1)

    def commit(self, record: dict[str, Any]) -> None:
        """Move the finished group to its place. record: what its attributes say of the run."""
        group = zarr.open_group(self._folder, mode="r+")
        group.attrs[ATTRIBUTE] = record
        try:
            (self._folder / HEAD).unlink()
            old = self._place.with_name(f".{self._place.name}.ooc-gemm-replaced")
            if self._place.exists():
                shutil.rmtree(old, ignore_errors=True)
                os.replace(self._place, old)
            os.replace(self._folder, self._place)
            durable.flush_folders(self._place.parent)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            raise StoreError(
                f"{self._name} cannot be put in its place ({error.strerror}); check its folder"
            ) from error

    def close(self) -> None:
        """Let other processes write the group."""
        os.close(self._file)


def staging(place: Path) -> Path:
    """The folder in which the group for a place is made."""
    return place.with_name(f".{place.name}{SUFFIX}")


def check(spec: Any, inputs: list[Any], force: bool, resume: bool) -> Path:
    """The place of a new group. Raises InputError where it cannot, or must not, be written."""
    name, place = describe(spec), local_path(spec)
    if place is None or not isinstance(spec, str | os.PathLike):
        raise InputError(f"{name} is no local folder, where this result has to go; give a path")
    for other in inputs:
        if same_place(spec, other):
            raise InputError(
                f"{name} is, contains or lies inside the input {describe(other)}; choose another place"
            )
    if _is_there(place, name):
        if kind_there(place) != "group" or _record(place) is None:
            raise InputError(f"{name} exists and is no such result; it is left alone, choose another place")
        if not (force or resume):
            raise InputError(f"{name} exists; give force=True to replace it, or choose another place")
    elif _is_there(staging(place), name) and not (force or resume):
        raise InputError(
            f"{name} is the unfinished result of an interrupted run; continue it with resume=True, or give "
            "force=True to replace it"
        )
    parent = next(folder for folder in place.parents if _is_there(folder, name))
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise InputError(f"{name} cannot be created: {parent} is not a writable folder; choose another place")
    return place


def _is_there(path: Path, name: str) -> bool:
    """Whether there is something. name: what messages call the group. Raises InputError where nobody can
    know, as where a part of the path is too long."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise InputError(
            f"{name} cannot be created ({error.strerror}); {remedy(error, 'choose another place')}"
        ) from error
    return True


def is_begun(place: Path) -> bool:
    """Whether a run for a place was interrupted, which may have been to replace what is there."""
    return (staging(place) / HEAD).exists()


def is_result(place: Path, head: dict[str, Any], name: str) -> bool:
    """Whether the group at a place is finished, and what a run with this head makes. Raises InputError where
    it is something else."""
    if not place.exists():
        return False
    if other := differences(_record(place) or {"inputs": {}, "options": {}}, head):
        raise InputError(f"{name} is finished, and another result: {'; '.join(other)}; leave out resume=True")
    return True


def begin(
    place: Path,
    name: str,
    head: dict[str, Any] | None,
    arrays: Mapping[str, tuple[tuple[int, int], np.dtype[Any]]],
    chunk_rows: int,
    resume: bool,
) -> RowArrays:
    """Begin a group, or continue it. arrays: shape and type of each. head: what identifies the run; None
    where nobody could tell whether the inputs are still the same. Raises InputError where it cannot be."""
    folder = staging(place)
    try:
        if resume and is_begun(place):
            file = _locked(folder, name)
            before = json.loads((folder / HEAD).read_text("utf-8") or "null")
            other = differences(before, head) if before and head else ["its inputs cannot be known again"]
            if other:
                os.close(file)
                raise InputError(
                    f"{name} cannot be continued: {'; '.join(other)}; start over with force=True"
                )
            return RowArrays(place, name, chunk_rows, file)
        if is_begun(place):
            os.close(_locked(folder, name))
        shutil.rmtree(folder, ignore_errors=True)
        durable.make_folders(folder)
        group = zarr.create_group(folder)
        for key, (shape, dtype) in arrays.items():
            chunks = chunk_rows, max(1, shape[1])
            group.create_array(key, shape=shape, dtype=dtype, chunks=chunks, compressors=None, filters=None)
        durable.replace(folder / HEAD, json.dumps(head).encode())
        durable.flush_folders(folder)
        return RowArrays(place, name, chunk_rows, _locked(folder, name))
    except OSError as error:
        raise InputError(
            f"{name} cannot be created ({error.strerror}); {remedy(error, 'choose another place')}"
        ) from error


def open_arrays(place: Path) -> dict[str, Any]:
    """The arrays of a finished group, open for reading."""
    return dict(zarr.open_group(place, mode="r").arrays())


def _locked(folder: Path, name: str) -> int:
    """The open file that holds the lock of a run. Raises InputError where another process has it."""
    file = os.open(folder / HEAD, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise InputError(f"{name} is being written by another process; wait for it, or stop it") from None
    except OSError:  # a file system without locks
        pass
    return file


def _record(place: Path) -> dict[str, Any] | None:
    """What a finished group says of the run that made it; None where it says nothing."""
    record = dict(zarr.open_group(place, mode="r").attrs).get(ATTRIBUTE)
    if not isinstance(record, dict) or not {"inputs", "options"} <= set(record):
        return None
    return {"inputs": record["inputs"], "options": record["options"]}
