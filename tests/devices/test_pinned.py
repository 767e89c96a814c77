"""Host memory that is pinned for GPUs."""

import threading
from concurrent.futures import ThreadPoolExecutor

import cupy_on_cpu

from ooc_gemm.devices.cuda.device import CUDA
from ooc_gemm.devices.cuda.pinned import HostMemory


def test_readers_that_have_the_same_piece_pin_its_slot_once(monkeypatch):
    """A piece that the plan keeps has its slot for several turns. On an H200 the second reader failed with
    cudaErrorHostMemoryAlreadyRegistered."""
    cupy_on_cpu.install(monkeypatch)
    memory, both, pinned = HostMemory(CUDA()), threading.Barrier(2, timeout=1), []
    (slot,) = memory.host_buffers(1, 4096)

    def register(at, nbytes, flags):
        pinned.append(at)
        try:
            both.wait()  # until the other one is here, too, if it comes
        except threading.BrokenBarrierError:
            pass

    monkeypatch.setattr(memory._device.runtime, "hostRegister", register)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(memory.prepare, [slot, slot]))
    assert len(pinned) == 1
    assert memory.prepared(slot)
