"""One GPU: its context, its free memory, and events."""

from ...cuda_kernels import driver
from ...support.errors import DeviceError, InputError
from .gpus import open_cupy, properties

FIRST = -8
"""Priority of streams whose kernels take little time, beside products that fill the device: those of copies,
which would wait for products otherwise. CUDA takes the highest that there is for any number below it."""

EVENTS = 128
"""Events of each kind that a session has at hand."""


class GPU:
    """One GPU that this process uses."""

    def __init__(self, index: int = 0):
        cupy, there = open_cupy()
        self.cupy = cupy
        self.runtime = cupy.cuda.runtime
        if index >= there:
            raise InputError(f"there is no GPU {index}; this machine has {there}")
        self.name = "cuda" if index == 0 else f"cuda:{index}"
        self.index = index
        """Number of the GPU."""
        self._device = cupy.cuda.Device(index)
        found = properties(self.runtime, index)
        self.capability = 10 * found["major"] + found["minor"]
        self.model, self.multiprocessors = found["name"].decode(), int(found["multiProcessorCount"])
        self.shared_bytes = int(found.get("sharedMemPerBlockOptin") or 48 << 10)
        """Most shared memory of a thread block, in bytes."""
        self.speed = self.multiprocessors * int(found.get("clockRate") or 1_500_000) // 1000
        try:
            self._device.use()
            self.free = self.free_bytes()
            """Bytes of device memory that plans may count on, with its context made."""
        except self.runtime.CUDARuntimeError as error:  # not even for a context
            raise DeviceError(
                f"{self.name} cannot be used ({error}); wait until other programs leave it, "
                "or use another device"
            ) from error
        self.reached_by = set[int]()
        """Other devices that take panels from this one."""
        self.times, self.points = driver.events(index, timed=True), driver.events(index, timed=False)
        """Events of all sessions. One that is dropped late serves the next session."""

    def reserve_events(self) -> None:
        """Make the events that a session uses at once, before threads of its own copy anything."""
        for events in (self.times, self.points):
            events.reserve(EVENTS)

    def free_bytes(self) -> int:
        """Return the bytes of device memory that are free now."""
        return int(self.runtime.memGetInfo()[0])

    def use(self) -> None:
        """Make this the current device of the calling thread. Kernels and events need it to be this one, and
        other calls of the driver need any."""
        driver.use(self.index)
