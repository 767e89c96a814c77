"""Exact products of 8-bit integers on a GPU, whatever their depth, α and β; without one on cupy_on_cpu.py.

Operands of extreme values make every int32 sum that is too deep wrap around, and so show.
"""

import cupy_on_cpu
import numpy as np
import pytest
import zarr
from conftest import gpu_missing, make
from faults import with_blocks

import ooc_gemm
from ooc_gemm.cuda_kernels import integers, tensor, wgmma  # noqa: F401 (replaced in part)
from ooc_gemm.devices.cuda import check, choice  # noqa: F401
from ooc_gemm.devices.cuda.device import CUDA
from ooc_gemm.devices.cuda.rates import panel_depth
from ooc_gemm.planning.machine import Rates
from ooc_gemm.planning.problem import Matrix
from ooc_gemm.run.prepare import prepare
from ooc_gemm.run.request import Operand, Request
from ooc_gemm.storage.read.source import Opened, Source

RNG = np.random.default_rng(5)
PAIRS = (("i1", "i1"), ("u1", "u1"), ("i1", "u1"), ("u1", "i1"))
LEAST = {"i1": -128, "u1": 255}
"""The values of the largest magnitude."""
DEEP = {"i1": 131_072, "u1": 33_026}
"""The least depth at which sums of their squares pass int32."""


@pytest.fixture(params=["90", "80"])
def capability(request, monkeypatch):
    cupy_on_cpu.install(monkeypatch, request.param)
    return request.param


@pytest.fixture(params=[pytest.param("gpu", marks=pytest.mark.gpu), "90", "80"])
def device(request, monkeypatch):
    """A GPU, or what stands in for one of a compute capability."""
    if request.param != "gpu":
        cupy_on_cpu.install(monkeypatch, request.param)
    elif why := gpu_missing():
        pytest.skip(why)
    return CUDA()


def random(shape, dtype):
    info = np.iinfo(dtype)
    return RNG.integers(info.min, info.max, shape, dtype, endpoint=True)


def stored(x, transposed):
    return np.ascontiguousarray(x.T) if transposed else x


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_int32_holds_sums_of_this_depth_and_no_more(a, b):
    depth, largest = integers.exact_depth(*(np.dtype(x).name for x in (a, b))), abs(LEAST[a] * LEAST[b])
    assert depth % 256 == 0
    assert depth * largest < 2**31 <= (depth + 257) * largest


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_auto_takes_the_tensor_cores_at_any_depth(capability, a, b):
    """Also where β·C alone passes int32, and where sums might pass float64's integers."""
    kernel = {"90": "int8", "80": "mma-int8"}[capability]
    for k, alpha, beta, out in (
        (9, 1, 0, "i4"),
        (1 << 20, 1, 0, "i4"),
        (9, 1, 1, "i4"),
        (1 << 28, 2**20, 0, "i8"),
    ):
        bound = alpha * abs(LEAST[a] * LEAST[b]) * k + beta * 2**31
        found = CUDA().arithmetic(
            np.dtype(a), np.dtype(b), np.dtype(out), (9, 9, k), bound, "auto", "highest"
        )
        assert (found.kernel, found.panels, found.exact) == (kernel, (np.dtype(a), np.dtype(b)), True)
        assert found.block == (np.int32 if bound < 2**31 else np.int64)
        limits = CUDA().limits(found, None)
        assert limits.workspace == (0 if bound < 2**31 else integers.SCRATCH_BYTES)


def test_older_gpus_have_no_such_instructions(monkeypatch):
    cupy_on_cpu.install(monkeypatch, "75")
    byte = np.dtype("i1")
    found = CUDA().arithmetic(byte, byte, np.dtype("i4"), (9, 9, 9), 9 * 2**14, "auto", "highest")
    assert (found.kernel, found.panel) == ("cublas", np.float64)


@pytest.mark.parametrize(("a", "b"), PAIRS)
@pytest.mark.parametrize("sign", ["extreme", pytest.param("random", marks=pytest.mark.slow)])
def test_sums_past_int32_are_exact(device, a, b, sign):
    k = max(DEEP[a], DEEP[b]) + 300
    x, y = random((5, k), a), random((k, 7), b)
    if sign == "extreme":
        x[:3], y[:, 2:] = LEAST[a], LEAST[b]
    want = x.astype("i8") @ y.astype("i8")
    assert sign == "random" or np.abs(want).max() >= 2**31
    for transposed in (False, True):
        result = ooc_gemm.multiply(
            stored(x, transposed), stored(y, not transposed), transpose_a=transposed,
            transpose_b=not transposed, device=device, out_dtype="i8", verify=True,
        )  # fmt: skip
        assert result.kernel in ("int8", "mma-int8")
        assert np.array_equal(result.array, want)


def test_a_sum_that_does_not_fit_int32_is_an_error(device):
    x = np.full((4, DEEP["i1"]), -128, "i1")
    with pytest.raises(ooc_gemm.RangeError, match="2147483648 does not fit int32"):
        ooc_gemm.gram(x, device=device)
    x[:, 0] = 0  # one less
    assert (ooc_gemm.gram(x, device=device).array == 2**31 - 128**2).all()


def test_partial_sums_may_pass_int32_where_the_whole_does_not(device):
    """The first half of k is as large as the second one, but of the other sign."""
    k = 4 * DEEP["i1"]
    x, y = np.full((3, k), -128, "i1"), np.full((k, 5), -128, "i1")
    x[:, k // 2 :] = 127
    want = x.astype("i8") @ y.astype("i8")
    assert np.abs(want).max() < 2**31 <= 128**2 * (k // 2)
    assert np.array_equal(ooc_gemm.multiply(x, y, device=device).array, want)


@pytest.mark.parametrize(("alpha", "beta"), [(1, 1), (-3, 2), (0, -1), (2**40, 0), (1, -(2**30))])
@pytest.mark.parametrize(("a", "b"), [("i1", "i1"), ("i1", "u1")])
def test_old_sums_are_kept(tmp_path, device, a, b, alpha, beta):
    """With every old value of int32, β makes sums pass int32 at any depth."""
    x, y = random((130, 70), a), random((70, 90), b)
    out = "i4" if abs(alpha) < 9 and abs(beta) < 9 else "i8"
    old = RNG.integers(-(2**29), 2**29, (130, 90), out)
    path = make(tmp_path / "c", old, chunks=(60, 50))
    want = alpha * (x.astype("i8") @ y.astype("i8")) + beta * old.astype("i8")
    assert out == "i8" or np.abs(want).max() < 2**31
    result = ooc_gemm.multiply(
        x, y, path, alpha=alpha, beta=beta, device=device, out_dtype=out, verify=True, force=beta == 0
    )
    assert result.kernel in ("int8", "mma-int8")
    assert np.array_equal(zarr.open_array(path)[...], want)


@pytest.mark.parametrize("dtype", ["i1", "u1"])
@pytest.mark.parametrize("beta", [0, 1])
def test_one_launch_makes_a_triangle(monkeypatch, tmp_path, device, dtype, beta):
    """Of a symmetric C, in tiles as high as 256 rows, whatever lies above the diagonal."""
    monkeypatch.setattr(integers, "TILE_ELEMENTS", 256 * 700)
    monkeypatch.setattr(wgmma, "LEAST_STRIP", 16)
    monkeypatch.setattr(wgmma.Wgmma, "choose", lambda self, *shape: (self.configs[0], 1))
    x = random((700, 90), dtype)
    want = x.astype("i8") @ x.astype("i8").T
    old = make(tmp_path / "c", want, chunks=(300, 300))
    ooc_gemm.gram(x, old, beta=beta, out_dtype="i8", device=device, verify=True, force=beta == 0)
    assert np.array_equal(zarr.open_array(old)[...], (1 + beta) * want)


def test_int64_is_guarded_too(device):
    x = np.full((3, 99), -128, "i1")
    with pytest.raises(ooc_gemm.RangeError, match="may exceed int64"):
        ooc_gemm.gram(x, alpha=2**50, out_dtype="i8", device=device)
    zeros = np.zeros_like(x)
    assert not ooc_gemm.gram(zeros, alpha=2**50, out_dtype="i8", device=device).array.any()


@pytest.mark.slow
@pytest.mark.parametrize(("bm", "bn", "bk"), [(100, 160, 150), (300, 320, 400)])
@pytest.mark.parametrize("dtypes", [("u1", "u1"), ("u1", "i1")])
def test_blocks_panels_tiles_and_parts(device, monkeypatch, bm, bn, bk, dtypes):
    """Tiles of C, and parts of k, are cut where neither blocks nor panels end."""
    monkeypatch.setattr("ooc_gemm.run.prepare.make_plan", with_blocks(bm, bn, bk))
    monkeypatch.setattr(integers, "TILE_ELEMENTS", 256 * 128)
    monkeypatch.setattr(integers, "TILE_COLUMNS", 128)
    monkeypatch.setattr(integers, "exact_depth", lambda a, b: 256)
    x, y = random((300, 700), dtypes[0]), random((700, 320), dtypes[1])
    result = ooc_gemm.multiply(
        x, y, alpha=3, chunks=(100, 160), device=device, out_dtype="i8", verify=True, kernel="mma-int8"
    )
    assert np.array_equal(result.array, 3 * (x.astype("i8") @ y.astype("i8")))


@pytest.mark.slow
@pytest.mark.parametrize("transpose", [False, True])
def test_a_symmetric_product_of_deep_sums(device, monkeypatch, transpose):
    monkeypatch.setattr("ooc_gemm.cuda_kernels.product.LEAST_STRIP", 64)
    monkeypatch.setattr(integers, "TILE_ELEMENTS", 256 * 32)
    monkeypatch.setattr(integers, "TILE_COLUMNS", 32)
    x = random((50, DEEP["u1"] + 50), "u1")
    x[10:] = 255
    want = x.astype("f8") @ x.astype("f8").T  # exact: below 2^53
    result = ooc_gemm.gram(
        stored(x, transpose), transpose=transpose, device=device, out_dtype="i8", chunks=(25, 25), verify=True
    )
    assert np.array_equal(result.array, want)
    assert want.max() >= 2**31


def test_a_wrong_sum_is_found(capability, monkeypatch):
    """The check of a block notices a multiple of 2^32."""
    wrong = cupy_on_cpu.Kernel.sum

    def wrapped(self, grid, m, n, slices, alpha, x, beta, c, ldc, skip):
        wrong(self, grid, m, n, slices, alpha, x, beta, c, ldc, skip)
        cupy_on_cpu.matrix(c, 1, 1, 1, "i8")[...] += 2**32

    monkeypatch.setattr(cupy_on_cpu.Kernel, "sum", wrapped)
    x = np.ones((40, 60), "i1")
    with pytest.raises(ooc_gemm.VerificationError):
        ooc_gemm.gram(x, alpha=2**20, out_dtype="i8", device=CUDA(), verify=True)


@pytest.mark.parametrize("dtype", ["i1", "i2", "i8"])
def test_pieces_are_transposed_by_a_kernel(capability, dtype):
    """CuPy's copies of a transposed array write single elements far apart."""
    x, y = random((70, 90), dtype) // 4, random((70, 50), dtype) // 4
    kernel = {"90": "int8", "80": "mma-int8"}[capability]
    if dtype == "i8":
        x, y = x >> 36, y >> 36
    result = ooc_gemm.multiply(x, y, transpose_a=True, device=CUDA(), out_dtype="i8", kernel=kernel)
    assert np.array_equal(result.array, x.T.astype("i8") @ y.astype("i8"))
    assert cupy_on_cpu.Kernel.launched.count("transpose") >= 2


@pytest.mark.parametrize("shape", [(0, 5, 7), (5, 0, 7), (5, 7, 0), (1, 1, 1)])
def test_empty_and_small_products(device, shape):
    m, k, n = shape
    x, y = random((m, k), "i1"), random((k, n), "u1")
    result = ooc_gemm.multiply(x, y, alpha=2**33, out_dtype="i8", device=device)
    assert np.array_equal(result.array, 2**33 * (x.astype("i8") @ y.astype("i8")))


class Fast(CUDA):
    """As fast as an H200, beside files in memory."""

    def rates(self, arithmetic):
        thin = panel_depth(1.4e15, arithmetic, 4.8e12)
        return Rates(1.4e15, 5e10, 1.5e10, 5e10, 5e10, shared=False, thin=thin)


def plan_of(dtype, k):
    """The plan of a gram of so deep a matrix of 16384 columns that nobody has."""
    s = Matrix(k, 16384, np.dtype(dtype).itemsize, 4096, 4096)
    a = Opened(Source("A", np.dtype(dtype), s), s)
    request = Request(
        Operand(a, transpose=True), Operand(a), device=Fast(), memory_limit="8GiB", symmetric=True,
        device_memory_limit="8GiB", writes=False,
    )  # fmt: skip
    return prepare(request.check()).plan


def test_panels_are_deep_where_reading_and_writing_c_takes_long(capability):
    """With panels of depth 1024 a block was read and written 96 times, and each time started in 16 strips."""
    for dtype, k, sums, depth in (
        ("i1", 98_304, 4, 2048),
        ("i1", 131_072, 8, 8192),
        ("u1", 400_000, 8, 8192),
    ):
        plan = plan_of(dtype, k)
        assert plan.problem.block_itemsize == sums
        assert plan.bk >= depth, (dtype, k)


def test_what_a_panel_costs_grows_with_what_is_moved_of_c(capability):
    byte = np.dtype("i1")
    narrow, wide = (
        CUDA().arithmetic(byte, byte, np.dtype("i4"), (9, 9, k), k * 2**14, "auto", "highest")
        for k in (9, 1 << 20)
    )
    single = CUDA().arithmetic(*[np.dtype("f4")] * 3, (9, 9, 9), 0, "auto", "highest")
    depths = [panel_depth(1e15, x, 1e12) for x in (single, narrow, wide)]
    assert depths == [8000, 8000, 24_000]
    for one in (single, wide):
        found, bandwidth = CUDA().rates(one), 2e9 * 1e6 / 8  # of the stand-in
        assert found.thin == panel_depth(found.flops, one, bandwidth)
    assert panel_depth(1e12, single, 1e12) == Rates.thin


WIDER = (("i2", "i2"), ("u2", "i2"), ("i4", "u2"), ("u4", "u4"), ("i8", "i1"), ("i8", "i8"), ("u8", "i4"))


def bits_of(a, b):
    """Bits of magnitudes whose sums of 300 products fit int64."""
    most = [np.iinfo(x).bits - (x[0] == "i") for x in (a, b)]
    while sum(most) > 52:
        most[int(most[1] > most[0])] -= 1
    return most


def of_bits(rng, shape, dtype, most):
    """Numbers of all magnitudes below 2^most, with the extremes among them."""
    least = -(2**most) if dtype[0] == "i" else 0
    x = rng.integers(least, 2**most - 1, shape, "i8", endpoint=True)
    x >>= rng.integers(0, most, shape)
    x.flat[:2] = least, 2**most - 1
    return x.astype(dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("a", "b"), WIDER)
@pytest.mark.parametrize(("alpha", "beta"), [(1, 0), (-3, 2)])
def test_wider_integers_are_cut_into_bytes(tmp_path, device, monkeypatch, a, b, alpha, beta):
    monkeypatch.setattr("ooc_gemm.run.prepare.make_plan", with_blocks(40, 60, 50))
    most = bits_of(a, b)
    x, y = of_bits(RNG, (40, 90), a, most[0]), of_bits(RNG, (90, 70), b, most[1])
    old = RNG.integers(-(2**58), 2**58, (40, 70))
    path = make(tmp_path / "c", old, chunks=(20, 30))
    kernel = "int8" if device.capability == 90 else "mma-int8"
    result = ooc_gemm.multiply(
        x, stored(y, True), path, transpose_b=True, alpha=alpha, beta=beta, device=device, kernel=kernel,
        verify=True, force=beta == 0, chunks=(20, 30) if beta == 0 else None,
    )  # fmt: skip
    assert result.kernel == kernel
    want = alpha * x.astype(object).dot(y.astype(object)) + beta * old.astype(object)
    assert np.array_equal(zarr.open_array(path)[...].astype(object), want)


@pytest.mark.slow
@pytest.mark.parametrize(("a", "extreme"), [("i2", -(2**15)), ("u2", 2**16 - 1), ("i4", -(2**31))])
@pytest.mark.parametrize("transpose", [False, True])
def test_deep_sums_of_wider_integers(device, monkeypatch, a, extreme, transpose):
    """Every byte of u2 is 255; parts of k end where int32 would overflow, and tiles before blocks do."""
    monkeypatch.setattr(integers, "TILE_ELEMENTS", 256 * 32)
    monkeypatch.setattr(integers, "TILE_COLUMNS", 32)
    k = DEEP["u1"] + 70 if a != "i4" else 2  # 2^62 each
    x = np.full((40, k), extreme, a)
    x[37:] = of_bits(RNG, (3, k), a, 15 if a != "i4" else 30)
    kernel = "int8" if device.capability == 90 else "mma-int8"
    if a == "i4":  # the diagonal of the first rows is 2^63
        with pytest.raises(ooc_gemm.RangeError, match="may exceed int64"):
            ooc_gemm.gram(x, device=device, kernel=kernel)
        x = x[:, :1]
    result = ooc_gemm.gram(
        stored(x, transpose), transpose=transpose, device=device, kernel=kernel, chunks=(20, 20), verify=True
    )
    assert np.array_equal(result.array, x.astype("i8") @ x.astype("i8").T)


def test_what_planes_take_stands_in_the_ledger(capability):
    kinds = np.dtype("i4"), np.dtype("u2")
    kernel = {"90": "int8", "80": "mma-int8"}[capability]
    found = CUDA().arithmetic(*kinds, np.dtype("i8"), (9, 9, 9), 2**60, kernel, "highest")
    assert found.panels == (np.int32, np.uint32)
    assert found.scratch == (4, 4)
    assert len(integers.plane_pairs(4)) == 16
    assert len(integers.plane_pairs(8)) == 36
    multiplied = integers.WideIntegers(kernel, "int32", "uint32")
    assert len({id(gemm.scratch) for gemm in multiplied._gemms.values()}) == 1 < len(multiplied._gemms)
    byte = CUDA().arithmetic(*[np.dtype("i1")] * 3, (9, 9, 9), 2**40, kernel, "highest")
    assert CUDA().rates(byte).flops == 16 * CUDA().rates(found).flops
    assert panel_depth(1e15, found, 1e12) == 16 * panel_depth(1e15, byte, 1e12)
