"""Kernels whose indices pass 2^31, on the CPU: matrices of that many elements, and rows as far apart.

They lie in address space that is reserved and never filled: of each launch only the last blocks run, which
touch a few pages. Sanitizers find sums of 32 bits that overflow, and the results are compared."""

import re
import subprocess

import pytest
from called import BYTES

from ooc_gemm.cuda_kernels import catalog, preparations
from ooc_gemm.ladder.emulator import (
    _COMPILE,
    _HEADER,
    PLAIN,
    _with_dynamic_memory,
    compiler_missing,
    whole_source,
)

if why := compiler_missing():
    pytest.skip(why, allow_module_level=True)
pytestmark = pytest.mark.slow  # it compiles kernels with sanitizers

HEAD = r"""
#include "%s"
#include <sys/mman.h>
static void check(bool right, const char* what, int line) {
    if (right) return;
    std::fprintf(stderr, "wrong in line %%d: %%s\n", line, what);
    std::_Exit(1);
}
#define CHECK(it) check(it, #it, __LINE__)
using i64 = long long;

static double __longlong_as_double(i64 x) { return __builtin_bit_cast(double, x); }
template <class T, class U> void atomicAdd(T* at, U x) { *at += x; }
template <class T, class U> void atomicMin(T* at, U x) { *at = x < *at ? x : *at; }
template <class T, class U> void atomicMax(T* at, U x) { *at = x > *at ? x : *at; }

// Room for so many elements, of which pages come when they are touched.
template <class T> T* reserve(i64 elements) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* at = mmap(nullptr, elements * sizeof(T), PROT_READ | PROT_WRITE, flags, -1, 0);
    CHECK(at != MAP_FAILED);
    return static_cast<T*>(at);
}

// Blocks first … last of a grid.
template <class Call>
void launch(unsigned first, unsigned last, unsigned x, unsigned y, i64 shared, const Call& call) {
    using namespace cuda_on_cpu;
    thread_body = [](const void* it) { (*static_cast<const Call*>(it))(); };
    thread_argument = &call;
    blockDim = {x, y, 1};
    gridDim = {last + 1, 1, 1};
    for (blockIdx.x = first; blockIdx.x <= last; ++blockIdx.x) {
        poison_shared_memory(shared);
        run_block(FORWARD);
    }
}
"""

TRANSPOSE = """
int main() {
    for (i64 more = 0; more < 2; ++more) {  // rows that begin anywhere, or at whole words
        const i64 rows = 70001 + 3 * more, cols = 70003 + more, across = (cols + SIDE - 1) / SIDE;
        const i64 tiles = (rows + SIDE - 1) / SIDE * across;
        T *x = reserve<T>(rows * cols), *y = reserve<T>(rows * cols);
        x[rows * cols - 1] = 5, x[(rows - 1) * cols + cols - 3] = 7;
        launch(tiles - 1, tiles - 1, 32, 8, 0, [&] { transpose(rows, cols, x, cols, y, rows); });
        CHECK(y[rows * cols - 1] == 5 && y[(cols - 3) * rows + rows - 1] == 7);
    }
}
"""

MIRROR = """
int main() {
    const i64 n = 50001, across = (n + 31) / 32, last = across * across - 1;
    T* c = reserve<T>(n * n);
    c[(n - 1) * n + n - 3] = 7, c[(n - 1) * n + 3] = 9;
    launch(last, last, 32, 8, 0, [&] { mirror(n, c, n); });
    CHECK(c[(n - 3) * n + n - 1] == 7);
    launch(last - across + 1, last - across + 1, 32, 8, 0, [&] { mirror(n, c, n); });  // far left, below
    CHECK(c[3 * n + n - 1] == 9);
}
"""

EMBED = """
int main() {
    const i64 rows = 40003, cols = 40001, ld = 2 * cols, last = (rows + 7) / 8 * ((cols + 31) / 32) - 1;
    Complex* x = reserve<Complex>(rows * cols);
    float* y = reserve<float>(2 * rows * ld);
    x[rows * cols - 1] = {3, 4};
    launch(last, last, 32, 8, 0, [&] { embed(rows, cols, x, cols, y, ld); });
    float *first = y + 2 * (rows - 1) * ld + 2 * (cols - 1), *second = first + ld;
    CHECK(first[0] == 3 && first[1] == 4 && second[0] == -4 && second[1] == 3);
}
"""

COMBINE = """
int main() {
    const i64 m = 50003, n = 50001, last = (m * n + 255) / 256 - 1;
    float* p = reserve<float>(2 * m * n);
    Complex* c = reserve<Complex>(m * n);
    const float infinity = __builtin_inff();
    float* const end = p + 2 * m * n;
    end[-2] = 3, end[-1] = 4, end[-4] = infinity, end[-3] = 1;
    c[m * n - 1] = {1, 2}, c[m * n - 2] = {1, infinity};
    const auto run = [&](float alpha_re, float alpha_im, float beta_re, float beta_im) {
        launch(last, last, 256, 1, 0,
               [&] { combine(m, n, alpha_re, alpha_im, p, 2 * n, beta_re, beta_im, c, n); });
    };
    run(2, 0, -1, 0);
    CHECK(c[m * n - 1].re == 5 && c[m * n - 1].im == 6);
    CHECK(c[m * n - 2].re == infinity && c[m * n - 2].im == -infinity);
    run(0, 2, 0, 0);
    CHECK(c[m * n - 1].re == -8 && c[m * n - 1].im == 6);
    CHECK(c[m * n - 2].re == -2 && c[m * n - 2].im == infinity);
    run(1, 1, 0, 1);
    CHECK(c[m * n - 1].re == -1 - 6 && c[m * n - 1].im == 7 - 8);
}
"""

SUM = """
int main() {  // sums pass int32, and rows of C lie more than 2^31 elements apart
    const i64 m = 3, n = 301, ld = (1LL << 31) + 8, most = 2147483647;
    int* x = reserve<int>(2 * m * n);
    T* c = reserve<T>(m * ld);
    for (i64 i = 0; i < m * n; ++i) x[i] = most - i, x[m * n + i] = most, c[i / n * ld + i % n] = -most;
    const auto run = [&](T alpha, T beta) {
        launch(0, (m * n + 255) / 256 - 1, 256, 1, 0, [&] { sum(m, n, 2, alpha, x, beta, c, ld, nullptr); });
    };
    run(3, -2);
    for (i64 i = 0; i < m * n; ++i) CHECK(c[i / n * ld + i % n] == 3 * (2 * most - i) + 2 * most);
    run(-most, 0);
    for (i64 i = 0; i < m * n; ++i) CHECK(c[i / n * ld + i % n] == -most * (2 * most - i));
    CHECK(c[n] == 0);
}
"""

CUT = """
int main() {  // planes lie more than 2^31 bytes apart
    const i64 fours = (1LL << 29) + 3, last = (fours + 255) / 256 - 1;
    ELEMENT* x = reserve<ELEMENT>(4 * fours);
    u32* y = reserve<u32>(sizeof(ELEMENT) * fours);
    for (int e = 0; e < 4; ++e) x[4 * fours - 4 + e] = static_cast<ELEMENT>(0x8123456789abcdef >> e);
    launch(last, last, 256, 1, 0, [&] { cut(fours, reinterpret_cast<const Four*>(x), y); });
    for (int plane = 0; plane < BYTES; ++plane)
        for (int e = 0; e < 4; ++e)
            CHECK((y[(plane + 1) * fours - 1] >> 8 * e & 255) == (x[4 * fours - 4 + e] >> 8 * plane & 255));
    CHECK(y[0] == 0);
}
"""

NARROW = """
int main() {
    const i64 rows = 70001, cols = 40003, last = rows - 1;
    long long* c = reserve<long long>(rows * cols);
    Lost* lost = reserve<Lost>(rows * 4);  // chunks of 1 × 10001
    long long* const row = c + last * cols;
    row[0] = 5, row[cols - 1] = -7, row[cols - 2] = 1LL << 40;
    launch(last, last, 256, 1, 0, [&] { narrow(cols, c, cols, 0, 1, 10001, 4, lost); });
    const int* const packed = reinterpret_cast<const int*>(row);
    CHECK(packed[0] == 5 && packed[1] == 0 && packed[cols - 1] == -7);
    CHECK(lost[last * 4 + 3].elements == 1 && lost[last * 4 + 3].greatest == 1LL << 40);
    CHECK(lost[last * 4 + 2].elements == 0);
}
"""

RESIDUES = """
int main() {  // X and each of its planes have more than 2^31 elements
    const i64 rows = 50003, cols = 50001, ld = 50016, last = rows * ((cols + 2047) / 2048) - 1;
    ELEMENT* x = reserve<ELEMENT>(rows * ld);
    u32* planes = reserve<u32>(COUNT * rows * ld / 4);
    x[rows * ld - 16] = 70000;
    launch(last, last, 256, 1, 0, [&] {
        residues(rows, cols, x, ld, nullptr, 1, nullptr, planes, ld / 4, rows * ld / 4, nullptr);
    });
    for (int l = 0; l < COUNT; ++l) {
        const int p = modulus(l).p, made = static_cast<signed char>(planes[(l + 1) * rows * ld / 4 - 4]);
        CHECK((70000 - made) % p == 0);
    }
}
"""

RECOMBINE = """
int main() {  // C and planes of residues have more than 2^31 elements
    const i64 m = 50003, n = 50001, pitch = 50016, last = m * ((n + 1023) / 1024) - 1, ld = n + 3;
    u32* planes = reserve<u32>(ALL[0].count * m * pitch / 4);
    T* c = reserve<T>(m * ld);
    for (int l = 0; l < ALL[0].count; ++l) planes[(l + 1) * m * pitch / 4 - 4] = 1;
    c[m * ld - 4] = 5;
    launch(last, last, 256, 1, 0, [&] {
        recombine(m, n, 3, 0, planes, pitch / 4, m * pitch / 4, 2, 0, c, ld, nullptr, nullptr, nullptr);
    });
    CHECK(c[m * ld - 4] == 13 && c[m * ld - 3] == 0);
}
"""

PRODUCT = """
void far_{index}() {{  // C has more than 2^31 elements
    using T = source{index}::T;
    const i64 m = 50003, n = 50001;
    T *a = reserve<T>(m), *b = reserve<T>(n), *c = reserve<T>(m * n);
    a[m - 1] = 3, b[n - 1] = 5, b[n - 2] = 7;
    const i64 blocks = ((m + {bm} - 1) / {bm}) * ((n + {bn} - 1) / {bn}) * {split};
    launch(blocks - 1, blocks - 1, {x}, {y}, {shared},
           [&] {{ source{index}::kernel{index}(m, n, 1, T(2), a, 1, b, n, T(0), c, n); }});
    CHECK(c[m * n - 1] == 30 && c[m * n - 2] == 42);
}}
void apart_{index}() {{  // rows lie more than 2^31 elements apart
    using T = source{index}::T;
    const i64 ld = (1LL << 31) + 8;
    T *a = reserve<T>(3 * ld), *b = reserve<T>(3 * ld), *c = reserve<T>(3 * ld);
    for (int i = 0; i < 3; ++i)
        for (int j = 0; j < 3; ++j) a[i * ld + j] = i + j, b[i * ld + j] = i * j + 1, c[i * ld + j] = 1;
    launch(0, 0, {x}, {y}, {shared},
           [&] {{ source{index}::kernel{index}(3, 3, 3, T(1), a, ld, b, ld, T(1), c, ld); }});
    for (int i = 0; i < 3; ++i)
        for (int j = 0; j < 3; ++j) {{
            T sum = 1;
            for (int k = 0; k < 3; ++k) sum += (i + k) * (k * j + 1);
            CHECK(c[i * ld + j] == sum);
        }}
}}
"""


def run(folder, text):
    """What the program says where something is wrong; empty if nothing is."""
    path = folder / "main.cpp"
    path.write_text(HEAD % _HEADER + BYTES + text, encoding="utf-8")
    done = subprocess.run([*_COMPILE, path, "-o", folder / "program"], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    done = subprocess.run([folder / "program"], capture_output=True, text=True, timeout=250)
    assert bool(done.returncode) == bool(done.stderr)
    return done.stderr


@pytest.mark.parametrize(
    ("config", "main"),
    [
        (preparations.transpose("int8"), TRANSPOSE), (preparations.transpose("float32"), MIRROR),
        (preparations.embed("double n"), EMBED), (preparations.combine("elements"), COMBINE),
        (preparations.sum_slices("int64", "int32"), SUM), (preparations.cut(2), CUT),
        (preparations.cut(8), CUT), (preparations.narrow("int64", "int32"), NARROW),
        (preparations.residues("uint32", 9), RESIDUES), (preparations.recombine("int64", (9,)), RECOMBINE),
    ],
    ids=[
        "transpose", "mirror", "embed", "combine", "sum", "cut-2", "cut-8", "narrow", "residues", "recombine"
    ],
)  # fmt: skip
def test_what_goes_with_a_product(tmp_path, config, main):
    defines = "".join(f"#define {name} {value}\n" for name, value in config.macros)
    assert not run(tmp_path, defines + whole_source(config.kernel) + main)


def test_an_index_of_32_bits_is_found(tmp_path):
    config = preparations.transpose("int8")
    source = whole_source(config.kernel).replace("long long ld", "int ld")
    defines = "".join(f"#define {name} {value}\n" for name, value in config.macros)
    assert "signed integer overflow" in run(tmp_path, defines + source + TRANSPOSE)


def test_products(tmp_path):
    """Of every kernel in plain CUDA C++, in its first configuration."""
    text, calls = "", ""
    for index, name in enumerate(PLAIN):
        config = catalog.KERNELS[name].configs("float32", False, False)[0]
        macros = (*config.macros, (config.kernel, f"kernel{index}"))
        source = _with_dynamic_memory(whole_source(config.kernel))
        text += "".join(f"#define {key} {value}\n" for key, value in macros)
        text += f"namespace source{index} {{\n{source}\n}}\n"
        for macro in re.findall(r"^#define (\w+)", source, re.MULTILINE):
            text += f"#undef {macro}\n"
        text += "".join(f"#undef {key}\n" for key, _ in macros)
        text += PRODUCT.format(
            index=index, bm=config.bm, bn=config.bn, split=max(1, config.value("SPLIT")), x=config.block[0],
            y=config.block[1], shared=config.shared_bytes,
        )  # fmt: skip
        calls += f"far_{index}(); apart_{index}();\n"
    assert not run(tmp_path, f"{text}int main() {{\n{calls}}}\n")
