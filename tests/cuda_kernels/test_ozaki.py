"""ozaki2: its constants, the errors of its specification beside those of float64 sums, and on a GPU its
kernels beside both."""

import math
from itertools import product
from typing import Any

import numpy as np
import ozaki as specification
import pytest
from precision import ozaki_always
from products import as_product

from ooc_gemm.cuda_kernels import moduli, scales
from ooc_gemm.cuda_kernels.moduli import DEPTH, FLOATING, MODULI
from ooc_gemm.cuda_kernels.ozaki import exact_count, planes
from ooc_gemm.cuda_kernels.product import Strips

# ---- constants ---------------------------------------------------------------------------------


def test_moduli_have_no_common_factors_and_residues_fit_bytes() -> None:
    for i, p in enumerate(MODULI):
        assert 128 < p <= 256
        assert all(math.gcd(p, q) == 1 for q in MODULI[:i])


def test_sums_are_reduced_to_the_residue_of_least_magnitude() -> None:
    """As `Modulus` of residues.cuh does, whose error grows with the sum; and no deeper sum is made."""
    assert DEPTH * 128**2 == 2**30
    table = eval(f"[{moduli.moduli_text()}]".replace("{", "(").replace("}", ")").replace("u", ""))
    near = np.arange(-3000, 3001)
    sums = np.concatenate([near, 2**30 - 1500 + near[near <= 1500], -(2**30) + 1500 + near[near >= -1500]])
    for (p, inverse, low, high), wanted in zip(table, MODULI, strict=True):
        assert p == wanted
        assert inverse < 2**31
        assert np.array_equal(sums - ((sums * inverse + 2**37) >> 38) * p, specification.residue(sums, p))
        powers = np.frombuffer(np.array([low, high], "<u4").tobytes(), "i1")
        assert [(int(x) - 256**i) % p for i, x in enumerate(powers)] == [0] * 8


@pytest.mark.parametrize("count", range(1, len(MODULI) + 1))
def test_weights_find_integers(count: int) -> None:
    whole, rng = math.prod(MODULI[:count]), np.random.default_rng(count)
    weights = moduli.weights(count)
    assert all(abs(weight) <= whole // 2 for weight in weights)
    fractions = [round(weight * 2**moduli.FRACTION_BITS / whole) for weight in weights]
    most = moduli.largest(count)
    for x in (0, 1, -1, most, -most, *(int(rng.integers(-99, 100)) * most // 100 for _ in range(20))):
        residues = [int(specification.residue(x, p)) for p in MODULI[:count]]
        q = sum(r * f for r, f in zip(residues, fractions, strict=True)) + 2 ** (moduli.FRACTION_BITS - 1)
        found = sum(r * w for r, w in zip(residues, weights, strict=True))
        assert found - (q >> moduli.FRACTION_BITS) * whole == x
    assert 128 * sum(map(abs, fractions)) < 2**31


def test_products_of_rounded_lines_stay_in_bounds() -> None:
    """Norms come to T at most before elements are rounded, by up to 1/2 each."""
    for count in FLOATING:
        whole, norm = math.prod(MODULI[:count]), math.isqrt(moduli.largest(count)) + 1
        norm += math.isqrt(DEPTH) + 1
        error = count * 64 / 2**moduli.FRACTION_BITS
        assert norm**2 / whole + error < 0.5
        assert norm < 2**62.5, "re + im of a complex number fits int64"


def test_integers_take_as_many_moduli_as_they_need() -> None:
    assert exact_count("int16", "int16", DEPTH) == exact_count("int16", "int16", 10 * DEPTH) == 6
    assert exact_count("uint16", "uint16", DEPTH) == 7
    assert exact_count("int32", "int32", DEPTH) == exact_count("uint32", "int32", 9) == 9
    assert exact_count("int16", "int16", 1) < 6
    for count in range(1, len(MODULI)):
        assert moduli.least_count(moduli.largest(count)) == count
        assert moduli.least_count(moduli.largest(count) + 1) == count + 1
    with pytest.raises(ValueError, match="16 moduli"):
        moduli.least_count(2**130)
    assert planes("float64", "float64", 9) == FLOATING[-1]
    assert planes("complex128", "complex128", 9) == 3 * FLOATING[-1]
    assert planes("int32", "uint32", 9) == 9


# ---- errors ------------------------------------------------------------------------------------


def in_turn(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A·B in float64, one product after the other, each sum rounded once."""
    total, left, right = np.zeros((len(a), b.shape[1])), a.astype("g"), b.astype("g")
    for k in range(a.shape[1]):
        total = (total + left[:, k, None] * right[k]).astype("f8")
    return total


def errors(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """In the Frobenius norm, relative; and the largest, relative to |A|·|B|."""
    want, size = a.astype("g") @ b.astype("g"), abs(a).astype("g") @ abs(b).astype("g")
    difference = abs(c - want)
    norm = np.sqrt((difference**2).sum() / (abs(want) ** 2).sum())
    return float(norm), float((difference / size.clip(1e-300)).max())


Pair = tuple[np.ndarray, np.ndarray]


def _normal(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    return rng.standard_normal((m, k)), rng.standard_normal((k, n))


def _in_units(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    (a, b), units = _normal(rng, m, k, n), 2.0 ** rng.integers(-300, 301, k)
    return a * units, b / units[:, None]


def _cancelling(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    a, b = _normal(rng, m, k, n)
    half = k // 2
    a[:, half:], b[half:] = a[:, : k - half], b[half:] * 2.0**-20 - b[: k - half]
    return a, b


def _one_huge(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    a, b = _normal(rng, m, k, n)
    a[7, k // 2] = 1e200
    return a, b


def _lognormal(sigma: float) -> Any:
    return lambda rng, m, k, n: tuple(np.exp(sigma * x) for x in _normal(rng, m, k, n))


INPUTS = {
    "N(0,1)": (_normal, True),
    "U(0,1)": (lambda rng, m, k, n: (rng.random((m, k)), rng.random((k, n))), True),
    "units within 2^±300": (_in_units, True),
    "lognormal, sigma 1": (_lognormal(1), True),
    "lognormal, sigma 4": (_lognormal(4), False),
    "cancelling": (_cancelling, True),
    "subnormal elements": (lambda rng, m, k, n: tuple(_normal(rng, m, k, n)[i] * s for i, s in SMALL), True),
    "one huge element": (_one_huge, False),
}
"""How A and B are made, and whether residues make the product."""
SMALL = ((0, 2.0**-1060), (1, 2.0**300))


@pytest.mark.parametrize("k", [1500, pytest.param(8192, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", INPUTS)
def test_residues_are_no_less_accurate_than_float64(name: str, k: int) -> None:
    """benchmarks/residues.py has many more."""
    draw, by_residues = INPUTS[name]
    a, b = draw(np.random.default_rng(3), 30, k, 20)
    found, count = specification.multiply(a, b.T, tolerance=scales.TOLERANCE)
    assert (found is not None) == (count > 0) == by_residues
    if by_residues:
        (norm, largest), theirs = errors(found, a, b), errors(in_turn(a, b), a, b)
        assert norm <= theirs[0]
        assert largest <= 1.5 * theirs[1]


def test_no_fewer_moduli_would_do() -> None:
    """With 14, errors come near to those of float64 sums; with 13, they are larger."""
    a, b = _normal(np.random.default_rng(3), 30, 4096, 20)
    (theirs, _), (few, _), (fewer, _), (taken, _) = (
        errors(c, a, b)
        for c in (
            in_turn(a, b),
            *(specification.multiply(a, b.T, (count,))[0] for count in (14, 13, FLOATING[0])),
        )
    )
    assert 0.3 * theirs < few < theirs < fewer
    assert taken < 0.1 * theirs


def test_small_integers_stay_exact() -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-60, 61, shape).astype("f8") for shape in ((30, 2000), (2000, 20)))
    found, _ = specification.multiply(a, b.T)
    assert np.array_equal(found, a @ b)


# ---- on a GPU ----------------------------------------------------------------------------------


@pytest.fixture
def cupy() -> Any:
    """CuPy, on a machine with a Hopper GPU."""
    from conftest import gpu_missing

    if why := gpu_missing():
        pytest.skip(why)
    import cupy

    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("wgmma exists on compute capability 9.0 only")
    return cupy


SHAPES = (
    (1, 1, 1), (2, 3, 17), (129, 193, 65), (128, 256, 128), (257, 385, 129), (300, 70, 1025), (1, 2000, 3),
    (2000, 1, 3), (513, 257, 64),
)  # fmt: skip


def _random(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    if "int" in dtype:
        return rng.integers(-(2**15), 2**15, shape).astype(dtype)
    real = rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 10, (1, shape[1]))
    return real + 1j * rng.standard_normal(shape) if dtype == "complex128" else real


def _stored(cupy: Any, values: np.ndarray) -> Any:
    """On the device, in rows of a multiple of 256 bytes, poison past their ends and below the last."""
    pitch = -(-max(1, values.shape[1] * values.itemsize) // 256) * 256 // values.itemsize
    full = np.full((values.shape[0] + 1, pitch), 99 if values.dtype.kind == "i" else np.nan, values.dtype)
    full[:-1, : values.shape[1]] = values
    return cupy.asarray(full)


@pytest.mark.gpu
@pytest.mark.parametrize(("trans_a", "trans_b"), tuple(product((False, True), repeat=2)))
@pytest.mark.parametrize("dtype", ["float64", "complex128", "int16", "int32"])
def test_kernels_agree_with_the_specification(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, trans_a: bool, trans_b: bool
) -> None:
    """Bit by bit: α and β are powers of two, so that C is rounded once whether or not products are fused."""
    from ooc_gemm.cuda_kernels.ozaki import Ozaki

    ozaki_always(monkeypatch, "residues")
    gemm, rng = Ozaki(trans_a, trans_b, (dtype, dtype)), np.random.default_rng(7)
    stream = cupy.cuda.Stream(non_blocking=True)
    out = "int64" if "int" in dtype else dtype
    for (m, n, k), (alpha, beta), pad in product(SHAPES, ((1, 0), (2, -4)), (0, 3)):
        a, b = _random(rng, (m, k), dtype), _random(rng, (n, k), dtype)
        c = _random(rng, (m, n + pad), "int16").astype(out)
        if beta == 0:
            c[:] = -1 if out == "int64" else np.nan
        da, db = _stored(cupy, a.T if trans_a else a), _stored(cupy, b if trans_b else b.T)
        dc = cupy.asarray(c)
        cupy.cuda.runtime.deviceSynchronize()
        left, right, target = ((x.data.ptr, x.shape[1]) for x in (da, db, dc))
        gemm(as_product(m, n, k, alpha, *left, *right, beta, *target), stream)
        stream.synchronize()
        case, found, old = f"m={m} n={n} k={k} α={alpha} β={beta} pad={pad}", dc.get(), c[:, :n]
        if "int" in dtype:
            want = a.astype("i8") @ b.astype("i8").T
        else:
            want, count = specification.multiply(a, b, tolerance=1e30)
            assert gemm.moduli() == count, case
        want = alpha * want + (beta * old if beta else 0)
        assert np.array_equal(found[:, :n], want), case
        assert np.array_equal(found[:, n:], c[:, n:], equal_nan=out != "int64"), f"padding of C, {case}"


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1024, 8192])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("name", INPUTS)
def test_it_is_no_less_accurate_than_cublas(cupy: Any, name: str, dtype: str, k: int) -> None:
    """benchmarks/accuracy.py has many more."""
    from ooc_gemm.cuda_kernels.ozaki import Ozaki

    rng, (m, n) = np.random.default_rng(3), (2048, 2304)
    draw, by_residues = INPUTS[name]
    a, b = draw(rng, m, k, n)
    if dtype == "complex128":
        x, y = draw(rng, m, k, n)
        a, b = a + 1j * x, b + 1j * y
    da, db, found = cupy.asarray(a), cupy.asarray(np.ascontiguousarray(b.T)), cupy.full((m, n), np.nan, dtype)
    gemm = Ozaki(False, True, (dtype, dtype))
    gemm(
        as_product(m, n, k, 1, da.data.ptr, k, db.data.ptr, k, 0, found.data.ptr, n),
        cupy.cuda.get_current_stream(),
    )
    rows, cols = np.arange(0, m, 32), np.arange(0, n, 32)
    part, theirs = np.ix_(rows, cols), (da @ db.T).get()
    (norm, largest), (their_norm, their_largest) = (
        errors(x[part], a[rows], b[:, cols]) for x in (found.get(), theirs)
    )
    print(f"{name}, k = {k}: {norm:.3e} and {largest:.3e}, cuBLAS {their_norm:.3e} and {their_largest:.3e}")
    assert (gemm.moduli() > 0) == by_residues
    assert norm <= their_norm * (1 if by_residues else 1.5)
    assert largest <= 1.5 * their_largest


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "above"), [(1025, 0), (2500, 0), (1100, 3000), (2050, 257)])
@pytest.mark.parametrize("dtype", ["float64", "int32"])
def test_a_symmetric_product_is_made_up_to_its_diagonal(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, m: int, above: int
) -> None:
    from ooc_gemm.cuda_kernels.ozaki import Ozaki

    ozaki_always(monkeypatch, "residues")
    x = _random(np.random.default_rng(1), (above + m, 200), dtype)
    dx, dc = _stored(cupy, x), cupy.full((m, above + m), 77, "int64" if dtype == "int32" else dtype)
    stream, ld = cupy.cuda.Stream(non_blocking=True), dx.shape[1]
    cupy.cuda.runtime.deviceSynchronize()
    a = dx[above:].data.ptr
    gemm = Ozaki(False, True, (dtype, dtype))
    wanted = as_product(m, above + m, 200, 1, a, ld, dx.data.ptr, ld, 0, dc.data.ptr, above + m)
    gemm(wanted, stream, Strips(lower=True, above=above))
    stream.synchronize()
    wide = x.astype("i8" if dtype == "int32" else "g")
    want, counts = wide[above:] @ wide.T, np.tri(m, above + m, above, dtype=bool)
    bound = 0 if dtype == "int32" else 2.0**-53 * (abs(wide[above:]) @ abs(wide.T) + abs(want))
    assert ((abs(dc.get() - want) <= bound) | ~counts).all()
