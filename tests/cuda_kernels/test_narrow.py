"""kernels/prepare/narrow.cu against NumPy: on the CPU, emulated, and on a GPU."""

import functools
import re
import struct
import subprocess

import numpy as np
import pytest
from conftest import gpu_missing

from ooc_gemm.cuda_kernels import preparations
from ooc_gemm.devices.cuda.narrowing import LOST
from ooc_gemm.ladder.emulator import _COMPILE, _HEADER, ORDERS, compiler_missing, whole_source
from ooc_gemm.storage.write.conversion import convert
from ooc_gemm.support.intervals import ceil_div

NAMES = {"float": "float32", "double": "float64", "int": "int32", "long long": "int64"}
SHAPES = [
    # rows and columns of the block, its pitch, its first row in its chunk, and rows and columns of a chunk
    (1, 1, 1, 0, 1, 1),
    (3, 2049, 2049, 0, 2, 700),
    (7, 300, 303, 5, 6, 77),
    (5, 4500, 4500, 0, 5, 4500),
    (2, 5, 8, 1, 100, 1),
]


def pairs():
    return [pytest.param(config, id=f"{sums_of(config)}-{config.dtype}") for config in preparations.narrows()]


def sums_of(config):
    sums = NAMES[dict(config.macros)["FROM"]]
    return np.dtype("complex128" if config.value("KIND") == 2 else sums)


def values(rng, shape, sums, out):
    """Sums of a type, many at, beside and past the limits of another one."""
    sums, out = np.dtype(sums), np.dtype(out)
    if out.kind in "iu":
        info = np.iinfo(out)
        ends = [int(info.min) + i for i in (-300, -2, -1, 0, 1)] + [
            int(info.max) + i for i in (-1, 0, 1, 2, 300)
        ]
        room = np.iinfo("int64" if sums.kind == "f" else sums)
        ends += [int(room.min) // 2, int(room.max) // 2, 0, -1, 1, 7]
        limit = 2**53 if sums.kind == "f" else int(room.max)
        ends = np.array([min(max(end, -limit), limit) for end in ends], "i8")
        inside = rng.integers(max(int(info.min), -limit), min(int(info.max), limit), shape, endpoint=True)
        return np.where(rng.random(shape) < 0.1, rng.choice(ends, shape), inside).astype(sums)
    real = np.dtype(sums.char.lower())
    narrow = np.finfo(np.dtype(out.char.lower()))
    x = rng.standard_normal((*shape, 2)) * 2.0 ** rng.integers(-30, 18, (*shape, 2))
    most, least = float(narrow.max), float(narrow.smallest_subnormal)
    ulp = most - float(np.nextafter(narrow.max, narrow.dtype.type(0)))
    ends = [most, most + ulp / 2, np.nextafter(most + ulp / 2, 0), most + ulp, float(np.finfo(real).max)]
    ends += [least, least / 2, np.nextafter(least / 2, 1), 1.5 * least, 2.5 * least, 0.0]
    ends += [1 + float(narrow.eps) / 2, 1 + 1.5 * float(narrow.eps), np.inf, np.nan]
    ends = np.array([*ends, *(-end for end in ends)])
    with np.errstate(all="ignore"):
        x = np.where(rng.random(x.shape) < 0.2, rng.choice(ends, x.shape), x).astype(real)
    return x.view(sums)[..., 0] if sums.kind == "c" else np.ascontiguousarray(x[..., 0])


def expected(x, out, row, height, width):
    """What NumPy makes of a block, and what it does not hold of each chunk."""
    with np.errstate(all="ignore"):
        y, lost = x.astype(out), {}
    for i in range(row // height, ceil_div(row + len(x), height)):
        for j in range(ceil_div(x.shape[1], width)):
            rows = slice(max(0, i * height - row), (i + 1) * height - row)
            some = x[rows, j * width : (j + 1) * width]
            if np.dtype(out).kind in "iu":
                info = np.iinfo(out)
                bad = [int(v) for v in some.ravel() if not int(info.min) <= int(v) <= int(info.max)]
                lost[i, j] = len(bad), min([0, *bad]), max([0, *bad])
            else:
                lost[i, j] = convert(some, np.empty(some.shape, out)), 0, 0
    return y, lost


def check(run, config, seed=0):
    """Compare what `run` makes of blocks. run: (memory, lost, arguments) → both afterwards."""
    sums, out, rng = sums_of(config), np.dtype(config.dtype), np.random.default_rng(seed)
    for rows, cols, pitch, row, height, width in SHAPES:
        memory = np.zeros((rows, pitch), sums)
        memory[:, :cols] = x = values(rng, (rows, cols), sums, out)
        down, across = ceil_div(row + rows, height), ceil_div(cols, width)
        given = np.zeros((down, across), LOST)
        found, lost = run(memory, given, (rows, cols, pitch, row, height, width, across))
        wanted, beyond = expected(x, out, row, height, width)
        packed = found.view(np.uint8)[:, : cols * out.itemsize].copy().view(out)
        # Only integers that do not fit are of no matter: the run fails.
        if out.kind in "iu":
            assert any(lost for lost, *_ in beyond.values()) or max(x.shape) < 9 or out == "i8"
            fits = (x >= float(np.iinfo(out).min)) & (x <= float(np.iinfo(out).max))
            assert np.array_equal(packed[fits], wanted[fits])
        else:
            assert np.array_equal(packed, wanted, equal_nan=True)
            number = ~np.isnan(wanted)
            assert np.array_equal(np.signbit(packed.real)[number], np.signbit(wanted.real)[number])
        assert {at: tuple(lost[at].tolist()) for at in np.ndindex(lost.shape)} == beyond
        # The rest of each row holds what was there: sums, or elements already packed.
        assert np.array_equal(found[:, cols:], memory[:, cols:])


# ---- on the CPU --------------------------------------------------------------------------------

MAIN = r"""
int main() {
    using namespace cuda_on_cpu;
    long long p[10];
    while (std::fread(p, sizeof p, 1, stdin) == 1) {
        static Guarded memory, chunks;
        char* const c = memory.resize<char>(p[8], 0, stdin);
        char* const lost = chunks.resize<char>(p[9], 0, stdin);
        blockDim = {256, 1, 1};
        gridDim = {unsigned(p[1]), 1, 1};
        switch (p[0] / 8) { CASES }
        std::fwrite(c, 1, p[8], stdout);
        std::fwrite(lost, 1, p[9], stdout);
        std::fflush(stdout);
    }
}
"""
CASE = """case {i}: {{
    const auto call = [&] {{
        source{i}::narrow(p[2], reinterpret_cast<source{i}::Sum*>(c), p[3], p[4], p[5], p[6], p[7],
                          reinterpret_cast<source{i}::Lost*>(lost));
    }};
    thread_body = [](const void* it) {{ (*static_cast<decltype(call)*>(it))(); }};
    thread_argument = &call;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {{
        poison_shared_memory(0);
        run_block(p[0] % 8);
    }}
    break;
}}
"""
ATOMICS = """
template <class T, class U> void atomicAdd(T* at, U x) { *at += x; }
template <class T, class U> void atomicMin(T* at, U x) { *at = x < *at ? x : *at; }
template <class T, class U> void atomicMax(T* at, U x) { *at = x > *at ? x : *at; }
"""
HALF = """
template <class T> void round_to_half(unsigned short& bits, T x) {
    const _Float16 half = x;
    std::memcpy(&bits, &half, 2);
}
"""


class Program:
    """The kernel in all of its configurations, compiled for the CPU."""

    def __init__(self, folder, source):
        self._configs = list(preparations.narrows())
        text, cases = f'#include "{_HEADER}"\n{ATOMICS}{HALF}', ""
        for i, config in enumerate(self._configs):
            macros = "".join(f"#define {name} {value}\n" for name, value in config.macros)
            undone = "".join(f"#undef {name}\n" for name, _ in config.macros)
            inner = source.replace('extern "C" ', "")
            undone += "".join(f"#undef {name}_KIND\n" for name in ("COMPLEX", "INTEGER", "HALF"))
            text += f"{macros}namespace source{i} {{\n{inner}\n}}\n{undone}"
            cases += CASE.format(i=i)
        (folder / "main.cpp").write_text(text + MAIN.replace("CASES", cases), encoding="utf-8")
        compiled = [*_COMPILE, "-msse2", folder / "main.cpp", "-o", folder / "program"]
        done = subprocess.run(compiled, capture_output=True, text=True)
        assert not done.returncode, done.stderr
        self._program = folder / "program"

    def run(self, config, order, memory, lost, args):
        which = self._configs.index(config) * 8 + order
        given = (
            struct.pack("10q", which, *args, memory.nbytes, lost.nbytes) + memory.tobytes() + lost.tobytes()
        )
        done = subprocess.run([self._program], input=given, capture_output=True, timeout=250)
        assert not done.returncode, done.stderr.decode(errors="replace")
        found, told = done.stdout[: memory.nbytes], done.stdout[memory.nbytes :]
        return (
            np.frombuffer(found, memory.dtype).reshape(memory.shape),
            np.frombuffer(told, lost.dtype).reshape(lost.shape),
        )


@pytest.fixture(scope="module")
def source():
    """The kernel, which rounds to float16 as the CPU does: the GPU's instruction is assembly."""
    text = whole_source("narrow")
    text, instructions = re.subn(r'asm\("cvt\.rn\.f16[^;]*;[^;]*;', "round_to_half(half, x);", text)
    assert instructions == 2
    return text


@pytest.fixture(scope="module")
def program(tmp_path_factory, source):
    if why := compiler_missing():
        pytest.skip(why)
    return Program(tmp_path_factory.mktemp("narrow"), source)


@pytest.mark.slow
@pytest.mark.parametrize("config", pairs())
def test_it_narrows_as_numpy_does(program, config):
    for order in range(len(ORDERS)):
        check(functools.partial(program.run, config, order), config, seed=order)


@pytest.mark.slow
def test_a_missing_barrier_is_found(tmp_path, source):
    if why := compiler_missing():
        pytest.skip(why)
    config = preparations.narrow("float32", "float16")
    program = Program(tmp_path, source.replace("__syncthreads();", ";"))
    wrong = 0
    for order in range(len(ORDERS)):
        try:
            check(functools.partial(program.run, config, order), config)
        except AssertionError:
            wrong += 1
    assert wrong


# ---- on a GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("config", pairs())
def test_a_gpu_narrows_as_numpy_does(config):
    if why := gpu_missing():
        pytest.skip(why)
    import cupy

    from ooc_gemm.cuda_kernels.launch import load

    kernel, i64, pointer = load(config)["narrow"], np.int64, np.uintp

    def run(memory, lost, args):
        rows, cols, *rest = args
        on_gpu, told = cupy.asarray(memory.view(np.uint8)), cupy.asarray(lost.view(np.uint8))
        at = i64(cols), pointer(on_gpu.data.ptr), *map(i64, rest), pointer(told.data.ptr)
        kernel((rows,), config.block, at, cupy.cuda.get_current_stream())
        return on_gpu.get().view(memory.dtype), told.get().view(lost.dtype)

    check(run, config)


def test_what_is_not_narrowed_is_refused():
    with pytest.raises(ValueError, match="blocks of float32 are not narrowed to int8"):
        preparations.narrow("float32", "int8")
    with pytest.raises(ValueError, match="int64 are not narrowed to float64"):
        preparations.narrow("int64", "float64")
