"""Host memory from which a GPU copies at full speed."""

import contextlib
from mmap import PAGESIZE
from threading import Lock

from ...support.buffers import Bytes, page_aligned
from ...support.errors import NO_MEMORY, OutOfMemoryError
from ...support.intervals import round_up
from .gpu import GPU
from .gpus import CUDA_FULL

SPARE = 8
"""One in so many bytes is pinned beyond those that are used of a buffer: the next piece may have a few
more."""
_PORTABLE = 1
"""cudaHostRegisterPortable: memory is pinned for all devices."""

_kept: dict[int, Bytes] = {}
"""Buffers of the process, by their size. To pin one and to let it go takes half a millisecond each."""
_pinning_kept = Lock()


class HostMemory:
    """Host memory that is pinned for all devices."""

    def __init__(self, device: GPU):
        self._device = device
        self._pinned: dict[int, tuple[Bytes, int]] = {}
        """Buffers by their identity, and how many bytes of each are pinned."""
        self._pinning = Lock()

    def host_buffers(self, count: int, nbytes: int) -> list[Bytes]:
        """Returns page-aligned memory, which `prepare` pins."""
        return page_aligned(count, nbytes)

    def kept_buffer(self, nbytes: int) -> Bytes:
        """Return a pinned buffer of so many bytes, which all sessions of the process use. Nobody needs what
        it holds."""
        with _pinning_kept:
            if nbytes not in _kept:
                (buffer,) = page_aligned(1, nbytes)
                self._device.use()
                self._pin(buffer, nbytes)
                _kept[nbytes] = buffer
            return _kept[nbytes]

    def prepare(self, buffer: Bytes, used: int | None = None) -> None:
        """Pins a buffer when it is first used. By then many threads at once have touched its pages, after
        which pinning costs 25 ms/GiB instead of 400 (H200 machine). So pages that are not used are not
        pinned. One thread pins at a time, as the driver does anyway, because copies can start between two
        calls only if no third one waits."""
        used = buffer.nbytes if used is None else used
        if self._pinned_of(buffer) >= used:
            return
        runtime = self._device.runtime
        self._device.use()
        with self._pinning:
            pinned = self._pinned_of(buffer)
            if pinned >= used:  # by another reader that has the piece, too: the plan keeps it
                return
            if pinned:
                del self._pinned[id(buffer)]
                runtime.hostUnregister(buffer.ctypes.data)
            used = min(buffer.nbytes, used + used // SPARE)
            self._pin(buffer, used)
            self._pinned[id(buffer)] = buffer, used

    def _pin(self, buffer: Bytes, nbytes: int) -> None:
        runtime = self._device.runtime
        try:
            runtime.hostRegister(buffer.ctypes.data, round_up(nbytes, PAGESIZE), _PORTABLE)
        except runtime.CUDARuntimeError as error:
            if error.status != CUDA_FULL:
                raise
            raise OutOfMemoryError(NO_MEMORY) from error

    def prepared(self, buffer: Bytes) -> bool:
        """Whether the whole buffer is pinned."""
        return self._pinned_of(buffer) == buffer.nbytes

    def _pinned_of(self, buffer: Bytes) -> int:
        found = self._pinned.get(id(buffer))
        return found[1] if found else 0

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
        self.release([buffer for buffer, _ in self._pinned.values()])
