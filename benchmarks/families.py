"""Families of inputs, ordinary ones and hard ones, on which the accuracy of products is measured."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Pair = tuple[Any, Any]


class Shape(NamedTuple):
    """The shape of a product."""

    m: int
    n: int
    k: int


Draw = Callable[[Any, Shape], Pair]
"""Makes A (m×k) and B (k×n) from a random generator of NumPy's or CuPy's."""


@dataclass(frozen=True)
class Family:
    """A family of inputs of one depth."""

    name: str
    k: int
    draw: Draw


def _normal(r: Any, s: Shape) -> Pair:
    return r.standard_normal((s.m, s.k)), r.standard_normal((s.k, s.n))


def _uniform(r: Any, s: Shape) -> Pair:
    return r.random((s.m, s.k)), r.random((s.k, s.n))


def _scaled(a: float, b: float) -> Draw:
    """Multiply N(0, 1) by constants."""

    def draw(r: Any, s: Shape) -> Pair:
        x, y = _normal(r, s)
        return x * a, y * b

    return draw


def _shifted(shift: int, count: int = 1) -> Draw:
    """Multiply some columns of A by 2^shift and the matching rows of B by 2^-shift."""

    def draw(r: Any, s: Shape) -> Pair:
        x, y = _normal(r, s)
        at = slice(s.k // 3, s.k // 3 + count)
        x[:, at] *= 2.0**shift
        y[at] *= 2.0**-shift
        return x, y

    return draw


def _units(width: int, rows: bool, columns: bool, inverse: bool = True) -> Draw:
    """Give rows of A and columns of B, or columns of A, units of 2^u with u within ±width. The rows of B get
    the inverse units of A's columns, or none."""

    def draw(r: Any, s: Shape) -> Pair:
        x, y = _normal(r, s)
        if rows:
            x *= 2.0 ** r.integers(-width, width + 1, (s.m, 1))
            y *= 2.0 ** r.integers(-width, width + 1, (1, s.n))
        if columns:
            unit = 2.0 ** r.integers(-width, width + 1, (1, s.k))
            x *= unit
            if inverse:
                y /= unit.T
        return x, y

    return draw


def _outliers(factor: float, columns: int, zeros: float) -> Draw:
    """Multiply some columns of A by a factor; in the matching rows of B a share of the elements is zero."""

    def draw(r: Any, s: Shape) -> Pair:
        x, y = _normal(r, s)
        x[:, :columns] *= factor
        y[:columns, : int(zeros * s.n)] = 0
        return x, y

    return draw


def _elements(factor: float, share: float) -> Draw:
    """Multiply a share of A's elements, at least one, by a factor."""

    def draw(r: Any, s: Shape) -> Pair:
        x, y = _normal(r, s)
        chosen = r.random((s.m, s.k)) < share
        chosen[7, s.k // 2] = True
        x[chosen] *= factor
        return x, y

    return draw


def _lognormal(sigma: float) -> Draw:
    def draw(r: Any, s: Shape) -> Pair:
        x, y = _normal(r, s)
        return np.exp(sigma * x), np.exp(sigma * y)

    return draw


def _mean(mean: float) -> Draw:
    def draw(r: Any, s: Shape) -> Pair:
        x, y = _normal(r, s)
        return x + mean, y + mean

    return draw


def _cancelling(rest: float) -> Draw:
    """Let the second half of every sum cancel the first, except for `rest` of it."""

    def draw(r: Any, s: Shape) -> Pair:
        x, y = _normal(r, s)
        half = s.k // 2
        x[:, half:] = x[:, : s.k - half]
        y[half:] = -y[: s.k - half] + rest * y[half:]
        return x, y

    return draw


def _sparse(share: float) -> Draw:
    """Let only a share of A's elements be nonzero."""

    def draw(r: Any, s: Shape) -> Pair:
        x, y = _normal(r, s)
        return x * (r.random((s.m, s.k)) < share), y

    return draw


def _counts(most: int) -> Draw:
    """Let A hold small integers, as genotypes and word counts are."""

    def draw(r: Any, s: Shape) -> Pair:
        return r.integers(0, most + 1, (s.m, s.k)).astype("f8"), r.standard_normal((s.k, s.n))

    return draw


def _whole(most: int) -> Draw:
    """Let A and B hold integers whose sums float32 holds exactly."""

    def draw(r: Any, s: Shape) -> Pair:
        x, y = (r.integers(-most, most + 1, shape).astype("f8") for shape in ((s.m, s.k), (s.k, s.n)))
        return x, y

    return draw


def _tailed(r: Any, s: Shape) -> Pair:
    """Draw ratios of normal numbers (Cauchy's distribution)."""
    (x, y), (u, v) = _normal(r, s), _normal(r, s)
    return x / u, y / v


def _exponents(spread: int) -> Draw:
    """Give every element a unit of its own."""

    def draw(r: Any, s: Shape) -> Pair:
        x, y = _normal(r, s)
        return (
            x * 2.0 ** r.integers(-spread, spread + 1, x.shape),
            y * 2.0 ** r.integers(-spread, spread + 1, y.shape),
        )

    return draw


def _blocks(shift: int) -> Draw:
    """Multiply half of A's columns by 2^shift. Half of B's columns meet only those, the others only the
    rest."""

    def draw(r: Any, s: Shape) -> Pair:
        x, y = _normal(r, s)
        half = s.k // 2
        x[:, :half] *= 2.0**shift
        y[:half, : s.n // 2] = 0
        y[half:, s.n // 2 :] = 0
        return x, y

    return draw


def families() -> Iterator[Family]:
    for k in (512, 1024, 8192, 65536):
        yield Family("N(0, 1)", k, _normal)
        yield Family("U(0, 1)", k, _uniform)
        yield Family("means of 1000", k, _mean(1e3))
        yield Family("lognormal, sigma 1", k, _lognormal(1))
        yield Family("cancelling but for 2^-10", k, _cancelling(2.0**-10))
        yield Family("one column x 2^24, B's row x 2^-24", k, _shifted(24))
        yield Family("a column x 1e7 meets a row of zeros", k, _outliers(1e7, 1, 1))
        yield Family("half of A zeros", k, _sparse(0.5))
    for shift in range(0, 41, 2):
        yield Family(f"one column x 2^{shift}, B's row x 2^-{shift}", 1024, _shifted(shift))
    for shift in range(-40, 1, 8):
        yield Family(f"10 columns x 2^{shift}, B's rows x 2^{-shift}", 1024, _shifted(shift, 10))
    for shift in (23, 40):
        yield Family(f"one column x 2^{shift}, B's row x 2^-{shift}", 8192, _shifted(shift))
    for width in (1, 2, 4, 8, 12, 16, 20, 25, 30):
        yield Family(f"units within 2^±{width} over columns", 4096, _units(width, False, True))
        yield Family(
            f"units within 2^±{width} over columns of A alone", 4096, _units(width, False, True, False)
        )
        yield Family(f"units within 2^±{width} over rows", 4096, _units(width, True, False))
        yield Family(f"units within 2^±{width} over both", 4096, _units(width, True, True))
    for power in (2, 4, 7, 10):
        for columns, zeros in ((1, 1), (1, 0.5), (1, 0.01), (20, 1), (20, 0.5)):
            name = f"{columns} columns x 1e{power} meet rows with {zeros:.0%} zeros"
            yield Family(name, 1024, _outliers(10.0**power, columns, zeros))
    for share in (0, 1e-6, 1e-3):
        yield Family(f"{share:g} of A's elements x 1e9", 4096, _elements(1e9, share))
    for sigma in range(1, 9):
        yield Family(f"lognormal, sigma {sigma}", 4096, _lognormal(sigma))
    for mean in (1, 10, 1e5):
        yield Family(f"means of {mean:g}", 1024, _mean(mean))
    for rest in (0.5, 2.0**-5, 2.0**-20):
        yield Family(f"cancelling but for {rest:.2g}", 1024, _cancelling(rest))
    for size in (1e-19, 1e-20, 1e-21, 1e-22):
        yield Family(f"{size:g} times {size:g}: subnormal results", 1024, _scaled(size, size))
    yield Family("1e30 times 1e-30", 1024, _scaled(1e30, 1e-30))
    yield Family("subnormal elements", 1024, _scaled(1e-40, 1e20))
    for share in (0.3, 0.1, 0.03, 0.01):
        for k in (1024, 8192):
            yield Family(f"{share:.0%} of A not zero", k, _sparse(share))
    for most in (1, 2, 255):
        yield Family(f"A of integers up to {most}", 1024, _counts(most))
    for most in (1, 8, 60):
        for k in (1024, 8192):
            yield Family(f"integers within ±{most}, sums exact in float32", k, _whole(most))
    yield Family("Cauchy's distribution", 4096, _tailed)
    for spread in (1, 2, 4, 8, 12, 40):
        yield Family(f"a unit within 2^±{spread} for each element", 4096, _exponents(spread))
    for shift in (4, 10, 20, 32, 40):
        yield Family(f"blocks, half of them x 2^{shift}", 1024, _blocks(shift))


def wide_families() -> Iterator[Family]:
    """Yield families whose elements float64 alone holds."""
    for width in (1, 2, 100, 300):
        yield Family(f"float64: units within 2^±{width} over columns", 4096, _units(width, False, True))
        yield Family(f"float64: units within 2^±{width} over rows", 4096, _units(width, True, False))
    for k in (1024, 8192):
        yield Family("float64: one element x 1e200", k, _elements(1e200, 0))
        yield Family("float64: subnormal elements", k, _scaled(1e-310, 1e100))
        yield Family("float64: subnormal results", k, _scaled(1e-155, 1e-156))
        yield Family("float64: 1e200 times 1e-200", k, _scaled(1e200, 1e-200))
        yield Family("float64: cancelling but for 2^-40", k, _cancelling(2.0**-40))
