"""Solves the normal equations of a linear model."""

import numpy as np
import numpy.typing as npt

from ..support.errors import InputError
from .equations import Equations, Floats, Powers

LEAST_DIGITS = 1e-4
"""The relative error of coefficients, cond² times the precision of float64, beyond which they are refused."""
ROUNDING = 16 * float(np.finfo(np.float64).eps)
"""Deviations of a constant column from its mean, relative to that, are smaller."""


def solved(
    sums: Equations, powers: Powers, ridge: float, names: tuple[str, str]
) -> tuple[Floats, Floats, float]:
    """The coefficients, the intercepts, and the condition number of the scaled matrix. names: of x and y.
    Raises InputError."""
    with np.errstate(over="ignore", under="ignore"):
        squares = _squares(sums, names)
        norms = np.hypot(np.sqrt(squares), np.ldexp(ridge**0.5, powers.columns))
        _check_norms(norms, names[0], bool(sums.mean.any()))
        gram, scale = sums.gram, 1 / norms
        gram *= scale
        gram *= scale[:, None]
        gram.flat[:: len(gram) + 1] = 1.0
        values, vectors = np.linalg.eigh(gram)
        _check_values(values, vectors, names[0])
        found = vectors @ ((vectors.T @ (sums.product * scale[:, None])) / values[:, None])
        constants = sums.target_mean - sums.mean @ (found * scale[:, None])
        coefficients = _restored(found, scale, powers)
        constants = np.ldexp(constants, -powers.targets)
    if not np.isfinite(coefficients).all() or not np.isfinite(constants).all():
        raise InputError(
            f"the coefficients of {names[0]} for {names[1]} are too large for float64; scale the arrays"
        )
    return coefficients, constants, float(np.sqrt(values[-1] / values[0]))


def _squares(sums: Equations, names: tuple[str, str]) -> Floats:
    """Sum of the squares of each column, 0 where it is constant. Raises InputError where sums are NaN."""
    squares = sums.gram.diagonal().copy()
    if not np.isfinite(squares).all():
        column = int(np.flatnonzero(~np.isfinite(squares))[0])
        raise InputError(f"{names[0]}: column {column} holds NaN or infinite numbers; replace them")
    if not (np.isfinite(sums.target_squares).all() and np.isfinite(sums.product).all()):
        raise InputError(f"{names[1]} holds NaN or infinite numbers; replace them")
    squares[squares <= sums.rows * np.square(sums.mean * ROUNDING)] = 0
    return squares


def _check_norms(norms: Floats, name: str, centred: bool) -> None:
    """Raise InputError where a column is zero."""
    if not norms.all():
        column, what = int(np.flatnonzero(norms == 0)[0]), "constant" if centred else "zero"
        raise InputError(
            f"{name}: column {column} is {what}; leave it out, or give a ridge, such as ridge=1.0"
        )


def _check_values(values: Floats, vectors: Floats, name: str) -> None:
    """Raise InputError where the matrix of scaled columns with these eigenvalues is nearly singular."""
    if values[0] <= float(np.finfo(np.float64).eps) / LEAST_DIGITS * values[-1]:
        first, second = np.sort(np.argsort(np.abs(vectors[:, 0]))[-2:])
        raise InputError(
            f"{name}: its columns are too nearly dependent for normal equations in float64, columns {first} "
            f"and {second} most of all; leave some out, or give a ridge, such as ridge=1.0"
        )


def _restored(found: Floats, scale: Floats, powers: Powers) -> Floats:
    """The coefficients of x and y as they are. found: those of columns of norm 1. Raises InputError where
    float64 does not hold their digits."""
    mantissa, exponent = np.frexp(scale)
    powers_of: npt.NDArray[np.int32] = (exponent + powers.columns)[:, None] - powers.targets
    size = np.linalg.norm(found, axis=0) * mantissa[:, None]
    lost = (size > 0) & (np.ldexp(size, powers_of) < np.finfo(np.float64).tiny)
    if lost.any():
        column = int(np.flatnonzero(lost.any(axis=1))[0])
        raise InputError(f"the coefficient of column {column} is too small for float64; scale the arrays")
    return np.ldexp(found * mantissa[:, None], powers_of)
