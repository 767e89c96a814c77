"""Names of zarr, dask and distributed that those do not document: each is used in one place, and does what we
rely on."""

import ast
import asyncio
import threading

import numpy as np
import pytest
import zarr
from sources import trees

from ooc_gemm.storage.io import zarr_internals

INTERNAL = {
    "zarr": ("zarr_internals.py",),
    "dask": ("internals.py",),
    "distributed": ("internals.py",),
    "numcodecs": (),
}
DOCUMENTED = {
    "dask": {"dask", "dask.array", "dask.base", "dask.highlevelgraph"},
    "distributed": {"distributed", "distributed.comm", "distributed.core", "distributed.security"},
    "numcodecs": {"numcodecs", "numcodecs.abc", "numcodecs.registry"},
    "zarr": {"zarr", "zarr.abc.codec", "zarr.abc.store", "zarr.codecs", "zarr.storage"},
}
"""Modules that the documentation of each lists, as far as they are used here."""


@pytest.mark.parametrize("library", INTERNAL)
def test_internal_names_are_used_in_one_place(library):
    seen = False
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                modules, names = [node.module or ""], [alias.name for alias in node.names]
            elif isinstance(node, ast.Import):
                modules, names = [alias.name for alias in node.names], []
            else:
                continue
            for module in modules:
                if module.split(".")[0] != library:
                    continue
                seen = True
                internal = module not in DOCUMENTED[library] or any(name.startswith("_") for name in names)
                assert not internal or file.name in INTERNAL[library], (file.name, module, names)
    assert seen


def test_one_array_uses_fast_codecs_and_no_other_does(tmp_path, monkeypatch):
    """Others may be opened meanwhile, by other threads."""
    zarrs = pytest.importorskip("zarrs")
    values = np.arange(12.0).reshape(3, 4)
    array, settings = zarr.create_array(tmp_path / "a", data=values, chunks=(2, 2)), []
    make = zarrs.ZarrsCodecPipeline.from_array_metadata_and_store

    def meanwhile(*args, **options):
        settings.append(zarr.config.get("codec_pipeline.path"))
        return make(*args, **options)

    monkeypatch.setattr(zarrs.ZarrsCodecPipeline, "from_array_metadata_and_store", meanwhile)
    zarr_internals.use_fast_codecs(array)
    assert settings == [zarr.config.get("codec_pipeline.path")]
    assert "zarrs" not in settings[0]
    assert isinstance(array.async_array.codec_pipeline, zarrs.ZarrsCodecPipeline)
    assert np.array_equal(array[:], values)
    other = zarr.open_array(tmp_path / "a")
    assert not isinstance(other.async_array.codec_pipeline, zarrs.ZarrsCodecPipeline)
    held = zarr.create_array({}, data=values, chunks=(2, 2))  # in a store that zarrs does not read
    zarr_internals.use_fast_codecs(held)
    assert not isinstance(held.async_array.codec_pipeline, zarrs.ZarrsCodecPipeline)
    assert np.array_equal(held[:], values)


def test_zarr_runs_an_event_loop_in_another_thread():
    loop = zarr_internals.event_loop()
    assert loop.is_running()
    assert zarr_internals.event_loop() is loop

    async def where():
        return threading.current_thread(), asyncio.get_running_loop()

    thread, running = asyncio.run_coroutine_threadsafe(where(), loop).result(10)
    assert running is loop
    assert thread is not threading.current_thread()
    assert zarr_internals.sync(where()) == (thread, loop)
    assert zarr_internals.default_buffer_prototype().buffer.from_bytes(b"abc").to_bytes() == b"abc"


def test_stores_of_zarr_hold_an_archive(tmp_path):
    import zarr

    with zarr.storage.ZipStore(tmp_path / "a.zip", mode="w") as store:
        zarr.create_group(store)
        assert not store.read_only
    with zarr.open_group(zarr.storage.ZipStore(tmp_path / "a.zip"), mode="r").store as store:
        assert store.read_only
        assert zarr_internals.archive_of(store).namelist() == ["zarr.json"]


def test_dask_makes_tasks_and_reads_zarr_as_we_expect(tmp_path):
    da = pytest.importorskip("dask.array")
    import numpy as np
    import zarr

    from ooc_gemm.dask import internals as dask_internals

    x = da.from_zarr(zarr.create_array(tmp_path / "a", data=np.ones((4, 6), "f4"), chunks=(2, 3)))
    layer = x.dask.layers[x.name]
    assert isinstance(layer, dask_internals.Blockwise)
    assert layer.task.func is dask_internals.getter
    one = dask_internals.Task("one", sum, dask_internals.List([1, dask_internals.TaskRef("two")]))
    assert one.key == "one"
    assert one.dependencies == {"two"}
    assert one({"two": 2}) == 3


def test_workers_of_distributed_answer_as_we_expect():
    """An operation that is added to a worker gets the connection; what is serialized comes as it was."""
    distributed = pytest.importorskip("distributed")
    import numpy as np
    from distributed.core import Status, send_recv

    from ooc_gemm.dask import internals as dask_internals

    seen = []

    async def answer(comm, name):
        seen.append(name)
        await comm.write({"data": dask_internals.to_serialize(np.arange(10, dtype=np.uint8))})
        seen.append(await comm.read())
        return Status.dont_reply

    async def talk(one, other):
        other.handlers["ooc_gemm_test"] = answer
        comm = await one.rpc.connect(other.address)
        found = await send_recv(comm, op="ooc_gemm_test", name=("a", 1))
        await comm.write(True)
        one.rpc.reuse(other.address, comm)
        again = await one.rpc.connect(other.address)
        same = again is comm
        again.abort()
        one.rpc.reuse(other.address, again)
        return found["data"], same

    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=False, protocol="tcp://", dashboard_address=":0"
    ) as cluster:
        found, same = cluster.sync(talk, *cluster.workers.values())
        assert cluster.workers[0].loop.asyncio_loop.is_running()
    assert (found == np.arange(10)).all()
    assert (seen, same) == ([("a", 1), True], True)


def test_an_event_loop_of_distributed_runs_on_a_thread_of_its_own():
    pytest.importorskip("distributed")
    from ooc_gemm.dask import internals as dask_internals

    runner = dask_internals.LoopRunner()
    runner.start()
    loop = runner.loop
    assert loop.asyncio_loop.is_running()
    runner.stop()
    assert not loop.asyncio_loop.is_running()
