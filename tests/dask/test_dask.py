"""Products of dask arrays, and products made by clusters of processes, some of which are killed."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import zarr
from conftest import gpu_missing, make, ooc

distributed = pytest.importorskip("distributed")

import cupy_on_cpu  # noqa: E402
import dask  # noqa: E402
import dask.array as da  # noqa: E402
from distributed.core import Status  # noqa: E402
from launched import Killer, chunks, launched, patient, process  # noqa: E402
from slow_disk import Slow  # noqa: E402

import ooc_gemm  # noqa: E402
import ooc_gemm.dask.arrays  # noqa: E402
import ooc_gemm.dask.cluster  # noqa: E402
import ooc_gemm.dask.workers  # noqa: E402
from ooc_gemm import DeviceError, InputError, RangeError, StoreError  # noqa: E402
from ooc_gemm.dask import matmul  # noqa: E402
from ooc_gemm.devices.cpu.device import CPU  # noqa: E402
from ooc_gemm.planning.schedule import Part  # noqa: E402
from ooc_gemm.storage.format import unfinished  # noqa: E402
from ooc_gemm.storage.io.folder import Folder  # noqa: E402
from ooc_gemm.storage.write import opening, reopen, share, staging_folder  # noqa: E402
from ooc_gemm.storage.write.target import Target  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:Increasing number of chunks"),
]
MiB = 1 << 20


def start(workers, memory_limit="1GiB", **options):
    return distributed.LocalCluster(
        n_workers=workers, threads_per_worker=1, memory_limit=memory_limit, dashboard_address=":0", **options
    )


def threads(workers):
    """A cluster whose workers are threads of this process. What earlier tests have left in it counts as
    theirs, so they have a limit beyond it: else `distributed` pauses them."""
    return start(workers, memory_limit="16GiB", processes=False)


@pytest.fixture(scope="module")
def client():
    """Of two processes with a thread each."""
    with start(2) as cluster, distributed.Client(cluster) as client:
        yield client


@pytest.fixture
def few(monkeypatch):
    """Superblocks as for a worker with room for a few chunks."""
    monkeypatch.setattr(ooc_gemm.dask.arrays, "tasks_at_a_time", lambda _: (3, 40_000))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def stored(tmp_path, a=None, b=None, chunks=(40, 30)):
    a = normal(200, 150) if a is None else a
    b = normal(150, 170, seed=1) if b is None else b
    return make(tmp_path / "a", a, chunks=chunks, compressors=None), make(
        tmp_path / "b", b, chunks=chunks, compressors=None
    )


def near(found, want, tolerance=1e-3):
    assert found.shape == want.shape
    assert (np.abs(found - want) <= tolerance).all()  # NaN fails


# ---------------------------------------------------------------------------------------------- matmul


@pytest.mark.parametrize("left", [(70, 60), (7, 60), (16, 13), ((30, 1, 39), (10, 50)), (1, 1)])
@pytest.mark.parametrize("right", [(60, 50), (60, 7), (13, 16), ((59, 1), (50,))])
def test_any_chunks(left, right, few):
    a, b = normal(70, 60), normal(60, 50)
    x, y = da.from_array(a, chunks=left), da.from_array(b, chunks=right)
    z, like = matmul(x, y), da.matmul(x, y)
    assert (z.chunks, z.dtype, z.shape) == (like.chunks, like.dtype, like.shape)
    assert (type(z._meta), z._meta.shape, z._meta.dtype) == (np.ndarray, like._meta.shape, like._meta.dtype)
    near(z.compute(), a.astype("f8") @ b)


@pytest.mark.parametrize("one", ["f2", "f4", "f8", "c8", "c16", "i1", "u1", "i2", "u2", "i4", "i8"])
@pytest.mark.parametrize("other", ["same", "f4"])
def test_any_type(one, other, few, tmp_path):
    if other == "same":
        other = one
    a, b = (normal(40, 30) * 5).astype(one), (normal(30, 20, seed=1) * 5).astype(other)
    x, y = da.from_array(a, chunks=(16, 7)), da.from_array(b, chunks=(9, 9))
    exact = np.result_type(a, b).kind in "iu"
    want = a.astype("i8" if exact else "c16") @ b.astype("i8" if exact else "c16")
    paths = stored(tmp_path, a, b, (16, 8))
    for z in (matmul(x, y), matmul(*map(da.from_zarr, paths))):
        found = z.compute()
        assert found.dtype == z.dtype == da.matmul(x, y).dtype
        # As NumPy, whose small integers would wrap before they are added up, does it in larger ones.
        near(found, want, 0 if exact else (3e-3 if "f2" in (one, other) else 1e-5) * np.abs(want).max())


def test_errors_are_those_of_dask():
    for x, y in (
        (da.ones((6, 4), chunks=2), da.ones((5, 3), chunks=2)),
        (da.ones((6, 4), chunks=2), 3),
        (da.ones((4, 6), chunks=2), unknown := (rows := da.ones((6, 4), chunks=2))[rows[:, 0] > 0]),
    ):
        with pytest.raises(Exception) as theirs:
            da.matmul(x, y)
        with pytest.raises(type(theirs.value)) as ours:
            matmul(x, y)
        assert str(ours.value) == str(theirs.value)
    with pytest.raises(ValueError, match="inner dimensions"):  # dask finds out when it computes
        matmul(da.ones((3, 1), chunks=1), da.ones((5, 4), chunks=5))
    near(matmul(unknown, da.ones((4, 3), chunks=2)).compute(), np.full((6, 3), 4.0))


def test_vectors_and_stacks():
    a, b = normal(5, 20, 30), normal(5, 30, 10)
    x, y = da.from_array(a, chunks=7), da.from_array(b, chunks=7)
    near(matmul(x, y).compute(), a @ b)
    near(matmul(x[0], y[0, :, 0]).compute(), a[0] @ b[0, :, 0])
    near(matmul(x[0, 0], y[0]).compute(), a[0, 0] @ b[0])
    near(matmul(a[0], b[0]).compute(), a[0] @ b[0])  # NumPy arrays


def test_nothing_to_multiply_and_nothing_finite():
    for dtype in ("f4", "i2"):
        found = matmul(da.ones((3, 0), dtype=dtype), da.ones((0, 4), dtype=dtype)).compute()
        assert (found == np.zeros((3, 4))).all()
    assert matmul(da.ones((0, 3)), da.ones((3, 4))).compute().shape == (0, 4)
    a, b = normal(20, 30), normal(30, 10)
    a[3, 4], b[7, 2] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        found, want = matmul(da.from_array(a, chunks=8), da.from_array(b, chunks=8)).compute(), a @ b
    assert (np.isfinite(found) == np.isfinite(want)).all()
    near(found[np.isfinite(want)], want[np.isfinite(want)])


@pytest.mark.parametrize("depth", [1, 256])
def test_integers_are_exact_or_refused(few, monkeypatch, depth):
    for name in ("LEAST_DEPTH", "MOST_DEPTH"):
        monkeypatch.setattr(ooc_gemm.dask.arrays, name, depth)

    def product(large):
        a = np.ones((4, 40), np.int64)
        a[:, :2] = large
        x = da.from_array(a, chunks=(4, 1))
        return matmul(x, x.T).compute()

    with pytest.raises(RangeError):
        product(2**31)
    assert (product(2**28) == 2**57 + 38).all()


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [3, 40])
def test_from_zarr_one_task_a_block_and_no_data(tmp_path, few, chunk):
    sizes = {}
    for k in (40, 400):
        a, b = normal(90, k), normal(k, 80)
        paths = (
            stored(tmp_path / str(k), a, b, (10, chunk))[0],
            make(tmp_path / str(k) / "right", b, chunks=(chunk, 20)),
        )
        z = matmul(*map(da.from_zarr, paths))
        sizes[k] = len(z.dask)
        cuts = 9 * 4
        assert cuts < len(z.dask) <= 2 * cuts
        assert len(pickle.dumps(z)) < 40_000
        near(z.compute(), a.astype("f8") @ b)
    assert sizes[40] == sizes[400]


@pytest.mark.parametrize(
    "layout",
    [
        {"zarr_format": 2, "order": "F", "compressors": None},
        {"zarr_format": 2},
        {"compressors": None},
        {"chunks": (10, 5), "shards": (20, 30)},
    ],
)
def test_from_zarr_in_any_layout(tmp_path, few, layout):
    a, b = normal(90, 70), normal(70, 80)
    options = {"chunks": (20, 30), **layout}
    paths = make(tmp_path / "a", a, **options), make(tmp_path / "b", b, **options)
    x, y = map(da.from_zarr, paths)
    near(matmul(x, y).compute(), a.astype("f8") @ b)
    again = [da.from_zarr(zarr.open_array(path, mode="r"), inline_array=True) for path in paths]
    assert len(matmul(*again).dask) == len(matmul(x, y).dask)


def test_from_zarr_and_something_done(tmp_path, few):
    a, b = normal(90, 70), normal(70, 80)
    x, y = map(da.from_zarr, stored(tmp_path, a, b, (20, 30)))
    near(matmul(x + 1, y).compute(), (a + 1.0) @ b)
    near(matmul(x[3:], y).compute(), a[3:].astype("f8") @ b)
    near(matmul(x.T, x).compute(), a.T.astype("f8") @ a)
    near(matmul(x.rechunk((17, 70)), y).compute(), a.astype("f8") @ b)
    one = da.from_zarr(str(tmp_path / "a"), chunks=(35, 70))  # not at the edges of chunks
    near(matmul(one, y).compute(), a.astype("f8") @ b)


def test_missing_chunks_are_the_fill_value(tmp_path):
    empty = zarr.create_array(tmp_path / "e", shape=(50, 40), chunks=(10, 10), dtype="f4", fill_value=2)
    empty[10:20, 5:30] = 3
    x = da.from_zarr(str(tmp_path / "e"))
    near(matmul(x, x.T).compute(), empty[...].astype("f8") @ empty[...].T)
    near(matmul(x, da.from_zarr(make(tmp_path / "b", normal(40, 9)))).compute(), empty[...] @ normal(40, 9))


@pytest.mark.slow
@pytest.mark.parametrize("computed", [False, True])
def test_inside_a_larger_graph(tmp_path, few, client, computed):
    a, b = normal(90, 70), normal(70, 80)
    x, y = map(da.from_zarr, stored(tmp_path, a, b, (20, 30)))
    want = a.astype("f8") @ b
    if computed:
        x = -x
        want = -want
    z = matmul(x, y)
    near((z * 2 + 1).sum(axis=0).compute(), (want * 2 + 1).sum(axis=0), 1e-2)
    near(z[5:33:2, 70:].compute(), want[5:33:2, 70:])
    near(dask.optimize(z)[0].compute(), want)
    near(z.persist().compute(), want)
    near(matmul(z, y.T).compute(), want @ b.T, 1e-2)
    one, _ = dask.compute(z, x.sum())
    near(one, want)
    z.to_zarr(str(tmp_path / "z"))
    near(zarr.open_array(tmp_path / "z")[...], want)


ALONE = """
import sys
import time
import dask, dask.array as da, zarr
import ooc_gemm
from ooc_gemm.support.memory import peak_resident_bytes, resident_bytes

a, b, c, how, limit = sys.argv[1:]
x, y = da.from_zarr(a), da.from_zarr(b)
given = {"memory_limit": limit} if how == "argument" else {}
configuration = {"ooc-gemm.memory-limit": limit} if how == "configuration" else {}
with dask.config.set({"num_workers": 2} | configuration):
    z = ooc_gemm.dask.matmul(x, y, **given)
    out = zarr.create_array(c, shape=z.shape, chunks=(256, 256), dtype=z.dtype, compressors=None)
    x[:256, :256].compute(scheduler="threads") @ y[:256, :256].compute(scheduler="threads")
    held = resident_bytes()
    da.store(z, out, lock=False, scheduler="threads")
print(peak_resident_bytes() - held)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["argument", "configuration"])
def test_memory_stays_within_the_limit(tmp_path, how):
    """Without a limit this product takes 110 MiB on two cores."""
    a, b = normal(2048, 2048), normal(2048, 2048, seed=1)
    paths = [*stored(tmp_path, a, b, (256, 256)), str(tmp_path / "c")]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *paths, how, "64MiB"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 64 * MiB
    found, some = zarr.open_array(tmp_path / "c", mode="r"), slice(0, 2048, 61)
    near(found[...][some], a[some].astype("f8") @ b)


def test_a_memory_limit_that_is_no_size():
    with pytest.raises(InputError, match="'much' is not a size"):
        matmul(da.ones((4, 4)), da.ones((4, 4)), memory_limit="much")


def test_a_workers_own_limit_is_kept():
    x = da.ones((64, 64), chunks=16)
    with threads(2) as cluster, distributed.Client(cluster):
        assert ooc_gemm.dask.workers.tasks_at_a_time(1 << 40) == (2, int(0.7 * (16 << 30)))
        assert ooc_gemm.dask.workers.tasks_at_a_time(1 << 30) == (2, 1 << 30)
        near(matmul(x, x, memory_limit="1GiB").compute(), np.full((64, 64), 64.0))


def test_a_slice_makes_no_more_than_it_needs(tmp_path, few):
    x, y = map(da.from_zarr, stored(tmp_path))
    z = matmul(x, y)
    (part,) = dask.optimize(z[:1, :1])
    (whole,) = dask.optimize(z)
    assert len(part.dask) <= 3 < len(whole.dask)


@pytest.mark.slow
def test_a_broken_chunk_is_named(tmp_path, client):
    a, b = stored(tmp_path)
    (tmp_path / "a" / "c" / "1" / "2").write_bytes(b"short")
    with pytest.raises(StoreError, match=r"a: chunk c/1/2 holds 5 bytes"):
        matmul(da.from_zarr(a), da.from_zarr(b)).compute()


def test_blas_gets_its_threads_back(few):
    from threadpoolctl import threadpool_info

    before = [one["num_threads"] for one in threadpool_info()]
    x = da.from_array(normal(200, 200), chunks=20)
    matmul(x, x).compute(scheduler="threads", num_workers=4)
    assert [one["num_threads"] for one in threadpool_info()] == before


def watch(dask_worker):
    """Note from now on the most that a worker holds for others."""
    import asyncio

    async def look():
        while True:
            dask_worker.most = max(dask_worker.most, dask_worker.state.nbytes)
            await asyncio.sleep(0.005)

    dask_worker.most = 0
    dask_worker.watching = dask_worker.loop.asyncio_loop.create_task(look())


def watched(dask_worker):
    dask_worker.watching.cancel()
    return dask_worker.most


@pytest.mark.slow
def test_computed_operands_are_not_held(client, monkeypatch):
    """Where a step takes longer than what the scheduler does between two: a worker that gets no processor
    for a while lets the others compute ahead, so one run in three will do. (Without gates none does.)"""
    monkeypatch.setattr(ooc_gemm.dask.arrays, "MOST_DEPTH", 1024)
    x = da.random.default_rng(0).random((2048, 1024 * 32), chunks=512, dtype="f4")
    y = da.random.default_rng(1).random((1024 * 32, 2048), chunks=512, dtype="f4")
    right, peaks = x[:2].compute().astype("f8") @ y.compute(), []
    while not peaks or min(peaks) >= (x.nbytes + y.nbytes) / 4:
        assert len(peaks) < 3, peaks
        client.run(watch)
        found = matmul(x, y)[:2].compute()
        peaks.append(max(client.run(watched).values()))
        near(found, right, 0.5)


# ---------------------------------------------------------------------------------------------- multiply


OPTIONS = {"memory_limit": "512MiB", "device": "cpu"}


def left_over(c):
    """What should not lie in a finished C's folder."""
    return [
        path.name
        for path in c.rglob("*")
        if path.name.startswith((share.RUN, "ooc-gemm."))
        or path.suffix in (staging_folder.PENDING, unfinished.PARTIAL)
    ]


def test_on_a_cluster_of_threads(tmp_path):
    """The workers are threads of this process, which start at once; what they do is what processes do."""
    a, b = stored(tmp_path)
    options = OPTIONS | {"memory_limit": "2GiB"}  # the workers hold what earlier tests have left, too
    want = normal(200, 150).astype("f8") @ normal(150, 170, seed=1)
    with threads(2) as cluster, distributed.Client(cluster, set_as_default=False) as client:
        result = ooc_gemm.dask.multiply(
            a, b, tmp_path / "c", client=client, chunks=(32, 48), verify=True, **options
        )
        assert (result.verified, result.bytes_read) == (True, result.plan.bytes_read)
        assert result.blocks >= 2, "both workers have something to do"
        address = cluster.scheduler_address
        done = ooc("multiply", a, b, tmp_path / "d", "--scheduler", address, "-d", "cpu", "-M", "2GiB")
        assert (done.code, done.err) == (0, "")
        with pytest.raises(InputError, match="has credentials in its address"):
            ooc_gemm.dask.multiply("s3://key:secret@x/a", b, tmp_path / "e", client=client, **options)
    near(zarr.open_array(tmp_path / "c", mode="r")[...], want)
    near(zarr.open_array(tmp_path / "d", mode="r")[...], want)
    assert left_over(tmp_path / "c") == left_over(tmp_path / "d") == []


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before the plan", "after the plan"])
def test_a_cluster_whose_workers_are_all_paused_is_an_error(tmp_path, monkeypatch, when):
    """`distributed` pauses workers that hold too much; what was given to them would never be done."""
    a, b = stored(tmp_path)
    monkeypatch.setattr("ooc_gemm.dask.workers.TIMEOUT", 2)
    cut = ooc_gemm.dask.cluster._cut
    with (
        dask.config.set({"distributed.worker.memory.pause": False}),  # else they go on when memory is free
        threads(2) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):

        def put(status):
            for worker in cluster.workers.values():
                worker.status = status

        def cut_and_pause(*arguments):
            put(Status.paused)
            return cut(*arguments)

        given = {"client": client, "chunks": (32, 48), "device": "cpu", "memory_limit": "2GiB"}
        if when == "before the plan":
            put(Status.paused)
        monkeypatch.setattr(ooc_gemm.dask.cluster, "_cut", cut_and_pause)
        with pytest.raises(DeviceError, match="has paused all workers"):
            ooc_gemm.dask.multiply(a, b, tmp_path / "c", **given)
        monkeypatch.undo()
        put(Status.running)
        ooc_gemm.dask.multiply(a, b, tmp_path / "c", **given, resume=when == "after the plan")
    near(zarr.open_array(tmp_path / "c")[...], normal(200, 150).astype("f8") @ normal(150, 170, seed=1))


def test_workers_with_a_device_of_their_own_tell_how_much_of_its_memory_they_held(tmp_path, monkeypatch):
    cupy_on_cpu.install(monkeypatch)
    a, b = stored(tmp_path)
    with threads(1) as cluster, distributed.Client(cluster, set_as_default=False) as client:
        options = {"client": client, "device": "cuda", "memory_limit": "2GiB"}
        assert ooc_gemm.dask.multiply(a, b, tmp_path / "c", **options).peak_device_bytes > 0


@pytest.mark.slow
def test_on_a_cluster(tmp_path, client):
    client.restart()  # peaks are those of a process's whole life
    client.wait_for_workers(2, timeout=200)
    a, b = stored(tmp_path)
    seen = []
    result = ooc_gemm.dask.multiply(
        a, b, tmp_path / "c", client=client, chunks=(32, 48), verify=True,
        progress=lambda fraction, plan, trace: seen.append(fraction), **OPTIONS,
    )  # fmt: skip
    c = zarr.open_array(tmp_path / "c", mode="r")
    near(c[...], normal(200, 150).astype("f8") @ normal(150, 170, seed=1))
    assert result.verified is True
    assert result.blocks >= 2, "both workers have something to do"
    assert result.bytes_read == result.plan.bytes_read
    assert result.bytes_written == result.plan.bytes_written
    assert 50 * MiB < result.peak_host_bytes < 512 * MiB
    assert seen == sorted(seen)
    assert seen[-1] == 1
    assert c.attrs["ooc-gemm"]["options"]["product"] == "multiply"
    assert left_over(tmp_path / "c") == []
    with pytest.raises(InputError, match="exists"):
        ooc_gemm.dask.multiply(a, b, tmp_path / "c", client=client, **OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [{}, {"compressor": "zstd"}, {"chunks": (10, 16), "shards": (40, 48)}, {"out_dtype": "f8"}]
)
def test_layouts_and_operations(tmp_path, client, layout):
    a, b = normal(150, 200), normal(150, 170, seed=1)
    paths = stored(tmp_path, a, b)
    options = {"transpose_a": True, "alpha": -2.0, "client": client, **OPTIONS}
    ooc_gemm.dask.multiply(*paths, tmp_path / "c", **options, **layout)
    want = -2.0 * a.T.astype("f8") @ b
    near(zarr.open_array(tmp_path / "c")[...], want)
    if "shards" not in layout:
        ooc_gemm.dask.multiply(*paths, tmp_path / "c", beta=0.5, **options)
        near(zarr.open_array(tmp_path / "c")[...], 1.5 * want)


def test_an_open_device_is_refused(tmp_path):
    """Each worker opens its own. No cluster is needed to say so."""
    a, b = stored(tmp_path)
    for device in (CPU(1), None):
        with pytest.raises(
            InputError, match=r"device is an object \(\w+\), .* give a name, such as device='cpu'"
        ):
            ooc_gemm.dask.multiply(a, b, tmp_path / "c", device=device)
        with pytest.raises(InputError, match=r"give a name, such as device='cpu'"):
            matmul(da.ones((4, 4)), da.ones((4, 4)), device=device)
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
def test_what_workers_cannot_see_is_refused(tmp_path, client):
    a, b = stored(tmp_path)
    with pytest.raises(InputError, match="store it as a Zarr array"):
        ooc_gemm.dask.multiply(normal(20, 150), b, tmp_path / "c", client=client, **OPTIONS)
    with pytest.raises(InputError, match="memory://"):
        ooc_gemm.dask.multiply(a, b, "memory://c", client=client, **OPTIONS)
    with pytest.raises(InputError, match="inner dimensions"):
        ooc_gemm.dask.multiply(a, a, tmp_path / "c", client=client, **OPTIONS)
    with pytest.raises(ooc_gemm.BudgetError) as least:
        ooc_gemm.dask.multiply(a, b, tmp_path / "c", client=client, memory_limit="1MiB", device="cpu")
    assert not (tmp_path / "c").exists()
    limit = least.value.minimum_memory_limit + 16 * MiB
    ooc_gemm.dask.multiply(a, b, tmp_path / "c", client=client, memory_limit=limit, device="cpu")


@pytest.mark.slow
def test_the_current_client_is_the_one(tmp_path, client):
    a, b = stored(tmp_path)
    with client.as_current():
        assert ooc_gemm.dask.multiply(a, b, tmp_path / "c", **OPTIONS).device == "cpu on 2 workers"


@pytest.mark.slow
def test_a_fault_on_a_worker_ends_the_run_and_it_can_go_on(tmp_path, client):
    paths = stored(tmp_path)
    options = {"client": client, "chunks": (16, 16), **OPTIONS}
    broken = tmp_path / "b" / "c" / "3" / "5"
    whole, was = broken.read_bytes(), os.stat(broken)
    broken.write_bytes(bytes(len(whole) - 1))
    with pytest.raises(StoreError, match=r"b: chunk c/3/5") as found:
        ooc_gemm.dask.multiply(*paths, tmp_path / "c", **options)
    addresses = client.scheduler_info(n_workers=-1)["workers"]
    assert any(f"worker {address} has" in note for note in found.value.__notes__ for address in addresses)
    assert unfinished.is_partial(Folder(tmp_path / "c"))
    assert list((tmp_path / "c").glob(share.RUN + "*")) == []
    broken.write_bytes(whole)
    os.utime(broken, ns=(was.st_atime_ns, was.st_mtime_ns))
    with pytest.raises(InputError, match="changed since"):  # it has another size than it had in between
        ooc_gemm.dask.multiply(*paths, tmp_path / "c", resume=True, **options)
    ooc_gemm.dask.multiply(*paths, tmp_path / "c", force=True, **options)
    near(zarr.open_array(tmp_path / "c")[...], normal(200, 150).astype("f8") @ normal(150, 170, seed=1))


class Wrong(distributed.WorkerPlugin):
    """The first tile that this worker multiplies comes out wrong."""

    def setup(self, worker):
        from ooc_gemm.devices.cpu.session import CPUSession

        self.tile, left = CPUSession._tile, [1]
        tile = self.tile

        def wrongly(self, run, a, b, out, *more):
            tile(self, run, a, b, out, *more)
            if left:
                out[0, 0] += 100 * left.pop()

        CPUSession._tile = wrongly

    def teardown(self, worker):
        from ooc_gemm.devices.cpu.session import CPUSession

        CPUSession._tile = self.tile


@pytest.mark.slow
def test_what_fails_its_check_is_made_again(tmp_path, client):
    a, b = stored(tmp_path)
    said = []
    client.register_plugin(Wrong(), name="wrong")
    try:
        ooc_gemm.dask.multiply(
            a, b, tmp_path / "c", client=client, verify=True, notice=said.append, **OPTIONS
        )
    finally:
        client.unregister_worker_plugin("wrong")
    assert any("computed once more" in one for one in said)
    near(zarr.open_array(tmp_path / "c")[...], normal(200, 150).astype("f8") @ normal(150, 170, seed=1))


@pytest.mark.slow
def test_workers_are_killed(tmp_path):
    """And β·C is added once all the same."""
    a, b = stored(tmp_path)
    old = normal(200, 170, seed=2)
    want = normal(150, 170, seed=1)
    want = normal(200, 150).astype("f8") @ want + 0.5 * old
    draw = np.random.default_rng()
    with patient(), start(3) as cluster, distributed.Client(cluster) as client:
        client.register_plugin(Slow(0.05))
        for run in range(3):
            c = tmp_path / f"c{run}"
            make(c, old, chunks=(16, 16), compressors=None)
            client.wait_for_workers(3, timeout=200)
            kill = Killer(list(client.run(os.getpid).values())[:1], draw.uniform(0, 0.5, 1))
            ooc_gemm.dask.multiply(a, b, c, client=client, beta=0.5, progress=kill, **OPTIONS)
            assert kill.left == []
            near(zarr.open_array(c)[...], want)
            assert left_over(c) == []


@pytest.mark.slow
def test_a_worker_is_killed_when_it_is_asked(tmp_path, monkeypatch):
    """Before anything runs: another one answers, at once and not after a minute."""
    a, b = stored(tmp_path)
    with start(2) as cluster, distributed.Client(cluster) as client:
        pids, asked = client.run(os.getpid), ooc_gemm.dask.workers.Workers.arithmetic

        def killed(self, *arguments):
            os.kill(pids[self._first], signal.SIGKILL)
            return asked(self, *arguments)

        monkeypatch.setattr(ooc_gemm.dask.workers.Workers, "arithmetic", killed)
        monkeypatch.setattr(ooc_gemm.dask.workers, "TIMEOUT", 20)
        ooc_gemm.dask.multiply(a, b, tmp_path / "c", client=client, **OPTIONS)
    near(zarr.open_array(tmp_path / "c")[...], normal(200, 150).astype("f8") @ normal(150, 170, seed=1))


@pytest.mark.slow
def test_all_workers_are_killed_while_one_is_asked(tmp_path, monkeypatch):
    """The one that takes their place is asked."""
    a, b = stored(tmp_path)
    ask, killed = ooc_gemm.dask.workers.Workers._asked, []

    def asked(self, method, *arguments):
        if method == "arithmetic" and not killed:
            killed.extend(self.client.run(os.getpid).values())
            os.kill(killed[0], signal.SIGKILL)
            while killed[0] in self.client.run(os.getpid, on_error="ignore").values():
                time.sleep(0.01)
        return ask(self, method, *arguments)

    monkeypatch.setattr(ooc_gemm.dask.workers.Workers, "_asked", asked)
    with patient(), start(1) as cluster, distributed.Client(cluster) as client:
        ooc_gemm.dask.multiply(a, b, tmp_path / "c", client=client, **OPTIONS)
    assert len(killed) == 1
    near(zarr.open_array(tmp_path / "c")[...], normal(200, 150).astype("f8") @ normal(150, 170, seed=1))


@pytest.mark.slow
def test_a_worker_without_a_nanny_keeps_its_limit_run_after_run(tmp_path, monkeypatch):
    """It gives memory back to the system that a run has freed."""
    x = np.random.default_rng(0).standard_normal((2000, 2000)).astype("c16")
    path = make(tmp_path / "x", x, chunks=(300, 300))
    command = ["multiply", path, path, tmp_path / "c", "-f", "-d", "cpu", "-M", "250MiB", "-Q", "--json"]
    with launched(tmp_path, monkeypatch, "Slow(0)") as (address, _):
        found = [json.loads(ooc(*command, "--scheduler", address).out) for _ in range(3)]
    assert all(one["peak_host_bytes"] <= 250 * MiB for one in found)
    second, third = (one["bytes_read"] for one in found[1:])  # the first run has loaded libraries
    assert third < 1.2 * second


@pytest.mark.slow
def test_a_worker_that_counts_as_dead_changes_nothing(tmp_path):
    """It is alive, and goes on writing what another one has done in its place."""
    c, old = tmp_path / "c", normal(32, 32)
    make(c, old, chunks=(16, 32), compressors=None)
    head = {"inputs": {}, "options": {}}
    block = np.dtype("f4")
    target = opening.update_target(c, block, head)
    part = Part((1, 0), 16, 0, 16, 32)

    def write(worker, value):
        slot = np.empty(16 * 32 * 4, np.uint8)
        worker.view(part, slot)[...] = value
        worker.write(part, slot)

    with target.sink.run_folder() as folder:
        shares = [share.Share(folder, direct=False) for _ in range(2)]
        dead, other = (Target(reopen.open_partial(c), "c", block, one) for one in shares)
        write(dead, 1)
        write(other, 2)
        for taken in other.sink.written.files():
            target.sink.take(*taken)
        write(dead, 3)
    with pytest.raises(StoreError, match="cannot be written"):
        write(dead, 4)
    target.sink.commit()
    near(zarr.open_array(c)[...], np.vstack([old[:16], np.full((16, 32), 2)]), 0)
    assert left_over(c) == []


@pytest.mark.slow
def test_scheduler_or_client_is_killed_and_the_run_goes_on(tmp_path, monkeypatch):
    a, b, old = normal(1000, 60), normal(60, 1100, seed=1), normal(1000, 1100, seed=2)
    a, b = stored(tmp_path, a, b, (250, 60))
    c = tmp_path / "c"
    make(c, old, chunks=(50, 100), compressors=None)
    command = ["multiply", a, b, str(c), "--beta", "0.5", "-d", "cpu", "-Q", "--json"]

    def run(*more):
        """Within the smallest limit: workers hold more after a run than before it."""
        small = ooc(*command, "--scheduler", address, "-M", "1MiB", *more)
        assert small.code == 2
        limit = int(re.search(r"would do is (\d+) bytes", small.err)[1]) + 2 * MiB
        more = ("--scheduler", address, "-M", str(limit), *more)
        return process("ooc_gemm.cli", *command, *more, log=subprocess.PIPE)

    def under_way(*more):
        """A run that has finished a chunk. Workers still carry out what a killed client has begun, and may
        take more memory between the question for the limit and the run, which is refused then."""
        for _ in range(20):
            one, before = run(*more), chunks(c)
            while one.poll() is None and chunks(c) <= before:
                time.sleep(0.02)
            if one.poll() is None:
                return one
            said = one.communicate()[0].decode()
            assert "too small" in said, said
            time.sleep(1)
        raise AssertionError(said)

    with launched(tmp_path, monkeypatch, "Slow(0.1)") as (address, scheduler):
        first = under_way()
        other = ooc(*command, "--resume")
        assert other.code == 2
        assert "being written by another process" in other.err
        first.kill()
        first.communicate()
        assert unfinished.is_partial(Folder(c))
        second = under_way("--resume")
        scheduler.kill()
        said = second.communicate()[0].decode()
    assert second.returncode == 1, said
    assert "--resume" in said
    assert "Traceback" not in said
    third = ooc(*command, "--resume")  # one process can go on where a cluster was
    assert third.code == 0, third.err
    near(zarr.open_array(c)[...], normal(1000, 60).astype("f8") @ normal(60, 1100, seed=1) + 0.5 * old)
    assert left_over(c) == []


@pytest.mark.slow
def test_command_line(tmp_path, monkeypatch):
    a, b = stored(tmp_path)
    command = ["multiply", a, b, tmp_path / "c", "-d", "cpu", "--scheduler"]
    done = ooc(*command, "local:2", "-M", "900MiB", "--json")
    assert done.code == 0, done.err
    near(zarr.open_array(tmp_path / "c")[...], normal(200, 150).astype("f8") @ normal(150, 170, seed=1))
    small = ooc(*command, "local:2", "-f", "-M", "100MiB")
    assert small.code == 2
    assert "too small for 2 workers" in small.err
    for wrong, what in (("local:0", "not a cluster"), ("local:x", "not a cluster"), ("nowhere", "address")):
        monkeypatch.setattr("ooc_gemm.dask.workers.TIMEOUT", 2)
        refused = ooc(*command, wrong, "-f")
        assert refused.code == 2
        assert what in refused.err
    assert ooc(*command, "local:2", "-f", "--trace", "t").code == 2


@pytest.mark.slow
def test_no_scheduler_no_result(tmp_path):
    a, b = stored(tmp_path)
    with start(1) as cluster:
        client = distributed.Client(cluster)
    client.close()
    with pytest.raises(DeviceError, match="scheduler"):
        ooc_gemm.dask.multiply(a, b, tmp_path / "c", client=client, **OPTIONS)
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
@pytest.mark.gpu
def test_workers_with_gpus_have_one_each(tmp_path):
    if why := gpu_missing():
        pytest.skip(why)
    from ooc_gemm.dask.local_cluster import connected
    from ooc_gemm.devices.cuda.gpus import count

    workers, a, b = min(2, count()), normal(3000, 1000), normal(1000, 2000, seed=1)
    paths = [make(tmp_path / name, values, chunks=(500, 500)) for name, values in (("a", a), ("b", b))]
    with connected(f"local:{workers}", "8GiB", "cuda") as (client, limit):
        options = {"client": client, "memory_limit": limit, "device": "cuda"}
        seen = client.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"])
        assert sorted(seen.values()) == [str(index) for index in range(workers)]
        made = ooc_gemm.dask.multiply(*paths, str(tmp_path / "c"), verify=True, **options)
        assert (made.device, made.verified) == (f"cuda on {workers} workers", True)
        assert made.peak_device_bytes > 0
        with client.as_current():
            x, y = (da.from_zarr(str(path)) for path in paths)
            lazy = matmul(x, y, device="cuda").compute()
            computed = matmul(x + 1, y, device="cuda").compute()
    want = a.astype("f8") @ b
    for found in (zarr.open_array(str(tmp_path / "c"))[:], lazy):
        np.testing.assert_allclose(found, want, atol=1e-3)
    np.testing.assert_allclose(computed, (a.astype("f8") + 1) @ b, atol=1e-3)
