"""Rows of a result that can be finished only when all of them are known."""

import contextlib
import tempfile
from collections.abc import Iterator
from types import TracebackType
from typing import IO, Any

import numpy as np

from ..storage.write.opening import scratch_folder
from ..support.errors import StoreError, remedy
from ..support.intervals import ranges
from .stream import Array

BLOCK_BYTES = 1 << 20
"""Bytes of the rows that are finished together, about."""
ROOM = 6 * BLOCK_BYTES
"""Bytes that finishing rows takes beside them."""


class KeptRows:
    """Keeps rows in memory, or in a temporary file beside the output that they are for. The file has no name,
    so that nothing is left of it when the process ends."""

    def __init__(self, shape: tuple[int, int], dtype: np.dtype[Any], out: Any):
        """out: the output; None where rows are kept in memory. Raises StoreError."""
        self._shape, self._dtype, self._at = shape, dtype, 0
        self.array: Array | None = None
        """The rows, where they are kept in memory; None where they lie in a file."""
        self._file: IO[bytes] | None = None
        if out is None:
            self.array = np.empty(shape, dtype)
            return
        self._folder = scratch_folder(out)
        try:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - `__exit__` closes it
        except OSError as error:
            raise self._failed(error) from error

    def __enter__(self) -> "KeptRows":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what is still to be written is not needed
                self._file.close()

    def add(self, rows: Array) -> None:
        """Take the next rows. Raises StoreError."""
        if self.array is not None:
            self.array[self._at : self._at + len(rows)] = rows
        elif self._file is not None:
            try:
                self._file.write(np.ascontiguousarray(rows).data)
            except OSError as error:
                raise self._failed(error) from error
        self._at += len(rows)

    def blocks(self) -> Iterator[Array]:
        """Yield all rows in order, some at a time. What is written to those in memory stays. Raises
        StoreError."""
        (m, k), file = self._shape, self._file
        step = max(1, BLOCK_BYTES // (k * self._dtype.itemsize))
        if file is None:
            assert self.array is not None, "rows are in one of both"
            yield from (self.array[start:stop] for start, stop in ranges(m, step))
            return
        block: Array = np.empty((min(step, m), k), self._dtype)
        try:
            file.seek(0)  # which writes what is buffered
            for start, stop in ranges(m, step):
                some = block[: stop - start]
                if file.readinto(some.data) != some.nbytes:  # type: ignore[attr-defined]
                    raise OSError("the temporary file is shorter than what was written to it")
                yield some
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> StoreError:
        return StoreError(
            f"a temporary file of {self._shape[0] * self._shape[1] * self._dtype.itemsize} bytes cannot be "
            f"kept in {self._folder} ({error.strerror or error}); {remedy(error, 'make room there')}"
        )
