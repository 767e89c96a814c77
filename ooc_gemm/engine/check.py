"""Freivalds' check: the tolerance for the difference between C·x and op(A)·(op(B)·x), and the verdict.

For a vector x of random signs, C·x = op(A)·(op(B)·x) costs O(n²) instead of O(n³), and a wrong C passes
with probability at most one half (R. Freivalds, IFIP Congress 1977); an error in a single element always
shows, whatever the signs.

Tolerance. Row i of C·x carries the rounding of C's elements. With unit roundoff u of C's accumulation,
|δ_ij| ≤ u·f(k)·‖a_i‖·‖b_j‖ (Higham, Accuracy and Stability, §3.1, with f(k) = √k + 4 for blocked sums
instead of the worst case k), and by Hoeffding |Σ_j x_j·δ_ij| ≤ t·√(Σ_j δ_ij²) fails with probability
2·exp(−t²/2): t = 8 gives u·f(k)·8·‖a_i‖·‖B‖_F. An old C, times β, is rounded along with the rest and adds
u·f(k)·8·|β|·‖c_i‖. The check itself adds up in float64.

Rounding is not random where all products are alike (a constant matrix), nor where sums are truncated, as
tensor cores do: there it grows with the number of terms that one register adds up in turn, `run`. A share
of that is added to f: at 1/8 it covers a drift of u a term, which is twice the largest possible mean of
rounding to nearest and that of truncation in steps of sixteen or eight terms, taken by random signs.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..support.intervals import ranges

Array = npt.NDArray[Any]
HOEFFDING = 8.0
"""The factor t in the formula above."""
ROWS = 1 << 14
"""Number of rows judged at a time, which takes 2 MiB."""
DOUBLE = 2.0**-53
"""Unit roundoff of float64."""
ROOT_TINY = 2.0**-537
"""Smaller elements have squares that float64 cannot represent."""
HELD = 2.0**-900, 2.0**1000
"""Sums of squares between these are right in float64: no square is too large, and those that are too small do
not count."""
ROUGH = 2.0**-10
"""Tolerance, relative to the larger sum, of rows of float64 whose norms float64 does not hold. Rounding
reaches it only where the signs cancel all but some 10⁻¹⁰ of a row."""


@dataclass(frozen=True)
class Verdict:
    """The result of the check of a block."""

    worst: float
    """Largest ratio of an error to its tolerance; a ratio of at most 1 passes."""
    row: int | None
    """The first wrong row of the block; None if the block passed."""

    @property
    def ok(self) -> bool:
        """Whether the block passed."""
        return self.row is None


@dataclass(frozen=True)
class Rounding:
    """How a sum of products is rounded."""

    sums: float
    """Unit roundoff of the type in which products are added up; 0 if every sum is exact."""
    operands: float = 0.0
    """Largest relative error of an element of an operand at the time it is multiplied."""
    run: int = 0
    """The most terms that one register adds up in turn."""
    least: float = 0.0
    """Half the smallest positive number, which is the most that a product loses when it underflows."""
    largest: float = math.inf
    """The largest finite number."""
    modulus: int = 0
    """Exact sums are compared modulo this; 0: in all their bits."""
    check: tuple[float, int] = (2.0**-53, 2**62)
    """Unit roundoff of the check's own sums, and the most terms that are added up with it; these sums are
    then added up in float64."""

    @classmethod
    def of(cls, dtype: np.dtype[Any], operands: float = 0.0, run: int = 0) -> "Rounding":
        """The rounding of sums in a floating-point type."""
        info = np.finfo(dtype)
        return cls(roundoff(dtype), operands, run, least(dtype), float(info.max))

    def tolerance(
        self,
        scale: Array,
        k: int,
        n: int,
        old: Array | float = 0.0,
        alpha: float = 1.0,
        weights: float | None = None,
    ) -> Array:
        """Return the tolerance of each row of C·x, whose n elements are sums of k products each. `scale` is
        |α|·‖a_i‖·‖B‖_F of each row, `old` is |β|·‖c_i‖, `alpha` is |α|, and `weights` is ‖x‖, √n where x has
        only signs."""
        unit, most = self.check
        own = unit * (_growth(min(k, most)) + _growth(min(n, most)))
        each = self.sums * (_growth(k) + min(k, self.run) / 8) + own
        weights = math.sqrt(n) if weights is None else weights
        underflow = HOEFFDING * weights * (k * alpha + 4) * self.least
        # One factor each: 0·∞ would be NaN.
        tolerance: Array = HOEFFDING * ((each + 2 * self.operands) * scale + each * old) + underflow
        return tolerance


def norms(values: Array) -> Array:
    """Return the norm of each row of magnitudes, also where float64 does not hold their squares."""
    squares: Array = np.einsum("ij,ij->i", values, values)
    found: Array = np.sqrt(squares)
    odd = np.flatnonzero(~((squares > HELD[0]) & (squares < HELD[1])))
    if odd.size:
        some = values[odd]
        top = some.max(axis=1, initial=0.0)
        power = np.ldexp(1.0, np.clip(np.frexp(top)[1], -1000, 1000))
        some /= power[:, None]
        scaled = power * np.sqrt(np.einsum("ij,ij->i", some, some))
        found[odd] = np.where((top > 0) & np.isfinite(top), scaled, top)
    return found


def _growth(terms: int) -> float:
    """The factor f in the formula above."""
    return math.sqrt(terms) + 4


def least(dtype: np.dtype[Any]) -> float:
    """Half the smallest positive number of a type; of float64, which cannot represent that half, the number
    itself."""
    smallest = float(np.finfo(dtype).smallest_subnormal)
    return smallest / 2 or smallest


def roundoff(dtype: np.dtype[Any], stored: bool = False) -> float:
    """Unit roundoff of sums of products of this type or, if `stored`, of numbers stored in it; 0 for
    integers."""
    if dtype.kind in "iu":
        return 0.0
    if dtype == np.float16 and not stored:
        dtype = np.dtype(np.float32)
    return float(np.finfo(dtype).eps) / 2


def compare(found: Array, wanted: Array, tolerance: Array, overflows: Any = False) -> tuple[Array, Array]:
    """Return which elements are wrong, and the ratio of each error to its tolerance.

    Elements agree if neither is finite. Where sums may overflow (`overflows`) they agree if one is not
    finite.
    """
    error = np.abs(found - wanted)
    finite = np.isfinite(found) & np.isfinite(wanted)
    right = (~np.isfinite(found) & ~np.isfinite(wanted)) | overflows
    wrong = np.where(finite, ~(error <= tolerance), ~right)
    ratio = np.where(finite & (error > 0), error / np.maximum(tolerance, np.finfo(float).tiny), 0.0)
    return wrong, np.where(wrong & ~finite, math.inf, ratio)


@dataclass(frozen=True)
class Sums:
    """The sums of the check of a block of C: a number for each row, in float64, complex128, int64 or
    int32."""

    product: Array
    """The product op(A)·(op(B)·x), for each row."""
    found: Array
    """C·x, for each row."""
    old: Array
    """The old C times x, for each row."""
    a: Array
    """Squared norms of the rows of op(A)."""
    c: Array
    """Squared norms of the rows of the old C."""
    b: Array
    """The squared norm of op(B), in parts that are still to be added up."""

    @classmethod
    def within(cls, memory: Any, rows: int, depth: int, dtype: np.dtype[Any]) -> "Sums":
        """Lay the sums out in a buffer of `plan.check_bytes` bytes, which may be an array of a device."""
        split = 8 * (2 * rows + depth)
        norms = memory[:split].view(np.float64)
        vectors = memory[split:][: 3 * rows * dtype.itemsize].view(dtype)
        product, found, old = (vectors[i * rows : (i + 1) * rows] for i in range(3))
        return cls(product, found, old, norms[:rows], norms[rows : 2 * rows], norms[2 * rows :])

    def verdict(
        self, rows: int, k: int, n: int, alpha: complex, beta: complex, rounding: Rounding
    ) -> Verdict:
        """Judge the first `rows` rows of a C of n columns, whose elements are α·(sum of k products) + β·(old
        C)."""
        with np.errstate(all="ignore"):
            b = math.sqrt(float(self.b.sum()) if k else 0.0) + math.sqrt(k * n) * ROOT_TINY
            judge = partial(self._judge, k, n, alpha, beta, b, rounding)
            some = [judge(slice(*r)) for r in ranges(rows, ROWS)]
        row = next(
            (r * ROWS + verdict.row for r, verdict in enumerate(some) if verdict.row is not None), None
        )
        return Verdict(max((verdict.worst for verdict in some), default=0.0), row)

    def _judge(
        self, k: int, n: int, alpha: complex, beta: complex, b: float, rounding: Rounding, rows: slice
    ) -> Verdict:
        """Judge some rows. The row in the verdict is counted from the first of them. `b` is ‖B‖_F."""
        found, product, old = (x[rows] for x in (self.found, self.product, self.old))
        exact = rounding.sums == 0
        wanted = np.zeros(len(found), np.int64 if exact else found.dtype)
        for x, factor in ((product, alpha), (old, beta)):
            if factor != 0:
                real: float = int(factor.real) if exact else factor.real
                wanted += (factor if found.dtype.kind == "c" else real) * x
        if exact:
            apart = found - wanted
            # What wraps around may differ by that.
            wrong = (apart % rounding.modulus if rounding.modulus else apart.astype(found.dtype)) != 0
            ratio = np.where(wrong, math.inf, 0.0)
        else:
            sums = scale = kept = np.zeros(len(found))
            if alpha != 0:  # sums of products may be too large before α makes them smaller
                sums = b * (np.sqrt(self.a[rows]) + math.sqrt(k) * ROOT_TINY)
                scale = abs(alpha) * sums
            if beta != 0:
                kept = abs(beta) * (np.sqrt(self.c[rows]) + math.sqrt(n) * ROOT_TINY)
            tolerance = rounding.tolerance(scale, k, n, kept, abs(alpha))
            if rounding.sums <= DOUBLE:  # squares of narrower types always fit
                rough = ROUGH * np.maximum(np.abs(found), np.abs(wanted))
                rough += rounding.tolerance(np.zeros(1), k, n, alpha=abs(alpha))
                held = self._held(k if alpha != 0 else 0, beta, rows)
                tolerance = np.where(held, tolerance, np.minimum(tolerance, rough))
            overflows = ~(np.maximum(sums, scale + kept) < rounding.largest)
            wrong, ratio = compare(found, wanted, tolerance, overflows)
        first = np.flatnonzero(wrong)
        return Verdict(float(ratio.max(initial=0.0)), int(first[0]) if first.size else None)

    def _held(self, k: int, beta: complex, rows: slice) -> Array:
        """Return for which rows float64 holds all squared norms that count. k: 0 where A and B do not."""
        squares = [self.a[rows], self.b.sum(keepdims=True)] if k else []
        squares += [self.c[rows]] if beta != 0 else []
        held = np.ones(len(self.a[rows]), np.bool_)
        for one in squares:
            held &= (one > HELD[0]) & (one < HELD[1])
        return held
