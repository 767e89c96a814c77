"""Relationship matrices against the formulas in float64, and against plink2 where it is installed."""

import shutil
import subprocess

import cupy_on_cpu
import numpy as np
import pytest
import zarr
from arrays import LAYOUTS
from conftest import gpu_missing, make
from faults import Failing, with_blocks
from interruption import interrupted
from samples import alleles

import ooc_gemm
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.devices.cuda.arrays import ALIGN
from ooc_gemm.devices.several import Several
from ooc_gemm.statistics import genotypes, relationship
from ooc_gemm.statistics.genotypes import have_both, look_through
from ooc_gemm.statistics.standardized import Standardized
from ooc_gemm.storage.read.inputs import open_input

LIMIT = "300MiB"
OPTIONS = [
    {},
    {"meanimpute": True},
    {"maf": 0.2},
    {"method": "cov"},
    {"method": "cov", "meanimpute": True, "maf": 0.1},
    {"method": "vanraden"},
    {"method": "vanraden", "maf": 0.3},
]


def expected(g, method="gcta", meanimpute=None, maf=0.0):
    x = np.ma.masked_equal(g, -1).astype("f8")
    p = (x.mean(axis=1) / 2).filled(np.nan)
    kept = ~(np.minimum(p, 1 - p) < maf - 1e-12)
    z, variance = (x - 2 * p[:, None]).filled(0)[kept], (2 * p * (1 - p))[kept]
    if method == "gcta":
        z = z / np.sqrt(np.where(variance > 0, variance, np.inf))[:, None]
    if method == "vanraden":
        return z.T @ z / np.nansum(variance)
    there = (g != -1)[kept].astype("f8")
    return z.T @ z / (len(z) if meanimpute else there.T @ there)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("samples", [0, 1])
def test_methods(tmp_path, options, samples):
    g = alleles(501, 77, 1)
    stored = make(tmp_path / "g", g if samples else g.T, chunks=(64, 50))
    c = str(tmp_path / "c")
    found = ooc_gemm.grm(stored, c, samples=samples, memory_limit=LIMIT, verify=True, **options)
    wanted = expected(g, **options)
    assert np.abs(zarr.open_array(c)[:] - wanted).max() <= 3e-6 * np.abs(wanted).max()
    assert found.verified
    p = (np.ma.masked_equal(g, -1).mean(axis=1) / 2).filled(np.nan)
    assert np.allclose(found.frequency, p, rtol=1e-6, equal_nan=True)
    kept = ~(np.minimum(p, 1 - p) < options.get("maf", 0) - 1e-12)
    assert (found.variants, found.missing) == (kept.sum(), (g[kept] == -1).sum())
    assert "frequency" not in found.to_dict()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path, layout):
    g = alleles(211, 40, 2)
    found = ooc_gemm.grm(make(tmp_path / "g", g, **LAYOUTS[layout]), memory_limit=LIMIT, out_dtype="f8")
    assert np.abs(found.array - expected(g)).max() <= 1e-12


def test_dosages_with_nan():
    g = alleles(90, 30, 3)
    dosages = np.where(g == -1, np.nan, g).astype("f4")
    found = ooc_gemm.grm(dosages, missing=np.nan, memory_limit=LIMIT).array
    assert np.abs(found - expected(g)).max() <= 1e-5
    found = ooc_gemm.grm(np.abs(g), missing=None, memory_limit=LIMIT).array
    assert np.abs(found - expected(np.abs(g))).max() <= 1e-5


def test_samples_that_share_no_variant():
    g = np.array([[0, -1, 1], [1, -1, 0], [-1, 2, 1], [-1, 1, 2]], "i1")
    found = ooc_gemm.grm(g, memory_limit=LIMIT).array
    assert np.isnan(found[0, 1])
    assert np.isnan(found[1, 0])
    assert np.isfinite(np.delete(found, 1)).sum() == 7 - 1 + 1


@pytest.mark.parametrize("rate", [0, 0.01, 0.2, 0.9])
@pytest.mark.parametrize("listed", [0, 1 << 18])
def test_counts_of_pairs_are_exact(monkeypatch, rate, listed):
    monkeypatch.setattr(genotypes, "PAIRS", listed)  # few: all are multiplied
    monkeypatch.setattr(genotypes, "TILE", 16)
    monkeypatch.setattr(genotypes, "STRIP", 1000)
    g = alleles(301, 53, 4, rate)
    found = look_through(open_input(g), 1 << 30, -1.0, 0.2, True)
    p = (np.ma.masked_equal(g, -1).mean(axis=1) / 2).filled(np.nan)
    there = (g != -1)[~(np.minimum(p, 1 - p) < 0.2 - 1e-12)].astype(int)
    assert np.array_equal(found.pairs, there.T @ there)
    assert np.array_equal(found.missing, len(there) - there.sum(axis=0))
    assert look_through(open_input(g), 1 << 30, -1.0, 0.2, False).pairs is None


@pytest.mark.parametrize("dtype", ["i1", "f4"])
def test_pairs_of_a_strip_are_listed_in_parts(monkeypatch, dtype):
    """Where that takes less time than a product: not as many at a time as memory is counted for."""
    most, pairs = 3000, []
    monkeypatch.setattr(genotypes, "PAIRS", most)
    monkeypatch.setattr(genotypes, "LISTED", 1)
    monkeypatch.setattr(genotypes.Counts, "_multiply", None)
    listed = genotypes._pairs
    monkeypatch.setattr(genotypes, "_pairs", lambda *given: pairs.append(listed(*given)) or pairs[-1])
    g = alleles(301, 53, 4, 0.2).astype(dtype)
    found = look_through(open_input(g), 1 << 30, -1.0, 0, True)
    there = (g != -1).astype(int)
    assert np.array_equal(found.pairs, there.T @ there)
    sizes = [len(first) for first, _ in pairs]
    assert most // 4 < np.median(sizes) <= max(sizes) <= most


def check_pairs_of_a_product(tmp_path, monkeypatch, shape, samples, maf, dtype):
    monkeypatch.setattr(relationship, "MOST_LISTED", 50)
    monkeypatch.setattr(relationship, "_once", lambda *asked: None)  # as where C is no single block
    g = alleles(*shape, 7).astype(dtype)
    stored = make(tmp_path / "g", g if samples else g.T, chunks=(64, 50))
    options = {"samples": samples, "maf": maf, "missing": float(g.max()) if dtype == "u1" else -1}
    found = ooc_gemm.grm(stored, device="cuda", memory_limit="4GiB", **options)
    wanted = expected(g.astype("i1"), maf=maf)
    assert np.abs(found.array - wanted).max() <= 3e-6 * np.abs(wanted).max()
    assert found.bytes_passed == 2 * found.bytes_read  # a pass, and a product
    listed = ooc_gemm.grm(stored, device="cpu", memory_limit="4GiB", **options)
    assert listed.bytes_passed == listed.bytes_read
    assert (listed.variants, listed.missing) == (found.variants, found.missing)


READ_ONCE = [
    ({}, "i1"),
    ({"maf": 0.2}, "u1"),
    ({"meanimpute": True, "out_dtype": "f8"}, "i1"),
    ({"method": "cov", "maf": 0.1}, "f4"),
    ({"method": "vanraden"}, "f2"),
]


def check_once(tmp_path, monkeypatch, shape, samples, options, dtype, device):
    """Genotypes that are standardized in panels give the bits of those that a pass has looked through."""
    g = alleles(*shape, 9)
    g[7] = 0
    stored = np.where(g < 0, 255 if dtype == "u1" else -1, g.astype(int)).astype(dtype)
    missing = 255 if dtype == "u1" else -1
    path = make(tmp_path / "g", stored if samples else stored.T, chunks=(64, 50), compressors=None)
    options = {"samples": samples, "missing": missing, "device": device, "memory_limit": "4GiB"} | options
    once = ooc_gemm.grm(path, verify=True, **options)
    assert once.bytes_passed == 0
    assert once.bytes_read == once.plan.bytes_read
    assert once.bytes_read <= stored.nbytes * 1.5  # chunks at edges are stored whole
    assert once.verified
    wanted = expected(g, **{k: v for k, v in options.items() if k in ("method", "meanimpute", "maf")})
    assert np.abs(once.array - wanted).max() <= 3e-6 * np.abs(wanted).max()
    monkeypatch.setattr(relationship, "_once", lambda *asked: None)
    twice = ooc_gemm.grm(path, **options)
    assert twice.bytes_passed > 0
    assert once.array.tobytes() == twice.array.tobytes()
    assert np.array_equal(once.frequency, twice.frequency, equal_nan=True)
    assert (once.variants, once.missing) == (twice.variants, twice.missing)


@pytest.mark.parametrize("samples", [0, 1])
@pytest.mark.parametrize(("options", "dtype"), READ_ONCE)
def test_genotypes_are_read_once(tmp_path, monkeypatch, samples, options, dtype):
    check_once(tmp_path, monkeypatch, (531, 77), samples, options, dtype, "cpu")


@pytest.mark.parametrize("samples", [0, 1])
@pytest.mark.parametrize(("options", "dtype"), READ_ONCE)
def test_a_gpu_reads_genotypes_once(tmp_path, monkeypatch, samples, options, dtype):
    cupy_on_cpu.install(monkeypatch, "90")
    check_once(tmp_path, monkeypatch, (531, 77), samples, options, dtype, "cuda")
    counted = "wgmma" in cupy_on_cpu.Kernel.launched or "mma" in cupy_on_cpu.Kernel.launched
    assert counted == (options.get("meanimpute") is None and options.get("method") != "vanraden")


@pytest.mark.parametrize("samples", [0, 1])
@pytest.mark.parametrize(("options", "dtype"), READ_ONCE)
def test_several_devices_read_genotypes_once(tmp_path, monkeypatch, samples, options, dtype):
    device = Several([CPU(2), CPU(1), CPU(1)], [2, 1, 3])
    check_once(tmp_path, monkeypatch, (531, 700), samples, options, dtype, device)


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("samples", [0, 1])
@pytest.mark.parametrize(("options", "dtype"), READ_ONCE)
def test_several_gpus_read_genotypes_once(tmp_path, monkeypatch, samples, options, dtype, linked):
    cupy_on_cpu.install(monkeypatch, "90", devices=3)
    monkeypatch.setattr("ooc_gemm.devices.cuda.device.CUDA.reaches", lambda *_: linked)
    check_once(tmp_path, monkeypatch, (531, 300), samples, options, dtype, "cuda:0,1,2")


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("samples", [0, 1])
@pytest.mark.parametrize("impute", [True, False])
def test_what_standardizing_takes_is_in_the_ledger(monkeypatch, impute, samples, devices):
    cupy_on_cpu.install(monkeypatch, "90", devices=devices)
    taken = cupy_on_cpu.memory_taken(monkeypatch)
    device = "cuda:" + ",".join(map(str, range(devices)))
    g = alleles(3000, 400, 12)
    found = ooc_gemm.grm(
        g if samples else g.T, samples=samples, meanimpute=impute, device=device, memory_limit="4GiB"
    )
    assert found.bytes_passed == 0
    ledger = found.plan.device_ledger
    assert 0 < sum(taken) <= devices * (sum(ledger.values()) - ledger["baseline"] + 16 * ALIGN)


@pytest.mark.parametrize("after", [0, 3])
def test_another_device_standardizes_what_one_has_left(tmp_path, monkeypatch, after):
    monkeypatch.setattr("ooc_gemm.run.prepare.make_plan", with_blocks(700, 700, 100))
    g, notes = alleles(531, 700, 13), []
    path = make(tmp_path / "g", g, chunks=(50, 100))
    found = ooc_gemm.grm(path, device=Several([Failing(1, after), CPU(1)]), notice=notes.append)
    assert [note for note in notes if "fallen off the bus" in note]
    assert found.bytes_passed == 0
    assert np.abs(found.array - expected(g)).max() <= 3e-6 * np.abs(expected(g)).max()
    assert found.missing == np.count_nonzero(g < 0)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:0,1"])
@pytest.mark.parametrize("samples", [0, 1])
@pytest.mark.parametrize(("options", "dtype"), READ_ONCE)
def test_a_real_gpu_reads_genotypes_once(tmp_path, monkeypatch, samples, options, dtype, device):
    if why := gpu_missing(1 + device.count(",")):
        pytest.skip(why)
    check_once(tmp_path, monkeypatch, (4001, 1177), samples, options, dtype, device)


def test_a_matrix_of_several_blocks_needs_a_pass(tmp_path):
    g = alleles(90, 1500, 10)
    path = make(tmp_path / "g", g, chunks=(64, 300))
    options = {"meanimpute": True, "chunks": (300, 300), "device": "cpu"}
    with pytest.raises(ooc_gemm.BudgetError) as least:
        ooc_gemm.grm(path, str(tmp_path / "c"), memory_limit=1, **options)
    limit = least.value.minimum_memory_limit + (1 << 20)
    found = ooc_gemm.grm(path, str(tmp_path / "c"), memory_limit=limit, **options)
    assert found.blocks > 1
    assert found.bytes_passed > 0
    wanted = expected(g, meanimpute=True)
    assert np.abs(found.array[:] - wanted).max() <= 3e-6 * np.abs(wanted).max()


def test_genotypes_that_begin_again_are_counted_once():
    g = alleles(200, 31, 11)
    found = Standardized(open_input(g), -1, 0.1, True, True)
    for _ in range(2):
        found.begin()
        for start in (0, 128):
            found.standardize(g[start : start + 128].astype("f4"), start)
    wanted = look_through(open_input(g), 1 << 30, -1.0, 0.1, True)
    assert np.array_equal(found.found().pairs, wanted.pairs)
    assert np.array_equal(found.found().missing, wanted.missing)


@pytest.mark.parametrize("old", [False, True])
def test_nothing_is_left_of_an_impossible_matrix(tmp_path, old):
    c, before = tmp_path / "c", np.arange(12.0).reshape(3, 4)
    if old:
        make(c, before, chunks=(2, 2))
        files = sorted(c.rglob("*"))
    for g, word in (
        (np.full((50, 3), 7, "i1"), "more than 2 alleles"),
        (np.full((50, 3), 2, "i1"), "varies"),
    ):
        with pytest.raises(ooc_gemm.InputError, match=word):
            ooc_gemm.grm(g, str(c), method="vanraden", memory_limit=LIMIT, force=old)
        if old:
            assert np.array_equal(zarr.open_array(c)[:], before)
            assert sorted(c.rglob("*")) == files
        else:
            assert not c.exists()


@pytest.mark.parametrize("samples", [0, 1])
@pytest.mark.parametrize("maf", [0, 0.2])
@pytest.mark.parametrize("dtype", ["i1", "u1"])
def test_a_gpu_counts_pairs_by_a_product(tmp_path, monkeypatch, samples, maf, dtype):
    cupy_on_cpu.install(monkeypatch, "90")
    check_pairs_of_a_product(tmp_path, monkeypatch, (301, 53), samples, maf, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("maf", [0, 0.2])
def test_pairs_are_counted_on_a_real_gpu(tmp_path, monkeypatch, maf):
    if why := gpu_missing():
        pytest.skip(why)
    check_pairs_of_a_product(tmp_path, monkeypatch, (3001, 653), 1, maf, "i1")


@pytest.mark.parametrize("dtype", ["i4", "f4"])
def test_pairs_from_a_product_are_exact(dtype):
    lacks = np.random.default_rng(8).random((300, 41)) < 0.3
    there = (~lacks).astype(int)
    product = (lacks.T.astype(int) @ lacks).astype(dtype)
    found = have_both(product, 300, np.count_nonzero(lacks, axis=0))
    assert found.dtype == np.int32
    assert np.array_equal(found, there.T @ there)


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("dtype", ["i1", "f4", "f8"])
@pytest.mark.parametrize("wrong", [-9, 3, np.nan])
def test_one_number_that_is_no_genotype_is_refused(tmp_path, monkeypatch, wrong, dtype, once):
    """It would hide in the mean of a common variant. The matrix would be NaN, or wrong in all places."""
    if not once:
        monkeypatch.setattr("ooc_gemm.statistics.relationship._once", lambda *_: None)
    g = alleles(300, 40, 6).astype(dtype)
    if np.isnan(wrong) and dtype == "i1":
        pytest.skip("no integer is NaN")
    g[77, 5] = wrong
    for options in ({}, {"maf": 0.01}, {"meanimpute": True}, {"method": "vanraden"}):
        with pytest.raises(ooc_gemm.InputError, match="fewer than 0, or NaN, for variant 77; give numbers"):
            ooc_gemm.grm(g, str(tmp_path / "c"), memory_limit=LIMIT, **options)
    assert not (tmp_path / "c").exists()
    stored = make(tmp_path / "g", g)  # with a journal
    with pytest.raises(ooc_gemm.InputError, match="variant 77"):
        ooc_gemm.grm(stored, str(tmp_path / "deep" / "c"), memory_limit=LIMIT)
    assert [path.name for path in tmp_path.iterdir()] == ["g"]


def test_dosages_may_be_rounded(tmp_path):
    g = alleles(300, 40, 6).astype("f4")
    g[g == 2] += np.float32(1e-5)
    assert np.isfinite(ooc_gemm.grm(g, memory_limit=LIMIT).array).all()


def test_counting_is_given_up_after_so_many_pairs():
    g = alleles(301, 53, 4)
    each = np.count_nonzero(g == -1, axis=1)
    pairs = int((each * (each - 1) // 2).sum())
    assert look_through(open_input(g), 1 << 30, -1.0, 0.0, True, most=pairs).pairs is not None
    given_up = look_through(open_input(g), 1 << 30, -1.0, 0.0, True, most=pairs - 1)
    assert given_up.pairs is None
    assert given_up.missing.sum() == (g == -1).sum()


@pytest.mark.parametrize(
    ("g", "options", "word"),
    [
        (np.ones((5, 3), "i1"), {"method": "king"}, "gcta, cov, vanraden"),
        (np.ones((5, 3), "i1"), {"samples": 2}, "samples is 2"),
        (np.ones((5, 3), "i1"), {"maf": 0.7}, "maf is 0.7"),
        (np.ones((5, 3), "i1"), {"device_memory_limit": "much"}, "much"),
        (np.ones((5, 3), "i1"), {"method": "vanraden", "meanimpute": False}, "leave out meanimpute"),
        (np.ones((5, 3), "c8"), {}, "complex64"),
        (np.ones((0, 3), "i1"), {}, "no variants"),
        (np.full((5, 3), 7, "i1"), {}, "more than 2 alleles"),
        (np.full((5, 3), 2, "i1"), {"method": "vanraden"}, "no variant varies"),
        (np.full((5, 3), 2, "i1"), {"maf": 0.1, "meanimpute": True}, "maf leaves none"),
    ],
)
def test_what_cannot_be_is_refused(g, options, word):
    with pytest.raises(ooc_gemm.InputError, match=word):
        ooc_gemm.grm(g, memory_limit=LIMIT, **options)


@pytest.mark.parametrize(
    ("g", "word"), [(np.ones((5, 3), "c8"), "complex64"), (np.ones((0, 3)), "no variants")]
)
def test_a_plan_refuses_what_its_run_refuses(g, word):
    with pytest.raises(ooc_gemm.InputError, match=word):
        relationship.planned(g, None, -1, "gcta", None, 0.0, print, memory_limit=LIMIT)


def test_the_limit_counts_the_pairs(tmp_path):
    g = make(tmp_path / "g", alleles(40, 900, 5), chunks=(20, 300))
    with pytest.raises(ooc_gemm.BudgetError) as plain:
        ooc_gemm.grm(g, memory_limit=1, meanimpute=True)
    with pytest.raises(ooc_gemm.BudgetError) as paired:
        ooc_gemm.grm(g, memory_limit=1)
    more = paired.value.minimum_memory_limit - plain.value.minimum_memory_limit
    assert more == 4 * 900 * 900


@pytest.mark.parametrize("count", [0, 3])
def test_a_run_is_continued_and_no_other_is(tmp_path, monkeypatch, count):
    g, c = make(tmp_path / "g", alleles(300, 90, 6), chunks=(64, 64)), str(tmp_path / "c")
    options = {"memory_limit": LIMIT, "chunks": (32, 32)}
    ooc_gemm.grm(g, c + "1", **options)
    interrupted(monkeypatch, count, g, c, run=ooc_gemm.grm, **options)
    if count:
        for other in ({"meanimpute": True}, {"maf": 0.1}, {"method": "cov"}, {"missing": None}):
            with pytest.raises(ooc_gemm.InputError, match=r"cannot be continued|more than 2 alleles"):
                ooc_gemm.grm(g, c, resume=True, **options, **other)
    result = ooc_gemm.grm(g, c, resume=True, **options)
    assert result.bytes_written == (9 - count) * 32 * 32 * 4
    assert zarr.open_array(c)[:].tobytes() == zarr.open_array(c + "1")[:].tobytes()


def bed(folder, g):
    """Write genotypes as plink has them."""
    code = np.array([3, 2, 0, 1], "u1")[np.where(g < 0, 3, g)]
    code = np.pad(code, ((0, 0), (0, -g.shape[1] % 4))).reshape(len(g), -1, 4)
    packed = (code << np.array([0, 2, 4, 6], "u1")).sum(axis=2).astype("u1")
    (folder / "g.bed").write_bytes(bytes([0x6C, 0x1B, 1]) + packed.tobytes())
    (folder / "g.bim").write_text("".join(f"1\tv{v}\t0\t{v + 1}\tA\tC\n" for v in range(len(g))))
    (folder / "g.fam").write_text("".join(f"f{i} s{i} 0 0 1 -9\n" for i in range(g.shape[1])))


@pytest.mark.skipif(shutil.which("plink2") is None, reason="plink2 is not installed")
@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], {}),
        (["cov"], {"method": "cov"}),
        (["meanimpute"], {"meanimpute": True}),
        (["cov", "meanimpute"], {"method": "cov", "meanimpute": True}),
        (["--maf", "0.1"], {"maf": 0.1}),
    ],
)
def test_plink2_finds_the_same(tmp_path, words, options):
    g = alleles(300, 63, 7)
    bed(tmp_path, g)
    command = [
        "plink2",
        "--bfile",
        "g",
        "--out",
        "g",
        "--threads",
        "1",
        "--make-rel",
        "square",
        "bin",
        *words,
    ]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    theirs = np.fromfile(tmp_path / "g.rel.bin").reshape(63, 63)
    found = ooc_gemm.grm(g, memory_limit=LIMIT, out_dtype="f8", **options).array
    assert np.abs(found - theirs).max() <= 1e-12
