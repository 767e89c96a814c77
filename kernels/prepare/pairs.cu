// Exact scores of pairs of rows: sums in float64 over the products of their elements, or over the squares of their
// differences. Which rows of R belong to a row of L is known from the product in float32 (best.cu).
//
//     row i of L  ┌─────────────────┐          ┌─ columns[i] ─┐
//                 └─────────────────┘     ·    │ 7  92  −1  3 │  rows of R      →   sums[i], one number for each
//                                              └──────────────┘
//
// Every sum is made in the same order, so that equal rows have equal scores. A warp makes a sum: its lanes have every
// 32nd element.
//
// Macros: LEFT and RIGHT, types of the elements of L and R (Half for float16). Rows lie one behind the other.

constexpr int THREADS = 256, WARP = 32, WARPS = THREADS / WARP;

struct Half {
    unsigned short bits;
};

using i64 = long long;

template <class T>
__device__ __forceinline__ double wide(T x) {
    return static_cast<double>(x);
}

__device__ __forceinline__ double wide(Half x) {
    float found;
    asm("cvt.f32.f16 %0, %1;" : "=f"(found) : "h"(x.bits));
    return static_cast<double>(found);
}

__device__ __forceinline__ double sum_of_lanes(double x) {
    for (int apart = WARP / 2; apart; apart /= 2) x += __shfl_xor_sync(~0u, x, apart);
    return x;
}

// The squared norm of a row, which a warp computes.
template <class T>
__device__ __forceinline__ double squared_norm(const T* __restrict__ x, i64 depth, int lane) {
    double sum = 0;
#pragma unroll 8
    for (i64 i = lane; i < depth; i += WARP) {
        const double one = wide(x[i]);
        sum += one * one;
    }
    return sum_of_lanes(sum);
}

// Launch: a block of THREADS threads for each row of L. The sum of no pair (a column of −1) is 0. `norms`, which may be
// null: the squared norm of each row of L.
extern "C" __global__ void __launch_bounds__(THREADS)
pairs(int keep, i64 depth, const LEFT* __restrict__ left, const RIGHT* __restrict__ right,
      const int* __restrict__ columns, int differences, double* __restrict__ sums, double* __restrict__ norms) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i64 row = blockIdx.x;
    const LEFT* const x = left + row * depth;
    if (norms && warp == WARPS - 1) {
        const double norm = squared_norm(x, depth, lane);
        if (lane == 0) norms[row] = norm;
    }
    for (int pair = warp; pair < keep; pair += WARPS) {
        const i64 at = row * keep + pair, column = columns[at];
        double sum = 0;
        if (column >= 0) {
            const RIGHT* const y = right + column * depth;
            if (differences) {
#pragma unroll 4
                for (i64 i = lane; i < depth; i += WARP) {
                    const double apart = wide(x[i]) - wide(y[i]);
                    sum += apart * apart;
                }
            } else {
#pragma unroll 4
                for (i64 i = lane; i < depth; i += WARP) sum += wide(x[i]) * wide(y[i]);
            }
        }
        sum = sum_of_lanes(sum);
        if (lane == 0) sums[at] = sum;
    }
}

// The squared norm of each of `rows` rows of R. Launch: blocks of THREADS threads, a warp for each row.
extern "C" __global__ void __launch_bounds__(THREADS)
squares(i64 rows, i64 depth, const RIGHT* __restrict__ right, double* __restrict__ found) {
    const int lane = threadIdx.x % WARP;
    const i64 row = blockIdx.x * static_cast<i64>(WARPS) + threadIdx.x / WARP;
    if (row >= rows) return;
    const double norm = squared_norm(right + row * depth, depth, lane);
    if (lane == 0) found[row] = norm;
}

// Sums of the columns of R over some of its rows, of which those count whose squared norm is finite: part blockIdx.y of
// gridDim.y parts goes to row blockIdx.y of `found`. Launch: THREADS columns in a block.
extern "C" __global__ void __launch_bounds__(THREADS)
totals(i64 rows, i64 depth, const RIGHT* __restrict__ right, const double* __restrict__ norms,
       double* __restrict__ found) {
    const i64 column = blockIdx.x * static_cast<i64>(THREADS) + threadIdx.x;
    if (column >= depth) return;
    const i64 each = (rows + gridDim.y - 1) / gridDim.y, first = blockIdx.y * each;
    const i64 last = first + each < rows ? first + each : rows;
    double sum = 0;
#pragma unroll 8
    for (i64 row = first; row < last; ++row) {
        const double x = wide(right[row * depth + column]);
        // Infinity and NaN minus themselves are NaN.
        if (norms[row] - norms[row] == 0) sum += x;
    }
    found[blockIdx.y * depth + column] = sum;
}
