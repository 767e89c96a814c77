"""A sparse matrix whose rows are found some at a time, in any order, and stored in compressed rows at the
end.

Each chunk of rows goes to three files of the unfinished group (rows.py). The one that counts the elements of
each row is written last, so chunks that have it are done, and an interrupted run continues after them.
"""

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


class SparseRows:
    """The matrix while it is made."""

    def __init__(self, group: RowArrays, name: str, shape: tuple[int, int], dtype: Any, chunk_rows: int):
        """group: where it is made. name: how messages call it. shape, dtype: of the matrix. chunk_rows: rows
        that are written at a time."""
        self._group, self._name, self._shape, self._chunk_rows = group, name, shape, chunk_rows
        self._dtype: np.dtype[Any] = np.dtype(dtype)
        self._folder = group.folder / FOLDER
        durable.make_folders(self._folder)

    def done(self) -> set[int]:
        """Numbers of the chunks of rows that are there."""
        return {int(one.name) for one in self._folder.glob("*") if one.name.isdecimal()}

    def write(self, number: int, parts: Iterable[Sparse]) -> int:
        """Write a chunk of rows; bytes. parts: (data, columns, elements of each row) of its rows in order.
        Raises StoreError."""
        counts, written = [], 0
        try:
            with self._new(number, "data") as data, self._new(number, "columns") as columns:
                for values, indices, count in parts:
                    data.write(np.ascontiguousarray(values, self._dtype).data)
                    columns.write(np.ascontiguousarray(indices, np.int64).data)
                    counts.append(count)
                    written += values.nbytes + indices.nbytes
                for file in (data, columns):
                    file.flush()
                    os.fsync(file.fileno())
            durable.replace(self._folder / str(number), np.concatenate(counts).astype(np.int64).tobytes())
            durable.flush_folders(self._folder)
        except OSError as error:
            raise StoreError(
                f"{self._name}: rows from {number * self._chunk_rows} cannot be written ({error.strerror}); "
                f"{remedy(error, 'check its disk')}, then continue with resume=True"
            ) from error
        return written

    def finish(self, most: int) -> int:
        """Store the matrix, all of whose rows are there; bytes. most: elements that are held at a time.
        Raises StoreError."""
        try:
            written = self._group.write_sparse("", self._shape, self._dtype, self._parts(most))
            shutil.rmtree(self._folder)
        except OSError as error:
            raise StoreError(
                f"{self._name} cannot be written ({error.strerror}); {remedy(error, 'check its disk')}, "
                "then continue with resume=True"
            ) from error
        return written

    def _new(self, number: int, what: str) -> Any:
        return open(self._file(number, what), "wb")

    def _file(self, number: int, what: str) -> Path:
        return self._folder / f"{number}.{what}"

    def _parts(self, most: int) -> Iterator[Sparse]:
        for number, _ in enumerate(ranges(self._shape[0], self._chunk_rows)):
            counts = np.fromfile(self._folder / str(number), np.int64)
            with (
                open(self._file(number, "data"), "rb") as data,
                open(self._file(number, "columns"), "rb") as at,
            ):
                for start, stop in together(counts, most):
                    some = counts[start:stop]
                    count = int(some.sum())
                    yield np.fromfile(data, self._dtype, count), np.fromfile(at, np.int64, count), some


def together(counts: Array, most: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of successive rows that have at most so many elements in all, but at least one row each.
    counts: elements of each row."""
    ends, start = np.cumsum(counts), 0
    while start < len(counts):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + most, side="right")))
        yield start, stop
        start = stop
