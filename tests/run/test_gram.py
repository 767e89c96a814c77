"""A·Aᵀ and Aᵀ·A: half the reads, half the products, both halves of C."""

from dataclasses import replace

import numpy as np
import pytest
import zarr
from arrays import LAYOUTS, assert_close, matrix
from conftest import Recording, make

import ooc_gemm
import ooc_gemm.run.rates
from ooc_gemm.engine.ring import Ring
from ooc_gemm.storage.read import compressed

MiB = 1 << 20


@pytest.fixture(autouse=True)
def thin_strips(monkeypatch):
    """So that small blocks are made in several, on every device."""
    monkeypatch.setattr("ooc_gemm.cuda_kernels.product.LEAST_STRIP", 64)


class Slow(Recording):
    """Reads as if from a disk, so that a cache pays."""

    def rates(self, arithmetic):
        return replace(super().rates(arithmetic), read=1e7, touch=1e10)


def budgets(*args, device, **options):
    """Limits from the least on: of the memory that blocks lie in."""
    name, rest = "memory_limit", {}
    if device == "cuda":
        name, rest = "device_memory_limit", {"memory_limit": "4GiB"}
    with pytest.raises(ooc_gemm.BudgetError) as small:
        ooc_gemm.gram(*args, device=device, **{name: 1}, **rest, **options)
    least = getattr(small.value, f"minimum_{name}")
    for spare in (0, 1, 2, 4, 64):
        yield {name: least + spare * MiB, **rest}


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16", "i1", "u1", "i2", "i4", "i8"])
def test_types(dtype, device):
    exact = np.dtype(dtype).kind in "iu"
    wide = "i8" if exact else "c16" if np.dtype(dtype).kind == "c" else "f8"
    for shape in ((1, 1), (2, 17), (129, 33), (700, 300), (5, 0), (0, 5)):
        for transpose in (False, True):
            a = matrix(shape[::-1] if transpose else shape, dtype, 1)
            out = "i8" if exact and dtype not in ("i1", "u1") else None
            result = ooc_gemm.gram(a, transpose=transpose, out_dtype=out, alpha=2, device=device)
            left = (a.T if transpose else a).astype(wide)
            assert result.plan.problem.symmetric
            assert np.array_equal(result.array, result.array.T)
            if exact:
                assert np.array_equal(result.array, 2 * (left @ left.T))
            else:
                bound = {"f2": 2e-3, "f4": 1e-6, "c8": 1e-6}.get(dtype, 1e-14)
                assert_close(result.array, 2 * (left @ left.T), bound)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("layout", [pytest.param("tiny", marks=pytest.mark.slow), *list(LAYOUTS)[1:]])
def test_layouts_and_exact_bytes(tmp_path, layout, transpose, device):
    a = matrix((301, 300), "f4", 1)
    path, c = make(tmp_path / "a", a, **LAYOUTS[layout]), str(tmp_path / "c")
    left = (a.T if transpose else a).astype("f8")
    result = ooc_gemm.gram(path, c, transpose=transpose, device=device)
    found = zarr.open_array(c)[:]
    assert_close(found, left @ left.T, 1e-6)
    assert np.array_equal(found, found.T)
    assert ooc_gemm.verify(path, path, c, transpose_a=transpose, transpose_b=not transpose).ok
    assert result.bytes_written == result.plan.bytes_written
    assert result.bytes_read == result.plan.bytes_read


@pytest.mark.slow
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(
    "storage", [{}, {"chunks": (100, 100)}, {"chunks": (60, 90)}, {"chunks": (50, 50), "shards": (100, 50)}]
)
def test_many_blocks(tmp_path, storage, transpose, device):
    a = matrix((607, 725), "f4", 1)
    path = make(tmp_path / "a", a.T if transpose else a, chunks=(100, 130), compressors=None)
    c, expected, counts = str(tmp_path / "c"), a.astype("f8") @ a.T, set()
    options = {"transpose": transpose, "force": True, **storage}
    for limits in budgets(path, c, device=device, **options):
        result = ooc_gemm.gram(path, c, device=device, **limits, **options)
        found, plan = zarr.open_array(c)[:], result.plan
        assert_close(found, expected, 1e-6)
        assert result.bytes_read == plan.bytes_read
        assert result.bytes_written == plan.bytes_written
        if plan.problem.symmetric:
            assert np.array_equal(found, found.T)
            counts.add(plan.block_count)
    assert max(counts) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"compressors": None}, {}], ids=["raw", "zstd"])
@pytest.mark.parametrize("transpose", [False, True])
def test_a_strip_is_kept_for_both_of_its_uses(tmp_path, monkeypatch, layout, transpose):
    # The rates of the device decide, not those of files in memory.
    monkeypatch.setattr(ooc_gemm.run.rates, "_known", lambda usual, *others: usual)
    monkeypatch.setattr(compressed, "STACKED_BYTES", 0)  # or so few slots hold too few pieces of a strip
    a = matrix((700, 500), "f8", 1)
    path = make(tmp_path / "a", a.T if transpose else a, chunks=(64, 50), **layout)
    c, cached, opened = str(tmp_path / "c"), False, []
    real = Ring.open

    def open_turn(ring, buffers):
        opened.append(ring._open - ring._waited)
        real(ring, buffers)

    monkeypatch.setattr(Ring, "open", open_turn)
    options = {"transpose": transpose, "force": True, "chunks": (100, 100), "device": Slow()}
    for limits in budgets(path, c, **options):
        opened.clear()
        result = ooc_gemm.gram(path, c, **limits, **options)
        assert_close(zarr.open_array(c)[:], a @ a.T, 1e-13)
        assert result.bytes_read == result.plan.bytes_read
        if result.plan.found:  # a piece is uploaded before the turn in which it is used again is opened
            assert set(opened) == {-1}
        cached |= result.plan.cache_slots > 0 and result.plan.block_count > 1
        whole = ooc_gemm.multiply(
            path, path, c, transpose_a=transpose, transpose_b=not transpose, device=Slow(), force=True,
            chunks=(100, 100), **limits,
        )  # fmt: skip
        assert result.bytes_read <= (0.65 if result.plan.cache_slots else 0.5) * whole.bytes_read
        assert result.plan.lower_bound_bytes <= result.bytes_read + result.bytes_written
    assert cached


def test_what_a_run_takes_half_of():
    a = matrix((600, 500), "f4", 1)
    with pytest.raises(ooc_gemm.BudgetError) as least:
        ooc_gemm.gram(a, chunks=(100, 100), memory_limit=1, device="cpu")
    device = Recording()
    result = ooc_gemm.gram(a, chunks=(100, 100), memory_limit=least.value.minimum_memory_limit, device=device)
    plan = result.plan
    down = -(-600 // plan.bm)
    assert plan.block_count == result.blocks == down * (down + 1) // 2 > 1
    mirrored = [entry for entry in device.log if entry[0] == "mirror"]
    assert len(mirrored) == sum(block.diagonal for block in plan.blocks()) == down
    downloads = [chunk for name, *_, chunk in device.log if name == "download"]
    assert sorted(downloads) == [(i, j) for i in range(6) for j in range(6)]
    assert plan.problem.flops == 600 * 601 * 500
    assert result.tflops == pytest.approx(plan.problem.flops / result.seconds / 1e12)


def test_nan_and_infinity_come_out_where_numpy_has_them(device):
    a = matrix((400, 300), "f4", 1)
    a[3, 4], a[205, 6] = np.nan, np.inf
    found = ooc_gemm.gram(a, device=device).array
    with np.errstate(invalid="ignore"):
        expected = a @ a.T
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    assert np.array_equal(np.isinf(found), np.isinf(expected))


def test_complex_is_not_conjugated(device):
    a = matrix((40, 30), "c16", 1)
    found = ooc_gemm.gram(a, device=device).array
    assert_close(found, a @ a.T, 1e-14)
    assert not np.allclose(found, a @ a.conj().T)


def test_with_beta_it_is_a_multiplication(tmp_path, device):
    a, c = matrix((100, 60), "f4", 1), matrix((100, 100), "f4", 3)
    path = make(tmp_path / "c", c, chunks=(30, 30), compressors=None)
    result = ooc_gemm.gram(a, path, alpha=0.5, beta=-2, device=device)
    assert not result.plan.problem.symmetric
    assert_close(zarr.open_array(path)[:], 0.5 * (a.astype("f8") @ a.T) - 2.0 * c, 1e-6)


def test_chunks_that_allow_no_square_blocks(tmp_path):
    a = matrix((901, 300), "f4", 1)
    path, c = make(tmp_path / "a", a, chunks=(100, 100), compressors=None), str(tmp_path / "c")
    with pytest.raises(ooc_gemm.BudgetError) as least:
        ooc_gemm.gram(path, c, chunks=(30, 901), memory_limit=1, device="cpu")
    limit = least.value.minimum_memory_limit
    result = ooc_gemm.gram(path, c, chunks=(30, 901), memory_limit=limit, device="cpu")
    assert not result.plan.problem.symmetric
    assert result.bytes_read == result.plan.bytes_read
    assert_close(zarr.open_array(c)[:], a.astype("f8") @ a.T, 1e-6)


def test_integers_never_wrap(device):
    k = 131_072
    a = np.full((1, k), -128, "i1")
    with pytest.raises(ooc_gemm.RangeError, match="out_dtype"):
        ooc_gemm.gram(a, device=device)
    assert ooc_gemm.gram(a, device=device, out_dtype="i8").array[0, 0] == 2**31
    with pytest.raises(ooc_gemm.RangeError, match="int64"):
        ooc_gemm.gram(np.full((2, 2), 2**40), device=device)


def test_other_options_are_refused():
    with pytest.raises(TypeError, match="transpose_a"):
        ooc_gemm.gram(np.ones((2, 2)), transpose_a=True)
    with pytest.raises(TypeError, match="nonsense"):
        ooc_gemm.gram(np.ones((2, 2)), nonsense=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "bound"),
    [
        ("cublas", 1e-6),
        ("ffma", 1e-6),
        ("naive", 1e-6),
        ("fp16x3", 1e-6),
        ("mma-fp16x3", 1e-6),
        ("tf32", 1e-3),
    ],
)
@pytest.mark.parametrize("transpose", [False, True])
def test_kernels(kernel, bound, transpose):
    """Panels that lie as operands of the transposed kind, and those that do not."""
    from conftest import gpu_missing

    if why := gpu_missing():
        pytest.skip(why)
    a = matrix((1500, 1300), "f4", 1)
    found = ooc_gemm.gram(a, transpose=transpose, device="cuda", kernel=kernel).array
    left = (a.T if transpose else a).astype("f8")
    assert_close(found, left @ left.T, bound)
    assert np.array_equal(found, found.T)
