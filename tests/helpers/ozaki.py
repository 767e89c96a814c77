"""ozaki2 in NumPy and Python's integers: what its kernels must compute, and in what order of operations where
that matters. Operands are arrays of lines × k: op(A), and the transpose of op(B).

It shares nothing with the kernels but the list of moduli and the sizes in preparations.py: weights, bounds
and quotients are computed with exact integers here."""

import math
from fractions import Fraction

import numpy as np

from ooc_gemm.cuda_kernels.moduli import FLOATING, MARGIN, MODULI
from ooc_gemm.cuda_kernels.preparations import GRAIN, SAMPLE, SPAN

DROPPED, NONE, ALIKE = -(1 << 20), -(1 << 19), 2
"""As in scales.cuh and scale.cu."""


def reals(x):
    """The parts of numbers along a third axis."""
    x = np.ascontiguousarray(x)
    return x.view("f8").reshape(*x.shape, -1) if x.dtype.kind == "c" else x[..., None]


def high_words(x):
    """The high words of magnitudes; 1 where that would be 0 and the number is not."""
    high = (np.abs(np.ascontiguousarray(x)).view("u8") >> 32).astype("u4")
    return np.where((high == 0) & (x != 0), np.uint32(1), high)


def log2(high):
    """⌊log2⌋ of numbers with these high words, and NONE of 0."""
    numbers = high.astype("u8") << np.uint64(32)
    return np.where(high == 0, NONE, np.frexp(numbers.view("f8"))[1] - 1)


def depth_largest(x):
    """The high words of the largest magnitude of every k."""
    return high_words(reals(x)).max(axis=(0, 2), initial=0)


def equilibrate(a, b):
    """d of each k, from the high words of the largest magnitudes on both sides, and whether it is used."""
    x, y = log2(a), log2(b)
    paired = (a != 0) & (b != 0)
    d = (y - x) >> 1
    low, high = d[paired].min(initial=-NONE), d[paired].max(initial=NONE)
    most = lambda z, where: z[where].max(initial=NONE)  # noqa: E731
    apart = any(most(z, ~paired) > most(z, paired) + ALIKE for z in (x, y))
    return np.where(paired, d - ((low + high) >> 1), DROPPED), bool(high - low > ALIKE or apart)


def sampled(k):
    """Which elements of a line have magnitudes."""
    return np.arange(k)[np.arange(k) % SPAN < SAMPLE]


class Lines:
    """Lines scaled to numbers below 2, their squared norms, and magnitudes."""

    def __init__(self, x, depth=None, sign=1):
        parts, k = reals(x), x.shape[1]
        depth = np.zeros(k, int) if depth is None else depth
        self.kept = depth != DROPPED
        self.shift = np.where(self.kept, sign * depth, 0)
        logs = np.where(self.kept[:, None], log2(high_words(parts)) + self.shift[:, None], NONE)
        logs = np.where(parts == 0, NONE, logs)
        top = logs.max(axis=(1, 2), initial=NONE)
        self.exponents = np.where(top == NONE, 0, top)
        shift = self.shift[None, :, None] - self.exponents[:, None, None]
        self.normal = np.where(self.kept[:, None], np.ldexp(parts, shift), 0.0)
        self.squares = np.array([math.fsum(row.ravel() ** 2) for row in self.normal])
        with np.errstate(all="ignore"):
            factor = GRAIN * np.sqrt(k / self.squares)
            some = self.normal[:, sampled(k)]
            size = np.sqrt((some**2).sum(2)) if some.shape[2] == 2 else np.abs(some[..., 0])
            magnitudes = np.minimum(size * factor[:, None], 127)
        self.magnitudes = np.where(self.squares[:, None] == 0, 127, magnitudes).astype("i1")

    def powers(self, count):
        """What brings the norm of each line to T/2 … T."""
        return [power(square, count) for square in self.squares]

    def least_square(self, count):
        """The least squared norm of lines that are brought there."""
        lines = zip(self.squares, self.powers(count), strict=True)
        return min((math.ldexp(square, 2 * p) for square, p in lines if square), default=math.inf)

    def scales(self, count):
        """e of each line."""
        return np.array([p - e if s else 0 for p, e, s in zip(
            self.powers(count), self.exponents.tolist(), self.squares, strict=True
        )])  # fmt: skip


def bound(count):
    """T²: the largest integer that residues modulo so many numbers tell apart, with a margin."""
    return math.floor(math.prod(MODULI[:count]) * (Fraction(1, 2) - MARGIN))


def power(square, count):
    """The largest power of two whose square times this is no more than T²."""
    if square == 0:
        return 0
    found = (bound(count).bit_length() - math.frexp(square)[1]) // 2 + 1
    while Fraction(square) * Fraction(4) ** found > bound(count):
        found -= 1
    return found


def exact(a, b):
    """a·bᵀ of 8-bit integers. float64 holds the sums, and BLAS is fast."""
    return (a.astype("f8") @ b.astype("f8").swapaxes(-1, -2)).astype("i8")


def least(a, b):
    """The least sum of products of magnitudes."""
    return int(exact(a.magnitudes, b.magnitudes).min())


def decide(a, b, k, smallest, tolerance):
    """The number of moduli; 0 for the fallback."""
    allowed = tolerance * 2.0**-53 * smallest / (float(GRAIN) * GRAIN * k)
    for count in FLOATING:
        x, y = a.least_square(count), b.least_square(count)
        if not 1 / x + 1 / y > 12 * allowed * allowed:
            return count
    return 0


def integers(x, scales, lines):
    """Scaled numbers, rounded to integers: of complex numbers re, im and their sum, along a first axis."""
    shift = lines.shift[None, :, None] + scales[:, None, None]
    whole = np.rint(np.where(lines.kept[:, None], np.ldexp(reals(x), shift), 0.0)).astype("i8")
    whole = np.moveaxis(whole, 2, 0)
    return np.concatenate([whole, whole.sum(0)[None]]) if len(whole) == 2 else whole


def residue(x, p):
    return (x + p // 2) % p - p // 2


def planes(whole, count):
    """Residues of integers: modulus, part, line, k."""
    return np.array([[residue(part, p) for part in whole] for p in MODULI[:count]], "i1")


def products(a, b):
    """Residues of the products of planes."""
    return np.array([residue(exact(*x), p) for *x, p in zip(a, b, MODULI, strict=False)], "i1")


def found(sums):
    """The integers that have these residues: of re·re, im·im and their sum's product, re and im."""
    if sums.shape[1] == 3:
        one, two, three = np.moveaxis(sums.astype("i8"), 1, 0)
        sums = np.stack([one - two, three - one - two], 1)
    whole = math.prod(MODULI[: len(sums)])
    weights = [whole // p * pow(whole // p, -1, p) for p in MODULI[: len(sums)]]
    total = 0
    for at in range(0, whole.bit_length(), 30):  # some bits of all weights, whose sums int64 holds
        digits = np.array([weight >> at & (1 << 30) - 1 for weight in weights])
        total = total + (np.tensordot(digits, sums.astype("i8"), 1).astype(object) << at)
    return (total + whole // 2) % whole - whole // 2


def recombine(sums, row_scales, column_scales):
    """Numbers of residues of scaled sums."""
    numbers = found(sums).astype("f8")
    with np.errstate(over="ignore", under="ignore"):
        numbers = np.ldexp(numbers, -np.asarray(row_scales)[:, None] - np.asarray(column_scales))
    return np.stack(list(numbers), 2).view("c16")[..., 0] if len(numbers) == 2 else numbers[0]


def multiply(a, b, counts=FLOATING, tolerance=0.25):
    """op(A)·op(B) and the number of moduli that was taken; (None, 0) where the fallback is. `b`: the
    transpose of op(B). `counts`: the numbers of moduli that there may be."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return None, 0
    depth, shifted = equilibrate(depth_largest(a), depth_largest(b))
    x, y = (Lines(z, depth if shifted else None, sign) for z, sign in ((a, 1), (b, -1)))
    count = counts[0] if len(counts) == 1 else decide(x, y, a.shape[1], least(x, y), tolerance)
    if not count:
        return None, 0
    e, f = x.scales(count), y.scales(count)
    sums = products(planes(integers(a, e, x), count), planes(integers(b, f, y), count))
    return recombine(sums, e, f), count
