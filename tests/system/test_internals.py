"""Names of zarr and dask that those do not document: each is used in one place, and does what we rely on."""

import ast
import asyncio
import threading

import pytest
from sources import trees

from ooc_gemm.storage.io import zarr_internals

INTERNAL = {
    "zarr": ("zarr_internals.py",),
    "dask": ("internals.py",),
    "distributed": (),
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
