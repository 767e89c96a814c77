"""Kinship on a cluster, against one machine to the bit, and against the counts that define it."""

import json
import os

import numpy as np
import pytest
import zarr
from arrays import LAYOUTS
from conftest import make, ooc
from samples import alleles, kinship

pytest.importorskip("distributed")

from launched import patient
from worker_clusters import cluster

import ooc_gemm
from ooc_gemm import BudgetError, InputError
from ooc_gemm.dask import elsewhere
from ooc_gemm.run.elsewhere import computing
from ooc_gemm.statistics import heterozygous
from ooc_gemm.storage.write.publication import Publication

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
LIMITS = {"memory_limit": "2GiB", "device": "cpu"}


@pytest.fixture(scope="module")
def client():
    with cluster(2) as found:
        yield found


def on(client, **more):
    return ooc_gemm.dask.on(client, **{**LIMITS, **more})


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0, 0.02, 0.6])
@pytest.mark.parametrize("samples", [0, 1])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_the_same_as_on_one_machine(tmp_path, client, rate, samples, dtype):
    g = alleles(501, 77, 1, rate) if rate else np.abs(alleles(501, 77, 1, 0))
    stored = make(tmp_path / "g", g if samples else g.T, chunks=(64, 50))
    options = {"samples": samples, "verify": True, "out_dtype": dtype, "chunks": (20, 30)}
    here = ooc_gemm.king(stored, tmp_path / "h", **options, **LIMITS)
    with on(client):
        found = ooc_gemm.king(stored, tmp_path / "c", **options)
    assert zarr.open_array(tmp_path / "c")[:].tobytes() == zarr.open_array(tmp_path / "h")[:].tobytes()
    np.testing.assert_allclose(found.array[:], kinship(g), rtol=1e-6 if dtype == "f4" else 1e-15)
    assert (found.verified, found.variants, found.missing) == (True, 501, (g == -1).sum())
    assert found.device == "cpu on 2 workers"
    assert (found.bytes_read, found.bytes_passed >= here.bytes_passed) == (found.plan.bytes_read, True)
    assert {path.name for path in tmp_path.iterdir()} == {"g", "h", "c"}


def test_genotypes_that_only_some_variants_lack(tmp_path, client):
    """A worker that misses none makes no product, but what is heterozygous there counts."""
    g = np.abs(alleles(300, 40, 2, 0))
    g[250:, 3:9] = -1
    stored = make(tmp_path / "g", g, chunks=(50, 40))
    with on(client):
        found = ooc_gemm.king(stored, tmp_path / "c", out_dtype="f8")
    np.testing.assert_allclose(found.array[:], kinship(g), rtol=1e-15)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path, client, layout):
    g = alleles(211, 40, 2)
    stored = make(tmp_path / "g", g, **LAYOUTS[layout])
    with on(client):
        found = ooc_gemm.king(stored, tmp_path / "c", out_dtype="f8")
    np.testing.assert_allclose(found.array[:], kinship(g), rtol=1e-15)


def test_calls_of_vcf_zarr(tmp_path, client):
    """Whose result is a group with names of samples."""
    calls = np.random.default_rng(3).integers(-1, 2, (60, 20, 2)).astype("i1")
    group = zarr.open_group(tmp_path / "g", mode="w")
    group.create_array("call_genotype", data=calls, chunks=(16, 8, 2))
    names = group.create_array("sample_id", shape=(20,), dtype="str", chunks=(20,))
    names[:] = [f"s{i}" for i in range(20)]
    with on(client):
        found = ooc_gemm.king(tmp_path / "g", tmp_path / "c", chunks=(8, 8))
    want = ooc_gemm.king(tmp_path / "g", **LIMITS).array
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "c" / "stat_king_kinship")[...], want)
    assert found.samples[:2] == ["s0", "s1"]
    assert not list(tmp_path.rglob(".ooc-gemm-*"))


def test_wrong_genotypes_are_named_by_their_variant(tmp_path, client):
    g = alleles(300, 40, 4)
    g[222, 5] = 7
    stored = make(tmp_path / "g", g, chunks=(50, 40))
    with on(client), pytest.raises(InputError, match=r"g holds 7 for variant 222; give 0, 1 or 2 alleles"):
        ooc_gemm.king(stored, tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["g"]


def test_a_run_is_continued_here_or_there(tmp_path, client, monkeypatch):
    g = make(tmp_path / "g", alleles(300, 90, 6), chunks=(64, 64))
    whole = ooc_gemm.king(g, tmp_path / "whole", chunks=(16, 16), **LIMITS)
    take, taken = Publication.take, []

    def limited(self, *found):
        taken.append(found)
        if len(taken) > 3:
            raise ooc_gemm.StoreError("the plug is pulled")
        return take(self, *found)

    with monkeypatch.context() as patch, on(client):
        patch.setattr(Publication, "take", limited)
        with pytest.raises(ooc_gemm.StoreError, match="plug"):
            ooc_gemm.king(g, tmp_path / "c", chunks=(16, 16))
    with on(client):
        found = ooc_gemm.king(g, tmp_path / "c", resume=True)
    assert found.bytes_written < whole.bytes_written
    assert zarr.open_array(tmp_path / "c")[:].tobytes() == whole.array[:].tobytes()


def test_what_cannot_be_is_refused_before_anything_is_read(tmp_path, client, monkeypatch):
    g = make(tmp_path / "g", alleles(40, 900, 5), chunks=(20, 300))
    monkeypatch.setattr(heterozygous, "counted", None)
    with on(client), pytest.raises(InputError, match="C is not in a folder that workers share"):
        ooc_gemm.king(g)
    with on(client), pytest.raises(InputError, match="store it as a Zarr array"):
        ooc_gemm.king(alleles(40, 900, 5), tmp_path / "c")
    least = []
    for shares in (False, True):
        with (
            computing(elsewhere.OnWorkers(client, None, "cpu", shares)),
            monkeypatch.context() as patch,
        ):
            patch.setattr("ooc_gemm.statistics.kinship._plan", lambda *given: None)
            patch.setattr("ooc_gemm.run.stream.INTERPRETER_BYTES", 400 << 20)
            with pytest.raises(BudgetError, match="too small to look through") as small:
                ooc_gemm.king(g, tmp_path / "c", memory_limit="300MiB")
        least.append(small.value.minimum_memory_limit)
    assert least[1] - least[0] >= 8 * 900 * 900, "half of four matrices of this process"
    with monkeypatch.context() as patch, on(client):
        patch.setattr(elsewhere, "CLIENT_BYTES", 2 << 30)
        with pytest.raises(BudgetError, match="comes together in this process"):
            ooc_gemm.king(g, tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["g"]


def test_command_line(tmp_path, client, monkeypatch):
    monkeypatch.chdir(tmp_path)
    g = alleles(80, 9, 4)
    make("g", g.T, chunks=(4, 20))
    more = ("--samples", "0", "--scheduler", client.scheduler.address, "-M", "2GiB", "-d", "cpu")
    done = ooc("king", "g", "c", *more, "--json", "--verify")
    assert (done.code, done.err) == (0, "")
    said = json.loads(done.out)
    assert (said["device"], said["verified"]) == ("cpu on 2 workers", True)
    np.testing.assert_allclose(zarr.open_array("c")[:], kinship(g), rtol=1e-6)
    refused = ooc("king", "g", "new", *more, "--plan")
    assert refused.code == 2
    assert "--plan is for one process; leave out --scheduler." in refused.err


def dying(here, shared, variants):
    """The counts, after the worker of the second range has died once."""
    mark = os.path.join(os.environ["TMP_OF_TEST"], "died")
    if variants[0] and not os.path.exists(mark):
        open(mark, "x").close()
        os.kill(os.getpid(), 9)
    return dying.counted(here, shared, variants)


dying.counted = heterozygous.counted


@pytest.mark.slow
def test_a_worker_is_killed(tmp_path, monkeypatch):
    """What it has counted is counted once."""
    monkeypatch.setenv("TMP_OF_TEST", str(tmp_path))
    monkeypatch.setattr(heterozygous, "counted", dying)
    g = alleles(600, 60, 7)
    stored = make(tmp_path / "g", g, chunks=(50, 60))
    here = cluster(2, processes=True, memory_limit="1GiB")
    with patient(), here as client, on(client, memory_limit="512MiB"):
        found = ooc_gemm.king(stored, tmp_path / "c", out_dtype="f8")
    assert (tmp_path / "died").exists()
    np.testing.assert_allclose(found.array[:], kinship(g), rtol=1e-15)


@pytest.mark.slow
def test_local_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    g = alleles(3000, 200, 8)
    make("g", g, chunks=(250, 200))
    done = ooc("king", "g", "c", "--scheduler", "local:2", "-M", "700MiB", "-d", "cpu", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["peak_host_bytes"] <= (700 - 160) // 2 << 20
    np.testing.assert_allclose(zarr.open_array("c")[:], kinship(g), rtol=1e-6)
