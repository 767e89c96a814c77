"""A sparse matrix whose rows are found some at a time, in any order, and stored in compressed rows at the
end.

Each chunk of rows goes to three files of the unfinished group (rows.py). The one that counts the elements of
each row is written last, so chunks that have it are done, and an interrupted run continues after them.
"""

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...support.errors import StoreError, remedy
from ...support.intervals import ranges
from ..io import durable
from .rows import Array, RowArrays, Sparse

FOLDER = "rows"


class RowFiles:
    """Rows of a matrix in a folder."""

    def __init__(self, folder: Path, name: str, dtype: Any, chunk_rows: int):
        """folder: is made where it is missing. name: how messages call the matrix. dtype: of the matrix.
        chunk_rows: rows that are written at a time. Raises OSError."""
        self.folder, self.name, self._chunk_rows = folder, name, chunk_rows
        self._dtype: np.dtype[Any] = np.dtype(dtype)
        durable.make_folders(folder)

    def done(self) -> set[int]:
        """Numbers of the chunks of rows that are there."""
        return {int(one.name) for one in self.folder.glob("*") if one.name.isdecimal()}

    def write(self, number: int, parts: Iterable[Sparse]) -> int:
        """Write a chunk of rows; bytes. parts: (data, columns, elements of each row) of its rows in order.
        Raises StoreError."""
        counts, written = [], 0
        with self._explained(number):
            with self._new(number, "data") as data, self._new(number, "columns") as columns:
                for values, indices, count in parts:
                    data.write(np.ascontiguousarray(values, self._dtype).data)
                    columns.write(np.ascontiguousarray(indices, np.int64).data)
                    counts.append(count)
                    written += values.nbytes + indices.nbytes
                for file in (data, columns):
                    file.flush()
                    os.fsync(file.fileno())
            durable.replace(self.folder / str(number), np.concatenate(counts).astype(np.int64).tobytes())
            durable.flush_folders(self.folder)
        return written

    def take(self, number: int, other: "RowFiles") -> None:
        """Move a chunk of rows here from another folder of the same file system. Raises StoreError."""
        with self._explained(number):
            for what in ("data", "columns"):
                os.replace(other._file(number, what), self._file(number, what))
            durable.flush_folders(self.folder)
            os.replace(other.folder / str(number), self.folder / str(number))
            durable.flush_folders(self.folder)

    def counts(self, number: int) -> Array:
        """Elements of each row of a chunk of rows. Raises OSError."""
        return np.fromfile(self.folder / str(number), np.int64)

    def read(self, number: int, runs: Iterable[tuple[int, int]]) -> Iterator[Sparse]:
        """The rows of a chunk of rows. runs: [start, stop) of those that are held at a time, in order. Raises
        OSError."""
        counts = self.counts(number)
        with open(self._file(number, "data"), "rb") as data, open(self._file(number, "columns"), "rb") as at:
            for start, stop in runs:
                some = counts[start:stop]
                count = int(some.sum())
                yield np.fromfile(data, self._dtype, count), np.fromfile(at, np.int64, count), some

    @contextlib.contextmanager
    def _explained(self, number: int) -> Iterator[None]:
        """Raise StoreError for an OSError that says that a chunk of rows cannot be written."""
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"{self.name}: rows from {number * self._chunk_rows} cannot be written ({error.strerror}); "
                f"{remedy(error, 'check its disk')}, then continue with resume=True"
            ) from error

    def _new(self, number: int, what: str) -> Any:
        return open(self._file(number, what), "wb")

    def _file(self, number: int, what: str) -> Path:
        return self.folder / f"{number}.{what}"


class SparseRows(RowFiles):
    """The matrix while it is made."""

    def __init__(self, group: RowArrays, name: str, shape: tuple[int, int], dtype: Any, chunk_rows: int):
        """group: where it is made. shape: of the matrix. Others: as of `RowFiles`."""
        super().__init__(group.folder / FOLDER, name, dtype, chunk_rows)
        self._group, self._shape = group, shape

    def finish(self, most: int) -> int:
        """Store the matrix, all of whose rows are there; bytes. most: elements that are held at a time.
        Raises StoreError."""
        try:
            written = self._group.write_sparse("", self._shape, self._dtype, self._parts(most))
            shutil.rmtree(self.folder)
        except OSError as error:
            raise StoreError(
                f"{self.name} cannot be written ({error.strerror}); {remedy(error, 'check its disk')}, "
                "then continue with resume=True"
            ) from error
        return written

    def _parts(self, most: int) -> Iterator[Sparse]:
        for number, _ in enumerate(ranges(self._shape[0], self._chunk_rows)):
            yield from self.read(number, together(self.counts(number), most))


def side_by_side(parts: list[RowFiles], number: int, most: int) -> Iterator[Sparse]:
    """A chunk of rows whose columns lie in several folders, those of the first columns first. most: elements
    that are held at a time, but at least one row. Raises OSError."""
    runs = list(together(np.sum([one.counts(number) for one in parts], axis=0), most))
    for some in zip(*(one.read(number, runs) for one in parts), strict=True):
        rows = np.concatenate([np.repeat(np.arange(len(counts)), counts) for *_, counts in some])
        order = np.argsort(rows, kind="stable")
        values, columns = (np.concatenate([one[i] for one in some])[order] for i in range(2))
        yield values, columns, sum(counts for *_, counts in some)


def together(counts: Array, most: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of successive rows that have at most so many elements in all, but at least one row each.
    counts: elements of each row."""
    ends, start = np.cumsum(counts), 0
    while start < len(counts):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + most, side="right")))
        yield start, stop
        start = stop
