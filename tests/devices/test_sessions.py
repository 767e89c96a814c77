"""A device keeps nothing of a run, and a session frees what it has allocated, also if it cannot be opened."""

import cupy_on_cpu
import numpy as np
import pytest
from sessions import device_with
from threadpoolctl import threadpool_info

import ooc_gemm
from ooc_gemm.cuda_kernels import complex_gemm, split, tensor  # noqa: F401 (replaced in part)
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.devices.cpu.session import CPUSession
from ooc_gemm.devices.cuda import check  # noqa: F401
from ooc_gemm.devices.cuda.device import CUDA
from ooc_gemm.devices.cuda.session import CUDASession
from ooc_gemm.devices.several import Several
from ooc_gemm.run.executor import Local

ONES = np.ones((90, 80))


def closing(kind, closed):
    """Sessions of this kind that note when they are closed."""

    class Closing(kind):
        def close(self):
            super().close()
            closed.append(self)

    return Closing


@pytest.mark.parametrize("name", ["cpu", "cuda", "several"])
def test_a_device_keeps_nothing_of_a_run(monkeypatch, name):
    if name == "cuda":
        cupy_on_cpu.install(monkeypatch)
    device = {"cpu": lambda: CPU(2), "cuda": CUDA, "several": lambda: Several([CPU(1), CPU(1)])}[name]()
    before = dict(vars(device))
    for _ in range(2):
        result = ooc_gemm.multiply(ONES, ONES, transpose_b=True, device=device)
        assert (result.array == 80).all()
    assert vars(device) == before


def test_a_session_that_cannot_be_opened_frees_what_it_has(monkeypatch):
    cupy_on_cpu.install(monkeypatch)
    closed = []

    def fail(*args):
        raise ooc_gemm.DeviceError("there is no kernel")

    monkeypatch.setattr("ooc_gemm.devices.cuda.session.Gemm", fail)
    with pytest.raises(ooc_gemm.DeviceError, match="no kernel"):
        ooc_gemm.multiply(
            ONES, ONES, transpose_b=True, device=device_with(closing(CUDASession, closed), CUDA)()
        )
    (session,) = closed
    assert not session._arrays
    assert not session._pinned


def test_where_one_of_several_cannot_be_opened_the_others_are_closed():
    closed, before = [], threadpool_info()

    class Full(CPU):
        def open(self, plan, operation, trace):
            raise ooc_gemm.DeviceError("there is no room")

    devices = [device_with(closing(CPUSession, closed), CPU)(1), Full(1)]
    with pytest.raises(ooc_gemm.DeviceError, match="no room"):
        ooc_gemm.multiply(ONES, ONES, transpose_b=True, device=Several(devices))
    assert len(closed) == 1
    assert not closed[0]._blocks
    assert threadpool_info() == before


def test_the_largest_peak_of_all_sessions_is_told():
    peaks = [5, 7, 3]

    class Session:
        def __init__(self, device, *args):
            self.peak = peaks.pop(0)

        def close(self):
            pass

        def peak_bytes(self):
            return self.peak

    executor = Local(device_with(Session, CPU)(1))
    while peaks:
        executor.start(None, None, None)
        executor.close()
        executor.close()
    assert executor.peak_device_bytes() == 7
