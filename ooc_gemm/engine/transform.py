"""Transforms: what happens to the elements of an operand while they are placed into a panel.

    x'[i, j] = (x[i, j] − r[i] − c[j])·s[i]·t[j],  and `fill` where x[i, j] is missing

i and j count rows and columns of the stored matrix S. Elements are worked on in strips that stay in the
processor's second-level cache, so that the transform reads and writes each panel in memory once, as the
conversion of types alone does.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..support.intervals import ranges

Array = npt.NDArray[Any]
STRIP = 1 << 16
"""Elements of a strip: 256 KiB of float32."""
SCRATCH_BYTES = 4 * STRIP
"""What a thread that places a piece allocates: a mask of a strip, and what NumPy makes on the way."""
MOST_WHOLE = 2**53
"""Up to this size float64 holds every integer, and other numbers beside them."""
Range = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Lines:
    """What is subtracted from, and multiplied with, all elements of each row of S, or of each column."""

    shift: tuple[Array, Array] | None = None
    """The sum of both is subtracted: its nearest numbers in the panel's type, and what they leave over. One
    number alone would lose digits where the shift is large beside what remains."""
    scale: Array | None = None

    @classmethod
    def of(cls, shift: Array | None, scale: Array | None, dtype: np.dtype[Any]) -> "Lines":
        """Vectors of float64, for panels of a type."""
        split = None
        if shift is not None:
            with np.errstate(all="ignore"):
                high = shift.astype(dtype)
                split = high, (shift - high).astype(dtype)
        return cls(split, None if scale is None else scale.astype(dtype))

    def within(self, some: slice) -> "Lines":
        """Those of some rows or columns."""
        shift = None if self.shift is None else (self.shift[0][some], self.shift[1][some])
        return Lines(shift, None if self.scale is None else self.scale[some])

    @property
    def nbytes(self) -> int:
        """Bytes of the vectors."""
        vectors = (*(self.shift or ()), *(() if self.scale is None else (self.scale,)))
        return sum(vector.nbytes for vector in vectors)


@dataclass(frozen=True, eq=False)
class Transform:
    """What happens to an element of a stored matrix S before it is multiplied."""

    rows: Lines = Lines()
    cols: Lines = Lines()
    missing: float | None = None
    """Elements that are equal to this number are missing; NaN: those that are NaN."""
    fill: float = 0.0
    """What a missing element becomes, after shift and scale."""

    def within(self, rows: slice, cols: slice) -> "Transform":
        """The transform of the part of S in some of its rows and columns."""
        return replace(self, rows=self.rows.within(rows), cols=self.cols.within(cols))

    def place(self, values: Array, rows: Range, cols: Range, out: Array) -> None:
        """Transform a piece of S.

        Parameters
        ----------
        values : ndarray
            The elements as stored.
        rows, cols : (int, int)
            Where the piece lies in S: [start, stop).
        out : ndarray
            Where they go, of the panel's type and of the same shape, with contiguous rows.
        """
        width = min(values.shape[1], STRIP)
        with np.errstate(all="ignore"):
            for start, stop in ranges(values.shape[1], max(1, width)):
                across, place = slice(cols[0] + start, cols[0] + stop), slice(start, stop)
                for row, end in ranges(values.shape[0], max(1, STRIP // (stop - start))):
                    down = slice(rows[0] + row, rows[0] + end)
                    self._strip(values[row:end, place], down, across, out[row:end, place])

    def _strip(self, values: Array, down: slice, across: slice, out: Array) -> None:
        np.copyto(out, values, casting="unsafe")
        sides = (self.rows, (down, None)), (self.cols, (None, across))
        for lines, at in sides:
            for shift in lines.shift or ():
                np.subtract(out, shift[at], out=out)
        for lines, at in sides:
            if lines.scale is not None:
                np.multiply(out, lines.scale[at], out=out)
        mask = missing_of(values, self.missing)
        if mask is not None:
            np.copyto(out, self.fill, where=mask, casting="unsafe")


def missing_of(values: Array, missing: float | None, out: Array | None = None) -> Array | None:
    """Which elements are missing; None where none can be: nothing counts as missing, or no element of this
    type is equal to it.

    values: elements as stored. missing: the number that stands for a missing element, or NaN. out: memory for
    the result.
    """
    if missing is None:
        return None
    if math.isnan(missing):
        return np.isnan(values, out=out) if values.dtype.kind in "fc" else None
    number = as_element(missing, values.dtype)
    return None if number is None else np.equal(values, number, out=out)


def as_element(missing: float, dtype: np.dtype[Any]) -> Any:
    """The element of a type that a number stands for; None where the type holds none. Floats are rounded, but
    not to 0 or infinity, and no integer to another one: beyond ±2⁵³ all numbers are integers, so those may
    be rounded."""
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        if not float(missing).is_integer() or not int(info.min) <= missing <= int(info.max):
            return None
        return dtype.type(int(missing))
    with np.errstate(over="ignore", under="ignore"):
        found = dtype.type(missing)
    if (np.isinf(found) and not math.isinf(missing)) or (found == 0 and missing != 0):
        return None
    return None if is_whole(missing) and found.item() != missing else found


def is_whole(number: float) -> bool:
    """Whether a number is an integer, of a size at which others are not."""
    return abs(number) <= MOST_WHOLE and float(number).is_integer()
