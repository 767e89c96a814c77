"""Products on a cluster whose workers cut k, and add up partial sums of C."""

import json
import os
import subprocess

import numpy as np
import pytest
import zarr
from conftest import make, ooc

pytest.importorskip("distributed")

from along_k import cut_into
from launched import Killer, launched, more_are_done, patient, process
from slow_disk import SlowSums
from worker_clusters import cluster

import ooc_gemm
from ooc_gemm import InputError, RangeError
from ooc_gemm.dask import partial
from ooc_gemm.storage.format import unfinished
from ooc_gemm.storage.io.folder import Folder

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
OPTIONS = {"device": "cpu", "memory_limit": "2GiB"}


@pytest.fixture(autouse=True)
def cut(monkeypatch):
    """k is cut into two ranges for each worker, however short they are."""
    monkeypatch.setattr("ooc_gemm.planning.search.MOST_RANGES", 2)
    monkeypatch.setattr("ooc_gemm.planning.cost.TASK_SECONDS", 0.0)
    monkeypatch.setattr("ooc_gemm.planning.search.RANGE_SECONDS", 1e-12)


@pytest.fixture(scope="module")
def client():
    """Of three workers."""
    with cluster(3) as found:
        yield found


def tall(tmp_path, dtype="f4", name="x", rows=1000, cols=40):
    values = np.random.default_rng(0).standard_normal((rows, cols))
    values = (values * 5 if np.dtype(dtype).kind in "iu" else values).astype(dtype)
    return values, make(tmp_path / name, values, chunks=(16, 20), compressors=None)


def near(found, want, tolerance=1e-3):
    assert found.shape == want.shape
    assert (np.abs(found - want) <= tolerance).all()  # NaN fails


def test_a_tall_product_is_spread_over_workers(tmp_path, client):
    values, x = tall(tmp_path)
    want = values.T.astype("f8") @ values
    seen = []
    result = ooc_gemm.dask.multiply(
        x, x, tmp_path / "c", transpose_a=True, chunks=(40, 40), client=client, verify=True,
        progress=lambda fraction, plan, trace: seen.append(fraction), **OPTIONS,
    )  # fmt: skip
    assert result.plan.block_count == 1
    assert result.plan.problem.parts >= 6
    assert result.verified is True
    assert result.bytes_read == result.plan.bytes_read == 2 * values.nbytes
    assert result.bytes_written == result.plan.bytes_written == 40 * 40 * 4
    assert (seen == sorted(seen), seen[-1]) == (True, 1)
    near(zarr.open_array(tmp_path / "c")[...], want)
    again = ooc_gemm.multiply(x, x, tmp_path / "c", transpose_a=True, resume=True, device="cpu")
    assert again.blocks_resumed == again.blocks, "it is the result of the same problem on one machine"
    assert ooc_gemm.verify(x, x, tmp_path / "c").ok
    address = client.scheduler.address
    done = ooc("gram", x, tmp_path / "g", "--transpose", "--scheduler", address, "-d", "cpu", "-M", "2GiB")
    assert (done.code, done.err) == (0, "")
    gram = zarr.open_array(tmp_path / "g")[...]
    near(gram, want)
    assert (gram == gram.T).all()


@pytest.mark.slow
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("chunks", [(8, 8), (16, 10), (40, 40)])
def test_gram_in_several_blocks(tmp_path, client, monkeypatch, transpose, chunks):
    """Whether k is cut or C, both halves are written, and they are the same."""
    values, x = tall(tmp_path, rows=200)
    want = values.T.astype("f8") @ values if transpose else values.astype("f8") @ values.T
    result = ooc_gemm.dask.gram(
        x, tmp_path / "c", transpose=transpose, chunks=chunks, alpha=-2.0, client=client, **OPTIONS
    )
    assert result.plan.problem.symmetric
    assert result.bytes_read == result.plan.bytes_read
    found = zarr.open_array(tmp_path / "c")[...]
    near(found, -2 * want)
    assert (found == found.T).all()
    ooc_gemm.dask.gram(x, tmp_path / "c", transpose=transpose, beta=0.5, client=client, **OPTIONS)
    near(zarr.open_array(tmp_path / "c")[...], 0 * want, 2e-3)


@pytest.mark.slow
def test_small_blocks_that_are_cut_along_k(tmp_path, client, monkeypatch):
    """As where the memory of workers holds a few of them: each is added up for itself."""
    monkeypatch.setattr("ooc_gemm.planning.search._best", cut_into(5, (16, 16)))
    values, x = tall(tmp_path)
    old = np.random.default_rng(1).standard_normal((40, 40)).astype("f4")
    c = make(tmp_path / "c", old, chunks=(16, 16), compressors=None)
    want = values.T.astype("f8") @ values
    result = ooc_gemm.dask.multiply(
        x, x, c, transpose_a=True, alpha=2, beta=0.5, client=client, verify=True, **OPTIONS
    )
    assert (result.plan.problem.parts, result.blocks) == (5, 9)
    assert result.bytes_read == result.plan.bytes_read
    near(zarr.open_array(c)[...], 2 * want + 0.5 * old)
    result = ooc_gemm.dask.gram(
        x, tmp_path / "g", transpose=True, chunks=(16, 16), compressor="zstd", client=client, **OPTIONS
    )
    assert (result.plan.problem.parts, result.blocks) == (5, 6)
    assert result.bytes_read == result.plan.bytes_read
    near(zarr.open_array(tmp_path / "g")[...], want)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["i1", "u2", "i4", "f2", "f8", "c8"])
def test_types(tmp_path, client, dtype):
    values, x = tall(tmp_path, dtype)
    wide = "i8" if values.dtype.kind in "iu" else "c16"
    want = values.T.astype(wide) @ values.astype(wide)
    options = {"transpose_a": True, "chunks": (40, 40), "client": client, **OPTIONS}
    result = ooc_gemm.dask.multiply(x, x, tmp_path / "c", **options)
    assert result.plan.problem.parts > 1
    found = zarr.open_array(tmp_path / "c")[...]
    assert found.dtype == ooc_gemm.multiply(x, x, transpose_a=True, device="cpu").array.dtype
    near(found.astype(wide), want, 0 if wide == "i8" else 1e-3 * np.abs(want).max())


@pytest.mark.slow
def test_integers_that_do_not_fit_are_an_error(tmp_path, client):
    """Although every partial sum fits."""
    options = {"transpose_a": True, "chunks": (4, 4), "client": client, **OPTIONS}
    for dtype, value, out in (("i4", 2**30 - 1, None), ("i2", 2**14, "i4")):
        values = np.full((64, 4), value, dtype)
        x = make(tmp_path / f"x{dtype}", values, chunks=(4, 4), compressors=None)
        with pytest.raises(RangeError, match=r"int64|does not fit int32"):
            ooc_gemm.dask.multiply(x, x, tmp_path / f"c{dtype}", out_dtype=out, **options)
        half = make(tmp_path / f"h{dtype}", values[:4], chunks=(1, 4), compressors=None)
        ooc_gemm.dask.multiply(half, half, tmp_path / f"d{dtype}", out_dtype=out, **options)
        want = values[:4].astype(object).T @ values[:4].astype(object)
        assert (zarr.open_array(tmp_path / f"d{dtype}")[...] == want).all()


def test_overflow_of_a_sum_of_sums():
    x = np.array([[2**62, -(2**62)], [1, 2**63 - 1]])
    out = np.empty_like(x)
    partial.add(x, np.array([[2**62 - 1, -(2**62)], [-2, 0]]), out)
    assert (out == [[2**63 - 1, -(2**63)], [-1, 2**63 - 1]]).all()
    for y in ([[2**62, 0], [0, 0]], [[0, -(2**62) - 1], [0, 0]], [[0, 0], [0, 1]]):
        with pytest.raises(RangeError, match="may exceed int64"):
            partial.add(x, np.array(y), out)


@pytest.mark.slow
def test_a_range_that_fails_its_check_is_made_again(tmp_path, client, monkeypatch):
    from ooc_gemm.devices.cpu.session import CPUSession

    values, x = tall(tmp_path)
    tile, left, said = CPUSession._tile, [1], []

    def wrongly(self, run, a, b, out, *more):
        tile(self, run, a, b, out, *more)
        if left:
            out[0, 0] += 1000 * left.pop()

    monkeypatch.setattr(CPUSession, "_tile", wrongly)
    ooc_gemm.dask.multiply(
        x, x, tmp_path / "c", transpose_a=True, chunks=(40, 40), client=client, verify=True,
        notice=said.append, **OPTIONS,
    )  # fmt: skip
    assert any("computed once more" in one for one in said)
    near(zarr.open_array(tmp_path / "c")[...], values.T.astype("f8") @ values)


def test_what_a_cluster_does_not_do_is_refused(tmp_path, client):
    _, x = tall(tmp_path)
    with pytest.raises(InputError, match="is not in a folder that workers share"):
        ooc_gemm.dask.gram(x, "memory://c", client=client, **OPTIONS)
    address = client.scheduler.address
    for option in (["--rechunk"], ["--trace", "t.json"]):
        done = ooc("gram", x, tmp_path / "c", "--scheduler", address, *option)
        assert (done.code, f"{option[0]} is for one process; leave out --scheduler." in done.err) == (2, True)
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
def test_workers_are_killed(tmp_path, monkeypatch):
    """What they held is computed again and never added twice, and β·C is added once."""
    monkeypatch.setattr("ooc_gemm.planning.search.MOST_RANGES", 12)
    values, x = tall(tmp_path)
    old = np.random.default_rng(1).standard_normal((40, 40)).astype("f4")
    c = make(tmp_path / "c", old, chunks=(40, 40), compressors=None)
    draw = np.random.default_rng()
    with patient(), cluster(3, processes=True, memory_limit="1GiB") as client:
        client.register_plugin(SlowSums())
        kill = Killer(list(client.run(os.getpid).values())[:2], draw.uniform(0, 0.9, 2))
        result = ooc_gemm.dask.multiply(
            x,
            x,
            c,
            transpose_a=True,
            beta=0.5,
            client=client,
            device="cpu",
            memory_limit="512MiB",
            progress=kill,
        )
    assert kill.left == []
    assert result.plan.problem.parts > 20
    near(zarr.open_array(c)[...], values.T.astype("f8") @ values + 0.5 * old)


@pytest.mark.slow
def test_client_and_scheduler_are_killed_and_the_run_goes_on(tmp_path, monkeypatch):
    """While k is cut: another cluster completes what they have left, and β·C is added once."""
    values, x = tall(tmp_path)
    old = np.random.default_rng(1).standard_normal((40, 40)).astype("f4")
    c = tmp_path / "c"
    make(c, old, chunks=(16, 16), compressors=None)
    command = ["multiply", x, x, str(c), "--transpose-a", "--beta", "0.5", "-d", "cpu", "-Q", "--json"]

    def run(*more):
        more = ("-M", "600MiB", "--scheduler", address, *more)
        return process("along_k", *command, *more, log=subprocess.PIPE)

    with launched(tmp_path, monkeypatch, "SlowSums()") as (address, scheduler):
        first = run()
        more_are_done(c, first)
        first.kill()
        first.communicate()
        second = run("--resume")
        more_are_done(c, second)
        scheduler.kill()
        said = second.communicate()[0].decode()
    assert second.returncode == 1, said
    assert "--resume" in said
    assert unfinished.is_partial(Folder(c))
    monkeypatch.setattr("ooc_gemm.planning.search._best", cut_into(5, (16, 16)))
    with cluster(2) as client:
        third = ooc(*command, "--resume", "--scheduler", client.scheduler.address, "-M", "2GiB")
    assert third.code == 0, third.err
    done = json.loads(third.out)
    assert (done["blocks"], done["plan"]["k_ranges"]) == (9, 5)
    assert 2 <= done["blocks_resumed"] < 9
    near(zarr.open_array(c)[...], values.T.astype("f8") @ values + 0.5 * old)
