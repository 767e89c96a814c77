"""Chunks in local files, read without zarr: raw ones, and those that one compressor makes, in files of their
own or in shards.

    raw           file ──► slot                  any rectangle of a chunk, read to its place
    compressed    file ──► scratch ──► slot      decoded to its place where the whole chunk is wanted
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...planning.problem import Matrix
from ...planning.schedule import Piece
from ...support.buffers import PAGE, Bytes, scratch
from ...support.errors import InputChangedError, StoreError, remedy
from ...support.intervals import overlaps
from ..format.chunks import Chunks
from ..format.codec import Compressor, longest
from ..io import files
from ..io.background import Job
from ..io.files import room
from ..io.folder import Folder
from ..io.stamps import Stamp, Stamps, digest

Array = npt.NDArray[Any]


class Source:
    """An input matrix: what planning needs of it, and how pieces of it are read."""

    def __init__(self, name: str, dtype: np.dtype[Any], matrix: Matrix):
        self.name = name
        self.dtype = dtype
        """Element type, in native byte order."""
        self.matrix = matrix
        """The stored matrix S; `transposed` where the array is Sᵀ (Fortran order)."""
        self.place: Path | None = None
        """The folder it lies in, where that is a local one."""
        self.whereabouts = ""
        """The place it lies at, the same however that is spelled; empty where that is not known."""
        self.description = b""
        """Its metadata, but for attributes."""
        self.stamps: Stamps | None = None
        """Of every file, in the order of the grid (`Chunks.stamps`); None where they cannot be had."""
        self.look: Callable[[], Stamps] | None = None
        """Asks for the stamps anew."""
        self.attributes: Mapping[str, Any] = {}
        """Those of its attributes that are of use here (`documents.ATTRIBUTES`)."""
        self.undecoded = ""
        """What its values would have to be decoded by, in words; empty where they are plain values."""
        self.latency = 0.0
        """Seconds until a store that is not this machine's answers; 0 where it is."""
        self.background = False
        """Reads go on by themselves when they are begun."""
        self.borrows = False
        """Pieces lie where a remote store's client has put them: no device copies them out of the slot."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the array as its user sees it."""
        s = self.matrix
        return (s.cols, s.rows) if s.transposed else (s.rows, s.cols)

    def fingerprint(self, before: Mapping[tuple[int, int], Stamp] | None = None) -> str | None:
        """Another one where the array is another or was written to since; None where that cannot be told.
        `before`: what to take for the stamps of some files."""
        if self.stamps is None:
            return None
        stamps = self.stamps[:, :2].copy()
        for (i, j), was in (before or {}).items():
            stamps[i * self.matrix.grid[1] + j] = was
        return digest((self.description, stamps.tobytes()))

    def measure(self, limit: int) -> None:
        """Find out how much memory reading takes, where only a trial tells. Raises BudgetError where a memory
        limit of `limit` bytes cannot be enough for that, and StoreError where nothing can be read."""

    def check_unchanged(self) -> None:
        """Raises StoreError where the array was written to, or replaced, since it was opened, as far as that
        can be told."""
        if self.look is None or self.stamps is None:
            return
        try:
            stamps = self.look()
        except Exception as error:
            said = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
            raise StoreError(
                f"{self.name} cannot be looked at again ({said}), so C is not finished; "
                "go on with resume=True"
            ) from error
        if np.array_equal(stamps, self.stamps):
            return
        said = f"{self.name} was changed while C was made of it, so C is not finished"
        if not np.array_equal(stamps[:, :2], self.stamps[:, :2]):
            raise InputChangedError(f"{said}; start over with force=True")
        raise StoreError(
            f"{said}; where nothing was written to it, as after chmod, go on with resume=True, else start "
            "over with force=True"
        )

    def read(self, piece: Piece, slot: Bytes) -> tuple[Array, int]:
        """Read into `slot`: a view of the piece's rows × cols there (or elsewhere, if it `borrows`), and the
        bytes moved. Raises StoreError, naming the chunk."""
        raise NotImplementedError

    def start(self, piece: Piece, slot: Bytes) -> Callable[[], tuple[Array, int]]:
        """Begin to `read`. To be called for the end, whatever happens."""
        return partial(self.read, piece, slot)

    def cancel(self) -> None:
        """Let no thread wait any longer for a store that may never answer; local files always do."""

    @contextmanager
    def cancelled_on_error(self) -> Iterator[None]:
        """Around threads that read, inside of what waits for them to end."""
        try:
            yield
        except BaseException:
            self.cancel()
            raise

    def _missing(self, piece: Piece, key: str) -> None:
        """The file of a chunk is not there: it counts as the fill value. Raises StoreError where it was
        there when the array was opened."""
        s, (i, j) = self.matrix, piece.chunk
        if s.stored is None or s.stored[i * s.grid[1] + j]:
            raise StoreError(f"{self.name}: chunk {key} is gone, it was there before; put it back")

    def _place(self, piece: Piece, slot: Bytes) -> Array:
        rows, cols = piece.rows[1] - piece.rows[0], piece.span[1] - piece.span[0]
        return slot[: rows * cols * self.dtype.itemsize].view(self.dtype).reshape(rows, cols)


class Window(Source):
    """Rows or columns of another source's array, from one chunk edge to another or to the end."""

    def __init__(self, source: Source, rows: tuple[int, int], cols: tuple[int, int]):
        """[start, stop) of each, as the array's user sees them."""
        s = source.matrix
        if s.transposed:
            rows, cols = cols, rows
        first = rows[0] // s.chunk_rows, cols[0] // s.chunk_cols
        assert (first[0] * s.chunk_rows, first[1] * s.chunk_cols) == (rows[0], cols[0])
        matrix = replace(s, rows=rows[1] - rows[0], cols=cols[1] - cols[0], stacked=False)
        if s.stored is not None:
            lines = (s.stored[i * s.grid[1] :][: s.grid[1]] for i in range(first[0], s.grid[0]))
            inside = (line[first[1] :][: matrix.grid[1]] for line in lines)
            some = itertools.islice(itertools.chain.from_iterable(inside), math.prod(matrix.grid))
            matrix = replace(matrix, stored=tuple(some))
        super().__init__(source.name, source.dtype, matrix)
        self._source, self._first, self._at = source, first, (rows[0], cols[0])

    def read(self, piece: Piece, slot: Bytes) -> tuple[Array, int]:
        """The same piece of the whole."""

        def moved(some: tuple[int, int], by: int) -> tuple[int, int]:
            return some[0] + by, some[1] + by

        down, across = self._at
        chunk = piece.chunk[0] + self._first[0], piece.chunk[1] + self._first[1]
        there = piece._replace(
            chunk=chunk,
            rows=moved(piece.rows, down),
            cols=moved(piece.cols, across),
            span=moved(piece.span, across),
        )
        return self._source.read(there, slot)

    def cancel(self) -> None:
        """As the whole."""
        self._source.cancel()


class RawSource(Source):
    """Raw chunks in local files."""

    def __init__(
        self, name: str, dtype: np.dtype[Any], fill: Any, matrix: Matrix, chunks: Chunks, whole: bool = False
    ):
        """`whole`: every chunk that is stored had its full size when that was looked at."""
        background = whole and chunks.place.traits.asynchronous
        super().__init__(name, dtype, replace(matrix, stacked=background))
        self._chunks, self._fill = chunks, fill
        self.background = background

    def cancel(self) -> None:
        """Wake who waits for a chunk."""
        self._chunks.place.cancel()

    def start(self, piece: Piece, slot: Bytes) -> Callable[[], tuple[Array, int]]:
        """In the background, where one read of each chunk brings all."""
        s, j, (start, stop) = self.matrix, piece.chunk[1], piece.span
        read = partial(self.read, piece, slot)
        folder = self._chunks.place
        if not self.background or stop - start != s.chunk_cols or not isinstance(folder, Folder):
            return read
        rows, line, jobs = piece.rows[1] - piece.rows[0], s.chunk_cols * s.itemsize, list[Job]()
        data = slot[: rows * line]
        try:
            for i, row, row_stop in overlaps(*piece.rows, s.chunk_rows):
                base, size = self._chunks.extent(i, j)
                if size == 0:
                    return read
                offset = base + (row - i * s.chunk_rows) * line
                jobs.append((folder.path(self._chunks.key(i, j)), offset, (row_stop - row) * line))
            end = files.start_read(jobs, data)
        except (OSError, ValueError):
            return read

        def done() -> tuple[Array, int]:
            if not end():
                return read()  # or it says what the matter is
            place = data.view(self.dtype).reshape(rows, s.chunk_cols)
            return place[:, piece.cols[0] - start : piece.cols[1] - start], rows * line

        return done

    def read(self, piece: Piece, slot: Bytes) -> tuple[Array, int]:
        """One chunk after the other."""
        s, (i, j), (first, stop) = self.matrix, piece.chunk, piece.rows
        if stop <= (i + 1) * s.chunk_rows:
            return self._read(piece, slot)
        place, nbytes = self._place(piece, slot), 0
        for i, row, row_stop in overlaps(first, stop, s.chunk_rows):
            part = place[row - first : row_stop - first].reshape(-1).view(np.uint8)
            nbytes += self._read(piece._replace(chunk=(i, j), rows=(row, row_stop)), part)[1]
        return place[:, piece.cols[0] - piece.span[0] : piece.cols[1] - piece.span[0]], nbytes

    def _read(self, piece: Piece, slot: Bytes) -> tuple[Array, int]:
        """Just the rows wanted: one read where they are contiguous in the file."""
        s, (i, j) = self.matrix, piece.chunk
        key = self._chunks.key(i, j)
        place = self._place(piece, slot)
        row, col = piece.rows[0] - i * s.chunk_rows, piece.span[0] - j * s.chunk_cols
        line, width = s.chunk_cols * s.itemsize, place.shape[1] * s.itemsize
        cols = slice(piece.cols[0] - piece.span[0], piece.cols[1] - piece.span[0])
        data = place.reshape(-1).view(np.uint8)
        try:
            base, size = self._chunks.extent(i, j)
            if size == 0:
                raise FileNotFoundError
            with self._chunks.open(i, j) as file:
                size = file.size if size is None else size
                if size != s.chunk_bytes:
                    raise StoreError(
                        f"{self.name}: chunk {key} holds {size} bytes instead of {s.chunk_bytes}; "
                        "it is truncated or corrupt, write it again"
                    )
                step = len(data) if width == line else width
                if self.borrows and step == len(data):
                    data = file.read_range(data, base + row * line + col * s.itemsize, step)
                    return data.view(self.dtype).reshape(place.shape)[:, cols], place.nbytes
                for start in range(0, len(data), step):
                    at = base + (row + start // width) * line + col * s.itemsize
                    file.read(data[start : start + step], at)
        except FileNotFoundError:
            self._missing(piece, key)
            place[:, cols] = self._fill
            return place[:, cols], 0
        except ValueError as error:
            raise StoreError(f"{self.name}: chunk {key} cannot be read ({error}); write it again") from error
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            what = remedy(error, "see to its disk, or write it again")
            raise StoreError(
                f"{self.name}: chunk {key} cannot be read: {error.strerror or error}; {what}"
            ) from error
        return place[:, cols], place.nbytes


class CompressedSource(Source):
    """Chunks in local files that one compressor makes of the elements."""

    def __init__(
        self,
        name: str,
        dtype: np.dtype[Any],
        fill: Any,
        matrix: Matrix,
        chunks: Chunks,
        compressor: Compressor,
    ):
        super().__init__(name, dtype, matrix)
        self._chunks, self._fill = chunks, fill
        self.compressor, self._most = compressor, longest(matrix.chunk_bytes)
        self._room = min(max(matrix.stored or (0,)), self._most) + 2 * PAGE

    def cancel(self) -> None:
        """Wake who waits for a chunk."""
        self._chunks.place.cancel()

    def encoded(self, i: int, j: int) -> Bytes | None:
        """A chunk as it is stored, in memory that the thread's next call takes again, or None where it is
        missing. Raises OSError and ValueError."""
        offset, size = self._chunks.extent(i, j)
        if size == 0:
            return None
        try:
            with self._chunks.open(i, j) as file:
                size = file.size if size is None else size
                if size > self._most:
                    raise ValueError(f"it takes {size} bytes, more than {self._most}")
                return file.read_range(scratch("encoded", room(offset, size), self._room), offset, size)
        except FileNotFoundError:
            return None

    def read(self, piece: Piece, slot: Bytes) -> tuple[Array, int]:
        """The file, decoded to its place where the whole chunk is wanted, else beside it."""
        s, (i, j) = self.matrix, piece.chunk
        place = self._place(piece, slot)
        whole = place.nbytes == s.chunk_bytes
        out = (
            place.reshape(-1).view(np.uint8) if whole else scratch("decoded", s.chunk_bytes)[: s.chunk_bytes]
        )
        try:
            data = self.encoded(i, j)
            if data is None:
                self._missing(piece, self._chunks.key(i, j))
                place[...] = self._fill
                return place, 0
            self.compressor.decode(data, out)
        except (MemoryError, StoreError):
            raise
        except Exception as error:
            key = self._chunks.key(i, j)
            raise StoreError(
                f"{self.name}: chunk {key} cannot be read or decoded ({error}); "
                f"{remedy(error, 'write it again')}"
            ) from error
        if not whole:
            row, col = i * s.chunk_rows, j * s.chunk_cols
            chunk = out.view(self.dtype).reshape(s.chunk_rows, s.chunk_cols)
            rows = slice(piece.rows[0] - row, piece.rows[1] - row)
            np.copyto(place, chunk[rows, piece.cols[0] - col : piece.cols[1] - col])
        return place, len(data)
