// One pass over a stored matrix X for Freivalds' check: its product with a vector, and the squared norms of
// its lines, while the matrix is on its way through the cache once.
//
//     rows:     out[r] += Σ_c X[r][c]·v[c]              columns:  out[c] += Σ_r X[r][c]·v[r]
//
//               v  ─────────────►                                v
//        rows  ┌─────────────────┐                            │ ┌─────────┐
//       of a   │ Σ Σ Σ Σ Σ Σ Σ Σ │ ─► out                     │ │ Σ Σ Σ Σ │ a thread has VEC columns
//       block  └─────────────────┘                            ▼ └─────────┘
//              threads side by side                               │ │ │ │ ─► out
//
// Sums are float64, so that what the check itself rounds counts for little, or integers of 64 bits that wrap
// around, as exact as what they are compared with. They are added to `out` atomically: several blocks share
// a line. `squares`, where given, gets Σ |x|² of the same lines.
//
// Macros: ELEMENT; KIND (1 real, 2 complex, whose parts are ELEMENT, 3 integers, perhaps held in floating
// point, 4 float16); VEC: elements that are loaded at once, of which rows start at multiples. Launch: THREADS
// threads a block, see catalog.check.

#define REAL_KIND 1
#define COMPLEX_KIND 2
#define INTEGER_KIND 3
#define HALF_KIND 4

constexpr int THREADS = 256, ROWS = 8;
constexpr int DEPTH = 128;  // rows that a block of `columns` adds up

static_assert(VEC == 1 || VEC == 2 || VEC == 4 || VEC == 8 || VEC == 16, "loads are of 16 bytes at most");

#if KIND == COMPLEX_KIND
struct alignas(2 * sizeof(ELEMENT)) Element {
    ELEMENT re, im;
};
struct alignas(16) Sum {
    double re, im;
};
#else
using Element = ELEMENT;
#if KIND == INTEGER_KIND
using Sum = long long;
#else
using Sum = double;
#endif
#endif

struct alignas(VEC * sizeof(Element)) Vector {
    Element x[VEC];
};

static_assert(sizeof(Vector) <= 16, "one load");

__device__ __forceinline__ Sum widened(Element x, bool conjugate) {
#if KIND == COMPLEX_KIND
    return {x.re, conjugate ? -x.im : x.im};
#elif KIND == HALF_KIND
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
    return wide;
#else
    return static_cast<Sum>(x);
#endif
}

__device__ __forceinline__ void add_product(Sum& sum, Sum x, Sum v) {
#if KIND == COMPLEX_KIND
    sum.re += x.re * v.re - x.im * v.im;
    sum.im += x.re * v.im + x.im * v.re;
#elif KIND == INTEGER_KIND
    // Unsigned, for that may wrap around.
    sum += static_cast<Sum>(static_cast<unsigned long long>(x) * static_cast<unsigned long long>(v));
#else
    sum += x * v;
#endif
}

__device__ __forceinline__ double squared(Sum x) {
#if KIND == COMPLEX_KIND
    return x.re * x.re + x.im * x.im;
#else
    return static_cast<double>(x) * static_cast<double>(x);
#endif
}

__device__ __forceinline__ void add(double* to, double x) { atomicAdd(to, x); }

__device__ __forceinline__ void add(long long* to, long long x) {
    atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(x));
}

#if KIND == COMPLEX_KIND
__device__ __forceinline__ void add(Sum* to, Sum x) {
    atomicAdd(&to->re, x.re);
    atomicAdd(&to->im, x.im);
}
#endif

// The sum over a warp, in its first thread.
__device__ __forceinline__ double over_warp(double x) {
#pragma unroll
    for (int step = 16; step; step >>= 1) x += __shfl_down_sync(0xffffffffu, x, step);
    return x;
}

__device__ __forceinline__ long long over_warp(long long x) {
#pragma unroll
    for (int step = 16; step; step >>= 1) x += __shfl_down_sync(0xffffffffu, x, step);
    return x;
}

#if KIND == COMPLEX_KIND
__device__ __forceinline__ Sum over_warp(Sum x) { return {over_warp(x.re), over_warp(x.im)}; }
#endif

// Columns past the last may lie in the padding of a row, or in the next one: they are loaded, not used.
__device__ __forceinline__ Vector loaded(const Element* x) { return *reinterpret_cast<const Vector*>(x); }

// Block (x, y): ROWS rows from x·ROWS on, `width` columns (a multiple of VEC) from y·width on. Every column of
// v is read once for all ROWS rows.
extern "C" __global__ void __launch_bounds__(THREADS)
rows(long long count, long long cols, long long width, const Element* __restrict__ X, long long ldx,
     const Sum* __restrict__ v, Sum* __restrict__ out, double* __restrict__ squares, int conjugate) {
    const long long first = blockIdx.x * static_cast<long long>(ROWS), start = blockIdx.y * width;
    const long long stop = start + width < cols ? start + width : cols;
    const int height = count - first < ROWS ? static_cast<int>(count - first) : ROWS;
    const bool norms = squares != nullptr;
    Sum sum[ROWS] = {};
    double square[ROWS] = {};
    for (long long col = start + threadIdx.x * VEC; col < stop; col += THREADS * VEC) {
        Sum by[VEC] = {};
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            if (col + i < stop) by[i] = v[col + i];
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (r >= height) break;
            const Vector x = loaded(X + (first + r) * ldx + col);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                if (col + i >= stop) break;
                const Sum wide = widened(x.x[i], conjugate);
                add_product(sum[r], wide, by[i]);
                if (norms) square[r] += squared(wide);
            }
        }
    }
    __shared__ Sum sums[THREADS / 32][ROWS];
    __shared__ double all_squares[THREADS / 32][ROWS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const Sum total = over_warp(sum[r]);
        const double total_square = over_warp(square[r]);
        if (lane == 0) {
            sums[warp][r] = total;
            all_squares[warp][r] = total_square;
        }
    }
    __syncthreads();
    // A thread for each row and each warp's share of it: no order of additions that matters is left.
    const int r = threadIdx.x % ROWS, part = threadIdx.x / ROWS;
    if (part < THREADS / 32 && r < height) {
        add(out + first + r, sums[part][r]);
        if (norms) add(squares + first + r, all_squares[part][r]);
    }
}

// Block (x, y): THREADS·VEC columns, DEPTH rows.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
columns(long long count, long long cols, const Element* __restrict__ X, long long ldx,
        const Sum* __restrict__ v, Sum* __restrict__ out, double* __restrict__ squares, int conjugate) {
    const long long col = (blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x) * VEC;
    const long long first = blockIdx.y * static_cast<long long>(DEPTH);
    if (col >= cols) return;
    const int height = count - first < DEPTH ? static_cast<int>(count - first) : DEPTH;
    const bool norms = squares != nullptr;
    Sum sum[VEC] = {};
    double square[VEC] = {};
    const Element* at = X + first * ldx + col;
#pragma unroll(VEC > 4 ? 2 : 4)
    for (int r = 0; r < height; ++r, at += ldx) {
        const Vector x = loaded(at);
        const Sum by = v[first + r];
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            const Sum wide = widened(x.x[i], conjugate);
            add_product(sum[i], wide, by);
            if (norms) square[i] += squared(wide);
        }
    }
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
        if (col + i >= cols) break;
        add(out + col + i, sum[i]);
        if (norms) add(squares + col + i, square[i]);
    }
}

// x[j] ← a random sign, by the mixing of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). Launch: a thread an element.
extern "C" __global__ void __launch_bounds__(THREADS) signs(long long count, unsigned long long seed, Sum* x) {
    const long long j = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    if (j >= count) return;
    unsigned long long z = seed + (static_cast<unsigned long long>(j) + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    const int sign = z >> 63 ? -1 : 1;
#if KIND == COMPLEX_KIND
    x[j] = {static_cast<double>(sign), 0};
#else
    x[j] = sign;
#endif
}
