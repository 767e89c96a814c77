"""The times of copies that threads without the interpreter make."""

from collections import Counter
from typing import Any

from ...cuda_kernels import driver
from ...cuda_kernels.driver import TO_DEVICE, TO_HOST
from ...engine.ports import DOWNLOAD
from ...support.buffers import Bytes
from .timing import Timing

APART = 256
"""One in so many steps is copied once more, to be timed."""


class Samples:
    """Copies a step more than is needed now and then, and times it: to time a piece or a part of C it would
    have to go through a slot, which the driver pins for that (64 MiB on four H200: 10 ms, in which nothing
    is read)."""

    def __init__(self, timing: Timing, host: Bytes, device: Any, stream: Any):
        """host, device: memory of a step on each side, of which that of the host is pinned. stream: one for
        samples alone; in that of the others, some of their copies would come between the two events."""
        self._timing, self._host, self._device, self._stream = timing, host, device, stream
        self._left = Counter[str]()
        """Bytes of each stage until the next sample."""

    def take(self, stage: str, nbytes: int) -> None:
        """Count bytes that others copy, and make and time a copy if one is due. The device must be the
        current one."""
        size = len(self._host)
        self._left[stage] -= nbytes
        if self._left[stage] >= 0:
            return
        self._left[stage] = APART * size
        to, target, source = TO_DEVICE, self._device.data.ptr, self._host.ctypes.data
        if stage == DOWNLOAD:
            to, target, source = TO_HOST, source, target
        start = self._timing.begin(self._stream)
        driver.copy(to, target, size, source, size, size, 1, self._stream.ptr)
        self._timing.end(stage, start, self._stream, size)
        self._timing.count(stage, -size)  # it brings nothing
