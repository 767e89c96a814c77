"""Linear least squares by normal equations, from one pass over the array."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..devices import open_device
from ..planning.stream_plan import StreamPlan
from ..run.elsewhere import current, limit_of
from ..run.forecast import Asked, Load, forecast
from ..run.observer import Observer
from ..run.operands import open_operand
from ..run.rows import check_rows, memory, write_rows
from ..run.scalars import real
from ..storage.io.zarr_internals import refuse_event_loop
from ..storage.read import addresses
from ..storage.read.source import Opened
from ..storage.read.vectors import open_vector
from ..storage.write.reopen import open_result
from ..support.errors import InputError
from ..support.memory import memory_limit_of
from ..support.meter import Unfinished
from ..support.recording import recorded
from .decomposition import CENTRED
from .equations import Floats, OnePass, PassElsewhere, Room, equations
from .passes import Passes
from .solution import solved


@dataclass(frozen=True, repr=False)
class LeastSquares(Passes):
    """Coefficients of a linear model of m observations, n variables and t targets."""

    array: Any = field(repr=False)
    """Coefficients: n, or n×t where y has two dimensions; the zarr.Array (n×t) where they were written."""
    intercept: Floats | np.float64
    """What is added for each target: t numbers, or a single one where y has one dimension; 0 where no
    intercept was asked for."""
    condition: float
    """Condition number of x, centred where there is an intercept, with columns scaled to norm 1 and with the
    ridge."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON types, without the coefficients. The intercept is a list."""
        return super().to_dict() | {"intercept": np.atleast_1d(self.intercept).tolist()}


def lstsq(
    x: Any,
    y: Any,
    out: Any = None,
    *,
    ridge: float = 0.0,
    intercept: bool = False,
    memory_limit: str | int | None = None,
    force: bool = False,
    progress: Callable[[float], None] | None = None,
    notice: Callable[[str], None] | None = None,
) -> LeastSquares:
    """Find the coefficients w that minimise ‖x·w − y‖² + ridge·‖w‖², for x (m×n) with more rows than columns.

    The normal equations (xᵀx + ridge·I)·w = xᵀy are made in one pass over x, with products and sums in
    float64 whatever the type of x, and are solved by an eigendecomposition, with columns scaled to norm 1.
    Where that pass shows that squares of a column of x or y are too large or too small for float64, it is
    made again with these columns multiplied by powers of two, so units do not matter. The error grows with
    the square of x's condition number: where cond² times the precision of float64 is more than 1e-4, the
    equations are refused.

    Parameters
    ----------
    x : str, os.PathLike, zarr.Array or array-like
        The variables, as columns: a path, a URL, an open Zarr array, or anything with shape, dtype and
        slicing.
    y : str, os.PathLike, zarr.Array or array-like
        The targets: m, or m×t. They are held in memory.
    out : str or os.PathLike, optional
        Path or URL of a new Zarr array for the coefficients (n×t). By default they are returned.
    ridge : float, default 0
        What is added to the diagonal of xᵀx (Tikhonov regularisation; scikit-learn's `Ridge(alpha)`).
    intercept : bool, default False
        Fit a constant beside the variables, which the ridge does not count.
    memory_limit : str or int, optional
        Most host memory that the process may hold resident, in bytes or as `"8GiB"`. By default 60 % of what
        the process may use.
    force : bool, default False
        Replace an array that exists at `out`.
    progress : callable, optional
        Called with the fraction that is done, by threads of the run.
    notice : callable, optional
        Called with sentences about what concerns the answer, which are UserWarnings where there is no
        `notice`: attributes or a mask of x or y that are not applied.

    Returns
    -------
    LeastSquares
        Coefficients, intercept and condition number, in float64.

    Raises
    ------
    InputError, BudgetError
        Before anything is written: the arrays do not fit together, hold NaN or infinite numbers, or their
        columns are too nearly dependent; float64 does not hold the coefficients; or the memory limit is too
        small.
    StoreError
        A chunk could not be read or written.
    """
    begin, out = time.perf_counter(), addresses.located(out)
    refuse_event_loop()
    elsewhere = current()
    pool = (
        elsewhere.pool({"x": x, "y": y}, ("out", out), "cpu", limit_of(memory_limit), resumes=False)
        if elsewhere
        else None
    )
    if out is not None:
        check_rows(out, [x, y], force)
    left, (right, flat) = open_operand(x, "x"), open_vector(y, addresses.role(y, "y"))
    _check(left, right, ridge, intercept)
    Observer(notice=notice).warn_of_undecoded((left, right))
    extra = 0 if out is None else memory(right.shape, np.float64)
    made: OnePass | PassElsewhere
    if elsewhere and pool:
        beside = partial(elsewhere.beside, memory_limit)
        made = PassElsewhere(pool, beside, (left, right), intercept, extra)
    else:
        made = OnePass(left, right, intercept, Room(limit_of(memory_limit), extra))
    told = Unfinished(progress)
    sums, powers, passes = equations(made, told)
    found, constants, condition = solved(sums, powers, ridge, (left.name, right.name))
    for one in (left, right):
        one.check_unchanged()
    written = 0 if out is None else write_rows(out, found, force)
    told.finish()
    return recorded(
        LeastSquares(
            passes=passes,
            seconds=time.perf_counter() - begin,
            bytes_read=made.bytes_read,
            bytes_written=written,
            peak_host_bytes=made.peak_host_bytes,
            device=made.device,
            peak_device_bytes=0,
            array=open_result(out) if out is not None else found[:, 0] if flat else found,
            intercept=constants[0] if flat else constants,
            condition=condition,
        )
    )


def planned(
    x: Any,
    y: Any,
    out: Any,
    ridge: float,
    intercept: bool,
    memory_limit: str | int | None,
    notice: Callable[[str], None],
) -> StreamPlan:
    """What `lstsq` with an output and these arguments would do. Nothing is read but for rates that are not
    known. Raises InputError and BudgetError."""
    left, (right, _) = open_operand(x, "x"), open_vector(y, addresses.role(y, "y"))
    _check(left, right, ridge, intercept)
    limit = memory_limit_of(memory_limit)
    made = OnePass(left, right, intercept, Room(limit, memory(right.shape, np.float64)))
    (m, n), t = left.shape, right.shape[1]
    # Half of xᵀx is computed.
    products = (float(m) * n * n, n), (2.0 * m * n * t, t)
    asked = Asked(
        opened=made.opened,
        turned=False,
        cut=made.cut,
        load=Load(1, np.dtype(np.float64), products, CENTRED if intercept else 0, n),
        result=f"coefficients of {n} columns for {t} {'target' if t == 1 else 'targets'}",
        device=open_device("cpu"),
        memory_limit=limit,
        device_memory_limit=None,
        out=out,
        shape=(n, t),
        dtype=np.dtype(np.float64),
        once=right,
    )
    return forecast(asked, Observer(notice=notice))


def _check(left: Opened, right: Opened, ridge: float, intercept: bool) -> None:
    """Refuse arrays that make no equations. Raises InputError."""
    if not (np.isfinite(real("ridge", ridge)) and ridge >= 0):
        raise InputError(f"ridge is {ridge}; it must be 0 or more")
    (m, n), (rows, targets) = left.shape, right.shape
    for one in (left, right):
        if one.dtype.kind == "c":
            raise InputError(f"{one.name} is complex; give its real and imaginary parts as columns")
    if rows != m:
        raise InputError(f"{left.name} has {m} rows, but {right.name} has {rows}; give as many of both")
    if not (m and n and targets):
        raise InputError(f"{left.name} is {m}×{n} and {right.name} {rows}×{targets}; give some elements")
    if m < n + intercept and not ridge:
        raise InputError(
            f"{left.name} has {m} rows for {n + intercept} coefficients, which they do not determine; "
            "give a ridge, such as ridge=1.0"
        )
