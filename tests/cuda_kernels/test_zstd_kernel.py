"""kernels/prepare/zstd.cu against the library of numcodecs: on the CPU, emulated, and on a GPU."""

import contextlib
import struct
import subprocess

import numpy as np
import pytest
from numcodecs import zstd

from ooc_gemm.cuda_kernels import preparations
from ooc_gemm.ladder.emulator import _COMPILE, _HEADER, ORDERS, compiler_missing, whole_source

ROOM = 512 << 10
"""Bytes of the room of a thread block in these tests: there is room for one block of the worst kind."""


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


def frames(seed=0, sizes=SIZES, levels=(0, 1, 9, 19)):
    rng = np.random.default_rng(seed)
    return [
        (data, zstd.Zstd(level=levels[i % len(levels)]).encode(data))
        for i, data in enumerate(kind(rng, size) for kind in DATA for size in sizes)
    ]


# ---- on the CPU --------------------------------------------------------------------------------

MAIN = r"""
int main() {
    using namespace cuda_on_cpu;
    long long p[4];
    while (std::fread(p, sizeof p, 1, stdin) == 1) {  // order, bytes of the frame, of its output, of the room
        static Guarded in, out, rooms;
        const unsigned long long* const from = in.resize<unsigned long long>(p[1] + 16);
        if (std::fread(const_cast<unsigned long long*>(from), 1, p[1], stdin) != (size_t)p[1]) return 1;
        unsigned char* const to = out.resize<unsigned char>(p[2]);
        unsigned long long* const room = rooms.resize<unsigned long long>(p[3]);
        std::memset(room, -1, p[3]);
        unsigned failed = 0;
        zstd_source::Frames frames = {};
        frames.frame[0] = {0, unsigned(p[1]), 0, unsigned(p[2])};
        blockDim = {256, 1, 1};
        gridDim = {1, 1, 1};
        blockIdx = {0, 0, 0};
        const auto call = [&] { zstd_source::zstd(frames, 1, from, to, room, unsigned(p[3]), &failed); };
        thread_body = [](const void* it) { (*static_cast<decltype(call)*>(it))(); };
        thread_argument = &call;
        poison_shared_memory(SHARED_BYTES);
        run_block(p[0]);
        std::fwrite(&failed, 1, 4, stdout);
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
    """The kernel, compiled for the CPU."""

    def __init__(self, folder, source, optimized=False):
        config = preparations.zstd(64 << 10)
        shared = "reinterpret_cast<u64*>(cuda_on_cpu::dynamic_shared_memory.first)"
        inner = source.replace('extern "C" ', "").replace("extern __shared__ u64 shared_memory[];", "")
        inner = inner.replace("(shared_memory)", f"({shared})")
        macros = "".join(f"#define {name} {value}\n" for name, value in config.macros)
        text = f'#include "{_HEADER}"\n{OURS}{macros}#define SHARED_BYTES {config.shared_bytes}\n'
        (folder / "main.cpp").write_text(f"{text}namespace zstd_source {{\n{inner}\n}}\n{MAIN}", "utf-8")
        compiled = [*_COMPILE, "-O1", folder / "main.cpp", "-o", folder / "program"]
        done = subprocess.run(compiled, capture_output=True, text=True)
        assert not done.returncode, done.stderr
        self._program = folder / "program"

    def decode(self, order, given, room=ROOM):
        """For each frame and size of what it holds: what the kernel makes of it, or None where it fails."""
        problems = b"".join(
            struct.pack("4q", order, len(data), size, room) + bytes(data) for data, size in given
        )
        done = subprocess.run([self._program], input=problems, capture_output=True, timeout=250)
        assert not done.returncode, done.stderr.decode(errors="replace")
        out, found = done.stdout, []
        for _, size in given:
            failed, made = struct.unpack("I", out[:4])[0], out[4 : 4 + size]
            found.append(None if failed else made)
            out = out[4 + size :]
        assert not out
        return found


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if why := compiler_missing():
        pytest.skip(why)
    return Program(tmp_path_factory.mktemp("zstd"), whole_source("zstd"))


@pytest.mark.slow
@pytest.mark.parametrize("order", range(len(ORDERS)))
def test_it_decodes_what_the_library_has_encoded(program, order):
    given = frames(order)
    found = program.decode(order, [(encoded, len(data)) for data, encoded in given])
    for (data, encoded), made in zip(given, found, strict=True):
        assert made == data, (len(data), len(encoded))


def damaged(rng, count):
    """Frames some of whose bytes are others, or are missing, with the size that they should have."""
    good = frames(3, sizes=(300, 5000, 131_073), levels=(1, 3, 19))
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
def test_damaged_frames_touch_no_other_memory(program, seed):
    """Nor does the kernel make something else of a frame than the library does."""
    given = damaged(np.random.default_rng(seed), 300)
    found = program.decode(seed % len(ORDERS), given)
    for (bad, _), made in zip(given, found, strict=True):
        if made is not None:
            with contextlib.suppress(RuntimeError):  # it has a reason of its own, such as the window's size
                assert made == zstd.Zstd().decode(bad)
    assert found.count(None) > 100
