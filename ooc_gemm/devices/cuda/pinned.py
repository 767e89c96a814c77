"""Host memory from which a GPU copies at full speed."""

import contextlib
from mmap import PAGESIZE
from threading import Lock

from ...support.buffers import Bytes, page_aligned
from ...support.errors import NO_MEMORY, OutOfMemoryError
from ...support.intervals import round_up
from .gpu import GPU
from .gpus import CUDA_FULL

_PORTABLE = 1
"""cudaHostRegisterPortable: memory is pinned for all devices."""


class HostMemory:
    """Host memory that is pinned for all devices."""

    def __init__(self, device: GPU):
        self._device = device
        self._pinned: dict[int, Bytes] = {}
        self._pinning = Lock()

    def host_buffers(self, count: int, nbytes: int) -> list[Bytes]:
        """Returns page-aligned memory, which `prepare` pins."""
        return page_aligned(count, nbytes)

    def prepare(self, buffer: Bytes) -> None:
        """Pins a buffer when it is first used. By then many threads at once have touched its pages, after
        which pinning costs 25 ms/GiB instead of 400 (H200 machine). One thread pins at a time, as the driver
        does anyway, because copies can start between two calls only if no third one waits."""
        if id(buffer) in self._pinned:
            return
        self._device.use()
        with self._pinning:
            if id(buffer) in self._pinned:  # by another reader that has the piece, too: the plan keeps it
                return
            try:
                self._device.runtime.hostRegister(
                    buffer.ctypes.data, round_up(buffer.nbytes, PAGESIZE), _PORTABLE
                )
            except self._device.runtime.CUDARuntimeError as error:
                if error.status != CUDA_FULL:
                    raise
                raise OutOfMemoryError(NO_MEMORY) from error
            self._pinned[id(buffer)] = buffer

    def prepared(self, buffer: Bytes) -> bool:
        """Whether the buffer is pinned."""
        return id(buffer) in self._pinned

    def release(self, buffers: list[Bytes]) -> None:
        """Unpins those of the buffers that are pinned."""
        self._device.use()
        runtime = self._device.runtime
        for buffer in buffers:
            if self._pinned.pop(id(buffer), None) is not None:
                with contextlib.suppress(runtime.CUDARuntimeError):  # where the device has failed
                    runtime.hostUnregister(buffer.ctypes.data)

    def close(self) -> None:
        """Unpins all buffers."""
        self.release(list(self._pinned.values()))
