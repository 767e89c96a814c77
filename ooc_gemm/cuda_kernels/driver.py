"""What a GPU is told for every chunk and every pair of panels, without giving up the interpreter.

Each of CuPy's calls releases the interpreter's lock. Beside forty readers and writers who want it, whoever
gives it up for the microsecond of a call must wait for a turn to get it back; a chunk's way to the device is
ten such calls, a product in three of float16 on four devices seventy. Those below keep it: none of them waits
for the device but `Event.synchronize`, which gives it up.

They are the driver's. A process has one driver, so CuPy's streams, modules and allocations are its own, too.
"""

import ctypes
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate
from threading import Thread
from typing import Any

from ..support.errors import DeviceError
from ..support.intervals import round_up

HOST, DEVICE, EITHER = 1, 2, 4
"""CUmemorytype of an address. EITHER: an address of the host or of any device."""
TO_DEVICE, TO_HOST, WITHIN_DEVICE = (DEVICE, HOST), (HOST, DEVICE), (DEVICE, DEVICE)
"""Kinds of memory of the target and the source of a copy (`copy`)."""
_BLOCKING, _WITHOUT_TIME = 1, 2
"""CUevent_flags."""
_LIBRARY = "libcuda.so.1"
_ADDRESS = ctypes.c_void_p
_HANDLE, _SIZE = ctypes.c_ulonglong, ctypes.c_size_t
_ARGUMENTS = {
    "cuDevicePrimaryCtxRetain": (_ADDRESS, ctypes.c_int),
    "cuCtxSetCurrent": (_ADDRESS,),
    "cuDeviceGetAttribute": (_ADDRESS, ctypes.c_int, ctypes.c_int),
    "cuMemCreate": (_ADDRESS, _SIZE, _ADDRESS, _HANDLE),
    "cuMemAddressReserve": (_ADDRESS, _SIZE, _SIZE, _HANDLE, _HANDLE),
    "cuMemMap": (_HANDLE, _SIZE, _SIZE, _HANDLE, _HANDLE),
    "cuMemSetAccess": (_HANDLE, _SIZE, _ADDRESS, _SIZE),
    "cuMemUnmap": (_HANDLE, _SIZE),
    "cuMemRelease": (_HANDLE,),
    "cuMemAddressFree": (_HANDLE, _SIZE),
    "cuEventCreate": (_ADDRESS, ctypes.c_uint),
    "cuEventRecord": (_ADDRESS, _ADDRESS),
    "cuEventQuery": (_ADDRESS,),
    "cuEventElapsedTime": (_ADDRESS, _ADDRESS, _ADDRESS),
    "cuEventSynchronize": (_ADDRESS,),
    "cuStreamWaitEvent": (_ADDRESS, _ADDRESS, ctypes.c_uint),
    "cuMemHostRegister_v2": (_ADDRESS, _SIZE, ctypes.c_uint),
    "cuMemcpy2DAsync_v2": (_ADDRESS, _ADDRESS),
    "cuMemsetD8Async": (_HANDLE, ctypes.c_ubyte, _SIZE, _ADDRESS),
    "cuLaunchKernel": (_ADDRESS, *(ctypes.c_uint,) * 7, _ADDRESS, _ADDRESS, _ADDRESS),
    "cuTensorMapEncodeTiled": (_ADDRESS, ctypes.c_int, ctypes.c_uint, *(_ADDRESS,) * 5, *(ctypes.c_int,) * 4),
    "cuGetErrorString": (ctypes.c_int, _ADDRESS),
}


GRID, BLOCK, THREADS = (2**31 - 1, 65_535, 65_535), (1024, 1024, 64), 1024
"""Most blocks along x, y and z, threads of a block along each, and threads of a block in all, on every GPU
that our kernels run on (CUDA C++ Programming Guide, technical specifications)."""
SHARED_BYTES = 227 << 10
"""Most shared memory of a block on any GPU. `load_module` asks for what a kernel needs on the current one."""


class DriverError(RuntimeError):
    """An error that the driver returned."""

    def __init__(self, call: str, status: int):
        said = ctypes.c_char_p()
        _keeping("cuGetErrorString")(status, ctypes.byref(said))
        super().__init__(f"{call}: {(said.value or b'unknown error').decode()} ({status})")
        self.status = status


_COPY = struct.Struct("@NNI4xPPPNNNI4xPPPNNN")
"""CUDA_MEMCPY2D: x, y, kind, host, device, array and pitch of the source and of the target; width, rows."""


def use(device: int) -> None:
    """Make a device the current one of the calling thread, as CuPy does. Raises DriverError."""
    call("cuCtxSetCurrent", _context(device))


def begin(device: int) -> None:
    """Make the context of a device in the background, which takes some tenths of a second, while this process
    imports libraries. Whoever needs the context later waits for it. Does nothing where there is no GPU."""

    def work() -> None:
        with suppress(OSError, AttributeError):  # no driver
            driver, context = ctypes.CDLL(_LIBRARY), _HANDLE()
            if driver.cuInit(0) == 0:
                driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)

    Thread(target=work, name="ooc-gemm context").start()


@cache
def _context(device: int) -> int:
    """Return the context of a device that CUDA's runtime uses, too."""
    context = _HANDLE()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context.value


_MAPS_MEMORY = 102
"""CUdevice_attribute: whether a program may manage virtual addresses."""
_PINNED, _ON_DEVICE, _READ_AND_WRITE = 1, 1, 3
_KIND = struct.Struct("@iiiiQ8x")
"""CUmemAllocationProp: type, handles, where (what, number), Windows' metadata, flags."""
_ACCESS = struct.Struct("@iii")
"""CUmemAccessDesc: where, and what is allowed there."""
_GRANULE = 2 << 20
"""Memory is mapped in multiples of this many bytes."""


def maps_memory(device: int) -> bool:
    """Return whether `Memory` can be allocated on a device."""
    found = ctypes.c_int()
    call("cuDeviceGetAttribute", ctypes.byref(found), _MAPS_MEMORY, device)
    return bool(found.value)


class Memory:
    """Memory of a device that some other devices can access. Access to all memory of a device
    (cuCtxEnablePeerAccess) would map every allocation on each of the others, which takes several times as
    long as the allocation."""

    def __init__(self, nbytes: int, device: int):
        """Allocate memory that its own device, of this number, can access. Raises DriverError."""
        self._size, self._device = round_up(max(1, nbytes), _GRANULE), device
        self.ptr = self._mapped = 0
        address, block = _HANDLE(), _HANDLE()
        kind = _KIND.pack(_PINNED, 0, _ON_DEVICE, device, 0)
        _wait_for("cuMemCreate", ctypes.byref(block), self._size, kind, 0)
        try:
            _wait_for("cuMemAddressReserve", ctypes.byref(address), self._size, 0, 0, 0)
            self.ptr = address.value
            _wait_for("cuMemMap", self.ptr, self._size, 0, block, 0)
            self._mapped = self._size
        finally:  # what is mapped stays until it is not
            _wait_for("cuMemRelease", block)
        self.share(())

    def share(self, others: Iterable[int]) -> None:
        """Let devices of these numbers access the memory. Its own device goes on meanwhile. Raises
        DriverError."""
        who = [self._device, *others]
        allowed = b"".join(_ACCESS.pack(_ON_DEVICE, one, _READ_AND_WRITE) for one in who)
        _wait_for("cuMemSetAccess", self.ptr, self._size, allowed, len(who))

    def __del__(self) -> None:
        """Frees the memory. The device must not be working with it."""
        if self._mapped:
            _yielding("cuMemUnmap")(self.ptr, self._size)
        if self.ptr:
            _yielding("cuMemAddressFree")(self.ptr, self._size)


class Events:
    """Makes the events of one device, with their times or without. The handle of an event that is no longer
    used serves the next one, because to create and destroy a handle takes longer than to record an event."""

    def __init__(self, timed: bool):
        self._flags = _BLOCKING if timed else _BLOCKING | _WITHOUT_TIME
        self._free: list[int] = []

    def reserve(self, count: int) -> None:
        """Create handles on the current device until so many are free. While other threads copy, the driver
        lets whoever creates one wait for up to 2 ms, and the interpreter with it."""
        while len(self._free) < count:
            self._free.append(self._created())

    def record(self, stream: int) -> "Event":
        """Record an event after all work that a stream of the current device has been given. `stream`: its
        address."""
        event = self.make()
        call("cuEventRecord", event.ptr, stream)
        return event

    def make(self) -> "Event":
        """Return an event of the current device that somebody else records."""
        try:
            ptr = self._free.pop()
        except IndexError:
            ptr = self._created()
        return Event(ptr, self._free)

    def _created(self) -> int:
        handle = _ADDRESS()
        call("cuEventCreate", ctypes.byref(handle), self._flags)
        assert handle.value
        return handle.value


@cache
def events(device: int, timed: bool) -> Events:
    """Return what makes the events of a device of this number. It keeps its handles as long as the process
    runs."""
    return Events(timed)


_PLACE = struct.Struct("=11QqQ")
"""The beginning of `Device` of transfers.c."""


COPYING = (
    "cuCtxSetCurrent", "cuMemcpy2DAsync_v2", "cuEventRecord", "cuEventCreate", "cuEventQuery",
    "cuMemHostRegister_v2",
)  # fmt: skip
"""Functions that threads without the interpreter call, in the order of `Device` of transfers.c."""


@cache
def _sending() -> tuple[int, ...]:
    """Return the addresses of the functions with which threads without the interpreter copy rows."""
    functions = map(_keeping, COPYING)
    return tuple(ctypes.cast(function, _ADDRESS).value or 0 for function in functions)


def place(
    device: int, stream: int, event: "Event", at: int, pitch: int, integers: int = 0, largest: int = 0
) -> bytes:
    """Return how threads without the interpreter copy rows from or to a device in a stream (transfers.c).
    `event`: what they record after rows that go there. `at`: the address of the first row. `pitch`: the bytes
    from row to row. `integers`: the bytes of an integer, negative where it has a sign, if threads are to look
    for the largest magnitude of those that go there. They leave it in the 64 bits at `largest`."""
    return _PLACE.pack(*_sending(), _context(device), stream, event.ptr, at, pitch, integers, largest)


_NOT_READY = 600


class Event:
    """A point in a stream."""

    __slots__ = ("_free", "ptr")

    def __init__(self, ptr: int, free: list[int]):
        self.ptr, self._free = ptr, free

    def __del__(self) -> None:
        self._free.append(self.ptr)

    @property
    def done(self) -> bool:
        """Whether the device has reached this point."""
        return bool(_keeping("cuEventQuery")(self.ptr) == 0)

    @property
    def pending(self) -> bool:
        """Whether the device has still to reach this point. It never does if it has failed."""
        return bool(_keeping("cuEventQuery")(self.ptr) == _NOT_READY)

    def synchronize(self) -> None:
        """Wait until the device has reached this point. Other threads may run meanwhile. Raises DriverError
        if the device has failed."""
        if self.done:
            return
        _wait_for("cuEventSynchronize", self.ptr)

    def seconds_since(self, earlier: "Event") -> float:
        """Return the seconds between two points that the device has reached."""
        milliseconds = ctypes.c_float()
        call("cuEventElapsedTime", ctypes.byref(milliseconds), earlier.ptr, self.ptr)
        return milliseconds.value / 1e3


def wait(stream: int, event: Event) -> None:
    """Let all work that the stream is given from now on wait for an event."""
    call("cuStreamWaitEvent", stream, event.ptr, 0)


def copy(
    to: tuple[int, int], target: int, target_pitch: int, source: int, source_pitch: int, width: int,
    rows: int, stream: int,
) -> None:  # fmt: skip
    """Start a 2-D copy in a stream. `to`: kinds of memory of the target and the source. Pitches are the bytes
    from row to row; `width`: bytes of a row; `rows`: their number."""
    call(
        "cuMemcpy2DAsync_v2",
        _COPY.pack(
            0, 0, to[1], source, source, 0, source_pitch,
            0, 0, to[0], target, target, 0, target_pitch, width, rows,
        ),
        stream,
    )  # fmt: skip


class Kernel:
    """A function of a module that CuPy has loaded. All our kernels are launched through this class."""

    def __init__(self, function: Any, name: str = "kernel"):
        self._function, self._name = function, name
        """CuPy's function, which keeps the module loaded, and the name for messages."""

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        stream: Any,
        shared_bytes: int = 0,
    ) -> None:
        """Start the kernel in a CuPy stream of the current device. `grid`, `block`: up to three sizes.
        `args`: NumPy scalars, which are passed by value. Raises DriverError, and DeviceError if no GPU takes
        a launch of these sizes."""
        blocks, threads = check_launch(self._name, grid, block, shared_bytes)
        values = [arg.tobytes() for arg in args]
        memory = ctypes.create_string_buffer(b"".join(values))
        starts = accumulate(map(len, values[:-1]), initial=ctypes.addressof(memory))
        call(
            "cuLaunchKernel", self._function.ptr, *blocks, *threads, shared_bytes, stream.ptr,
            struct.pack(f"@{len(values)}P", *starts), None,
        )  # fmt: skip


_Sizes = tuple[int, int, int]


def check_launch(
    name: str, grid: Sequence[int], block: Sequence[int], shared_bytes: int
) -> tuple[_Sizes, _Sizes]:
    """Return the three sizes of a grid and of its blocks. Raises DeviceError if a launch of the kernel `name`
    exceeds what GPUs take. The driver would report some of these sizes with a number only; of others ctypes
    would pass on the lowest 32 bits."""
    blocks, threads = _three(grid), _three(block)
    fits = (
        len(grid) <= 3
        and len(block) <= 3
        and _within(blocks, GRID)
        and _within(threads, BLOCK)
        and threads[0] * threads[1] * threads[2] <= THREADS
        and 0 <= shared_bytes <= SHARED_BYTES
    )
    if not fits:
        raise DeviceError(
            f"the kernel {name} would need {'×'.join(map(str, blocks))} blocks of "
            f"{'×'.join(map(str, threads))} threads and {shared_bytes} bytes of shared memory each, which no "
            "GPU takes; give a smaller device_memory_limit, for smaller blocks of C"
        )
    return blocks, threads


def _three(sizes: Sequence[int]) -> _Sizes:
    x, y, z = (*sizes, 1, 1)[:3]
    return max(1, x), max(1, y), max(1, z)  # nothing to do is done by one block


def _within(sizes: _Sizes, most: _Sizes) -> bool:
    return sizes[0] <= most[0] and sizes[1] <= most[1] and sizes[2] <= most[2]


def fill(address: int, value: int, nbytes: int, stream: Any) -> None:
    """Set every byte of some device memory, in a CuPy stream."""
    call("cuMemsetD8Async", address, value, nbytes, stream.ptr)


def call(name: str, *args: Any) -> None:
    """Call a function of the driver with the interpreter's lock held. Raises DriverError."""
    _check(name, _keeping(name)(*args))


def _wait_for(name: str, *args: Any) -> None:
    _check(name, _yielding(name)(*args))


def _check(name: str, status: int) -> None:
    if status:
        raise DriverError(name, status)


@cache
def _keeping(name: str) -> Any:
    """Return a function of the driver that is called with the interpreter's lock held."""
    return _function(ctypes.PyDLL(_LIBRARY), name)


@cache
def _yielding(name: str) -> Any:
    """Return a function of the driver that is called without the interpreter's lock."""
    return _function(ctypes.CDLL(_LIBRARY), name)


def _function(library: ctypes.CDLL, name: str) -> Any:
    function = getattr(library, name)
    function.argtypes = _ARGUMENTS[name]
    return function
