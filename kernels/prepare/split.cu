// Prepares float32 operands for the tensor cores (wgmma.cu and mma.cu, PRODUCTS = 3): x·2^s = hi + lo, two
// float16 of 11 significant bits each.
//
// The scale of an element is a power of two: s = d[k] − e[line] in A and −d[k] − e[line] in B, where a line is
// a row of op(A) or a column of op(B). The d cancel in the product; the product kernel multiplies by
// 2^(e[row] + e[column]) at the end.
//
//   e  brings the largest element of a line to 2^14 … 2^15.
//   d  makes the largest elements of column k of op(A) and row k of op(B) alike (`equilibrate`). Columns in
//      different units, metres beside pascals, then lose nothing. Where all d are nearly alike, they are left
//      out, and so are the passes that they would cost.
//
// hi + lo holds 22 to 24 bits of x·2^s ≥ 2^-2, and smaller elements to within 2^-25. `judge` decides from
// counts whether that is as accurate as a float32 product would be. If it is not, or where an element is NaN or
// infinite, it raises a flag; then nothing is split, and another kernel makes the product.
//
// Both operands are read once for all of that (survey.cu), and once more to be split. Where d is in use, or what one
// sweep can tell does not do, lines are counted again here, element by element.
//
// Planes take the place of the floats byte for byte. SEGMENT elements along the contiguous axis become as
// many of hi and then as many of lo, so one warp can convert a segment in place:
//
//     x0 … x63 | x64 … x127 | …     ►     hi0 … hi63 lo0 … lo63 | hi64 … hi127 lo64 … lo127 | …
//
// Rows of X are `ld` floats apart, a multiple of SEGMENT; what lies past column `cols` becomes zero. K_INNER: X is
// contiguous along k, so that its lines are rows; otherwise its lines are columns.
//
// A panel that stays on the device for several products is split once, where it lies, if d is left out: its planes
// are then the same for all of them. What is remembered of it (`Kept`, which is missing for others) says that it holds
// planes. A product for which it would have to be as it was, because of what the other operand holds, is not made,
// and `lost` says so.
//
// Macros: K_INNER.

#include "common/types.cuh"
#include "common/lines.cuh"
#include "common/planes.cuh"

constexpr int THREADS = 256;
constexpr int ROW_THREADS = 512;    // of a block that reduces a row: few blocks at once keep their rows in L2
constexpr int STRIP = 128;          // rows that a thread walks down where columns are reduced
constexpr int MOST_SHIFT = 32;      // the largest |d|
constexpr int ALIKE = 4;            // d that differ by no more than this are left out
constexpr int DROPPED = -(1 << 20);  // d of a k that meets nothing but zeros: its elements count as zeros
constexpr int JUDGES = 512;         // threads of `equilibrate` and of `judge`
constexpr int SEGMENTS = 4;         // of a warp that splits

// How elements are scaled: arrays of d and e, either of which may be missing, and the sign of d.
struct Scale {
    const int* depth;
    const int* exponents;
    int sign;

    __device__ __forceinline__ float of(float x, long long row, int col) const {
        const int e = exponents == nullptr ? 0 : exponents[K_INNER ? row : col];
        if (depth == nullptr) return exponents == nullptr ? x : scaled(x, -e);
        const int d = depth[K_INNER ? col : row];
        return d == DROPPED ? 0.0f : scaled(x, sign * d - e);
    }
};

__device__ __forceinline__ u32 warp_max(u32 x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const u32 other = __shfl_xor_sync(0xffffffff, x, step);
        x = other > x ? other : x;
    }
    return x;
}

template <typename T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffff, x, step);
    return x;
}

// Counts of scaled magnitudes. A thread adds up fewer than 2^17 of them.
struct Counts {
    u64 squares = 0;
    u32 sum = 0, low = 0;

    __device__ __forceinline__ void add(float y) {
        const u32 whole = static_cast<u32>(y);
        sum += whole;
        squares += static_cast<u64>(whole) * whole;
        low += y != 0 && y < LOW;
    }
};

// The largest scaled magnitude of a row, by one block of ROW_THREADS; all threads get it.
__device__ __forceinline__ u32 largest_of_row(int cols, const float* values, long long row, const Scale& scale,
                                              u32* parts) {
    u32 largest = 0;
#pragma unroll 4
    for (int j = threadIdx.x; j < cols; j += ROW_THREADS) {
        const u32 bits = magnitude(scale.of(values[j], row, j));
        largest = bits > largest ? bits : largest;
    }
    largest = warp_max(largest);
    __syncthreads();  // of a row before, nobody reads any more
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < ROW_THREADS / 32; ++w) largest = parts[w] > largest ? parts[w] : largest;
    return largest;
}

// ---- counting again ----------------------------------------------------------------------------------------
//
// From the exponents that were found before, and with d if it is in use.

// Lines that are rows, one by each block at a time. The second sweep finds most of a row in the caches.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
row_lines(int rows, int cols, const float* __restrict__ X, long long ld, const int* __restrict__ depth, int sign,
          Line* __restrict__ lines, int* __restrict__ exponents, State* state, const Kept* __restrict__ kept) {
    constexpr int WARPS = ROW_THREADS / 32;
    __shared__ u32 parts[WARPS], lows[WARPS];
    __shared__ u64 sums[WARPS], squares[WARPS];
    if (state->recount == 0 || holds_planes(kept)) return;
    if (state->shifted == 0) depth = nullptr;
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const float* const values = X + row * ld;
        const u32 largest = largest_of_row(cols, values, row, {depth, exponents, sign}, parts);
        const int exponent = exponents[row] + exponent_of(largest);
        Counts counts;
#pragma unroll 4
        for (int j = threadIdx.x; j < cols; j += ROW_THREADS) {
            const int d = depth == nullptr ? 0 : depth[j];
            if (d != DROPPED) counts.add(fabsf(scaled(values[j], sign * d - exponent)));
        }
        const u64 sum = warp_sum<u64>(counts.sum), square = warp_sum(counts.squares);
        const u32 low = warp_sum(counts.low);
        if (threadIdx.x % 32 == 0) {
            const int warp = threadIdx.x / 32;
            sums[warp] = sum, squares[warp] = square, lows[warp] = low;
        }
        __syncthreads();  // all threads have also read the exponent that is replaced now
        if (threadIdx.x == 0) {
            u64 all = 0, all_squares = 0;
            Line line = {0, 0, largest, 0, 0};
            for (int w = 0; w < WARPS; ++w) all += sums[w], all_squares += squares[w], line.low += lows[w];
            line.sum = static_cast<double>(all), line.squares = static_cast<double>(all_squares);
            lines[row] = line;
            exponents[row] = exponent;
            if (largest >= INFINITE) state->fallback = 1;
        }
    }
}

// Lines that are columns take three launches. Blocks of THREADS columns × STRIP rows, numbered along rows first.
struct Strip {
    int col, first, last;

    __device__ Strip(int rows, int cols) {
        const int across = (cols + THREADS - 1) / THREADS;
        col = blockIdx.x % across * THREADS + threadIdx.x;
        first = blockIdx.x / across * STRIP;
        last = rows - first < STRIP ? rows : first + STRIP;
    }
};

// The largest magnitudes, from 0.
extern "C" __global__ void __launch_bounds__(THREADS)
column_largest(int rows, int cols, const float* __restrict__ X, long long ld, const int* __restrict__ depth, int sign,
               Line* __restrict__ lines, const int* __restrict__ exponents, const State* state,
               const Kept* __restrict__ kept) {
    const Strip strip(rows, cols);
    if (state->recount == 0 || holds_planes(kept) || strip.col >= cols) return;
    const Scale scale = {state->shifted != 0 ? depth : nullptr, exponents, sign};
    u32 found = 0;
#pragma unroll 8
    for (int row = strip.first; row < strip.last; ++row) {
        const u32 bits = magnitude(scale.of(X[row * ld + strip.col], row, strip.col));
        found = bits > found ? bits : found;
    }
    if (found != 0) atomicMax(&lines[strip.col].largest, found);
}

// Exponents from the largest magnitudes; all else of a line is set to 0.
extern "C" __global__ void __launch_bounds__(THREADS)
column_exponents(int cols, Line* __restrict__ lines, int* __restrict__ exponents, State* state,
                 const Kept* __restrict__ kept) {
    const int col = blockIdx.x * THREADS + threadIdx.x;
    if (state->recount == 0 || holds_planes(kept) || col >= cols) return;
    const u32 largest = lines[col].largest;
    if (largest >= INFINITE) state->fallback = 1;
    exponents[col] += exponent_of(largest);
    lines[col] = {};
}

extern "C" __global__ void __launch_bounds__(THREADS)
column_counts(int rows, int cols, const float* __restrict__ X, long long ld, const int* __restrict__ depth, int sign,
              Line* __restrict__ lines, const int* __restrict__ exponents, const State* state,
              const Kept* __restrict__ kept) {
    const Strip strip(rows, cols);
    if (state->recount == 0 || holds_planes(kept) || strip.col >= cols) return;
    const bool shifted = state->shifted != 0;
    const int e = exponents[strip.col];
    Counts counts;
#pragma unroll 8
    for (int row = strip.first; row < strip.last; ++row) {
        const int d = shifted ? depth[row] : 0;
        if (d != DROPPED) counts.add(fabsf(scaled(X[row * ld + strip.col], sign * d - e)));
    }
    Line& line = lines[strip.col];
    if (counts.sum != 0) {
        atomicAdd(&line.sum, static_cast<double>(counts.sum));
        atomicAdd(&line.squares, static_cast<double>(counts.squares));
    }
    if (counts.low != 0) atomicAdd(&line.low, counts.low);
}

// ---- depth -------------------------------------------------------------------------------------------------

// The largest x of a block; `parts` is shared memory for an integer of each warp.
__device__ __forceinline__ int block_max(int x, int* parts) {
    __syncthreads();
    for (int step = 16; step > 0; step /= 2) {
        const int other = __shfl_xor_sync(0xffffffff, x, step);
        x = other > x ? other : x;
    }
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
#pragma unroll 1
    for (int w = 0; w < JUDGES / 32; ++w) x = parts[w] > x ? parts[w] : x;
    return x;
}

// d from the largest elements of each k on both sides; whether it is used. One block. What all d have in common
// makes no difference and is left out.
extern "C" __global__ void __launch_bounds__(JUDGES)
equilibrate(int k, const u32* __restrict__ a, const u32* __restrict__ b, int* __restrict__ depth, State* state) {
    constexpr int NONE = -1000;
    __shared__ int parts[JUDGES / 32];
    const auto log2_of = [](u32 bits) { return bits == 0 ? NONE : floor_log2(bits); };
    const auto raise = [](int& most, int x) { most = x > most ? x : most; };
    int most = NONE, least = NONE;                    // of d, of −d
    int a_paired = NONE, b_paired = NONE;             // largest elements that meet others
    int a_alone = NONE, b_alone = NONE;               // largest elements that meet zeros only
#pragma unroll 4
    for (int i = threadIdx.x; i < k; i += JUDGES) {
        const int x = log2_of(a[i]), y = log2_of(b[i]);
        if (x != NONE && y != NONE) {
            const int d = (y - x) >> 1;
            raise(most, d), raise(least, -d), raise(a_paired, x), raise(b_paired, y);
        } else {
            raise(a_alone, x), raise(b_alone, y);
        }
    }
    most = block_max(most, parts), least = block_max(least, parts);
    a_paired = block_max(a_paired, parts), b_paired = block_max(b_paired, parts);
    a_alone = block_max(a_alone, parts), b_alone = block_max(b_alone, parts);
    const int middle = (most - least) >> 1;
#pragma unroll 4
    for (int i = threadIdx.x; i < k; i += JUDGES) {
        const int d = ((log2_of(b[i]) - log2_of(a[i])) >> 1) - middle;
        depth[i] = a[i] == 0 || b[i] == 0 ? DROPPED : d < -MOST_SHIFT ? -MOST_SHIFT : d > MOST_SHIFT ? MOST_SHIFT : d;
    }
    const bool shifted = most + least > ALIKE || a_alone > a_paired + ALIKE || b_alone > b_paired + ALIKE;
    if (threadIdx.x == 0 && shifted) state->shifted = state->recount = 1;
}

// ---- the decision ------------------------------------------------------------------------------------------

// Extremes over the lines of one operand, but for lines of zeros.
struct Extremes {
    float mass = 1e30f;   // least Σ|x| ÷ largest |x|
    float terms = 1e30f;  // least (Σ|x|)² ÷ Σx²: how many terms a sum effectively has
    float low = 0;        // most low elements

    Extremes() = default;
    __device__ explicit Extremes(const Surveyed& found)
        : mass(__int_as_float(INFINITE - found.mass)), terms(__int_as_float(INFINITE - found.terms)), low(found.low) {}

    __device__ Surveyed surveyed() const {
        return {INFINITE - __float_as_int(mass), INFINITE - __float_as_int(terms), static_cast<u32>(low)};
    }
};

__device__ __forceinline__ Extremes extremes(int count, const Line* lines, int* parts) {
    Extremes found;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += JUDGES) {
        const Line line = lines[i];
        if (line.sum == 0) continue;
        const float sum = static_cast<float>(line.sum);
        found.mass = fminf(found.mass, sum / (2 << TOP));
        found.terms = fminf(found.terms, sum / static_cast<float>(line.squares) * sum);
        found.low = fmaxf(found.low, static_cast<float>(line.low));
    }
    // Positive floats are ordered like their bits.
    found.mass = __int_as_float(-block_max(-__float_as_int(found.mass), parts));
    found.terms = __int_as_float(-block_max(-__float_as_int(found.terms), parts));
    found.low = __int_as_float(block_max(__float_as_int(found.low), parts));
    return found;
}

// Raises the flag where a float32 product might be more accurate; `terms` and `share` are thresholds. By what the survey
// has found, it has lines counted again instead. Of a panel that holds planes, what is remembered is what counts. One
// block.
//
// Low elements: a row of op(A) with L of them, at least LOW elsewhere, meets a column of op(B) with
// Σ|b| ≥ M·max|b|. The low elements carry errors of up to 2^-25 each, so the error of the sum is at most
// 2^-25·Σ_low|b|, and Σ|a||b| is at least LOW·Σ_others|b|. With Σ_low|b| ≤ L·max|b|, the error is below
// 2^-22·L/(M − L) of Σ|a||b|, wherever the zeros of the column lie: 2^-23.6 for L = M/4.
//
// Few terms: each product keeps 22 to 24 bits, float32 all 24. A float32 sum loses more than that by its roundings
// if it has many terms of similar size, and less if a few of them dominate it, or most are zeros.
extern "C" __global__ void __launch_bounds__(JUDGES)
judge(int m, int n, int k, const Line* __restrict__ a, const Line* __restrict__ b, float share, float terms,
      int surveyed, State* state, const Kept* __restrict__ a_kept, const Kept* __restrict__ b_kept) {
    __shared__ int parts[JUDGES / 32];
    if (!surveyed && state->recount == 0) return;
    const int other = b != a;
    const Extremes x = surveyed || holds_planes(a_kept) ? Extremes(state->sides[0]) : extremes(m, a, parts);
    const Extremes y = surveyed || holds_planes(b_kept) ? Extremes(state->sides[other]) : extremes(n, b, parts);
    const bool fits = x.low <= share * y.mass && y.low <= share * x.mass && x.terms * y.terms >= terms * k;
    __syncthreads();  // all threads have read what was found before
    if (threadIdx.x != 0) return;
    if (!fits) (surveyed ? state->recount : state->fallback) = 1;
    if (!surveyed) state->sides[0] = x.surveyed(), state->sides[other] = y.surveyed();
}

// ---- the split ---------------------------------------------------------------------------------------------

// Splits SEGMENTS segments from number `first` on, all of which the warp reads before it writes. X has `across` in a row.
__device__ __forceinline__ void split_segments(int rows, int cols, const float* X, long long ld, const Scale& scale,
                                               u32* planes, int across, long long first) {
    const int lane = threadIdx.x % 32;
    long long places[SEGMENTS];  // of a thread's two elements
    Floats<2> pairs[SEGMENTS];
    long long row = first / across;
    int col = static_cast<int>(first % across) * SEGMENT + 2 * lane;
#pragma unroll
    for (int s = 0; s < SEGMENTS; ++s) {
        places[s] = row < rows ? row * ld + col : -1;
        pairs[s] = {};
        if (row < rows && col + 2 <= cols) pairs[s] = *reinterpret_cast<const Floats<2>*>(X + places[s]);
        else if (row < rows && col < cols) pairs[s].x[0] = X[places[s]];
        col += SEGMENT;
        if (col >= across * SEGMENT) col = 2 * lane, ++row;
    }
    row = first / across;
    col = static_cast<int>(first % across) * SEGMENT + 2 * lane;
#pragma unroll
    for (int s = 0; s < SEGMENTS; ++s) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (row < rows && col + i < cols) pairs[s].x[i] = scale.of(pairs[s].x[i], row, col + i);
        col += SEGMENT;
        if (col >= across * SEGMENT) col = 2 * lane, ++row;
    }
    __syncwarp();  // all segments have been read
#pragma unroll
    for (int s = 0; s < SEGMENTS; ++s) {
        u32 hi = 0, lo = 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float x = pairs[s].x[i];
            unsigned short h, l;
            float back;
            asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
            asm("cvt.f32.f16 %0, %1;" : "=f"(back) : "h"(h));
            asm("cvt.rn.f16.f32 %0, %1;" : "=h"(l) : "f"(x - back));
            hi |= static_cast<u32>(h) << 16 * i;
            lo |= static_cast<u32>(l) << 16 * i;
        }
        if (places[s] < 0) continue;
        u32* const to = planes + (places[s] - lane);  // a float's place holds two halves
        to[0] = hi;
        to[SEGMENT / 2] = lo;
    }
}

// X and `planes` may be the same memory. Any number of blocks, each of whose warps takes SEGMENTS segments at a time.
extern "C" __global__ void __launch_bounds__(THREADS)
split(int rows, int cols, const float* X, long long ld, const int* __restrict__ depth, int sign,
      const int* __restrict__ exponents, u32* planes, const State* __restrict__ state, const Kept* __restrict__ kept,
      volatile u32* lost) {
    if (kept != nullptr) {
        const bool falls_back = state->fallback != 0, shifted = state->shifted != 0;
        if (blockIdx.x == 0 && threadIdx.x == 0 && (falls_back ? kept->made != 0 : shifted)) *lost = 1;
        if (shifted || kept->made != 0) return;
    }
    if (state->fallback != 0) return;
    const Scale scale = {state->shifted != 0 ? depth : nullptr, exponents, sign};
    const int across = (cols + SEGMENT - 1) / SEGMENT;
    const long long segments = static_cast<long long>(rows) * across, stride = gridDim.x * (THREADS / 32) * SEGMENTS;
    const long long begin = (blockIdx.x * static_cast<long long>(THREADS / 32) + threadIdx.x / 32) * SEGMENTS;
    for (long long first = begin; first < segments; first += stride)
        split_segments(rows, cols, X, ld, scale, planes, across, first);
}

// Remembers of panels that stay that they hold planes now, and tells the host: `known` gets the panel's number. One thread.
extern "C" __global__ void keep(const State* __restrict__ state, Kept* a, Kept* b, volatile u32* a_known, u32 a_number,
                                volatile u32* b_known, u32 b_number) {
    if (state->fallback != 0 || state->shifted != 0) return;
    if (a != nullptr) *a = {1, state->sides[0]}, *a_known = a_number;
    if (b != nullptr) *b = {1, state->sides[1]}, *b_known = b_number;
}
