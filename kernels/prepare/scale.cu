// Finds how float64 numbers are scaled to integers for products of residues (ozaki2), and whether these are as accurate
// as sums in float64.
//
// X is an operand along k: each of its rows is a line, a row of op(A) or a column of op(B). Its elements are scaled by
// powers of two as common/scales.cuh says:
//
//   d  makes the largest elements of column k of op(A) and row k of op(B) alike (`equilibrate`), so that columns in
//      different units lose nothing. Where all d are nearly alike they are left out.
//   e  is as large as the moduli allow: |Σ a·b| ≤ ‖a‖·‖b‖, so that norms up to T of all lines are enough, where T² is
//      the largest integer that residues tell apart (Bound, moduli.py).
//
// An integer is rounded by up to 1/2, so a sum has an error of about √(1/12)·√(1/σᵢ² + 1/σⱼ²) ‖a‖‖b‖, where σ ≤ T are
// the norms of the scaled lines. A sum in float64 has one of about 2^-54·Σ|a||b| or more. So the product of magnitudes
// tells whether residues are accurate enough. `lines` writes magnitudes as integers, 0 to 127, GRAIN times as large as
// the root of the mean square of their line and rounded down; of SPAN elements only the first SAMPLE, for sums of some
// products are less than those of all. An int8 product finds the least of these sums, which is at most
// GRAIN²·k·Σ|a||b| / ‖a‖‖b‖ for all pairs of lines, and `decide` compares.
//
// A complex line is one of twice as many real numbers; of its elements the absolute values are multiplied.
//
// Macros: PARTS (1, or 2 for complex numbers), GRAIN, SAMPLE, SPAN, BOUNDS.

#include "common/types.cuh"
#include "common/scales.cuh"

constexpr int THREADS = 256;
constexpr int LINE_THREADS = 512;  // of a block that reduces a line: few blocks at once keep their lines in L1 and L2
constexpr int STRIP = 128;  // lines that a thread walks down where columns are reduced
constexpr u32 INFINITE = 2047u << 20;  // the high word of infinity; that of NaN is no less
constexpr int ALIKE = 2;  // d that differ by no more than this are left out
constexpr int NONE = -(1 << 19);  // the logarithm of 0

// A line, whose scaled elements are below 2.
struct alignas(16) Line {
    double squares;  // Σ (x·2^(±d − exponent))²; 0 for a line of zeros
    int exponent;
};

struct Bound {
    int moduli, exponent;
    double mantissa;  // T² = mantissa·2^exponent
};

// The high word of |x|; 1 where that would be 0 and x is not, which is then less than 2^-1042.
__device__ __forceinline__ u32 magnitude(double x) {
    const u64 bits = static_cast<u64>(__double_as_longlong(x)) << 1 >> 1;
    const u32 high = static_cast<u32>(bits >> 32);
    return high == 0 && bits != 0 ? 1 : high;
}

// ⌊log2⌋ of the number with this high word; of those below 2^-1042, −1042.
__device__ __forceinline__ int floor_log2(u32 high) {
    return high == 0 ? NONE : high >> 20 ? static_cast<int>(high >> 20) - 1023 : -1011 - __clz(high);
}

// Reduces x over the threads of a block, all of which get the result.
template <int BLOCK, class T, class Reduce>
__device__ __forceinline__ T block_reduce(T x, const Reduce& reduce) {
    __shared__ T parts[BLOCK / 32];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = reduce(x, __shfl_xor_sync(0xffffffff, x, step));
    __syncthreads();  // of a result before, nobody reads any more
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = parts[0];
#pragma unroll 1
    for (int w = 1; w < BLOCK / 32; ++w) x = reduce(x, parts[w]);
    return x;
}

template <int BLOCK>
__device__ __forceinline__ int block_max(int x) {
    return block_reduce<BLOCK>(x, [](int x, int y) { return x > y ? x : y; });
}

// ---- d -----------------------------------------------------------------------------------------------------

// The high words of the largest element of every k, from 0. Blocks of THREADS columns × STRIP rows, numbered along
// rows first.
extern "C" __global__ void __launch_bounds__(THREADS)
depth_largest(int rows, int cols, const double* __restrict__ X, i64 ld, u32* __restrict__ largest) {
    const int across = (cols * PARTS + THREADS - 1) / THREADS;
    const int col = blockIdx.x % across * THREADS + threadIdx.x;
    const int first = blockIdx.x / across * STRIP, last = rows - first < STRIP ? rows : first + STRIP;
    if (col >= cols * PARTS) return;
    u32 found = 0;
#pragma unroll 8
    for (int row = first; row < last; ++row) {
        const u32 high = magnitude(X[row * ld * PARTS + col]);
        found = high > found ? high : found;
    }
    if (found != 0) atomicMax(&largest[col / PARTS], found);
}

// d from the largest elements of each k on both sides; whether it is used. One block. What all d have in common
// makes no difference and is left out.
extern "C" __global__ void __launch_bounds__(LINE_THREADS)
equilibrate(int k, const u32* __restrict__ a, const u32* __restrict__ b, int* __restrict__ depth, State* state) {
    const auto raise = [](int& most, int x) { most = x > most ? x : most; };
    int most = NONE, least = NONE;  // of d, of −d
    int a_paired = NONE, b_paired = NONE;  // largest elements that meet others
    int a_alone = NONE, b_alone = NONE;  // largest elements that meet zeros only
#pragma unroll 4
    for (int i = threadIdx.x; i < k; i += LINE_THREADS) {
        const int x = floor_log2(a[i]), y = floor_log2(b[i]);
        if (x != NONE && y != NONE) {
            const int d = (y - x) >> 1;
            raise(most, d), raise(least, -d), raise(a_paired, x), raise(b_paired, y);
        } else {
            raise(a_alone, x), raise(b_alone, y);
        }
    }
    most = block_max<LINE_THREADS>(most), least = block_max<LINE_THREADS>(least);
    a_paired = block_max<LINE_THREADS>(a_paired), b_paired = block_max<LINE_THREADS>(b_paired);
    a_alone = block_max<LINE_THREADS>(a_alone), b_alone = block_max<LINE_THREADS>(b_alone);
    const int middle = (most - least) >> 1;
#pragma unroll 4
    for (int i = threadIdx.x; i < k; i += LINE_THREADS)
        depth[i] = a[i] == 0 || b[i] == 0 ? DROPPED : ((floor_log2(b[i]) - floor_log2(a[i])) >> 1) - middle;
    if (threadIdx.x == 0)
        state->shifted = most + least > ALIKE || a_alone > a_paired + ALIKE || b_alone > b_paired + ALIKE;
}

// ---- lines -------------------------------------------------------------------------------------------------

// Norms and magnitudes of lines, one by each block at a time. The later sweeps find most of a line in the caches.
// Magnitudes lie `pitch` bytes from line to line.
extern "C" __global__ void __launch_bounds__(LINE_THREADS)
lines(int rows, int cols, const double* __restrict__ X, i64 ld, const int* __restrict__ depth, int sign,
      Line* __restrict__ lines, signed char* __restrict__ magnitudes, i64 pitch, State* state) {
    if (depth != nullptr && state->shifted == 0) depth = nullptr;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const double* const values = X + row * ld * PARTS;
        int top = NONE;
        bool infinite = false;
#pragma unroll 4
        for (int j = threadIdx.x; j < cols * PARTS; j += LINE_THREADS) {
            const u32 high = magnitude(values[j]);
            infinite |= high >= INFINITE;
            if (high == 0) continue;
            const int d = depth == nullptr ? 0 : depth[j / PARTS];
            const int e = floor_log2(high) + sign * d;
            if (d != DROPPED && e > top) top = e;
        }
        if (infinite) state->fallback = 1;
        top = block_max<LINE_THREADS>(top);
        const bool zeros = top == NONE;
        if (zeros) top = 0;

        // x·2^(±d − top), which is below 2.
        const auto normal = [&](int j) {
            if (depth == nullptr) return scaled(values[j], -top);
            const int d = depth[j / PARTS];
            return d == DROPPED ? 0.0 : scaled(values[j], sign * d - top);
        };
        double squares = 0;
#pragma unroll 4
        for (int j = threadIdx.x; j < cols * PARTS; j += LINE_THREADS) {
            const double x = normal(j);
            squares += x * x;
        }
        squares = block_reduce<LINE_THREADS>(squares, [](double x, double y) { return x + y; });
        if (threadIdx.x == 0) lines[row] = {squares, top};

        // A line of zeros has no errors: large magnitudes keep it from counting as the least.
        const double factor = zeros ? 0.0 : GRAIN * sqrt(cols / squares);
        signed char* const to = magnitudes + row * pitch;
        for (int i = threadIdx.x; i < (cols + SPAN - 1) / SPAN * SAMPLE; i += LINE_THREADS) {
            const int j = i / SAMPLE * SPAN + i % SAMPLE;
            if (j >= cols) continue;
            const double x = normal(PARTS * j), y = PARTS == 2 ? normal(PARTS * j + 1) : 0.0;
            const double size = (PARTS == 2 ? sqrt(x * x + y * y) : fabs(x)) * factor;
            to[i] = static_cast<signed char>(zeros || size > 127.0 ? 127 : static_cast<int>(size));
        }
    }
}

// ---- the decision ------------------------------------------------------------------------------------------

// What 2^(±d − exponent)·x are multiplied by in a line, as a power of two: the norm comes to T/2 … T.
__device__ __forceinline__ int power_of(const Line& line, const Bound& bound) {
    const u64 bits = static_cast<u64>(__double_as_longlong(line.squares));
    const int exponent = static_cast<int>(bits >> 52) - 1023;
    const double mantissa = __longlong_as_double(static_cast<i64>(bits << 12 >> 12 | 1023ull << 52));
    return (bound.exponent - exponent - (mantissa > bound.mantissa)) >> 1;
}

// The least squared norm of the scaled lines; infinite if all are zeros.
__device__ __forceinline__ double least_square(int count, const Line* lines, const Bound& bound) {
    double least = __longlong_as_double(2047LL << 52);
    for (int i = threadIdx.x; i < count; i += LINE_THREADS) {
        const Line line = lines[i];
        if (line.squares == 0) continue;
        const double square = scaled(line.squares, 2 * power_of(line, bound));
        least = square < least ? square : least;
    }
    return block_reduce<LINE_THREADS>(least, [](double x, double y) { return x < y ? x : y; });
}

__device__ __forceinline__ void write_exponents(int count, const Line* lines, int* exponents, const Bound& bound) {
    for (int i = threadIdx.x; i < count; i += LINE_THREADS) {
        const Line line = lines[i];
        exponents[i] = line.squares == 0 ? 0 : power_of(line, bound) - line.exponent;
    }
}

// The number of moduli and the exponents e of both operands, or the fallback where an error may be more than
// tolerance·2^-53·Σ|a||b|. One block.
extern "C" __global__ void __launch_bounds__(LINE_THREADS)
decide(int m, int n, int k, const Line* __restrict__ a, int* __restrict__ a_exponents, const Line* __restrict__ b,
       int* __restrict__ b_exponents, double tolerance, State* state) {
    static constexpr Bound bounds[] = {BOUNDS};
    if (state->fallback != 0) return;
    // The largest error of a sum relative to ‖a‖‖b‖.
    const double allowed = tolerance * 0x1p-53 * state->least / (static_cast<double>(GRAIN) * GRAIN * k);
#pragma unroll 1
    for (const Bound& bound : bounds) {
        const double x = least_square(m, a, bound), y = least_square(n, b, bound);
        if (1 / x + 1 / y > 12 * allowed * allowed) continue;
        write_exponents(m, a, a_exponents, bound);
        write_exponents(n, b, b_exponents, bound);
        if (threadIdx.x == 0) state->moduli = bound.moduli;
        return;
    }
    if (threadIdx.x == 0) state->fallback = 1;
}
