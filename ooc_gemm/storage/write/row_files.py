"""Rows of a sparse matrix in a local folder, as workers of a cluster write them for the client.

Each chunk of rows goes to three files: data, columns, and the number of elements of each row.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...support.errors import StoreError, remedy
from ..io import durable
from .rows import Array, Sparse
from .sparse import together


class RowFiles:
    """The files of some rows, in some columns."""

    def __init__(self, folder: Path, name: str, dtype: Any, chunk_rows: int):
        """folder: is made by the first write. name: how messages call the matrix. dtype: of the matrix.
        chunk_rows: rows that are written at a time."""
        self.folder, self._name, self._chunk_rows = folder, name, chunk_rows
        self._dtype: np.dtype[Any] = np.dtype(dtype)

    def write(self, number: int, parts: Iterable[Sparse]) -> int:
        """Write a chunk of rows; bytes. parts: (data, columns, elements of each row) of its rows in order.
        Raises StoreError."""
        counts, written = [], 0
        with self._explained(number):
            durable.make_folders(self.folder)
            with self._new(number, "data") as data, self._new(number, "columns") as columns:
                for values, indices, count in parts:
                    data.write(np.ascontiguousarray(values, self._dtype).data)
                    columns.write(np.ascontiguousarray(indices, np.int64).data)
                    counts.append(count)
                    written += values.nbytes + indices.nbytes
                for file in (data, columns):
                    file.flush()
                    os.fsync(file.fileno())
            all_counts = np.concatenate(counts).astype(np.int64)
            durable.replace(self._file(number, "counts"), all_counts.tobytes())
            durable.flush_folders(self.folder)
        return written

    def counts(self, number: int) -> Array:
        """Return the number of elements of each row of a chunk of rows. Raises OSError."""
        return np.fromfile(self._file(number, "counts"), np.int64)

    def read(self, number: int, runs: Iterable[tuple[int, int]]) -> Iterator[Sparse]:
        """Return the rows of a chunk of rows. runs: [start, stop) of those that are held at a time, in order.
        Raises OSError."""
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
                f"{self._name}: rows from {number * self._chunk_rows} cannot be written ({error.strerror}); "
                f"{remedy(error, 'check its disk')}, then continue with resume=True"
            ) from error

    def _new(self, number: int, what: str) -> Any:
        return open(self._file(number, what), "wb")

    def _file(self, number: int, what: str) -> Path:
        return self.folder / f"{number}.{what}"


def side_by_side(parts: list[RowFiles], number: int, most: int) -> Iterator[Sparse]:
    """Return a chunk of rows whose columns lie in several folders, those of the first columns first. most:
    elements that are held at a time, but at least one row. Raises OSError."""
    runs = list(together(np.sum([one.counts(number) for one in parts], axis=0), most))
    if len(parts) == 1:
        yield from parts[0].read(number, runs)
        return
    for some in zip(*(one.read(number, runs) for one in parts), strict=True):
        rows = np.concatenate([np.repeat(np.arange(len(counts)), counts) for *_, counts in some])
        order = np.argsort(rows, kind="stable")
        values, columns = (np.concatenate([one[i] for one in some])[order] for i in range(2))
        yield values, columns, sum(counts for *_, counts in some)
