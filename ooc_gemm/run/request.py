"""What is asked for: one product, with everything that can change C, its cost or its place."""

import os
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ..engine.ports import Device
from ..engine.standardize import Standardizer
from ..storage.read import addresses
from ..storage.read.vectors import read_vector
from ..storage.write.checks import check_place
from ..storage.write.layout import pair
from ..support.errors import InputError
from ..support.memory import parse_size
from .elsewhere import current, limit_of
from .finish import Finish, Lower
from .scalars import choice, is_one_of, scalar

Precision = Literal["highest", "high", "medium"]
Op = Literal["none", "transpose", "adjoint"]
Axis = Literal["rows", "columns"]
Triangle = Literal["lower"]
Lines = Axis | tuple[Axis, npt.ArrayLike]
"""Rows or columns of an array, of which a number each is to be found; or those numbers."""


@dataclass(frozen=True)
class Operand:
    """An input with its op(), and what happens to its elements before they are multiplied.

    An element x[i, j] becomes (x[i, j] − center)/scale, times the weight of its place along k. A missing
    element becomes 0, so that it adds nothing to any sum; of a centred array that is what replacing it by the
    mean does. The array is then multiplied in float32, or in float64 where float32 does not hold its type.

    Parameters
    ----------
    array : str, os.PathLike, zarr.Array or array-like
        A path, a URL, an open Zarr array, or anything with shape, dtype and slicing.
    transpose, adjoint : bool, default False
        Multiply with the transpose, or the conjugate transpose, of the array.
    center : {"rows", "columns"} or (axis, array-like), optional
        What is subtracted: the mean of each row or column of the array as it is stored, before op(); or the
        numbers given, one for each row or column. Means leave missing elements out, and are those of the
        elements as they are, without weights. One pass over the array finds them.
    scale : {"rows", "columns"} or (axis, array-like), optional
        What elements are divided by after that: the standard deviation of each row or column (about its mean,
        with the number of its elements as the divisor), but 1 where that is 0; or the numbers given.
    missing : float, optional
        Elements that are equal to this number, as stored, are missing; NaN: those that are NaN. For an array
        of floats the number is rounded to their type first. If that makes it 0 or infinite, no element is
        missing. If it makes an integer another one, the number is refused.
    weights : array-like, str or os.PathLike, optional
        One factor for each place along k, the inner dimension of the product; or the path or URL of a Zarr
        array of one dimension that holds them.
    decode_cf : bool, default False
        Decode elements first, as the attributes of the array say by the CF conventions: element·scale_factor
        + add_offset, and elements that are equal to _FillValue or missing_value are missing. In Zarr version
        2, where xarray stores _FillValue as the fill value, that counts. Where there are no such attributes,
        nothing happens. center, scale and weights are those of the decoded elements; `missing` must not be
        given where the attributes say what is missing.
    table : array-like, optional
        256 integers of 8 bits, which replace the elements of an array of int8 or uint8 before all else
        happens: an element v becomes `table[v]`, where negative ones count from the end. Alone it leaves
        the product exact.

    Notes
    -----
    Only real arrays are transformed. On a cluster, this process finds means and deviations, and the workers
    transform what they multiply. Numbers to subtract, divide by or multiply with that are too small or too
    large for float32 are an error that asks for `out_dtype="float64"`.
    """

    array: Any
    transpose: bool = False
    adjoint: bool = False
    center: Lines | None = field(default=None, kw_only=True)
    scale: Lines | None = field(default=None, kw_only=True)
    missing: float | None = field(default=None, kw_only=True)
    weights: npt.ArrayLike | str | os.PathLike[str] | None = field(default=None, kw_only=True)
    decode_cf: bool = field(default=False, kw_only=True)
    table: npt.ArrayLike | None = field(default=None, kw_only=True)

    @property
    def op(self) -> Op:
        """What is done to the matrix before it is multiplied."""
        return "adjoint" if self.adjoint else "transpose" if self.transpose else "none"

    @property
    def transformed(self) -> bool:
        """Whether anything happens to its elements."""
        asked = (self.center, self.scale, self.missing, self.weights)
        return any(one is not None for one in asked)

    @classmethod
    def of(cls, given: Any, transpose: bool = False, adjoint: bool = False) -> "Operand":
        """What the user has given for an input: an array, or an operand already, which may be transposed once
        more. Raises InputError where an operand would be transposed and conjugated both."""
        if not isinstance(given, Operand):
            return cls(given, transpose, adjoint)
        if (adjoint and given.transpose) or (transpose and given.adjoint):
            raise InputError("an operand is either transposed or its adjoint taken; give one of the two")
        return replace(given, transpose=given.transpose != transpose, adjoint=given.adjoint != adjoint)


@dataclass(frozen=True)
class Reduced:
    """C is not stored: a reduction takes its blocks. It counts in the plan with what it holds."""

    chunk_rows: int
    """Rows of C of which the reduced result is written at a time; blocks are cut at multiples of them."""
    row_bytes: int
    """Host memory, in bytes, for each row of a block."""
    fixed_bytes: int
    """Other host memory, in bytes, that is held during the run."""
    keep: int | None = None
    """How many of the best elements of each row of C are kept. None: something else is kept."""
    device_bytes: int = 0
    """Device memory, in bytes, that is held during the run by what is no buffer of the plan."""
    eighths: int = 0
    """How many eighths of the memory limit are held during the run, beside `fixed_bytes`."""
    lines: int = 0
    """How many rows and columns of operands may have to be multiplied with numbers that a pass finds."""


@dataclass(frozen=True)
class Request:
    """C ← α·op(A)·op(B) + β·C. None means that a value is left to its default or, in a run that continues an
    interrupted one, to what that one was begun with."""

    a: Operand
    b: Operand
    c: Any = None
    """A path, a URL or an open zarr.Array; None for a new NumPy array."""
    alpha: complex | None = None
    beta: complex | None = None
    memory_limit: str | int | None = None
    device: str | Device = "auto"
    device_memory_limit: str | int | None = None
    precision: Precision = "highest"
    kernel: str = "auto"
    out_dtype: Any = None
    chunks: tuple[int, int] | None = None
    shards: tuple[int, int] | None = None
    compressor: str | None = None
    rechunk: bool = False
    verify: bool = False
    force: bool = False
    resume: bool = False
    symmetric: bool = False
    """Whether op(B) is op(A)ᵀ, so that one half of C is computed unless β ≠ 0."""
    triangle: Triangle | None = None
    """What is stored of a symmetric C; None for all of it."""
    finish: Finish | None = None
    """What is done to the elements of C before they are stored."""
    standardizer: Standardizer | None = None
    """What standardizes the panels of a symmetric product, whose C must then be one block."""
    elements: str | None = None
    """What happens to the elements of A and B, for the journal; None: what their operands say."""
    reduced: Reduced | None = None
    """What a reduction keeps of C in its place; None where C is stored."""
    dimensions: tuple[str, str] | None = None
    """Names of the dimensions of a new C; None for those of the operands."""
    writes: bool = True
    """Whether C is written; if not, only a plan is made."""
    host_decodes: bool = False
    """Whether the host decodes all chunks, because a device could not decode one."""
    prepares_again: bool = False
    """Whether panels that stay on a device are prepared for each block, because one was needed as it was."""

    def check(self) -> "Request":
        """Return the same request with numbers for α, β and the memory limits. Raises InputError where the
        request is impossible, whatever the arrays hold."""
        alpha, beta = scalar("alpha", self.alpha), scalar("beta", self.beta)
        choice("precision", self.precision, get_args(Precision))
        if not isinstance(self.kernel, str):
            raise InputError("kernel is no name; give 'auto', or the name of one")
        if any(operand.transpose and operand.adjoint for operand in (self.a, self.b)):
            raise InputError("an operand is either transposed or its adjoint taken; give one of the two")
        if self.resume and self.c is None:
            raise InputError("only a C that is stored can be continued; leave out resume=True")
        if beta and self.c is None and self.writes:
            raise InputError("beta is not 0, so there must be a C to read; give its path")
        if self.c is not None:
            check_place(self.c)
        if self.triangle is not None and not is_one_of(self.triangle, get_args(Triangle)):
            raise InputError(f"triangle is {self.triangle!r}; give 'lower', or leave it out for all of C")
        if self.triangle and beta:
            raise InputError(
                "beta·C need not be symmetric, so all of C is stored; leave out triangle or beta"
            )
        if self.triangle and self.c is not None and not isinstance(self.c, str | os.PathLike):
            raise InputError(
                "C is open, and would keep what is above its diagonal; give a path, or no triangle"
            )
        if elsewhere := current():
            elsewhere.check(self)
        device = self.device_memory_limit
        a = replace(self.a, array=addresses.located(self.a.array))
        same = self.b.array is self.a.array
        return replace(
            self,
            a=a,
            b=replace(self.b, array=a.array if same else addresses.located(self.b.array)),
            c=addresses.located(self.c),
            finish=Lower() if self.triangle else self.finish,
            chunks=pair("chunks", self.chunks),
            shards=pair("shards", self.shards),
            alpha=alpha,
            beta=beta,
            memory_limit=limit_of(self.memory_limit),
            device_memory_limit=None if device is None else parse_size(device),
        )


def numbers(given: Any, word: str) -> npt.NDArray[np.float64]:
    """The vector that is given for `center`, `scale` or `weights` (`word`), in memory. Raises InputError."""
    if isinstance(given, str | os.PathLike):
        return read_vector(given, addresses.describe(given))
    try:
        return np.asarray(given, np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{word} holds no real numbers; give one for each row or column") from error


def gram_operands(given: Any, transpose: bool) -> tuple[Operand, Operand]:
    """The operands of op(X)·op(X)ᵀ, or op(X)ᵀ·op(X): an array or an operand, and whether it is transposed.
    Each takes the square roots of the weights. Raises InputError where a weight is negative."""
    a, b = Operand.of(given, transpose), Operand.of(given, not transpose)
    if a.weights is None:
        return a, b
    weights = numbers(a.weights, "weights")
    if (weights < 0).any():
        raise InputError("weights are negative, and A·W·Aᵀ is computed with their square roots; use multiply")
    return replace(a, weights=np.sqrt(weights)), replace(b, weights=np.sqrt(weights))
