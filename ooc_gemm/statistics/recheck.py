"""Checks neighbours that were found: for some rows of A, all scores are computed once more, in float64 and
row by row, and compared with what the product, the reduction and the store have made of them."""

from collections.abc import Callable

import numpy as np

from ..support.errors import VerificationError
from ..support.intervals import ranges
from .rescore import STRIP_BYTES, Array, Exact, Extreme, Rows, depths

SAMPLES = 8
"""Rows of A that are checked, at most."""
SAMPLE_BYTES = 4 << 20
"""Bytes of these rows in float64, but for one of them."""


class Sampled:
    """Some rows of A, chosen at random, all of whose scores are computed once more."""

    def __init__(self, a: Rows, b: Rows):
        """a, b: what reads the arrays."""
        self.a, self.b = a, b
        (m, depth), self._n = a.opened.shape, b.opened.shape[0]
        count = min(m, SAMPLES, max(1, SAMPLE_BYTES // (8 * depth)))
        self.rows: Array = np.sort(np.random.default_rng().choice(m, count, replace=False))
        """The rows, ascending."""

    def has_extreme(self) -> bool:
        """Whether some of the rows are `Extreme`. Reads them."""
        left, extreme = self._left(), Extreme(self.a, len(self.rows))
        with np.errstate(all="ignore"):
            squares = np.vecdot(left, left)
        extreme.look(left, squares, 0)
        return bool(extreme.rows(squares).any())

    def cost(self) -> int:
        """Bytes that it reads."""
        whole = (0, self.a.opened.shape[1])
        read = sum(self.a.cost((row, row + 1), whole) for row in self.rows.tolist())
        return read + sum(self.b.cost(rows, k) for rows in self._bands() for k in self._depths())

    def _refuse(self, name: str, wrong: Array) -> None:
        """Raise VerificationError where any row is wrong. name: how the message calls the result."""
        if wrong.any():
            row = int(self.rows[int(np.argmax(wrong))])
            raise VerificationError(
                f"{name} is wrong in row {row} and in {int(wrong.sum()) - 1} of {len(wrong) - 1} other rows "
                "that were checked with all their scores; compute it again with force=True, on another device"
            )

    def _left(self) -> Array:
        """The rows of A, in float64."""
        left = np.zeros((len(self.rows), self.a.opened.shape[1]))
        for number, row in enumerate(self.rows.tolist()):

            def fill(values: Array, at: int, col: int, number: int = number) -> None:
                left[number, col : col + values.shape[1]] = values[0]

            self.a.each((row, row + 1), (0, left.shape[1]), fill)
        return left

    def _bands(self) -> list[tuple[int, int]]:
        return list(ranges(self._n, max(1, STRIP_BYTES // 8 // len(self.rows))))

    def _depths(self) -> list[tuple[int, int]]:
        return list(depths(self.b, len(self.rows)))


class Recheck(Sampled):
    """The check of the neighbours of some rows of A."""

    def __init__(self, exact: Exact, metric: str, others: bool):
        """exact: with the arrays. others: no row is its own neighbour."""
        super().__init__(exact.a, exact.b)
        self._exact, self._metric, self._others = exact, metric, others

    def carry_out(
        self,
        name: str,
        indices: Array,
        values: Array,
        rounding: Callable[[Array], Array],
        restored: Callable[[Array], Array],
    ) -> None:
        """Check the neighbours of `self.rows`.

        name: how the message calls the result. indices, values: of their neighbours, as they are stored.
        rounding: by how much scores of the product may be wrong, from the lengths of rows of A. restored:
        scores of rows as they are stored, from those of rows that are multiplied by factors. Raises
        VerificationError.
        """
        left = self._left()
        squares = np.square(left).sum(axis=1)
        there, sign = indices >= 0, -1 if self._metric == "sqeuclidean" else 1
        exact, best = np.full(indices.shape, -np.inf), np.full(len(left), -np.inf)
        longest = 0.0
        for band in self._bands():
            scores, right = self._scores(left, squares, band)
            norms = (
                np.sqrt(right)
                if self._exact.scale is None
                else np.sqrt(right) * self._exact.scale[slice(*band)]
            )
            longest = max(longest, float(norms.max(where=np.isfinite(norms), initial=0.0)))
            at, place = np.nonzero(there & (indices >= band[0]) & (indices < band[1]))
            columns = indices[at, place] - band[0]
            exact[at, place] = scores[at, columns]
            scores[at, columns] = -np.inf
            best = np.maximum(best, scores.max(axis=1))
        lengths = np.sqrt(squares)
        with np.errstate(all="ignore"):
            wide = sign * values.astype(np.float64)
            size = 1.0 if self._metric == "cosine" else (lengths * longest)[:, None]
            size = size + np.square(longest) + np.square(lengths)[:, None] if sign < 0 else size
            sums = 16 * np.sqrt(left.shape[1]) * float(np.finfo(np.float64).eps) * size
            stored = np.finfo(values.dtype)
            bound = 4 * float(stored.eps) * np.abs(wide) + float(stored.smallest_subnormal) + restored(sums)
            wrong = (there & np.isfinite(wide) & ~(np.abs(wide - restored(exact)) <= bound)).any(axis=1)
            last = np.where(there.all(axis=1), exact.min(axis=1), -np.inf)
            wrong |= best > last + rounding(lengths)
        wrong = np.where(np.isfinite(squares), wrong, there.any(axis=1))
        self._refuse(name, wrong)

    def _scores(self, left: Array, squares: Array, band: tuple[int, int]) -> tuple[Array, Array]:
        """(scores with some rows of B, −∞ where these are no neighbours; squared norms of these rows)."""
        sums, right = np.zeros((len(left), band[1] - band[0])), np.zeros(band[1] - band[0])

        def add(values: Array, at: int, col: int) -> None:
            width = values.shape[1]
            for start, stop in ranges(len(values), max(1, STRIP_BYTES // 8 // max(1, width))):
                wide = values[start:stop].astype(np.float64)
                here = slice(at - band[0] + start, at - band[0] + stop)
                right[here] += np.vecdot(wide, wide)
                for row, x in enumerate(left[:, col : col + width]):
                    if self._metric == "sqeuclidean":
                        apart = wide - x
                        sums[row, here] += np.vecdot(apart, apart)
                    else:
                        sums[row, here] += np.einsum("ij,j->i", wide, x)

        for k in self._depths():
            self.b.each(band, k, add)
        with np.errstate(all="ignore"):
            scores = self._exact.scored(sums, squares[:, None], right[None], slice(*band))
        scores[:, ~np.isfinite(right)] = -np.inf
        scores[np.isnan(scores)] = -np.inf
        if self._others:
            same = np.flatnonzero((self.rows >= band[0]) & (self.rows < band[1]))
            scores[same, self.rows[same] - band[0]] = -np.inf
        return scores, right
