"""C leaves a GPU in its own type: without one, cupy_on_cpu.py stands in for CuPy and the driver."""

import cupy_on_cpu
import numpy as np
import pytest
import zarr
from conftest import gpu_missing, make
from faults import with_blocks

import ooc_gemm
from ooc_gemm.cuda_kernels import complex_gemm, split, tensor  # noqa: F401 (replaced in part)
from ooc_gemm.devices.cuda import check, gemm, narrowing  # noqa: F401
from ooc_gemm.devices.cuda.device import CUDA
from ooc_gemm.devices.several import Several
from ooc_gemm.run.observer import Observer
from ooc_gemm.run.request import Operand, Request
from ooc_gemm.run.retry import carry_out, result_of

RNG = np.random.default_rng(7)


@pytest.fixture
def stand_in(monkeypatch):
    cupy_on_cpu.install(monkeypatch, "90")


@pytest.fixture
def gpu():
    if why := gpu_missing():
        pytest.skip(why)


def cut(monkeypatch, bm, bn, bk):
    """Plans of blocks of these sizes."""
    monkeypatch.setattr("ooc_gemm.run.prepare.make_plan", with_blocks(bm, bn, bk))


PAIRS = [
    # types of A and B, of C, and of the sums
    *(("i1", out, "i4") for out in ("i1", "u1", "i2", "u2", "u4")),
    *(("i2", out, "f8") for out in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")),
    *(("i8", out, "i8") for out in ("i1", "u1", "i2", "u2", "i4", "u4", "u8")),
    ("f2", "f2", "f4"), ("f4", "f2", "f4"), ("f8", "f2", "f8"), ("f8", "f4", "f8"), ("c16", "c8", "c16"),
    ("i8", "f2", "f8"), ("i4", "f4", "f8"),
]  # fmt: skip


def operands(dtype, out):
    """A and B whose product has numbers at all sizes that C holds, and exact sums."""
    dtype, out = np.dtype(dtype), np.dtype(out)
    a, b = np.zeros((290, 70), dtype), np.zeros((70, 230), dtype)
    low = 0 if out.kind == "u" or dtype.kind == "u" else -3
    if dtype.kind in "iu":
        a[:], b[:] = RNG.integers(low, 4, a.shape), RNG.integers(max(low, -1), 2, b.shape)
        return a, b
    a[:], b[0] = RNG.standard_normal(a.shape), 2.0 ** RNG.integers(-12, 5, 230)
    if dtype.kind == "c":
        a += 1j * RNG.standard_normal(a.shape)
    return a, b


def compare(device, dtype, out, sums, c, **options):
    """A product whose C is narrowed on the device, beside what NumPy makes of the same sums."""
    a, b = operands(dtype, out)
    if dtype == "i1":
        options["kernel"] = "mma-int8"
    result = ooc_gemm.multiply(a, b, c, device=device, out_dtype=out, verify=True, **options)
    found = result.array if c is None else zarr.open_array(c)[...]
    exact = a.astype("c16" if np.dtype(sums).kind == "c" else "f8") @ b
    exact = exact.astype(sums)
    assert found.dtype == np.dtype(out)
    if np.dtype(out).kind in "iu":
        assert np.array_equal(found, exact.astype(out))
    elif dtype == "c16":  # other libraries add up complex numbers in another order
        assert np.abs(found - exact).max() < 1e-5
    else:
        assert np.array_equal(found, exact.astype(out))
    assert result.overflowed == 0
    moved = result.plan.bytes_downloaded
    assert result.bytes_downloaded == moved == 290 * 230 * np.dtype(out).itemsize
    assert result.plan.ledger["encoding"] == 0
    return result


@pytest.mark.parametrize(("dtype", "out", "sums"), PAIRS)
def test_c_leaves_in_its_own_type(stand_in, monkeypatch, tmp_path, dtype, out, sums):
    cut(monkeypatch, 150, 120, 40)
    c = str(tmp_path / "c") if np.dtype(out).itemsize == 2 else None
    compare(CUDA(), dtype, out, sums, c, chunks=(50, 60))
    assert "narrow" in cupy_on_cpu.Kernel.launched


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "out", "sums"), PAIRS)
def test_c_leaves_a_gpu_in_its_own_type(gpu, monkeypatch, tmp_path, dtype, out, sums):
    cut(monkeypatch, 150, 120, 40)
    c = str(tmp_path / "c") if np.dtype(out).itemsize == 2 else None
    kernel = "cublas" if np.dtype(dtype).kind in "fc" else "auto"
    compare(CUDA(), dtype, out, sums, c, chunks=(50, 60), kernel=kernel)


@pytest.mark.parametrize(
    ("dtype", "out"), [("f4", "f4"), ("f2", "f4"), ("i1", "i4"), ("i1", "i8"), ("i8", "i8"), ("c8", "c16")]
)
def test_sums_that_are_no_wider_than_c_leave_as_they_are(stand_in, dtype, out):
    a, b = operands(dtype, out)
    kernel = "mma-int8" if dtype == "i1" else "cublas" if dtype != "i8" else "ffma"
    result = ooc_gemm.multiply(a, b, device=CUDA(), out_dtype=out, kernel=kernel)
    assert np.abs(result.array - a.astype("c16") @ b.astype("c16")).max() < 1e-3
    assert "narrow" not in cupy_on_cpu.Kernel.launched
    assert result.bytes_downloaded == result.plan.bytes_downloaded


MIXED = [("i1", "f4", "f4"), ("f2", "f4", "f4"), ("f4", "i2", "f4"), ("u1", "f8", "f8"), ("f4", "c16", "c16")]


def mixed(device, left, right, panel):
    a, b = RNG.integers(0, 9, (140, 60)).astype(left), RNG.integers(0, 9, (60, 110)).astype(right)
    result = ooc_gemm.multiply(a, b, device=device, kernel="cublas")
    assert result.array.dtype == np.dtype(panel)
    assert np.array_equal(result.array, a.astype("c16") @ b)
    assert result.bytes_uploaded == result.plan.bytes_uploaded == a.nbytes + b.nbytes


@pytest.mark.parametrize(("left", "right", "panel"), MIXED)
def test_operands_are_uploaded_in_their_own_types(stand_in, left, right, panel):
    mixed(CUDA(), left, right, panel)


@pytest.mark.gpu
@pytest.mark.parametrize(("left", "right", "panel"), MIXED)
def test_operands_are_uploaded_to_a_gpu_in_their_own_types(gpu, left, right, panel):
    mixed(CUDA(), left, right, panel)


# ---- what C's type does not hold ---------------------------------------------------------------


def beyond(out):
    """A and B of which some products are past the limits of `out`, one is infinite and one is no number."""
    most = float(np.finfo(np.dtype(out)).max)
    a, b = np.zeros((300, 40), "f8"), np.zeros((40, 200), "f8")
    a[:, 0] = RNG.choice([0.25, -0.25], 300)
    b[0] = 1
    b[0, [3, 77, 141]] = 8 * most  # 900 elements
    a[5, 0] = 1 / most
    a[250, 1], b[1, 60] = np.inf, 1
    a[251, 2], b[2, 61] = np.nan, 1
    return a, b


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("out", ["f2", "f4"])
@pytest.mark.parametrize("place", ["array", "zstd"])
@pytest.mark.parametrize("bands", [1, 2])
def test_what_became_infinite_is_counted(stand_in, monkeypatch, tmp_path, out, place, bands):
    cut(monkeypatch, 192, 120, 40)
    a, b = beyond(out)
    with np.errstate(all="ignore"):
        sums = a @ b
        want = sums.astype(out)
    device = CUDA() if bands == 1 else Several([CUDA(), CUDA()])
    options = {"chunks": (64, 60)}
    if place == "zstd":
        options |= {"c": str(tmp_path / "c"), "compressor": "zstd"}
    said = []
    result = ooc_gemm.multiply(a, b, device=device, out_dtype=out, notice=said.append, **options)
    found = result.array if place == "array" else zarr.open_array(tmp_path / "c")[...]
    assert np.array_equal(found, want, equal_nan=True)
    lost = int(np.count_nonzero(np.isinf(want) & np.isfinite(sums)))
    assert 300 < lost < 900
    assert result.overflowed == lost
    assert said[0].startswith(f"{lost} elements are infinite in ")
    assert result.bytes_downloaded == result.plan.bytes_downloaded == want.nbytes


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("rows", [300, 384])
def test_a_mirrored_chunk_counts_as_often_as_it_is_stored(stand_in, monkeypatch, tmp_path, transpose, rows):
    cut(monkeypatch, 128, 128, 40)
    a = np.zeros((rows, 40), "f2")
    a[:, 0] = RNG.integers(1, 300, rows)
    x = a.T.copy() if transpose else a
    path = str(tmp_path / "c")
    result = ooc_gemm.gram(x, path, transpose=transpose, device=CUDA(), chunks=(64, 64), notice=[].append)
    sums = a.astype("f4") @ a.T.astype("f4")
    with np.errstate(over="ignore"):
        want = sums.astype("f2")
    assert np.array_equal(zarr.open_array(path)[...], want)
    assert result.overflowed == np.isinf(want).sum() > 0
    assert result.bytes_downloaded == result.plan.bytes_downloaded == want.nbytes


def test_devices_that_share_mirrored_chunks_leave_conversion_to_the_host(stand_in, monkeypatch):
    a = np.zeros((300, 40), "f2")
    a[:, 0] = RNG.integers(1, 300, 300)
    cut(monkeypatch, 300, 300, 40)
    result = ooc_gemm.gram(a, device=Several([CUDA(), CUDA()]), chunks=(300, 300), notice=[].append)
    with np.errstate(over="ignore"):
        want = (a.astype("f4") @ a.T.astype("f4")).astype("f2")
    assert np.array_equal(result.array, want)
    assert result.overflowed == np.isinf(want).sum() > 0
    assert result.bytes_downloaded == result.plan.bytes_downloaded == 4 * want.size


LIMITS = [("i1", "i1"), ("i1", "u1"), ("i2", "i2"), ("i8", "i4"), ("i8", "u8"), ("i8", "u4"), ("i2", "u8")]


@pytest.mark.parametrize(("dtype", "out"), LIMITS)
@pytest.mark.parametrize("side", ["least", "greatest"])
def test_an_integer_past_the_limits_is_an_error(stand_in, tmp_path, dtype, out, side):
    """Those at the limits are none."""
    info, path = np.iinfo(out), str(tmp_path / "c")
    end = int(info.min if side == "least" else info.max)
    if abs(end) > 2**62 or (dtype == "i2" and end > 2**29):
        end = 0
    # end = 2·half + odd as a sum of products that the inputs hold
    top = min(int(np.iinfo(dtype).max), 2**31)
    ones, k = np.ones((70, 1), dtype), [end]
    while any(abs(v) > top for v in k):
        k = [w for v in k for w in (v // 2, v - v // 2)]
        if len(k) > 4096:
            pytest.skip("the inputs hold too little for that")
    b = np.repeat(np.array([*k, 0], dtype)[:, None], 50, 1)
    a = np.repeat(ones, len(b), 1)
    device = {"device": CUDA(), "out_dtype": out, "chunks": (32, 32)}
    if dtype == "i1":
        device["kernel"] = "mma-int8"
    if end:
        assert np.all(ooc_gemm.multiply(a, b, **device).array == end)
    b[-1, 37] = -1 if side == "least" else 1
    a[:, -1] = 0
    a[66, -1] = 1
    if end == 0 and side == "greatest":
        return
    value = end + (1 if side == "greatest" else -1)
    with pytest.raises(ooc_gemm.RangeError, match=f"the result: the exact value {value} does not fit"):
        ooc_gemm.multiply(a, b, **device)
    with pytest.raises(ooc_gemm.RangeError, match=f"c: the exact value {value} does not fit"):
        ooc_gemm.multiply(a, b, path, **device)
    with pytest.raises(ooc_gemm.InputError, match="does not exist"):
        ooc_gemm.multiply(a, path, device="cpu")


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_resumed_run_does_not_count_chunks_that_were_done(stand_in, monkeypatch, tmp_path):
    """Elements of a chunk count in the run that stores it."""
    from ooc_gemm.storage.write import target

    cut(monkeypatch, 192, 120, 40)
    a, b = beyond("f2")
    make(tmp_path / "a", a, chunks=(64, 40))
    make(tmp_path / "b", b, chunks=(40, 60))
    args = str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "c")
    options = {"device": CUDA(), "out_dtype": "f2", "chunks": (64, 60), "notice": [].append}
    write, left = target.Target.write, [5]

    def failing(self, part, slot):
        left[0] -= 1
        if left[0] < 0:
            raise ooc_gemm.StoreError("full")
        return write(self, part, slot)

    start = target.Target.start
    with monkeypatch.context() as patch:
        patch.setattr(target.Target, "start", lambda self, *args: lambda: failing(self, *args))
        with pytest.raises(ooc_gemm.StoreError, match="full"):
            ooc_gemm.multiply(*args, **options)
    assert target.Target.start is start
    with np.errstate(all="ignore"):
        sums = a @ b
        want = sums.astype("f2")
    result = ooc_gemm.multiply(*args, resume=True, device=CUDA(), notice=[].append)
    assert np.array_equal(zarr.open_array(args[2])[...], want, equal_nan=True)
    lost = int(np.count_nonzero(np.isinf(want) & np.isfinite(sums)))
    assert 0 < result.overflowed < lost
    assert result.bytes_downloaded == result.plan.bytes_downloaded < want.nbytes


# ---- with what else happens to a block ---------------------------------------------------------


def test_strips_are_narrowed_one_after_the_other(stand_in, monkeypatch):
    cut(monkeypatch, 300, 270, 64)
    monkeypatch.setattr(gemm, "STRIP_ELEMENTS", 1 << 12)
    a, b = (RNG.integers(-8, 9, shape).astype("f2") for shape in ((600, 130), (130, 540)))
    a[7, 0], b[0, 333] = 6e4, 6e4
    result = ooc_gemm.multiply(a, b, kernel="cublas", device=CUDA(), chunks=(100, 90), notice=[].append)
    with np.errstate(over="ignore"):
        want = (a.astype("f4") @ b.astype("f4")).astype("f2")
    assert np.array_equal(result.array, want)
    assert result.overflowed == np.isinf(want).sum() > 0
    assert cupy_on_cpu.Kernel.launched.count("narrow") > 4


@pytest.mark.parametrize("alpha", [1, 0])
@pytest.mark.parametrize("k", [0, 30])
def test_an_old_c_is_read_and_narrowed_again(stand_in, tmp_path, alpha, k):
    a, b = RNG.standard_normal((140, k)), RNG.standard_normal((k, 90))
    old = RNG.standard_normal((140, 90)).astype("f4")
    path = make(tmp_path / "c", old, chunks=(50, 40))
    result = ooc_gemm.multiply(a, b, path, alpha=alpha, beta=-2, device=CUDA(), verify=True)
    assert result.verified
    want = (alpha * (a @ b) - 2.0 * old).astype("f4")
    assert np.abs(zarr.open_array(path)[...] - want).max() < 1e-6
    assert "narrow" in cupy_on_cpu.Kernel.launched
    assert result.bytes_downloaded == result.plan.bytes_downloaded == want.nbytes


class Negative:
    """A change to the elements of a finished C."""

    name, nbytes = "negative", 0

    def apply(self, values, row, col):
        assert values.dtype == np.float32
        np.negative(values, out=values)


def test_what_is_finished_on_the_host_leaves_as_sums(stand_in):
    a, b = operands("f2", "f2")
    request = Request(Operand(a), Operand(b), device=CUDA(), memory_limit="4GiB", finish=Negative())
    result = result_of(carry_out(request, Observer()))
    assert np.array_equal(result.array, -(a.astype("f4") @ b).astype("f2"))
    assert "narrow" not in cupy_on_cpu.Kernel.launched
    assert result.bytes_downloaded == result.plan.bytes_downloaded == 4 * result.array.size
