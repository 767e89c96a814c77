"""α and β are applied to the finished sums, in every type, also where any of them is very large or small."""

import ctypes
import mmap

import numpy as np
import pytest
import zarr
from arrays import assert_close, matrix
from conftest import gpu_missing, make, ooc
from faults import with_blocks

import ooc_gemm
import ooc_gemm.run.prepare
from ooc_gemm.devices.cpu import blas
from ooc_gemm.devices.cpu.blas import gemm, scale_in_place

ROUNDING = {"f2": 2e-3, "f4": 2e-6, "c8": 2e-6, "f8": 5e-15, "c16": 5e-15}
MAP_NORESERVE = 0x4000
"""Linux: address space, and no memory until it is touched."""
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def needs_its_device(request):
    case = getattr(request.node, "callspec", None)
    if case and case.params.get("kind") == "cuda" and (why := gpu_missing()):
        pytest.skip(why)


@pytest.fixture(params=[False, True], ids=["one panel", "several panels"])
def blocks(request, monkeypatch):
    """Several panels: β is for the first of them alone, α for each."""
    if request.param:
        monkeypatch.setattr(ooc_gemm.run.prepare, "make_plan", with_blocks(64, 32, 48))


def kernel_for(kind, dtype):
    """On a GPU, complex64 goes by way of real products; `auto` takes those for large matrices only."""
    return "fp16x3" if kind == "cuda" and dtype == "c8" else "auto"


def wide(x):
    return x.astype("c16" if x.dtype.kind == "c" else "f8")


def assert_near(found, want, bound):
    """As `assert_close`, also for numbers whose squares float64 cannot hold."""
    largest = np.abs(want).max(initial=np.finfo(float).tiny)
    assert_close(wide(found) / largest, want / largest, bound)


# ------------------------------------------------------------------------------ finite numbers


SCALES = [
    # type of A and B, α, magnitudes of A and B
    ("c8", 1e30, 1e-20, 1e10), ("c8", 1e-30, 1e20, 1e10), ("c8", 1e30 - 2e30j, 1e-20, 1e10),
    ("c8", 1e-30j, 1e20, 1e10), ("c8", 1e-30 + 1e-30j, 1e15, 1e15), ("f4", 1e30, 1e-20, 1e10),
    ("f4", 1e-30, 1e20, 1e10), ("c16", 1e300, 1e-200, 1e100), ("c16", 1e-300j, 1e200, 1e50),
    ("f8", 1e-300, 1e200, 1e50),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "alpha", "left", "right"), SCALES)
@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.usefixtures("blocks")
def test_a_large_or_small_alpha_loses_nothing(kind, dtype, alpha, left, right, tmp_path):
    """α·A or α·B alone would overflow, or be subnormal; with β, too, and for a symmetric product."""
    kernel = kernel_for(kind, dtype)
    a, b = matrix((129, 150), dtype, 1), matrix((150, 77), dtype, 2)
    a, b = (a * a.real.dtype.type(left)), (b * b.real.dtype.type(right))
    product = wide(a) @ wide(b)
    found = ooc_gemm.multiply(
        a, b, alpha=alpha, device=kind, kernel=kernel, verify=True, chunks=(64, 32)
    ).array
    assert_near(found, alpha * product, ROUNDING[dtype])
    old = (matrix((129, 77), dtype, 3) * abs(alpha) * left * right).astype(dtype)
    path = make(tmp_path / "c", old, chunks=(64, 32), compressors=None)
    beta = 0.5 - 1j if a.dtype.kind == "c" else -0.5
    ooc_gemm.multiply(
        a, b, path, alpha=alpha, beta=beta, device=kind, kernel=kernel, verify=True, chunks=(64, 32)
    )
    assert_near(zarr.open_array(path)[:], alpha * product + beta * wide(old), ROUNDING[dtype])


@pytest.mark.parametrize(
    ("dtype", "alpha"), [("c8", 1e30), ("c8", 1e-30 - 2e-30j), ("f4", 1e-30), ("c16", 1e-300j)]
)
@pytest.mark.parametrize("kind", DEVICES)
def test_a_large_or_small_alpha_of_a_symmetric_product(kind, dtype, alpha):
    a = matrix((129, 150), dtype, 1) * np.dtype(dtype).type(abs(alpha) ** -0.4)
    found = ooc_gemm.gram(a, alpha=alpha, device=kind, kernel=kernel_for(kind, dtype), verify=True).array
    assert_near(found, alpha * (wide(a) @ wide(a).T), ROUNDING[dtype])
    assert np.array_equal(found, found.T)


@pytest.mark.parametrize(
    ("types", "out"), [(("f4", "f4"), "c8"), (("f2", "f4"), "c8"), (("i2", "i4"), "c16")]
)
@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.usefixtures("blocks")
def test_a_complex_alpha_of_real_operands(kind, types, out):
    a, b = matrix((70, 90), types[0], 1), matrix((90, 40), types[1], 2)
    for alpha in (2 - 3j, 1j):
        found = ooc_gemm.multiply(
            a, b, alpha=alpha, out_dtype=out, device=kind, verify=True, chunks=(64, 32)
        ).array
        assert_near(found, alpha * (a.astype("f8") @ b.astype("f8")), ROUNDING[out])


# ------------------------------------------------------------------------------ infinities


def formula(a, b, alpha, beta, old):
    """Real and imaginary parts of α·a·b + β·old with a real α and β, each from real numbers alone."""
    with np.errstate(all="ignore"):
        real, imag = a.real @ b.real - a.imag @ b.imag, a.real @ b.imag + a.imag @ b.real
        kept = (0, 0) if old is None else (beta * old.real, beta * old.imag)
        return alpha * real + kept[0], alpha * imag + kept[1]


def assert_parts(found, parts, bound):
    for part, want in zip((found.real, found.imag), parts, strict=True):
        assert np.array_equal(np.isnan(part), np.isnan(want))
        assert np.array_equal(part[np.isinf(want)], want[np.isinf(want)])
        finite = np.isfinite(want)
        assert finite.any()
        assert np.allclose(part[finite], want[finite], rtol=bound, atol=bound * np.abs(want[finite]).max())


@pytest.mark.parametrize("alpha", [1, 2, -0.5])
@pytest.mark.parametrize("dtype", ["c8", "c16"])
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.usefixtures("blocks")
def test_a_real_alpha_and_beta_leave_infinities_alone(kind, dtype, alpha, tmp_path):
    """A row whose sums overflow in one part only, an infinite element, an old C with infinite parts: a
    complex product with α + 0i would make NaN of their other parts."""
    if kind == "cuda" and dtype == "c16":
        pytest.skip("cuBLAS multiplies by α + 0i, as NumPy does")
    kernel = kernel_for(kind, dtype)
    rng = np.random.default_rng(5)
    a, b = (matrix(shape, dtype, seed) for shape, seed in (((129, 150), 1), ((150, 77), 2)))
    large = np.finfo(dtype).max / 1e3
    a[3], b[:, 7] = (
        large + 1j / large,
        1e4 + 1j,
    )  # sums of large·1e4 overflow, those of the other parts do not
    a[9, 11] = np.inf + 1j
    b[5, 70] = 2 - 1j * np.inf
    old = matrix((129, 77), dtype, 3)
    old[rng.integers(0, 129, 30), rng.integers(0, 77, 30)] = np.inf + 0j
    old[40, 40] = complex(1, -np.inf)
    found = ooc_gemm.multiply(
        a, b, alpha=alpha, device=kind, kernel=kernel, verify=True, chunks=(64, 32)
    ).array
    parts = formula(a, b, alpha, 0, None)
    assert np.isinf(parts[0][3, 7])
    assert np.isfinite(parts[1][3, 7])
    assert_parts(found, parts, 1e-4)
    for beta in (1, 3):
        path = make(tmp_path / f"c{beta}", old, chunks=(64, 32), compressors=None)
        ooc_gemm.multiply(
            a, b, path, alpha=alpha, beta=beta, device=kind, kernel=kernel, verify=True, chunks=(64, 32)
        )
        assert_parts(zarr.open_array(path)[:], formula(a, b, alpha, beta, old), 1e-4)
    path = make(tmp_path / "only", old, chunks=(64, 32), compressors=None)
    ooc_gemm.multiply(a[:, :0], b[:0], path, beta=-2, device=kind, kernel=kernel)
    assert_parts(zarr.open_array(path)[:], (-2 * old.real, -2 * old.imag), 0)


@pytest.mark.parametrize("alpha", [2, 2j])
@pytest.mark.parametrize("kind", DEVICES)
def test_an_alpha_with_one_part_makes_no_nan_of_infinity(kind, alpha):
    a, b = np.full((70, 4), 1e30 + 0j, "c8"), np.full((4, 66), 1e30 + 0j, "c8")
    found = ooc_gemm.multiply(a, b, alpha=alpha, device=kind, kernel=kernel_for(kind, "c8")).array
    infinite, other = (found.real, found.imag) if alpha == 2 else (found.imag, found.real)
    assert (infinite == np.inf).all()
    assert (other == 0).all()


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16", "f2"])
@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.usefixtures("blocks")
def test_with_alpha_zero_operands_are_not_looked_at(kind, dtype, tmp_path):
    a, b = np.full((129, 150), np.nan, dtype), np.full((150, 77), np.inf, dtype)
    old = matrix((129, 77), dtype, 3)
    for beta in (0, 1, -2):
        path = make(tmp_path / f"c{beta}", old, chunks=(64, 32), compressors=None)
        new = {"force": True, "chunks": (64, 32)} if beta == 0 else {}
        ooc_gemm.multiply(a, b, path, alpha=0, beta=beta, device=kind, verify=True, **new)
        assert np.array_equal(zarr.open_array(path)[:], (beta * old).astype(dtype))


@pytest.mark.parametrize("dtype", ["f4", "c8", "f8", "c16"])
@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.usefixtures("blocks")
def test_the_check_knows_that_sums_overflow_before_alpha_makes_them_small(kind, dtype):
    """As in BLAS, what is infinite stays so, whatever α is: that is no fault of the device. Where a GPU adds
    up small products of float32 in float64, nothing is infinite, and all is right."""
    large = float(np.finfo(dtype).max) ** 0.5 * 8
    a, b = matrix((70, 90), dtype, 1), matrix((90, 40), dtype, 2)
    a, b = (x * x.real.dtype.type(large) for x in (a, b))
    result = ooc_gemm.multiply(
        a, b, alpha=1 / large, device=kind, kernel=kernel_for(kind, dtype), verify=True, chunks=(64, 32)
    )
    assert result.verified
    finite = np.isfinite(result.array)
    if kernel_for(kind, dtype) == "auto":
        assert not finite.all()
    right = (wide(a) / large) @ wide(b)
    assert_near(np.where(finite, result.array, 0), np.where(finite, right, 0), 1e-5)


# ------------------------------------------------------------------------------ what no type can hold


@pytest.mark.parametrize(
    ("dtype", "options", "words"),
    [
        ("f4", {"alpha": 1e300}, "alpha is 1e\\+300.*float32"),
        ("f4", {"alpha": 1e-60}, "alpha is 1e-60.*float32"),
        ("f4", {"alpha": 1e-40}, "alpha is 1e-40.*float32"),
        ("f2", {"alpha": 1e39}, "alpha is 1e\\+39.*float32"),
        ("c8", {"alpha": 1 + 1e40j}, "alpha is .*complex64"),
        ("c8", {"alpha": 1e-50j}, "alpha is 1e-50j.*complex64"),
        ("i8", {"alpha": 2**63}, "alpha is 9223372036854775808.*int64"),
        ("i1", {"alpha": -(2**70)}, "alpha is .*int"),
    ],
)
def test_a_scalar_that_the_sums_type_cannot_hold_is_refused(dtype, options, words):
    """float32(1e300) is infinite and would make NaN of zeros; float32(1e-60) is 0."""
    a = np.zeros((3, 3), dtype)
    with pytest.raises(ooc_gemm.InputError, match=words):
        ooc_gemm.multiply(a, a, device="cpu", **options)


def test_a_beta_that_the_sums_type_cannot_hold_is_refused(tmp_path):
    a = np.ones((3, 3), "f4")
    path = make(tmp_path / "c", a)
    for beta in ("1e300", "1e-60"):
        done = ooc("multiply", path, path, tmp_path / "d", "--beta", beta)
        assert done.code == 2
    with pytest.raises(ooc_gemm.InputError, match=r"beta is 1e-60.*float32"):
        ooc_gemm.multiply(a, a, path, beta=1e-60, device="cpu")
    assert np.array_equal(zarr.open_array(path)[:], a)


def test_a_small_part_of_a_complex_scalar_does_not_matter():
    a = matrix((5, 6), "c8", 1)
    found = ooc_gemm.multiply(a, a.T, alpha=1 + 1e-60j, device="cpu").array
    assert_near(found, wide(a) @ wide(a).T, 1e-6)


# ------------------------------------------------------------------------------ the parts of it


@pytest.mark.parametrize("char", "FD")
@pytest.mark.parametrize("shape", [(1, 1, 1), (300, 270, 600), (2, 600, 3), (257, 1, 300), (4, 5, 0)])
def test_products_by_parts_agree_with_blas(char, shape):
    """`by_parts` takes over where a sum might overflow; here none does."""
    (m, n, k), rng = shape, np.random.default_rng(8)

    def draw(*sides):
        return (rng.standard_normal(sides) + 1j * rng.standard_normal(sides)).astype(char)

    for a, b in ((draw(m, k), draw(k, n)), (draw(k, m).T, draw(n, k).T)):
        for alpha, beta in ((1, 0), (2 - 1j, 1), (-3, 1), (2j, 0)):
            c = draw(m, n + 3)[:, :n]
            if beta == 0:
                c[...] = np.nan
            want = alpha * (wide(a) @ wide(b)) + (wide(c) if beta else 0)
            blas.by_parts(a, b, c, alpha, beta)
            assert_near(c, want, 1e-6 if char == "F" else 1e-14)


@pytest.fixture(params=["blas", "numpy"])
def library(request, monkeypatch):
    """With the library's CBLAS interface, and as if it had none."""
    gemm.cache_clear()
    if request.param == "numpy":
        monkeypatch.setattr(blas, "_library", lambda: None)
    yield request.param
    gemm.cache_clear()


def test_gemm_with_and_without_cblas(library):
    name, run = gemm("F")
    assert name == library
    a, b = np.full((3, 4), 1e30 + 0j, "F"), np.full((4, 5), 1e30 + 0j, "F")
    c = np.full((3, 5), complex(np.inf, 2), "F")
    run(a, b, c, 2.0, 3.0)
    assert (c.real == np.inf).all()
    assert (c.imag == 6).all()


def test_a_library_that_counts_in_32_bits(monkeypatch):
    """Rows that lie further apart than that go to NumPy; NumPy's own library here counts in 64."""
    asked = []

    class Library:
        """Its functions write nothing, and take what is passed as 32-bit integers."""

        def __getattr__(self, name):
            return ctypes.CFUNCTYPE(
                None,
                *[ctypes.c_int] * 6,
                ctypes.c_float,
                *[ctypes.c_void_p, ctypes.c_int] * 2,
                ctypes.c_float,
                ctypes.c_void_p,
                ctypes.c_int,
            )(lambda *args: asked.append(args))

    gemm.cache_clear()
    monkeypatch.setattr(blas, "_library", lambda: (Library(), "cblas_", ""))
    _, run = gemm("f")
    gemm.cache_clear()
    memory = mmap.mmap(-1, 17 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    flat = np.frombuffer(memory, "f4")
    a = np.lib.stride_tricks.as_strided(flat, (2, 3), (2**33, 4))
    a[:] = [[1, 2, 3], [4, 5, 6]]
    b, c = np.ones((3, 4), "f4"), np.zeros((2, 4), "f4")
    run(a, b, c, 2.0, 0.0)
    assert not asked
    assert c.tolist() == [[12] * 4, [30] * 4]
    run(np.ones((2, 3), "f4"), b, c, 2.0, 0.0)
    assert len(asked) == 1
    del a, flat
    memory.close()


def test_the_bounds_of_complex_sums(monkeypatch):
    """Numbers whose squares are too large are multiplied by the library all the same, if no sum overflows."""
    called = []
    monkeypatch.setattr(blas, "by_parts", lambda *args: called.append(args))
    for char, size in (("F", 1e15), ("F", 1e-15), ("D", 1e150), ("D", 1e-150)):
        a = np.full((3, 4), size * (1 - 2j), char)
        c = np.zeros((3, 3), char)
        gemm(char)[1](a, a.T, c, 1.0, 0.0)
        assert not called
        assert_near(c, np.full((3, 3), 4 * (1 - 2j) ** 2) * size * size, 1e-6)
    for value in (np.nan, np.inf, 1e19):
        a = np.ones((3, 4), "F")
        a[1, 2] = value
        gemm("F")[1](a, a.T, np.zeros((3, 3), "F"), 1.0, 0.0)
        assert called.pop()


def test_scaling_in_place():
    x = np.array([[np.inf, 1 + 2j, complex(1, np.nan)]], "c8")
    scale_in_place(x, 2.0)
    assert x[0, :2].tolist() == [complex(np.inf, 0), 2 + 4j]
    assert x[0, 2].real == 2
    assert np.isnan(x[0, 2].imag)
    scale_in_place(x, 1j)
    assert x[0, 0].imag == np.inf
    assert x[0, 0].real == 0
    scale_in_place(x, 0)
    assert not x.any()
