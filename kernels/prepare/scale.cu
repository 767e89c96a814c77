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
constexpr int MOST_THREADS = 1024;  // of a block that reduces lines
constexpr int STRIP = 128, COLUMNS = 256;  // rows and columns of a block that reduces both
constexpr int PLAIN = 400;  // exponents from −PLAIN to PLAIN of the largest element of a line: squares are as they are
constexpr u32 INFINITE = 2047u << 20;  // the high word of infinity; that of NaN is no less
constexpr int ALIKE = 2;  // d that differ by no more than this are left out
constexpr int NONE = -(1 << 19);  // the logarithm of 0

// A line, whose scaled elements are below 2.
struct alignas(16) Line {
    double squares;  // Σ (x·2^(±d − exponent))²; 0 for a line of zeros
    int exponent;
};

struct alignas(16) Two {
    double x[2];
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
template <class T, class Reduce>
__device__ __forceinline__ T block_reduce(T x, const Reduce& reduce) {
    __shared__ T parts[MOST_THREADS / 32];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = reduce(x, __shfl_xor_sync(0xffffffff, x, step));
    __syncthreads();  // of a result before, nobody reads any more
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = parts[0];
    const int warps = static_cast<int>(blockDim.x) / 32;
#pragma unroll 1
    for (int w = 1; w < warps; ++w) x = reduce(x, parts[w]);
    return x;
}

__device__ __forceinline__ int block_max(int x) {
    return block_reduce(x, [](int x, int y) { return x > y ? x : y; });
}

// ---- d -----------------------------------------------------------------------------------------------------

// The high words of the largest elements of every k, and of every line (`tops`), from 0; and Σ x² of each line in each
// block of columns (`squares`), which mean something where nothing is too large or too small (PLAIN). Blocks of COLUMNS
// columns × STRIP rows, numbered along rows first; a warp reads a row, and a thread two elements side by side.
extern "C" __global__ void __launch_bounds__(THREADS)
depth_largest(int rows, int cols, const double* __restrict__ X, i64 ld, u32* __restrict__ largest,
              u32* __restrict__ tops, double* __restrict__ squares) {
    constexpr int PAIRS = COLUMNS / 64;  // of a thread
    __shared__ u32 of_columns[COLUMNS / PARTS];
    const int across = (cols * PARTS + COLUMNS - 1) / COLUMNS, block = blockIdx.x % across;
    const int left = block * COLUMNS, there = cols * PARTS - left, lane = threadIdx.x % 32;
    const int first = blockIdx.x / across * STRIP, last = rows - first < STRIP ? rows : first + STRIP;
    for (int i = threadIdx.x; i < COLUMNS / PARTS; i += THREADS) of_columns[i] = 0;
    __syncthreads();
    u32 found[PAIRS][2] = {};
#pragma unroll 2
    for (int row = first + threadIdx.x / 32; row < last; row += THREADS / 32) {
        const double* const from = X + row * ld * PARTS + left;
        u32 top = 0;
        double sum = 0;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const int at = 64 * i + 2 * lane;
            Two two = {};
            if (there >= COLUMNS) two = *reinterpret_cast<const Two*>(from + at);
            else if (at < there) two.x[0] = from[at], two.x[1] = at + 1 < there ? from[at + 1] : 0.0;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const u32 high = magnitude(two.x[e]);
                found[i][e] = high > found[i][e] ? high : found[i][e];
                top = high > top ? high : top;
                sum += two.x[e] * two.x[e];
            }
        }
        top = __reduce_max_sync(0xffffffff, top);
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
        if (lane == 0) {
            atomicMax(&tops[row], top);
            squares[static_cast<i64>(row) * across + block] = sum;
        }
    }
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) atomicMax(&of_columns[(64 * i + 2 * lane + e) / PARTS], found[i][e]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < COLUMNS / PARTS; i += THREADS) {
        if (of_columns[i] != 0) atomicMax(&largest[left / PARTS + i], of_columns[i]);
    }
}

// d from the largest elements of each k on both sides; whether it is used. One block. What all d have in common
// makes no difference and is left out.
extern "C" __global__ void __launch_bounds__(MOST_THREADS)
equilibrate(int k, const u32* __restrict__ a, const u32* __restrict__ b, int* __restrict__ depth, State* state) {
    const auto raise = [](int& most, int x) { most = x > most ? x : most; };
    int most = NONE, least = NONE;  // of d, of −d
    int a_paired = NONE, b_paired = NONE;  // largest elements that meet others
    int a_alone = NONE, b_alone = NONE;  // largest elements that meet zeros only
#pragma unroll 4
    for (int i = threadIdx.x; i < k; i += blockDim.x) {
        const int x = floor_log2(a[i]), y = floor_log2(b[i]);
        if (x != NONE && y != NONE) {
            const int d = (y - x) >> 1;
            raise(most, d), raise(least, -d), raise(a_paired, x), raise(b_paired, y);
        } else {
            raise(a_alone, x), raise(b_alone, y);
        }
    }
    most = block_max(most), least = block_max(least);
    a_paired = block_max(a_paired), b_paired = block_max(b_paired);
    a_alone = block_max(a_alone), b_alone = block_max(b_alone);
    const int middle = (most - least) >> 1;
#pragma unroll 4
    for (int i = threadIdx.x; i < k; i += blockDim.x)
        depth[i] = a[i] == 0 || b[i] == 0 ? DROPPED : ((floor_log2(b[i]) - floor_log2(a[i])) >> 1) - middle;
    if (threadIdx.x == 0)
        state->shifted = most + least > ALIKE || a_alone > a_paired + ALIKE || b_alone > b_paired + ALIKE;
}

// ---- lines -------------------------------------------------------------------------------------------------

// Norms and magnitudes of lines, one by each block at a time. The later sweeps find a line in the caches if no more
// blocks run at once than lines fit there.
// Magnitudes lie `pitch` bytes from line to line. `tops`: the high words of the largest elements of lines, and
// `partial`: their squares in each block of columns, as `depth_largest` finds them. Both count where no d are in use;
// null if nobody knows.
extern "C" __global__ void __launch_bounds__(MOST_THREADS)
lines(int rows, int cols, const double* __restrict__ X, i64 ld, const int* __restrict__ depth, int sign,
      const u32* __restrict__ tops, const double* __restrict__ partial, Line* __restrict__ lines,
      signed char* __restrict__ magnitudes, i64 pitch, State* state) {
    if (depth != nullptr && state->shifted == 0) depth = nullptr;
    const bool known = tops != nullptr && depth == nullptr;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const double* const values = X + row * ld * PARTS;
        int top = known ? floor_log2(tops[row]) : NONE;
        bool infinite = known && tops[row] >= INFINITE;
#pragma unroll 4
        for (int j = threadIdx.x; j < cols * PARTS && !known; j += blockDim.x) {
            const u32 high = magnitude(values[j]);
            infinite |= high >= INFINITE;
            if (high == 0) continue;
            const int d = depth == nullptr ? 0 : depth[j / PARTS];
            const int e = floor_log2(high) + sign * d;
            if (d != DROPPED && e > top) top = e;
        }
        if (infinite) state->fallback = 1;
        if (!known) top = block_max(top);
        const bool zeros = top == NONE;
        if (zeros) top = 0;

        // x·2^(±d − top), which is below 2.
        const auto normal = [&](int j) {
            if (depth == nullptr) return scaled(values[j], -top);
            const int d = depth[j / PARTS];
            return d == DROPPED ? 0.0 : scaled(values[j], sign * d - top);
        };
        const bool summed = known && top >= -PLAIN && top <= PLAIN;
        double squares = 0;
        if (summed) {
            const int across = (cols * PARTS + COLUMNS - 1) / COLUMNS;
            for (int j = threadIdx.x; j < across; j += blockDim.x) squares += partial[row * across + j];
            squares = scaled(squares, -2 * top);
        } else {
#pragma unroll 4
            for (int j = threadIdx.x; j < cols * PARTS; j += blockDim.x) {
                const double x = normal(j);
                squares += x * x;
            }
        }
        squares = block_reduce(squares, [](double x, double y) { return x + y; });
        if (threadIdx.x == 0) lines[row] = {squares, top};

        // A line of zeros has no errors: large magnitudes keep it from counting as the least.
        const double factor = zeros ? 0.0 : GRAIN * sqrt(cols / squares);
        signed char* const to = magnitudes + row * pitch;
        for (int i = threadIdx.x; i < (cols + SPAN - 1) / SPAN * SAMPLE; i += blockDim.x) {
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
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const Line line = lines[i];
        if (line.squares == 0) continue;
        const double square = scaled(line.squares, 2 * power_of(line, bound));
        least = square < least ? square : least;
    }
    return block_reduce(least, [](double x, double y) { return x < y ? x : y; });
}

__device__ __forceinline__ void write_exponents(int count, const Line* lines, int* exponents, const Bound& bound) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const Line line = lines[i];
        exponents[i] = line.squares == 0 ? 0 : power_of(line, bound) - line.exponent;
    }
}

// The number of moduli and the exponents e of both operands, or the fallback where an error may be more than
// tolerance·2^-53·Σ|a||b|. One block.
extern "C" __global__ void __launch_bounds__(MOST_THREADS)
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
