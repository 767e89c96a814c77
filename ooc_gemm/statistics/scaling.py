"""Powers of two that rows are multiplied with where float64 does not hold their squares.

Products of such numbers lose no digits. Cosines do not depend on them, so each row has one. Dot products have
one for all rows of B, and squared distances have one for all rows of both arrays: what is much smaller than
the largest row is then too small still.
"""

from dataclasses import dataclass, replace

import numpy as np

from ..run.request import Operand, Request
from .asked import Asked
from .rescore import MOST_EXPONENT, Array

Known = tuple[Array, Array]
"""`exponents` and squared norms of rows."""


@dataclass(frozen=True)
class Scaling:
    """What rows of A and of B are multiplied with."""

    factors: tuple[Array | None, Array | None]
    """For each row of A, and of B; None: 1."""
    exponents: Array
    """For each row of A: its scores times two to this power are those of the rows as they are stored."""

    @classmethod
    def of(cls, asked: Asked, left: Known, right: Known) -> "Scaling":
        """For what is asked. left, right: of rows of A, and of B."""
        (a, squares_a), (b, squares_b) = left, right
        if asked.metric == "sqeuclidean":
            common = max(_largest(a, squares_a), _largest(b, squares_b))
            # Rows of other types cannot be multiplied.
            common *= asked.a.dtype == asked.b.dtype == np.float64
            a, b = np.full_like(a, common), np.full_like(b, common)
        elif asked.metric == "dot":
            b = np.full_like(b, _largest(b, squares_b))
            a = b if asked.same else a
        scores = np.zeros_like(a) if asked.metric == "cosine" else a + b[0]
        return cls((_factors(a), _factors(b)), scores)

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


def _largest(exponents: Array, squares: Array) -> int:
    """The largest exponent of rows that are finite and not 0; 0 where there are none."""
    some = (exponents != 0) | (np.isfinite(squares) & (squares > 0))
    return int(exponents.max(where=some, initial=-MOST_EXPONENT)) if some.any() else 0


def _factors(exponents: Array) -> Array | None:
    found: Array = np.ldexp(1.0, -exponents)
    return found if exponents.any() else None
