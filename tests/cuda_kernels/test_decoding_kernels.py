"""kernels/prepare/zstd.cu and blosc.cu against the libraries of numcodecs: on the CPU, emulated."""

import contextlib
import struct
import subprocess

import numpy as np
import pytest
from conftest import gpu_missing
from numcodecs import Blosc, Zstd

from ooc_gemm.cuda_kernels import preparations
from ooc_gemm.ladder.emulator import _COMPILE, _HEADER, ORDERS, Fault, compiler_missing, whole_source

ROOM = {"zstd": 512 << 10, "blosc": 1536 << 10}
"""Bytes of the room of a thread block in these tests: enough for one block of zstd of the worst kind."""
PARTS = {"zstd": 1, "blosc": 3}
"""Thread blocks that share a chunk."""


def normal(rng, size):
    return rng.standard_normal(size // 4 + 1).astype("f4").tobytes()[:size]


def rounded(rng, size):
    return (np.rint(rng.standard_normal(size // 4 + 1) * 16) / 16).astype("f4").tobytes()[:size]


def genotypes(rng, size):
    return rng.integers(0, 3, size, "i1").tobytes()


def random(rng, size):
    return rng.bytes(size)


def zeros(rng, size):
    return bytes(size)


def words(rng, size):
    some = [rng.bytes(int(n)) for n in rng.integers(1, 40, 300)]
    return b"".join(some[int(i)] for i in rng.zipf(1.3, size) % 300)[:size]


def periods(rng, size):
    """Matches that repeat what they have just made."""
    found = b""
    while len(found) < size:
        found += rng.bytes(int(rng.integers(1, 9))) * int(rng.integers(1, 3000))
    return found[:size]


def changing(rng, size):
    """Blocks of all kinds in one frame."""
    kinds = zeros, random, rounded, words, normal, periods
    parts = [kind(rng, 50_000) for _ in range(3) for kind in kinds]
    return b"".join(parts)[:size]


DATA = normal, rounded, genotypes, random, zeros, words, periods, changing
SIZES = 1, 2, 7, 100, 300, 4096, 70_001, 131_072, 131_073, 400_000


def zstd_chunks(seed, sizes=SIZES):
    """Pairs of bytes and a frame of them."""
    rng, levels = np.random.default_rng(seed), (0, 1, 9, 19)
    all_of_them = [kind(rng, size) for kind in DATA for size in sizes]
    return [(data, Zstd(level=levels[i % 4]).encode(data)) for i, data in enumerate(all_of_them)]


def blosc_chunks(seed, sizes=(16, 1000, 40_008, 131_072, 400_000)):
    """Pairs of bytes and a container of them: of elements of all sizes, shuffled in all ways, and in blocks
    of several sizes."""
    rng, found = np.random.default_rng(seed), []
    for kind in DATA:
        for size in sizes:
            for dtype in ("i1", "i2", "f4", "f8", "c16"):
                data = np.frombuffer(kind(rng, size // 16 * 16), dtype)
                blocks = int(rng.choice([0, 0, 4096, 10_000, 1 << 20]))
                codec = Blosc("zstd", int(rng.integers(1, 6)), int(rng.integers(3)), blocks)
                encoded = codec.encode(data)
                if not encoded[2] & 2:  # it was compressed
                    found.append((data.tobytes(), encoded))
    return found


CHUNKS = {"zstd": zstd_chunks, "blosc": blosc_chunks}
KERNELS = tuple(CHUNKS)


def library(kernel, encoded):
    return (Zstd() if kernel == "zstd" else Blosc()).decode(encoded)


# ---- on the CPU --------------------------------------------------------------------------------

MAIN = r"""
int main() {
    using namespace cuda_on_cpu;
    long long p[4];
    while (std::fread(p, sizeof p, 1, stdin) == 1) {  // order, bytes of the chunk, of its output, of the room
        static Guarded in, out;
        static char* const room_memory = static_cast<char*>(std::malloc(4 << 20));
        const unsigned long long* const from = in.resize<unsigned long long>(p[1] + 16);
        if (std::fread(const_cast<unsigned long long*>(from), 1, p[1], stdin) != (size_t)p[1]) return 1;
        unsigned char* const to = out.resize<unsigned char>(p[2]);
        ASAN_POISON_MEMORY_REGION(room_memory, 4 << 20);
        ASAN_UNPOISON_MEMORY_REGION(room_memory + (1 << 20), p[3]);
        unsigned long long* const room = reinterpret_cast<unsigned long long*>(room_memory + (1 << 20));
        std::memset(room, -1, p[3]);
        unsigned failures = 0;
        decoder::Chunks chunks = {};
        chunks.chunk[0] = {0, unsigned(p[1]), 0, unsigned(p[2])};
        blockDim = {512, 1, 1};
        gridDim = {1, 1, 1};
        blockIdx = {0, 0, 0};
        const auto call = [&] {
            decoder::KERNEL(chunks, 1, PARTS, from, to, room, unsigned(p[3]), &failures);
        };
        thread_body = [](const void* it) { (*static_cast<decltype(call)*>(it))(); };
        thread_argument = &call;
        poison_shared_memory(SHARED_BYTES);
        run_block(p[0]);
        std::fwrite(&failures, 1, 4, stdout);
        std::fwrite(to, 1, p[2], stdout);
        std::fflush(stdout);
    }
}
"""
OURS = """
template <class T, class U> void atomicAdd(T* at, U x) { *at += x; }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
"""


class Program:
    """A kernel, compiled for the CPU."""

    def __init__(self, kernel, folder, change=("", "")):
        config, source = preparations.decode(kernel, 64 << 10), whole_source(kernel)
        assert change[0] in source
        shared = "reinterpret_cast<u64*>(cuda_on_cpu::dynamic_shared_memory.first)"
        inner = source.replace('extern "C" ', "").replace("extern __shared__ u64 shared_memory[];", "")
        inner = inner.replace("(shared_memory)", f"({shared})").replace(*change)
        macros = "".join(f"#define {name} {value}\n" for name, value in config.macros)
        text = f'#include "{_HEADER}"\n{OURS}{macros}namespace decoder {{\n{inner}\n}}\n'
        (folder / "main.cpp").write_text(
            text + MAIN.replace("KERNEL", kernel).replace("PARTS", str(PARTS[kernel])), "utf-8"
        )
        compiled = [*_COMPILE, "-O1", folder / "main.cpp", "-o", folder / "program"]
        done = subprocess.run(compiled, capture_output=True, text=True)
        assert not done.returncode, done.stderr
        self._program, self._room = folder / "program", ROOM[kernel]

    def decode(self, order, given):
        """For each chunk and size of what it holds: what the kernel makes of it, or None where it fails."""
        problems = b"".join(
            struct.pack("4q", order, len(data), size, self._room) + bytes(data) for data, size in given
        )
        done = subprocess.run([self._program], input=problems, capture_output=True, timeout=250)
        if done.returncode:
            raise Fault(done.stderr.decode(errors="replace"))
        out, found = done.stdout, []
        for _, size in given:
            failed, made = struct.unpack("I", out[:4])[0], out[4 : 4 + size]
            found.append(None if failed else made)
            out = out[4 + size :]
        assert not out
        return found


@pytest.fixture(scope="module", params=KERNELS)
def program(request, tmp_path_factory):
    if why := compiler_missing():
        pytest.skip(why)
    return request.param, Program(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.slow
@pytest.mark.parametrize("order", range(len(ORDERS)))
def test_it_decodes_what_the_library_has_encoded(program, order):
    kernel, emulated = program
    given = CHUNKS[kernel](order)
    assert len(given) > 70
    found = emulated.decode(order, [(encoded, len(data)) for data, encoded in given])
    for (data, encoded), made in zip(given, found, strict=True):
        assert made == data, (len(data), len(encoded), encoded[:16].hex())


def damaged(kernel, rng, count):
    """Chunks some of whose bytes are others, or are missing, with the size that they should have."""
    good = CHUNKS[kernel](3, (320, 5008, 131_088))
    found = []
    for _ in range(count):
        data, encoded = good[rng.integers(len(good))]
        bad = bytearray(encoded)
        if rng.random() < 0.3:
            bad = bad[: rng.integers(len(bad))]
        for _ in range(int(rng.integers(1, 4))):
            if len(bad) > 6:
                first = 5 if rng.random() < 0.6 else len(bad) // 2
                bad[min(len(bad) - 1, first + int(rng.integers(40)))] ^= 1 << int(rng.integers(8))
        size = len(data) + (int(rng.integers(-3, 4)) if rng.random() < 0.2 else 0)
        found.append((bytes(bad), max(1, size)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_damaged_chunks_touch_no_other_memory(program, seed):
    """Nor does a kernel make something else of a chunk than the library does."""
    kernel, emulated = program
    given = damaged(kernel, np.random.default_rng(seed), 300)
    found = emulated.decode(seed % len(ORDERS), given)
    for (bad, _), made in zip(given, found, strict=True):
        if made is not None:
            with contextlib.suppress(RuntimeError):  # it has a reason of its own, such as the window's size
                assert made == library(kernel, bad)
    assert found.count(None) > 100


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_missing_barrier_is_found(kernel, tmp_path):
    if why := compiler_missing():
        pytest.skip(why)
    line = "begin = end;\n        __syncthreads();"
    emulated = Program(kernel, tmp_path, (line, line.replace("__syncthreads();", "")))
    given = CHUNKS[kernel](1, (131_072,))
    wrong = 0
    for order in range(len(ORDERS)):
        try:
            found = emulated.decode(order, [(encoded, len(data)) for data, encoded in given])
        except Fault:
            wrong += 1
        else:
            wrong += any(made != data for (data, _), made in zip(given, found, strict=True))
    assert wrong


# ---- on a GPU ----------------------------------------------------------------------------------


def skip_without_gpu():
    if why := gpu_missing():
        pytest.skip(why)


def on_gpu(kernel, given, rooms=2):
    """What the kernel makes of each chunk with its size, `rooms` at a time, and how many have failed."""
    import cupy

    from ooc_gemm.cuda_kernels.launch import load

    shared = cupy.cuda.runtime.getDeviceProperties(0)["sharedMemPerBlockOptin"]
    config = preparations.decode(kernel, shared)
    table = np.zeros((128, 4), np.uint32)
    stored, at, to = [], 0, 0
    for i, (data, size) in enumerate(given):
        table[i] = at // 16, len(data), to // 16, size
        stored.append(bytes(data) + bytes(-len(data) % 16 + 32))
        at, to = at + len(stored[-1]), to + size + -size % 16 + 16
    source = cupy.asarray(np.frombuffer(b"".join(stored), np.uint8))
    out, room = cupy.full(to, 77, np.uint8), cupy.empty(rooms * ROOM[kernel], np.uint8)
    failed = cupy.zeros(1, np.uint32)
    u = np.uintp
    args = (
        np.void(table.tobytes()), np.int32(len(given)), np.int32(PARTS[kernel]), u(source.data.ptr),
        u(out.data.ptr), u(room.data.ptr), np.uint32(ROOM[kernel]), u(failed.data.ptr),
    )  # fmt: skip
    stream = cupy.cuda.Stream(non_blocking=True)
    load(config)[kernel]((rooms,), config.block, args, stream, config.shared_bytes)
    stream.synchronize()
    made = out.get().tobytes()
    found = [made[16 * int(row[2]) : 16 * int(row[2]) + int(row[3])] for row in table[: len(given)]]
    ends = [made[16 * int(row[2]) + int(row[3]) :][: 16 + -int(row[3]) % 16] for row in table[: len(given)]]
    assert all(set(end) <= {77} for end in ends)
    return found, int(failed[0])


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rooms", [1, 7])
def test_a_gpu_decodes_what_the_library_has_encoded(kernel, rooms):
    skip_without_gpu()
    every = CHUNKS[kernel](rooms)
    for first in range(0, len(every), 128):
        some = every[first : first + 128]
        found, failed = on_gpu(kernel, [(encoded, len(data)) for data, encoded in some], rooms)
        assert failed == 0
        assert found == [data for data, _ in some]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_gpu_says_of_damaged_chunks_that_they_are(kernel):
    skip_without_gpu()
    given, failures = damaged(kernel, np.random.default_rng(5), 300), 0
    for bad, size in given:
        (made,), failed = on_gpu(kernel, [(bad, size)])
        failures += failed > 0
        if not failed:
            with contextlib.suppress(RuntimeError):
                assert made == library(kernel, bad)
    assert failures > 100
