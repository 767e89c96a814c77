"""How far scores of a product may be from exact ones."""

from dataclasses import dataclass

import numpy as np

from .rescore import Array, Metric

LITTLE_SPREAD = 1e-3
"""Where deviations from the mean make up less than this share of all squares, float32 leaves too few digits
of what tells rows apart, and products are computed in float64."""
PLAIN = 1e-30, 1e37
"""Also where the largest squared norm of a row is not between these, for products may be too large or too
small for float32."""


@dataclass(frozen=True)
class Rounding:
    """The rounding of products of rows of A with rows of B."""

    metric: Metric
    depth: int
    """Elements of a row."""
    largest: float
    """The largest squared norm of a row of B that is finite."""
    single: bool
    """Whether products are computed in float32."""

    def too_coarse(self, spread: float) -> bool:
        """Whether products in float32 tell too little. spread: as of `rescore.norms`."""
        if not self.single:
            return False
        little = spread < LITTLE_SPREAD and self.metric != "dot"
        return little or (self.largest > 0 and not PLAIN[0] < self.largest < PLAIN[1])

    def of_scores(self, lengths: Array) -> Array:
        """By how much scores of the product may be wrong. lengths: the norm of each row of A."""
        error = self._of_products(lengths)
        with np.errstate(all="ignore"):
            if self.metric == "cosine":
                return np.where(lengths > 0, error / lengths, 0)
            return 2 * error if self.metric == "sqeuclidean" else error

    def close(self, about: Array, last: Array, lengths: Array) -> int:
        """How many rows may have another last neighbour.

        about: the score of the worst candidate of each row, from the product; what was left out has none that
        is higher. last: the exact score of the last neighbour. lengths: the norm of each row of A.
        """
        with np.errstate(all="ignore"):
            if self.metric == "cosine":
                last = last * lengths
            elif self.metric == "sqeuclidean":
                last = (np.square(lengths) + last) / 2
            error = self._of_products(lengths)
            return int(np.count_nonzero(np.isfinite(last) & (about + error >= last)))

    def _of_products(self, lengths: Array) -> Array:
        """Rounding of what the reduction compares: products, of rows of B of norm 1 for cosines, less half of
        their squared norm for distances."""
        longest = 1.0 if self.metric == "cosine" else float(np.sqrt(self.largest))
        with np.errstate(all="ignore"):
            error = 4 * np.sqrt(self.depth) * float(np.finfo(np.float32 if self.single else np.float64).eps)
            found: Array = error * longest * (lengths + longest * (self.metric == "sqeuclidean"))
        return found
