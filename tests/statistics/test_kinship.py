"""Kinship coefficients against the counts that define them, and against plink2 where it is installed."""

import shutil
import subprocess

import cupy_on_cpu
import numpy as np
import pytest
import zarr
from arrays import LAYOUTS
from conftest import gpu_missing, make, ooc
from interruption import interrupted
from samples import alleles
from samples import kinship as expected
from test_relationship import LIMIT, bed

import ooc_gemm
from ooc_gemm.devices.cuda.device import CUDA
from ooc_gemm.statistics import genotypes, kinship


@pytest.mark.parametrize("rate", [0, 0.02, 0.6])
@pytest.mark.parametrize("samples", [0, 1])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_kinship(tmp_path, monkeypatch, rate, samples, dtype):
    monkeypatch.setattr(kinship, "PART", 300)
    monkeypatch.setattr(genotypes, "STRIP", 1000)
    g = alleles(501, 77, 1, rate) if rate else np.abs(alleles(501, 77, 1, 0))
    stored = make(tmp_path / "g", g if samples else g.T, chunks=(64, 50))
    c = str(tmp_path / "c")
    options = {"memory_limit": LIMIT, "verify": True, "out_dtype": dtype, "chunks": (20, 30)}
    found = ooc_gemm.king(stored, c, samples=samples, **options)
    np.testing.assert_allclose(zarr.open_array(c)[:], expected(g), rtol=1e-6 if dtype == "f4" else 1e-15)
    assert (found.verified, found.variants, found.missing) == (True, 501, (g == -1).sum())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path, layout):
    g = alleles(211, 40, 2)
    found = ooc_gemm.king(make(tmp_path / "g", g, **LAYOUTS[layout]), memory_limit=LIMIT, out_dtype="f8")
    np.testing.assert_allclose(found.array, expected(g), rtol=1e-15)


def test_what_stands_for_missing():
    g = alleles(90, 30, 3)
    unsigned = np.where(g == -1, 255, g.astype("i2")).astype("u1")
    for given, missing in ((unsigned, 255), (np.where(g == -1, 2, np.minimum(g, 1)).astype("i1"), 2)):
        found = ooc_gemm.king(given, missing=missing, memory_limit=LIMIT, out_dtype="f8").array
        wanted = expected(np.where(given == missing, -1, given.astype("i2")))
        np.testing.assert_allclose(found, wanted, rtol=1e-15)
    found = ooc_gemm.king(np.abs(g), missing=None, memory_limit=LIMIT).array
    np.testing.assert_allclose(found, expected(np.abs(g)), rtol=1e-6)


def test_samples_without_heterozygous_variants():
    g = np.array([[0, 2, 1], [0, 0, 1], [2, 2, -1]], "i1")
    found = ooc_gemm.king(g, memory_limit=LIMIT).array
    assert np.array_equal(found, expected(g), equal_nan=True)
    assert not np.isfinite(found[0, 1])


def test_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    g = alleles(80, 9, 4)
    make("g", g.T, chunks=(4, 20))
    done = ooc("king", "g", "c", "--samples", "0", "-M", "1GiB", "-d", "cpu")
    assert (done.code, done.err) == (0, "")
    np.testing.assert_allclose(zarr.open_array("c")[:], expected(g), rtol=1e-6)
    done = ooc("king", "g", "c", "-M", "1GiB", "--out-dtype", "i4")
    assert done.code == 2
    assert "--out-dtype is int32" in done.err


@pytest.mark.parametrize(
    ("g", "options", "word"),
    [
        (np.ones((5, 3), "f4"), {}, "integers of 8 bits"),
        (np.ones((5, 3), "i2"), {}, "integers of 8 bits"),
        (np.ones((0, 3), "i1"), {}, "no variants"),
        (np.full((5, 3), 7, "i1"), {}, "holds 7 for variant 0"),
        (np.array([[0, 1], [2, -1]], "i1"), {"missing": None}, "holds -1 for variant 1"),
        (np.ones((5, 3), "i1"), {"out_dtype": "f2"}, "float16"),
        (np.ones((5, 3), "i1"), {"samples": 2}, "samples is 2"),
    ],
)
def test_what_cannot_be_is_refused(g, options, word):
    with pytest.raises(ooc_gemm.InputError, match=word):
        ooc_gemm.king(g, memory_limit=LIMIT, **options)


def test_the_limit_counts_the_pairs(tmp_path):
    g = make(tmp_path / "g", alleles(40, 900, 5), chunks=(20, 300))
    with pytest.raises(ooc_gemm.BudgetError) as plain:
        ooc_gemm.king(g, memory_limit=1, missing=None)
    least = plain.value.minimum_memory_limit
    with pytest.raises(ooc_gemm.BudgetError) as paired:
        ooc_gemm.king(g, memory_limit=least + 4 * 900 * 900)
    assert paired.value.minimum_memory_limit >= least + 4 * 900 * 900


@pytest.mark.parametrize("missing", [-1, None])
def test_the_smallest_limit_that_is_named_does(tmp_path, monkeypatch, missing):
    """Also for the product that is made where genotypes are missing; and the plan names the same one."""
    monkeypatch.setattr("ooc_gemm.support.memory.resident_bytes", lambda: 100 << 20)
    monkeypatch.setattr("ooc_gemm.run.stream.baseline_bytes", lambda least: 100 << 20)
    values = alleles(40, 900, 5)
    g = make(tmp_path / "g", values if missing else np.abs(values), chunks=(20, 300))
    c = str(tmp_path / "c")
    options = {"samples": None, "missing": missing, "out_dtype": None, "device": "cpu"}
    with pytest.raises(ooc_gemm.BudgetError) as planned:
        kinship.planned(g, **options, notice=print, memory_limit=1)
    with pytest.raises(ooc_gemm.BudgetError) as found:
        ooc_gemm.king(g, c, missing=missing, memory_limit=1, device="cpu")
    least = found.value.minimum_memory_limit
    assert planned.value.minimum_memory_limit == least
    kinship.planned(g, **options, notice=print, memory_limit=least)
    done = ooc_gemm.king(g, c, missing=missing, memory_limit=least, device="cpu")
    assert (done.missing > 0) == (missing is not None)


def test_a_run_is_continued_and_no_other_is(tmp_path, monkeypatch):
    g, c = make(tmp_path / "g", alleles(300, 90, 6), chunks=(64, 64)), str(tmp_path / "c")
    options = {"memory_limit": LIMIT, "chunks": (32, 32)}
    ooc_gemm.king(g, c + "1", **options)
    interrupted(monkeypatch, 3, g, c, run=ooc_gemm.king, **options)
    with pytest.raises(ooc_gemm.InputError, match=r"cannot be continued"):
        ooc_gemm.grm(g, c, resume=True, **options)
    result = ooc_gemm.king(g, c, resume=True, **options)
    assert result.bytes_written == 6 * 32 * 32 * 4
    assert zarr.open_array(c)[:].tobytes() == zarr.open_array(c + "1")[:].tobytes()


@pytest.mark.skipif(shutil.which("plink2") is None, reason="plink2 is not installed")
@pytest.mark.parametrize("rate", [0, 0.05])
def test_plink2_finds_the_same(tmp_path, rate):
    g = alleles(300, 63, 7, rate)
    bed(tmp_path, g)
    words = ["plink2", "--bfile", "g", "--out", "g", "--threads", "1", "--make-king", "square", "bin"]
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    theirs = np.fromfile(tmp_path / "g.king.bin").reshape(63, 63)
    found = ooc_gemm.king(g, memory_limit=LIMIT, out_dtype="f8").array
    np.testing.assert_allclose(found, theirs, rtol=1e-15, atol=1e-16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_a_gpu_finds_the_same(dtype):
    if why := gpu_missing():
        pytest.skip(why)
    g = alleles(3001, 301, 8)
    options = {"memory_limit": "4GiB", "out_dtype": dtype}
    there = ooc_gemm.king(g, device="cuda", verify=True, **options).array
    assert np.array_equal(there, ooc_gemm.king(g, device="cpu", **options).array, equal_nan=True)


def test_the_device_cuda_finds_the_same(monkeypatch):
    g = alleles(301, 77, 9)
    cupy_on_cpu.install(monkeypatch, "90")
    found = ooc_gemm.king(g, device=CUDA(), memory_limit="2GiB", out_dtype="f8", verify=True)
    np.testing.assert_allclose(found.array, expected(g), rtol=1e-15)
    found = ooc_gemm.king(g, device=CUDA(), memory_limit="2GiB", verify=True)
    np.testing.assert_allclose(found.array, expected(g), rtol=1e-6)
