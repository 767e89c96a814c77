"""The moduli of `ozaki2`, and the numbers that its kernels are compiled with. Standard library only.

An integer x is known by its residues rₗ modulo numbers pₗ without common factors, if 2·|x| is less than their
product P (the Chinese remainder theorem):

    x = Σ P/M·y − q·P      y = x/(P/M) modulo M = p·p′       q = Σ y/M, rounded

There is one M for each pair of moduli p and p′, and y = v·r + v′·r′ from their two residues: it need not be
the least one. Residues are those of least magnitude, which a signed byte holds; factors v fit 16 bits.
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
FRACTION_BITS = 39
"""Bits behind the point of 1/M, from which q is computed: as many as 32 bits hold. |y| is at most 2²⁵, three
times as much as of two bytes for those of complex numbers, so the error of q before it is rounded is at most
8·2²⁵·2⁻⁴⁰."""
MOST_QUOTIENT = 1 << 13
"""More than any |q|: |y| of 8 pairs is at most 3·128·M each. It is added to q, which then has no sign."""
MARGIN = Fraction(1, 512)
"""|x| is at most P·(1/2 − MARGIN). Half of the margin is for the error of q, the other half is more than what
the rounding of elements to integers adds to norms of lines."""
_INVERSE_BITS, _COARSE_BITS = 38, 32
"""Bits behind the point of 1/p in `residue`, and in `residue_of_small`: with 2³⁰, and with 2²⁰, its error is
less than half of 1/255."""


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


def pairs(count: int) -> list[tuple[int, tuple[int, int]]]:
    """Return M and the factors of each pair of the first `count` moduli. The last may have no other: its
    second factor is 0."""
    whole, found = math.prod(MODULI[:count]), []
    for i in range(0, count, 2):
        both = MODULI[i : min(i + 2, count)]
        m = math.prod(both)
        inverse = pow(whole // m, -1, m)
        first, *second = (_least(inverse * (m // p) * pow(m // p, -1, p), m) for p in both)
        found.append((m, (first, second[0] if second else 0)))
    return found


def moduli_text() -> str:
    """Return pₗ, the inverse of each with 38 and with 32 bits behind the point, and the residues of 256⁰ …
    256⁷ in eight bytes, as the initializers of `Modulus` in residues.cuh."""
    found = []
    for p in MODULI:
        powers = [_least(256**i, p) & 255 for i in range(8)]
        low, high = (sum(byte << 8 * i for i, byte in enumerate(half)) for half in (powers[:4], powers[4:]))
        inverse, coarse = (((1 << bits) + p // 2) // p for bits in (_INVERSE_BITS, _COARSE_BITS))
        found.append(f"{{{p},{inverse},{coarse},{low:#x}u,{high:#x}u}}")
    return ",".join(found)


def tables_text(counts: Sequence[int], limbs: int, raised: int) -> str:
    """Return the initializers of `Table` in recombine.cu for some numbers of moduli. `limbs`: 32-bit words of
    sums, which wrap around. `raised`: what is added to each y, to make up for which a sum has a start."""
    return ",".join(_table(count, limbs, raised) for count in counts)


def bounds_text() -> str:
    """Return the initializers of `Bound` in scale.cu: for each number of moduli in FLOATING, the number, and
    the largest product of norms of two lines as mantissa·2^exponent."""
    found = []
    for count in FLOATING:
        exponent = largest(count).bit_length() - 1
        mantissa = math.ldexp(largest(count) >> (exponent - 52), -52)  # rounded down
        found.append(f"{{{count},{exponent},{mantissa!r}}}")
    return ",".join(found)


def _table(count: int, limbs: int, raised: int) -> str:
    whole, found = math.prod(MODULI[:count]), pairs(count)
    rows = ",".join(_pair(*one, whole, limbs) for one in found)
    start = MOST_QUOTIENT * whole - raised * sum(whole // m for m, _ in found)
    half = 1 << FRACTION_BITS - 1
    fraction = (MOST_QUOTIENT << FRACTION_BITS) + half - raised * sum(_fraction(m) for m, _ in found)
    words = ",".join(_limbs(x, limbs) for x in (-whole, start))
    return f"{{{count},{{{rows}}},{words},{fraction % (1 << 64):#x}u}}"


def _pair(m: int, factors: tuple[int, int], whole: int, limbs: int) -> str:
    first, second = (factor & 0xFFFF for factor in factors)
    return f"{{{first | second << 16:#x}u,{_fraction(m)}u,{_limbs(whole // m, limbs)}}}"


def _fraction(m: int) -> int:
    """Return 1/m with FRACTION_BITS behind the point."""
    return ((1 << FRACTION_BITS) + m // 2) // m


def _limbs(x: int, count: int) -> str:
    """Return an integer in words of 32 bits, the lowest first."""
    return "{" + ",".join(f"{x >> 32 * i & 0xFFFFFFFF:#x}u" for i in range(count)) + "}"


def _least(x: int, modulus: int) -> int:
    """Return the residue in [−modulus/2, modulus/2)."""
    return (x + modulus // 2) % modulus - modulus // 2
