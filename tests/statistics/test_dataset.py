"""Relationship matrices of calls as VCF Zarr has them, with the names of their samples."""

import shutil
import subprocess

import numpy as np
import pytest
import xarray
import zarr
from conftest import ooc
from interruption import interrupted
from obstore.store import MemoryStore
from samples import alleles
from test_relationship import LIMIT, expected
from zarr.codecs import BloscCodec

import ooc_gemm
from ooc_gemm.storage.read.calls import count_alleles

NAME = "stat_genomic_relationship"
BLOSC = {
    2: {"id": "blosc", "cname": "zstd", "clevel": 7, "shuffle": 2},
    3: BloscCodec(cname="zstd", clevel=3, shuffle="bitshuffle"),
}


def calls_of(g, seed=0):
    """Calls with so many alternative alleles, in any order, of several kinds, some in part missing."""
    rng = np.random.default_rng(seed)
    first = (g == 2) | ((g == 1) & (rng.random(g.shape) < 0.5))
    pair = np.stack([first, (g == 2) | ((g == 1) & ~first)], axis=-1).astype("i1")
    pair *= rng.integers(1, 4, pair.shape, "i1")
    gone = g == -1
    pair[gone, rng.integers(0, 2, gone.sum())] = -1
    pair[gone & (rng.random(g.shape) < 0.5)] = -1
    pair[gone & (rng.random(g.shape) < 0.1)] = -2
    same = (pair[..., 0] == pair[..., 1]) & (rng.random(g.shape) < 0.3) & ~gone
    pair[same, 1] = -2  # haploid
    return pair


def store(path, calls, version=2, dims=("variants", "samples", "ploidy"), names=True, **options):
    """A group as bio2zarr writes it (version 2), or sgkit."""
    group = zarr.open_group(path, mode="w", zarr_format=version)
    options = {"chunks": (64, 20, 2), "compressors": BLOSC[version]} | options
    if version == 2:
        options |= {"attributes": {"_ARRAY_DIMENSIONS": list(dims)}, "fill_value": None}
        if isinstance(options["compressors"], dict):
            import numcodecs

            options["compressors"] = numcodecs.get_codec(options["compressors"])
    else:
        options["dimension_names"] = dims
    group.create_array("call_genotype", shape=calls.shape, dtype=calls.dtype, **options)[...] = calls
    if names:
        count = calls.shape[list(dims).index("samples")]
        made = group.create_array("sample_id", shape=(count,), dtype=str, chunks=(7,))
        made[...] = np.array(ids(count), np.dtypes.StringDType())
    return str(path)


def ids(count):
    return [f"NA{i:05d}é" for i in range(count)]


pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # texts in zarr

LAYOUTS = {
    "bio2zarr": {},
    "raw": {"compressors": None},
    "version 3": {"version": 3},
    "version 3, raw": {"version": 3, "compressors": None},
    "shards": {"version": 3, "shards": (128, 40, 2)},
    "samples first": {"dims": ("samples", "variants", "ploidy"), "chunks": (20, 64, 2)},
    "ploidy apart": {"chunks": (64, 20, 1)},
    "one chunk": {"chunks": (1000, 1000, 2)},
    "Fortran": {"order": "F"},
    "16 bits": {"dtype": "i2"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_are_counted(tmp_path, layout):
    options = dict(LAYOUTS[layout])
    g = alleles(301, 53, 1)
    calls = calls_of(g).astype(options.pop("dtype", "i1"))
    if layout == "samples first":
        calls = calls.swapaxes(0, 1)
    path = store(tmp_path / "g.vcz", calls, **options)
    # The limit is on this process, of which earlier tests hold a part. Lazy inputs are counted in addition.
    found = ooc_gemm.grm(path, str(tmp_path / "k"), memory_limit="2GiB", out_dtype="f8", verify=True)
    k = zarr.open_group(tmp_path / "k", mode="r")
    assert np.abs(k[NAME][:] - expected(g)).max() <= 1e-12
    assert found.verified
    assert found.samples == list(k["samples_0"][:]) == list(k["samples_1"][:]) == ids(53)
    assert found.missing == (g == -1).sum()
    assert "samples" not in found.to_dict()


def test_xarray_opens_it_with_names(tmp_path):
    g = alleles(90, 11, 2)
    path, k = store(tmp_path / "g.vcz", calls_of(g)), str(tmp_path / "k")
    done = ooc("grm", path, k, "-M", LIMIT)
    assert (done.code, done.err) == (0, "")
    with xarray.open_zarr(k) as found:
        one = found[NAME].sel(samples_0="NA00003é", samples_1="NA00007é").values
        assert one == pytest.approx(expected(g)[3, 7], rel=1e-5)
    (tmp_path / "k" / "samples_1" / "c" / "0").unlink()  # as of a run that was killed before the names
    (tmp_path / "k" / "samples_1" / "zarr.json").unlink()
    assert ooc("grm", path, k, "-M", LIMIT, "--resume").code == 0
    assert list(zarr.open_group(k)["samples_1"][:]) == ids(11)
    ooc_gemm.grm(path, k, maf=0.1, memory_limit=LIMIT, force=True)
    with xarray.open_zarr(k) as found:
        assert np.abs(found[NAME] - expected(g, maf=0.1)).max() < 1e-5
        assert list(found.samples_0.values) == ids(11)


def test_what_is_read(tmp_path):
    g = alleles(90, 11, 3)
    calls, wanted = calls_of(g), expected(g)
    path = store(tmp_path / "g.vcz", calls)
    memory = zarr.open_group(zarr.storage.MemoryStore(), mode="w")
    memory.create_array("call_genotype", data=calls)
    objects = zarr.storage.ObjectStore(MemoryStore())
    store(objects, calls, version=3)
    unnamed = xarray.DataArray(calls.swapaxes(0, 1), dims=("samples", "variants", "ploidy"))
    table = xarray.Dataset({"call_genotype": unnamed, "sample_id": ("samples", ids(11))})
    given = {
        "an array in a group": (path + "/call_genotype", None),
        "an open group": (zarr.open_group(path, mode="r"), ids(11)),
        "an open array": (zarr.open_group(path, mode="r")["call_genotype"], None),
        "a group in memory": (memory, None),
        "objects": (zarr.open_group(objects, mode="r"), ids(11)),
        "NumPy": (calls, None),
        "a DataArray": (unnamed, None),
        "a lazy DataArray": (unnamed.chunk(variants=20), None),
        "a Dataset": (table, ids(11)),
        "haploid": (np.where(g == -1, -1, np.minimum(g, 1))[..., None].astype("i1"), None),
    }
    for what, (one, names) in given.items():
        found = ooc_gemm.grm(one, memory_limit="1GiB", out_dtype="f8")
        target = expected(np.where(g == -1, -1, 2 * np.minimum(g, 1))) if what == "haploid" else wanted
        assert np.abs(found.array - target).max() <= 1e-12, what
        assert found.samples == names, what


def test_counts_of_every_pair():
    pairs = np.stack(np.meshgrid(*[np.arange(-2, 126)] * 2, indexing="ij"), axis=-1).astype("i1")
    for calls in (pairs, pairs.astype("i4"), pairs[:, 1:40].copy()):
        found = np.empty(calls.shape[:2], "i1")
        count_alleles(calls, found)
        for (a, b), one in zip(calls.reshape(-1, 2), found.ravel(), strict=True):
            there = [x for x in (a, b) if x != -2]
            lacks = not there or -1 in there
            assert one == (-1 if lacks else 2 * sum(x > 0 for x in there) / len(there))


def test_the_plan_counts_what_is_read(tmp_path):
    for number, options in enumerate(({}, {"compressors": None}, {"version": 3, "shards": (128, 40, 2)})):
        path = store(tmp_path / f"{number}", calls_of(alleles(301, 53, 4)), **options)
        result = ooc_gemm.grm(path, memory_limit=LIMIT)
        assert result.bytes_read == result.plan.bytes_read > 0


def test_a_run_is_continued(tmp_path, monkeypatch):
    g, c = alleles(300, 90, 6), str(tmp_path / "c")
    path = store(tmp_path / "g", calls_of(g), chunks=(64, 64, 2))
    options = {"memory_limit": LIMIT, "chunks": (32, 32)}
    interrupted(monkeypatch, 3, path, c, run=ooc_gemm.grm, **options)
    result = ooc_gemm.grm(path, c, resume=True, **options)
    assert result.bytes_written == 6 * 32 * 32 * 4
    assert np.abs(zarr.open_group(c)[NAME][:] - expected(g)).max() < 1e-5
    assert list(zarr.open_group(c)["samples_0"][:]) == ids(90)


def test_what_cannot_be_is_refused(tmp_path):
    g = alleles(30, 11, 7)
    calls = calls_of(g)
    path = store(tmp_path / "g", calls)
    other = store(tmp_path / "other", calls[:, :8])
    k = str(tmp_path / "k")
    ooc_gemm.grm(path, k, memory_limit=LIMIT)
    plain = zarr.open_group(tmp_path / "plain", mode="w")
    plain.create_array("x", shape=(3, 3, 3, 3), dtype="i1")
    cases = {
        "no call_genotype|not a Zarr array": (str(tmp_path / "plain"), None),
        "has two dimensions": (str(tmp_path / "plain" / "x"), None),
        "3 alleles for each sample": (np.zeros((4, 4, 3), "i1"), None),
        "integers with sign": (np.zeros((4, 4, 2), "f4"), None),
        "other samples": (other, k),
        "Zarr version 2": (path, path),
        "is an array": (path, k + "/" + NAME),
        "exists; give force": (path, k),
        "holds no call_genotype": (xarray.Dataset(), None),
    }
    for word, (one, c) in cases.items():
        with pytest.raises(ooc_gemm.InputError, match=word):
            ooc_gemm.grm(one, c, memory_limit=LIMIT)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("plink2") is None, reason="plink2 is not installed")
def test_plink2_counts_the_same(tmp_path):
    g = alleles(300, 63, 9)
    calls = np.minimum(calls_of(g), 1)
    texts = {-2: "", -1: "."}
    lines = ["##fileformat=VCFv4.2", "##contig=<ID=1>"]
    lines.append(
        "\t".join(["#CHROM", "POS", "ID", "REF", "ALT", "QUAL", "FILTER", "INFO", "FORMAT", *ids(63)])
    )
    for position, row in enumerate(calls, 1):
        said = ["/".join(texts.get(x, str(x)) for x in pair if x != -2) or "." for pair in row.tolist()]
        lines.append("\t".join(["1", str(position), f"v{position}", "A", "C", ".", ".", ".", "GT", *said]))
    (tmp_path / "g.vcf").write_text("\n".join(lines) + "\n", "utf-8")
    path = store(tmp_path / "g.vcz", calls)
    for words, function, file in (
        ("--make-rel square bin", ooc_gemm.grm, "g.rel.bin"),
        ("--make-king square bin", ooc_gemm.king, "g.king.bin"),
    ):
        asked = f"plink2 --vcf g.vcf --vcf-half-call missing --out g --threads 1 {words}"
        subprocess.run(asked.split(), cwd=tmp_path, check=True, capture_output=True)
        theirs = np.fromfile(tmp_path / file).reshape(63, 63)
        found = function(path, memory_limit=LIMIT, out_dtype="f8")
        assert np.abs(found.array - theirs).max() <= 1e-12
