"""The reduction of `threshold`: the elements of C that reach a value, while C passes by.

Nobody knows before how many there are. So those of a row of blocks are gathered in a little memory; when
that is full, they are sorted and go to a file (as a run). When all blocks of the row have passed, its runs
are merged, some rows at a time.
"""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import IO, Any

import numpy as np

from ..storage.write.rows import Sparse
from ..storage.write.sparse import together
from ..support.errors import OutOfMemoryError, StoreError, remedy
from .rescore import Array

STRIP = 32
"""Rows of a tile that are compared at a time."""
ROOM = 8 << 20
"""Bytes of elements that are held, before they are sorted and go to a file."""
COPIES = 7
"""Times this memory, at most, with what sorting, merging and writing take."""
Run = tuple[Array, Array, Array]
"""Elements in the order of rows and columns: where each row ends, columns, values."""
Powers = tuple[Array, Array]
"""For each row and each column of C an exponent of two, int32."""


def room(columns: int) -> int:
    """Bytes of elements that are held at a time where they go to files: at least those of one row of C."""
    return max(ROOM, columns * 16)


@dataclass
class _Band:
    """What is found in the rows of one row of blocks."""

    counts: Array
    """Elements of each row."""
    keys: list[Array] = field(default_factory=list)
    """Place of each element that is in memory: row·n + column …"""
    values: list[Array] = field(default_factory=list)
    """… and the elements."""
    nbytes: int = 0
    """Memory that both take."""
    file: IO[bytes] | None = None
    runs: list[tuple[int, int]] = field(default_factory=list)
    """Where runs begin in the file, and their elements."""


class Above:
    """Keeps elements that reach a value (a `Reduction`)."""

    tile = (512, 4096)

    def __init__(
        self,
        shape: tuple[int, int],
        height: int,
        least: float,
        absolute: bool = False,
        others: bool = False,
        spill: Path | None = None,
        most: int = 0,
        unbounded: bool = False,
        powers: Powers | None = None,
    ):
        """shape: of C. height: rows of a row of blocks. least: the value. absolute: elements count without
        their sign. others: nothing on the diagonal is kept. spill: a folder for runs; None if all is kept in
        memory, in at most `most` bytes. unbounded: elements may be too large for their type, and are looked
        at for that. powers: elements are multiplied with two to the sum of both; None: both are 0."""
        self._shape, self._height, self._least = shape, height, least
        self._absolute, self._others = absolute, others
        self._powers = powers
        self._spill_to, self._most, self._unbounded = spill, most, unbounded
        self.not_finite = 0
        """Elements that are NaN or infinite, where they are looked for; on the diagonal only if it is
        kept."""
        self.room = room(shape[1])
        self._bands: dict[int, _Band] = {}
        self._held, self._lock = 0, Lock()

    def take(self, values: Array, row: int, col: int) -> None:
        """Compares strips of rows, each in the cache."""
        for at in range(0, len(values), STRIP):
            self._strip(values[at : at + STRIP], row + at, col)

    def rows(self, number: int) -> "Merged":
        """What is found in a row of blocks, all of whose blocks have passed. It is forgotten with that."""
        with self._lock:
            band = self._bands.pop(number, None) or self._new(number)
            if self._spill_to is not None:  # else it stays in memory
                self._held -= band.nbytes
        run = _sorted(band, self._shape[1]) if band.keys or not band.runs else None
        return Merged(band.counts, run, band.file, band.runs, band.values[0].dtype if band.values else None)

    def extent(self, number: int) -> tuple[int, int]:
        """Rows [start, stop) of a row of blocks."""
        return number * self._height, min((number + 1) * self._height, self._shape[0])

    def _strip(self, values: Array, row: int, col: int) -> None:
        height, width = values.shape
        same = np.arange(0)
        if self._others and row < col + width and col < row + height:
            same = np.arange(max(row, col), min(row + height, col + width))
        size = values
        if self._powers is not None:
            down, across = self._powers
            with np.errstate(over="ignore", under="ignore"):
                values = np.ldexp(values, down[row : row + height, None] + across[col : col + width])
            if self._least != 0:  # what is too small for its type becomes 0, but keeps its sign
                size = values
        with np.errstate(invalid="ignore"):
            kept = (np.abs(size) if self._absolute else size) >= self._least
        kept[same - row, same - col] = False
        if self._unbounded and not (np.isfinite(values.min()) and np.isfinite(values.max())):
            lost = ~np.isfinite(values)
            lost[same - row, same - col] = False
            with self._lock:
                self.not_finite += int(np.count_nonzero(lost))
        place = np.flatnonzero(kept)
        if not len(place):
            return
        number = row // self._height
        at, inside = np.divmod(place, width)
        found, first = values[at, inside], row - number * self._height
        keys = (at + first) * self._shape[1] + (inside + col)
        with self._lock:
            if number not in self._bands:
                self._bands[number] = self._new(number)
            band = self._bands[number]
            band.counts[first : first + height] += np.bincount(at, minlength=height)
            band.keys.append(keys)
            band.values.append(found)
            band.nbytes += keys.nbytes + found.nbytes
            self._held += keys.nbytes + found.nbytes
            self._make_room()

    def _new(self, number: int) -> _Band:
        first, last = self.extent(number)
        return _Band(np.zeros(last - first, np.int64))

    def _make_room(self) -> None:
        if self._spill_to is None and self._held > self._most:
            raise OutOfMemoryError(
                f"elements that reach {self._least:g} take more than {self._most} bytes, all that the memory "
                "limit leaves for them; give a higher value, or an output"
            )
        if self._spill_to is not None and self._held > self.room:
            self._spill(max(self._bands.values(), key=lambda band: band.nbytes), self._spill_to)

    def _spill(self, band: _Band, folder: Path) -> None:
        """Move what is in memory of a row of blocks to its file."""
        ends, columns, values = _sorted(band, self._shape[1])
        try:
            if band.file is None:
                band.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - the band closes it
            band.runs.append((band.file.tell(), len(values)))
            for part in (ends, columns, values):
                band.file.write(part.data)
            band.file.flush()
        except OSError as error:
            raise StoreError(
                f"elements that reach {self._least:g} cannot be written to {folder} ({error.strerror}); "
                f"{remedy(error, 'check its disk')}, then continue with resume=True"
            ) from error
        self._held -= band.nbytes
        band.keys, band.values, band.nbytes = [], [values[:0]], 0


class Merged:
    """The elements of some rows, in order."""

    def __init__(
        self,
        counts: Array,
        run: Run | None,
        file: IO[bytes] | None,
        runs: list[tuple[int, int]],
        dtype: np.dtype[Any] | None,
    ):
        """counts: elements of each row. run: the one that is in memory. file: where the others are, which
        begin and count as `runs` say. dtype: of the elements."""
        self._counts, self._run, self._file, self._runs = counts, run, file, runs
        self._dtype = np.dtype(np.float32) if dtype is None else dtype

    def parts(self, start: int, stop: int, most: int) -> Iterator[Sparse]:
        """(values, columns, elements of each row) of rows [start, stop), at most so many elements at a
        time."""
        for first, last in together(self._counts[start:stop], most):
            yield self._merged(start + first, start + last)

    def close(self) -> None:
        """Delete the file."""
        if self._file is not None:
            self._file.close()

    def _merged(self, start: int, stop: int) -> Sparse:
        found = [self._read(*one, start, stop) for one in self._runs]
        if self._run is not None:
            ends, columns, values = self._run
            here = slice(ends[start], ends[stop])
            found.append((np.diff(ends[start : stop + 1]), columns[here], values[here]))
        counts = self._counts[start:stop]
        if len(found) == 1:
            return found[0][2], found[0][1], counts
        columns, values = (np.concatenate([one[i] for one in found]) for i in (1, 2))
        rows = np.concatenate([np.repeat(np.arange(len(counts)), one[0]) for one in found])
        order = np.lexsort((columns, rows))
        return values[order], columns[order], counts

    def _read(self, begin: int, count: int, start: int, stop: int) -> Run:
        """(elements of each row, columns, values) of some rows in a run of the file."""
        ends = self._part(begin + 8 * start, np.dtype(np.int64), stop + 1 - start)
        columns_at = begin + 8 * (len(self._counts) + 1)
        values_at, number = columns_at + 8 * count, int(ends[-1] - ends[0])
        columns = self._part(columns_at + 8 * int(ends[0]), np.dtype(np.int64), number)
        values = self._part(values_at + self._dtype.itemsize * int(ends[0]), self._dtype, number)
        return np.diff(ends), columns, values

    def _part(self, offset: int, dtype: np.dtype[Any], count: int) -> Array:
        assert self._file is not None, "there are runs"
        found = np.empty(count, dtype)
        if count and os.preadv(self._file.fileno(), [found.data], offset) != found.nbytes:
            raise OSError("a temporary file is shorter than what was written to it")
        return found


def _sorted(band: _Band, width: int) -> Run:
    """What is in memory of a row of blocks, in order. width: columns of C."""
    keys = np.concatenate(band.keys) if band.keys else np.empty(0, np.int64)
    values = np.concatenate(band.values) if band.values else np.empty(0, np.float32)
    order = np.argsort(keys)
    keys = keys[order]
    ends = np.searchsorted(keys, np.arange(len(band.counts) + 1) * width)
    return ends.astype(np.int64), keys % width, values[order]
