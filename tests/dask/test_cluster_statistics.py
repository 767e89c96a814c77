"""Transforms and statistics on a cluster, against one machine and against NumPy in float64."""

import json
import os
import signal
import subprocess

import numpy as np
import pytest
import zarr
from conftest import make, ooc

pytest.importorskip("distributed")

from along_k import cut_into
from launched import Killer, chunks, launched, more_are_done, patient, process
from slow_disk import Slow, SlowSums
from worker_clusters import cluster

import ooc_gemm
from ooc_gemm import InputError, Operand
from ooc_gemm.dask.large import Large

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
LIMITS = {"memory_limit": "2GiB", "device": "cpu"}


@pytest.fixture(scope="module")
def client():
    with cluster(2) as found:
        yield found


@pytest.fixture(params=["blocks", "ranges of k"])
def parts(request, monkeypatch):
    """C is cut into superblocks, or k into ranges."""
    if request.param == "ranges of k":
        monkeypatch.setattr("ooc_gemm.planning.search._best", cut_into(3, (32, 32)))
    return 3 if request.param == "ranges of k" else 1


def on(client):
    return ooc_gemm.dask.on(client, **LIMITS)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def close(found, want, tolerance=1e-6):
    """Relative to the largest element; NaN in the same places."""
    assert found.shape == want.shape
    assert (np.isnan(found) == np.isnan(want)).all()
    assert np.nanmax(np.abs(found - want)) <= tolerance * np.nanmax(np.abs(want))


def as_predicted(result, parts=1):
    assert result.device == "cpu on 2 workers"
    assert result.plan.problem.parts == parts
    assert result.bytes_read == result.plan.bytes_read
    assert result.bytes_written == result.plan.bytes_written


@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_operands(tmp_path, client, parts, transposed):
    x, y = normal(70, 90) + 50, normal(90, 50, seed=1)
    x[3, 7] = x[60, 88] = np.nan
    a = make(tmp_path / "a", x.T if transposed else x, chunks=(16, 16), compressors=None)
    b = make(tmp_path / "b", y, chunks=(16, 16), compressors=None)
    rows, weights = "columns" if transposed else "rows", np.linspace(-1, 2, 90)
    left = Operand(a, transpose=transposed, center=rows, scale=rows, missing=np.nan, weights=weights)
    right = Operand(b, center="rows")
    with on(client):
        done = ooc_gemm.multiply(left, right, tmp_path / "c", alpha=2, chunks=(16, 16), verify=True)
    as_predicted(done, parts)
    assert done.verified
    assert done.bytes_passed >= x.nbytes + y.nbytes
    wide = np.ma.masked_invalid(x.astype("f8"))
    wide = ((wide - wide.mean(1, keepdims=True)) / wide.std(1, keepdims=True)).filled(0) * weights
    want = 2 * wide @ (y - y.astype("f8").mean(1, keepdims=True))
    close(zarr.open_array(tmp_path / "c")[...], want)
    again = ooc_gemm.multiply(left, right, tmp_path / "c", alpha=2, resume=True, **LIMITS)
    assert again.blocks_resumed == again.blocks, "it is the result of the same problem on one machine"


def test_tables_and_decoded_elements(tmp_path, client, parts):
    x = np.random.default_rng(1).integers(-2, 3, (60, 80)).astype("i1")
    a = make(tmp_path / "a", x, chunks=(16, 16))
    table = np.arange(256) % 7
    with on(client):
        done = ooc_gemm.gram(Operand(a, table=table), tmp_path / "c", chunks=(16, 16), out_dtype="i4")
    as_predicted(done, parts)
    want = table[x].astype("i4")
    assert (zarr.open_array(tmp_path / "c")[...] == want @ want.T).all()
    packed = zarr.open_array(a, mode="r+")
    packed.attrs.update(scale_factor=0.5, add_offset=3.0, _FillValue=-2)
    with on(client):
        ooc_gemm.gram(Operand(a, decode_cf=True), tmp_path / "d", chunks=(16, 16))
    want = np.where(x == -2, 0, x * 0.5 + 3)
    close(zarr.open_array(tmp_path / "d")[...], want @ want.T)


@pytest.mark.parametrize("rowvar", [False, True])
def test_cov_and_corrcoef(tmp_path, client, parts, rowvar):
    values = normal(300, 40) + 1e3
    values = values.T.copy() if rowvar else values
    x = make(tmp_path / "x", values, chunks=(16, 16), compressors=None)
    weights = np.random.default_rng(1).random(300)
    with on(client):
        found = ooc_gemm.cov(x, tmp_path / "c", rowvar=rowvar, aweights=weights, chunks=(16, 16), verify=True)
        other = ooc_gemm.corrcoef(x, tmp_path / "r", rowvar=rowvar, chunks=(16, 16), verify=True)
    wide, here = values.astype("f8"), ooc_gemm.cov(x, rowvar=rowvar, **LIMITS)
    for result in (found, other):
        as_predicted(result, parts)
        assert result.verified
        assert result.bytes_passed == here.bytes_passed
    close(zarr.open_array(tmp_path / "c")[...], np.cov(wide, rowvar=rowvar, aweights=weights))
    correlations = zarr.open_array(tmp_path / "r")[...]
    close(correlations, np.corrcoef(wide, rowvar=rowvar))
    assert (np.diag(correlations) == 1).all()
    assert (correlations == correlations.T).all()
    close(found.mean, np.average(wide, axis=int(rowvar), weights=weights))
    assert zarr.open_array(tmp_path / "r").attrs["ooc-gemm"]["options"]["product"] == "corrcoef"


@pytest.mark.parametrize("method", ["gcta", "vanraden"])
@pytest.mark.parametrize("meanimpute", [False, True])
def test_grm(tmp_path, client, parts, method, meanimpute):
    """With means for missing genotypes, or the number of variants that two samples share."""
    genotypes = np.random.default_rng(2).integers(-1, 3, (200, 40)).astype("i1")
    g = make(tmp_path / "g", genotypes, chunks=(16, 16))
    given = {"method": method, "meanimpute": meanimpute or method == "vanraden", "maf": 0.2}
    with on(client):
        found = ooc_gemm.grm(g, tmp_path / "c", chunks=(16, 16), verify=True, **given)
    as_predicted(found, parts)
    want = ooc_gemm.grm(g, **given, **LIMITS)
    close(zarr.open_array(tmp_path / "c")[...], want.array)
    assert (found.variants, found.missing) == (want.variants, want.missing)


def test_calls_of_vcf_zarr(tmp_path, client):
    """Which workers open as the matrix that they hold."""
    calls = np.random.default_rng(3).integers(-1, 2, (60, 20, 2)).astype("i1")
    group = zarr.open_group(tmp_path / "g", mode="w")
    group.create_array("call_genotype", data=calls, chunks=(16, 8, 2))
    with on(client):
        ooc_gemm.grm(tmp_path / "g", tmp_path / "c", chunks=(8, 8))
    want = ooc_gemm.grm(tmp_path / "g", **LIMITS).array
    close(zarr.open_array(tmp_path / "c")[...], want)


def test_the_lower_triangle(tmp_path, client, parts):
    values = normal(70, 90)
    x = make(tmp_path / "x", values, chunks=(16, 16), compressors=None)
    with on(client):
        done = ooc_gemm.gram(x, tmp_path / "c", triangle="lower", chunks=(16, 16))
    as_predicted(done, parts)
    close(zarr.open_array(tmp_path / "c")[...], np.tril(values.astype("f8") @ values.T))


def test_what_is_for_one_machine_is_refused(tmp_path, client):
    x = make(tmp_path / "x", normal(30, 20), chunks=(16, 16))
    c = tmp_path / "c"
    for name, compute in {
        "trace": lambda: ooc_gemm.gram(x, c, trace=tmp_path / "t.json"),
        "rechunk": lambda: ooc_gemm.gram(x, c, rechunk=True),
    }.items():
        with on(client), pytest.raises(InputError, match=f"^{name} is for one machine, and not for a clus"):
            compute()
        with pytest.raises(InputError, match=r"^C is not in a folder"), on(client):
            ooc_gemm.cov(x)
    with pytest.raises(InputError, match=r"store it as a Zarr array"), on(client):
        ooc_gemm.cov(normal(30, 20), c)
    with pytest.raises(InputError, match=r"^G is not where workers find it; store it as a Zarr"), on(client):
        ooc_gemm.grm(np.zeros((30, 20), "i1"), c)
    assert not c.exists()
    assert ooc_gemm.cov(x, rowvar=False, **LIMITS).device == "cpu", "the context is over"
    with on(client):
        assert ooc_gemm.plan(x, x, transpose_b=True).budget.workers == 2


def test_large_arrays_travel_in_a_file(tmp_path):
    values = {"a": (np.arange(100_000), np.zeros(0), None), "b": np.asfortranarray(normal(30, 40))}
    sent = Large.written(values, tmp_path / "file")
    assert len(sent.rest) < 2000
    found = sent.read()
    assert (found["a"][0] == values["a"][0]).all()
    assert (found["b"] == values["b"]).all()
    assert (found["a"][1].shape, found["a"][2]) == ((0,), None)


def test_command_lines(tmp_path, client, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values, genotypes = normal(90, 20), np.random.default_rng(1).integers(-1, 3, (90, 20)).astype("i1")
    make("x", values, chunks=(16, 16))
    make("g", genotypes, chunks=(16, 16))
    more = ("--scheduler", client.scheduler.address, "-d", "cpu", "-M", "2GiB")
    for command, option in (("cov", "--no-rowvar"), ("corrcoef", "--rowvar"), ("grm", "--meanimpute")):
        x = "g" if command == "grm" else "x"
        done = ooc(command, x, command, option, *more, "--json", "--verify")
        assert (done.code, done.err) == (0, "")
        said = json.loads(done.out)
        assert (said["device"], said["verified"]) == ("cpu on 2 workers", True)
        refused = ooc(command, x, "new", *more, "--plan")
        assert refused.code == 2
        assert "--plan is for one process; leave out --scheduler." in refused.err
    close(zarr.open_array("cov")[...], np.cov(values.astype("f8"), rowvar=False))
    done = ooc("gram", "x", "g1", "--center", "rows", "--triangle", "lower", *more)
    assert (done.code, done.err) == (0, "")


@pytest.mark.slow
def test_local_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = normal(900, 200) + 100
    make("x", values, chunks=(100, 100))
    more = ("--scheduler", "local:2", "-d", "cpu")
    done = ooc("cov", "x", "c", "--no-rowvar", *more, "-M", "1GiB", "--json")
    assert done.code == 0, done.err
    close(zarr.open_array("c")[...], np.cov(values.astype("f8"), rowvar=False))
    small = ooc("cov", "x", "d", *more, "-M", "100MiB")
    assert small.code == 2
    assert "too small for 2 workers" in small.err
    with ooc_gemm.dask.on("local:2", memory_limit="1GiB", device="cpu"):
        found = ooc_gemm.corrcoef("x", "r", rowvar=False)
    assert found.device == "cpu on 2 workers"
    close(zarr.open_array("r")[...], np.corrcoef(values.astype("f8"), rowvar=False))


@pytest.mark.slow
def test_a_worker_is_killed(tmp_path, parts):
    values = normal(400, 90) + 100
    x = make(tmp_path / "x", values, chunks=(40, 30), compressors=None)
    with patient(), cluster(2, processes=True, memory_limit="1GiB") as client:
        client.register_plugin(SlowSums() if parts > 1 else Slow(0.05))
        kill = Killer(list(client.run(os.getpid).values())[:1], [0.3])
        with ooc_gemm.dask.on(client, memory_limit="512MiB", device="cpu"):
            found = ooc_gemm.corrcoef(x, tmp_path / "c", rowvar=False, chunks=(16, 16), progress=kill)
    assert kill.left == []
    assert found.plan.problem.parts == parts
    close(zarr.open_array(tmp_path / "c")[...], np.corrcoef(values.astype("f8"), rowvar=False))


@pytest.mark.slow
def test_the_client_is_killed_and_the_run_goes_on(tmp_path, monkeypatch):
    values = normal(500, 120) + 100
    x, c = make(tmp_path / "x", values, chunks=(50, 30), compressors=None), tmp_path / "c"
    command = ["cov", x, str(c), "--no-rowvar", "--chunks", "10,10", "-d", "cpu", "-Q", "--json"]
    with launched(tmp_path, monkeypatch, "Slow(0.1)") as (address, _):
        first = process("ooc_gemm.cli", *command, "-M", "600MiB", "--scheduler", address, log=subprocess.PIPE)
        while chunks(c) < 30:  # of 144, so that a whole block is among them
            more_are_done(c, first)
        first.send_signal(signal.SIGKILL)
        first.communicate()
        second = ooc(*command, "-M", "600MiB", "--scheduler", address, "--resume")
    assert second.code == 0, second.err
    done = json.loads(second.out)
    assert 0 < done["blocks_resumed"] < done["blocks"]
    close(zarr.open_array(c)[...], np.cov(values.astype("f8"), rowvar=False))
