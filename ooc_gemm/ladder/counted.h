// Counts what kernels do when they run on the CPU (cuda_on_cpu.h): operations, and accesses to memory.
//
// ELEMENT becomes Counted<float>, a number that looks at its own address whenever it is read or written:
// within A, B or C it lies in global memory, within the __shared__ arrays in shared memory, elsewhere in a
// register. The i-th accesses that the 32 threads of a warp make from one barrier to the next are taken for
// one access of the warp. That holds where its threads take the same way through the code.
#pragma once

#include "cuda_on_cpu.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace cuda_on_cpu {

enum Kind { GLOBAL_LOAD, GLOBAL_STORE, SHARED_LOAD, SHARED_STORE, KINDS };
constexpr int LINE = 128, WORD = 4, BANKS = 32;

// As emulator.py reads them. A group is a line of global memory, or a pass over the banks of shared memory.
static struct {
    long long operations, elements[KINDS], groups[KINDS];
} counts;

// One for each line or word that a thread touches, sorted by kind, warp, number of the access, and place.
static std::vector<uint64_t> touched;
static uint32_t numbers[KINDS][MAX_THREADS];  // of the accesses that a thread has made since the last barrier
static int seen;  // one bit for each kind that the vector being copied has touched; -1: none is being copied

static bool lies_in(const void* at, const void* first, size_t bytes, size_t& offset) {
    offset = static_cast<const char*>(at) - static_cast<const char*>(first);
    return offset < bytes;
}

static void access(const void* at, int bytes, bool store) {
    size_t offset;
    uint32_t place = 0;
    int kind = -1;
    for (int i = 0; i < 3; ++i)
        if (lies_in(at, global_memory[i].first, Guarded::ZONE, offset))
            kind = store ? GLOBAL_STORE : GLOBAL_LOAD, place = i << 28 | offset / LINE;
    const size_t section =
        reinterpret_cast<char*>(__stop_shared_memory) - reinterpret_cast<char*>(__start_shared_memory);
    if (kind < 0 && (lies_in(at, __start_shared_memory, section, offset) ||
                     lies_in(at, dynamic_shared_memory.first, Guarded::ZONE, offset)))
        kind = store ? SHARED_STORE : SHARED_LOAD, place = offset / WORD;
    if (kind < 0) return;
    const int thread = running - fibers;
    if (seen < 0 || !(seen & 1 << kind)) ++numbers[kind][thread];
    if (seen >= 0) seen |= 1 << kind;
    ++counts.elements[kind];
    const uint64_t before =
        uint64_t(kind) << 62 | uint64_t(thread / WARP) << 57 | uint64_t(numbers[kind][thread]) << 32;
    touched.push_back(before | place);
    if (kind >= SHARED_LOAD && bytes == 2 * WORD) touched.push_back(before | (place + 1));
}

static void count_groups() {
    std::sort(touched.begin(), touched.end());
    touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
    for (size_t i = 0; i < touched.size();) {
        const uint64_t warp_access = touched[i] >> 32;
        const int kind = touched[i] >> 62;
        int lines = 0, passes = 0, words[BANKS] = {};
        for (; i < touched.size() && touched[i] >> 32 == warp_access; ++i) {
            ++lines;
            passes = std::max(passes, ++words[uint32_t(touched[i]) % BANKS]);
        }
        counts.groups[kind] += kind < SHARED_LOAD ? lines : passes;
    }
    touched.clear();
    std::memset(numbers, 0, sizeof numbers);
}

static const bool counting = [] {
    seen = -1;
    at_block_barrier = count_groups;
    after_problem = [] {
        std::fwrite(&counts, sizeof counts, 1, stdout);
        counts = {};
    };
    return true;
}();

template <class T>
struct Counted {
    T value;

    Counted() = default;
    Counted(T value) : value(value) {}
    Counted(const Counted& from) : value(from.read()) { access(this, sizeof(T), true); }
    Counted& operator=(const Counted& from) {
        value = from.read();
        access(this, sizeof(T), true);
        return *this;
    }
    T read() const {
        access(this, sizeof(T), false);
        return value;
    }
    Counted& operator+=(const Counted& x) { return *this = *this + x; }
    friend Counted operator+(const Counted& x, const Counted& y) { return ++counts.operations, x.read() + y.read(); }
    friend Counted operator*(const Counted& x, const Counted& y) { return ++counts.operations, x.read() * y.read(); }
    friend bool operator==(const Counted& x, const Counted& y) { return x.read() == y.read(); }
};

// What is copied while one of these exists is one access of its thread.
struct Together {
    Together() { seen = 0; }
    ~Together() { seen = -1; }
};

}  // namespace cuda_on_cpu

#define COPIES_COUNT_ONCE(VEC, COUNT)                     \
    VEC() = default;                                      \
    VEC(const VEC& from) { *this = from; }                \
    VEC& operator=(const VEC& from) {                     \
        const cuda_on_cpu::Together together;             \
        for (int i = 0; i < COUNT; ++i) v[i] = from.v[i]; \
        return *this;                                     \
    }
