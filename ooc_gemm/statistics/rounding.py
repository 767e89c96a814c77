"""How far scores of a product may be from exact ones."""

from dataclasses import dataclass

import numpy as np

from .rescore import Array, Metric

LITTLE_SPREAD = 1e-3
"""Where deviations from the mean make up less than this share of all squares, float32 leaves too few digits
of what tells rows apart, and products are computed in float64."""
MOST_UNSURE = 0.01
"""So are those of some rows that were computed in float32, where it is not sure of more than this share of
them."""
PLAIN = 1e-30, 1e37
"""Products that are not between these may be too small or too large for float32."""


@dataclass(frozen=True)
class Rounding:
    """The rounding of products of rows of A with rows of B."""

    metric: Metric
    depth: int
    """Elements of a row."""
    longest: float
    """The largest norm of a row of B that is finite …"""
    shortest: float
    """… and the smallest one that is not 0."""
    whole: bool = False
    """Whether all elements of rows of B are integers, so that scores with rows of integers do not differ by
    less than a step."""
    single: bool = True
    """Whether products are computed in float32."""

    @classmethod
    def of(
        cls, metric: Metric, depth: int, squares: Array, scale: Array | None, whole: bool = False
    ) -> "Rounding":
        """squares: squared norms of rows of B. scale: as of `Scaling`. whole: their elements are integers."""
        norms = np.sqrt(squares) if scale is None else np.sqrt(squares) * scale
        real = np.isfinite(norms) & (norms > 0)
        longest = float(norms.max(where=real, initial=0.0))
        return cls(metric, depth, longest, float(norms.min(where=real, initial=np.inf)), whole)

    def too_coarse(self, spread: float, lengths: Array) -> bool:
        """Whether products in float32 tell too little. spread: as of `rescore.norms`. lengths: norms of rows
        of A, as far as they are known."""
        if not self.single or not self.longest:
            return False
        if not PLAIN[0] < self.longest**2 < PLAIN[1] or (spread < LITTLE_SPREAD and self.metric != "dot"):
            return True
        return bool(len(lengths) and (~self.fit(lengths)).mean() > MOST_UNSURE)

    def fit(self, lengths: Array) -> Array:
        """Whether products with rows of A of these norms are neither too large nor too small for float32."""
        if not self.single or not self.longest:
            return np.ones(len(lengths), bool)
        with np.errstate(all="ignore"):
            small = lengths * (self.shortest if self.metric == "cosine" else self.longest)
            large = lengths * self.longest
            if self.metric == "sqeuclidean":
                small, large = small + self.longest**2, large + self.longest**2
            fits: Array = (small > PLAIN[0]) & (large < PLAIN[1]) & (lengths < PLAIN[1])
            if self.metric == "cosine":
                fits &= self.shortest > PLAIN[0]
            fits |= (lengths == 0) | ~np.isfinite(lengths)
        return fits

    def of_scores(self, lengths: Array) -> Array:
        """By how much scores of the product may be wrong. lengths: the norm of each row of A."""
        error = self._of_products(lengths, self.longest)
        with np.errstate(all="ignore"):
            if self.metric == "cosine":
                return np.where(lengths > 0, error / lengths, 0)
            return 2 * error if self.metric == "sqeuclidean" else error

    def close(self, about: Array, last: Array, lengths: Array, whole: bool) -> tuple[Array, Array]:
        """(Rows that may have another last neighbour, and those of them that may have one with a better
        score.)

        about: the score of the worst candidate of each row, from the product; what was left out has none that
        is higher. last: the exact score of the last neighbour. lengths: the norm of each row of A. whole:
        whether all elements of these rows are integers.
        """
        longest: float | Array = self.longest
        with np.errstate(all="ignore"):
            if self.metric == "cosine":
                last = last * lengths
            elif self.metric == "sqeuclidean":
                # Rows of B that are nearer than the last neighbour have no larger norms than this.
                longest = np.fmin(longest, lengths + np.sqrt(np.maximum(-last, 0)))
                last = (np.square(lengths) + last) / 2
            most = about + self._of_products(lengths, longest)
            near: Array = np.isfinite(last) & (most >= last)
            better: Array = near & (most > last)
            if whole and self.whole:
                better &= most >= last + self._step(lengths) / 2
        return near, better

    def _step(self, lengths: Array) -> Array:
        """By how much products of rows of integers differ at least where they differ. For cosines of a row of
        norm r they are p / √n, of integers |p| ≤ r·√n and n. Squares of these differ by 1 / n² or more."""
        if self.metric == "cosine":
            return 1 / (2 * self.longest**4 * lengths)
        return np.full(len(lengths), 0.5 if self.metric == "sqeuclidean" else 1.0)

    def _of_products(self, lengths: Array, longest: float | Array) -> Array:
        """Rounding of what the reduction compares: products, of rows of B of norm 1 for cosines, less half of
        their squared norm for distances. longest: the largest norm of these rows of B."""
        if self.metric == "cosine":
            longest = 1.0
        with np.errstate(all="ignore"):
            error = 4 * np.sqrt(self.depth) * float(np.finfo(np.float32 if self.single else np.float64).eps)
            found: Array = error * longest * (lengths + longest * (self.metric == "sqeuclidean"))
        return found
