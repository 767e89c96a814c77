"""What reads the pieces of an operand, and what is known of an opened operand."""

from collections.abc import Callable, Iterable, Iterator, Mapping
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
from ...support.onward import Onward
from ..io.stamps import Stamp, Stamps, digest

Array = npt.NDArray[Any]


class Source:
    """Reads pieces of a stored matrix. Each way of storing chunks has a subclass."""

    def __init__(self, name: str, dtype: np.dtype[Any], matrix: Matrix):
        """name: how messages call the array. dtype: type of the elements, in native byte order. matrix: as it
        is stored, without op()."""
        self.name, self.dtype, self.matrix = name, dtype, matrix
        self.codec = ""
        """What decodes its chunks, for rates that are remembered of it; empty where that is not one known
        compressor."""

    @property
    def asynchronous(self) -> bool:
        """Whether reads continue in the background once they are started."""
        return self.matrix.traits.asynchronous

    def measure(self, limit: int) -> int:
        """Return the memory in bytes that reading takes in addition to all slots, where only a trial shows
        it; otherwise 0. Raises BudgetError where a memory limit of `limit` bytes cannot be enough, and
        StoreError where nothing can be read."""
        return 0

    def lending(self) -> "Source":
        """Return a source of the same array whose pieces may stay in memory of the store's client instead of
        the slot, where that saves a copy."""
        return self

    @property
    def sends(self) -> str:
        """What has compressed the chunks that `sending` hands on (`Matrix.encoded`); empty where it does
        not."""
        return ""

    def sending(self) -> "Source":
        """Return a source of the same array that hands chunks on as they are stored, in one dimension and
        without gaps, to a device that decodes them (`Matrix.encoded`)."""
        return self

    def read(self, piece: Piece, slot: Bytes) -> tuple[Array, int]:
        """Read a piece into `slot`. Returns a view of its rows × cols, which lies elsewhere only if the
        source is `lending`, and the bytes moved. Raises StoreError, which names the chunk."""
        raise NotImplementedError

    def start(
        self, piece: Piece, slot: Bytes, onward: Onward | None = None
    ) -> Callable[[], tuple[Array, int]]:
        """Start to read a piece. The function returned waits for the end and returns what `read` returns; it
        must be called, whatever happens. `onward`: where the piece may go on to; `taken` says whether it
        does, once the function has returned."""
        return partial(self.read, piece, slot)

    def cancel(self) -> None:
        """Stop all threads from waiting for a store that may never answer. Local files always answer."""

    @contextmanager
    def cancelled_on_error(self) -> Iterator[None]:
        """Cancel reads when the body fails. Enter this context inside of the one that waits for the reader
        threads."""
        try:
            yield
        except BaseException:
            self.cancel()
            raise

    def _missing(self, piece: Piece, key: str) -> None:
        """Note that the file of a chunk is missing, which stands for the fill value. Raises StoreError where
        it existed when the array was opened."""
        if self.matrix.stored_size(*piece.chunk):
            raise StoreError(f"{self.name}: chunk {key} is gone, it was there before; put it back")

    def _place(self, piece: Piece, slot: Bytes) -> Array:
        rows, cols = piece.rows[1] - piece.rows[0], piece.span[1] - piece.span[0]
        return slot[: rows * cols * self.dtype.itemsize].view(self.dtype).reshape(rows, cols)


class Window(Source):
    """Some rows or columns of another source's array, from one chunk edge to another or to the end."""

    def __init__(self, source: Source, s: Matrix, rows: tuple[int, int], cols: tuple[int, int]):
        """s: the whole matrix, with op(). rows, cols: [start, stop) of op(X)."""
        if s.transposed:
            rows, cols = cols, rows
        super().__init__(source.name, source.dtype, s.window(rows, cols))
        self._first = rows[0] // s.chunk_rows, cols[0] // s.chunk_cols
        self._source, self._at = source, (rows[0], cols[0])

    def read(self, piece: Piece, slot: Bytes) -> tuple[Array, int]:
        """Reads the same piece of the whole array."""
        return self._source.read(self._there(piece), slot)

    def start(
        self, piece: Piece, slot: Bytes, onward: Onward | None = None
    ) -> Callable[[], tuple[Array, int]]:
        """Starts to read the same piece of the whole array."""
        return self._source.start(self._there(piece), slot, onward)

    def _there(self, piece: Piece) -> Piece:
        """Return the same piece of the whole array."""

        def moved(some: tuple[int, int], by: int) -> tuple[int, int]:
            return some[0] + by, some[1] + by

        down, across = self._at
        chunk = piece.chunk[0] + self._first[0], piece.chunk[1] + self._first[1]
        return piece._replace(
            chunk=chunk,
            rows=moved(piece.rows, down),
            cols=moved(piece.cols, across),
            span=moved(piece.span, across),
        )

    def cancel(self) -> None:
        """Cancels the source of the whole array."""
        self._source.cancel()


@dataclass(frozen=True)
class Snapshot:
    """The state of a stored array when it was opened, by which later changes are noticed."""

    description: bytes
    """The metadata of the array, except for its attributes."""
    stamps: Stamps
    """The stamps of all files, in the order of the grid (`Chunks.stamps`)."""
    look: Callable[[], Stamps]
    """Reads the stamps again."""


@dataclass(frozen=True)
class Opened:
    """An operand that has been opened: what reads it, and everything that is known of it."""

    source: Source
    """What reads pieces of the stored matrix."""
    matrix: Matrix
    """The stored matrix with op() applied: `transposed` where op(X) is not S but Sᵀ or Sᴴ."""
    snapshot: Snapshot | None = None
    """The state of the array when it was opened; None where changes cannot be noticed."""
    place: Path | None = None
    """The folder of a local array; None for any other."""
    address: str = ""
    """The place of the array in one spelling; empty where it is not known."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """The attributes that this package reads (`documents.ATTRIBUTES`)."""
    packing: Mapping[str, Any] = field(default_factory=dict)
    """The attributes that say how its values are to be decoded (`conventions.decoding`)."""
    dims: tuple[str | None, ...] | None = None
    """Names of the rows' dimension and the columns' dimension of op(X); None where they have no names."""
    undecoded: str = ""
    """How its values would have to be decoded, in words; empty where they are plain values."""

    @property
    def name(self) -> str:
        """How messages call the operand."""
        return self.source.name

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements, in native byte order."""
        return self.source.dtype

    @property
    def traits(self) -> StoreTraits:
        """What the store of the operand can do."""
        return self.matrix.traits

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of op(X)."""
        s = self.matrix
        return (s.cols, s.rows) if s.transposed else (s.rows, s.cols)

    def transpose(self) -> "Opened":
        """Return the same array with op() transposed; a second transposition undoes the first."""
        turned = replace(self.matrix, transposed=not self.matrix.transposed)
        return replace(self, matrix=turned, dims=self.dims and self.dims[::-1])

    def measured(self, limit: int) -> "Opened":
        """Return the same array with the memory that reading takes, where only a trial shows it."""
        apart = self.source.measure(limit)
        return replace(self, matrix=replace(self.matrix, apart=apart)) if apart else self

    def lending(self) -> "Opened":
        """Return the same array, read by `Source.lending`."""
        return replace(self, source=self.source.lending())

    def sending(self) -> "Opened":
        """Return the same array, read by `Source.sending`."""
        return replace(self, source=self.source.sending())

    def window(self, rows: tuple[int, int], cols: tuple[int, int]) -> "Opened":
        """Return some rows [start, stop) and columns [start, stop) of the operand, from one chunk edge to
        another or to the end."""
        window = Window(self.source, self.matrix, rows, cols)
        return Opened(window, window.matrix)

    def fingerprint(self, before: Iterable[tuple[tuple[int, int], Stamp]] = ()) -> str | None:
        """Return a text that differs where the array is another one or was written to since; None where that
        cannot be told. `before`: chunks, and the stamps to use for their files."""
        if self.snapshot is None:
            return None
        stamps = self.snapshot.stamps[:, :2].copy()
        for (i, j), was in before:
            stamps[i * self.matrix.grid[1] + j] = was
        return digest((self.snapshot.description, stamps.tobytes()))

    def check_unchanged(self) -> None:
        """Raise StoreError where the array was written to or replaced since it was opened, as far as that can
        be noticed."""
        if self.snapshot is None:
            return
        try:
            stamps = self.snapshot.look()
        except Exception as error:
            said = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
            raise StoreError(
                f"{self.name} cannot be looked at again ({said}), so C is not finished; "
                "continue with resume=True"
            ) from error
        if np.array_equal(stamps, self.snapshot.stamps):
            return
        said = f"{self.name} was changed while C was made of it, so C is not finished"
        if not np.array_equal(stamps[:, :2], self.snapshot.stamps[:, :2]):
            raise InputChangedError(f"{said}; start over with force=True")
        raise StoreError(
            f"{said}; where nothing was written to it, as after chmod, continue with resume=True, else start "
            "over with force=True"
        )
