"""A sparse matrix whose rows are found some at a time, in any order, and stored in compressed rows at the
end.

Each chunk of rows goes to files of the unfinished group (rows.py), each of which holds some of its rows under
a name that nobody has used before. A file that lists them is written last, so chunks that have it are done,
and an interrupted run continues after them.
"""

import json
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ...support.errors import Error, StoreError, remedy
from .rows import Array, RowArrays, Sparse
from .rows_folder import PARTS

LIST_BYTES = 16 << 20
"""More bytes than a list of the files of a chunk has."""


class SparseRows:
    """The matrix while it is made."""

    def __init__(self, group: RowArrays, name: str, shape: tuple[int, int], dtype: Any, chunk_rows: int):
        """group: where it is made. name: how messages call it. shape, dtype: of the matrix. chunk_rows: rows
        that are written at a time."""
        self._group, self._name, self._shape, self._chunk_rows = group, name, shape, chunk_rows
        self._dtype: np.dtype[Any] = np.dtype(dtype)

    @property
    def _numbers(self) -> range:
        """Numbers of all chunks of rows."""
        return range(-(-self._shape[0] // self._chunk_rows))

    def done(self) -> set[int]:
        """Numbers of the chunks of rows that are there."""
        there = self._group.making.keys()
        return {number for number in self._numbers if f"{PARTS}/{number}" in there}

    def write(self, number: int, parts: Iterable[Sparse]) -> int:
        """Write a chunk of rows; bytes. parts: (data, columns, elements of each row) of its rows in order.
        Raises StoreError."""
        listed, written, making = [], 0, self._group.making
        try:
            for values, indices, counts in parts:
                name = uuid.uuid4().hex
                making.put(f"{PARTS}/{name}", _packed(counts, indices, np.asarray(values, self._dtype)))
                listed.append((name, len(counts), len(values)))
                written += values.nbytes + indices.nbytes
            making.put(f"{PARTS}/{number}", json.dumps(listed).encode())
        except Error:
            raise
        except OSError as error:  # of the files from which the parts are read
            raise StoreError(
                f"{self._name}: rows from {number * self._chunk_rows} cannot be written ({error.strerror}); "
                f"{remedy(error, 'check its disk')}, then continue with resume=True"
            ) from error
        return written

    def finish(self) -> int:
        """Store the matrix, all of whose rows are there; bytes. Raises StoreError."""
        return self._group.write_sparse("", self._shape, self._dtype, self._parts())

    def _parts(self) -> Iterator[Sparse]:
        making, size = self._group.making, self._dtype.itemsize
        for number in self._numbers:
            for name, rows, count in json.loads(making.read(f"{PARTS}/{number}", LIST_BYTES)):
                data = making.read(f"{PARTS}/{name}", 8 * (rows + count) + size * count)
                columns_at, values_at = 8 * rows, 8 * (rows + count)
                yield (
                    np.frombuffer(data, self._dtype, count, values_at),
                    np.frombuffer(data, np.int64, count, columns_at),
                    np.frombuffer(data, np.int64, rows),
                )


def _packed(counts: Array, columns: Array, values: Array) -> bytes:
    """Return some rows as the contents of a file."""
    integers = (np.ascontiguousarray(x, np.int64) for x in (counts, columns))
    return b"".join(x.data for x in (*integers, np.ascontiguousarray(values)))


def together(counts: Array, most: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of successive rows that have at most so many elements in all, but at least one row each.
    counts: elements of each row."""
    ends, start = np.cumsum(counts), 0
    while start < len(counts):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + most, side="right")))
        yield start, stop
        start = stop
