"""The moduli of `ozaki2`, and the numbers that its kernels are compiled with. Standard library only.

An integer x is known by its residues rₗ modulo numbers pₗ without common factors, if 2·|x| is less than their
product P (the Chinese remainder theorem):

    x = Σ wₗ·rₗ − q·P      wₗ = 1 modulo pₗ, 0 modulo the others       q = Σ wₗ·rₗ / P, rounded

Residues are those of least magnitude, which a signed byte holds.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

MODULI = (256, 255, 253, 251, 247, 241, 239, 233, 229, 227, 223, 217, 211, 199, 197, 193)
"""From 256 down, each number that has no factor in common with those before it."""
FLOATING = (15, 16)
"""How many moduli products of floating-point numbers take: the first of these that is accurate enough."""
DEPTH = 1 << 16
"""Largest depth of a product of residues: its sums are at most 2³⁰, as `residue` in residues.cuh demands."""
FRACTION_BITS = 20
"""Bits behind the point of wₗ/P, from which q is computed in 32 bits. The error of q before it is rounded is
at most 16·128·2⁻²¹."""
MARGIN = Fraction(1, 512)
"""|x| is at most P·(1/2 − MARGIN). Half of the margin is for the error of q, the other half is more than what
the rounding of elements to integers adds to norms of lines."""
_INVERSE_BITS = 38
"""Bits behind the point of 1/p: with 2³⁰ in `residue`, its error is less than half of 1/255."""


def largest(count: int) -> int:
    """Return the largest magnitude that an integer may have to be found from its residues modulo the first
    `count` moduli."""
    return math.floor(math.prod(MODULI[:count]) * (Fraction(1, 2) - MARGIN))


def least_count(magnitude: int) -> int:
    """Return how many moduli integers of up to this magnitude need. Raises ValueError if all are too few."""
    for count in range(1, len(MODULI) + 1):
        if largest(count) >= magnitude:
            return count
    raise ValueError(f"{len(MODULI)} moduli do not tell integers up to {magnitude} apart")


def weights(count: int) -> list[int]:
    """Return wₗ of the first `count` moduli, at most P/2 in magnitude."""
    whole = math.prod(MODULI[:count])
    return [_least(whole // p * pow(whole // p, -1, p), whole) for p in MODULI[:count]]


def moduli_text() -> str:
    """Return pₗ, the inverse of each with 38 bits behind the point, and the residues of 256⁰ … 256⁷ in eight
    bytes, as the initializers of `Modulus` in residues.cuh."""
    found = []
    for p in MODULI:
        powers = [_least(256**i, p) & 255 for i in range(8)]
        low, high = (sum(byte << 8 * i for i, byte in enumerate(half)) for half in (powers[:4], powers[4:]))
        inverse = ((1 << _INVERSE_BITS) + p // 2) // p
        found.append(f"{{{p},{inverse},{low:#x}u,{high:#x}u}}")
    return ",".join(found)


def tables_text(counts: Sequence[int], limbs: int) -> str:
    """Return the initializers of `Table` in recombine.cu for some numbers of moduli. `limbs`: 32-bit words of
    sums, which wrap around."""
    return ",".join(_table(count, limbs) for count in counts)


def bounds_text() -> str:
    """Return the initializers of `Bound` in scale.cu: for each number of moduli in FLOATING, the number, and
    the largest product of norms of two lines as mantissa·2^exponent."""
    found = []
    for count in FLOATING:
        exponent = largest(count).bit_length() - 1
        mantissa = math.ldexp(largest(count) >> (exponent - 52), -52)  # rounded down
        found.append(f"{{{count},{exponent},{mantissa!r}}}")
    return ",".join(found)


def _table(count: int, limbs: int) -> str:
    whole, found = math.prod(MODULI[:count]), weights(count)
    padding = len(MODULI) - count
    rows = [_limbs(weight, limbs) for weight in found] + [_limbs(0, limbs)] * padding
    parts = [round(Fraction(weight << FRACTION_BITS, whole)) for weight in found] + [0] * padding
    return f"{{{count},{{{','.join(rows)}}},{{{','.join(map(str, parts))}}},{_limbs(whole, limbs)}}}"


def _limbs(x: int, count: int) -> str:
    """Return an integer in words of 32 bits, the lowest first."""
    return "{" + ",".join(f"{x >> 32 * i & 0xFFFFFFFF:#x}u" for i in range(count)) + "}"


def _least(x: int, modulus: int) -> int:
    """Return the residue in [−modulus/2, modulus/2)."""
    return (x + modulus // 2) % modulus - modulus // 2
