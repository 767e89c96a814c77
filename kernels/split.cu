// x = 2^e·(hi + lo): float32 as two float16, for the tensor cores (wgmma.cu, PRODUCTS = 3).
//
// e is common to a row of op(A), or a column of op(B), and brings its largest element to 2^14 … 2^15. hi and
// lo hold 11 significant bits each, so 22 bits of x are kept, of elements far below the largest fewer: below
// 2^-28 of it hi itself is subnormal. More of such elements than `limit`, or a NaN or Inf, raise a
// flag; then nothing is split, and the product is made in plain float32 instead.
//
// Planes take the place of the floats byte for byte. SEGMENT elements along the contiguous axis become as
// many of hi and then as many of lo, so one warp can convert a segment in place:
//
//     x0 … x63 | x64 … x127 | …     ►     hi0 … hi63 lo0 … lo63 | hi64 … hi127 lo64 … lo127 | …
//
// Rows of X are `ld` floats apart, a multiple of SEGMENT; what lies past column `cols` becomes zero. The
// exponents belong to rows (K_INNER: X is contiguous along k) or to columns.
//
// Macros: K_INNER.

using u32 = unsigned;

constexpr int SEGMENT = 64;
constexpr int THREADS = 256;
constexpr int STRIP = 128;  // rows a thread walks down where columns are reduced
constexpr int NOT_FINITE = 255;  // the exponent field of NaN and Inf
constexpr int TOP = 127 + 14;

// From the bits of the largest magnitude to e. Zeros need none; 2^-e must be a normal float.
__device__ __forceinline__ int exponent_of(u32 bits) {
    const int e = static_cast<int>(bits >> 23) - TOP;
    return bits == 0 ? 0 : e < -126 ? -126 : e;
}

__device__ __forceinline__ float power(int e) { return __int_as_float((127 + e) << 23); }

__device__ __forceinline__ u32 magnitude(float x) { return __float_as_int(x) & 0x7fffffff; }

// Whether x loses bits that float32 would keep: hi is subnormal.
__device__ __forceinline__ bool is_low(float x, u32 largest) {
    const u32 bits = magnitude(x);
    return bits != 0 && (bits >> 23) + 28 < (largest >> 23);
}

__device__ __forceinline__ void report(u32 found, u32* low, u32 limit, u32* flag) {
    if (found != 0 && atomicAdd(low, found) + found > limit) *flag = 1;
}

__device__ __forceinline__ u32 warp_sum(u32 x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffff, x, step);
    return x;
}

__device__ __forceinline__ u32 warp_max(u32 x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const u32 other = __shfl_xor_sync(0xffffffff, x, step);
        x = other > x ? other : x;
    }
    return x;
}

// `low` counts all of X's, from 0. One block a row.
extern "C" __global__ void __launch_bounds__(THREADS)
row_exponents(int cols, const float* __restrict__ X, long long ld, int* __restrict__ exponents, u32* low,
              u32 limit, u32* flag) {
    __shared__ u32 parts[THREADS / 32];
    const float* const row = X + blockIdx.x * ld;
    u32 largest = 0;
    for (int j = threadIdx.x; j < cols; j += THREADS) {
        const u32 bits = magnitude(row[j]);
        largest = bits > largest ? bits : largest;
    }
    largest = warp_max(largest);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) largest = parts[w] > largest ? parts[w] : largest;

    u32 found = 0;
    for (int j = threadIdx.x; j < cols; j += THREADS) found += is_low(row[j], largest);
    found = warp_sum(found);
    if (threadIdx.x % 32 == 0) report(found, low, limit, flag);
    if (threadIdx.x == 0) {
        exponents[blockIdx.x] = exponent_of(largest);
        if (largest >> 23 == NOT_FINITE) *flag = 1;
    }
}

// Columns take two launches: the bits of every column's largest magnitude, from 0; then the rest.
// Blocks of THREADS columns × STRIP rows.
extern "C" __global__ void __launch_bounds__(THREADS)
column_largest(int rows, int cols, const float* __restrict__ X, long long ld, u32* __restrict__ largest) {
    const int col = blockIdx.x * THREADS + threadIdx.x;
    const int first = blockIdx.y * STRIP, last = first + STRIP < rows ? first + STRIP : rows;
    if (col >= cols) return;
    u32 found = 0;
#pragma unroll 8
    for (int row = first; row < last; ++row) {
        const u32 bits = magnitude(X[row * ld + col]);
        found = bits > found ? bits : found;
    }
    if (found != 0) atomicMax(&largest[col], found);
}

extern "C" __global__ void __launch_bounds__(THREADS)
column_exponents(int rows, int cols, const float* __restrict__ X, long long ld, const u32* __restrict__ largest,
                 int* __restrict__ exponents, u32* low, u32 limit, u32* flag) {
    const int col = blockIdx.x * THREADS + threadIdx.x;
    const int first = blockIdx.y * STRIP, last = first + STRIP < rows ? first + STRIP : rows;
    u32 found = 0;
    if (col < cols) {
        const u32 top = largest[col];
        if (blockIdx.y == 0) {
            exponents[col] = exponent_of(top);
            if (top >> 23 == NOT_FINITE) *flag = 1;
        }
#pragma unroll 8
        for (int row = first; row < last; ++row) found += is_low(X[row * ld + col], top);
    }
    found = warp_sum(found);
    if (threadIdx.x % 32 == 0) report(found, low, limit, flag);
}

// X and `planes` may be the same memory. One warp a segment; a block takes THREADS / 32 of them.
extern "C" __global__ void __launch_bounds__(THREADS)
split(int rows, int cols, const float* X, long long ld, const int* __restrict__ exponents, u32* planes,
      const u32* __restrict__ flag) {
    if (*flag != 0) return;
    const int across = (cols + SEGMENT - 1) / SEGMENT, lane = threadIdx.x % 32;
    const long long segment = blockIdx.x * static_cast<long long>(THREADS / 32) + threadIdx.x / 32;
    const long long row = segment / across;
    if (row >= rows) return;
    const int col = static_cast<int>(segment % across) * SEGMENT + 2 * lane;
    const long long at = row * ld + col;

    u32 hi = 0, lo = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (col + i < cols) {
            const float x = X[at + i] * power(-exponents[K_INNER ? row : col + i]);
            unsigned short h, l;
            float back;
            asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
            asm("cvt.f32.f16 %0, %1;" : "=f"(back) : "h"(h));
            asm("cvt.rn.f16.f32 %0, %1;" : "=h"(l) : "f"(x - back));
            hi |= static_cast<u32>(h) << 16 * i;
            lo |= static_cast<u32>(l) << 16 * i;
        }
    }
    __syncwarp();  // the whole segment has been read
    u32* const to = planes + (at - 2 * lane) + lane;  // a float's place holds two halves
    to[0] = hi;
    to[SEGMENT / 2] = lo;
}
