"""Memory that is not there, of the host and of a GPU, and GPUs that fail: each ends in order."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr
from conftest import gpu_missing, make
from left_over import OLD, RNG, C, MiB, script
from outcome import assert_one_sentence
from sessions import device_with
from zarr.storage import MemoryStore

import ooc_gemm
from ooc_gemm.cli import entry as cli
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.devices.cpu.session import CPUSession
from ooc_gemm.engine.ports import Failure
from ooc_gemm.storage.read import compressed
from ooc_gemm.support.errors import OutOfMemoryError

pytestmark = pytest.mark.usefixtures("here")


# ------------------------------------------------------------------------------------------------- memory


class Small(CPU):
    """Has memory of its own, of which somebody has taken the most when the plan is carried out."""

    name = "small"

    def __init__(self, times, at=0, limit=None):
        super().__init__()
        self.times, self.at, self.limit, self.plans = times, at, limit, []

    def limits(self, arithmetic, device_memory_limit):
        found = super().limits(arithmetic, device_memory_limit)
        return replace(found, device=device_memory_limit or 64 * MiB, workspace=0)

    def open(self, plan, operation, trace):
        self.plans.append(plan)
        self.calls = 0
        self.fail_at(0)
        return SmallSession(self, plan, operation, trace)

    def fail_at(self, call):
        if call == self.at and len(self.plans) <= self.times:
            raise MemoryError("small is full")

    def explain(self, error):
        if isinstance(error, MemoryError):
            limit = self.limit or self.plans[-1].device_bytes // 2
            return Failure(OutOfMemoryError("small is full; give it less"), limit)
        return None


class SmallSession(CPUSession):
    """A run on the device `small`."""

    def __init__(self, device, *args):
        self.device = device
        super().__init__(device, *args)

    def multiply(self, *args, **options):
        self.device.calls += 1
        self.device.fail_at(self.device.calls)
        super().multiply(*args, **options)


@pytest.mark.parametrize("beta", [0, 2])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_device_that_runs_out_of_memory_gets_a_smaller_plan(here, at, beta):
    device, notes, options = Small(1, at), [], {} if beta else {"chunks": (50, 50)}
    if beta:
        make("c", OLD, chunks=(50, 50), compressors=None)
    result = ooc_gemm.multiply(
        "a", "b", "c", device=device, beta=beta, notice=notes.append, device_memory_limit=600_000, **options
    )
    assert np.array_equal(zarr.open_array("c", mode="r")[:], C + beta * OLD)
    first, second = device.plans
    assert second.device_bytes <= first.device_bytes // 2 == second.budget.device
    assert result.plan == second
    assert [note for note in notes if "small is full" in note and str(second.budget.device) in note]


@pytest.mark.parametrize("at", [0, 1])
def test_a_smaller_plan_is_made_once(here, at):
    device, notes = Small(2, at), []
    with pytest.raises(ooc_gemm.DeviceError, match="small is full; give it less"):
        ooc_gemm.multiply("a", "b", "c", device=device, notice=notes.append, chunks=(50, 50))
    assert len(device.plans) == 2
    assert len([note for note in notes if "small is full" in note]) == 1
    assert Path("c").exists() == bool(at)


def test_a_smaller_plan_that_cannot_be(here):
    """The error is the device's: no limit was wrong."""
    for limit in (1, None):
        with pytest.raises(ooc_gemm.DeviceError, match="small is full"):
            ooc_gemm.multiply("a", "b", "c", device=Small(9, limit=limit))
    assert not Path("c").exists()


def test_no_smaller_plan_where_beta_would_come_in_twice(here):
    """A C without a journal, in memory: it is known to be begun, and that is all."""
    c = zarr.create_array(MemoryStore(), shape=C.shape, chunks=(50, 50), dtype="f4")
    c[...] = OLD
    device = Small(1, 5)
    with pytest.raises(ooc_gemm.DeviceError, match="small is full"):
        ooc_gemm.multiply("a", "b", c, device=device, beta=2, device_memory_limit=600_000)
    assert len(device.plans) == 1


def within(megabytes):
    """A product, in a process that is given so much more address space when it has imported everything."""
    text = f"""
import resource
import ooc_gemm.api, ooc_gemm.devices.cpu.device, ooc_gemm.storage.read.inputs, numpy as np
from ooc_gemm.cli import main
from ooc_gemm.run import rates_first
rates_first.SHARE = 0.0  # measuring says so
free = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (free + ({megabytes} << 20),) * 2)
main(["multiply", "wide", "tall", "c", "-d", "cpu", "-M", "4GiB"])
"""
    shutil.rmtree("c", ignore_errors=True)
    for name, shape in (("wide", (12000, 10)), ("tall", (10, 12000))):
        zarr.create_array(name, shape=shape, chunks=shape, dtype="f4", fill_value=1, overwrite=True)
    return script(text)


def test_a_host_without_memory(here):
    """Address space runs out before the limit that was given."""
    done = within(300)
    assert (done.returncode, done.stdout) == (1, "")
    assert_one_sentence(done.stderr, "no more memory", "smaller --memory-limit")
    assert not Path("c/zarr.json").exists()


@pytest.mark.slow
def test_whatever_the_address_space_the_process_ends_in_order(here):
    """BLAS ends the process where it finds no memory, and a thread that starts without memory hangs."""
    codes = set()
    for megabytes in range(100, 1500, 50):
        done = within(megabytes)
        codes.add(done.returncode)
        assert done.returncode in (0, 1), (megabytes, done)
        if done.returncode:
            assert_one_sentence(done.stderr, "no more memory", "smaller --memory-limit")
    assert codes == {0, 1}


@pytest.mark.parametrize("kilobytes", [100_000, 300_000, 800_000])
def test_too_little_address_space_is_said_before_blas_ends_the_process(here, kilobytes):
    command = f"ulimit -v {kilobytes}; exec {sys.executable} -m ooc_gemm.cli multiply a b c -d cpu"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert_one_sentence(done.stderr, f"limited to {kilobytes >> 10} MiB", "ulimit -v", "--memory-limit")
    assert not Path("c").exists()


@pytest.mark.slow
def test_enough_address_space(here):
    least = (cli.ADDRESS_SPACE + cli.FOR_EACH_CORE * len(os.sched_getaffinity(0))) >> 10
    command = f"ulimit -v {least}; exec {sys.executable} -m ooc_gemm.cli multiply a b c -d cpu -M 200MiB"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert np.array_equal(zarr.open_array("c", mode="r")[:], C)


# ------------------------------------------------------------------------------------------------- the GPU


@pytest.fixture
def cupy():
    if why := gpu_missing():
        pytest.skip(why)
    import cupy

    return cupy


@pytest.mark.gpu
@pytest.mark.alone
def test_failing_runs_give_gpu_memory_back(here, cupy):
    from ooc_gemm.devices.cuda.device import CUDA
    from ooc_gemm.devices.cuda.session import CUDASession

    class Kept(CUDASession):
        def __init__(self, *args):
            sessions.append(self)
            super().__init__(*args)

    os.truncate("a/c/5/7", 17)
    device, free, sessions = device_with(Kept, CUDA)(), [], []
    for _ in range(6):
        for kernel in ("auto", "cublas"):
            with pytest.raises(ooc_gemm.StoreError, match="c/5/7 holds 17 bytes"):
                ooc_gemm.multiply("a", "b", "c", device=device, kernel=kernel, force=True)
        assert sessions
        assert not any(session._pinned or session._arrays for session in sessions)
        sessions.clear()
        free.append(cupy.cuda.runtime.memGetInfo()[0])
    assert min(free[1:]) >= free[0] - 8 * MiB  # the first has loaded what stays


@pytest.mark.gpu
@pytest.mark.alone
def test_events_of_many_pieces_do_not_pile_up(here, cupy, monkeypatch):
    from ooc_gemm.devices.cuda import timing
    from ooc_gemm.devices.cuda.device import CUDA
    from ooc_gemm.devices.cuda.session import CUDASession

    class Watched(CUDASession):
        def upload(self, source, piece, buffer):
            kept.append(len(self._timing.spans))
            return super().upload(source, piece, buffer)

    kept = []
    monkeypatch.setattr(timing, "SPANS", 16)
    x = RNG.standard_normal((1600, 1600))
    monkeypatch.setattr(compressed, "STACKED_BYTES", 0)  # chunks are uploaded one by one
    make("x", x, chunks=(32, 32))
    result = ooc_gemm.multiply("x", "x", device=device_with(Watched, CUDA)())
    np.testing.assert_allclose(result.array, x @ x, atol=1e-9)
    assert len(kept) >= 2 * 2500
    assert max(kept) < 500
    assert result.bytes_uploaded == result.plan.bytes_uploaded  # the trace has been told of all
    assert min(result.stage_seconds.values()) > 0


@pytest.mark.gpu
@pytest.mark.alone
def test_a_gpu_whose_memory_somebody_takes(here, cupy):
    from ooc_gemm.devices.cuda.device import CUDA

    class Crowded(CUDA):
        taken = None

        def open(self, plan, operation, trace):
            plans.append(plan)
            if self.taken is None:
                left = plan.device_bytes // 4
                self.taken = cupy.cuda.Memory(cupy.cuda.runtime.memGetInfo()[0] - left)
            sessions.append(super().open(plan, operation, trace))
            return sessions[-1]

    plans, notes, sessions, device = [], [], [], Crowded()
    a = RNG.standard_normal((16384, 512)).astype("f4")
    result = ooc_gemm.multiply(a, a, device=device, transpose_b=True, notice=notes.append)
    first, second = plans
    assert first.device_bytes > second.device_bytes
    assert [note for note in notes if "does not have the memory" in note]
    rows = RNG.integers(0, len(a), 40)
    right = a[rows].astype("f8") @ a.T.astype("f8")
    assert np.abs(result.array[rows] - right).max() < 1e-3
    assert not any(session._pinned or session._arrays for session in sessions)
    device.taken = None  # now, and not when somebody collects garbage


@pytest.mark.gpu
@pytest.mark.alone
def test_a_gpu_without_any_memory(here, cupy):
    from ooc_gemm.devices.cuda.device import CUDA

    device = CUDA()
    taken = cupy.cuda.Memory(cupy.cuda.runtime.memGetInfo()[0] - 64 * MiB)
    a = np.ones((8192, 512), "f4")
    with pytest.raises(ooc_gemm.DeviceError, match="does not have the memory that the plan counts on"):
        ooc_gemm.multiply(a, a, device=device, transpose_b=True)
    del taken
    result = ooc_gemm.multiply(a, a, device="cuda", transpose_b=True)
    assert (result.array == 512).all()


@pytest.mark.gpu
@pytest.mark.alone
def test_a_gpu_without_memory_for_a_context(here, cupy):
    taken, size = [], 1 << 30
    while size >= MiB:  # all there is
        try:
            taken.append(cupy.cuda.Memory(size))
        except (cupy.cuda.memory.OutOfMemoryError, cupy.cuda.runtime.CUDARuntimeError):
            size //= 2
    done = script("from ooc_gemm.cli import main; main(['multiply', 'a', 'b', 'c', '-d', 'cuda'])")
    del taken
    assert (done.returncode, done.stdout) == (1, ""), done
    assert "Error: cuda cannot be used (" in done.stderr
    assert not Path("c/zarr.json").exists()


@pytest.mark.gpu
@pytest.mark.alone
def test_a_kernel_that_fails_on_the_gpu(here, cupy):
    """The context is lost with it: in a process of its own."""
    text = """
import numpy as np
from ooc_gemm.cli import main
from ooc_gemm.devices.cuda.session import CUDASession
import cupy
bad = cupy.RawKernel('extern "C" __global__ void bad(int* p) { p[1ll << 40] = 1; }', "bad")
real = CUDASession.multiply
def multiply(self, *args, **options):
    with self._streams["compute"]:
        bad((1,), (1,), (np.uintp(0),))
    return real(self, *args, **options)
CUDASession.multiply = multiply
main(["multiply", "a", "b", "c", "-d", "cuda"])
"""
    done = script(text)
    assert (done.returncode, done.stdout) == (1, ""), done
    assert "Error: cuda failed (" in done.stderr  # CuPy may add what it could not free
    assert not Path("c/zarr.json").exists()
