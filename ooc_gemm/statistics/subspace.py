"""The largest singular values and vectors of a matrix B, from a few passes over it.

Subspace iteration as in Halko, Martinsson and Tropp (Finding structure with randomness, SIAM Review 53,
2011): while a panel P of rows is in memory, Y = P·Ω and Pᵀ·Y are computed, so one pass applies BᵀB. Sums over
panels are made in float64, products in the type of panels. `Products` makes the passes, on the CPU
(`subspace_cpu.py`) or on another device (`subspace_device.py`).

The matrix may be centred without a centred copy: by columns, or by rows where B is the transpose of the
user's matrix. In the first pass, which also finds the means, each panel of a matrix that is centred by
columns is centred by its own means, and panels are combined as sums of squared deviations are by Chan's
formula. Later passes subtract the means.

Products of panels have squares of B's elements in them. Where the first pass shows that these are too large
or too small for the type of panels, it is made again with B multiplied by a power of two, and so are all
others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ..devices.cpu.device import WORKER_BYTES
from ..run.stream import Array, Needs, Progress
from ..storage.read.source import Opened
from ..support.errors import InputError
from ..support.intervals import ceil_div

Floats = npt.NDArray[np.float64]
Centre = Literal["columns", "rows"] | None

RESCALED = 4
"""How often the first pass is made again with another power of two, at most."""
OVERSAMPLES = 10
"""Vectors beyond those that are asked for (Halko, Martinsson and Tropp recommend 5 to 10)."""


@dataclass(frozen=True)
class Size:
    """How much is computed, and what that takes."""

    rows: int
    cols: int
    wanted: int
    """Number of singular values and vectors that are asked for."""
    whole: int | None = None
    """Rows of the matrix of which these are some; None: these are all."""

    @property
    def width(self) -> int:
        """Number of vectors that are iterated."""
        return min(self.wanted + OVERSAMPLES, self.rows if self.whole is None else self.whole, self.cols)

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
class Sums:
    """What one pass over B adds up."""

    gram: Floats
    """YᵀY with Y = B·Ω."""
    product: Floats
    """BᵀY."""
    mean: Floats
    """The means that B is centred by, as the first pass finds them: of columns, or of rows."""
    squares: float
    """Sum of the squares of all elements of the centred B; the first pass finds it."""
    rows: int = 0
    """Number of rows of B that are added up."""

    def include(self, other: "Sums", basis: Floats | None) -> None:
        """Add the sums over further rows of B, by Chan's formula where these were centred by their own means.
        basis: Ω, as products have it, where they were; else None."""
        self.product += other.product
        self.gram += other.gram
        self.squares += other.squares
        total = self.rows + other.rows
        if basis is not None:
            apart = other.mean - self.mean
            self.correct(apart, basis, self.rows * other.rows / total)
            self.mean += apart * (other.rows / total)
        self.rows = total

    def correct(self, apart: Floats, basis: Floats, factor: float) -> None:
        """Add factor·δδᵀ to the matrix BᵀB that was applied to the basis Ω."""
        along = basis.T @ apart
        self.product += np.outer(apart * factor, along)
        self.gram += np.outer(along * factor, along)
        self.squares += factor * float(apart @ apart)


class Products(Protocol):
    """Multiplies B (rows × cols), which may be centred, by a few vectors. Each call reads B once."""

    name: str
    """How messages call the array."""
    dtype: np.dtype[Any]
    """The type in which products are made."""
    device: str
    """Name of what makes them."""
    exponent: int
    """Each element of B is multiplied by 2 to this power: what is found is that of the multiplied B."""

    @property
    def opened(self) -> Opened:
        """B, before it is centred."""

    @property
    def bytes_read(self) -> int:
        """Bytes moved from the store by all passes."""

    @property
    def peak_host_bytes(self) -> int:
        """The largest resident set of a process that took part, in bytes."""

    @property
    def peak_device_bytes(self) -> int:
        """The most memory that was held of a device with memory of its own, in bytes; 0 where there is
        none. It is known when this is closed."""

    def applied(self, basis: Floats, mean: Floats | None, report: Progress | None) -> Sums:
        """Return the sums of a pass. mean: of columns; None in the first pass, which finds it. Raises
        StoreError."""

    def projected(
        self, vectors: Floats, mean: Floats, add: Callable[[Array], None], report: Progress | None
    ) -> Floats:
        """Hand Y = B·V to `add`, panel by panel and in order, and return YᵀY. Raises StoreError."""

    def close(self) -> None:
        """Free what the passes hold."""


@dataclass(frozen=True)
class Found:
    """Singular vectors and values of the projection QQᵀ·B of the multiplied B, where Q is an orthonormal
    basis of a part of its range."""

    right: Floats
    """Right vectors (cols × wanted)."""
    values: Floats
    """Their singular values, the largest first."""
    inverse: Floats
    """What B multiplies to make the left vectors (cols × wanted); 0 where a value is 0 to rounding."""


class NotFiniteError(Exception):
    """B holds NaN or infinite elements."""


class Subspace:
    """The iteration over one matrix B (rows × cols)."""

    def __init__(self, products: Products, size: Size, centre: Centre, progress: Progress | None):
        """progress: called with the passes that are done, as a number with a fraction."""
        self._products, self._size, self._centre, self._progress = products, size, centre, progress
        self.passes = 0
        self.squares = 0.0
        """The sum of all squared elements of the centred B, as it was multiplied."""
        self.mean: Floats = np.zeros(size.rows if centre == "rows" else size.cols)
        """The means that are subtracted, as B was multiplied."""

    def found(self, iterations: int, seed: int) -> "Found":
        """What all passes but one find. Raises InputError or NotFiniteError where B holds NaN."""
        q, width = self._size.cols, self._size.width
        if width == q:
            basis = np.eye(q)
        else:
            basis = np.linalg.qr(np.random.default_rng(seed).standard_normal((q, width)))[0]
        for left in reversed(range(self._size.passes(iterations) - 1)):
            sums = self._applied(basis)
            if left:
                basis = np.linalg.qr(sums.product @ np.linalg.eigh(sums.gram)[1][:, ::-1])[0]
        # Q = Y·T is an orthonormal basis of Y = B·Ω, and (QᵀB)ᵀ = Z·T. Products have rounded Ω.
        dtype, k = self._products.dtype, self._size.wanted
        turn = inverse_root(sums.gram, float(np.finfo(dtype).eps) * width)
        right, values, left_turn = np.linalg.svd(sums.product @ turn, full_matrices=False)
        inverse = basis.astype(dtype).astype(np.float64) @ (turn @ left_turn[:k].T)
        return Found(right[:, :k], values[:k], inverse)

    def projected(self, vectors: Floats, add: Callable[[Array], None]) -> Floats:
        """Hand Y = B·V of the multiplied B to `add`, panel by panel and in order, and return YᵀY. Raises
        NotFiniteError where B has changed and holds NaN."""
        found = self._products.projected(vectors, self.mean, add, self._report())
        self.passes += 1
        if not np.isfinite(found).all():
            raise NotFiniteError
        return found

    def restored(self, values: Array) -> Array:
        """Return what was found of the multiplied B as it is of B itself."""
        exponent = self._products.exponent
        with np.errstate(over="ignore", under="ignore"):
            return np.ldexp(values, -exponent) if exponent else values

    def shares(self, values: Floats) -> Floats:
        """Return the shares that squares of singular values of B have of the sum of all squares."""
        if not self.squares:
            return np.zeros(len(values))
        return np.square(np.ldexp(values, self._products.exponent)) / self.squares

    def _applied(self, basis: Floats) -> Sums:
        """One pass: YᵀY and BᵀY of Y = B·basis. Raises InputError or NotFiniteError where they are not
        finite."""
        first = self.passes == 0
        sums = self._first(basis) if first else self._pass(basis, self.mean, self._report())
        if first:
            self._begin(sums)
        if not _finite(sums):
            raise NotFiniteError
        return sums

    def _pass(self, basis: Floats, mean: Floats | None, report: Progress | None) -> Sums:
        self.passes += 1
        return self._products.applied(basis, mean, report)

    def _first(self, basis: Floats) -> Sums:
        """The first pass, which is made again until no squares are too large or too small."""
        products, sums = self._products, self._pass(basis, None, self._report())
        for _ in range(RESCALED):
            wanted = self._exponent(sums)
            if wanted == products.exponent:
                break
            before, old, products.exponent = sums, products.exponent, wanted
            sums = self._pass(basis, None, None)
            if _finite(before) and not _finite(sums):
                # Deviations from the means are so much smaller than the elements that they are rounding.
                products.exponent = old
                return before
        return sums

    def _exponent(self, sums: Sums) -> int:
        """Return the power of two by which the sums of a first pass say that B has to be multiplied."""
        products, now = self._products, self._products.exponent
        if products.opened.dtype.kind != "f":
            return now
        most = np.finfo(products.dtype).maxexp
        if not _finite(sums):
            return now if now else -(most * 45 // 64)
        square = sums.squares / (self._size.rows * self._size.cols)
        if square >= 2.0 ** -(most * 5 // 8) and sums.squares < 2.0 ** (most - 8):
            return now
        # Where squares are rounded to zero, they do not say how small the elements are.
        far = square < np.ldexp(1.0, -most - 2)
        return min(now + (most * 35 // 64 if far else -round(np.log2(square) / 2)), most - 1)

    def _begin(self, sums: Sums) -> None:
        """Keep what the first pass has found. Raises InputError where means are NaN."""
        self.squares = sums.squares
        if self._centre is not None:
            self.mean = sums.mean
        if not np.isfinite(self.mean).all():
            column = int(np.flatnonzero(~np.isfinite(self.mean))[0])
            raise InputError(
                f"{self._products.name}: column {column} holds NaN or infinite numbers; replace them"
            )

    def _report(self) -> Progress | None:
        """Return what a pass reports its progress to."""
        if self._progress is None:
            return None
        tell, done = self._progress, self.passes

        def report(fraction: float) -> None:
            tell(done + fraction)

        return report


def _finite(sums: Sums) -> bool:
    """Whether all that a pass has found is finite."""
    return all(np.isfinite(found).all() for found in (sums.gram, sums.product, sums.mean, sums.squares))


def inverse_root(gram: Floats, least: float) -> Floats:
    """Return T with TᵀGT = I for G = YᵀY, by Cholesky's method, the first columns of Y first. Columns of T
    are zero where those of Y are combinations of others, to rounding of `least`."""
    unit = _units(gram, least)
    gram, least = gram * unit * unit[:, None], max(least**2, len(gram) * float(np.finfo(np.float64).eps))
    lower, kept = np.zeros(gram.shape), []
    for column in range(len(gram)):
        left = gram[column:, column] - lower[column:, :column] @ lower[column, :column]
        if left[0] > least:
            lower[column:, column] = left / left[0] ** 0.5
            kept.append(column)
    found, some = np.zeros(gram.shape), np.ix_(kept, kept)
    found[some] = np.linalg.inv(lower[some]).T
    return unit[:, None] * found


def decomposed(gram: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the singular values of Y, the largest first, the matrix by which Y has to be multiplied to make
    its left singular vectors, and its right ones, as columns, for a matrix YᵀY. Columns of Y are scaled to
    norm 1 on the way, so that small ones lose no digits."""
    unit = _units(gram, 0.0)
    values, turn = np.linalg.eigh(gram * unit * unit[:, None])
    roots = np.sqrt(np.maximum(values, 0.0))
    left, found, right = np.linalg.svd(roots[:, None] * turn.T * np.sqrt(gram.diagonal()))
    there = roots > len(gram) * float(np.finfo(np.float64).eps) * roots.max()
    inverse = np.where(there, 1.0 / np.where(there, roots, 1.0), 0.0)
    return found, unit[:, None] * (turn @ (inverse[:, None] * left)), right.T


def _units(gram: Floats, least: float) -> Floats:
    """Return 1 over the norm of each column of Y; 0 where that is not more than `least` of the largest."""
    norms = np.sqrt(gram.diagonal())
    there = norms > least * norms.max()
    return np.where(there, 1.0 / np.where(there, norms, 1.0), 0.0)


def panel_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type that products are made in: float32 where it holds every element exactly, else float64."""
    return np.dtype(np.float32 if np.can_cast(dtype, np.float32) else np.float64)
