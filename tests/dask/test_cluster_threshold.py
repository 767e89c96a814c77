"""Pairs of rows that reach a value, on a cluster, against one machine and against brute force in float64."""

import json
import os
import signal
import subprocess
from contextlib import suppress

import numpy as np
import pytest
import zarr
from arrays import LAYOUTS
from compared_rows import assert_found, rows, scores, value
from conftest import make, ooc

pytest.importorskip("distributed")

from faults import with_blocks
from launched import launched, patient, process
from worker_clusters import cluster

import ooc_gemm
from ooc_gemm import BudgetError, InputError, StoreError
from ooc_gemm.dask import elsewhere
from ooc_gemm.run.elsewhere import computing
from ooc_gemm.statistics import above, compared, selection_elsewhere, units
from ooc_gemm.storage.write import rows_folder
from ooc_gemm.storage.write import sparse as files

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
LIMITS = {"memory_limit": "2GiB", "device": "cpu"}


@pytest.fixture(scope="module")
def client():
    with cluster(2) as found:
        yield found


@pytest.fixture(params=[pytest.param("rows of blocks", marks=pytest.mark.slow), "parts of them"])
def dealt(request, monkeypatch):
    """Units of five rows of blocks of 64 rows and 96 columns, or of parts of them. Elements go to files and
    are put together in a little memory."""
    monkeypatch.setattr(compared, "CHUNK_ROWS", 32)
    monkeypatch.setattr("ooc_gemm.run.layout.REDUCED_COLUMNS", 32)
    make_plan = with_blocks(64, 96, 40)
    monkeypatch.setattr(
        "ooc_gemm.run.prepare.make_plan", lambda *given: make_plan(*given).without(frozenset())
    )
    monkeypatch.setattr(units, "FEWEST", 2 if request.param == "rows of blocks" else 10)
    monkeypatch.setattr(above, "ROOM", 1 << 15)


def on(client, **more):
    return ooc_gemm.dask.on(client, **{**LIMITS, **more})


def same(found, want):
    """To the bit."""
    for mine, theirs in zip(found.csr(), want.csr(), strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.tobytes() == theirs.tobytes()


def near(found, want):
    """The same pairs. A worker with another number of threads cuts products otherwise, which may change the
    last bits of float32."""
    for mine, theirs in zip(found.csr()[1:], want.csr()[1:], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert found.data.dtype == want.data.dtype
    np.testing.assert_allclose(found.data[:], want.data[:], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["cosine", "correlation", "dot"])
@pytest.mark.parametrize(("dtype", "absolute"), [("f4", False), ("f4", True), ("f8", False), ("i1", True)])
def test_the_same_as_on_one_machine(tmp_path, client, dealt, metric, dtype, absolute):
    a, b = rows((300, 30), dtype, 1), rows((410, 30), dtype, 2)
    at = make(tmp_path / "a", a, chunks=(50, 16))
    bt = make(tmp_path / "b", b, chunks=(60, 30), compressors=None)
    for number, (other, wide) in enumerate(((bt, b), (None, a))):
        wanted = scores(a, wide, metric)
        least = value(np.abs(wanted) if absolute else wanted, 0.1)
        asked = {"least": least, "metric": metric, "absolute": absolute}
        want = ooc_gemm.threshold(at, other, tmp_path / f"here{number}", **asked, **LIMITS)
        with on(client):
            found = ooc_gemm.threshold(at, other, tmp_path / f"there{number}", **asked, verify=True)
        near(found, want)
        if other is None:
            np.fill_diagonal(wanted, np.nan)
        assert_found(found, wanted, least, absolute=absolute)
        assert (found.device, found.verified) == ("cpu on 2 workers", True)
        assert found.bytes_read == found.plan.bytes_read
        record, there = (dict(zarr.open_group(tmp_path / f"{x}{number}").attrs) for x in ("here", "there"))
        assert record == there
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"a", "b", "here0", "there0", "here1", "there1"}


def test_dot_products_of_rows_that_are_large_or_small(tmp_path, client, dealt):
    sizes = np.logspace(-300, 300, 300)[:, None]
    at = make(tmp_path / "a", rows((300, 9), "f8", 1) * sizes, chunks=(50, 9))
    bt = make(tmp_path / "b", rows((410, 9), "f8", 2), chunks=(60, 9))
    for number, other in enumerate((bt, None)):
        asked = {"least": 1.5, "metric": "dot", "notice": lambda said: None}
        want = ooc_gemm.threshold(at, other, tmp_path / f"here{number}", **asked, **LIMITS)
        with on(client):
            found = ooc_gemm.threshold(at, other, tmp_path / f"there{number}", **asked)
        near(found, want)
        assert found.bytes_read == found.plan.bytes_read


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path, client, dealt, layout):
    a, b = rows((150, 52), "f4", 3) + 50, rows((235, 52), "f4", 4) + 50
    at, bt = make(tmp_path / "a", a, **LAYOUTS[layout]), make(tmp_path / "b", b, **LAYOUTS[layout])
    wanted = scores(a, b, "correlation")
    least = value(wanted, 0.1)
    with on(client):
        found = ooc_gemm.threshold(at, bt, tmp_path / "out", least=least, metric="correlation")
    assert_found(found, wanted, least)
    assert found.bytes_read == found.plan.bytes_read
    assert sorted(os.listdir(tmp_path / "out")) == ["data", "indices", "indptr", "zarr.json"]


@pytest.mark.parametrize("least", [-2.0, 2.0])
def test_all_pairs_and_none(tmp_path, client, dealt, least):
    at = make(tmp_path / "a", rows((300, 4), "f4", 5), chunks=(64, 4))
    with on(client):
        found = ooc_gemm.threshold(at, out=tmp_path / "out", least=least)
    assert found.count == (300 * 299 if least < 0 else 0)
    near(found, ooc_gemm.threshold(at, least=least, **LIMITS))


def interrupt(monkeypatch, count):
    """No more chunks of rows arrive when so many have."""
    write, left = files.SparseRows.write, iter(range(count))

    def limited(self, *args):
        if next(left, None) is None:
            raise StoreError("the plug is pulled")
        return write(self, *args)

    monkeypatch.setattr(files.SparseRows, "write", limited)


@pytest.mark.slow
@pytest.mark.parametrize("second", ["there", "here"])
def test_an_interrupted_run_is_continued_to_the_same_bits(tmp_path, client, dealt, second, monkeypatch):
    a, b = make(tmp_path / "a", rows((300, 60), "f4", 12)), make(tmp_path / "b", rows((410, 60), "f4", 13))
    out, asked = tmp_path / "out", {"least": 0.25}
    with on(client):
        whole = ooc_gemm.threshold(a, b, tmp_path / "whole", **asked)
        with monkeypatch.context() as patch:
            interrupt(patch, 3)
            with pytest.raises(StoreError, match="plug"):
                ooc_gemm.threshold(a, b, out, **asked)
        assert not out.exists()
        with pytest.raises(InputError, match=r"least was 0\.25 and is 0\.5"):
            ooc_gemm.threshold(a, b, out, least=0.5, resume=True)
    if second == "there":
        with on(client):
            found = ooc_gemm.threshold(a, b, out, **asked, resume=True)
    else:
        found = ooc_gemm.threshold(a, b, out, **asked, resume=True, **LIMITS)
    assert found.rows_resumed == 3 * 32
    assert found.bytes_read == found.plan.bytes_read
    (same if second == "there" else near)(found, whole)
    said = []
    with on(client):
        again = ooc_gemm.threshold(a, b, out, **asked, resume=True, notice=said.append)
    assert again.rows_resumed == 300
    assert "finished already" in said[0]
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "out", "whole"}


def test_what_workers_get_wrong_is_found(tmp_path, client, dealt, monkeypatch):
    a, select = make(tmp_path / "a", rows((300, 9), "f4", 6), chunks=(64, 9)), selection_elsewhere.select

    def wrong(here, shared, unit):
        folder, lost = select(here, shared, unit)
        for file in os.scandir(folder):
            if file.name.endswith(".data"):
                data = np.fromfile(file.path, np.float32)
                (data * np.float32(1.001)).tofile(file.path)
        return folder, lost

    monkeypatch.setattr(selection_elsewhere, "select", wrong)
    with on(client), pytest.raises(ooc_gemm.VerificationError, match="is wrong in row"):
        ooc_gemm.threshold(a, out=tmp_path / "out", least=0.1, verify=True)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path, client, monkeypatch):
    x = make(tmp_path / "x", rows((300, 7), "f4", 7), chunks=(64, 7))
    out = tmp_path / "out"
    for module in ("dask.on_worker", "support.memory"):  # what was freed meanwhile does not count
        monkeypatch.setattr(f"ooc_gemm.{module}.resident_bytes", lambda: 300 << 20)
    with on(client):
        with pytest.raises(InputError, match="out is not in a folder that workers share"):
            ooc_gemm.threshold(x, least=0.5)
        with pytest.raises(InputError, match="store it as a Zarr array first"):
            ooc_gemm.threshold(x, rows((3, 7), "f4", 7), out, least=0.5)
        with pytest.raises(BudgetError, match=r"too small for (this product|what comes together)"):
            ooc_gemm.threshold(x, out=out, least=0.5, memory_limit="100MiB")
        with monkeypatch.context() as patch:
            patch.setattr(elsewhere, "CLIENT_BYTES", 3 << 30)
            with pytest.raises(BudgetError, match="comes together in this process"):
                ooc_gemm.threshold(x, out=out, least=0.5)
        alone = ooc_gemm.threshold(x, out=tmp_path / "alone", least=0.5)
    with computing(elsewhere.OnWorkers(client, "2GiB", "cpu", shares=True)):
        shared = ooc_gemm.threshold(x, out=tmp_path / "shared", least=0.5)
    more = shared.plan.budget.host_baseline - alone.plan.budget.host_baseline
    assert more >= above.COPIES * above.ROOM // 2
    assert {path.name for path in tmp_path.iterdir()} == {"x", "alone", "shared"}


def test_command_line(tmp_path, client, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make("a", rows((90, 20), "f4", 8), chunks=(16, 16))
    more = ("--scheduler", client.scheduler.address, "-d", "cpu", "-M", "2GiB")
    done = ooc("threshold", "a", "out", "--least", 0.2, *more, "--json", "--verify")
    assert (done.code, done.err) == (0, "")
    said = json.loads(done.out)
    want = ooc_gemm.threshold("a", least=0.2, **LIMITS)
    assert (said["device"], said["verified"], said["count"]) == ("cpu on 2 workers", True, want.count)
    np.testing.assert_array_equal(zarr.open_array("out/indices")[...], want.indices)
    refused = ooc("threshold", "a", "new", "--least", 0.2, *more, "--plan")
    assert refused.code == 2
    assert "--plan is for one process; leave out --scheduler." in refused.err


def dying(here, shared, unit):
    """What reaches the value, after a worker has died once when it had found it."""
    found = dying.select(here, shared, unit)
    with suppress(FileExistsError):
        open(os.path.join(os.environ["TMP_OF_TEST"], "died"), "x").close()
        os.kill(os.getpid(), 9)
    return found


dying.select = selection_elsewhere.select


@pytest.mark.slow
def test_a_worker_is_killed(tmp_path, dealt, monkeypatch):
    monkeypatch.setenv("TMP_OF_TEST", str(tmp_path))
    monkeypatch.setattr(selection_elsewhere, "select", dying)
    a = make(tmp_path / "a", rows((300, 60), "f4", 12), chunks=(64, 60))
    here = cluster(2, processes=True, memory_limit="1GiB")
    with patient(), here as client, on(client, memory_limit="512MiB"):
        found = ooc_gemm.threshold(a, out=tmp_path / "out", least=0.2)
    assert (tmp_path / "died").exists()
    near(found, ooc_gemm.threshold(a, least=0.2, **LIMITS))
    assert not list(tmp_path.glob(".ooc-gemm-*"))


@pytest.mark.slow
def test_local_processes_keep_their_limit_also_where_all_pairs_are_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make("x", rows((3000, 16), "f4", 17), chunks=(1000, 16), compressors=None)
    local = ("--scheduler", "local:2", "-d", "cpu", "-M", "800MiB", "--json")
    done = ooc("threshold", "x", "out", "--least", -2, *local)
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert said["count"] == 3000 * 2999
    assert said["peak_host_bytes"] <= (800 - 160) // 2 << 20


@pytest.mark.slow
def test_the_client_is_killed_and_the_run_goes_on(tmp_path, monkeypatch):
    a = make(tmp_path / "a", rows((20000, 64), "f4", 9), chunks=(2000, 64), compressors=None)
    whole = ooc_gemm.threshold(a, least=0.5, **LIMITS)
    command = ["threshold", a, str(tmp_path / "out"), "--least", "0.5", "-d", "cpu", "-Q", "--json"]
    with launched(tmp_path, monkeypatch, "Slow(0)") as (address, _):
        more = ["-M", "330MiB", "--scheduler", address]
        first = process("ooc_gemm.cli", *command, *more, log=subprocess.PIPE)
        folder = rows_folder.staging(tmp_path / "out") / rows_folder.PARTS
        while not any(one.name.isdecimal() for one in folder.glob("*")):
            assert first.poll() is None, first.communicate()[0].decode()
        first.send_signal(signal.SIGKILL)
        first.communicate()
        second = ooc(*command, *more, "--resume")
    assert second.code == 0, second.err
    assert 0 < json.loads(second.out)["rows_resumed"] < 20000
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "out" / "indices")[...], whole.indices)
