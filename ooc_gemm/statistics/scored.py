"""Exact scores of candidates on a device that has memory of its own, in which the rows of B stay.

B ──one pass──► device: norms of rows, sums of columns
candidates of a row of blocks ──► device: sums over products or squared differences ──► scores
"""

from collections.abc import Callable

import numpy as np

from ..engine.reduction import Pairs, Scorer
from ..support.intervals import ranges
from .rescore import Array, Exact, Extreme, Metric, Range, Rows, Whole, spread

TYPES = (
    "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
)  # fmt: skip
"""Types of rows that a device can score."""
SHARE = 2
"""Rows stay on a device where they take up to this part of its memory limit; the rest is for blocks."""


class OnDevice(Exact):
    """Computes the scores of candidates on a device."""

    def __init__(self, a: Rows, b: Rows, metric: Metric, pairs: Pairs, start: Callable[[Pairs], Scorer]):
        """pairs: what the device keeps. start: opens its scorer, when `norms` is called."""
        super().__init__(a, b, metric)
        self._pairs, self._start = pairs, start
        self._scorer: Scorer | None = None

    @property
    def nbytes(self) -> int:
        """Host memory that it takes beside `CANDIDATE_BYTES` for each candidate."""
        left = self.a.nbytes if self._pairs.left else 0
        return left + self.b.nbytes + self._pairs.staging_bytes

    def cost(self, rows: Range) -> int:
        """Counts rows of A, where A is not B."""
        if self._pairs.left is None:
            return 0
        return sum(self.a.cost(some, (0, self._pairs.depth)) for some in self._strips(rows))

    def norms(self) -> tuple[Array, float, Array, bool]:
        """Reads B once, which then stays on the device."""
        self.close()
        scorer, count, depth = self._start(self._pairs), self._pairs.shape[1], self._pairs.depth
        self._scorer, extreme, whole = scorer, Extreme(self.b, count), Whole(self.b)
        sides = {"right": self.b} | ({"left": self.a} if self._pairs.left else {})
        for rows in sides.values():
            rows.slots = scorer.host_buffers(rows.threads, rows.slot)

        def put(values: Array, row: int, col: int) -> None:
            scorer.put("right", values, row, col)
            extreme.look_at(values, row)
            whole.look(values)

        self.b.each((0, count), (0, depth), put)
        self._squares, sums = scorer.norms()
        exponents = extreme.exponents(self._squares)
        return self._squares, spread(self._squares, sums), exponents, whole.found

    def scores(self, rows: Range, columns: Array) -> tuple[Array, Array, bool, int]:
        """Scores as many rows at a time as a strip has."""
        scorer = self._scorer
        assert scorer, "B is on the device"
        found, squares, moved = np.empty(columns.shape), np.empty(len(columns)), 0
        lost, whole = np.zeros(len(columns), bool), Whole(self.a)
        for start, stop in self._strips(rows):
            extreme = Extreme(self.a, stop - start)

            def put(
                values: Array, row: int, col: int, start: int = start, extreme: Extreme = extreme
            ) -> None:
                scorer.put("left", values, row - start, col)
                extreme.look_at(values, row - start)
                whole.look(values)

            if self._pairs.left:
                moved += self.a.each((start, stop), (0, self._pairs.depth), put)
            here = slice(start - rows[0], stop - rows[0])
            some = columns[here]
            sums, left = scorer.sums(some, start, self.metric == "sqeuclidean")
            squares[here] = left
            if self._pairs.left:
                lost[here] = extreme.rows(left)
            with np.errstate(all="ignore"):
                scores = self.scored(sums, left[:, None], self._squares[some], some)
            scores[(some < 0) | ~np.isfinite(left)[:, None]] = -np.inf
            found[here] = scores
        with np.errstate(invalid="ignore"):
            lengths = np.where(np.isfinite(squares), np.sqrt(squares), np.nan)
        lengths[lost] = np.inf
        return found, lengths, whole.found, moved

    def close(self) -> None:
        """Frees the memory of the device."""
        if self._scorer:
            self._scorer.close()
        self._scorer = None

    def _strips(self, rows: Range) -> list[Range]:
        return [(rows[0] + i, rows[0] + j) for i, j in ranges(rows[1] - rows[0], self._pairs.strip)]
