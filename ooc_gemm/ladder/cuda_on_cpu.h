// Runs CUDA kernels on the CPU, under the address and undefined-behavior sanitizers, to test them.
//
// Thread blocks run one after the other. The threads of a block are fibers: one runs up to its next barrier,
// then the next one does:
//
//     thread 0  ━━━━━━━┓               ┏━━━━ …      Where a barrier is missing, some thread reads what
//     thread 1         ┗━━━━━━━┓       ┃            another has not stored yet, or has stored over. The
//     thread 2                 ┗━━━━━━━┛            result is wrong in some order of the threads (forward,
//                                   barrier         backward, shuffled), and the same in every run.
//
// Shared memory is NaN (-1 in integers) when a block starts, so what nobody stored shows. Here is what our
// kernels use, as in the CUDA C++ Programming Guide. One rule is stricter: all threads of a block (for
// __syncwarp: of a warp) must come to a barrier, in the same line; none may have returned before.
//
// emulator.py writes the rest of the program: a main that calls run() for one problem after the other.
#pragma once

#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#define __CUDA_ARCH__ 750  // the oldest GPUs we have kernels for: the only ones that can do without assembly
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("shared_memory")))
#define __syncthreads() cuda_on_cpu::wait(cuda_on_cpu::AT_BLOCK_BARRIER, __LINE__)
#define __syncwarp(...) cuda_on_cpu::wait(cuda_on_cpu::AT_WARP_BARRIER, __LINE__)
// The standard's word may not stand behind `static`; GCC's own may.
#define alignas(bytes) __attribute__((aligned(bytes)))

struct dim3 {
    unsigned x, y, z;
};
static dim3 threadIdx, blockIdx, blockDim, gridDim;

template <class X, class Y>
auto min(X x, Y y) {
    return y < x ? y : x;
}
template <class X, class Y>
auto max(X x, Y y) {
    return x < y ? y : x;
}
template <class X>
X __ldg(const X* x) {
    return *x;
}
size_t __cvta_generic_to_shared(const void*);  // only named: what calls it is for newer GPUs

// Where that section begins and ends, from the linker; null where there is none.
extern "C" __attribute__((weak)) long long __start_shared_memory[], __stop_shared_memory[];

// Fibers are never freed, and one stack each is enough.
extern "C" const char* __asan_default_options() { return "detect_leaks=0:detect_stack_use_after_return=0"; }

namespace cuda_on_cpu {

// ---- Fibers ----------------------------------------------------------------------------------------------
enum State { READY, AT_WARP_BARRIER, AT_BLOCK_BARRIER, DONE };

struct Fiber {
    State state;
    int line;           // of the barrier it waits at
    ucontext_t* start;  // where it begins; null once it has
    void* resume[5];    // where it goes on, for __builtin_longjmp
    const void* stack;
    size_t stack_bytes;
};

constexpr int MAX_THREADS = 1024, WARP = 32, STACK_BYTES = 64 << 10;
static Fiber scheduler, fibers[MAX_THREADS], *running;
static void (*thread_body)(const void* argument);
static const void* thread_argument;

// From one fiber to another. (At swapcontext, the sanitizer would forget what it knows of the stack.)
__attribute__((noinline, no_sanitize_address)) static void go(Fiber& from, Fiber& to) {
    void* fake_stack;
    __sanitizer_start_switch_fiber(&fake_stack, to.stack, to.stack_bytes);
    if (!__builtin_setjmp(from.resume)) {
        if (to.start) setcontext(std::exchange(to.start, nullptr));
        __builtin_longjmp(to.resume, 1);
    }
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}

static void wait(State state, int line) {
    running->state = state;
    running->line = line;
    go(*running, scheduler);
}

// What a fiber does: one thread after the other, in the blocks that follow.
static void run_threads() {
    __sanitizer_finish_switch_fiber(nullptr, &scheduler.stack, &scheduler.stack_bytes);
    for (;; wait(DONE, 0)) thread_body(thread_argument);
}

static void create(Fiber& fiber) {
    fiber.start = new ucontext_t;
    getcontext(fiber.start);
    fiber.stack = fiber.start->uc_stack.ss_sp = std::malloc(STACK_BYTES);
    fiber.stack_bytes = fiber.start->uc_stack.ss_size = STACK_BYTES;
    makecontext(fiber.start, run_threads, 0);
}

// ---- Memory ----------------------------------------------------------------------------------------------
// Room of any size, in the midst of memory that may not be touched.
struct Guarded {
    static constexpr size_t ZONE = 1 << 20;
    char* const memory = static_cast<char*>(std::malloc(3 * ZONE));
    char* const first = memory + ZONE;

    template <class T>
    T* resize(size_t bytes, size_t misaligned = 0, FILE* content = nullptr) {
        ASAN_POISON_MEMORY_REGION(memory, 3 * ZONE);
        ASAN_UNPOISON_MEMORY_REGION(first + misaligned, bytes);
        if (misaligned + bytes > ZONE) std::abort();
        if (content && std::fread(first + misaligned, 1, bytes, content) != bytes) std::abort();
        return reinterpret_cast<T*>(first + misaligned);
    }
};
static Guarded dynamic_shared_memory, global_memory[3];

// What counted.h sets: called when all threads of a block stand at a barrier, or have returned; and after C is
// written to standard output.
static void (*at_block_barrier)() = [] {};
static void (*after_problem)() = [] {};

// Not checked, for the sanitizer keeps gaps between the arrays.
__attribute__((no_sanitize_address)) static void poison_shared_memory(size_t dynamic_bytes) {
    for (volatile long long* at = __start_shared_memory; at < __stop_shared_memory; ++at) *at = -1;
    std::memset(dynamic_shared_memory.resize<char>(dynamic_bytes), -1, dynamic_bytes);
}

// ---- Thread blocks ---------------------------------------------------------------------------------------
// Lets threads first … last - 1 go on from such a barrier: all, or it is a fault. False if none waits there.
static bool release(State barrier, int first, int last) {
    int one = first;
    while (one < last && fibers[one].state != barrier) ++one;
    if (one == last) return false;
    const int line = fibers[one].line;
    for (int t = first; t < last; ++t) {
        if (fibers[t].state != barrier || fibers[t].line != line) {
            std::fprintf(stderr, "thread %d waits at the barrier in line %d, but thread %d ", one, line, t);
            std::fprintf(stderr, fibers[t].state == DONE ? "has returned\n" : "in line %d\n", fibers[t].line);
            std::_Exit(1);
        }
        fibers[t].state = READY;
    }
    return true;
}

enum Order { FORWARD, BACKWARD, SHUFFLED };
static void run_block(int order) {
    const int threads = blockDim.x * blockDim.y;
    int turn[MAX_THREADS];
    for (int i = 0; i < threads; ++i) {
        turn[i] = order == BACKWARD ? threads - 1 - i : i;
        fibers[i].state = READY;
        if (!fibers[i].stack) create(fibers[i]);
    }
    unsigned random = 1;
    for (bool unfinished = true; unfinished;) {
        for (int i = threads - 1; order == SHUFFLED && i > 0; --i) {
            random = random * 1664525 + 1013904223;
            std::swap(turn[i], turn[(random >> 8) % (i + 1)]);
        }
        for (int i = 0; i < threads; ++i) {
            const unsigned t = turn[i];
            if (fibers[t].state != READY) continue;
            running = &fibers[t];
            threadIdx = {t % blockDim.x, t / blockDim.x, 0};
            go(scheduler, *running);
        }
        unfinished = false;
        for (int t = 0; t < threads; t += WARP) unfinished |= release(AT_WARP_BARRIER, t, min(t + WARP, threads));
        if (!unfinished) {
            at_block_barrier();
            unfinished = release(AT_BLOCK_BARRIER, 0, threads);
        }
    }
}

// Comes on standard input, and then the bytes of A, B and C, from their first element to their last.
struct Problem {
    long long kernel, order, grid, block_x, block_y, shared_bytes, misaligned, a_bytes, b_bytes, c_bytes;
    long long m, n, k, lda, ldb, ldc;
    double alpha, beta;
};

// The kernel's C ← α·A·B + β·C, to standard output.
template <class T>
void run(void (*kernel)(long long, long long, long long, T, const T*, long long, const T*, long long, T, T*, long long),
         const Problem& p) {
    auto& [a, b, c] = global_memory;
    const T* const A = a.resize<T>(p.a_bytes, p.misaligned, stdin);
    const T* const B = b.resize<T>(p.b_bytes, p.misaligned, stdin);
    T* const C = c.resize<T>(p.c_bytes, p.misaligned, stdin);
    const auto call = [&] { kernel(p.m, p.n, p.k, T(p.alpha), A, p.lda, B, p.ldb, T(p.beta), C, p.ldc); };
    thread_body = [](const void* it) { (*static_cast<decltype(call)*>(it))(); };
    thread_argument = &call;
    blockDim = {unsigned(p.block_x), unsigned(p.block_y), 1};
    gridDim = {unsigned(p.grid), 1, 1};
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        poison_shared_memory(p.shared_bytes);
        run_block(p.order);
    }
    std::fwrite(C, 1, p.c_bytes, stdout);
    after_problem();
    std::fflush(stdout);
}
}  // namespace cuda_on_cpu
