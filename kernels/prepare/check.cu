// One pass over a stored matrix X for Freivalds' check: its product with a vector, and the squared norms of
// its lines, while the matrix is on its way through the cache once.
//
//     rows:     out[r] += Σ_c X[r][c]·v[c]              columns:  out[c] += Σ_r X[r][c]·v[r]
//
//               v  ─────────────►                                v
//        rows  ┌─────────────────┐                            │ ┌─────────┐
//        of a  │ Σ Σ Σ Σ Σ Σ Σ Σ │ ─► out                     │ │ Σ Σ Σ Σ │ a thread has VEC columns,
//        warp  └─────────────────┘                            ▼ └─────────┘ its warp one row at a time
//               threads side by side                              │ │ │ │ ─► out
//
// What the check itself rounds has to count for little: sums are float64. Those of float16 begin in float32, a
// few terms each. Sums of integers wrap around at 64 bits, or at 32 where C has no more: they are as exact as
// what they are compared with. They are added to `out` atomically, for several warps share a line. `squares`,
// where given and X does not hold integers, gets Σ |x|² of the same lines.
//
// Macros: ELEMENT; KIND (1 real, 2 complex, whose parts are ELEMENT, 3 integers, perhaps held in floating
// point, 4 float16); WIDE: whether sums of integers have 64 bits; VEC: elements that are loaded at once, of which
// rows start at multiples. Launch: THREADS threads a block, see preparations.check.

#define REAL_KIND 1
#define COMPLEX_KIND 2
#define INTEGER_KIND 3
#define HALF_KIND 4

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int ROWS = 8;     // of a warp in `rows`
constexpr int DEPTH = 256;  // rows of a block in `columns`

static_assert(VEC == 1 || VEC == 2 || VEC == 4 || VEC == 8 || VEC == 16, "loads are of 16 bytes at most");

// Sum: what is added up. Part, Square: what a few products, or squares, are added up in first.
#if KIND == COMPLEX_KIND
struct alignas(2 * sizeof(ELEMENT)) Element {
    ELEMENT re, im;
};
struct alignas(16) Sum {
    double re, im;
};
using Part = Sum;
using Square = double;
#else
using Element = ELEMENT;
#if KIND == INTEGER_KIND
#if WIDE
using Sum = long long;
#else
using Sum = int;
#endif
using Part = Sum;
using Square = double;
#elif KIND == HALF_KIND
using Sum = double;
using Part = float;
using Square = float;  // they are 2^-48 to 2^32
#else
using Sum = double;
using Part = double;
using Square = double;
#endif
#endif

struct alignas(VEC * sizeof(Element)) Vector {
    Element x[VEC];
};

static_assert(sizeof(Vector) <= 16, "one load");

// Blocks of `rows` on a multiprocessor. From sm_100 on, sixteen unpacked bytes of eight rows take more than the
// 128 registers that two of them leave a thread.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int RESIDENT = sizeof(Element) == 1 ? 1 : 2;
#else
constexpr int RESIDENT = 2;
#endif

__device__ __forceinline__ Part widened(Element x, bool conjugate) {
#if KIND == COMPLEX_KIND
    return {x.re, conjugate ? -x.im : x.im};
#elif KIND == HALF_KIND
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
    return wide;
#else
    return static_cast<Part>(x);
#endif
}

__device__ __forceinline__ void add_product(Part& sum, Part x, Part v) {
#if KIND == COMPLEX_KIND
    sum.re += x.re * v.re - x.im * v.im;
    sum.im += x.re * v.im + x.im * v.re;
#elif KIND == INTEGER_KIND
    // Unsigned, for that may wrap around.
    using Bits = unsigned long long;
    sum = static_cast<Part>(static_cast<Bits>(sum) + static_cast<Bits>(x) * static_cast<Bits>(v));
#else
    sum += x * v;
#endif
}

__device__ __forceinline__ Square squared(Part x) {
#if KIND == COMPLEX_KIND
    return x.re * x.re + x.im * x.im;
#else
    return static_cast<Square>(x) * static_cast<Square>(x);
#endif
}

__device__ __forceinline__ double plus(double x, double y) { return x + y; }
__device__ __forceinline__ double from_lane(double x, int apart) { return __shfl_xor_sync(~0u, x, apart); }
__device__ __forceinline__ void add(double* to, double x) { atomicAdd(to, x); }

#if KIND == COMPLEX_KIND
__device__ __forceinline__ Sum plus(Sum x, Sum y) { return {x.re + y.re, x.im + y.im}; }
__device__ __forceinline__ Sum from_lane(Sum x, int apart) { return {from_lane(x.re, apart), from_lane(x.im, apart)}; }
__device__ __forceinline__ void add(Sum* to, Sum x) {
    atomicAdd(&to->re, x.re);
    atomicAdd(&to->im, x.im);
}
#elif KIND == INTEGER_KIND
__device__ __forceinline__ Sum plus(Sum x, Sum y) {
    return static_cast<Sum>(static_cast<unsigned long long>(x) + static_cast<unsigned long long>(y));
}
__device__ __forceinline__ Sum from_lane(Sum x, int apart) { return __shfl_xor_sync(~0u, x, apart); }
__device__ __forceinline__ void add(long long* to, long long x) {
    atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(x));
}
__device__ __forceinline__ void add(int* to, int x) { atomicAdd(to, x); }
#endif

// VEC elements at once, or, where there are fewer, those.
template <bool WHOLE>
__device__ __forceinline__ Vector loaded(const Element* at, long long here) {
    if (WHOLE) return *reinterpret_cast<const Vector*>(at);
    Vector found{};
    for (int i = 0; i < here; ++i) found.x[i] = at[i];
    return found;
}

// The sums of ROWS numbers over a warp: a thread gets that of row lane / (32 / ROWS). In each step a thread
// gives half of its rows away, so that ROWS − 1 numbers travel instead of 5·ROWS.
template <class T>
__device__ __forceinline__ T over_warp(T (&x)[ROWS]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = ROWS / 2, apart = 16; half; half /= 2, apart /= 2) {
        const bool upper = lane & apart;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const T given = upper ? x[i] : x[i + half];
            x[i] = plus(upper ? x[i + half] : x[i], from_lane(given, apart));
        }
    }
#pragma unroll
    for (int apart = 16 / ROWS; apart; apart /= 2) x[0] = plus(x[0], from_lane(x[0], apart));
    return x[0];
}

// What VEC columns add to the sums of ROWS rows from X on; `here` of them are there, and `height` rows: the
// last takes the places of those that are not.
template <bool WHOLE>
__device__ __forceinline__ void add_columns(const Element* X, long long ldx, const Sum* v, long long here, int height,
                                            bool conjugate, bool norms, Sum (&sum)[ROWS], double (&square)[ROWS]) {
    Vector x[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) x[r] = loaded<WHOLE>(X + (r < height ? r : height - 1) * ldx, here);
    Part by[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) by[i] = WHOLE || i < here ? static_cast<Part>(v[i]) : Part{};
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        Part part{};
        Square of_part = 0;
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            const Part wide = widened(x[r].x[i], conjugate);
            add_product(part, wide, by[i]);
            if (norms) of_part += squared(wide);
        }
        sum[r] = plus(sum[r], part);
        square[r] += of_part;
    }
}

// A warp: ROWS rows, and `width` columns (a multiple of VEC) from blockIdx.y·width on. Every column of v is
// read once for all ROWS rows.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
rows(long long count, long long cols, long long width, const Element* __restrict__ X, long long ldx,
     const Sum* __restrict__ v, Sum* __restrict__ out, double* __restrict__ squares, int conjugate) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long first = (blockIdx.x * static_cast<long long>(WARPS) + warp) * ROWS;
    if (first >= count) return;
    const long long start = blockIdx.y * width, stop = start + width < cols ? start + width : cols;
    const int height = count - first < ROWS ? static_cast<int>(count - first) : ROWS;
    const bool norms = KIND != INTEGER_KIND && squares;
    Sum sum[ROWS] = {};
    double square[ROWS] = {};
    long long col = start + lane * VEC;
    X += first * ldx;
    for (; col + VEC <= stop; col += 32 * VEC)
        add_columns<true>(X + col, ldx, v + col, VEC, height, conjugate, norms, sum, square);
    if (col < stop) add_columns<false>(X + col, ldx, v + col, stop - col, height, conjugate, norms, sum, square);
    const Sum total = over_warp(sum);
    const double total_square = over_warp(square);
    constexpr int SHARE = 32 / ROWS;
    if (lane % SHARE == 0 && lane / SHARE < height) {
        add(out + first + lane / SHARE, total);
        if (norms) add(squares + first + lane / SHARE, total_square);
    }
}

// What rows from X on, WARPS apart, add to the sums of VEC columns, of which `here` are there.
template <bool WHOLE>
__device__ __forceinline__ void add_rows(const Element* X, long long ldx, const Sum* v, long long count, long long here,
                                         bool conjugate, bool norms, Part (&sum)[VEC], Square (&square)[VEC]) {
#pragma unroll 4
    for (long long r = 0; r < count; r += WARPS) {
        const Vector x = loaded<WHOLE>(X + r * ldx, here);
        const Part by = static_cast<Part>(v[r]);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            const Part wide = widened(x.x[i], conjugate);
            add_product(sum[i], wide, by);
            if (norms) square[i] += squared(wide);
        }
    }
}

// A block: 32·VEC columns and DEPTH rows, which its warps take in turns. The grid has one dimension, for there may be
// more than 65,535 of either; blocks side by side come one after the other.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
columns(long long count, long long cols, const Element* __restrict__ X, long long ldx, const Sum* __restrict__ v,
        Sum* __restrict__ out, double* __restrict__ squares, int conjugate) {
    constexpr int WIDTH = 32 * VEC;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned across = static_cast<unsigned>((cols + WIDTH - 1) / WIDTH);
    const long long start = blockIdx.x % across * static_cast<long long>(WIDTH), here = cols - (start + lane * VEC);
    const long long first = blockIdx.x / across * static_cast<long long>(DEPTH) + warp;
    const long long deep = (count - first + warp < DEPTH ? count - first + warp : DEPTH) - warp;
    const bool norms = KIND != INTEGER_KIND && squares;
    Part sum[VEC] = {};
    Square square[VEC] = {};
    X += first * ldx + start + lane * VEC;
    if (here >= VEC) add_rows<true>(X, ldx, v + first, deep, VEC, conjugate, norms, sum, square);
    else if (here > 0) add_rows<false>(X, ldx, v + first, deep, here, conjugate, norms, sum, square);
    __shared__ Part sums[WARPS][WIDTH];
    __shared__ Square all_squares[KIND == INTEGER_KIND ? 1 : WARPS][WIDTH];
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
        sums[warp][lane * VEC + i] = sum[i];
        if (norms) all_squares[warp][lane * VEC + i] = square[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < WIDTH && start + i < cols; i += THREADS) {
        Sum total = sums[0][i];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) total = plus(total, sums[w][i]);
        add(out + start + i, total);
        if (!norms) continue;
        double total_square = all_squares[0][i];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) total_square += all_squares[w][i];
        add(squares + start + i, total_square);
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
