"""Pairs of rows whose scores reach a value: against brute force in float64, spilled, resumed, on disk."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import cupy_on_cpu
import numpy as np
import pytest
import zarr
from arrays import LAYOUTS
from compared_rows import assert_found, dense, rows, scores, value
from conftest import make, ooc
from least import least_limit

import ooc_gemm
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.devices.cuda.device import CUDA
from ooc_gemm.statistics import above, compared
from ooc_gemm.statistics.above import Above
from ooc_gemm.storage.write import rows as stored
from ooc_gemm.storage.write import sparse as files

sparse = pytest.importorskip("scipy.sparse")
MiB = 1 << 20
METRICS = ["cosine", "correlation", "dot"]


class Downloading(CPU):
    """A device that does not reduce: its blocks are downloaded, and reduced by the target."""

    reduces = False


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "u1", "i4"])
def test_types_and_metrics(dtype, metric):
    a, b = rows((61, 19), dtype, 1), rows((333, 19), dtype, 2)
    wanted = scores(a, b, metric)
    least = value(wanted, 0.05)
    for device in ("cpu", Downloading()):
        found = ooc_gemm.threshold(a, b, least=least, metric=metric, device=device)
        assert_found(found, wanted, least)
        exact = {"i1": "i4", "u1": "i4", "i4": "i8"}.get(dtype) if metric == "dot" else None
        assert found.data.dtype == (exact or ("f8" if dtype in ("f8", "i4") else "f4"))
    wanted = scores(b, b, metric)
    assert_found(ooc_gemm.threshold(b, least=least, metric=metric, include_self=True), wanted, least)
    np.fill_diagonal(wanted, np.nan)
    assert_found(ooc_gemm.threshold(b, least=least, metric=metric, device="cpu"), wanted, least)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_what_scipy_and_anndata_read(tmp_path, layout, monkeypatch):
    monkeypatch.setattr(stored, "SPARSE_CHUNK", 32)
    monkeypatch.setattr(compared, "CHUNK_ROWS", 16)
    a, b = rows((70, 52), "f4", 3) + 50, rows((135, 52), "f4", 4) + 50
    at, bt = make(tmp_path / "a", a, **LAYOUTS[layout]), make(tmp_path / "b", b, **LAYOUTS[layout])
    wanted = scores(a, b, "correlation")
    least = value(wanted, 0.1)
    found = ooc_gemm.threshold(at, bt, tmp_path / "out", least=least, metric="correlation", device="cpu")
    assert_found(found, wanted, least)
    assert found.bytes_read == found.plan.bytes_read
    assert found.bytes_written == 2 * found.count * 12 + 71 * 8
    group = zarr.open_group(tmp_path / "out", mode="r")
    assert sorted(os.listdir(tmp_path / "out")) == ["data", "indices", "indptr", "zarr.json"]
    attributes = dict(group.attrs)
    assert {key: attributes[key] for key in ("encoding-type", "encoding-version", "shape")} == {
        "encoding-type": "csr_matrix",
        "encoding-version": "0.1.0",
        "shape": [70, 135],
    }
    anndata = pytest.importorskip("anndata")
    read = anndata.io.read_elem(group)
    assert read.shape == (70, 135)
    assert (read != sparse.csr_matrix(found.csr(), shape=found.shape)).nnz == 0


@pytest.mark.parametrize("device", ["cpu", Downloading()], ids=["reduces", "downloads"])
def test_elements_that_do_not_fit_go_to_files(tmp_path, device, monkeypatch):
    monkeypatch.setattr(above, "ROOM", 4096)
    monkeypatch.setattr(compared, "CHUNK_ROWS", 48)
    spilled, spill = [], Above._spill
    monkeypatch.setattr(Above, "_spill", lambda self, *args: spilled.append(1) or spill(self, *args))
    a = rows((100, 30), "f4", 5)
    at = make(tmp_path / "a", a, chunks=(60, 30))
    wanted = scores(a, a, "cosine")
    np.fill_diagonal(wanted, np.nan)
    for share in (0.1, 1.0):
        least = value(wanted, share) if share < 1 else -2.0
        spilled.clear()
        found = ooc_gemm.threshold(at, out=tmp_path / "out", least=least, device=device, force=True)
        # What the last parts hold need not go to a file: with few pairs one file may be all.
        assert len(spilled) >= (2 if share == 1 else 1)
        assert_found(found, wanted, least)
        assert sorted(os.listdir(tmp_path / "out")) == ["data", "indices", "indptr", "zarr.json"]


def test_absolute_scores_and_rows_that_have_none():
    a = rows((40, 6), "f4", 6)
    a[3, 2], a[5, 0], a[9], a[11] = np.nan, np.inf, 0, 7
    for metric in METRICS:
        wanted = scores(a, a, metric)
        np.fill_diagonal(wanted, np.nan)
        if metric == "correlation":
            wanted[11] = wanted[:, 11] = np.nan
        finite = np.where(np.isfinite(wanted), wanted, np.nan)
        least = value(np.abs(finite), 0.3)
        found = ooc_gemm.threshold(a, least=least, metric=metric, absolute=True, device="cpu")
        out, sure = dense(found), np.isfinite(finite)
        assert np.array_equal(np.isfinite(out)[sure], np.abs(finite[sure]) >= least)
        assert (out[sure] < 0).any()
        if metric != "dot":
            assert np.isnan(out[[3, 5]]).all()
            assert np.isnan(out[9]).all()


@pytest.mark.parametrize("device", ["cpu", Downloading()], ids=["reduces", "downloads"])
def test_dot_products_that_are_too_large_are_told_of(device):
    """The sum of two products that are infinite in float32 is infinite, or NaN, which reaches no value."""
    a, b = np.full((3, 2), 1e20, "f4"), np.array([[1e20, -1e20], [1, 1], [-1e20, 0]], "f4")
    run = partial(ooc_gemm.threshold, least=-1e30, metric="dot", device=device)
    with pytest.warns(UserWarning, match="6 dot products are too large for float32"):
        found = run(a, b)
    assert found.bytes_read == found.plan.bytes_read
    assert (found.data[found.indices == 1] == np.float32(2e20)).sum() == 3
    assert run(a.astype("f8"), b.astype("f8")).count == 6
    run(np.diag(np.array([1e20, 1e20], "f4")))  # not of a row with itself
    a[1, 0], b[1, 1] = np.nan, np.inf  # rows that have no scores
    with pytest.warns(UserWarning, match="4 dot products are too large"):
        run(a, b)
    b[[0, 2]] = 1
    run(a, b)
    run(b)


def test_no_score_is_beyond_1():
    x = np.repeat(rows((1, 77), "f4", 7), 200, axis=0) * np.arange(1, 201, dtype="f4")[:, None]
    for metric in ("cosine", "correlation"):
        found = ooc_gemm.threshold(x, least=0.9999, metric=metric, device="cpu")
        assert found.count == 200 * 199
        assert found.data.max() <= 1


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_sizes_that_products_in_float32_cannot_hold(size):
    a = (rows((50, 8), "f8", 8) * size).astype("f4")
    wanted = scores(a, a, "cosine")
    np.fill_diagonal(wanted, np.nan)
    least = value(wanted, 0.1)
    assert_found(ooc_gemm.threshold(a, least=least, device="cpu"), wanted, least)


def test_the_reduction_takes_tiles_in_any_order(tmp_path):
    random = np.random.default_rng(9)
    c = random.standard_normal((530, 900)).astype("f4")
    for spill in (None, tmp_path):
        found = Above(c.shape, 200, 1.5, others=True, spill=spill, most=1 << 30)
        found.room = 3000
        tiles = [(i, j) for i in range(0, 530, 40) for j in range(0, 900, 300)]
        for index in random.permutation(len(tiles)):
            i, j = tiles[index]
            found.take(c[i : i + 40, j : j + 300].copy(), i, j)
        for band in range(3):
            height = min(200, 530 - 200 * band)
            merged = found.rows(band)
            parts = list(merged.parts(10, height, 64))
            merged.close()
            here = c[200 * band + 10 : 200 * band + height].copy()
            same = np.arange(200 * band + 10, 200 * band + height)
            here[same - same[0], same] = 0
            at, columns = np.nonzero(here >= 1.5)
            assert np.array_equal(np.concatenate([part[1] for part in parts]), columns)
            assert np.array_equal(np.concatenate([part[0] for part in parts]), here[at, columns])
            counts = np.concatenate([part[2] for part in parts])
            assert np.array_equal(counts, np.bincount(at, minlength=len(here)))
            assert max(part[2].sum() for part in parts) <= max(64, counts.max())


@pytest.mark.parametrize("metric", METRICS)
def test_a_gpu_sends_its_blocks_to_the_host(monkeypatch, metric):
    cupy_on_cpu.install(monkeypatch, "90")
    a, b = rows((130, 70), "f4", 10), rows((2100, 70), "f4", 11)
    wanted = scores(a, b, metric)
    least = value(wanted, 0.01)
    found = ooc_gemm.threshold(a, b, least=least, metric=metric, device=CUDA())
    assert found.device.startswith("cuda")
    assert_found(found, wanted, least)


def interrupt(monkeypatch, count):
    """Writing fails when so many chunks of rows are written."""
    write, left = files.SparseRows.write, iter(range(count))

    def limited(self, *args):
        if next(left, None) is None:
            raise ooc_gemm.StoreError("the plug is pulled")
        return write(self, *args)

    monkeypatch.setattr(files.SparseRows, "write", limited)


def test_an_interrupted_run_is_continued_to_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(compared, "CHUNK_ROWS", 64)
    a, b = rows((500, 60), "f4", 12), rows((900, 60), "f4", 13)
    at, bt = make(tmp_path / "a", a), make(tmp_path / "b", b)
    options = {"device": "cpu", "least": 0.25}
    whole = ooc_gemm.threshold(at, bt, tmp_path / "whole", **options)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        interrupt(patch, 3)
        with pytest.raises(ooc_gemm.StoreError, match="plug"):
            ooc_gemm.threshold(at, bt, out, **options)
    assert not out.exists()
    with pytest.raises(ooc_gemm.InputError, match="resume=True"):
        ooc_gemm.threshold(at, bt, out, **options)
    with pytest.raises(ooc_gemm.InputError, match=r"least was 0\.25 and is 0\.5"):
        ooc_gemm.threshold(at, bt, out, resume=True, device="cpu", least=0.5)
    with pytest.raises(ooc_gemm.InputError, match="metric was cosine"):
        ooc_gemm.threshold(at, bt, out, resume=True, metric="correlation", **options)
    done = ooc_gemm.threshold(at, bt, out, resume=True, **options)
    assert done.rows_resumed == 3 * 64
    assert done.bytes_read == done.plan.bytes_read
    for mine, theirs in zip(done.csr(), whole.csr(), strict=True):
        assert mine.tobytes() == theirs.tobytes()
    said = []
    again = ooc_gemm.threshold(at, bt, out, resume=True, notice=said.append, **options)
    assert (again.rows_resumed, again.bytes_written, again.count) == (500, 0, whole.count)
    assert "finished already" in said[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "out", "whole"]


def test_too_many_for_memory_is_an_error_that_says_what_to_do():
    x = np.ones((3000, 4), "f4")
    limit = ooc_gemm.threshold(x, least=2.0, device="cpu").plan.host_bytes
    with pytest.raises(MemoryError, match="give a higher value, or an output"):
        ooc_gemm.threshold(x, least=0.5, device="cpu", memory_limit=min(limit, 600 * MiB))


def test_requests_that_cannot_be_are_refused(tmp_path):
    x = rows((9, 4), "f4", 14)
    for options, said in (
        ({"least": np.nan}, "finite"),
        ({"metric": "cityblock"}, "choose one of cosine, correlation, dot"),
        ({"b": x[:, :3]}, "rows of B 3"),
        ({"b": x.astype("c8")}, "complex"),
        ({"b": ooc_gemm.Operand(x)}, "transforms no inputs"),
        ({"b": x[:0]}, "empty"),
        ({"resume": True}, "stored"),
        ({"out": tmp_path / "out", "resume": True}, "known again"),
        ({"out": "http://127.0.0.1:1/c"}, "neither a local folder nor in an object store"),
    ):
        with pytest.raises(ooc_gemm.InputError, match=said):
            ooc_gemm.threshold(x, **{"least": 0.5, **options})
    with pytest.raises(ooc_gemm.BudgetError) as small:
        ooc_gemm.threshold(x, out=tmp_path / "out", least=0.5, memory_limit=1)
    assert small.value.minimum_memory_limit
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("metric", METRICS)
def test_the_smallest_limit_that_is_named_does(tmp_path, metric):
    """In memory, a share of any limit is for what is found. What happens to rows takes passes over them."""
    x = rows((500, 4000), "f4", 19)
    a = make(tmp_path / "a", x, chunks=(500, 4000), compressors=[zarr.codecs.ZstdCodec()])
    for given in (x, a):
        run = partial(ooc_gemm.threshold, given, least=0.02, metric=metric, device="cpu")
        _, found = least_limit(run)
        assert_found(found, np.where(np.eye(500), np.nan, scores(x, x, metric)), 0.02)
    least_limit(lambda memory_limit: run(out=tmp_path / "out", memory_limit=memory_limit))


def test_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = rows((40, 6), "f4", 15), rows((70, 6), "f4", 16)
    make("a", a)
    make("b", b)
    wanted = scores(a, b, "dot")
    least = value(wanted, 0.1)
    done = ooc("threshold", "a", "b", "out", "--least", least, "--metric", "dot", "-d", "cpu", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert (found["shape"], found["count"]) == ([40, 70], (wanted >= least).sum())
    assert zarr.open_array("out/data").shape == (found["count"],)
    done = ooc("threshold", "a", "others", "--least", 0.8, "--absolute", "-d", "cpu", "-v")
    assert done.code == 0, done.err
    assert "pairs of rows reach ±0.8 by cosine" in done.out
    assert "reduced as they come" in done.out
    done = ooc("threshold", "a", "others", "--least", 0.8, "-d", "cpu")
    assert done.code == 2
    assert "--force" in done.err
    assert ooc("threshold", "a", "--least", 0.8).code == 2


PROGRAM = """
import json, sys
import ooc_gemm
options = json.loads(sys.argv[1])
found = ooc_gemm.threshold(**options)
print(json.dumps([found.peak_host_bytes, found.count]))
"""


@pytest.mark.slow
def test_a_process_keeps_the_limit_also_where_all_pairs_are_kept(tmp_path):
    make(tmp_path / "x", rows((4000, 16), "f4", 17), chunks=(1000, 16), compressors=None)
    options = {"a": str(tmp_path / "x"), "device": "cpu", "memory_limit": 256 * MiB, "least": -2.0}
    command = [sys.executable, "-c", PROGRAM, json.dumps({**options, "out": str(tmp_path / "out")})]
    peak, count = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    assert count == 4000 * 3999
    assert peak <= 256 * MiB


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4"])
def test_results_that_are_right_pass_their_check(tmp_path, dtype, metric):
    a, b = rows((61, 19), dtype, 33), rows((333, 19), dtype, 34)
    a[5] = b[9] = 0
    if dtype == "f4":
        a[3, 1], b[17, 1], b[203, 4] = np.nan, np.nan, np.inf
        b[50] = 3e38
        a[7:] += 1000
    asked = {"least": value(scores(a, b, metric), 0.05), "metric": metric, "device": "cpu", "verify": True}
    large = metric == "dot" and dtype == "f4"  # products with 3e38, which are told of
    for options in ({"b": b}, {"include_self": True}, {}, {"b": b, "absolute": True}):
        with pytest.warns(UserWarning, match="large") if large and "b" in options else nullcontext():
            assert ooc_gemm.threshold(a, **asked, **options).verified
    asked["notice"] = lambda said: None
    at, bt = make(tmp_path / "a", a, chunks=(16, 8)), make(tmp_path / "b", b, chunks=(50, 19))
    found = ooc_gemm.threshold(at, bt, tmp_path / "t", **asked)
    assert found.verified
    assert found.bytes_read == found.plan.bytes_read
    again = ooc_gemm.threshold(at, bt, tmp_path / "t", **asked, resume=True)
    assert (again.verified, again.rows_resumed) == (True, 61)
    assert again.bytes_read == again.plan.bytes_read
    assert ooc_gemm.threshold(at, bt, **{**asked, "verify": False}).verified is None
    nothing = ooc_gemm.threshold(np.full((3, 6), np.nan, "f4"), **{**asked, "least": 0.5})
    assert (nothing.count, nothing.verified) == (0, True)


@pytest.mark.parametrize("metric", METRICS)
def test_equal_scores_pass_their_check(metric):
    a = np.random.default_rng(35).integers(-1, 2, (90, 3)).astype("f4")
    for least in (1.0, 0.5, 0.0):
        assert ooc_gemm.threshold(a, least=least, metric=metric, device="cpu", verify=True).verified
    ones = np.ones((500, 3), "i1")
    assert ooc_gemm.threshold(ones, least=1, metric=metric, device="cpu", verify=True).verified


def spoiled(data, columns, counts, fault):
    """Rows of a sparse matrix with a fault in each that has elements."""
    ends = np.concatenate([[0], np.cumsum(counts)])
    parts = [[x[start:stop].copy() for x in (data, columns)] for start, stop in pairwise(ends)]
    for values, places in parts:
        if fault == "values":
            values[:1] *= 1.001
        elif fault == "columns":  # the score of another pair
            places[:1] = 0 if len(places) and places[0] else 1
        elif fault == "order":
            values[:], places[:] = values[::-1].copy(), places[::-1].copy()
    if fault == "missing":
        parts = [[x[1:] for x in part] for part in parts]
    data, columns = (np.concatenate([part[i] for part in parts]) for i in range(2))
    return data, columns, np.array([len(values) for values, _ in parts])


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("fault", ["values", "columns", "order", "missing"])
def test_results_that_are_wrong_are_not_kept(tmp_path, metric, fault, monkeypatch):
    x = make(tmp_path / "x", rows((120, 9), "f4", 36), chunks=(32, 9))
    asked = {"least": value(scores(*[rows((120, 9), "f4", 36)] * 2, metric), 0.3), "metric": metric}
    asked |= {"device": "cpu", "verify": True}
    write = files.SparseRows.write

    def wrong(self, number, parts):
        return write(self, number, [spoiled(*part, fault) for part in parts])

    with monkeypatch.context() as patch:
        patch.setattr(files.SparseRows, "write", wrong)
        with pytest.raises(ooc_gemm.VerificationError, match="is wrong in row"):
            ooc_gemm.threshold(x, out=tmp_path / "t", **asked)
    assert not (tmp_path / "t").exists()
    assert ooc_gemm.threshold(x, out=tmp_path / "t", **asked, force=True).verified


@pytest.mark.parametrize("fault", ["data", "indices", "indptr"])
def test_a_finished_result_that_was_changed_is_found(tmp_path, monkeypatch, fault):
    monkeypatch.chdir(tmp_path)
    make("x", rows((200, 9), "f4", 37), chunks=(32, 9))
    command = ("threshold", "x", "t", "--least", 0.2, "-d", "cpu", "-M", "1GiB")
    assert ooc(*command).code == 0
    array = zarr.open_array("t/" + fault)
    values = array[:]
    array[:] = values + values.dtype.type(1) if fault == "indptr" else values[::-1]
    done = ooc(*command, "--resume", "--verify")
    assert done.code == 3, done.err
    assert "t is wrong in row" in done.err
    assert "--force" in done.err
    done = ooc(*command, "--force", "--verify", "--json")
    assert (done.code, json.loads(done.out)["verified"]) == (0, True)
    assert ooc(*command, "--resume", "--verify").code == 0


@pytest.mark.parametrize("metric", ["cosine", "correlation"])
@pytest.mark.parametrize("factor", [1e-165, 1e-300, 1e200])
def test_rows_whose_squares_float64_does_not_hold(metric, factor):
    x = np.array([[1, -1, 2, -2.0], [3, 1, 2, -6]])
    found = ooc_gemm.threshold(x * [[factor], [1]], least=-1, metric=metric, device="cpu")
    assert np.allclose(found.data, scores(x, x, metric)[0, 1], rtol=1e-13)
    assert found.count == 2


@pytest.mark.parametrize("metric", ["cosine", "correlation"])
@pytest.mark.parametrize("row", [[0, 1e-309, 5e-309, 2e-309], [1.7e308, -1.7e308, 1.7e308, 1.7e308]])
def test_rows_that_float64_does_not_hold_are_told_of(recwarn, metric, row):
    x, said = np.array([row, [3, 1, 2, -6.0], [1, 1, 2, 2]]), []
    found = ooc_gemm.threshold(x, least=-1, metric=metric, device="cpu", verify=True, notice=said.append)
    assert found.count == 2
    assert [text for text in said if "1 of the 3 rows of A are too long or too short" in text]
    assert not list(recwarn)
