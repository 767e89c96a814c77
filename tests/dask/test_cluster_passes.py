"""Components and linear models on a cluster, against one machine and against NumPy in float64."""

import json
import os
import time

import cupy_on_cpu
import models
import numpy as np
import pytest
import zarr
from arrays import LAYOUTS
from conftest import make, ooc
from decompositions import check_pca, check_scores, check_svd, close, exact, graded

pytest.importorskip("distributed")

from launched import patient
from worker_clusters import cluster

import ooc_gemm
from ooc_gemm import BudgetError, InputError
from ooc_gemm.dask import elsewhere
from ooc_gemm.run.elsewhere import computing
from ooc_gemm.statistics import equations, subspace_elsewhere

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
LIMITS = {"memory_limit": "2GiB", "device": "cpu"}
MODEL_LIMITS = {"memory_limit": "2GiB"}
DECODED = "zstd", "shards", "v2-fortran-encoded", "big-endian"
"""Layouts whose chunks are decoded whole."""


@pytest.fixture(scope="module")
def client():
    with cluster(2) as found:
        yield found


def on(client, **more):
    return ooc_gemm.dask.on(client, **{**LIMITS, **more})


def left(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(533, 71), (71, 533), (133, 71)])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_pca(tmp_path, client, kind, shape):
    """Of tall arrays and of wide ones, whose columns are dealt."""
    values = graded(shape, 1, mean=3, dtype="f4")
    x = make(tmp_path / "a", values, **LAYOUTS[kind])
    here = ooc_gemm.pca(x, 5, **LIMITS)
    with on(client):
        p = ooc_gemm.pca(x, 5, scores=tmp_path / "s")
    assert (p.device, p.passes) == ("cpu on 2 workers", 6)
    # One machine keeps what it has decoded; workers, which may be given other rows each time, read it again.
    assert p.bytes_read == here.bytes_read * (p.passes if kind in DECODED else 1)
    assert p.peak_host_bytes > 0
    written = zarr.open_array(tmp_path / "s")
    assert (written.dtype, written.shape) == (np.float32, (shape[0], 5))
    close(p.scores[...], here.scores, 1e-4)
    check_pca(_InMemory(p), values, 5, 1e-4)
    assert left(tmp_path) == ["a", "s"]


class _InMemory:
    """What was found, with the array that was written in memory."""

    def __init__(self, p, name="scores"):
        self.__dict__ |= p.__dict__ | {name: getattr(p, name)[...]}


@pytest.mark.parametrize("shape", [(400, 50), (50, 400), (300, 7), (1, 40)])
def test_svd(tmp_path, client, shape):
    k = min(6, *shape)
    values = graded(shape, 6, mean=0.5)
    x = make(tmp_path / "a", values, chunks=(64, 16))
    with on(client):
        q = ooc_gemm.svd(x, k, u=tmp_path / "u")
    u, s, vt, _ = exact(values, k, centred=False)
    close(q.singular_values, s, 1e-9)
    close(q.u[...], u, 1e-6)
    close(q.vt, vt, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2000, 60), (60, 2000)])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_means_of_ten_thousand_deviations(tmp_path, client, shape, dtype):
    values = graded(shape, 3, ratio=0.8)
    values /= values.std()
    values += 1e4 * (1 + np.random.default_rng(4).random(shape[1]))
    values[: shape[0] // 2] += 100  # the first range tells little of the others
    values = values.astype(dtype)
    x = make(tmp_path / "a", values, chunks=(100, 60))
    with on(client):
        p = ooc_gemm.pca(x, 4, scores=tmp_path / "s")
    check_pca(_InMemory(p), values, 4, 3e-4 if dtype == "f4" else 1e-6)


@pytest.fixture
def last_first(tmp_path, monkeypatch):
    """The first range of each pass waits until another one is done, where that is asked for."""
    waits, module, names = (
        [],
        None,
        {subspace_elsewhere: ("sums_of", "rows_of"), equations: ("equations_of",)},
    )
    for module, functions in names.items():
        for name in functions:
            function = getattr(module, name)

            def slowly(here, shared, rows, function=function):
                other = here.folder / f"other-{os.path.basename(here.folder)}"
                while waits and rows[0] == 0 and not other.exists():
                    time.sleep(0.01)
                found = function(here, shared, rows)
                other.touch()
                return found

            monkeypatch.setattr(module, name, slowly)
    return waits


@pytest.mark.slow
def test_results_do_not_depend_on_who_is_first(tmp_path, client, last_first):
    x, y = models.problem(700, 33, 2, 5, mean=2)
    paths = [make(tmp_path / name, values, chunks=(50, 40)) for name, values in (("x", x), ("y", y))]
    found = []
    for waits in (False, True):
        last_first[:] = [1] * waits
        with on(client):
            p = ooc_gemm.pca(paths[0], 4, scores=tmp_path / "s", force=True)
            w = ooc_gemm.lstsq(*paths, tmp_path / "w", intercept=True, force=True)
        found.append([p.components, p.singular_values, p.mean, p.scores[...], w.array[...], w.intercept])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("ridge", [0.0, 100.0])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_lstsq(tmp_path, client, ridge, intercept, flat):
    """With chunks of y that end elsewhere than those of x."""
    x, y = models.problem(1500, 13, 3, 2, mean=5, dtype="f4")
    y = y[:, 0] if flat else y
    xt = make(tmp_path / "x", x, chunks=(100, 8))
    yt = make(tmp_path / "y", y, chunks=(130,) if flat else (130, 2))
    with on(client):
        found = ooc_gemm.lstsq(xt, yt, tmp_path / "w", ridge=ridge, intercept=intercept)
    w, constant = models.exact(x, y, ridge, intercept)
    models.close(found.array[...], w.reshape(13, -1), x - x.mean(axis=0) * intercept, 1e-6)
    np.testing.assert_allclose(found.intercept, constant * np.ones(1), rtol=1e-5)
    here = ooc_gemm.lstsq(xt, yt, ridge=ridge, intercept=intercept, **MODEL_LIMITS)
    np.testing.assert_allclose(found.condition, here.condition, rtol=1e-9)
    assert (found.device, found.passes) == ("cpu on 2 workers", 1)
    assert found.bytes_read >= here.bytes_read
    assert left(tmp_path) == ["w", "x", "y"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_linear_models(tmp_path, client, layout):
    x, y = models.problem(333, 21, 2, 1)
    version = LAYOUTS[layout].get("zarr_format", 3)
    xt = make(tmp_path / "x", x, **LAYOUTS[layout])
    yt = make(tmp_path / "y", y, chunks=(1000, 1), zarr_format=version)
    with on(client):
        found = ooc_gemm.lstsq(xt, yt, tmp_path / "w")
    models.close(found.array[...], models.exact(x, y)[0], x)


@pytest.mark.parametrize("power", [1e-24, 1e35])
def test_numbers_whose_squares_are_too_large_or_too_small(tmp_path, client, power):
    values = (graded((300, 40), 18, mean=3) * power).astype("f4")
    x = make(tmp_path / "x", values, chunks=(50, 40))
    with on(client):
        p = ooc_gemm.pca(x, 3, scores=tmp_path / "s")
        q = ooc_gemm.svd(x, 3, u=tmp_path / "u")
    for found, centred in ((p, True), (q, False)):
        s = exact(values / np.float64(power), 3, centred)[1]
        close(found.singular_values / power, s, 1e-5)


@pytest.mark.parametrize("intercept", [False, True])
def test_columns_whose_squares_are_too_large_or_too_small(tmp_path, client, intercept):
    x, y = models.problem(1500, 5, 2, 3, mean=1)
    units, targets = np.array([1e-140, 1, 1e155, 1, 1e-138]), np.array([1e-140, 1e157])
    wanted = ooc_gemm.lstsq(x, y, intercept=intercept, **MODEL_LIMITS)
    xt = make(tmp_path / "x", x * units, chunks=(100, 8))
    yt = make(tmp_path / "y", y * targets, chunks=(130, 2))
    with on(client):
        found = ooc_gemm.lstsq(xt, yt, tmp_path / "w", intercept=intercept)
    models.close(found.array[...] / targets * units[:, None], wanted.array, x)
    np.testing.assert_allclose(found.intercept / targets, wanted.intercept, rtol=1e-8)
    assert found.passes == 2
    assert left(tmp_path) == ["w", "x", "y"]


@pytest.mark.parametrize("shape", [(300, 64), (64, 300)])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_values_and_vectors_belong_together(tmp_path, client, shape, dtype):
    values = np.random.default_rng(3).standard_normal(shape).astype(dtype)
    x, bound = make(tmp_path / "x", values, chunks=(50, 40)), 3e-6 if dtype == "f4" else 1e-12
    with on(client):
        q = ooc_gemm.svd(x, 9, u=tmp_path / "u", iterations=1)
        p = ooc_gemm.pca(x, 9, scores=tmp_path / "s", iterations=1)
    check_svd(_InMemory(q, "u"), values, bound)
    check_scores(_InMemory(p), values, bound)
    assert left(tmp_path) == ["s", "u", "x"]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(tmp_path, client, bad):
    values = graded((400, 30), 8, mean=1)
    values[333, 17] = bad
    x = make(tmp_path / "x", values, chunks=(50, 30))
    with on(client):
        for compute in (
            lambda: ooc_gemm.pca(x, 3, scores=tmp_path / "s"),
            lambda: ooc_gemm.svd(x, 3, u=tmp_path / "s"),
            lambda: ooc_gemm.lstsq(x, x, tmp_path / "s", ridge=1.0),
        ):
            with pytest.raises(InputError, match=r"x.* holds NaN"):
                compute()
    assert left(tmp_path) == ["x"]


def test_what_cannot_be_is_refused_before_anything_is_read(tmp_path, client, monkeypatch):
    x, values = make(tmp_path / "x", graded((400, 30), 8), chunks=(50, 30)), graded((400, 30), 8)
    for module, name in ((subspace_elsewhere, "sums_of"), (equations, "equations_of")):
        monkeypatch.setattr(module, name, None)
    for compute, said in (
        (lambda: ooc_gemm.pca(x, 3), "^scores is not in a folder that workers share; give the path of one$"),
        (lambda: ooc_gemm.svd(x, 3), "^u is not in a folder that workers share"),
        (lambda: ooc_gemm.lstsq(x, x), "^out is not in a folder that workers share"),
        (lambda: ooc_gemm.pca(x, 3, scores="s3://bucket/s"), "^s3://bucket/s is not in a folder"),
        (lambda: ooc_gemm.pca(values, 3, scores=tmp_path / "s"), "store it as a Zarr array first"),
        (lambda: ooc_gemm.lstsq(x, values, tmp_path / "s"), "store it as a Zarr array first"),
        (lambda: ooc_gemm.pca(x, 3, scores=x), "lies inside the input"),
        (lambda: ooc_gemm.pca(x, 31, scores=tmp_path / "s"), "has no 31 components"),
    ):
        with on(client), pytest.raises(InputError, match=said):
            compute()
    assert left(tmp_path) == ["x"]


def test_limits_of_workers_and_of_this_process(tmp_path, client, monkeypatch):
    """Where all share one limit, what comes together here counts in that of each worker."""
    x, y = (make(tmp_path / name, graded((900, n), n), chunks=(90, n)) for name, n in (("x", 120), ("y", 2)))
    for number, compute in enumerate(
        (
            lambda: ooc_gemm.pca(x, 4, scores=tmp_path / "out", force=True),
            lambda: ooc_gemm.lstsq(x, y, tmp_path / "out", ridge=1.0, force=True),
        )
    ):
        with on(client, memory_limit="20MiB"), pytest.raises(BudgetError, match="too small") as small:
            compute()
        assert not (tmp_path / "out").exists() or number
        least = []
        for shares in (False, True):
            with (
                computing(elsewhere.OnWorkers(client, 170 << 20 if not shares else "20MiB", "cpu", shares)),
                monkeypatch.context() as patch,
            ):
                patch.setattr("ooc_gemm.run.stream.INTERPRETER_BYTES", 200 << 20)
                with pytest.raises(BudgetError, match=r"too small to (decompose|fit a model to) ") as small:
                    compute()
            least.append(small.value.minimum_memory_limit)
        matrices = 120 * 14 * 8 if number == 0 else 7 * 120 * 120 * 8
        assert least[1] - least[0] > matrices // 2, "half of what this process holds"
        with computing(elsewhere.OnWorkers(client, max(least), "cpu")):
            compute()


def test_a_workers_device_makes_the_passes(tmp_path, monkeypatch):
    cupy_on_cpu.install(monkeypatch)
    values = graded((300, 40), 9, mean=2, dtype="f4")
    x = make(tmp_path / "x", values, chunks=(50, 40))
    with cluster(1) as client, ooc_gemm.dask.on(client, memory_limit="2GiB", device="cuda"):
        p = ooc_gemm.pca(x, 4, scores=tmp_path / "s")
    assert p.device.endswith(" on 1 workers")
    assert p.device != "cpu on 1 workers"
    assert p.peak_device_bytes > 0
    check_pca(_InMemory(p), values, 4, 1e-4)


@pytest.mark.slow
def test_command_lines(tmp_path, client, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values, (x, y) = graded((400, 30), 8, mean=1), models.problem(400, 9, 2, 3)
    for name, array in (("a", values), ("x", x), ("y", y)):
        make(name, array, chunks=(50, 30))
    more = ("--scheduler", client.scheduler.address, "-M", "2GiB")
    done = ooc("pca", "a", "s", "-k", 3, "--save-components", "c", *more, "-d", "cpu", "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["device"] == "cpu on 2 workers"
    close(zarr.open_array("c")[...], exact(values, 3)[2], 1e-6)
    done = ooc("svd", "a", "u", "-k", 3, "--save-vt", "vt", *more, "-d", "cpu")
    assert (done.code, done.err) == (0, "")
    close(zarr.open_array("u")[...], exact(values, 3, centred=False)[0], 1e-6)
    done = ooc("lstsq", "x", "y", "w", "--intercept", *more, "--report", "page.html")
    assert (done.code, done.err) == (0, "")
    models.close(zarr.open_array("w")[...], models.exact(x, y, intercept=True)[0], x)
    for command in (("pca", "a", "new", "-k", 3), ("svd", "a", "new", "-k", 3), ("lstsq", "x", "y", "new")):
        refused = ooc(*command, *more, "--plan")
        assert refused.code == 2
        assert "--plan is for one process; leave out --scheduler." in refused.err


@pytest.mark.slow
def test_local_processes_keep_their_limit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = graded((60_000, 200), 11, mean=3, dtype="f4")
    make("x", values, chunks=(1000, 200), compressors=None)
    make("y", values[:, :2].copy(), chunks=(1000, 2), compressors=None)
    local = ("--scheduler", "local:2", "-M", "600MiB", "--json")
    done = ooc("pca", "x", "s", "-k", 4, "-d", "cpu", *local)
    assert done.code == 0, done.err
    assert json.loads(done.out)["peak_host_bytes"] <= (600 - 160) // 2 << 20
    s = zarr.open_array("s")
    close(s[...], exact(values, 4)[0] * exact(values, 4)[1], 1e-3)
    done = ooc("lstsq", "x", "y", "w", "--ridge", 1, *local)
    assert done.code == 0, done.err
    assert json.loads(done.out)["peak_host_bytes"] <= (600 - 160) // 2 << 20
    small = ooc("pca", "x", "t", "-k", 4, "-d", "cpu", "--scheduler", "local:2", "-M", "100MiB")
    assert small.code == 2
    assert "too small for 2 workers" in small.err


def dying(here, shared, rows):
    """The sums, after the worker of the second range has died once."""
    mark = os.path.join(os.environ["TMP_OF_TEST"], "died")
    if rows[0] and not os.path.exists(mark):
        open(mark, "x").close()
        os.kill(os.getpid(), 9)
    return dying.sums(here, shared, rows)


@pytest.mark.slow
def test_a_worker_is_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("TMP_OF_TEST", str(tmp_path))
    values = graded((900, 60), 12, mean=3)
    x = make(tmp_path / "x", values, chunks=(50, 60))
    with (
        patient(),
        cluster(2, processes=True, memory_limit="1GiB") as client,
        on(client, memory_limit="512MiB"),
    ):
        calm = ooc_gemm.pca(x, 4, scores=tmp_path / "calm")
        monkeypatch.setattr(subspace_elsewhere, "sums_of", dying)
        p = ooc_gemm.pca(x, 4, scores=tmp_path / "s")
    assert (tmp_path / "died").exists()
    for name in ("components", "singular_values", "mean"):
        np.testing.assert_array_equal(getattr(p, name), getattr(calm, name))
    np.testing.assert_array_equal(p.scores[...], calm.scores[...])
    check_pca(_InMemory(p), values, 4, 1e-8)


dying.sums = subspace_elsewhere.sums_of
