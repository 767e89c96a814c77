"""Chooses the type of C, and the arithmetic of its elements: kernel, types and bounds."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.overflow import INT64_MAX
from ..engine.ports import Arithmetic, Hardware
from ..storage.format import limits
from ..support.errors import InputError
from .operands import Inputs
from .settle import Settled


@dataclass(frozen=True)
class Chosen:
    """The arithmetic that was chosen for a product."""

    arithmetic: Arithmetic
    may_wrap: bool
    """Whether sums of integers might exceed int64, so that the elements must be looked at."""


def choose_dtype(request: Settled, inputs: Inputs) -> np.dtype[Any]:
    """Return the type of C. Raises InputError where C, or α and β, do not fit it."""
    asked = request.out_dtype if inputs.c is None else inputs.c.dtype
    return _dtype(*inputs.types, asked, request.alpha, request.beta)


def choose_arithmetic(request: Settled, inputs: Inputs, out: np.dtype[Any], hardware: Hardware) -> Chosen:
    """Choose how a C of this type is computed on the hardware. Raises InputError where it cannot be."""
    a, b = inputs.types
    largest = _bound(a, b, out, inputs.shape[2], request.alpha, request.beta)
    found = hardware.arithmetic(a, b, out, inputs.shape, largest, request.kernel, request.precision)
    _check_scalars(request.alpha, request.beta, found.block)
    return Chosen(found, largest > INT64_MAX)


def _dtype(a: np.dtype[Any], b: np.dtype[Any], asked: Any, alpha: complex, beta: complex) -> np.dtype[Any]:
    """Return the type of C: NumPy's promotion, except that sums of integers have room. Those of 8-bit
    integers make int32, all others int64. That also holds where NumPy promotes to uint64, in which no sums
    beyond int64 are computed here, or to float64 (int64 with uint64), which is not exact."""
    natural = np.result_type(a, b)
    if a.kind in "iu" and b.kind in "iu":
        natural = np.dtype(np.int32 if a.itemsize == b.itemsize == 1 else np.int64)
    out = natural if asked is None else limits.matrix_dtype(asked)
    order = "iufc"
    if order.index(out.kind) < order.index(natural.kind) and not (out.kind == "i" and natural.kind == "u"):
        raise InputError(f"C cannot hold {natural} results as {out}; leave out_dtype out or widen it")
    for name, value in (("alpha", alpha), ("beta", beta)):
        if not (math.isfinite(value.real) and math.isfinite(value.imag)):
            raise InputError(f"{name} is {value}; it must be finite")
        if out.kind != "c" and value.imag != 0:
            raise InputError(f"{name} is complex but C holds {out}; give a complex out_dtype")
        if out.kind in "iu" and value.real != int(value.real):
            raise InputError(f"{name} is {value} but C holds integers; give out_dtype='float64'")
    return out


def _check_scalars(alpha: complex, beta: complex, sums: np.dtype[Any]) -> None:
    """Raise InputError for an alpha or beta that the type of the sums cannot hold. As infinity it would turn
    sums of 0 into NaN; as 0, or with fewer digits, it would be another number than the one asked for."""
    for name, value in (("alpha", alpha), ("beta", beta)):
        if sums.kind in "iu":
            fits = abs(int(value.real)) <= np.iinfo(sums).max
        else:
            info = np.finfo(sums)
            largest = max(abs(value.real), abs(value.imag))
            fits = value == 0 or float(info.tiny) <= largest <= float(info.max)
        if not fits:
            raise InputError(
                f"{name} is {value}, which {sums}, the type of the sums, cannot hold as an ordinary number; "
                "scale the inputs, or give a wider out_dtype"
            )


def _bound(
    a: np.dtype[Any], b: np.dtype[Any], out: np.dtype[Any], k: int, alpha: complex, beta: complex
) -> int:
    """Return a bound for the magnitude of every partial sum of integers; 0 for other types."""
    if out.kind not in "iu":
        return 0

    def largest(dtype: np.dtype[Any]) -> int:
        info = np.iinfo(dtype)
        return max(-int(info.min), int(info.max))

    return abs(int(alpha.real)) * largest(a) * largest(b) * k + abs(int(beta.real)) * largest(out)
