"""The largest singular values and vectors of a matrix B, from a few passes over it.

Subspace iteration as in Halko, Martinsson and Tropp (Finding structure with randomness, SIAM Review 53,
2011): while a panel P of rows is in memory, Y = P·Ω and Pᵀ·Y are computed, so one pass applies BᵀB. Sums over
panels are made in float64, products in the type of panels.

The matrix may be centred without a centred copy: by columns, or by rows where B is the transpose of the
user's matrix. In the first pass, which also finds the means, each panel of a matrix that is centred by
columns is centred by its own means, and panels are combined as sums of squared deviations are by Chan's
formula. Later passes subtract the means, rounded to the type of panels, and correct what rounding has left.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..devices.cpu.blas import one_blas_thread
from ..devices.cpu.device import WORKER_BYTES
from ..run.stream import Array, Needs, Panels, Progress, Range
from ..storage.read.source import Opened
from ..support.errors import InputError
from ..support.intervals import ceil_div

Floats = npt.NDArray[np.float64]
Centre = Literal["columns", "rows"] | None

OVERSAMPLES = 10
"""Vectors beyond those that are asked for (Halko, Martinsson and Tropp recommend 5 to 10)."""


@dataclass(frozen=True)
class Size:
    """How much is computed, and what that takes."""

    rows: int
    cols: int
    wanted: int
    """Number of singular values and vectors that are asked for."""

    @property
    def width(self) -> int:
        """Number of vectors that are iterated."""
        return min(self.wanted + OVERSAMPLES, self.rows, self.cols)

    def passes(self, iterations: int) -> int:
        """Passes over B, with the one that projects it: where the basis spans all of the space, one iteration
        is enough to turn it, as far as rounding lets it."""
        return 2 + (min(iterations, 1) if self.width == self.cols else iterations)

    def needs(self, dtype: np.dtype[Any]) -> Needs:
        """Memory that the passes take, and what is computed between them."""
        block = self.cols * self.width
        # Ω in two types, Z, a correction of it, and what QR and the singular value decomposition copy.
        fixed = block * (8 * 8 + dtype.itemsize) + self.width**2 * 8 * 16 + (self.rows + self.cols * 6) * 8
        line = ceil_div(self.width * (dtype.itemsize + 8) + 16, max(1, self.cols))
        return Needs(fixed, 2 * block * dtype.itemsize + self.cols * 4 * 8 + WORKER_BYTES, line)


@dataclass
class _Sums:
    """What one pass over B adds up."""

    rows: int
    gram: Floats
    """YᵀY with Y = B·Ω."""
    product: Floats
    """BᵀY."""
    mean: Floats
    """Mean of each column, where B is centred by columns."""
    squares: float
    """Sum of the squares of all elements of the centred B; the first pass finds it."""


class Subspace:
    """The iteration over one matrix B (rows × cols)."""

    def __init__(self, panels: Panels, size: Size, centre: Centre, progress: Callable[[float], None] | None):
        """progress: called with the passes that are done, as a number with a fraction."""
        self._panels, self._size, self._centre, self._progress = panels, size, centre, progress
        self.passes = 0
        self.squares = 0.0
        """The sum of all squared elements of the centred B."""
        self.mean: Floats = np.zeros(size.rows if centre == "rows" else size.cols)
        """The means that are subtracted."""
        self._shift: Array | None = None
        self._rest: Floats | None = None

    def vectors(self, iterations: int, seed: int) -> tuple[Floats, Floats]:
        """Right singular vectors of B (cols × wanted) and their singular values, after all passes but one.
        Raises InputError where B holds NaN."""
        q, width = self._size.cols, self._size.width
        if width == q:
            basis = np.eye(q)
        else:
            basis = np.linalg.qr(np.random.default_rng(seed).standard_normal((q, width)))[0]
        for left in reversed(range(self._size.passes(iterations) - 1)):
            sums = self._applied(basis)
            values, turn = np.linalg.eigh(sums.gram)
            values, turned = values[::-1], sums.product @ turn[:, ::-1]
            if left:
                basis = np.linalg.qr(turned)[0]
        # Q = Y·W·Λ^-½ is an orthonormal basis of B·Ω, and the vectors are those of QᵀB = (Z·W·Λ^-½)ᵀ.
        roots = np.sqrt(np.maximum(values, 0.0))
        least = float(np.finfo(np.float64).eps) * width * roots[0]
        turned = np.where(roots > least, turned / np.where(roots > least, roots, 1.0), 0.0)
        u, sigma, _ = np.linalg.svd(turned, full_matrices=False)
        return u[:, : self._size.wanted], sigma[: self._size.wanted]

    def projected(self, vectors: Array, add: Callable[[Array], None]) -> Floats:
        """Hand B·V to `add`, panel by panel and in order; the norm of each of its columns."""
        narrow, squares = _lying(vectors, self._panels.dtype), np.zeros(vectors.shape[1])
        rest = None if self._rest is None else (narrow @ self._rest).astype(narrow.dtype)[:, None]

        def work(panel: Array, rows: Range) -> tuple[Array, Floats]:
            if self._centre == "rows":
                _centred_rows(panel)
            y = narrow @ panel.T
            if rest is not None:
                y -= rest
            return y.T, np.square(y, dtype=np.float64).sum(axis=1)

        def added(found: tuple[Array, Floats]) -> None:
            squares[...] += found[1]
            add(found[0])

        self._each(work, added)
        return np.asarray(np.sqrt(squares))

    def _applied(self, basis: Floats) -> _Sums:
        """One pass: YᵀY and BᵀY of Y = B·basis."""
        first, by_columns = self.passes == 0, self._centre == "columns"
        narrow = _lying(basis, self._panels.dtype)
        sums = _Sums(0, np.zeros((len(narrow),) * 2), np.zeros(narrow.shape).T, np.zeros(len(basis)), 0.0)

        def work(panel: Array, rows: Range) -> tuple[Array, Floats, int, Floats | None, float]:
            mean = None
            if self._centre == "rows":
                means = _centred_rows(panel)
                if first:
                    self.mean[slice(*rows)] = means
            elif by_columns and first:
                mean = centred_columns(panel)
            squares = float(np.vecdot(panel, panel).sum(dtype=np.float64)) if first else 0.0
            y = narrow @ panel.T  # the transpose of Y: BLAS multiplies rows that are long a quarter faster
            wide = y.astype(np.float64)
            return (y @ panel).T, wide @ wide.T, len(panel), mean, squares

        def add(found: tuple[Array, Floats, int, Floats | None, float]) -> None:
            product, gram, count, mean, squares = found
            sums.product += product
            sums.gram += gram
            sums.squares += squares
            total = sums.rows + count
            if mean is not None:
                apart = mean - sums.mean
                self._correct(sums, apart, narrow, sums.rows * count / total)
                sums.mean += apart * (count / total)
            sums.rows = total

        self._each(work, add)
        if first:
            self._begin(sums)
        elif self._rest is not None:
            self._correct(sums, self._rest, narrow, -float(sums.rows))
        if not (np.isfinite(sums.product).all() and np.isfinite(sums.gram).all()):
            raise InputError(
                f"{self._panels.opened.name} holds NaN, infinite numbers, or numbers whose squares are too "
                f"large for {self._panels.dtype}; replace them, or scale the array"
            )
        return sums

    @staticmethod
    def _correct(sums: _Sums, apart: Floats, narrow: Array, factor: float) -> None:
        """Add factor·δδᵀ to the matrix BᵀB that was applied to the basis."""
        along = narrow.astype(np.float64) @ apart
        sums.product += np.outer(apart * factor, along)
        sums.gram += np.outer(along * factor, along)
        sums.squares += factor * float(apart @ apart)

    def _begin(self, sums: _Sums) -> None:
        """Keep what the first pass has found. Raises InputError where means are NaN."""
        self.squares = sums.squares
        if self._centre == "columns":
            self.mean = sums.mean
            self._shift = sums.mean.astype(self._panels.dtype)
            self._rest = sums.mean - self._shift
        if not np.isfinite(self.mean).all():
            column = int(np.flatnonzero(~np.isfinite(self.mean))[0])
            raise InputError(
                f"{self._panels.opened.name}: column {column} holds NaN or infinite numbers; replace them"
            )

    def _each(self, work: Callable[[Array, Range], Any], add: Callable[[Any], None]) -> None:
        report: Progress | None = None
        if self._progress is not None:
            tell, done = self._progress, self.passes

            def report(fraction: float) -> None:
                tell(done + fraction)

        with one_blas_thread:
            self._panels.each(work, add, self._shift, report)
        self.passes += 1


def _lying(vectors: Array, dtype: np.dtype[Any]) -> Array:
    """The vectors as rows, in the type of panels."""
    return np.ascontiguousarray(vectors.T, dtype)


def centred_columns(panel: Array) -> Floats:
    """Subtract the mean of each column from a panel, in place; those means. What rounding leaves is far below
    the precision of the panel's products."""
    near = np.ones(len(panel), panel.dtype) @ panel / panel.dtype.type(len(panel))
    panel -= near
    rest = np.add.reduce(panel, axis=0, dtype=np.float64) / len(panel)
    panel -= rest.astype(panel.dtype)
    return np.asarray(near + rest, np.float64)


def _centred_rows(panel: Array) -> Floats:
    """Subtract the mean of each row from a panel, in place; those means."""
    near = panel.mean(axis=1, dtype=np.float64).astype(panel.dtype)
    panel -= near[:, None]
    rest = panel.mean(axis=1, dtype=np.float64)
    panel -= rest.astype(panel.dtype)[:, None]
    return np.asarray(near + rest, np.float64)


def panel_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type that products are made in: float32 where it holds every element exactly, else float64."""
    return np.dtype(np.float32 if np.can_cast(dtype, np.float32) else np.float64)


def panels_of(opened: Opened, size: Size, limit: int, extra: int) -> Panels:
    """The panels that a matrix is read in. extra: bytes that results take. Raises BudgetError."""
    dtype = panel_type(opened.dtype)
    needs = size.needs(dtype)
    needs = Needs(needs.fixed + extra, needs.thread, needs.element)
    return Panels(opened, dtype, limit, "decompose", needs, rows=4 * size.width)
