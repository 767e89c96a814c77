"""Principal components and truncated singular value decompositions, from a few passes over the array."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..planning.stream_plan import StreamPlan
from ..run.observer import Observer
from ..run.scalars import whole
from ..run.stream import Array
from ..storage.read import addresses
from ..storage.write.reopen import open_result
from ..support.recording import recorded
from .decomposition import Decomposition
from .passes import Passes
from .subspace import Floats


@dataclass(frozen=True, repr=False)
class PCA(Passes):
    """Principal components of an array with m rows, the observations, and n columns, the variables."""

    components: Array = field(repr=False)
    """Directions of largest variance, as orthonormal rows (components × n) whose largest element is
    positive."""
    singular_values: Floats
    """Norms of the scores, the largest first: the singular values of the centred array."""
    explained_variance: Floats
    """Variances of the scores, with m − 1 degrees of freedom."""
    explained_variance_ratio: Floats
    """Their shares of the sum of the variances of all columns."""
    mean: Floats = field(repr=False)
    """Mean of each column."""
    scores: Any = field(repr=False)
    """The centred array times the components (m × components). These columns are orthogonal. The zarr.Array
    where they were written."""


@dataclass(frozen=True, repr=False)
class SVD(Passes):
    """The largest singular values of an array x (m × n), with their vectors: x·vtᵀ = u·diag(singular_values).
    So u·diag(singular_values)·vt is x·vtᵀ·vt, which is close to x."""

    u: Any = field(repr=False)
    """Left singular vectors (m × components), as orthonormal columns; zero where the singular value is, to
    rounding. The zarr.Array where they were written."""
    singular_values: Floats
    """The largest singular values, in descending order."""
    vt: Array = field(repr=False)
    """Right singular vectors (components × n), as orthonormal rows; the largest element of each is
    positive."""


def pca(
    x: Any,
    components: int,
    *,
    scores: Any = None,
    iterations: int = 4,
    seed: int = 0,
    memory_limit: str | int | None = None,
    device: str = "auto",
    device_memory_limit: str | int | None = None,
    force: bool = False,
    progress: Callable[[float], None] | None = None,
    notice: Callable[[str], None] | None = None,
) -> PCA:
    """Principal components of x (m×n): rows are observations, columns are variables.

    The conventions are those of scikit-learn's PCA: columns are centred and not scaled, variances have m − 1
    degrees of freedom, and the largest element of each component is positive. Components are found by
    randomized subspace iteration (Halko, Martinsson and Tropp, SIAM Review 53, 2011) in `iterations` + 2
    passes over x; where there are few columns, in three, and the result is exact to rounding. Products are
    made in float32 where that holds every element of x, else in float64, and their sums in float64. Means
    that are many times the deviations lose no digits. Whatever the iterations have not separated yet,
    components are orthonormal, scores are orthogonal and the product of the centred x with the components,
    and singular values are their norms, all of this to rounding. Results of a GPU may differ in their last
    digits from run to run, because sums of its threads have no fixed order.

    Parameters
    ----------
    x : str, os.PathLike, zarr.Array or array-like
        The array: a path, a URL, an open Zarr array, or anything with shape, dtype and slicing. It is read in
        panels of whole rows, or of whole columns where that takes less memory.
    components : int
        Number of components, from 1 to min(m, n).
    scores : str or os.PathLike, optional
        Path or URL of a new Zarr array for the scores (m × components). By default they are returned. Of an x
        with more rows than columns they lie in a temporary file beside it until all are known.
    iterations : int, default 4
        Power iterations. More of them separate components whose variances are close.
    seed : int, default 0
        Seed of the random vectors that the iteration begins with.
    memory_limit : str or int, optional
        Most host memory that the process may hold resident, in bytes or as `"8GiB"`. By default 60 % of what
        the process may use. What is compressed, remote or computed stays there after the first pass as far as
        it fits, and is not read again.
    device : str, default "auto"
        Where products are made: `"cpu"`, or one GPU, `"cuda"` or `"cuda:1"`. `"auto"` takes the GPU where
        there is one.
    device_memory_limit : str or int, optional
        Most memory of the GPU, in bytes or as `"8GiB"`. By default 90 % of what is free. As much of x as fits
        stays there, and is read once.
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
    limits, seed = (memory_limit, device_memory_limit), whole("seed", seed, 0)
    run = Decomposition(x, components, iterations, limits, device, centred=True)
    scores = addresses.located(scores)
    run.check(scores, "scores", force, notice)
    left, values, right = run.carry_out(seed, scores, force, progress, scaled=False)
    with np.errstate(over="ignore", under="ignore"):
        variance = np.square(values) / (run.shape[0] - 1)
    return recorded(
        PCA(
            **run.took(begin),
            components=right,
            singular_values=values,
            explained_variance=variance,
            explained_variance_ratio=run.subspace.shares(values),
            mean=run.subspace.restored(run.subspace.mean),
            scores=left if scores is None else open_result(scores),
        )
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
    device_memory_limit: str | int | None = None,
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
        Path or URL of a new Zarr array for the left singular vectors (m × components), as of `pca`. By
        default they are returned.
    iterations : int, default 4
        Power iterations. More of them separate singular values that are close.
    seed : int, default 0
        Seed of the random vectors that the iteration begins with.
    memory_limit : str or int, optional
        Most host memory, in bytes or as `"8GiB"`. By default 60 % of what the process may use.
    device : str, default "auto"
        Where products are made: `"cpu"`, or one GPU, `"cuda"` or `"cuda:1"`. `"auto"` takes the GPU where
        there is one.
    device_memory_limit : str or int, optional
        Most memory of the GPU, in bytes or as `"8GiB"`. By default 90 % of what is free. As much of x as fits
        stays there, and is read once.
    force : bool, default False
        Replace an array that exists at `u`.
    progress : callable, optional
        Called with the fraction that is done, by threads of the run.
    notice : callable, optional
        Called with sentences for the user, as of `pca`.

    Returns
    -------
    SVD
        Singular values and vectors. Whatever the iterations have not separated yet, both kinds of vectors are
        orthonormal, and x·vtᵀ = u·diag(singular_values), to rounding. A left vector is zero where its
        singular value is, to rounding.

    Raises
    ------
    InputError, BudgetError, StoreError
        As `pca`.
    """
    begin = time.perf_counter()
    limits, seed = (memory_limit, device_memory_limit), whole("seed", seed, 0)
    run = Decomposition(x, components, iterations, limits, device, centred=False)
    u = addresses.located(u)
    run.check(u, "u", force, notice)
    left, values, right = run.carry_out(seed, u, force, progress, scaled=True)
    found = left if u is None else open_result(u)
    return recorded(SVD(**run.took(begin), u=found, singular_values=values, vt=right))


def planned(
    x: Any,
    out: Any,
    components: int,
    centred: bool,
    iterations: int,
    memory_limit: str | int | None,
    device: str,
    device_memory_limit: str | int | None,
    notice: Callable[[str], None],
    seed: int = 0,
) -> StreamPlan:
    """What `pca` (if `centred`) or `svd` with these arguments would do. Nothing is read but for rates that
    are not known. Raises InputError and BudgetError."""
    whole("seed", seed, 0)
    limits = memory_limit, device_memory_limit
    run = Decomposition(x, components, iterations, limits, device, centred)
    return run.plan(out, Observer(notice=notice))
