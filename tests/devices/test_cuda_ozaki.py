"""Whole products by ozaki2: on a GPU, or on cupy_on_cpu.py, where its kernels are their specification."""

import cupy_on_cpu
import numpy as np
import ozaki as specification
import pytest
import zarr
from conftest import gpu_missing, make
from faults import with_blocks
from precision import ozaki_always

import ooc_gemm
from ooc_gemm.cuda_kernels import fallback, ozaki, residues, scales  # noqa: F401 (replaced in part)
from ooc_gemm.cuda_kernels.product import Operand, Product, Strips
from ooc_gemm.devices.cuda import check, choice  # noqa: F401
from ooc_gemm.devices.cuda.arrays import ALIGN
from ooc_gemm.devices.cuda.device import CUDA
from ooc_gemm.planning import search

RNG = np.random.default_rng(6)
FLOATING, INTEGERS = ("f8", "c16"), ("i2", "i4", "u2", "u4")


@pytest.fixture(params=[pytest.param("gpu", marks=pytest.mark.gpu), "90"])
def device(request, monkeypatch):
    """A GPU, or what stands in for one."""
    cupy_on_cpu.Kernel.launched.clear()
    cupy_on_cpu.Kernel.decided.clear()
    if request.param != "gpu":
        cupy_on_cpu.install(monkeypatch, request.param)
    elif why := gpu_missing():
        pytest.skip(why)
    device = CUDA()
    if device.capability != 90:
        pytest.skip("wgmma exists on compute capability 9.0 only")
    return device


def random(shape, dtype):
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        info, most = np.iinfo(dtype), 2**28 // dtype.itemsize
        return RNG.integers(max(info.min, -most), min(info.max, most), shape, endpoint=True).astype(dtype)
    real = RNG.standard_normal(shape)
    return real + 1j * RNG.standard_normal(shape) if dtype.kind == "c" else real


def wide(x):
    return x.astype({"i": "i8", "u": "i8"}.get(x.dtype.kind, np.result_type(x, np.longdouble)))


def close(found, a, b, alpha=1, beta=0, c=None, units=4):
    """Whether each element is as near as so many units of 2⁻⁵³ of |A|·|B| and of C allow; integers are
    equal."""
    old = beta * wide(c) if beta else 0
    want = alpha * (wide(a) @ wide(b)) + old
    if found.dtype.kind == "i":
        return np.array_equal(found, want)
    size = abs(alpha) * (abs(a) @ abs(b)) + 2 * abs(want) + 2 * np.abs(old)
    return bool((abs(found - want) <= units * 2.0**-53 * size).all())


@pytest.mark.slow
@pytest.mark.parametrize("transpose", ["", "ab", "b"])
@pytest.mark.parametrize("path", ["residues", "fallback"])
@pytest.mark.parametrize("dtype", FLOATING)
def test_products_are_right(tmp_path, monkeypatch, device, dtype, path, transpose):
    ozaki_always(monkeypatch, path)
    a, b, c = random((130, 170), dtype), random((170, 150), dtype), random((130, 150), dtype)
    make(tmp_path / "c", c, chunks=(70, 60))
    operands = [x.T.copy() if name in transpose else x for name, x in (("a", a), ("b", b))]
    result = ooc_gemm.multiply(
        *operands, str(tmp_path / "c"), alpha=2, beta=-3, transpose_a="a" in transpose,
        transpose_b="b" in transpose, kernel="ozaki2", device=device, verify=True,
    )  # fmt: skip
    assert (result.kernel, result.verified) == ("ozaki2", True)
    units = 4 if path == "residues" else 4 * 170**0.5
    assert close(zarr.open_array(tmp_path / "c")[...], a, b, 2, -3, c, units)


@pytest.mark.parametrize("dtypes", [*((dtype, dtype) for dtype in INTEGERS), ("i2", "u4"), ("u2", "i1")])
@pytest.mark.parametrize("transpose", ["", "ab"])
def test_integers_are_exact(tmp_path, device, dtypes, transpose):
    a, b = random((130, 170), dtypes[0]), random((170, 150), dtypes[1])
    c = random((130, 150), "i4").astype("i8")
    make(tmp_path / "c", c, chunks=(70, 60))
    operands = [x.T.copy() if name in transpose else x for name, x in (("a", a), ("b", b))]
    result = ooc_gemm.multiply(
        *operands, str(tmp_path / "c"), alpha=-2, beta=3, transpose_a="a" in transpose,
        transpose_b="b" in transpose, kernel="ozaki2", device=device, verify=True,
    )  # fmt: skip
    assert result.kernel == "ozaki2"
    assert np.array_equal(zarr.open_array(tmp_path / "c")[...], -2 * (wide(a) @ wide(b)) + 3 * c)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_the_largest_integers_are_exact(device, dtype):
    """As deep as int64 allows, in elements of the largest magnitude."""
    info = np.iinfo(dtype)
    most = max(-int(info.min), int(info.max))
    k = min(3000, (2**63 - 1) // most**2)
    x = np.full((3, max(1, k)), info.min or info.max, dtype)
    if most**2 >= 2**63:
        x //= 2
    want = wide(x) @ wide(x).T
    assert np.array_equal(ooc_gemm.multiply(x, x.T, kernel="ozaki2", device=device).array, want)
    assert want.max() > 2**40


def test_sums_past_int64_are_an_error(device):
    x = np.full((3, 99), -(2**31), "i4")
    with pytest.raises(ooc_gemm.RangeError, match="may exceed int64"):
        ooc_gemm.gram(x, kernel="ozaki2", device=device)


@pytest.mark.parametrize("dtype", ["f4", "c8", "i1", "i8", "f2"])
def test_other_types_are_refused(device, dtype):
    x = np.ones((4, 4), dtype)
    with pytest.raises(ooc_gemm.InputError, match="ozaki2"):
        ooc_gemm.multiply(x, x, kernel="ozaki2", device=device)


@pytest.mark.parametrize("path", ["residues", "fallback"])
@pytest.mark.parametrize(("alpha", "beta"), [(2 - 1j, -3j), (1j, 2), (0, 1j), (-1.5, 0)])
@pytest.mark.parametrize("adjoint", ["", "a", "b", "ab"])
def test_complex_factors_and_adjoints(tmp_path, monkeypatch, device, path, alpha, beta, adjoint):
    ozaki_always(monkeypatch, path)
    a, b, c = (random(shape, "c16") for shape in ((70, 90), (90, 50), (70, 50)))
    make(tmp_path / "c", c, chunks=(40, 30))
    operands = [
        ooc_gemm.Operand(x.conj().T.copy(), adjoint=True) if name in adjoint else x
        for name, x in (("a", a), ("b", b))
    ]
    ooc_gemm.multiply(
        *operands, str(tmp_path / "c"), alpha=alpha, beta=beta, kernel="ozaki2", device=device, verify=True,
        force=beta == 0,
    )  # fmt: skip
    assert close(zarr.open_array(tmp_path / "c")[...], a, b, alpha, beta, c, 60)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["residues", "fallback"])
@pytest.mark.parametrize("dtype", [*FLOATING, "i2"])
def test_blocks_panels_tiles_and_strips(monkeypatch, device, dtype, path):
    """Blocks, panels, and tiles of C whose sums fit the scratch memory, end in different places; rows of the
    last block leave before others are finished."""
    from ooc_gemm.devices.cuda import gemm

    ozaki_always(monkeypatch, path)
    monkeypatch.setattr("ooc_gemm.run.prepare.make_plan", with_blocks(300, 160, 96))
    monkeypatch.setattr(gemm, "STRIP_ELEMENTS", 1 << 12)
    monkeypatch.setattr(residues, "SCRATCH_BYTES", 256 * 144 * 16 * (3 if dtype == "c16" else 1))
    monkeypatch.setattr(ozaki, "TILE_COLUMNS", 144)
    a, b = random((300, 150), dtype), random((150, 320), dtype)
    result = ooc_gemm.multiply(a, b, kernel="ozaki2", device=device, chunks=(100, 160), verify=True)
    assert close(result.array, a, b, units=60)


@pytest.mark.parametrize("path", ["residues", "fallback"])
@pytest.mark.parametrize("dtype", [*FLOATING, "i4"])
@pytest.mark.parametrize("transpose", [False, True])
def test_a_symmetric_product(monkeypatch, device, dtype, transpose, path):
    ozaki_always(monkeypatch, path)
    monkeypatch.setattr("ooc_gemm.cuda_kernels.product.LEAST_STRIP", 64)
    monkeypatch.setattr(residues, "SCRATCH_BYTES", 256 * 400 * 16 * (3 if dtype == "c16" else 1))
    x = random((400, 50), dtype)
    stored = np.ascontiguousarray(x.T) if transpose else x
    result = ooc_gemm.gram(
        stored, transpose=transpose, kernel="ozaki2", device=device, chunks=(100, 100), verify=True
    )
    assert close(result.array, x, x.T, units=60)


@pytest.mark.parametrize("dtype", FLOATING)
def test_nan_and_infinity_are_where_numpy_has_them(monkeypatch, device, dtype):
    ozaki_always(monkeypatch, "chosen")
    a, b = random((60, 80), dtype), random((80, 70), dtype)
    a[3, 4], b[7, 8], b[9, 10] = np.nan, np.inf, -np.inf
    found = ooc_gemm.multiply(a, b, kernel="ozaki2", device=device).array
    rows, cols = np.arange(60) != 3, (np.arange(70) != 8) & (np.arange(70) != 10)
    assert np.isnan(found[3]).all()
    assert not np.isfinite(found[:, ~cols]).any()
    part = np.ix_(rows, cols)
    assert close(found[part], a[rows], b[:, cols], units=60)


def in_units(rng, a, b):
    units = 2.0 ** rng.integers(-300, 301, a.shape[1])
    return a * units, b / units[:, None]


def one_huge(rng, a, b):
    a[np.arange(len(a)), rng.integers(0, a.shape[1], len(a))] = 1e9
    return a, b


FAMILIES = {
    # how elements of N(0, 1) are changed, and the number of moduli that is taken; 0: the fallback
    "N(0, 1)": (lambda rng, a, b: (a, b), 15),
    "U(0, 1)": (lambda rng, a, b: (rng.random(a.shape), rng.random(b.shape)), 15),
    "units within 2^±300 along k": (in_units, 15),
    "rows of all magnitudes": (
        lambda rng, a, b: (a * 2.0 ** rng.integers(-300, 301, (len(a), 1)), b * 2.0**-200), 15
    ),
    "subnormal elements": (lambda rng, a, b: (a * 2.0**-1060, b * 2.0**100), 15),
    "the second half cancels": (lambda rng, a, b: (np.hstack([a, a]), np.vstack([b, 1e-3 * b - b])), 15),
    "lognormal, sigma 1": (lambda rng, a, b: (np.exp(a), np.exp(b)), 16),
    "half of A zeros": (lambda rng, a, b: (a * (rng.random(a.shape) < 0.5), b), 15),
    "lognormal, sigma 1.5": (lambda rng, a, b: (np.exp(1.5 * a), np.exp(1.5 * b)), 16),
    "lognormal, sigma 4": (lambda rng, a, b: (np.exp(4 * a), np.exp(4 * b)), 0),
    "one huge element a row": (one_huge, 0),
    "1 % of A": (lambda rng, a, b: (a * (rng.random(a.shape) < 0.01), b), 0),
    "zeros": (lambda rng, a, b: (0 * a, b), 15),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_the_path_of_families_of_inputs(monkeypatch, device, name):
    """And that errors stay far below those of sums in float64, which are about .4·2⁻⁵³·|A|·|B|."""
    ozaki_always(monkeypatch, "chosen")
    monkeypatch.setattr(search, "depths", lambda p, budget: [max(1, p.k)])  # one decision, for all of k
    change, moduli = FAMILIES[name]
    rng = np.random.default_rng(3)
    a, b = change(rng, rng.standard_normal((120, 2048)), rng.standard_normal((2048, 90)))
    result = ooc_gemm.multiply(a, b, kernel="ozaki2", device=device)
    if cupy_on_cpu.Kernel.decided:  # not on a GPU
        assert cupy_on_cpu.Kernel.decided == [moduli]
    else:
        assert specification.multiply(a, b.T)[1] == moduli
    if moduli:
        want = a.astype(np.longdouble) @ b
        size = np.abs(a).astype(np.longdouble) @ np.abs(b)
        assert (np.abs(result.array - want) <= 2.0**-53 * (0.25 * size + np.abs(want)) + 5e-324).all()


def test_products_that_do_not_pay_are_made_in_float64(device):
    a, b = random((40, 300), "f8"), random((300, 50), "f8")
    result = ooc_gemm.multiply(a, b, kernel="ozaki2", device=device)
    assert close(result.array, a, b, units=60)
    if "dmma" in cupy_on_cpu.Kernel.launched:
        assert not {"residues", "lines"} & set(cupy_on_cpu.Kernel.launched)
    assert ozaki.residues_pay(8192, 8192, 8192, "float64")
    assert not ozaki.residues_pay(64, 8192, 8192, "float64")
    assert not ozaki.residues_pay(8192, 8192, 64, "float64")


@pytest.mark.parametrize("dtype", ["f8", "c16", "i2"])
def test_deeper_products_are_cut_along_k(monkeypatch, device, dtype):
    """Sums of residues are at most 2³⁰."""
    ozaki_always(monkeypatch, "residues")
    monkeypatch.setattr(ozaki, "DEPTH", 128)
    a, b = random((60, 300), dtype), random((300, 40), dtype)
    result = ooc_gemm.multiply(a, b, kernel="ozaki2", alpha=2, device=device)
    assert close(result.array, a, b, 2, units=60)


def test_more_lines_than_are_numbered_are_multiplied_in_bands(monkeypatch, device):
    monkeypatch.setattr(ozaki, "MOST_LINES", 64)
    a, b = random((300, 30), "i4"), random((30, 170), "i4")
    for x, y, options in ((a, b, {}), (a.T.copy(), b.T.copy(), {"transpose_a": True, "transpose_b": True})):
        result = ooc_gemm.multiply(x, y, kernel="ozaki2", device=device, verify=True, **options)
        assert np.array_equal(result.array, wide(a) @ wide(b))
    x = random((200, 30), "i4")
    assert np.array_equal(ooc_gemm.gram(x, kernel="ozaki2", device=device).array, wide(x) @ wide(x).T)


@pytest.mark.parametrize("trans", [(False, False), (True, True), (False, True)])
@pytest.mark.parametrize("dtype", ["f8", "c16", "i4"])
def test_operands_that_do_not_lie_along_k_are_turned(monkeypatch, dtype, trans):
    """As `bench kernels` multiplies them."""
    cupy_on_cpu.install(monkeypatch)
    ozaki_always(monkeypatch, "residues")
    m, n, k = 37, 45, 129
    a, b = random((m, k), dtype), random((k, n), dtype)
    name = np.dtype(dtype).name
    out = np.full((m, n + 3), -1, "i8" if dtype == "i4" else dtype)
    left, right = (rows(x.T if turned else x) for x, turned in zip((a, b), trans, strict=True))
    gemm = ozaki.Ozaki(*trans, (name, name))
    product = Product(
        m, n, k, 3.0, Operand(left.ctypes.data, left.shape[1]), Operand(right.ctypes.data, right.shape[1]),
        0.0, Operand(out.ctypes.data, n + 3),
    )  # fmt: skip
    stops = []
    gemm(product, cupy_on_cpu.Stream(), Strips([(0, 20), (20, 37)], after=stops.append))
    assert close(out[:, :n], a, b, 3)
    assert (out[:, n:] == -1).all()
    assert stops == [20, 37]


def rows(x):
    """Rows that begin at multiples of 16 elements."""
    full = np.full((len(x), -(-x.shape[1] // 16) * 16), 99, x.dtype)
    full[:, : x.shape[1]] = x
    return full


@pytest.mark.parametrize("dtype", [*FLOATING, *INTEGERS])
@pytest.mark.parametrize("real", [True, False])
def test_residues_and_scratch_memory_are_in_the_ledger(monkeypatch, dtype, real):
    """Every byte that the kernel allocates, whatever path its products take."""
    if not real and dtype != "c16":
        pytest.skip("complex factors are for complex numbers")
    cupy_on_cpu.install(monkeypatch)
    monkeypatch.setattr(residues, "SCRATCH_BYTES", 1 << 24)
    ozaki_always(monkeypatch, "fallback")
    taken = cupy_on_cpu.memory_taken(monkeypatch)
    shapes, alpha = ((700, 1300), (1300, 660)), 2.0 if real else 1j
    a, b = (
        random(shape, "u1").astype(dtype) if dtype[0] in "iu" else random(shape, dtype) for shape in shapes
    )
    options = {"alpha": alpha, "kernel": "ozaki2", "device": CUDA()}
    ledger = ooc_gemm.plan(a, b, **options).device_ledger
    ooc_gemm.multiply(a, b, **options)
    counted = sum(ledger.values()) - ledger["baseline"]
    assert 0.9 * counted < sum(taken) <= counted + 16 * ALIGN


def test_the_plan_says_what_it_costs(device):
    kind = np.dtype("f8")
    found = device.arithmetic(kind, kind, kind, (9000, 9000, 9000), 0, "ozaki2", "highest")
    assert found.scratch == (16, 16)
    assert found.turns
    assert device.limits(found, None).workspace == residues.SCRATCH_BYTES
    kind = np.dtype("c16")
    assert device.arithmetic(kind, kind, kind, (9, 9, 9), 0, "ozaki2", "highest").scratch == (48, 48)
    for name, k, planes in (
        ("i2", 70_000, 6),
        ("i2", 1, 4),
        ("u2", 70_000, 7),
        ("i4", 70_000, 9),
        ("u4", 9, 9),
    ):
        kind = np.dtype(name)
        found = device.arithmetic(kind, kind, np.dtype("i8"), (9, 9, k), 2**60, "ozaki2", "highest")
        assert (found.scratch, found.block) == ((planes, planes), np.int64)
        assert 0 < device.rates(found).flops < device.most_flops("ozaki2", kind.name)


def test_predictions_count_a_product_for_each_residue(device):
    rates = {}
    for name in (*FLOATING, "f4"):
        kind, kernel = np.dtype(name), "fp16x3" if name == "f4" else "ozaki2"
        found = device.arithmetic(kind, kind, kind, (9000, 9000, 9000), 0, kernel, "highest")
        rates[name] = device.rates(found)
        assert rates[name].flops < device.most_flops(kernel, kind.name)
    assert rates["f8"].flops == pytest.approx(3 * rates["c16"].flops)


@pytest.mark.parametrize(
    ("dtype", "shape", "kernel"),
    [
        ("f8", (4096, 4096, 4096), "ozaki2"),
        ("f8", (2048, 2048, 65536), "cublas"),
        ("f8", (8192, 8192, 512), "cublas"),
        ("c16", (2048, 2048, 2048), "ozaki2"),
        ("c16", (1024, 1024, 2048), "cublas"),
        ("i2", (2048, 2048, 2048), "ozaki2"),
        ("i2", (1024, 1024, 2048), "cublas"),
        ("i4", (1024, 1024, 2048), "ozaki2"),
        ("i4", (256, 256, 2048), "ffma"),
        ("i8", (4096, 4096, 4096), "ffma"),
    ],
)
@pytest.mark.parametrize("capability", [90, 80])
def test_auto_takes_residues_where_they_are_faster(dtype, shape, kernel, capability):
    type_ = np.dtype(dtype)
    out = np.dtype("i8") if type_.kind == "i" else type_
    bound = 2**30 * shape[2] if dtype == "i2" else 2**62
    case = choice.Case(type_, type_, out, shape, bound, "highest", capability)
    if capability == 80 and kernel == "ozaki2":
        kernel = "ffma" if dtype == "i4" else "cublas"
    found = choice.fastest(case)
    assert found.kernel == kernel
    assert (found.other is not None) == (kernel == "ozaki2")


@pytest.mark.parametrize(("dtype", "other"), [("f8", "cublas"), ("c16", "cublas"), ("i4", "ffma")])
def test_another_kernel_is_chosen_where_memory_is_too_small_for_residues(monkeypatch, tmp_path, dtype, other):
    cupy_on_cpu.install(monkeypatch, "90")
    for name in "ab":
        zarr.create_array(tmp_path / name, shape=(8192, 8192), chunks=(512, 512), dtype=dtype)
    kernels, limits = [], ("8GiB", "2GiB", "1GiB")
    for limit in limits:
        plan = ooc_gemm.plan(tmp_path / "a", tmp_path / "b", device="cuda", device_memory_limit=limit)
        kernels.append(plan.problem.kernel)
    assert kernels[0].startswith("ozaki2: ")
    assert kernels[-1] == f"{other}: the memory is too small for panels of ozaki2"
    with pytest.raises(ooc_gemm.BudgetError, match="smallest"):
        ooc_gemm.plan(tmp_path / "a", tmp_path / "b", device="cuda", device_memory_limit="560MiB")
    with pytest.raises(ooc_gemm.BudgetError, match="smallest"):
        ooc_gemm.plan(
            tmp_path / "a", tmp_path / "b", device="cuda", device_memory_limit="1GiB", kernel="ozaki2"
        )
