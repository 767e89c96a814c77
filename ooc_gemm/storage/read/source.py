"""Operands: what reads their pieces, and what is known of them once they are opened."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...planning.problem import Matrix
from ...planning.schedule import Piece
from ...planning.traits import StoreTraits
from ...support.buffers import Bytes
from ...support.errors import InputChangedError, StoreError
from ..io.stamps import Stamp, Stamps, digest

Array = npt.NDArray[Any]


class Source:
    """Reads pieces of a stored matrix. A subclass for each way in which chunks are stored."""

    def __init__(self, name: str, dtype: np.dtype[Any], matrix: Matrix):
        """name: what messages call the array. dtype: type of the elements, in native byte order. matrix: as
        it is stored, without op()."""
        self.name, self.dtype, self.matrix = name, dtype, matrix

    @property
    def asynchronous(self) -> bool:
        """Reads go on by themselves once they have been started."""
        return self.matrix.traits.asynchronous

    def measure(self, limit: int) -> int:
        """Memory in bytes that reading takes beside all slots, where only a trial tells; else 0. Raises
        BudgetError where a memory limit of `limit` bytes cannot be enough for that, and StoreError where
        nothing can be read."""
        return 0

    def lending(self) -> "Source":
        """A source of the same array whose pieces may lie in memory of the store's client, instead of in the
        slot, where that saves a copy."""
        return self

    def read(self, piece: Piece, slot: Bytes) -> tuple[Array, int]:
        """Read into `slot`: a view of the piece's rows × cols there (or elsewhere, if it is `lending`),
        and the bytes moved. Raises StoreError, naming the chunk."""
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

    def __init__(self, source: Source, s: Matrix, rows: tuple[int, int], cols: tuple[int, int]):
        """s: the whole matrix, with op(). rows, cols: [start, stop) of op(X)."""
        if s.transposed:
            rows, cols = cols, rows
        first = rows[0] // s.chunk_rows, cols[0] // s.chunk_cols
        assert (first[0] * s.chunk_rows, first[1] * s.chunk_cols) == (rows[0], cols[0])
        traits = replace(s.traits, asynchronous=False, stackable=False)
        matrix = replace(s, rows=rows[1] - rows[0], cols=cols[1] - cols[0], traits=traits)
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


@dataclass(frozen=True)
class Snapshot:
    """What a stored array was when it was opened, to tell later whether it has changed."""

    description: bytes
    """Its metadata, but for attributes."""
    stamps: Stamps
    """Of every file, in the order of the grid (`Chunks.stamps`)."""
    look: Callable[[], Stamps]
    """Asks for the stamps anew."""


@dataclass(frozen=True)
class Opened:
    """An operand after opening."""

    source: Source
    """Reads pieces of the stored matrix."""
    matrix: Matrix
    """The stored matrix with op() applied: `transposed` where op(X) is not S but Sᵀ or Sᴴ."""
    snapshot: Snapshot | None = None
    """None where nobody can tell whether the array changes."""
    place: Path | None = None
    """The folder it lies in, if that is a local one."""
    address: str = ""
    """The place it lies at, the same however that is spelled; empty where it is not known."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Those of its attributes that are of use here (`documents.ATTRIBUTES`)."""
    undecoded: str = ""
    """What its values would have to be decoded by, in words; empty where they are plain values."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.source.name

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of its elements, in native byte order."""
        return self.source.dtype

    @property
    def traits(self) -> StoreTraits:
        """What its store can do."""
        return self.matrix.traits

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of op(X)."""
        s = self.matrix
        return (s.cols, s.rows) if s.transposed else (s.rows, s.cols)

    def transpose(self) -> "Opened":
        """The same array with another op(): a transposition of a transposed one is none."""
        return replace(self, matrix=replace(self.matrix, transposed=not self.matrix.transposed))

    def measured(self, limit: int) -> "Opened":
        """The same array, whose matrix says what reading takes where only a trial tells it."""
        apart = self.source.measure(limit)
        return replace(self, matrix=replace(self.matrix, apart=apart)) if apart else self

    def lending(self) -> "Opened":
        """The same array, read by `Source.lending`."""
        return replace(self, source=self.source.lending())

    def window(self, rows: tuple[int, int], cols: tuple[int, int]) -> "Opened":
        """[start, stop) of its rows and of its columns, from one chunk edge to another or to the end."""
        window = Window(self.source, self.matrix, rows, cols)
        return Opened(window, window.matrix)

    def fingerprint(self, before: Mapping[tuple[int, int], Stamp] | None = None) -> str | None:
        """Another one where the array is another or was written to since; None where that cannot be told.
        `before`: what to take for the stamps of some files."""
        if self.snapshot is None:
            return None
        stamps = self.snapshot.stamps[:, :2].copy()
        for (i, j), was in (before or {}).items():
            stamps[i * self.matrix.grid[1] + j] = was
        return digest((self.snapshot.description, stamps.tobytes()))

    def check_unchanged(self) -> None:
        """Raises StoreError where the array was written to, or replaced, since it was opened, as far as that
        can be told."""
        if self.snapshot is None:
            return
        try:
            stamps = self.snapshot.look()
        except Exception as error:
            said = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
            raise StoreError(
                f"{self.name} cannot be looked at again ({said}), so C is not finished; "
                "go on with resume=True"
            ) from error
        if np.array_equal(stamps, self.snapshot.stamps):
            return
        said = f"{self.name} was changed while C was made of it, so C is not finished"
        if not np.array_equal(stamps[:, :2], self.snapshot.stamps[:, :2]):
            raise InputChangedError(f"{said}; start over with force=True")
        raise StoreError(
            f"{said}; where nothing was written to it, as after chmod, go on with resume=True, else start "
            "over with force=True"
        )
