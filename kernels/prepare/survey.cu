// Finds out by one sweep what split.cu must know of a float32 operand: for each line, a row of op(A) or a column of op(B),
// its exponent, its sums, and how many of its elements are low; and the largest element of every k.
//
// How large the other elements of a line are can only be said when its largest is known. So each part of a line, up to
// PART elements along k, is counted beside its own largest element, while it is in registers. Sums of parts are added up
// without any scale. Where the largest elements of a line's parts differ by no more than SPREAD orders, these sums are
// exact in float64, so that their order makes no difference, and elements that are low in the line are below LOW·2^SPREAD
// in their part. Else split.cu counts lines again.
//
// X is as in split.cu: rows `ld` floats apart, with elements past column `cols` that do not count. K_INNER: X is
// contiguous along k, so that its lines are rows; otherwise its lines are columns.
//
// A panel that stays and was split holds planes, and is not looked at again: `kept`, which is missing for others.
//
// Macros: K_INNER.

#include "common/types.cuh"
#include "common/lines.cuh"
#include "common/planes.cuh"

constexpr int THREADS = 256;  // of a block that settles
constexpr int SURVEYORS = 512;  // of a block that surveys
constexpr int PART = 256;  // elements of a part of a line
constexpr int SPREAD = 3;  // binary orders by which the largest elements of parts may differ

// 2^e, which is in range: it scales sums of floats, or of their squares.
__device__ __forceinline__ double power_of_two(int e) { return __longlong_as_double((1023LL + e) << 52); }

// A thread's elements: rows of a tile as FOURS times four neighbours, and zeros past the edges.
template <int ROWS, int FOURS>
struct Held {
    float x[ROWS][4 * FOURS];

    // `from`: the first of them, of so many rows and columns that are there.
    __device__ __forceinline__ void load(const float* from, long long ld, int rows, int cols) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r, from += ld) {
#pragma unroll
            for (int i = 0; i < FOURS; ++i) {
                const int there = r < rows ? cols - 128 * i : 0;
                Floats<4> four = {};
                if (there >= 4) four = *reinterpret_cast<const Floats<4>*>(from + 128 * i);
#pragma unroll
                for (int e = 0; e < 4; ++e) x[r][4 * i + e] = there < 4 && e < there ? from[128 * i + e] : four.x[e];
            }
        }
    }
};

// Sums of the magnitudes of a part, scaled and rounded down, and of their squares, in two words; and the elements that
// are not zero and below LOW·2^SPREAD = 1, whose integers are 0.
struct PartCounts {
    u32 sum, low, squares, high_squares;

    // Four elements, scaled by 2^-exponent.
    __device__ __forceinline__ void add(float a, float b, float c, float d, int exponent) {
        static_assert(LOW * (1 << SPREAD) == 1, "low elements of a part are those below 1");
        u32 all = 0;
        for (float x : {a, b, c, d}) {
            const float y = fabsf(scaled(x, -exponent));
            const u32 whole = static_cast<u32>(y);
            sum += whole, all += whole * whole;
            low += whole == 0 && y != 0;
        }
        squares += all & 0xffff, high_squares += all >> 16;
    }
};

// What parts of a line add to it, from zeros.
struct Found {
    double sum, squares;
    u32 largest, unlike, low;

    // A part with this largest element, which is not 0; `counts` are scaled for it.
    __device__ __forceinline__ void add(u32 top, const PartCounts& counts) {
        const int exponent = exponent_of(top);
        sum += counts.sum * power_of_two(exponent);
        squares += (counts.squares + 65536.0 * counts.high_squares) * power_of_two(2 * exponent);
        largest = top > largest ? top : largest;
        unlike = ~top > unlike ? ~top : unlike;
        low += counts.low;
    }
    __device__ __forceinline__ void put(Line& line) const {
        if (largest == 0) return;
        atomicAdd(&line.sum, sum), atomicAdd(&line.squares, squares);
        atomicMax(&line.largest, largest), atomicMax(&line.unlike, unlike);
        if (low != 0) atomicAdd(&line.low, low);
    }
};

#if K_INNER
// Any number of blocks, which take one tile after another of 64 rows × PART columns, numbered along rows first; a warp takes
// four of the rows. `lines` and `largest`, of every k, begin with zeros; `largest` may be missing.
extern "C" __global__ void __launch_bounds__(SURVEYORS, 2)
survey(int rows, int cols, const float* __restrict__ X, long long ld, Line* __restrict__ lines,
       u32* __restrict__ largest, const Kept* __restrict__ kept) {
    if (holds_planes(kept)) return;
    constexpr int ROWS = 4, FOURS = PART / 128, HIGH = SURVEYORS / 32 * ROWS;
    __shared__ u32 of_columns[PART];
    const int across = (cols + PART - 1) / PART, tiles = across * ((rows + HIGH - 1) / HIGH), lane = threadIdx.x % 32;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int left = tile % across * PART, row = tile / across * HIGH + threadIdx.x / 32 * ROWS;
        Held<ROWS, FOURS> held;
        held.load(X + row * ld + left + 4 * lane, ld, rows - row, cols - left - 4 * lane);
        if (threadIdx.x < PART) of_columns[threadIdx.x] = 0;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            u32 top = 0;
#pragma unroll
            for (int e = 0; e < 4 * FOURS; ++e) top = magnitude(held.x[r][e]) > top ? magnitude(held.x[r][e]) : top;
            top = __reduce_max_sync(0xffffffff, top);
            if (top == 0) continue;  // of the whole warp
            PartCounts counts = {};
            const int exponent = exponent_of(top);
            const auto& x = held.x[r];
#pragma unroll
            for (int e = 0; e < 4 * FOURS; e += 4) counts.add(x[e], x[e + 1], x[e + 2], x[e + 3], exponent);
            for (u32* count : {&counts.sum, &counts.low, &counts.squares, &counts.high_squares})
                *count = __reduce_add_sync(0xffffffff, *count);
            if (lane == 0) {
                Found found = {};
                found.add(top, counts);
                found.put(lines[row + r]);
            }
        }
        if (largest == nullptr) continue;
        __syncthreads();
#pragma unroll
        for (int e = 0; e < 4 * FOURS; ++e) {
            u32 top = 0;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) top = magnitude(held.x[r][e]) > top ? magnitude(held.x[r][e]) : top;
            if (top != 0) atomicMax(&of_columns[e / 4 * 128 + 4 * lane + e % 4], top);
        }
        __syncthreads();
        if (threadIdx.x < PART && of_columns[threadIdx.x] != 0)
            atomicMax(&largest[left + threadIdx.x], of_columns[threadIdx.x]);
    }
}
#else
// Any number of blocks, which take one tile after another of PART rows × 256 columns, numbered along rows first, and walk
// down it; a warp holds four rows × 128 columns at a time. `lines` and `largest`, of every k, begin with zeros; `largest`
// may be missing.
extern "C" __global__ void __launch_bounds__(SURVEYORS, 2)
survey(int rows, int cols, const float* __restrict__ X, long long ld, Line* __restrict__ lines,
       u32* __restrict__ largest, const Kept* __restrict__ kept) {
    if (holds_planes(kept)) return;
    constexpr int ROWS = 4, WIDE = 256, HIGH = SURVEYORS / 64 * ROWS;
    // Of columns, in the order of lanes: lane l has columns 4·l to 4·l + 3 of a warp's, at l, 32 + l, 64 + l and 96 + l.
    __shared__ u32 tops[WIDE];
    __shared__ PartCounts parts[WIDE];
    const int across = (cols + WIDE - 1) / WIDE, tiles = across * ((rows + PART - 1) / PART);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int left = tile % across * WIDE, first = tile / across * PART;
        const int last = rows - first < PART ? rows : first + PART, half = warp % 2 * 128;
        const int own = threadIdx.x % WIDE;  // of the first threads, the column that they keep
        Found found = {};
        for (int high = first; high < last; high += HIGH) {
            const int row = high + warp / 2 * ROWS, col = left + half + 4 * lane;
            Held<ROWS, 1> held;
            held.load(X + row * ld + col, ld, rows - row, cols - col);
            if (threadIdx.x < WIDE) tops[own] = 0, parts[own] = {};
            __syncthreads();
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                u32 top = 0;
#pragma unroll
                for (int r = 0; r < ROWS; ++r) top = magnitude(held.x[r][e]) > top ? magnitude(held.x[r][e]) : top;
                if (top != 0) atomicMax(&tops[half + 32 * e + lane], top);
            }
            if (largest != nullptr) {
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    u32 top = 0;
#pragma unroll
                    for (int e = 0; e < 4; ++e) top = magnitude(held.x[r][e]) > top ? magnitude(held.x[r][e]) : top;
                    top = __reduce_max_sync(0xffffffff, top);
                    if (lane == 0 && top != 0) atomicMax(&largest[row + r], top);
                }
            }
            __syncthreads();
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int at = half + 32 * e + lane;
                const auto& x = held.x;
                PartCounts counts = {};
                counts.add(x[0][e], x[1][e], x[2][e], x[3][e], exponent_of(tops[at]));
                atomicAdd(&parts[at].sum, counts.sum), atomicAdd(&parts[at].squares, counts.squares);
                atomicAdd(&parts[at].high_squares, counts.high_squares);
                if (counts.low != 0) atomicAdd(&parts[at].low, counts.low);
            }
            __syncthreads();
            if (threadIdx.x < WIDE && tops[own] != 0) found.add(tops[own], parts[own]);
        }
        if (threadIdx.x < WIDE) found.put(lines[left + own / 128 * 128 + own % 32 * 4 + own % 128 / 32]);
    }
}
#endif

// Exponents of all lines of both operands, m and then n; blocks begin anew at those of the second. Largest elements
// become 0, which is where they begin if they are found again. Those of panels that hold planes stay.
extern "C" __global__ void __launch_bounds__(THREADS)
settle(int m, int n, Line* __restrict__ lines, int* __restrict__ of_a, int* __restrict__ of_b, State* state,
       const Kept* __restrict__ a_kept, const Kept* __restrict__ b_kept) {
    const int blocks_of_a = (m + THREADS - 1) / THREADS, side = static_cast<int>(blockIdx.x) >= blocks_of_a;
    const int i = (blockIdx.x - (side ? blocks_of_a : 0)) * THREADS + threadIdx.x;
    int* const exponents = side ? of_b : of_a;
    const Kept* const kept = side ? b_kept : a_kept;
    if (holds_planes(kept)) {
        if (i == 0) state->sides[side] = kept->found;
        return;
    }
    Surveyed found = {0, 0, 0};
    if (i < (side ? n : m)) {
        Line& line = lines[(side ? m : 0) + i];
        const u32 largest = line.largest;
        const int exponent = exponent_of(largest);
        exponents[i] = exponent;
        if (largest >= INFINITE) {
            state->fallback = 1;
        } else if (largest != 0) {
            if (floor_log2(largest) - floor_log2(~line.unlike) > SPREAD) state->recount = 1;
            const double sum = line.sum * power_of_two(-exponent), squares = line.squares * power_of_two(-2 * exponent);
            found.mass = INFINITE - __float_as_int(static_cast<float>(sum / (2 << TOP)));
            found.terms = INFINITE - __float_as_int(static_cast<float>(sum / squares * sum));
            found.low = line.low;
            line.largest = 0;
        }
    }
    Surveyed& all = state->sides[side];
    found.mass = __reduce_max_sync(0xffffffff, found.mass);
    found.terms = __reduce_max_sync(0xffffffff, found.terms);
    found.low = __reduce_max_sync(0xffffffff, found.low);
    if (threadIdx.x % 32 == 0) {
        atomicMax(&all.mass, found.mass), atomicMax(&all.terms, found.terms), atomicMax(&all.low, found.low);
    }
}
