"""What a GEMM on a GPU is asked for: `Product`, its three `Operand`s, and the `Strips` in which C is made."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from ..planning.schedule import DIAGONAL_STRIPS, LEAST_STRIP
from ..support.intervals import ceil_div, ranges, round_up

_STRIP_STEP = 64
"""Strips begin at multiples of this many rows, where segments of split.cu may begin."""


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

    def rows(self, start: int, stop: int, width: int, a_bytes: int, c_bytes: int) -> "Product":
        """Return the product that makes the first `width` columns of rows [start, stop) of C. `a_bytes`: from
        one row of op(A) to the next; `c_bytes`: of an element of C."""
        c = self.c.moved(start * self.c.ld * c_bytes)
        return replace(self, m=stop - start, n=width, a=self.a.moved(start * a_bytes), c=c)


def _ignore(stop: int) -> None:
    """Do nothing when a strip has been launched."""


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

    def per_row(self, m: int, n: int) -> int:
        """Return the columns of a symmetric C for each row: 2 where the parts of a complex element are two
        columns."""
        return n // (self.above + m)


def diagonal_strips(extent: int) -> Iterator[tuple[int, int]]:
    """Cut the rows of a symmetric matrix into strips. There are enough of them to save most of the upper
    half, and each is high enough for its tiles to keep all multiprocessors busy."""
    return ranges(extent, round_up(max(LEAST_STRIP, ceil_div(extent, DIAGONAL_STRIPS)), _STRIP_STEP))
