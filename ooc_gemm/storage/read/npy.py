"""Matrices in NumPy's files (.npy), each piece of which is read by the thread that wants it, into its slot.

Nothing is mapped, so that no page of the file counts as memory of this process.
"""

import ast
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...planning.problem import Matrix, MiB
from ...planning.schedule import Piece
from ...support.buffers import Bytes
from ...support.errors import InputError, StoreError
from ..format.limits import MAX_ARRAY_BYTES, check_matrix
from ..io import files
from .source import Array, Source

MAGIC = b"\x93NUMPY"
MOST_HEADER = 10_000
"""Most bytes of a header; NumPy's own limit."""
UNIT_BYTES = 4 * MiB
"""Bytes of a row that are read together."""


@dataclass(frozen=True)
class Npy:
    """Where and how a file holds an array."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    offset: int
    """Where its elements begin, in bytes."""


def look(path: Path, name: str) -> Npy:
    """Read the header of a file that begins with `MAGIC`. Raises InputError."""
    text = files.read_small(path, MOST_HEADER + 12) or b""
    try:
        wide = text[6] > 1
        (length,) = struct.unpack("<I" if wide else "<H", text[8 : 12 if wide else 10])
        offset = (12 if wide else 10) + length
        if text[6] not in (1, 2, 3) or length > MOST_HEADER or len(text) < offset:
            raise ValueError("its header is cut off, too long, or of a later version")
        found = ast.literal_eval(text[offset - length : offset].decode("utf-8" if text[6] == 3 else "latin1"))
        shape, dtype = tuple(found["shape"]), np.dtype(found["descr"])
        fortran = bool(found["fortran_order"])
        if any(type(extent) is not int or not 0 <= extent < 1 << 62 for extent in shape):
            raise ValueError(f"its shape is {shape}")
    except (ValueError, TypeError, KeyError, SyntaxError, IndexError, struct.error, MemoryError) as error:
        raise InputError(
            f"{name} is no file that NumPy has written ({error}); save the array again"
        ) from error
    except RecursionError as error:
        raise InputError(f"{name} is no file that NumPy has written; save the array again") from error
    if dtype.hasobject:
        raise InputError(
            f"{name} holds pickled Python objects, which are not loaded; save it as numbers, such as "
            "x.astype('f8')"
        )
    return Npy(path, shape, dtype, fortran, offset)


def open_source(found: Npy, name: str) -> Source:
    """Return what reads the matrix in a file: of Fortran order its transpose. Raises InputError where it is
    no matrix of numbers, or is cut off."""
    check_matrix(name, found.shape, found.dtype)
    rows, cols = found.shape[::-1] if found.fortran else found.shape
    nbytes, there = rows * cols * found.dtype.itemsize, os.stat(found.path).st_size - found.offset
    if there < nbytes or nbytes > MAX_ARRAY_BYTES:
        raise InputError(
            f"{name} is cut off: it holds {there} bytes of an array of {nbytes}; copy or save it again"
        )
    return NpySource(name, found, rows, cols)


class NpySource(Source):
    """A matrix whose rows lie one after the other in a file."""

    def __init__(self, name: str, found: Npy, rows: int, cols: int):
        itemsize = found.dtype.itemsize
        width = max(1, min(cols, UNIT_BYTES // itemsize))
        height = max(1, min(rows, 1024, UNIT_BYTES // (width * itemsize)))
        matrix = Matrix(rows, cols, itemsize, height, width, chunked=False)
        super().__init__(name, found.dtype.newbyteorder("="), matrix)
        self._found, self._swapped = found, not found.dtype.isnative

    def read(self, piece: Piece, slot: Bytes) -> tuple[Array, int]:
        """Reads whole rows with one call, else a part of each."""
        place, s = self._place(piece, slot), self.matrix
        (first, last), (left, right) = piece.rows, (piece.span[0], min(piece.span[1], s.cols))
        try:
            file, _ = files.open_file(self._found.path)
            try:
                if (left, right) == (0, s.cols) and place.shape[1] == s.cols:
                    self._fill(file, place.reshape(-1).view(np.uint8), first * s.cols)
                else:
                    for number, row in enumerate(range(first, last)):
                        part = place[number, : right - left].view(np.uint8)
                        self._fill(file, part, row * s.cols + left)
            finally:
                os.close(file)
        except OSError as error:
            raise StoreError(
                f"{self.name}: rows {first}–{last - 1} cannot be read ({error.strerror or error}); check its "
                "disk, then run again"
            ) from error
        if self._swapped:
            place.byteswap(inplace=True)
        return place[:, piece.cols[0] - piece.span[0] : piece.cols[1] - piece.span[0]], place.nbytes

    def _fill(self, file: int, part: Bytes, element: int) -> None:
        """Read bytes from an element of the file on. Raises OSError, and StoreError where the file ends."""
        at, view = self._found.offset + element * self.matrix.itemsize, memoryview(part)  # type: ignore[arg-type]
        while view:
            count = os.preadv(file, [view], at)
            if count == 0:
                raise StoreError(
                    f"{self.name} was cut off since it was opened; save it again, then run again"
                )
            at, view = at + count, view[count:]
