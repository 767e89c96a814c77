"""Principal components and truncated singular value decompositions, from a few passes over the array."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..run.observer import Observer
from ..run.operands import open_operand
from ..run.rows import RowWriter, check_rows, memory, write_rows
from ..run.stream import Array, Panels
from ..storage.format import conventions
from ..storage.io.zarr_internals import refuse_event_loop
from ..storage.read.source import Opened
from ..support.errors import BudgetError, InputError
from ..support.memory import memory_limit_of, peak_resident_bytes
from .passes import Passes
from .subspace import Centre, Floats, Size, Subspace, panel_type, panels_of


@dataclass(frozen=True)
class PCA(Passes):
    """Principal components of an array with m rows, the observations, and n columns, the variables."""

    components: Array = field(repr=False)
    """Directions of largest variance, as orthonormal rows (components × n) whose largest element is
    positive."""
    singular_values: Floats
    """Singular values of the centred array, the largest first."""
    explained_variance: Floats
    """Variances of the scores, with m − 1 degrees of freedom."""
    explained_variance_ratio: Floats
    """Their shares of the sum of the variances of all columns."""
    mean: Floats = field(repr=False)
    """Mean of each column."""
    scores: Array | None = field(repr=False)
    """The centred rows in the coordinates of the components (m × components); None where they were
    written."""


@dataclass(frozen=True)
class SVD(Passes):
    """The largest singular values of an array (m × n), with their vectors: A ≈ u·diag(singular_values)·vt."""

    u: Array | None = field(repr=False)
    """Left singular vectors (m × components), as columns; None where they were written."""
    singular_values: Floats
    """The largest singular values, in descending order."""
    vt: Array = field(repr=False)
    """Right singular vectors (components × n), as rows; the largest element of each is positive."""


def pca(
    x: Any,
    components: int,
    *,
    scores: Any = None,
    iterations: int = 4,
    seed: int = 0,
    memory_limit: str | int | None = None,
    device: str = "auto",
    force: bool = False,
    progress: Callable[[float], None] | None = None,
    notice: Callable[[str], None] | None = None,
) -> PCA:
    """Principal components of x (m×n): rows are observations, columns are variables.

    The conventions are those of scikit-learn's PCA: columns are centred and not scaled, variances have m − 1
    degrees of freedom, and the largest element of each component is positive. Components are found by
    randomized subspace iteration (Halko, Martinsson and Tropp, SIAM Review 53, 2011), which reads x
    `iterations` + 2 times; where there are few columns, three times, and the result is exact to rounding.
    Products are made in float32 where that holds every element of x, else in float64, and their sums in
    float64. Means that are many times the deviations lose no digits.

    Parameters
    ----------
    x : str, os.PathLike, zarr.Array or array-like
        The array: a path, a URL, an open Zarr array, or anything with shape, dtype and slicing. It is read in
        panels of whole rows, or of whole columns where that takes less memory.
    components : int
        Number of components, from 1 to min(m, n).
    scores : str or os.PathLike, optional
        Path or URL of a new Zarr array for the scores (m × components). By default they are returned.
    iterations : int, default 4
        Power iterations. More of them separate components whose variances are close.
    seed : int, default 0
        Seed of the random vectors that the iteration begins with.
    memory_limit : str or int, optional
        Most host memory that the process may hold resident, in bytes or as `"8GiB"`. By default 60 % of what
        the process may use.
    device : {"auto", "cpu"}, default "auto"
        Where products are made: on the CPU.
    force : bool, default False
        Replace an array that exists at `scores`.
    progress : callable, optional
        Called with the fraction that is done, by threads of the run.
    notice : callable, optional
        Called with sentences about what concerns the answer, which are UserWarnings where there is no
        `notice`: attributes or a mask of x that are not applied.

    Returns
    -------
    PCA
        Components, singular values, variances, means and scores. `components` and `scores` have the type of
        the products, all else is float64.

    Raises
    ------
    InputError, BudgetError
        Before anything is written: the request cannot be carried out, x holds NaN or infinite numbers, or the
        memory limit is too small.
    StoreError
        A chunk could not be read or written.
    """
    begin = time.perf_counter()
    run = _Decomposition(x, components, iterations, memory_limit, device, centred=True)
    run.check(scores, force, notice)
    if run.shape[0] < 2:
        raise InputError(f"{run.name} has {run.shape[0]} rows; a variance needs two or more")
    left, values, right = run.carry_out(iterations, seed, scores, force, progress, scaled=False)
    degrees, total = run.shape[0] - 1, run.subspace.squares
    variance = np.square(values) / degrees
    return PCA(
        **run.took(begin),
        components=right,
        singular_values=values,
        explained_variance=variance,
        explained_variance_ratio=variance / (total / degrees) if total else np.zeros(len(values)),
        mean=run.subspace.mean,
        scores=left,
    )


def svd(
    x: Any,
    components: int,
    *,
    u: Any = None,
    iterations: int = 4,
    seed: int = 0,
    memory_limit: str | int | None = None,
    device: str = "auto",
    force: bool = False,
    progress: Callable[[float], None] | None = None,
    notice: Callable[[str], None] | None = None,
) -> SVD:
    """The largest singular values of x (m×n) and their vectors, as `pca` finds them, without centring.

    Parameters
    ----------
    x : str, os.PathLike, zarr.Array or array-like
        The array, as of `pca`.
    components : int
        Number of singular values, from 1 to min(m, n).
    u : str or os.PathLike, optional
        Path or URL of a new Zarr array for the left singular vectors (m × components). By default they are
        returned.
    iterations : int, default 4
        Power iterations. More of them separate singular values that are close.
    seed : int, default 0
        Seed of the random vectors that the iteration begins with.
    memory_limit : str or int, optional
        Most host memory, in bytes or as `"8GiB"`. By default 60 % of what the process may use.
    device : {"auto", "cpu"}, default "auto"
        Where products are made: on the CPU.
    force : bool, default False
        Replace an array that exists at `u`.
    progress : callable, optional
        Called with the fraction that is done, by threads of the run.
    notice : callable, optional
        Called with sentences for the user, as of `pca`.

    Returns
    -------
    SVD
        Singular values and vectors. A left vector is zero where its singular value is, to rounding.

    Raises
    ------
    InputError, BudgetError, StoreError
        As `pca`.
    """
    begin = time.perf_counter()
    run = _Decomposition(x, components, iterations, memory_limit, device, centred=False)
    run.check(u, force, notice)
    left, values, right = run.carry_out(iterations, seed, u, force, progress, scaled=True)
    return SVD(**run.took(begin), u=left, singular_values=values, vt=right)


class _Decomposition:
    """An array x that is decomposed, as it is (B = x) or as its transpose: the vectors that are iterated are
    as long as B has columns."""

    def __init__(
        self,
        x: Any,
        components: int,
        iterations: int,
        memory_limit: str | int | None,
        device: str,
        centred: bool,
    ):
        refuse_event_loop()
        if device not in ("auto", "cpu"):
            raise InputError(
                f"device {device!r} cannot be used here; components are computed on the CPU: cpu"
            )
        if iterations < 0:
            raise InputError(f"{iterations} iterations cannot be made; give 0 or more")
        self._x, self._wanted, self._centred = x, components, centred
        self._opened = open_operand(x, "x")
        self.name, self.shape = self._opened.name, self._opened.shape
        if self._opened.dtype.kind == "c":
            raise InputError(
                f"{self.name} is complex; give its real and imaginary parts as columns of a real one"
            )
        if not 1 <= components <= min(self.shape):
            raise InputError(
                f"{self.name} is {self.shape[0]}×{self.shape[1]} and has no {components} components; "
                f"give a number from 1 to {min(self.shape)}"
            )
        self._limit = memory_limit_of(memory_limit)
        self._dtype = panel_type(self._opened.dtype)
        self._written = 0

    def check(self, out: Any, force: bool, notice: Callable[[str], None] | None) -> None:
        """Refuse an output that cannot be written, and say what of the array is not applied."""
        if out is not None:
            check_rows(out, [self._x], force)
        if said := conventions.said(self.name, self._opened.undecoded):
            Observer(notice=notice).warn(said)

    def carry_out(
        self,
        iterations: int,
        seed: int,
        out: Any,
        force: bool,
        progress: Callable[[float], None] | None,
        scaled: bool,
    ) -> tuple[Array | None, Floats, Array]:
        """The left vectors times the singular values (`scaled`: the vectors alone), or None where they went
        to `out`; the singular values; and the right vectors, as rows."""
        self._panels, size, flipped = self._choose(out)
        centre: Centre = None if not self._centred else "rows" if flipped else "columns"
        all_passes = size.passes(iterations)
        report = None if progress is None else lambda done: progress(done / all_passes)
        self.subspace = Subspace(self._panels, size, centre, report)
        vectors, near = self.subspace.vectors(iterations, seed)
        if flipped:
            made, values, right = self._from_transpose(vectors, scaled)
            self._opened.check_unchanged()
            if out is None:
                return made, values, right
            self._written = write_rows(out, made, force)
            return None, values, right
        vectors *= _signs(vectors)
        left, values = self._from_rows(vectors, near if scaled else None, out, force)
        return left, values, np.ascontiguousarray(vectors.T, self._dtype)

    def took(self, begin: float) -> dict[str, Any]:
        """The fields of `Passes`. begin: when the run began."""
        return {
            "passes": self.subspace.passes,
            "seconds": time.perf_counter() - begin,
            "bytes_read": self._panels.bytes_read,
            "bytes_written": self._written,
            "peak_host_bytes": peak_resident_bytes(),
        }

    def _choose(self, out: Any) -> tuple[Panels, Size, bool]:
        """The panels of x, or of its transpose, whichever fits the limit, the one with the shorter vectors
        first; whether it is the transpose. Raises BudgetError."""
        (m, n), k = self.shape, self._wanted
        itemsize, failed = self._dtype.itemsize, []
        opened = self._opened.measured(self._limit)
        for flipped in (m < n, m >= n):
            if flipped:
                # Both kinds of vectors are held, and copies in float64 of those that are projected.
                size, extra = Size(n, m, k), n * k * (itemsize + 3 * 8) + m * k * itemsize
            else:
                size, extra = Size(m, n, k), n * k * itemsize + (m * k * itemsize if out is None else 0)
            extra += memory((m, k), self._dtype) if out is not None else 0
            try:
                return (
                    panels_of(self._turned(opened) if flipped else opened, size, self._limit, extra),
                    size,
                    flipped,
                )
            except BudgetError as error:
                failed.append(error)
        raise min(failed, key=lambda error: error.minimum_memory_limit or 0)

    def _turned(self, opened: Opened) -> Opened:
        """The transpose; of an array in memory a view, any part of which can be read."""
        return open_operand(self._x.T, "x") if isinstance(self._x, np.ndarray) else opened.transpose()

    def _from_rows(
        self, vectors: Floats, near: Floats | None, out: Any, force: bool
    ) -> tuple[Array | None, Floats]:
        """x·V, or that over `near`, the singular values so far."""
        shape = self.shape[0], self._wanted
        scale = np.ones(self._wanted) if near is None else _inverse(near, self._dtype, max(self.shape))
        narrow = scale.astype(self._dtype)
        left = np.empty(shape, self._dtype) if out is None else None
        at = 0
        with nullcontext() if out is None else RowWriter(out, shape, self._dtype, force) as writer:

            def add(rows: Array) -> None:
                nonlocal at
                rows *= narrow
                if left is not None:
                    left[at : at + len(rows)] = rows
                if writer is not None:
                    writer.add(rows)
                at += len(rows)

            values = self.subspace.projected(vectors, add)
            self._opened.check_unchanged()
        if writer is not None:
            self._written = writer.bytes_written
        return left, np.sort(values)[::-1]

    def _from_transpose(self, vectors: Floats, scaled: bool) -> tuple[Array, Floats, Array]:
        """The left vectors are those of the iteration; what is projected are the right ones."""
        found = np.empty((self.shape[1], self._wanted), np.float64)
        at = 0

        def add(rows: Array) -> None:
            nonlocal at
            found[at : at + len(rows)] = rows
            at += len(rows)

        values = np.asarray(self.subspace.projected(vectors, add))
        basis, triangle = np.linalg.qr(found)  # orthonormal also where singular values are zero
        basis *= np.where(np.diag(triangle) < 0, -1.0, 1.0)
        signs = _signs(basis)
        left = vectors * signs if scaled else vectors * (signs * values)
        return (
            left.astype(self._dtype),
            np.sort(values)[::-1],
            np.ascontiguousarray((basis * signs).T, self._dtype),
        )


def _signs(vectors: Floats) -> Floats:
    """Return factors that make the largest element of each column positive."""
    largest = vectors[np.argmax(np.abs(vectors), axis=0), np.arange(vectors.shape[1])]
    return np.where(largest < 0, -1.0, 1.0)


def _inverse(values: Floats, dtype: np.dtype[Any], extent: int) -> Floats:
    """Return 1 over each singular value; 0 where it is zero to rounding."""
    there = values > np.finfo(dtype).eps * extent**0.5 * values[0]
    return np.where(there, 1.0 / np.where(there, values, 1.0), 0.0)
