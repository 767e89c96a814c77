"""Kernels of kernels/prepare/ on the emulator of kernels, called with numbers and arrays of any types.

The emulator gives every kernel the arguments of a product. Here B holds what is given: numbers, and arrays
one behind the other; C holds what is made.
"""

from itertools import cycle

import numpy as np

from ooc_gemm.cuda_kernels.config import Config
from ooc_gemm.ladder.emulator import ORDERS, SIGNATURE, Emulator, Problem

BYTES = """
static int __dp4a(int a, int b, int c) {
    const auto digit = [](int x, int i) { return int(static_cast<signed char>(x >> 8 * i)); };
    for (int i = 0; i < 4; ++i) c += digit(a, i) * digit(b, i);
    return c;
}
static int __dp2a_lo(int a, int b, int c) {
    const auto two = [](int x, int i) { return int(static_cast<short>(x >> 16 * i)); };
    for (int i = 0; i < 2; ++i) c += two(a, i) * static_cast<signed char>(b >> 8 * i);
    return c;
}
static int __dp2a_hi(int a, int b, int c) { return __dp2a_lo(a, b >> 16, c); }
static unsigned __byte_perm(unsigned x, unsigned y, unsigned order) {
    const unsigned long long both = x | static_cast<unsigned long long>(y) << 32;
    unsigned found = 0;
    for (int i = 0; i < 4; ++i) found |= (both >> 8 * (order >> 4 * i & 7) & 255) << 8 * i;
    return found;
}
"""
"""Instructions for the bytes of words."""
HEAD = """
static double __longlong_as_double(long long x) {{ return __builtin_bit_cast(double, x); }}
static long long __double_as_longlong(double x) {{ return __builtin_bit_cast(long long, x); }}
static float __int_as_float(int x) {{ return __builtin_bit_cast(float, x); }}
static int __float_as_int(float x) {{ return __builtin_bit_cast(int, x); }}
static float fabsf(float x) {{ return __builtin_fabsf(x); }}
static float fminf(float x, float y) {{ return __builtin_fminf(x, y); }}
static float fmaxf(float x, float y) {{ return __builtin_fmaxf(x, y); }}
static int __clz(unsigned x) {{ return x ? __builtin_clz(x) : 32; }}
static int __clzll(long long x) {{ return x ? __builtin_clzll(x) : 64; }}
static long long __double2ll_rn(double x) {{ return __builtin_llrint(x); }}
static double __ull2double_rn(unsigned long long x) {{ return double(x); }}
static double sqrt(double x) {{ return __builtin_sqrt(x); }}
static double fabs(double x) {{ return __builtin_fabs(x); }}
{bytes}template <class T, class U> static void atomicMax(T* at, U x) {{ *at = x > *at ? x : *at; }}
template <class T, class U> static void atomicMin(T* at, U x) {{ *at = x < *at ? x : *at; }}
template <class T, class U> static void atomicAdd(T* at, U x) {{ *at += x; }}
template <class X> static X __shfl_xor_sync(unsigned, X x, int apart) {{
    static X lanes[1024];
    lanes[threadIdx.x] = x;
    __syncwarp();
    const X found = lanes[threadIdx.x ^ apart];
    __syncwarp();
    return found;
}}
static unsigned __reduce_max_sync(unsigned, unsigned x) {{
    for (int step = 16; step > 0; step /= 2) {{
        const unsigned other = __shfl_xor_sync(0u, x, step);
        x = other > x ? other : x;
    }}
    return x;
}}
static unsigned __reduce_add_sync(unsigned, unsigned x) {{
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0u, x, step);
    return x;
}}
static int __reduce_min_sync(unsigned, int x) {{
    for (int step = 16; step > 0; step /= 2) {{
        const int other = __shfl_xor_sync(0u, x, step);
        x = other < x ? other : x;
    }}
    return x;
}}
{kernel}
extern "C" __global__ void called({signature}) {{
    const auto numbers = reinterpret_cast<const long long*>(B);
    const auto given = [&](int i) {{ return reinterpret_cast<const char*>(B) + numbers[i]; }};
    const auto made = [&](int i) {{ return reinterpret_cast<char*>(C) + numbers[{places} + i]; }};
    {call};
}}
"""
"""What our kernels use of CUDA besides cuda_on_cpu.h, and a kernel with the arguments of a product."""
PLACES = 8
"""Most arrays that are given, and that are made."""
NUMBERS = 16
"""Most numbers that are given."""


def given(kind, index):
    """An array that is given, in C++."""
    return f"reinterpret_cast<const {kind}*>(given({index}))"


def made(kind, index):
    """An array that is made, in C++."""
    return f"reinterpret_cast<{kind}*>(made({index}))"


def number(index):
    """A number that is given, in C++."""
    return f"numbers[{2 * PLACES + index}]"


def padded(arrays):
    """Arrays one behind the other, each at a multiple of 16 bytes, and where each begins."""
    parts = [np.ascontiguousarray(x).tobytes() for x in arrays]
    parts = [part + bytes(-len(part) % 16) for part in parts]
    return b"".join(parts), np.cumsum([0, *map(len, parts)])[:-1]


class Called:
    """Kernels of one source that the emulator has compiled: called with numbers and arrays."""

    def __init__(self, folder, config, calls, text):
        """`calls`: the arguments of each kernel of `text`, in C++."""
        signature = SIGNATURE.replace("T ", "double ").replace("T*", "double*")
        kernels = {}
        for i, (name, arguments) in enumerate(calls.items()):
            own = [(each, f"{each}{i}") for each in calls]
            call = f"{name}({arguments})"
            source = HEAD.format(bytes=BYTES, kernel=text, signature=signature, call=call, places=PLACES)
            macros = *config.macros, *own
            kernels[name] = Config("called", "float64", 1, 1 << 20, config.block, macros), source
        self.emulator, self.orders = Emulator(folder, kernels), cycle(ORDERS)

    def __call__(self, name, blocks, numbers, arrays, results, alpha=1.0):
        """What is made of arrays that begin as `results`, by so many blocks."""
        inside, starts = padded(arrays)
        outside, out_starts = padded(results)
        header = np.zeros(2 * PLACES + NUMBERS, "i8")
        header[: len(starts)] = starts + header.nbytes
        header[PLACES : PLACES + len(out_starts)] = out_starts
        header[2 * PLACES : 2 * PLACES + len(numbers)] = numbers
        whole = header.tobytes() + inside
        size = -(-max(len(whole), len(outside)) // 8)
        b, c = (np.frombuffer(x + bytes(8 * size - len(x)), "f8")[None].copy() for x in (whole, outside))
        problem = Problem(blocks, size, 1, alpha, np.zeros((1, 1)), b, 0, c, next(self.orders))
        (found,) = self.emulator.run(name, [problem])
        made_of = found.tobytes()
        return [
            np.frombuffer(made_of[at : at + x.nbytes], x.dtype).reshape(x.shape)
            for at, x in zip(out_starts, results, strict=True)
        ]
