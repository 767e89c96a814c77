"""Powers of two that rows are multiplied with where float64 does not hold their squares.

Products of such numbers lose no digits. Cosines do not depend on them, so each row has one. For dot products
each row has one, too, and products are multiplied back for rows of B before they are compared. Squared
distances have one for all rows of both arrays: what is much smaller than the largest row is then too small
still.
"""

from dataclasses import dataclass, replace

import numpy as np

from ..run.request import Operand, Request
from .asked import Asked
from .rescore import MOST_EXPONENT, Array

Known = tuple[Array, Array]
"""`exponents` and squared norms of rows."""
MOST_SCORE = 1018
"""No dot product that is compared is larger than two to this power, by which float64 holds also those that
are tiny. Elements of multiplied rows may be 4 (`MOST_EXPONENT`)."""
SMALL_EXPONENT = -466
"""Rows with smaller exponents than this have squares that are too small (`rescore.SMALL`)."""


@dataclass(frozen=True)
class Scaling:
    """What rows of A and of B are multiplied with."""

    factors: tuple[Array | None, Array | None]
    """For each row of A, and of B; None: 1."""
    exponents: Array
    """For each row of A: its scores times two to this power are those of the rows as they are stored."""
    scale: Array | None
    """For each row of B: what dot products of multiplied rows are multiplied with; None: 1."""
    small: tuple[int, int]
    """How many rows of A, and of B, have squares that are too small beside those of the largest row."""

    @classmethod
    def of(cls, asked: Asked, left: Known, right: Known) -> "Scaling":
        """For what is asked. left, right: of rows of A, and of B."""
        (a, squares_a), (b, squares_b) = left, right
        common, scale, small = 0, None, (0, 0)
        if asked.metric == "sqeuclidean":
            if asked.a.dtype == asked.b.dtype == np.float64:  # others cannot be multiplied
                common = max(_largest(*left), _largest(*right))
                small = _small(*left, common), _small(*right, common)
            a, b = np.full_like(a, common), np.full_like(b, common)
        elif asked.metric == "dot":
            # Rows of other types cannot be multiplied.
            sizes = _all(a, squares_a)
            a, norm = (sizes, 0) if asked.a.dtype == np.float64 else (a, max(0, int(sizes.max())))
            b = _all(b, squares_b) if asked.b.dtype == np.float64 else b
            common = max(0, int(b.max()) + norm + asked.depth.bit_length() - MOST_SCORE)
            scale = np.ldexp(1.0, b - common)
        scores = np.zeros_like(a) if asked.metric == "cosine" else a + common
        return cls((_factors(a), _factors(b)), scores, scale, small)

    def request(self, request: Request) -> Request:
        """The request of the product of the multiplied rows."""

        def multiplied(operand: Operand, factors: Array | None) -> Operand:
            return operand if factors is None else replace(operand, scale=("rows", 1 / factors))

        a, b = map(multiplied, (request.a, request.b), self.factors)
        return replace(request, a=a, b=b)

    def restored(self, rows: slice | Array, scores: Array) -> Array:
        """Scores of some rows of A as they are stored, from those of the multiplied rows."""
        with np.errstate(all="ignore"):
            found: Array = np.ldexp(scores, self.exponents[rows, None])
        return found


def _there(exponents: Array, squares: Array) -> Array:
    """Which rows are finite and not 0."""
    found: Array = (exponents != 0) | (np.isfinite(squares) & (squares > 0))
    return found


def _small(exponents: Array, squares: Array, common: int) -> int:
    """How many rows have squares that are too small when they are divided by two to this power."""
    there = _there(exponents, squares)
    return int(np.count_nonzero(there & (_all(exponents, squares) - common < SMALL_EXPONENT)))


def _largest(exponents: Array, squares: Array) -> int:
    """The largest exponent of rows that are finite and not 0; 0 where there are none."""
    some = _there(exponents, squares)
    return int(exponents.max(where=some, initial=-MOST_EXPONENT)) if some.any() else 0


def _all(exponents: Array, squares: Array) -> Array:
    """The exponents of all rows, also of those whose squares float64 holds."""
    plain = (exponents == 0) & np.isfinite(squares) & (squares > 0)
    return np.where(plain, np.frexp(np.sqrt(np.where(plain, squares, 1)))[1], exponents)


def _factors(exponents: Array) -> Array | None:
    found: Array = np.ldexp(1.0, -exponents)
    return found if exponents.any() else None
