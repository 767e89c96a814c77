"""The type of C, a bound on its integers, and whether α and β fit."""

import math
from typing import Any

import numpy as np

from ..storage.read import store
from ..support.errors import InputError


def out_dtype(a: np.dtype[Any], b: np.dtype[Any], asked: Any, alpha: complex, beta: complex) -> np.dtype[Any]:
    """C's type: NumPy's promotion, except that sums of integers have room: those of 8 bits make int32, all
    others int64. That is also so where NumPy has uint64, in which no sum of more than int64 is computed here,
    or float64 (of int64 and uint64), which is not exact."""
    natural = np.result_type(a, b)
    if a.kind in "iu" and b.kind in "iu":
        natural = np.dtype(np.int32 if a.itemsize == b.itemsize == 1 else np.int64)
    out = natural if asked is None else store.matrix_dtype(asked)
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


def check_scalars(alpha: complex, beta: complex, sums: np.dtype[Any]) -> None:
    """Raise InputError for an alpha or beta that the type of the sums cannot hold: as infinity it would make
    NaN of sums that are 0, and as 0, or with few digits, something else than was asked for."""
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


def bound(
    a: np.dtype[Any], b: np.dtype[Any], out: np.dtype[Any], k: int, alpha: complex, beta: complex
) -> int:
    """For integers: no partial sum exceeds it in magnitude."""
    if out.kind not in "iu":
        return 0

    def largest(dtype: np.dtype[Any]) -> int:
        info = np.iinfo(dtype)
        return max(-int(info.min), int(info.max))

    return abs(int(alpha.real)) * largest(a) * largest(b) * k + abs(int(beta.real)) * largest(out)
