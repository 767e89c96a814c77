"""A new array that is written row by row, in order: results that a pass makes."""

from types import TracebackType
from typing import Any

import numpy as np

from ..planning.problem import CHUNK_BYTES
from ..planning.schedule import Part
from ..storage.io.requests import CONNECTION_BYTES
from ..storage.read.addresses import describe, same_place
from ..storage.write import checks, layout, opening
from ..support.buffers import page_aligned
from ..support.errors import InputError
from ..support.intervals import ceil_div
from .stream import Array


class RowWriter:
    """Gathers rows to chunks and writes each chunk when it is full. Where the body of its `with` fails,
    nothing is left in a local folder, and an array that was to be replaced stays."""

    def __init__(self, out: Any, shape: tuple[int, int], dtype: Any, force: bool):
        """out: a path or URL. shape, dtype: of the array. force: replace an array that exists."""
        self._rows, cols = shape
        self._dtype: np.dtype[Any] = np.dtype(dtype)
        height = _height(shape, self._dtype)
        output = layout.Output(shape, self._dtype, (height, max(1, cols)))
        self._target = opening.create_target(out, output, self._dtype, force=force)
        (self._slot,) = page_aligned(1, height * max(1, cols) * self._dtype.itemsize)
        self._height, self._at = height, 0
        self.bytes_written = 0

    def __enter__(self) -> "RowWriter":
        return self

    def add(self, values: Array) -> None:
        """Take the next rows. Raises StoreError where a chunk cannot be written."""
        done = 0
        while done < len(values):
            chunk, row = divmod(self._at, self._height)
            part = Part(
                (chunk, 0), 0, 0, min(self._height, self._rows - chunk * self._height), values.shape[1]
            )
            taken = values[done : done + part.rows - row]
            self._target.view(part, self._slot)[row : row + len(taken)] = taken
            done, self._at = done + len(taken), self._at + len(taken)
            if row + len(taken) == part.rows:
                self.bytes_written += self._target.write(part, self._slot)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._target.sink.commit()
        except BaseException as failed:
            error = failed
            raise
        finally:
            if error is not None:
                self._target.sink.discard()


def _height(shape: tuple[int, int], dtype: np.dtype[Any]) -> int:
    """Rows of a chunk."""
    return max(1, min(shape[0], CHUNK_BYTES[1] // (max(1, shape[1]) * dtype.itemsize)))


def memory(shape: tuple[int, int], dtype: Any) -> int:
    """Bytes that a `RowWriter` of such an array takes."""
    kind: np.dtype[Any] = np.dtype(dtype)
    return _height(shape, kind) * max(1, shape[1]) * kind.itemsize + CONNECTION_BYTES


def written(shape: tuple[int, int], dtype: Any) -> int:
    """Bytes that writing such an array moves to the store: those of whole chunks."""
    kind: np.dtype[Any] = np.dtype(dtype)
    height = _height(shape, kind)
    return ceil_div(shape[0], height) * height * max(1, shape[1]) * kind.itemsize


def write_rows(out: Any, values: Array, force: bool) -> int:
    """Write an array that is in memory; the bytes written. Raises InputError and StoreError."""
    with RowWriter(out, (len(values), values.shape[1]), values.dtype, force) as writer:
        writer.add(values)
    return writer.bytes_written


def check_rows(out: Any, inputs: list[Any], force: bool, outputs: tuple[Any, ...] = ()) -> None:
    """Raise InputError where no array can be written there; leaves everything as it was. outputs: what else
    is written."""
    checks.check_new(out)
    for other in outputs:
        if same_place(out, other):
            raise InputError(
                f"{describe(out)} is, contains or lies inside the output {describe(other)}; choose another "
                "place"
            )
    checks.check_output(out, inputs, force, reads=False)
    opening.try_place(out)
