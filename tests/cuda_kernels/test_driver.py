"""What a GPU is told for every chunk, by a driver that stands in for NVIDIA's where there is none."""

import ctypes
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest

from ooc_gemm.cuda_kernels import driver, wgmma
from ooc_gemm.support.errors import DeviceError

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

LIBRARY = r"""
#include <string.h>
#include <dlfcn.h>

typedef struct {  // as the driver's manual has it
    size_t srcXInBytes, srcY; unsigned srcMemoryType; const void *srcHost; unsigned long long srcDevice;
    void *srcArray; size_t srcPitch;
    size_t dstXInBytes, dstY; unsigned dstMemoryType; void *dstHost; unsigned long long dstDevice;
    void *dstArray; size_t dstPitch;
    size_t WidthInBytes, Height;
} CUDA_MEMCPY2D;

extern "C" {

int made, recorded, flags, held, fails;
void *stream, *waited;

static int answer() {
    int (*check)() = (int (*)())dlsym(RTLD_DEFAULT, "PyGILState_Check");
    held = check();
    return fails;
}
int cuEventCreate(void **event, unsigned f) {
    if (!fails) *event = (void *)(size_t)(1000 + ++made);
    flags = f;
    return answer();
}
int cuEventRecord(void *, void *s) { ++recorded; stream = s; return answer(); }
int cuEventQuery(void *event) { return answer() ? fails : event == (void *)1001 ? 0 : 600; }
int cuEventElapsedTime(float *ms, void *from, void *to) {
    *ms = 1e3f * ((char *)to - (char *)from);
    return answer();
}
int cuEventSynchronize(void *) { return answer(); }
int cuStreamWaitEvent(void *s, void *event, unsigned) { stream = s; waited = event; return answer(); }
int cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *c, void *s) {
    const char *from = (const char *)(c->srcMemoryType == 1 ? c->srcHost : (void *)c->srcDevice);
    char *to = (char *)(c->dstMemoryType == 1 ? c->dstHost : (void *)c->dstDevice);
    for (size_t y = 0; y < c->Height; ++y)
        memcpy(to + (c->dstY + y) * c->dstPitch + c->dstXInBytes,
               from + (c->srcY + y) * c->srcPitch + c->srcXInBytes, c->WidthInBytes);
    stream = s;
    return answer();
}

void *current;
int retained;
int cuDevicePrimaryCtxRetain(void **context, int device) {
    ++retained, *context = (void *)(size_t)(500 + device);
    return answer();
}
int cuCtxSetCurrent(void *context) { current = context; return answer(); }
int cuMemsetD8Async(unsigned long long at, unsigned char value, size_t nbytes, void *s) {
    memset((void *)at, value, nbytes);
    stream = s;
    return answer();
}

unsigned sizes[7];
struct { int i; double d; char map[128]; } given;
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void *s, void **args, void **extra) {
    unsigned found[] = {gx, gy, gz, bx, by, bz, shared};
    memcpy(sizes, found, sizeof sizes);
    memcpy(&given.i, args[0], 4), memcpy(&given.d, args[1], 8), memcpy(given.map, args[2], 128);
    stream = s;
    return function == (void *)33 && !extra ? answer() : 400;
}

int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *at, const unsigned long long *sizes,
                           const unsigned long long *pitches, const unsigned *box, const unsigned *steps,
                           int interleave, int swizzle, int promotion, int fill) {
    size_t found[] = {(unsigned)type, rank, (size_t)at, sizes[0], sizes[1], pitches[0], box[0], box[1],
                      steps[0], steps[1], (unsigned)interleave, (unsigned)swizzle, (unsigned)promotion,
                      (unsigned)fill, 0, (size_t)map % 64};
    memcpy(map, found, 128);
    return answer();
}

typedef struct { int type, id; } CUmemLocation;
typedef struct {
    int type, requestedHandleTypes; CUmemLocation location; void *win32HandleMetaData;
    struct { unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; } allocFlags;
} CUmemAllocationProp;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;

int blocks, addresses, mapped, fails_at, where, others;
size_t size;

static int at(int step, int *count, int change) {
    if (step == fails_at) return 2;
    *count += change;
    return answer();
}
int cuMemCreate(unsigned long long *block, size_t nbytes, const CUmemAllocationProp *p, unsigned long long) {
    *block = 11, size = nbytes, where = p->location.id;
    if (p->type != 1 || p->location.type != 1 || p->requestedHandleTypes || p->allocFlags.usage) return 1;
    return at(1, &blocks, 1);
}
typedef unsigned long long u64;
int cuMemAddressReserve(u64 *ptr, size_t nbytes, size_t, u64, u64) {
    *ptr = 1 << 20;
    return nbytes == size ? at(2, &addresses, 1) : 1;
}
int cuMemMap(unsigned long long ptr, size_t nbytes, size_t, unsigned long long block, unsigned long long) {
    return ptr == 1 << 20 && nbytes == size && block == 11 ? at(3, &mapped, 1) : 1;
}
int cuMemSetAccess(unsigned long long ptr, size_t nbytes, const CUmemAccessDesc *d, size_t count) {
    for (others = 0; count--; ++d) {
        if (d->location.type != 1 || d->flags != 3) return 1;
        others |= 1 << d->location.id;
    }
    return at(4, &held, 0);
}
int cuMemUnmap(unsigned long long, size_t) { return at(0, &mapped, -1); }
int cuMemRelease(unsigned long long) { return at(0, &blocks, -1); }
int cuMemAddressFree(unsigned long long, size_t) { return at(0, &addresses, -1); }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 102 && device == 3;
    return answer();
}
int cuGetErrorString(int, const char **text) { *text = "an illegal memory access"; return 0; }

}
"""


@pytest.fixture
def cuda(tmp_path, monkeypatch):
    """What the library has seen."""
    (tmp_path / "cuda.cc").write_text(LIBRARY)
    path = tmp_path / "libcuda.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", path, tmp_path / "cuda.cc", "-ldl"], check=True)
    library = ctypes.CDLL(str(path))
    monkeypatch.setattr(driver, "_LIBRARY", str(path))
    remembered = driver._keeping, driver._yielding, driver._context
    for function in remembered:
        function.cache_clear()
    yield lambda name, kind=ctypes.c_int: kind.in_dll(library, name)
    for function in remembered:
        function.cache_clear()


def test_events(cuda):
    times, points = driver.Events(timed=True), driver.Events(timed=False)
    first = times.record(77)
    assert (cuda("made").value, cuda("recorded").value, cuda("flags").value) == (1, 1, 1)
    assert cuda("stream", ctypes.c_void_p).value == 77
    assert first.done
    assert not first.pending
    second = points.record(78)
    assert cuda("flags").value == 3
    assert not second.done
    assert second.pending
    assert second.seconds_since(first) == 1
    driver.wait(79, second)
    assert (cuda("stream", ctypes.c_void_p).value, cuda("waited", ctypes.c_void_p).value) == (79, second.ptr)
    assert cuda("held").value == 1, "the interpreter was given up"
    first.synchronize()
    assert cuda("held").value == 1, "there was nothing to wait for"
    second.synchronize()
    assert cuda("held").value == 0, "nobody else could run while this thread waited"


def test_events_are_used_again(cuda):
    points = driver.Events(timed=False)
    first, _second = points.record(1), points.record(1)
    was = first.ptr
    del first
    third = points.record(1)
    assert third.ptr == was
    assert (cuda("made").value, cuda("recorded").value) == (2, 3)


def test_events_that_were_reserved_are_not_created_later(cuda):
    points = driver.Events(timed=False)
    points.reserve(3)
    assert (cuda("made").value, cuda("flags").value) == (3, 3)
    some = [points.make() for _ in range(3)]
    assert len({event.ptr for event in some}) == cuda("made").value == 3
    del some
    points.reserve(3)
    assert cuda("made").value == 3


def test_what_fails_says_so_and_leaves_no_event(cuda):
    points = driver.Events(timed=False)
    points.record(1)
    event = points.record(1)
    other = driver.Events(timed=False)
    cuda("fails").value = 700
    failing = (
        event.synchronize,
        lambda: points.record(1),
        lambda: other.record(1),
        lambda: event.seconds_since(event),
        lambda: driver.wait(1, event),
    )
    assert not event.done
    assert not event.pending, "who waits for it would wait for ever"
    for work in failing:
        with pytest.raises(driver.DriverError, match=r"^cu\w+: an illegal memory access \(700\)$") as error:
            work()
        assert error.value.status == 700
        del error
    assert not event.done
    cuda("fails").value = 0
    assert cuda("made").value == 1, "of those that were made; the other never was"


@pytest.mark.parametrize("to", [driver.DEVICE, driver.HOST, driver.EITHER])
@pytest.mark.parametrize("at", [driver.DEVICE, driver.HOST, driver.EITHER])
def test_copies(cuda, to, at):
    source, target = np.arange(60, dtype=np.uint8).reshape(5, 12), np.zeros((4, 20), np.uint8)
    driver.copy((to, at), target[1:, 3:].ctypes.data, 20, source[2:, 1:].ctypes.data, 12, 7, 3, 9)
    want = np.zeros_like(target)
    want[1:, 3:10] = source[2:, 1:8]
    assert np.array_equal(target, want)
    assert cuda("stream", ctypes.c_void_p).value == 9
    assert cuda("held").value == 1


def test_kernels(cuda):
    function, stream = SimpleNamespace(ptr=33), SimpleNamespace(ptr=9)
    map_ = np.frombuffer(bytes(range(128)), "V128")
    driver.Kernel(function)((7, 5), (256,), (np.int32(-3), np.float64(0.25), map_), stream, 1 << 16)
    assert list(cuda("sizes", ctypes.c_uint * 7)) == [7, 5, 1, 256, 1, 1, 1 << 16]

    class Given(ctypes.Structure):
        _fields_ = (("i", ctypes.c_int), ("d", ctypes.c_double), ("map", ctypes.c_ubyte * 128))

    given = cuda("given", Given)
    assert (given.i, given.d, bytes(given.map)) == (-3, 0.25, bytes(range(128)))
    assert cuda("stream", ctypes.c_void_p).value == 9
    assert cuda("held").value == 1
    driver.Kernel(function)((0,), (32, 8), (np.int32(1), np.float64(1), map_), stream)
    assert list(cuda("sizes", ctypes.c_uint * 7)) == [1, 1, 1, 32, 8, 1, 0], (
        "k = 0: one block has nothing to do"
    )
    cuda("fails").value = 700
    with pytest.raises(driver.DriverError, match=r"^cuLaunchKernel: an illegal memory access \(700\)$"):
        driver.Kernel(function)((1,), (1,), (np.int32(1), np.float64(1), map_), stream)


def test_tensor_maps(cuda):
    map_ = wgmma.tensor_map("float16", 1 << 44, 4096, 300, 8192, (64, 128))
    assert (
        map_.tobytes()
        == np.array([6, 2, 1 << 44, 4096, 300, 8192, 64, 128, 1, 1, 0, 3, 2, 0, 0, 0], np.uint64).tobytes()
    )
    assert cuda("held").value == 1
    cuda("fails").value = 700
    with pytest.raises(DeviceError, match=r"300×4096 float16 .* 8192 bytes .*illegal memory access"):
        wgmma.tensor_map("float16", 1 << 44, 4096, 300, 8192, (64, 128))


def test_a_device_is_used_by_its_own_context(cuda):
    for device in (2, 0, 2):
        driver.use(device)
        assert cuda("current", ctypes.c_void_p).value == 500 + device
    assert cuda("retained").value == 2, "it is asked for once"
    assert cuda("held").value == 1


def test_memory_is_filled(cuda):
    memory = np.zeros(9, np.uint8)
    driver.fill(memory[1:].ctypes.data, 5, 7, SimpleNamespace(ptr=9))
    assert memory.tolist() == [0, *[5] * 7, 0]
    assert cuda("stream", ctypes.c_void_p).value == 9
    assert cuda("held").value == 1


@pytest.mark.parametrize("step", range(1, 6))
def test_memory_that_others_reach(cuda, step):
    """Whatever fails on its way, nothing is left."""
    cuda("fails_at").value = step if step < 5 else -1
    if step < 5:
        with pytest.raises(driver.DriverError) as error:
            driver.Memory(3 << 20, 2)
        assert error.value.status == 2
        del error
    else:
        memory = driver.Memory(3 << 20, 2)
        assert cuda("others").value == 0b100
        memory.share({0, 5})
        assert memory.ptr == 1 << 20
        assert cuda("size", ctypes.c_size_t).value == 4 << 20
        assert (cuda("where").value, cuda("others").value) == (2, 0b100101)
        assert cuda("held").value == 0, "this takes a while"
        del memory
    assert (cuda("blocks").value, cuda("addresses").value, cuda("mapped").value) == (0, 0, 0)


def test_not_all_devices_map_memory(cuda):
    assert driver.maps_memory(3)
    assert not driver.maps_memory(0)
