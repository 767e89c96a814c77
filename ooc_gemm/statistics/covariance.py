"""Covariance and correlation of the columns, or rows, of an array, as numpy.cov and numpy.corrcoef define
them.

One pass over the array finds means and deviations, a second one multiplies the centred array by its transpose
(`gram`), which it never writes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.ports import Array, Device
from ..planning.plan import Plan
from ..run.elsewhere import limit_of
from ..run.labels import labelled
from ..run.moments import Moments, column_moments, deviations, largest
from ..run.observer import Observer
from ..run.operands import open_operand
from ..run.prepare import prepare
from ..run.request import Axis, Operand, Precision, Request, gram_operands
from ..run.result import Result
from ..run.retry import carry_out, result_of
from ..run.scalars import whole
from ..run.transforms import held, real_type
from ..storage.format.limits import matrix_dtype
from ..storage.io.zarr_internals import refuse_event_loop
from ..storage.read.source import Opened
from ..storage.write.opening import try_place
from ..support.errors import InputError
from ..support.trace import Trace


@dataclass(frozen=True, repr=False)
class Covariance(Result):
    """What `cov` or `corrcoef` did and found. `array` is the matrix, a zarr.Array where it was stored. Where
    it is in memory, the matrix and the means of a DataArray have the dimension and the coordinates of its
    variables."""

    mean: Any = field(default=None, repr=False)
    """Mean of each variable, as an array of float64."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON types, without the means."""
        return {key: value for key, value in super().to_dict().items() if key != "mean"}


class Correlations:
    """Makes correlations of the covariances of scaled variables: each lies in [−1, 1], and that of a variable
    with itself is 1, whatever rounding has made of it."""

    name, nbytes = "corrcoef", 0

    def apply(self, values: Array, row: int, col: int) -> None:
        """Change a part of C in place. NaN stays NaN."""
        np.clip(values, -1, 1, out=values)
        rows, cols = values.shape
        shared = np.arange(max(row, col), min(row + rows, col + cols))
        with_itself = values[shared - row, shared - col]
        values[shared - row, shared - col] = np.where(np.isnan(with_itself), with_itself, 1)


def cov(
    x: Any,
    c: Any = None,
    *,
    rowvar: bool = True,
    bias: bool = False,
    ddof: int | None = None,
    aweights: npt.ArrayLike | None = None,
    memory_limit: str | int | None = None,
    device: str | Device = "auto",
    precision: Precision = "highest",
    out_dtype: Any = None,
    chunks: tuple[int, int] | None = None,
    shards: tuple[int, int] | None = None,
    compressor: str | None = None,
    verify: bool = False,
    force: bool = False,
    resume: bool = False,
    progress: Callable[[float, Plan, Trace], None] | None = None,
    notice: Callable[[str], None] | None = None,
) -> Covariance:
    """The covariance matrix of the variables in `x`, as numpy.cov defines it.

    `x` is read twice: once for the means, and once more, centred on its way, for the products. Nothing is
    lost where means are large beside deviations.

    Parameters
    ----------
    x : str, os.PathLike, zarr.Array or array-like
        Variables and their observations: a path, a URL, an open Zarr array, or anything with shape, dtype and
        slicing. Real numbers, 2-D.
    c : str, os.PathLike or zarr.Array, optional
        Where the matrix goes, as of `multiply`. By default it is returned as `array` of the result: a NumPy
        array, or for an xarray.DataArray with variables along `name` one with the dimensions `name_0` and
        `name_1` and their coordinates.
    rowvar : bool, default True
        Each row is a variable and each column an observation; if false, the other way round.
    bias : bool, default False
        Divide by the number of observations N instead of N − 1. `ddof` overrides it.
    ddof : int, optional
        Divide by N − ddof. By default 1, or 0 with `bias`.
    aweights : array-like, optional
        One weight for each observation, none of them negative. An observation of weight 0 counts for nothing,
        but NaN and infinite elements spread from it, too, as in NumPy. Where float32 does not hold the square
        roots of weights, beside the largest one, products are made in float64.
    memory_limit : str or int, optional
        Most host memory that the process may hold resident, in bytes or as `"8GiB"`. By default 60 % of what
        the process may use.
    device : str or Device, default "auto"
        The device or devices, as of `multiply`.
    precision : {"highest", "high", "medium"}, default "highest"
        Least accuracy of float32 products.
    out_dtype : dtype, optional
        Type of the matrix, and of the arithmetic. By default float32, or float64 where float32 does not hold
        the type of `x`.
    chunks, shards : (int, int), optional
        Rows and columns of the chunks and shards of a new C. By default chunks near 16 MiB and no shards.
    compressor : str, optional
        `"none"` (the default), `"zstd"`, `"zstd:LEVEL"` or `"blosc"`.
    verify : bool, default False
        Check every block of C before it is stored, and compute what fails once more.
    force : bool, default False
        Replace a C that exists.
    resume : bool, default False
        Continue an interrupted run of the same problem, as of `multiply`. The means are found again.
    progress : callable, optional
        Called with (fraction, plan, trace) while products are computed.
    notice : callable, optional
        Called with sentences for the user, as of `multiply`.

    Returns
    -------
    Covariance
        What was done, with the `array` and the `mean` of each variable.

    Raises
    ------
    InputError, BudgetError
        Before anything is written: the request cannot be carried out, or not within the memory limit.
    StoreError, DeviceError, VerificationError
        While running, as of `multiply`.
    """
    ddof = lost_degrees(bias, ddof)
    weights = None if aweights is None else _weights(aweights)
    request = Request(
        Operand(x),
        Operand(x),
        c,
        memory_limit=memory_limit,
        device=device,
        precision=precision,
        out_dtype=out_dtype,
        chunks=chunks,
        shards=shards,
        compressor=compressor,
        verify=verify,
        force=force,
        resume=resume,
    )
    variables = _Variables(request, Observer(progress, notice), rowvar, weights)
    return variables.covariance(ddof)


def corrcoef(
    x: Any,
    c: Any = None,
    *,
    rowvar: bool = True,
    memory_limit: str | int | None = None,
    device: str | Device = "auto",
    precision: Precision = "highest",
    out_dtype: Any = None,
    chunks: tuple[int, int] | None = None,
    shards: tuple[int, int] | None = None,
    compressor: str | None = None,
    verify: bool = False,
    force: bool = False,
    resume: bool = False,
    progress: Callable[[float, Plan, Trace], None] | None = None,
    notice: Callable[[str], None] | None = None,
) -> Covariance:
    """The correlation coefficients of the variables in `x`, as numpy.corrcoef defines them.

    All lie in [−1, 1], and those on the diagonal are 1. A variable that is constant has no correlation with
    any other: its row and column are NaN, and a notice says so. So are those of a variable that deviates by
    too little or too much for float64.

    Parameters
    ----------
    x : str, os.PathLike, zarr.Array or array-like
        Variables and their observations, as of `cov`.
    c : str, os.PathLike or zarr.Array, optional
        Where the matrix goes, as of `multiply`. By default it is returned as `array` of the result.
    rowvar : bool, default True
        Each row is a variable and each column an observation; if false, the other way round.
    memory_limit : str or int, optional
        Most host memory, in bytes or as `"8GiB"`. By default 60 % of what the process may use.
    device : str or Device, default "auto"
        The device, as of `cov`.
    precision : {"highest", "high", "medium"}, default "highest"
        Least accuracy of float32 products.
    out_dtype : dtype, optional
        Type of the matrix, and of the arithmetic, as of `cov`.
    chunks, shards : (int, int), optional
        Rows and columns of the chunks and shards of a new C. By default chunks near 16 MiB and no shards.
    compressor : str, optional
        `"none"` (the default), `"zstd"`, `"zstd:LEVEL"` or `"blosc"`.
    verify : bool, default False
        Check every block of C before it is stored, and compute what fails once more.
    force : bool, default False
        Replace a C that exists.
    resume : bool, default False
        Continue an interrupted run of the same problem, as of `cov`.
    progress : callable, optional
        Called with (fraction, plan, trace) while products are computed.
    notice : callable, optional
        Called with sentences for the user: constant variables, and those of `multiply`.

    Returns
    -------
    Covariance
        What was done, with the `array` and the `mean` of each variable.

    Raises
    ------
    InputError, BudgetError, StoreError, DeviceError, VerificationError
        As `cov`.
    """
    request = Request(
        Operand(x),
        Operand(x),
        c,
        memory_limit=memory_limit,
        device=device,
        precision=precision,
        out_dtype=out_dtype,
        chunks=chunks,
        shards=shards,
        compressor=compressor,
        verify=verify,
        force=force,
        resume=resume,
        finish=Correlations(),
    )
    return _Variables(request, Observer(progress, notice), rowvar, None).correlation()


def lost_degrees(bias: bool, ddof: int | None) -> int:
    """Return the degrees of freedom that are lost, as of `cov`. Raises InputError."""
    if ddof is None:
        return 0 if bias else 1
    # NumPy takes 1.0, too.
    return whole("ddof", int(ddof) if isinstance(ddof, float) and float.is_integer(ddof) else ddof)


def planned(request: Request, rowvar: bool, ddof: int | None, observer: Observer) -> Plan:
    """What `cov`, or `corrcoef` where `ddof` is None, would do after the pass that finds the means. Reads
    nothing.

    request: of the array as both operands. Raises InputError and BudgetError.
    """
    request = replace(request, finish=Correlations() if ddof is None else None, writes=False)
    variables = _Variables(request, observer, rowvar, None)
    if ddof is None:
        variables.check_observations()
    else:
        variables.divisor(ddof)
    return variables.plan(observer)


class _Variables:
    """The variables of an array, and the request that their products are computed with."""

    def __init__(self, request: Request, observer: Observer, rowvar: bool, weights: Array | None):
        """request: all but the operands. weights: of the observations."""
        refuse_event_loop()
        self._limit = limit_of(request.memory_limit)
        self._request = replace(request, memory_limit=self._limit, symmetric=True)
        self._observer, self._weights = observer, weights
        self._rowvar = rowvar
        self._axis: Axis = "rows" if rowvar else "columns"
        self._opened = open_operand(request.a.array, "X")
        if self._opened.dtype.kind == "c":
            raise InputError(f"{self._opened.name} holds {self._opened.dtype}; give real numbers")
        rows, cols = self._opened.shape
        self._count, self._observations = (rows, cols) if rowvar else (cols, rows)
        self._keep_weights()

    def _keep_weights(self) -> None:
        """Have products made in float64 where float32 does not hold the square roots of weights. Raises
        InputError where there are too many or too few weights."""
        weights, narrow = self._weights, np.dtype(np.float32)
        if weights is None:
            return
        if len(weights) != self._observations:
            raise InputError(
                f"aweights are {len(weights)}, but {self._opened.name} has {self._observations} "
                "observations; give one weight for each"
            )
        plain = self._request.out_dtype is None and real_type(self._opened.dtype) == narrow
        if plain and not held(np.ones(1), narrow, np.sqrt(weights)).all():
            self._observer.note(
                "some aweights are too small beside others for float32; products are made in float64"
            )
            self._request = replace(self._request, out_dtype="float64")

    def divisor(self, ddof: int) -> float:
        """What sums of products are divided by. Raises InputError where it is not positive."""
        weights = np.ones(1) if self._weights is None else self._weights
        total = float(self._observations) if self._weights is None else float(weights.sum())
        divisor = total - ddof if self._weights is None else total - ddof * float((weights**2).sum()) / total
        if not divisor > 0:
            raise InputError(
                f"{self._observations} observations of {self._opened.name} leave no degrees of freedom for "
                f"ddof={ddof}; give more observations, or a smaller ddof"
            )
        return divisor

    def covariance(self, ddof: int) -> Covariance:
        """Compute the covariance matrix, with so many degrees of freedom lost."""
        divisor = self.divisor(ddof)
        self._check()
        found, read = self._moments()
        dtype = self._panel
        most = float(np.finfo(dtype).max)
        known = np.isfinite(found.squares)  # in float64
        with np.errstate(over="ignore", invalid="ignore"):
            fitting = known & (found.squares / divisor <= most)
        beyond = np.isfinite(found.mean) & ~fitting
        if count := int(np.count_nonzero(beyond)):
            wider = "" if beyond[~known].any() else ', or give out_dtype="float64"'
            self._observer.warn(
                f"{count} of the {self._count} variables in {self._opened.name} have variances that are too "
                f"large for {dtype if known[beyond].all() else 'float64'}, and become infinite; scale the "
                f"array{wider}"
            )
        # Sums of products overflow before they are divided, so variables are divided by a power of two.
        halvings = math.ceil(math.log2(found.squares.max(where=fitting, initial=1) / most) / 2) + 1
        scale = np.full(self._count, 2.0**halvings) if halvings > 0 else None
        return self._made(found, read, (1 if scale is None else 4.0**halvings) / divisor, scale)

    def check_observations(self) -> None:
        """Raise InputError where there are none."""
        if not self._observations:
            raise InputError(f"{self._opened.name} has no observations; give an array with some")

    def correlation(self) -> Covariance:
        """Compute the correlation coefficients."""
        self.check_observations()
        self._check()
        found, read = self._moments()
        scale, more = deviations(self._opened_variables, self._limit, found)
        if constant := int(np.count_nonzero(scale == 0)):
            self._observer.warn(
                f"{constant} of the {self._count} variables in {self._opened.name} never change, so their "
                "rows and columns of correlations are NaN"
            )
        scale[scale == 0] = np.nan
        more += self._leave_beyond(found.mean, scale)
        return self._made(found, read + more, 1 / self._observations, scale)

    def _leave_beyond(self, mean: Array, scale: Array) -> int:
        """Leave variables of float64 without correlations, and say so, whose deviations it cannot divide by,
        or whose differences from the mean it does not hold. Returns the bytes read. Raises InputError where
        float32 does not, and float64 may."""
        panel = self._panel
        most, beyond, read = float(np.finfo(panel).max), ~held(scale, panel), 0
        with np.errstate(all="ignore"):
            if (scale * math.sqrt(self._observations) > most).any():  # as no difference is, otherwise
                sizes, read = largest(self._opened_variables, self._limit)
                beyond |= np.isfinite(scale) & (sizes / 2 + np.abs(mean) / 2 > most / 2)
        if count := int(np.count_nonzero(beyond)):
            some = f"{count} of the {self._count} variables in {self._opened.name}"
            if panel != np.float64:
                raise InputError(
                    f'{some} deviate by too little or too much for {panel}; give out_dtype="float64"'
                )
            self._observer.warn(
                f"{some} deviate by too little or too much for float64, so their rows and columns of "
                "correlations are NaN; change their unit"
            )
            scale[beyond] = np.nan
        return read

    def plan(self, observer: Observer | None = None) -> Plan:
        """What the product would take, after the pass that finds the means. Reads nothing. observer: is told
        of rates that are measured for it; without one they are not."""
        zeros = np.zeros(self._count)
        # Sums of integers never overflow, and those of other types may: variables are divided then.
        scaled = self._request.finish is not None or self._opened.dtype.kind not in "biu"
        request = self._with(zeros, 1.0, zeros if scaled else None)
        return prepare(request.check(), observer=observer).plan

    def _check(self) -> None:
        """Find what is wrong with the request before the array is read."""
        if not self._request.resume:
            self.plan()
            try_place(self._request.c)

    @property
    def _panel(self) -> np.dtype[Any]:
        """The type in which products are made."""
        asked = self._request.out_dtype
        return np.result_type(
            real_type(self._opened.dtype), np.float32 if asked is None else matrix_dtype(asked)
        )

    @property
    def _opened_variables(self) -> Opened:
        """Observations × variables."""
        return self._opened.transpose() if self._rowvar else self._opened

    def _moments(self) -> tuple[Moments, int]:
        return column_moments(self._opened_variables, self._limit, weights=self._weights)

    def _with(self, mean: Array, alpha: float, scale: Array | None) -> Request:
        operand = Operand(
            self._request.a.array,
            center=(self._axis, mean),
            scale=None if scale is None else (self._axis, scale),
            weights=self._weights,
        )
        a, b = gram_operands(operand, not self._rowvar)
        return replace(self._request, a=a, b=b, alpha=alpha)

    def _made(self, found: Moments, read: int, alpha: float, scale: Array | None) -> Covariance:
        request = self._with(found.mean, alpha, scale)
        result = result_of(carry_out(request, self._observer))
        x, axis = self._request.a.array, 0 if self._rowvar else 1
        name = "cov" if self._request.finish is None else "corrcoef"
        known = dict(result.__dict__) | {"bytes_passed": read, "array": labelled(x, result.array, axis, name)}
        return Covariance(**known, mean=labelled(x, found.mean, axis, "mean"))


def _weights(given: npt.ArrayLike) -> Array:
    """Weights of observations. Raises InputError as numpy.cov does."""
    try:
        weights = np.asarray(given, np.float64)
    except (TypeError, ValueError) as error:
        raise InputError("aweights hold no real numbers; give one for each observation") from error
    if weights.ndim != 1:
        raise InputError(f"aweights have {weights.ndim} dimensions; give one weight for each observation")
    if not (np.isfinite(weights).all() and (weights >= 0).all()):
        raise InputError("aweights are negative or not finite; give weights of 0 and more")
    if weights.size and not weights.any():
        raise InputError("aweights are 0, all of them, so no observation counts; give some that are more")
    # Only their ratios matter. So their squares neither overflow nor underflow.
    return np.ldexp(weights, -int(np.frexp(weights.max(initial=0))[1]))
