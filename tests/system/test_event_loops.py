"""Called from inside event loops: notebooks have one running all the time, and zarr has one of its own."""

import asyncio
import subprocess
import sys
import threading
from functools import partial

import numpy as np
import pytest
import zarr
from conftest import make

import ooc_gemm
from ooc_gemm.storage.io import zarr_internals
from ooc_gemm.support.errors import NO_MEMORY

RNG = np.random.default_rng(0)
A = RNG.standard_normal((70, 50)).astype("f4")


@pytest.fixture
def arrays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make("a", A, chunks=(32, 20))
    make("t", A.T.copy(), chunks=(20, 32), shards=(40, 64))
    return tmp_path


def calls():
    """Each public function, as it is used on arrays in a folder."""
    return {
        "multiply": partial(ooc_gemm.multiply, "a", "t", "c", device="cpu"),
        "multiply, to memory": partial(ooc_gemm.multiply, "a", zarr.array(A.T.copy()), device="cpu"),
        "resume": partial(ooc_gemm.multiply, "a", "t", "c", device="cpu", resume=True),
        "gram": partial(ooc_gemm.gram, "a", "g", device="cpu"),
        "plan": partial(ooc_gemm.plan, "a", "t", device="cpu"),
        "verify": partial(ooc_gemm.verify, "a", "t", "t"),
        "random": partial(ooc_gemm.random, "r", (30, 40), compressor="zstd"),
    }


@pytest.mark.parametrize("name", calls())
def test_zarrs_own_loop_is_refused_before_anything_is_written(arrays, name):
    call = calls()[name]

    async def inside():
        return call()

    before = sorted(arrays.iterdir())
    running = asyncio.run_coroutine_threadsafe(inside(), zarr_internals.event_loop())
    with pytest.raises(ooc_gemm.InputError, match=r"zarr's own event loop.*call it from another thread"):
        running.result(30)
    assert sorted(arrays.iterdir()) == before


def test_what_the_message_says_helps(arrays):
    async def inside():
        return await asyncio.to_thread(ooc_gemm.multiply, "a", "t", "c", device="cpu")

    asyncio.run_coroutine_threadsafe(inside(), zarr_internals.event_loop()).result(60)
    np.testing.assert_allclose(zarr.open_array("c")[:], A @ A.T, rtol=1e-4, atol=1e-4)


def test_an_ordinary_running_loop_is_no_matter(arrays):
    """As in a notebook: the main thread runs a loop, in which cells are executed one after the other."""

    async def cells():
        assert ooc_gemm.plan("a", "t", device="cpu").block_count >= 1
        ooc_gemm.multiply("a", "t", "c", device="cpu")
        await asyncio.sleep(0)
        ooc_gemm.multiply("a", "t", "c", beta=1.0, device="cpu")
        ooc_gemm.gram("a", "g", device="cpu")
        ooc_gemm.random("r", (30, 40), compressor="zstd")
        assert ooc_gemm.verify("a", "a", "g").ok
        return ooc_gemm.multiply(zarr.array(A), "t", device="cpu").array

    found = asyncio.run(cells())
    np.testing.assert_allclose(found, A @ A.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(zarr.open_array("c")[:], 2 * A @ A.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(zarr.open_array("g")[:], A @ A.T, rtol=1e-4, atol=1e-4)
    assert zarr.open_array("r").shape == (30, 40)


def test_many_tasks_of_one_loop_multiply_at_a_time(arrays):
    async def cells():
        works = [asyncio.to_thread(ooc_gemm.multiply, "a", "t", f"c{i}", device="cpu") for i in range(3)]
        await asyncio.gather(*works)

    asyncio.run(cells())
    for i in range(3):
        np.testing.assert_allclose(zarr.open_array(f"c{i}")[:], A @ A.T, rtol=1e-4, atol=1e-4)


def test_the_loop_of_another_thread_is_no_matter(arrays):
    found = []
    thread = threading.Thread(
        target=lambda: asyncio.run(_later(lambda: found.append(ooc_gemm.multiply("a", "t", device="cpu"))))
    )
    thread.start()
    thread.join(60)
    np.testing.assert_allclose(found[0].array, A @ A.T, rtol=1e-4, atol=1e-4)


async def _later(work):
    await asyncio.sleep(0)
    work()


def test_zarrs_thread_that_could_not_start_is_started_later(arrays):
    """zarr keeps a loop that nothing runs, and waits for it, where the system gives no memory for its
    thread."""
    text = """
import resource, threading
import numpy as np
import ooc_gemm, ooc_gemm.api

np.ones(3) @ np.ones(3)
before = resource.getrlimit(resource.RLIMIT_AS)
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
threading.stack_size(1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (held + (256 << 20), before[1]))
try:
    ooc_gemm.random("r", (30, 40))
except ooc_gemm.DeviceError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, before)
threading.stack_size(0)
print(ooc_gemm.multiply("a", "t", device="cpu").array.shape)
"""
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{NO_MEMORY}\n(70, 70)\n"
