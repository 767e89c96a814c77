"""What a GEMM on a GPU is asked for: `Product`, its three `Operand`s, and the `Strips` in which C is made, or
the `Tile`s if its sums take scratch memory."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..planning.schedule import DIAGONAL_STRIPS, LEAST_STRIP
from ..support.intervals import ceil_div, ranges, round_up

_STRIP_STEP = 64
"""Strips begin at multiples of this many rows, where segments of split.cu may begin."""
_TILE_STEP = 256
"""Rows of a `Tile` are a multiple of this, which is the height of the largest tile of a kernel."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A matrix in device memory, row by row, as it is stored."""

    ptr: int
    """Address of the first element."""
    ld: int
    """Elements from the beginning of one stored row to the beginning of the next."""

    def moved(self, nbytes: int) -> "Operand":
        """Return the part of the matrix that begins so many bytes behind its first element."""
        return Operand(self.ptr + nbytes, self.ld)


class Stay(NamedTuple):
    """A panel that stays on the device for several products, of which something may be remembered."""

    buffer: int
    """The number of its buffer among those of its operand."""
    first: int
    """Its first row of op(A) or column of op(B). Another panel in that buffer has another one."""


@dataclass(frozen=True, slots=True)
class Product:
    """C ← α·op(A)·op(B) + β·C. If β = 0, C is not read; if α = 0 or k = 0, neither A nor B is."""

    m: int
    """Rows of op(A) and C."""
    n: int
    """Columns of op(B) and C."""
    k: int
    """Columns of op(A), rows of op(B)."""
    alpha: complex
    a: Operand
    b: Operand
    beta: complex
    c: Operand
    stay: tuple["Stay | None", "Stay | None"] = (None, None)
    """Of A and of B: which panel it is, if the device keeps it for several products."""

    def rows(self, start: int, stop: int, width: int, a_bytes: int, c_bytes: int) -> "Product":
        """Return the product that makes the first `width` columns of rows [start, stop) of C. `a_bytes`: from
        one row of op(A) to the next; `c_bytes`: of an element of C."""
        c = self.c.moved(start * self.c.ld * c_bytes)
        return replace(self, m=stop - start, n=width, a=self.a.moved(start * a_bytes), c=c)


def _ignore(stop: int) -> None:
    """Do nothing when a strip has been launched."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of C whose sums are in scratch memory at a time."""

    rows: tuple[int, int]
    """Its first row, and the row after its last."""
    cols: tuple[int, int]
    """Its first column, and the column after its last."""
    lower: bool
    """C is symmetric, and the tile ends on its diagonal."""

    @property
    def above(self) -> int:
        """Rows of a symmetric matrix above the tile's first one."""
        return self.cols[1] - (self.rows[1] - self.rows[0]) if self.lower else 0


@dataclass(frozen=True, slots=True)
class Strips:
    """The strips of rows in which C is made, one after the other."""

    rows: Iterable[tuple[int, int]] = ()
    """First row of each strip, and the row after its last; if empty, C is one strip, or several if
    `lower`."""
    lower: bool = False
    """C is symmetric, and only what lies on and below its diagonal counts. A strip then ends where it meets
    the diagonal. C may be a complex matrix that is stored as a real one with twice as many columns."""
    after: Callable[[int], None] = _ignore
    """Called with the end of each strip when its work has been given to the stream."""
    above: int = 0
    """Rows of the symmetric matrix above the first row of C."""

    def of(self, m: int, n: int) -> Iterator[tuple[int, int, int]]:
        """Yield the first row of each strip of an m×n matrix, the row after its last, and the number of
        columns to compute."""
        for start, stop in self.rows or (diagonal_strips(m) if self.lower else [(0, m)]):
            yield start, stop, self.per_row(m, n) * (self.above + stop) if self.lower else n

    def tiled(
        self, m: int, n: int, elements: int, columns: int, pitch: int = 1
    ) -> Iterator[tuple[list[tuple[int, int, int]], list[Tile]]]:
        """Yield strips of an m×n matrix, as `of` does, with the tiles that make them up. A tile has at most
        `columns` columns, and `elements` elements in rows that start at multiples of `pitch`."""

        def down(rows: int, cols: int) -> Iterator[tuple[int, int]]:
            return ranges(rows, elements // round_up(cols, pitch) // _TILE_STEP * _TILE_STEP)

        if self.lower and not self.rows and n <= columns:
            parts = down(m, n)
            tiles = [Tile((top, bottom), (0, self.above + bottom), lower=True) for top, bottom in parts]
            yield list(self.of(m, n)), tiles
            return
        for start, stop, width in self.of(m, n):
            cols = min(width, columns)
            tiles = [
                Tile((start + top, start + bottom), across, lower=False)
                for top, bottom in down(stop - start, cols)
                for across in ranges(width, cols)
            ]
            yield [(start, stop, width)], tiles

    def per_row(self, m: int, n: int) -> int:
        """Return the columns of a symmetric C for each row: 2 where the parts of a complex element are two
        columns."""
        return n // (self.above + m)


def diagonal_strips(extent: int) -> Iterator[tuple[int, int]]:
    """Cut the rows of a symmetric matrix into strips. There are enough of them to save most of the upper
    half, and each is high enough for its tiles to keep all multiprocessors busy."""
    return ranges(extent, round_up(max(LEAST_STRIP, ceil_div(extent, DIAGONAL_STRIPS)), _STRIP_STEP))
