"""Nearest neighbours on a cluster, against one machine to the bit, and against brute force in float64."""

import json
import os
import signal
import subprocess

import cupy_on_cpu
import numpy as np
import pytest
import zarr
from arrays import LAYOUTS
from conftest import make, ooc

pytest.importorskip("distributed")

from faults import with_blocks
from launched import Killer, launched, patient, process
from worker_clusters import cluster

import ooc_gemm
from ooc_gemm import BudgetError, InputError
from ooc_gemm.dask import elsewhere
from ooc_gemm.run.elsewhere import computing
from ooc_gemm.statistics import compared, units
from ooc_gemm.statistics.candidates import Candidates
from ooc_gemm.statistics.nearest import Nearest
from ooc_gemm.storage.write import rows as stored
from ooc_gemm.storage.write.rows_folder import staging

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
LIMITS = {"memory_limit": "2GiB", "device": "cpu"}


@pytest.fixture(scope="module")
def client():
    with cluster(2) as found:
        yield found


@pytest.fixture
def blocks(monkeypatch):
    """Of 64 rows and 96 columns."""
    monkeypatch.setattr(compared, "CHUNK_ROWS", 32)
    monkeypatch.setattr("ooc_gemm.run.layout.REDUCED_COLUMNS", 32)
    make_plan = with_blocks(64, 96, 40)
    monkeypatch.setattr(
        "ooc_gemm.run.prepare.make_plan", lambda *given: make_plan(*given).without(frozenset())
    )


@pytest.fixture(params=[pytest.param("rows of blocks", marks=pytest.mark.slow), "parts of them"])
def dealt(request, blocks, monkeypatch):
    """Units of five rows of blocks, or of parts of them; returns into how many each is cut."""
    monkeypatch.setattr(units, "FEWEST", 2 if request.param == "rows of blocks" else 10)
    return 1 if request.param == "rows of blocks" else 3


def on(client):
    return ooc_gemm.dask.on(client, **LIMITS)


def normal(*shape, seed=0, dtype="f4"):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def same(found, want):
    """To the bit."""
    for name in ("indices", "values"):
        np.testing.assert_array_equal(getattr(found, name)[...], getattr(want, name)[...])


def as_predicted(found):
    assert found.device == "cpu on 2 workers"
    assert found.bytes_read == found.plan.bytes_read
    assert found.bytes_written == found.plan.bytes_written
    assert found.peak_host_bytes > 0


def brute(a, b, k, others):
    """Rows of B by the dot product with each row of A, of equal ones the first one first."""
    scores = a.astype("f8") @ b.astype("f8").T
    if others:
        np.fill_diagonal(scores, -np.inf)
    order = np.lexsort((np.broadcast_to(np.arange(len(b)), scores.shape), -scores), axis=1)[:, :k]
    return order, np.take_along_axis(scores, order, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left", "right", "metric"),
    [
        (2.0**600, 2.0**600, "sqeuclidean"),
        (2.0**-600, 1, "dot"),
        (1, np.logspace(-280, 280, 410)[:, None], "dot"),
        (np.logspace(-300, 300, 300)[:, None], np.logspace(300, -300, 410)[:, None], "cosine"),
    ],
)
def test_rows_whose_squares_float64_does_not_hold(tmp_path, client, dealt, left, right, metric):
    at = make(tmp_path / "a", normal(300, 7, dtype="f8") * left, chunks=(50, 3))
    bt = make(tmp_path / "b", normal(410, 7, seed=1, dtype="f8") * right, chunks=(60, 7))
    for number, other in enumerate((bt, None)):
        want = ooc_gemm.topk(
            at, other, tmp_path / f"here{number}", k=4, metric=metric, notice=print, **LIMITS
        )
        with on(client):
            out = tmp_path / f"there{number}"
            found = ooc_gemm.topk(at, other, out, k=4, metric=metric, verify=True, notice=print)
        same(found, want)
        as_predicted(found)


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["dot", "cosine", "sqeuclidean"])
@pytest.mark.parametrize("dtype", ["f4", "f8", "i1"])
def test_the_same_as_on_one_machine(tmp_path, client, dealt, metric, dtype):
    a, b = normal(300, 70, dtype="f8") * 40, normal(410, 70, seed=1, dtype="f8") * 40
    at = make(tmp_path / "a", a.astype(dtype), chunks=(50, 30))
    bt = make(tmp_path / "b", b.astype(dtype), chunks=(60, 70), compressors=None)
    for number, other in enumerate((bt, None)):
        want = ooc_gemm.topk(at, other, tmp_path / f"here{number}", k=4, metric=metric, **LIMITS)
        with on(client):
            found = ooc_gemm.topk(at, other, tmp_path / f"there{number}", k=4, metric=metric, verify=True)
        same(found, want)
        as_predicted(found)
        assert found.verified
        assert found.rows_close == want.rows_close
        record, there = (dict(zarr.open_group(tmp_path / f"{x}{number}").attrs) for x in ("here", "there"))
        assert record == there
        if metric == "dot" and dtype != "i1":
            indices, values = brute(*(x.astype(dtype) for x in (a, a if other is None else b)), 4, not other)
            np.testing.assert_array_equal(found.indices[...], indices)
            np.testing.assert_allclose(found.values[...], values, rtol=1e-6)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"a", "b", "here0", "there0", "here1", "there1"}


def test_units_are_what_the_test_says(tmp_path, client, dealt, monkeypatch):
    a, b = make(tmp_path / "a", normal(300, 20)), make(tmp_path / "b", normal(410, 20, seed=1))
    seen = []
    cut = units.units
    monkeypatch.setattr(
        "ooc_gemm.statistics.ranking_elsewhere.units", lambda *given: seen.append(cut(*given)) or seen[-1]
    )
    with on(client):
        ooc_gemm.topk(a, b, tmp_path / "out", k=4)
    ranges = {1: [(0, 410)], 3: [(0, 192), (192, 384), (384, 410)]}[dealt]
    assert [(unit.band, unit.cols) for unit in seen[-1]] == [(i, cols) for i in range(5) for cols in ranges]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path, client, dealt, layout):
    a, b = normal(150, 52), normal(235, 52, seed=1)
    at, bt = make(tmp_path / "a", a, **LAYOUTS[layout]), make(tmp_path / "b", b, **LAYOUTS[layout])
    want = ooc_gemm.topk(at, bt, k=5, metric="sqeuclidean", **LIMITS)
    with on(client):
        found = ooc_gemm.topk(at, bt, tmp_path / "out", k=5, metric="sqeuclidean")
    same(found, want)
    as_predicted(found)


def test_equal_scores_and_rows_that_are_not_finite(tmp_path, client, dealt):
    """More rows are equal than candidates are kept of each part."""
    a = np.random.default_rng(2).integers(-1, 2, (300, 3)).astype("f4")
    a[[5, 70, 299]] = [[np.nan], [np.inf], [-np.inf]]
    at = make(tmp_path / "a", a, chunks=(64, 3))
    want = ooc_gemm.topk(at, k=12, metric="dot", **LIMITS)
    with on(client):
        found = ooc_gemm.topk(at, out=tmp_path / "out", k=12, metric="dot", graph=True)
    same(found, want)
    assert (found.indices[...][[5, 70, 299]] == -1).all()
    assert np.isnan(found.values[...][[5, 70, 299]]).all()
    data, indices, ends = want.csr()
    for name, values in (("data", data), ("indices", indices), ("indptr", ends)):
        np.testing.assert_array_equal(zarr.open_array(tmp_path / "out" / "graph" / name)[...], values)


def test_rows_whose_last_neighbour_is_in_doubt_are_counted(tmp_path, client, dealt):
    """Of 150 rows of the same direction in two parts of B, 5 are chosen; no part leaves out rows in doubt
    where all of its rows are candidates."""
    base = normal(1, 8, seed=3)
    parallel = base * np.arange(1, 151, dtype="f4")[:, None]
    b = np.concatenate([parallel, normal(100, 8, seed=4)])
    a = np.concatenate([base, normal(70, 8, seed=5)])
    at, bt = make(tmp_path / "a", a, chunks=(64, 8)), make(tmp_path / "b", b, chunks=(64, 8))
    with on(client):
        found = ooc_gemm.topk(at, bt, tmp_path / "out", k=5)
        few = ooc_gemm.topk(at, bt, tmp_path / "few", k=247)
    want = [ooc_gemm.topk(at, bt, k=k, **LIMITS) for k in (5, 247)]
    assert [found.rows_close, few.rows_close] == [one.rows_close for one in want]
    assert found.rows_close >= 1
    assert (found.indices[0] < 150).all()
    np.testing.assert_allclose(found.values[0], 1, rtol=1e-6)


def test_copies_of_a_near_row_hide_no_nearer_one(tmp_path, client, dealt):
    row = 2 + normal(1, 64, seed=3)
    base = np.concatenate([np.repeat(row + 3e-4 * normal(9, 64, seed=4), 20, axis=0), row])
    base = np.concatenate([base, 2 + normal(100, 64, seed=5)]).astype("f4")
    at, bt = make(tmp_path / "a", row.astype("f4")), make(tmp_path / "b", base, chunks=(64, 40))
    with on(client):
        found = ooc_gemm.topk(at, bt, tmp_path / "out", k=1, metric="sqeuclidean", verify=True)
    assert found.indices[...].tolist() == [[180]]
    as_predicted(found)


def test_rows_of_clusters_are_compared_again_in_float64(tmp_path, client, dealt):
    random = np.random.default_rng(6)
    x = np.repeat(1e4 * random.standard_normal((5, 4)), 80, axis=0) + random.standard_normal((400, 4))
    x = make(tmp_path / "x", x.astype("f4"), chunks=(64, 4))
    said = []
    want = ooc_gemm.topk(x, k=3, metric="sqeuclidean", **LIMITS)
    with on(client):
        found = ooc_gemm.topk(x, out=tmp_path / "out", k=3, metric="sqeuclidean", notice=said.append)
    same(found, want)
    as_predicted(found)
    assert found.rows_close == 0
    assert "float64" in " ".join(said)


def test_rows_that_hardly_differ_are_multiplied_in_float64(tmp_path, client, dealt):
    a = make(tmp_path / "a", 1e4 + normal(300, 30), chunks=(64, 30))
    said = []
    want = ooc_gemm.topk(a, k=4, metric="sqeuclidean", **LIMITS)
    with on(client):
        found = ooc_gemm.topk(a, out=tmp_path / "out", k=4, metric="sqeuclidean", notice=said.append)
    same(found, want)
    assert "float64" in said[0]


def test_a_short_a_is_compared_with_ranges_of_b(tmp_path, client):
    """By plans as they are: one row of blocks, of as many blocks as there are workers."""
    values = normal(40, 16), normal(30000, 16, seed=1)
    a, b = (make(tmp_path / name, x, chunks=(4000, 16)) for name, x in zip("ab", values, strict=True))
    with on(client):
        found = ooc_gemm.topk(a, b, tmp_path / "out", k=5, metric="dot")
    assert found.plan.bm == 40
    assert found.plan.block_count >= 2
    as_predicted(found)
    np.testing.assert_array_equal(
        found.indices[...], brute(normal(40, 16), normal(30000, 16, seed=1), 5, 0)[0]
    )


def test_a_workers_device_finds_the_best_of_its_blocks(tmp_path, dealt, monkeypatch):
    """Scores stay on the device: a target that would reduce them gets none."""
    cupy_on_cpu.install(monkeypatch, "90")
    monkeypatch.setattr(Nearest, "take", None)
    values = normal(300, 30), normal(410, 30, seed=1)
    a, b = (make(tmp_path / name, x, chunks=(64, 30)) for name, x in zip("ab", values, strict=True))
    with cluster(1) as client, ooc_gemm.dask.on(client, memory_limit="2GiB", device="cuda"):
        found = ooc_gemm.topk(a, b, tmp_path / "out", k=4, metric="dot")
    assert found.plan.problem.found_bytes
    assert found.peak_device_bytes > 0
    assert found.bytes_read == found.plan.bytes_read
    indices, values = brute(*values, 4, False)
    np.testing.assert_array_equal(found.indices[...], indices)
    np.testing.assert_allclose(found.values[...], values, rtol=1e-6)


def interrupt(monkeypatch, count):
    """Writing fails when so many chunks of rows are written."""
    write, left = stored.RowArrays.write, iter(range(count))

    def limited(self, *args):
        if next(left, None) is None:
            raise ooc_gemm.StoreError("the plug is pulled")
        return write(self, *args)

    monkeypatch.setattr(stored.RowArrays, "write", limited)


@pytest.mark.slow
@pytest.mark.parametrize("second", ["there", "here"])
def test_an_interrupted_run_is_continued_to_the_same_bits(tmp_path, client, dealt, second, monkeypatch):
    a, b = make(tmp_path / "a", normal(300, 70)), make(tmp_path / "b", normal(410, 70, seed=1))
    out = tmp_path / "out"
    with on(client):
        whole = ooc_gemm.topk(a, b, tmp_path / "whole", k=4)
        with monkeypatch.context() as patch:
            interrupt(patch, 3)
            with pytest.raises(ooc_gemm.StoreError, match="plug"):
                ooc_gemm.topk(a, b, out, k=4)
        assert not out.exists()
        with pytest.raises(InputError, match="resume=True"):
            ooc_gemm.topk(a, b, out, k=4)
        with pytest.raises(InputError, match="k was 4 and is 5"):
            ooc_gemm.topk(a, b, out, k=5, resume=True)
    if second == "there":
        with on(client):
            found = ooc_gemm.topk(a, b, out, k=4, resume=True)
    else:
        found = ooc_gemm.topk(a, b, out, k=4, resume=True, **LIMITS)
    assert found.rows_resumed == 3 * 32
    assert found.bytes_read == found.plan.bytes_read
    same(found, whole)
    said = []
    with on(client):
        again = ooc_gemm.topk(a, b, out, k=4, resume=True, notice=said.append)
    assert again.rows_resumed == 300
    assert "finished already" in said[0]
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "out", "whole"}


def test_what_workers_get_wrong_is_found(tmp_path, client, blocks, monkeypatch):
    a, of = make(tmp_path / "a", normal(120, 9), chunks=(32, 9)), Candidates.of

    def wrong(*args):
        found, moved = of(*args)
        found.scores[:, 1] *= 1.001
        return found, moved

    monkeypatch.setattr(Candidates, "of", wrong)
    with on(client), pytest.raises(ooc_gemm.VerificationError, match="is wrong in row"):
        ooc_gemm.topk(a, out=tmp_path / "out", k=5, verify=True)
    assert {path.name for path in tmp_path.iterdir()} == {"a", staging(tmp_path / "out").name}


def test_requests_that_cannot_be_are_refused_before_anything_is_written(tmp_path, client):
    x, values = make(tmp_path / "x", normal(300, 70), chunks=(64, 70)), normal(300, 70)
    with on(client):
        for given, said in (
            ({"a": x}, "out is not in a folder that workers share"),
            ({"a": values, "out": tmp_path / "out"}, "store it as a Zarr array first"),
            ({"a": x, "b": values, "out": tmp_path / "out"}, "store it as a Zarr array first"),
            (
                {"a": x, "out": tmp_path / "out", "device": ooc_gemm.devices.open_device("cpu")},
                "each worker op",
            ),
            ({"a": x, "out": tmp_path / "out", "device": "cuda:0"}, "device='cpu'"),
        ):
            with pytest.raises(InputError, match=said):
                ooc_gemm.topk(**given, k=3)
        with pytest.raises(BudgetError, match="too small for"):
            ooc_gemm.topk(x, out=tmp_path / "out", k=3, memory_limit="10MiB")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_what_comes_together_here_counts(tmp_path, client, monkeypatch):
    """In the limit of this process or, where all share one, in that of each worker."""
    b = make(tmp_path / "b", normal(6000, 4), chunks=(400, 4))
    for module in ("dask.on_worker", "support.memory"):  # what was freed meanwhile does not count
        monkeypatch.setattr(f"ooc_gemm.{module}.resident_bytes", lambda: 300 << 20)
    with computing(elsewhere.OnWorkers(client, "8GiB", "cpu")):
        alone = ooc_gemm.topk(b, out=tmp_path / "alone", k=3)
        with monkeypatch.context() as patch:
            patch.setattr(elsewhere, "CLIENT_BYTES", 8 << 30)
            with pytest.raises(BudgetError, match="what comes together in this process"):
                ooc_gemm.topk(b, out=tmp_path / "out", k=3)
    assert not (tmp_path / "out").exists()
    with computing(elsewhere.OnWorkers(client, "8GiB", "cpu", shares=True)):
        shared = ooc_gemm.topk(b, out=tmp_path / "shared", k=3)
    same(alone, shared)
    more = shared.plan.budget.host_baseline - alone.plan.budget.host_baseline
    assert more >= 6000 * 8 // 2, "at least the norms"


def test_command_line(tmp_path, client, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make("a", normal(90, 20), chunks=(16, 16))
    more = ("--scheduler", client.scheduler.address, "-d", "cpu", "-M", "2GiB")
    done = ooc("topk", "a", "out", "-k", 3, *more, "--json", "--verify")
    assert (done.code, done.err) == (0, "")
    said = json.loads(done.out)
    assert (said["device"], said["verified"], said["shape"]) == ("cpu on 2 workers", True, [90, 90])
    np.testing.assert_array_equal(zarr.open_array("out/indices")[...], brute_cosine(normal(90, 20), 3))
    refused = ooc("topk", "a", "new", *more, "--plan")
    assert refused.code == 2
    assert "--plan is for one process; leave out --scheduler." in refused.err


def brute_cosine(a, k):
    wide = a.astype("f8")
    wide /= np.linalg.norm(wide, axis=1, keepdims=True)
    return brute(wide, wide, k, True)[0]


@pytest.mark.slow
def test_local_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make("a", normal(9000, 32), chunks=(1000, 32))
    done = ooc("topk", "a", "out", "-k", 3, "--scheduler", "local:2", "-d", "cpu", "-M", "1GiB", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["peak_host_bytes"] <= 1 << 29
    want = ooc_gemm.topk("a", k=3, **LIMITS)
    np.testing.assert_array_equal(zarr.open_array("out/indices")[...], want.indices)
    small = ooc("topk", "a", "small", "--scheduler", "local:2", "-d", "cpu", "-M", "100MiB")
    assert small.code == 2
    assert "too small for 2 workers" in small.err
    least = int(small.err.rpartition("do is ")[2].split()[0])
    assert ooc("topk", "a", "least", "--scheduler", "local:2", "-d", "cpu", "-M", least).code == 0


@pytest.mark.slow
def test_a_worker_is_killed(tmp_path, dealt):
    a = make(tmp_path / "a", normal(300, 70), chunks=(64, 70))
    b = make(tmp_path / "b", normal(410, 70, seed=1), chunks=(64, 70))
    with patient(), cluster(2, processes=True, memory_limit="1GiB") as client:
        kill = Killer(list(client.run(os.getpid).values())[:1], [0.2])
        with ooc_gemm.dask.on(client, memory_limit="512MiB", device="cpu"):
            found = ooc_gemm.topk(a, b, tmp_path / "out", k=4, progress=kill)
    assert kill.left == []
    same(found, ooc_gemm.topk(a, b, k=4, **LIMITS))


def chunks_of(out):
    return len(list((staging(out) / "values" / "c").glob("*/0")))


@pytest.mark.slow
def test_the_client_is_killed_and_the_run_goes_on(tmp_path, monkeypatch):
    a = make(tmp_path / "a", normal(20000, 64), chunks=(2000, 64), compressors=None)
    whole = ooc_gemm.topk(a, k=3, **LIMITS)
    command = ["topk", a, str(tmp_path / "out"), "-k", "3", "-d", "cpu", "-Q", "--json", "-M", "264MiB"]
    with launched(tmp_path, monkeypatch, "Slow(0)") as (address, _):
        first = process("ooc_gemm.cli", *command, "--scheduler", address, log=subprocess.PIPE)
        while not chunks_of(tmp_path / "out"):
            assert first.poll() is None, first.communicate()[0].decode()
        first.send_signal(signal.SIGKILL)
        first.communicate()
        second = ooc(*command, "--scheduler", address, "--resume")
    assert second.code == 0, second.err
    assert 0 < json.loads(second.out)["rows_resumed"] < 20000
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "out" / "indices")[...], whole.indices)
    assert not list(tmp_path.glob(".ooc-gemm-*")), "the second run has removed what the first has left"
