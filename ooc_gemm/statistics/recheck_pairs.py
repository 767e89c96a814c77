"""Checks pairs of rows that were found to reach a value: all scores of some rows of A are computed once more,
in float64 and row by row, and compared with what is stored."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..support.intervals import ranges
from .recheck import Sampled
from .rescore import STRIP_BYTES, Array

PLAIN = 1e-30, 1e30
"""Rows whose norms are not between these, and not 0, are not compared where products are made in float32 …"""
WIDE = 1e-140, 1e150
"""… and those whose norms are not between these where they are made in float64."""
EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Reach:
    """Which scores are kept, and how they were computed."""

    metric: Literal["cosine", "correlation", "dot"]
    least: float
    absolute: bool
    others: bool
    """The score of a row with itself is not kept."""
    products: np.dtype[Any]
    """Type of the elements of products."""

    @property
    def error(self) -> float:
        """Relative error of sums of one product and of their factors; 0 where they are exact."""
        return 0.0 if self.products.kind in "iu" else float(np.finfo(self.products).eps)


@dataclass(frozen=True)
class _Side:
    """Rows less their pivots: sums, sums of squares, and the pivots."""

    sums: Array
    squares: Array
    pivots: Array


class RecheckPairs(Sampled):
    """The check of the pairs that some rows of A are in."""

    _reach: Reach
    _pivots: tuple[Array, Array]

    @property
    def nbytes(self) -> int:
        """Memory that the check takes."""
        rows = len(self.rows) * self.a.opened.shape[1] * 8
        return self.a.nbytes + self.b.nbytes + 2 * rows + 16 * STRIP_BYTES

    def carry_out(
        self, name: str, arrays: Mapping[str, Any], reach: Reach, pivots: tuple[Array, Array]
    ) -> None:
        """Check `self.rows`.

        name: how the message calls the result. arrays: `data`, `indices` and `indptr` of the sparse matrix.
        pivots: a number near the mean of each row of A, and of B, which is subtracted before sums are made of
        products; any number will do, but digits are lost where it is far away. Raises VerificationError.
        """
        self._reach, self._pivots = reach, pivots
        left = self._left()
        own = pivots[0][self.rows]
        with np.errstate(all="ignore"):
            left -= own[:, None]
            side = _Side(left.sum(axis=1), np.square(left).sum(axis=1), own)
            ends = [np.asarray(arrays["indptr"][row : row + 2]).tolist() for row in self.rows.tolist()]
            wrong = np.array([not 0 <= start <= end <= arrays["data"].shape[0] for start, end in ends])
            at = [start for start, _ in ends]
            for band in self._bands():
                scores, bound = self._scores(left, side, band)
                for number, (_, end) in enumerate(ends):
                    if wrong[number]:
                        continue
                    some = slice(at[number], min(end, at[number] + band[1] - band[0]))
                    columns = np.asarray(arrays["indices"][some])
                    columns = columns[: int(np.argmax(np.append(columns, band[1]) >= band[1]))]
                    values = np.asarray(arrays["data"][some])[: len(columns)].astype(np.float64)
                    at[number] += len(columns)
                    wrong[number] = self._differ(number, band, columns, values, scores[number], bound[number])
            wrong |= np.array([place != end for place, (_, end) in zip(at, ends, strict=True)])
        self._refuse(name, wrong)

    def _differ(
        self, number: int, band: tuple[int, int], columns: Array, values: Array, scores: Array, bound: Array
    ) -> bool:
        """Whether what is stored of a row, for some rows of B, is not what reaches the value."""
        reach, place = self._reach, columns - band[0]
        row = int(self.rows[number]) if reach.others else -1
        if (np.diff(columns) <= 0).any() or (place < 0).any() or (columns == row).any():
            return True
        known, kept = np.isfinite(scores) & np.isfinite(bound), np.zeros(len(scores), bool)
        kept[place] = True
        if band[0] <= row < band[1]:
            known[row - band[0]] = False
        size = np.abs(scores) if reach.absolute else scores
        apart = ~(np.abs(values - scores[place]) <= bound[place]) & known[place]
        missing = known & ~kept & (size - bound > reach.least)
        more = known & kept & (size + bound < reach.least)
        return bool(np.isnan(values).any() or apart.any() or missing.any() or more.any())

    def _scores(self, left: Array, side: _Side, band: tuple[int, int]) -> tuple[Array, Array]:
        """(scores with some rows of B, and by how much those that are stored may differ from them)."""
        width = band[1] - band[0]
        sums, total, squares = np.zeros((len(left), width)), np.zeros(width), np.zeros(width)
        pivots = self._pivots[1][slice(*band)]

        def add(values: Array, at: int, col: int) -> None:
            for start, stop in ranges(len(values), max(1, STRIP_BYTES // 8 // max(1, values.shape[1]))):
                here = slice(at - band[0] + start, at - band[0] + stop)
                with np.errstate(all="ignore"):
                    wide = values[start:stop].astype(np.float64) - pivots[here, None]
                    total[here] += wide.sum(axis=1)
                    squares[here] += np.vecdot(wide, wide)
                    for row, x in enumerate(left[:, col : col + values.shape[1]]):
                        sums[row, here] += np.einsum("ij,j->i", wide, x)

        for k in self._depths():
            self.b.each(band, k, add)
        return self._scored(sums, side, _Side(total, squares, pivots))

    def _scored(self, sums: Array, left: _Side, right: _Side) -> tuple[Array, Array]:
        """Scores and their bounds from sums of products."""
        reach, depth = self._reach, self.a.opened.shape[1]
        exact, rounding = 16 * np.sqrt(depth) * EPS, (4 * np.sqrt(depth) + 8) * reach.error
        if reach.metric == "correlation":
            sums = sums - np.outer(left.sums, right.sums) / depth
            a, b = (np.sqrt(one.squares - np.square(one.sums) / depth) for one in (left, right))
            # Means are known to the precision of float64 of their own size.
            a_far, b_far = (
                exact * np.abs(one.pivots + one.sums / depth) * np.sqrt(depth) / norm
                for one, norm in ((left, a), (right, b))
            )
            beside = a_far[:, None] + b_far
        else:
            a, b = np.sqrt(left.squares), np.sqrt(right.squares)
            beside = np.zeros_like(sums)
        lengths = np.outer(a, b)
        if reach.metric == "dot":
            scores, bound = sums, (exact + rounding) * lengths
        else:
            scores = sums / np.where(lengths == 0, 1, lengths)
            bound = exact + rounding + beside
        if reach.error:
            least, most = PLAIN if reach.error > EPS else WIDE
            plain = [
                ((norm == 0) & (one.sums == 0)) | ((norm > least) & (norm < most))
                for norm, one in ((a, left), (b, right))
            ]
            bound = np.where(np.outer(*plain) & (lengths < most), bound, np.inf)
        return scores, bound
