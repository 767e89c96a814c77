"""The best candidates of rows of A, by exact scores."""

from dataclasses import dataclass

import numpy as np

from .rescore import Array, Exact, Range


@dataclass(frozen=True)
class Candidates:
    """The best candidates of some rows of A, best first: of equal ones that in the lower row of B."""

    columns: Array
    """Rows of B (rows of A × k) …"""
    scores: Array
    """… and their exact scores, higher is better; −∞ where there is no neighbour."""
    about: Array
    """For each row of A a score of the product that rows of B which are no candidates do not exceed; −∞ where
    there are none."""
    lengths: Array
    """The norm of each row of A."""
    whole: bool
    """Whether all elements of these rows of A are integers."""

    @classmethod
    def of(cls, exact: Exact, rows: Range, best: tuple[Array, Array], k: int) -> "tuple[Candidates, int]":
        """Score what a reduction has kept of some rows; the bytes read. best: columns, and scores of the
        product, best first."""
        columns, about = best
        scores, lengths, whole, moved = exact.scores(rows, columns)
        return cls(*_best(columns, scores, k), about[:, -1].copy(), lengths, whole), moved

    def merged(self, other: "Candidates") -> "Candidates":
        """The best of these and of candidates among other rows of B, as many as there are of these."""
        columns = np.concatenate([self.columns, other.columns], axis=1)
        scores = np.concatenate([self.scores, other.scores], axis=1)
        best = _best(columns, scores, self.columns.shape[1])
        return Candidates(*best, np.fmax(self.about, other.about), self.lengths, self.whole)


def _best(columns: Array, scores: Array, k: int) -> tuple[Array, Array]:
    """The k highest scores of each row, and their columns."""
    order = np.lexsort((columns, -scores), axis=1)[:, :k]
    return np.take_along_axis(columns, order, 1), np.take_along_axis(scores, order, 1)
