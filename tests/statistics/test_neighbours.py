"""Nearest neighbours: against brute force in float64, in every layout, within the limit, and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cupy_on_cpu
import numpy as np
import pytest
import zarr
from arrays import LAYOUTS
from conftest import gpu_missing, make, ooc
from faults import with_blocks

import ooc_gemm
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.devices.cuda.device import CUDA
from ooc_gemm.run.operands import open_operand
from ooc_gemm.statistics import compared, nearest, ranking, rescore
from ooc_gemm.statistics.nearest import Nearest, Scores
from ooc_gemm.storage.write import rows as stored
from ooc_gemm.storage.write import rows_folder

MiB = 1 << 20
METRICS = ["cosine", "dot", "sqeuclidean"]


class Downloading(CPU):
    """A device that does not reduce: its blocks are downloaded, and reduced by the target."""

    reduces = False


def brute(a, b, k, metric, others=False):
    """(indices, values) by all scores in float64; of equal ones the lowest index first."""
    a, b = a.astype("f8"), b.astype("f8")
    scores = a @ b.T
    if metric == "cosine":
        lengths = np.linalg.norm(a, axis=1)[:, None] * np.linalg.norm(b, axis=1)
        scores = np.divide(scores, lengths, out=np.zeros_like(scores), where=lengths > 0)
    elif metric == "sqeuclidean":
        scores = np.array([-np.square(row - b).sum(axis=1) for row in a])
    if others:
        np.fill_diagonal(scores, -np.inf)
    columns = np.broadcast_to(np.arange(len(b)), scores.shape)
    order = np.lexsort((columns, -scores), axis=1)[:, :k]
    values = np.take_along_axis(scores, order, 1)
    return order, -values if metric == "sqeuclidean" else values


def rows(shape, dtype, seed):
    """Values without ties but those that are meant."""
    values = np.random.default_rng(seed).standard_normal(shape)
    return (values * 40).astype(dtype) if np.dtype(dtype).kind in "iu" else values.astype(dtype)


def assert_found(found, expected, bound=1e-6):
    indices, values = expected
    np.testing.assert_array_equal(np.asarray(found.indices), indices)
    assert np.asarray(found.indices).dtype == np.int64
    np.testing.assert_allclose(np.asarray(found.values), values, rtol=bound, atol=bound)


def least_limit(*args, **options):
    with pytest.raises(ooc_gemm.BudgetError) as small:
        ooc_gemm.topk(*args, memory_limit=1, **options)
    return small.value.minimum_memory_limit


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "u1", "i4"])
def test_types_and_metrics(dtype, metric):
    a, b = rows((61, 19), dtype, 1), rows((333, 19), dtype, 2)
    for device in ("cpu", Downloading()):
        found = ooc_gemm.topk(a, b, k=7, metric=metric, device=device)
        assert_found(found, brute(a, b, 7, metric))
        assert found.values.dtype == (np.float32 if dtype in ("f2", "f4") else np.float64)
    assert_found(ooc_gemm.topk(b, k=4, metric=metric, device="cpu"), brute(b, b, 4, metric, others=True))
    found = ooc_gemm.topk(b, k=4, metric=metric, include_self=True, device="cpu")
    assert_found(found, brute(b, b, 4, metric))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path, layout):
    a, b = rows((70, 52), "f4", 3), rows((135, 52), "f4", 4)
    at, bt = make(tmp_path / "a", a, **LAYOUTS[layout]), make(tmp_path / "b", b, **LAYOUTS[layout])
    found = ooc_gemm.topk(at, bt, tmp_path / "out", k=5, metric="sqeuclidean", device="cpu")
    assert_found(found, brute(a, b, 5, "sqeuclidean"), 1e-5)
    assert found.bytes_read == found.plan.bytes_read
    assert found.bytes_written == found.plan.bytes_written == 70 * 5 * 12


@pytest.mark.parametrize(
    "shapes", [((1, 1), (1, 1)), ((3, 5), (2, 5)), ((33, 2), (4097, 2)), ((2, 700), (40, 700))]
)
def test_shapes(shapes):
    a, b = (rows(shape, "f4", number) for number, shape in enumerate(shapes))
    for k in {1, min(20, len(b)), len(b)}:
        assert_found(ooc_gemm.topk(a, b, k=k, metric="dot", device="cpu"), brute(a, b, k, "dot"), 1e-5)


@pytest.mark.parametrize("device", ["cpu", Downloading()], ids=["reduces", "downloads"])
def test_several_rows_of_blocks_and_panels_within_a_small_limit(tmp_path, device, monkeypatch):
    monkeypatch.setattr(compared, "CHUNK_ROWS", 128)
    a, b = rows((500, 600), "f4", 5), rows((4200, 600), "f4", 6)
    at = make(tmp_path / "a", a, chunks=(100, 250), compressors=None)
    bt = make(tmp_path / "b", b, chunks=(400, 250))
    limit = least_limit(at, bt, k=3, device=device) + MiB
    found = ooc_gemm.topk(at, bt, k=3, device=device, memory_limit=limit)
    assert found.plan.bm < 500
    assert found.plan.bn < 4200
    assert found.plan.panel_count > 1
    assert found.plan.host_bytes <= limit
    assert found.bytes_read == found.plan.bytes_read
    assert_found(found, brute(a, b, 3, "cosine"))


@pytest.mark.slow
@pytest.mark.parametrize("metric", METRICS)
def test_equal_scores_are_in_the_order_of_rows(metric):
    a = np.random.default_rng(7).integers(-1, 2, (90, 3)).astype("f4")
    b = np.random.default_rng(8).integers(-1, 2, (4500, 3)).astype("f4")
    assert_found(ooc_gemm.topk(a, b, k=12, metric=metric, device="cpu"), brute(a, b, 12, metric))
    same = np.ones((4200, 3), "i1")
    found = ooc_gemm.topk(same, k=3, metric=metric, device="cpu")
    first = np.array([[j for j in range(4) if j != i][:3] for i in range(4200)])
    assert_found(found, (first, np.full((4200, 3), {"cosine": 1, "dot": 3, "sqeuclidean": 0}[metric])))


def test_rows_of_zeros_have_a_cosine_of_0():
    a, b = rows((4, 6), "f4", 9), rows((5, 6), "f4", 10)
    a[1] = b[2] = 0
    assert_found(ooc_gemm.topk(a, b, k=5, device="cpu"), brute(a, b, 5, "cosine"))


@pytest.mark.parametrize("metric", METRICS)
def test_rows_that_are_not_finite_are_no_neighbours_and_have_none(metric):
    a, b = rows((40, 6), "f4", 11), rows((300, 6), "f4", 12)
    a[3, 2], a[5, 0], b[17, 1], b[203, 4], b[204, 4] = np.nan, np.inf, np.nan, -np.inf, np.nan
    kept = np.delete(np.arange(300), [17, 203, 204])
    for device in ("cpu", Downloading()):
        found = ooc_gemm.topk(a, b, k=8, metric=metric, device=device)
        none = np.isin(np.arange(40), [3, 5])
        assert (found.indices[none] == -1).all()
        assert np.isnan(found.values[none]).all()
        indices, values = brute(a[~none], b[kept], 8, metric)
        np.testing.assert_array_equal(found.indices[~none], kept[indices])
        np.testing.assert_allclose(found.values[~none], values, rtol=1e-5, atol=1e-6)
    few = np.full((3, 6), np.nan, "f4")
    few[1] = 1
    found = ooc_gemm.topk(few, few, k=2, metric=metric, device="cpu")
    assert found.indices.tolist() == [[-1, -1], [1, -1], [-1, -1]]


@pytest.mark.parametrize("metric", ["cosine", "sqeuclidean"])
def test_means_far_from_zero_lose_no_neighbour(metric):
    a, b = rows((50, 30), "f8", 13) + 1e4, rows((2000, 30), "f8", 14) + 1e4
    a, b = a.astype("f4"), b.astype("f4")
    said = []
    found = ooc_gemm.topk(a, b, k=10, metric=metric, device="cpu", notice=said.append)
    indices, values = brute(a, b, 10, metric)
    np.testing.assert_array_equal(found.indices, indices)
    np.testing.assert_allclose(found.values, values, rtol=1e-6)
    assert "float64" in " ".join(said)


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_sizes_that_products_in_float32_cannot_hold(size):
    a, b = rows((20, 8), "f8", 15) * size, rows((100, 8), "f8", 16) * size
    a, b = a.astype("f4"), b.astype("f4")
    found = ooc_gemm.topk(a, b, k=3, device="cpu")
    assert_found(found, brute(a, b, 3, "cosine"))


def test_rows_whose_last_neighbour_is_in_doubt_are_counted():
    """Of 100 rows of the same direction, 5 are chosen. The first ones of copies are in no doubt."""
    base = rows((1, 8), "f4", 17)
    parallel, others = base * np.arange(1, 101, dtype="f4")[:, None], rows((50, 8), "f4", 18)
    assert ooc_gemm.topk(base, np.concatenate([parallel, others]), k=5, device="cpu").rows_close == 1
    copies = np.concatenate([np.repeat(base, 100, axis=0), others])
    found = ooc_gemm.topk(base, copies, k=5, device="cpu")
    assert (found.indices.tolist(), found.rows_close) == ([[0, 1, 2, 3, 4]], 0)
    assert ooc_gemm.topk(rows((30, 8), "f4", 19), rows((60, 8), "f4", 20), k=5, device="cpu").rows_close == 0


def test_the_reduction_takes_tiles_in_any_order():
    random = np.random.default_rng(21)
    for shape, keep, values in (
        ((1100, 4500), 9, "wide"),
        ((530, 900), 300, "wide"),
        ((600, 5000), 5, "few"),
    ):
        c = random.standard_normal(shape) if values == "wide" else random.integers(0, 3, shape)
        c = c.astype("f4")
        found = Nearest(shape, 550, keep, np.dtype("f4"), np.dtype("f4"), Scores())
        tiles = [
            (i, min(i + 192, first + 550, shape[0]), j)
            for first in range(0, shape[0], 550)
            for i in range(first, min(first + 550, shape[0]), 192)
            for j in range(0, shape[1], 1500)
        ]
        for index in random.permutation(len(tiles)):
            i, stop, j = tiles[index]
            found.take(c[i:stop, j : j + 1500].copy(), i, j)
        columns = np.concatenate([found.best(band)[0] for band in range(-(-shape[0] // 550))])
        order = np.lexsort((np.broadcast_to(np.arange(shape[1]), shape), -c), axis=1)
        np.testing.assert_array_equal(columns, order[:, :keep])


@pytest.mark.parametrize("metric", METRICS)
def test_the_graph_is_what_scipy_and_anndata_take(tmp_path, metric, monkeypatch):
    sparse = pytest.importorskip("scipy.sparse")
    monkeypatch.setattr(compared, "CHUNK_ROWS", 16)
    monkeypatch.setattr(stored, "SPARSE_CHUNK", 32)
    x = rows((50, 4), "f4", 22)
    whole = ooc_gemm.topk(make(tmp_path / "x", x), out=tmp_path / "out", k=3, graph=True, device="cpu")
    assert whole.bytes_written == whole.plan.bytes_written
    x[7] = np.nan
    found = ooc_gemm.topk(
        make(tmp_path / "y", x), out=tmp_path / "few", k=3, graph=True, metric=metric, device="cpu"
    )
    made = sparse.csr_matrix(found.csr(), shape=found.shape)
    assert made.has_canonical_format
    assert made.nnz == 49 * 3
    for row in (0, 49):
        indices, values = found.indices[row], found.values[row]
        data = 1 - values if metric == "cosine" else values
        assert made[row, indices].toarray().ravel().tolist() == data.tolist()
    group = zarr.open_group(tmp_path / "few" / "graph", mode="r")
    assert dict(group.attrs) == {
        "encoding-type": "csr_matrix",
        "encoding-version": "0.1.0",
        "shape": [50, 50],
    }
    for name, values in zip(("data", "indices", "indptr"), found.csr(), strict=True):
        np.testing.assert_array_equal(group[name][...], values)


@pytest.fixture(params=["stand-in", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request, monkeypatch):
    """A GPU, or what stands in for CuPy and the driver."""
    if request.param == "stand-in":
        cupy_on_cpu.install(monkeypatch, "90")
    elif why := gpu_missing():
        pytest.skip(why)
    return CUDA()


@pytest.fixture
def blocks(monkeypatch):
    """Of 64 rows and 96 columns, of which 32 are downloaded at a time where C is downloaded."""
    monkeypatch.setattr(compared, "CHUNK_ROWS", 32)
    monkeypatch.setattr("ooc_gemm.run.layout.REDUCED_COLUMNS", 32)
    monkeypatch.setattr("ooc_gemm.run.prepare.make_plan", with_blocks(64, 96, 40))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "i1", "i4"])
def test_a_gpu_finds_the_best_of_its_blocks(gpu, dtype, metric, monkeypatch):
    """Scores stay on the device: a target that would reduce them gets none."""
    monkeypatch.setattr(Nearest, "take", None)
    a, b = rows((150, 70), dtype, 31), rows((410, 70), dtype, 32)
    traces = []
    found = ooc_gemm.topk(a, b, k=4, metric=metric, device=gpu, progress=lambda *told: traces.append(told[2]))
    assert_found(found, brute(a, b, 4, metric), 1e-5)
    size = 4 if dtype in ("f2", "f4") else 8
    record = 10 * (size + 4)
    assert traces[-1].bytes["download"] == found.plan.bytes_downloaded == 150 * record
    assert found.plan.without(frozenset()).bytes_downloaded == 150 * record
    height = found.plan.bm
    held = found.plan.device_ledger["reduction"] - found.plan.problem.kept_bytes
    assert held - 2 * 410 * size in (height * record, 2 * height * record)
    assert not ooc_gemm.plan(a, b, transpose_b=True, device=gpu).device_ledger["reduction"]


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("metric", METRICS)
def test_a_gpu_knows_who_is_no_neighbour(gpu, metric):
    """Not a row itself, nor rows that are not finite; equal ones are in their order."""
    a = rows((300, 9), "f4", 33)
    a[[5, 70, 299]] = [[np.nan], [np.inf], [-np.inf]]
    a[100:104] = a[3]
    found = ooc_gemm.topk(a, k=12, metric=metric, device=gpu)
    there = ooc_gemm.topk(a, k=12, metric=metric, device="cpu")
    np.testing.assert_array_equal(found.indices, there.indices)
    np.testing.assert_allclose(found.values, there.values, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert (found.indices[[5, 70, 299]] == -1).all()
    assert found.indices[3, :4].tolist() == [100, 101, 102, 103] or metric == "dot"


@pytest.mark.parametrize(("n", "k"), [(700, 130), (9, 8), (300, 1), (300, 113)])
def test_a_gpu_sends_what_it_does_not_reduce(gpu, n, k, monkeypatch):
    """More neighbours than its kernel finds, or that fit where parts of C would come."""
    taken, take = [], Nearest.take
    monkeypatch.setattr(Nearest, "take", lambda *args: taken.append(1) or take(*args))
    a, b = rows((40, 20), "f4", 34), rows((n, 20), "f4", 35)
    traces = []
    found = ooc_gemm.topk(a, b, k=k, metric="dot", device=gpu, progress=lambda *told: traces.append(told[2]))
    assert_found(found, brute(a, b, k, "dot"), 1e-5)
    assert bool(taken) == (n != 300)
    assert traces[-1].bytes["download"] == found.plan.bytes_downloaded


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gpu_scores_what_it_has_found(gpu, tmp_path, layout, monkeypatch):
    """B is read once more, for norms, and A only where it is not B; in strips of a few rows."""
    monkeypatch.setattr("ooc_gemm.engine.reduction.STRIP_ROWS", 16)
    a, b = rows((70, 52), "f2", 3), rows((135, 52), "f4", 4)
    b[[3, 100]], a[5] = [[np.nan], [np.inf]], 0
    at, bt = make(tmp_path / "a", a, **LAYOUTS[layout]), make(tmp_path / "b", b, **LAYOUTS[layout])
    for metric, pair in zip(METRICS, ((at, bt), (bt,), (bt, bt)), strict=True):
        there = ooc_gemm.topk(*pair, k=5, metric=metric, device="cpu")
        with monkeypatch.context() as patch:
            patch.setattr("ooc_gemm.statistics.rescore.Exact.scores", None)
            found = ooc_gemm.topk(*pair, k=5, metric=metric, device=gpu)
        np.testing.assert_array_equal(found.indices, there.indices)
        np.testing.assert_allclose(found.values, there.values, rtol=1e-6, atol=1e-6)
        assert found.bytes_read == found.plan.bytes_read
        assert not np.isin(found.indices, (3, 100)).any()
        assert (found.indices[[3, 100]] == -1).all() if pair[0] == bt else (found.indices >= 0).all()


def test_rows_that_do_not_fit_beside_blocks_are_scored_on_the_host(gpu):
    a, b = rows((20, 900), "f4", 5), rows((3000, 900), "f4", 6)
    with pytest.raises(ooc_gemm.BudgetError) as small:
        ooc_gemm.topk(a, b, k=4, device=gpu, device_memory_limit=1)
    limit = small.value.minimum_device_memory_limit
    found = [
        ooc_gemm.topk(a, b, k=4, device=gpu, device_memory_limit=size)
        for size in (limit + MiB, limit + 64 * MiB)
    ]
    assert [bool(one.plan.problem.kept_bytes) for one in found] == [False, True]
    for one in found:
        assert sum(one.plan.device_ledger.values()) <= one.plan.budget.device
        assert_found(one, brute(a, b, 4, "cosine"), 1e-5)
    assert found[1].plan.problem.kept_bytes > 3000 * 900 * 4


def test_rows_of_a_block_of_a_device_are_held_at_once_where_memory_allows(gpu, tmp_path, monkeypatch):
    """So that compressed chunks of B are read once more, and not once for every few columns."""
    monkeypatch.setattr(ranking, "PANEL_BYTES", 1000)
    monkeypatch.setattr("ooc_gemm.statistics.rescore.PANEL_BYTES", 1000)
    monkeypatch.setattr(ranking.Asked, "pairs", lambda self: None)  # as if the device could keep no rows
    a, b = rows((90, 70), "f4", 5), rows((500, 70), "f4", 6)
    bt = make(tmp_path / "b", b, chunks=(100, 70))
    found, read = [], []
    for share in (8, 1 << 40):
        monkeypatch.setattr(ranking, "PANEL_SHARE", share)
        found.append(ooc_gemm.topk(a, bt, k=4, device=gpu))
        assert found[-1].bytes_read == found[-1].plan.bytes_read
        assert_found(found[-1], brute(a, b, 4, "cosine"), 1e-5)
        read.append(found[-1].bytes_read)
    assert 10 * read[0] < read[1]
    assert found[0].plan.host_bytes > found[1].plan.host_bytes


def test_few_threads_upload_large_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(rescore.os, "sched_getaffinity", lambda pid: range(64))
    monkeypatch.setattr(rescore, "UPLOADING_BYTES", 50_000)
    x, threads = rows((500, 10), "f4", 6), {}
    for height in (10, 250, 500):
        at = make(tmp_path / f"{height}", x, chunks=(height, 10))
        threads[height] = rescore.Rows(open_operand(at, "A"), uploads=True).threads
    assert threads == {10: 8, 250: 5, 500: 2}


def test_a_plan_says_no_more_of_float16_than_how_sums_are_kept():
    found = ooc_gemm.topk(rows((30, 4), "f2", 7), k=1, device="cpu")
    assert "float32" in str(found.plan)
    assert "infinite" not in str(found.plan)


def test_rows_that_hardly_differ_are_multiplied_in_float64_on_a_gpu(gpu):
    b = 1e4 + rows((300, 40), "f4", 7)
    notes = []
    found = ooc_gemm.topk(b, k=4, metric="sqeuclidean", device=gpu, notice=notes.append)
    assert_found(found, brute(b, b, 4, "sqeuclidean", others=True), 1e-5)
    assert any("float64" in note for note in notes)


@pytest.mark.usefixtures("blocks")
def test_an_error_that_ends_a_row_of_blocks_ends_the_run(gpu, monkeypatch):
    """In the last row of blocks, too, which no other one follows."""
    a, finish, seen = rows((150, 9), "f4", 8), ranking.Ranking._finish, []

    def fail(self, *args):
        seen.append(args[-1])
        if args[-1] == last:
            raise OSError("the plug")
        return finish(self, *args)

    monkeypatch.setattr(ranking.Ranking, "_finish", fail)
    for last in (0, 2):
        seen.clear()
        with pytest.raises(OSError, match="the plug"):
            ooc_gemm.topk(a, k=3, device=gpu)
        assert seen == list(range(last + 1))


def test_a_run_on_a_gpu_is_continued(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(compared, "CHUNK_ROWS", 32)
    monkeypatch.setattr("ooc_gemm.run.prepare.make_plan", with_blocks(64, 2048, 40))
    a = make(tmp_path / "a", rows((300, 70), "f4", 36), chunks=(64, 70))
    whole = ooc_gemm.topk(a, k=4, device=gpu)
    with monkeypatch.context() as patch:
        interrupt(patch, 3)
        with pytest.raises(ooc_gemm.StoreError, match="the plug"):
            ooc_gemm.topk(a, k=4, out=tmp_path / "out", device=gpu)
    found = ooc_gemm.topk(a, k=4, out=tmp_path / "out", device=gpu, resume=True)
    assert found.rows_resumed
    assert found.bytes_read == found.plan.bytes_read
    assert found.bytes_written == found.plan.bytes_written
    np.testing.assert_array_equal(found.indices[...], whole.indices)
    np.testing.assert_array_equal(found.values[...], whole.values)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "u1", "i4"])
def test_results_that_are_right_pass_their_check(tmp_path, dtype, metric):
    a, b = rows((61, 19), dtype, 33), rows((333, 19), dtype, 34)
    a[5] = b[9] = 0
    if dtype == "f4":
        a[3, 1], b[17, 1], b[203, 4] = np.nan, np.nan, np.inf
    for options in ({"b": b}, {"include_self": True}, {}):
        found = ooc_gemm.topk(a, k=7, metric=metric, device="cpu", verify=True, **options)
        assert found.verified
    at, bt = make(tmp_path / "a", a, chunks=(16, 8)), make(tmp_path / "b", b, chunks=(50, 19))
    found = ooc_gemm.topk(at, bt, tmp_path / "n", k=7, metric=metric, device="cpu", verify=True)
    assert found.bytes_read == found.plan.bytes_read
    assert ooc_gemm.topk(at, bt, k=7, metric=metric, device="cpu").verified is None
    few = ooc_gemm.topk(np.full((3, 6), np.nan, "f4"), k=2, metric=metric, device="cpu", verify=True)
    assert (few.indices == -1).all()


@pytest.mark.parametrize("metric", METRICS)
def test_equal_scores_pass_their_check(metric):
    a = np.random.default_rng(35).integers(-1, 2, (90, 3)).astype("f4")
    assert ooc_gemm.topk(a, k=12, metric=metric, device="cpu", verify=True).verified
    assert ooc_gemm.topk(np.ones((500, 3), "i1"), k=3, metric=metric, device="cpu", verify=True).verified


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("fault", ["neighbours", "values", "none"])
def test_results_that_are_wrong_are_not_kept(tmp_path, metric, fault, monkeypatch):
    x = make(tmp_path / "x", rows((120, 9), "f4", 36), chunks=(32, 9))
    write = stored.RowArrays.write

    def wrong(self, row, arrays):
        indices, values = arrays["indices"].copy(), arrays["values"].copy()
        if fault == "neighbours":  # whose scores are right
            indices[:, -1] = (np.arange(row, row + len(indices)) + 60) % 120
            wide = rows((120, 9), "f4", 36).astype("f8")
            left, right = wide[row : row + len(indices)], wide[indices[:, -1]]
            values[:, -1] = {
                "dot": (left * right).sum(axis=1),
                "cosine": (left * right).sum(axis=1)
                / np.linalg.norm(left, axis=1)
                / np.linalg.norm(right, axis=1),
                "sqeuclidean": np.square(left - right).sum(axis=1),
            }[metric]
        elif fault == "values":
            values[:, 1] *= 1.001
        else:
            indices[:, -1] = -1
        return write(self, row, {"indices": indices, "values": values})

    with monkeypatch.context() as patch:
        patch.setattr(stored.RowArrays, "write", wrong)
        with pytest.raises(ooc_gemm.VerificationError, match="is wrong in row"):
            ooc_gemm.topk(x, out=tmp_path / "n", k=5, metric=metric, device="cpu", verify=True)
    assert not (tmp_path / "n").exists()
    assert ooc_gemm.topk(x, out=tmp_path / "n", k=5, device="cpu", verify=True, force=True).verified


def test_a_finished_result_that_was_changed_is_found(tmp_path):
    x = make(tmp_path / "x", rows((120, 9), "f4", 36), chunks=(32, 9))
    asked = {"out": tmp_path / "n", "k": 5, "device": "cpu"}
    ooc_gemm.topk(x, **asked)
    whole = ooc_gemm.topk(x, **asked, resume=True, verify=True)
    assert (whole.verified, whole.rows_resumed) == (True, 120)
    assert whole.bytes_read == whole.plan.bytes_read
    values = zarr.open_array(tmp_path / "n" / "values")
    values[:] = values[:] + np.float32(1e-3)
    with pytest.raises(ooc_gemm.VerificationError, match="is wrong in row"):
        ooc_gemm.topk(x, **asked, resume=True, verify=True)
    assert ooc_gemm.topk(x, **asked, resume=True).verified is None


@pytest.mark.slow
def test_scikit_learn_agrees():
    neighbors = pytest.importorskip("sklearn.neighbors")
    digits = pytest.importorskip("sklearn.datasets").load_digits().data
    for metric, theirs in (("cosine", "cosine"), ("sqeuclidean", "sqeuclidean")):
        fitted = neighbors.NearestNeighbors(n_neighbors=10, metric=theirs, algorithm="brute").fit(digits)
        distances, _ = fitted.kneighbors()
        found = ooc_gemm.topk(digits.astype("f4"), metric=metric, device="cpu")
        values = 1 - found.values if metric == "cosine" else found.values
        np.testing.assert_allclose(values, distances, rtol=1e-6, atol=1e-6)


def interrupt(monkeypatch, count):
    """Writing fails when so many chunks of rows are written."""
    write, left = stored.RowArrays.write, iter(range(count))

    def limited(self, *args):
        if next(left, None) is None:
            raise ooc_gemm.StoreError("the plug is pulled")
        return write(self, *args)

    monkeypatch.setattr(stored.RowArrays, "write", limited)


def test_an_interrupted_run_is_continued_to_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(compared, "CHUNK_ROWS", 64)
    a, b = rows((500, 200), "f4", 23), rows((3000, 200), "f4", 24)
    at, bt = make(tmp_path / "a", a), make(tmp_path / "b", b)
    limit = least_limit(at, bt, tmp_path / "x", device="cpu")
    options = {"device": "cpu", "memory_limit": limit}
    whole = ooc_gemm.topk(at, bt, tmp_path / "whole", **options)
    assert whole.plan.block_count > 3
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        interrupt(patch, 3)
        with pytest.raises(ooc_gemm.StoreError, match="plug"):
            ooc_gemm.topk(at, bt, out, **options)
    assert not out.exists()
    with pytest.raises(ooc_gemm.InputError, match="resume=True"):
        ooc_gemm.topk(at, bt, out, **options)
    with pytest.raises(ooc_gemm.InputError, match="k was 10 and is 9"):
        ooc_gemm.topk(at, bt, out, k=9, resume=True, **options)
    done = ooc_gemm.topk(at, bt, out, resume=True, **options)
    assert done.rows_resumed == 3 * 64
    assert done.bytes_read == done.plan.bytes_read
    assert done.bytes_written == done.plan.bytes_written == (500 - 192) * 10 * 12
    for name in ("indices", "values"):
        assert np.array_equal(
            zarr.open_array(out / name)[...], zarr.open_array(tmp_path / "whole" / name)[...]
        )
    assert_found(done, brute(a, b, 10, "cosine"))
    said = []
    again = ooc_gemm.topk(at, bt, out, resume=True, notice=said.append, **options)
    assert again.rows_resumed == 500
    assert again.bytes_written == 0
    assert "finished already" in said[0]
    zarr.open_array(at, mode="r+")[0, 0] = 5
    with pytest.raises(ooc_gemm.InputError, match="changed"):
        ooc_gemm.topk(at, bt, out, resume=True, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "out", "whole"]


def test_what_exists_is_replaced_only_when_asked_and_only_at_the_end(tmp_path, monkeypatch):
    x, other = make(tmp_path / "x", rows((90, 5), "f4", 25)), make(tmp_path / "other", rows((9, 5), "f4", 26))
    out = tmp_path / "out"
    first = ooc_gemm.topk(x, out=out, k=3, device="cpu").indices[...]
    with pytest.raises(ooc_gemm.InputError, match="force=True"):
        ooc_gemm.topk(x, out=out, k=3, device="cpu")
    with monkeypatch.context() as patch:
        interrupt(patch, 0)
        with pytest.raises(ooc_gemm.StoreError, match="plug"):
            ooc_gemm.topk(x, out=out, k=4, device="cpu", force=True)
    assert np.array_equal(zarr.open_array(out / "indices")[...], first)
    assert ooc_gemm.topk(x, out=out, k=4, device="cpu", resume=True).indices.shape == (90, 4)
    assert ooc_gemm.topk(x, out=out, k=5, device="cpu", force=True).indices.shape == (90, 5)
    for place, said in (
        (other, "no such result"),
        (x, "input"),
        (Path(x) / "in", "input"),
        ("http://127.0.0.1:1/c", "neither a local folder nor in an object store"),
        (tmp_path / ("x" * 300), "name too long.*choose another place"),
        (tmp_path / ("x" * 250), "name too long"),  # of the folder in which it is made
        (tmp_path / "none" / ("x" * 250), "name too long"),
        (tmp_path / ("x" * 300) / "n", "name too long"),
    ):
        with pytest.raises(ooc_gemm.InputError, match=said):
            ooc_gemm.topk(x, out=place, k=3, force=True)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ooc_gemm.InputError, match="left alone"):
        ooc_gemm.topk(x, out=tmp_path / "folder", k=3, force=True)


def test_requests_that_cannot_be_are_refused(tmp_path):
    x = rows((9, 4), "f4", 27)
    for options, said in (
        ({"k": 0}, "k is 0"),
        ({"k": 9}, "8 possible neighbours"),
        ({"metric": "cityblock"}, "cosine, sqeuclidean|choose one of"),
        ({"b": x[:, :3]}, "rows of B 3"),
        ({"b": x.astype("c8")}, "complex"),
        ({"b": ooc_gemm.Operand(x)}, "transforms no inputs"),
        ({"graph": True}, "csr"),
        ({"resume": True}, "stored"),
        ({"out": tmp_path / "out", "resume": True}, "known again"),
    ):
        with pytest.raises(ooc_gemm.InputError, match=said):
            ooc_gemm.topk(x, **{"k": 3, **options})
    assert not list(tmp_path.iterdir())


def test_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = rows((40, 6), "f4", 28), rows((70, 6), "f4", 29)
    make("a", a)
    make("b", b)
    done = ooc("topk", "a", "b", "out", "-k", 5, "--metric", "dot", "-d", "cpu", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["shape"] == [40, 70]
    np.testing.assert_array_equal(zarr.open_array("out/indices")[...], brute(a, b, 5, "dot")[0])
    done = ooc("topk", "a", "others", "-k", 5, "-d", "cpu", "-v")
    assert done.code == 0, done.err
    assert "reduced as they come" in done.out
    np.testing.assert_array_equal(zarr.open_array("others/indices")[...], brute(a, a, 5, "cosine", True)[0])
    done = ooc("topk", "a", "others", "-k", 5, "-d", "cpu")
    assert done.code == 2
    assert "--force" in done.err
    assert ooc("topk", "a").code == 2


PROGRAM = """
import json, sys
import ooc_gemm
options = json.loads(sys.argv[1])
found = ooc_gemm.topk(**options)
print(json.dumps([found.peak_host_bytes, found.plan.block_count, found.rows_resumed]))
"""


def process(**options):
    """`topk` in a process of its own."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(options)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_process_keeps_the_limit_and_survives_a_kill(tmp_path):
    x = rows((12000, 64), "f4", 30)
    make(tmp_path / "x", x, chunks=(3000, 64), compressors=None)
    options = {"a": str(tmp_path / "x"), "device": "cpu", "memory_limit": 192 * MiB}
    whole = process(**options, out=str(tmp_path / "whole"))
    peak, blocks, _ = json.loads(whole.communicate()[0])
    assert peak <= 192 * MiB
    assert blocks > 3
    killed = process(**options, out=str(tmp_path / "out"))
    folder = rows_folder.staging(tmp_path / "out") / "values" / "c"
    while killed.poll() is None and not (folder / "0" / "0").exists():
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert not (tmp_path / "out").exists()
    peak, _, resumed = json.loads(process(**options, out=str(tmp_path / "out"), resume=True).communicate()[0])
    assert peak <= 192 * MiB
    assert resumed > 0
    for name in ("indices", "values"):
        found = zarr.open_array(tmp_path / "out" / name)[...]
        assert np.array_equal(found, zarr.open_array(tmp_path / "whole" / name)[...])
    indices, _ = brute(x[:50], x, 11, "cosine")
    assert np.array_equal(zarr.open_array(tmp_path / "out" / "indices")[:50], indices[:, 1:])


def test_the_reduction_holds_no_more_than_is_counted():
    keep, height = 16, 512
    found = Nearest((height, 9000), height, keep, np.dtype("f4"), np.dtype("f4"), Scores())
    found.take(np.ones((1, 8), "f4"), 0, 0)
    (band,) = found._bands.values()
    held = sum(x.nbytes for x in (band.values, band.columns, band.count, band.least, band.edge))
    assert held <= height * Nearest.row_bytes(keep, np.dtype("f4"))
    assert nearest.STRIP * found.tile[1] * 8 * 4 <= compared.TILE_BYTES


def test_the_command_ends_after_an_error_of_a_store(tmp_path, monkeypatch):
    """An error must not be its own cause, because the command line follows causes to show their notes."""
    monkeypatch.chdir(tmp_path)
    make("a", np.random.default_rng(0).standard_normal((40, 8), np.float32), chunks=(20, 8), compressors=None)
    chunk = tmp_path / "a" / "c" / "1" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-4])
    with pytest.raises(ooc_gemm.StoreError) as failed:
        ooc_gemm.topk("a", None, "n", k=2, device="cpu")
    assert failed.value.__cause__ is not failed.value
