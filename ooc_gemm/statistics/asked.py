"""What `topk` is asked for."""

from collections.abc import Mapping
from typing import Any, get_args

import numpy as np

from ..engine.reduction import Pairs, score_type
from ..run.prepare import MOST_COLUMNS
from ..run.request import Reduced
from ..run.scalars import choice, whole
from ..storage.read.source import Opened
from ..support.errors import InputError
from .compared import Compared
from .gathered import Gathered
from .nearest import Nearest, Scores
from .reducing import Blocks
from .rescore import CANDIDATE_BYTES, Array, Exact, Metric, Range, Rows
from .scored import TYPES

SPARE = 6
"""Candidates beyond k that are kept of each row, at least: sums of the product are rounded."""
Arrays = Mapping[str, tuple[tuple[int, int], np.dtype[Any]]]
"""Shape and type of each array of a result."""


class Asked(Compared):
    """What is asked for, checked against the operands."""

    def __init__(self, left: Any, right: Any, k: int, metric: Metric, include_self: bool, graph: bool):
        """graph: a graph is written, too. Raises InputError."""
        choice("metric", metric, get_args(Metric))
        k = whole("k", k)
        super().__init__("topk", left, right, include_self)
        self.k, self.metric, self.graph = k, metric, graph
        there = self.n - self.others if self.depth else 0
        if not 1 <= k <= there:
            raise InputError(
                f"k is {k}, and a row of {self.a.name} has {max(0, there)} possible neighbours in "
                f"{self.b.name}; give another k"
            )
        self.spared = k + max(SPARE, k // 8) < there
        self.keep = min(there, k + max(SPARE, k // 8))
        kinds = np.result_type(self.a.dtype, self.b.dtype)
        self.values = np.dtype(np.float32 if kinds in (np.float16, np.float32) else np.float64)

    def exact(self, a: Opened, b: Opened, panel_bytes: int = 0, among: Range | None = None) -> Exact:
        """What computes the exact scores of candidates on the host. panel_bytes, among: as of `Exact`."""
        left, right = Rows(a, cores=self.cores), Rows(b, cores=self.cores)
        return Exact(left, right, self.metric, panel_bytes, among)

    def pairs(self) -> Pairs | None:
        """What a device keeps to compute them; None where it cannot."""
        types = self.a.dtype, self.b.dtype
        if any(dtype.name not in TYPES for dtype in types) or self.n > MOST_COLUMNS:
            return None
        return Pairs((self.m, self.n), self.depth, types[1], None if self.same else types[0], self.keep)

    def reduction(self, blocks: Blocks, squares: Array, scale: Array | None) -> Gathered | Nearest:
        """What takes blocks. squares: the squared norm of each row of B. scale: as of `Scaling`."""
        plan, products = blocks.plan, blocks.operation.arithmetic.block
        dtype, shape = score_type(products), (self.m, self.n)
        scores = self.scores(squares, dtype, scale)
        if plan.problem.found_bytes:
            return Gathered(shape, plan.bm, self.keep, dtype, scores)
        return Nearest(shape, plan.bm, self.keep, products, dtype, scores)

    def reduced(self, in_memory: bool) -> Reduced:
        """Counts what exact scores on the host take, norms, what finds copies, and what rows are multiplied
        with."""
        fixed = self.exact(self.a, self.b).nbytes + self.n * 72 + self.scaling_bytes
        if in_memory:
            fixed += sum(m * k * dtype.itemsize for (m, k), dtype in self.arrays.values())
        # Rows of the next blocks may come while those of the ones before are finished.
        row = 2 * Nearest.row_bytes(self.keep, np.dtype(np.float64)) + self.keep * CANDIDATE_BYTES
        return Reduced(self.chunk_rows, row, fixed, self.keep, lines=self.lines)

    @property
    def scaling_bytes(self) -> int:
        """What `scaling.Scaling` takes, and what finds it."""
        return 48 * (self.m + self.n) if self.lines else 0

    @property
    def options(self) -> dict[str, Any]:
        """Adds k, the metric and the graph."""
        found = {"k": self.k, "metric": self.metric} | super().options
        return found | ({"graph": "csr"} if self.graph else {})

    @property
    def arrays(self) -> Arrays:
        """The arrays of the result."""
        shape = self.m, self.k
        return {"indices": (shape, np.dtype(np.int64)), "values": (shape, self.values)}

    def scores(self, squares: Array, dtype: np.dtype[Any], scale: Array | None = None) -> Scores:
        """How scores come from products. squares: the squared norm of each row of B. scale: as of
        `Scaling`."""
        finite = np.isfinite(squares)
        never = None if finite.all() else np.flatnonzero(~finite)
        squares = np.where(finite, squares, 0)
        if self.metric == "cosine":
            lengths = np.sqrt(squares)
            scale = np.divide(1, lengths, out=np.zeros_like(lengths), where=lengths > 0)
            return Scores(scale.astype(dtype), None, never, self.others)
        shift = (squares / 2).astype(dtype) if self.metric == "sqeuclidean" else None
        return Scores(scale, shift, never, self.others)
