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


def test_only_what_is_used_of_a_buffer_is_pinned(monkeypatch):
    """Until more of it is used. Pages that nobody has touched take 16 times as long."""
    cupy_on_cpu.install(monkeypatch)
    memory, calls = HostMemory(CUDA()), []
    runtime = memory._device.runtime
    monkeypatch.setattr(runtime, "hostRegister", lambda at, nbytes, flags: calls.append(nbytes))
    monkeypatch.setattr(runtime, "hostUnregister", lambda at: calls.append(0))
    (slot,) = memory.host_buffers(1, 1 << 20)
    memory.prepare(slot, 100_000)
    assert len(calls) == 1
    assert 100_000 < calls[0] < 120_000
    memory.prepare(slot, 105_000)
    assert len(calls) == 1
    assert not memory.prepared(slot)
    memory.prepare(slot, 300_000)
    memory.prepare(slot)
    assert memory.prepared(slot)
    assert calls[1] == calls[3] == 0
    assert 300_000 < calls[2] < calls[4] == 1 << 20
    memory.prepare(slot, 1000)
    memory.close()
    assert calls[5:] == [0]
