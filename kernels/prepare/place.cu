// Y ← (X − r − c)·s·t: a piece of a stored matrix on its way into a panel, in the panel's type. Missing elements
// become `fill`.
//
//        X as stored                                     Y: the place of the piece in the panel
//       ┌───────────┐   convert, subtract, scale        ┌───────────┐
//       │  32 × 32  │ ────────────────────────────────► │           │      or, with TURNED, its transpose,
//       └───────────┘   a warp has 32 columns of a row  └───────────┘      by way of shared memory
//
// Shifts are sums of two numbers (`high`, `low`), because one alone would lose digits where it is large beside what
// remains. Each vector may be null. The order of the operations is that of engine/transform.py, so that results
// are the same, bit by bit. There is no fused multiply-add: no product comes before a sum.
//
// Macros: SOURCE, type of X (unsigned short for float16, with HALF); REAL, type of Y; COMPLEX, whether Y has
// imaginary parts, which become 0; TURNED. Launch: blocks of 32×8 threads, one for each 32×32 tile of X, in one
// dimension.

constexpr int TILE = 32, ROWS = 8;
constexpr int EACH = TILE / ROWS;  // rows of a thread: so many loads are under way at once

using Real = REAL;

#if HALF
using Source = float;
// Every float16 is a float32. Moved to its new place, the exponent is too small by 112, also that of a subnormal
// number.
__device__ __forceinline__ float loaded(const SOURCE* at) {
    const unsigned bits = *at, size = bits & 0x7fffu;
    union {
        unsigned bits;
        float number;
    } found;
    found.bits = size << 13;
    if (size < 0x7c00u) found.number *= 5.192296858534827628530496329220096e33f;  // 2^112
    else found.bits |= 0x7f800000u;  // infinity and NaN
    found.bits |= (bits & 0x8000u) << 16;
    return found.number;
}
#else
using Source = SOURCE;
__device__ __forceinline__ Source loaded(const SOURCE* at) { return *at; }
#endif

#if COMPLEX
struct alignas(2 * sizeof(Real)) Panel {
    Real re, im;
};
__device__ __forceinline__ Panel stored(Real x) { return {x, 0}; }
#else
using Panel = Real;
__device__ __forceinline__ Panel stored(Real x) { return x; }
#endif

// What is missing: nothing, elements equal to a number, NaN.
constexpr int EQUAL = 1, IS_NAN = 2;

__device__ __forceinline__ Real number(const Real* at, long long index, Real otherwise) {
    return at ? at[index] : otherwise;
}

extern "C" __global__ void __launch_bounds__(TILE * ROWS)
place(long long rows, long long cols, const SOURCE* __restrict__ X, long long ldx, Panel* __restrict__ Y, long long ldy,
      const Real* __restrict__ row_high, const Real* __restrict__ row_low, const Real* __restrict__ row_scale,
      const Real* __restrict__ col_high, const Real* __restrict__ col_low, const Real* __restrict__ col_scale, int gone,
      Source missing, Real fill) {
    const unsigned across = static_cast<unsigned>((cols + TILE - 1) / TILE);
    const long long first_row = static_cast<long long>(blockIdx.x / across) * TILE;
    const long long first_col = static_cast<long long>(blockIdx.x % across) * TILE;
    const long long row = first_row + threadIdx.y, col = first_col + threadIdx.x;
    const long long column = col < cols ? col : cols - 1;  // threads beyond an edge do the last one's work again
    long long at[EACH];
    Source x[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        at[i] = row + i * ROWS < rows ? row + i * ROWS : rows - 1;
        x[i] = loaded(X + at[i] * ldx + column);
    }
    const Real high = number(col_high, column, 0), low = number(col_low, column, 0);
    const Real scale = number(col_scale, column, 1);
    Real y[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        Real changed = static_cast<Real>(x[i]);
        changed -= number(row_high, at[i], 0);
        changed -= number(row_low, at[i], 0);
        changed -= high;
        changed -= low;
        changed *= number(row_scale, at[i], 1);
        changed *= scale;
        const bool is_missing = (gone == EQUAL && x[i] == missing) || (gone == IS_NAN && x[i] != x[i]);
        y[i] = is_missing ? fill : changed;
    }
#if TURNED
    __shared__ Real tile[TILE][TILE + 1];
#pragma unroll
    for (int i = 0; i < EACH; ++i) tile[threadIdx.y + i * ROWS][threadIdx.x] = y[i];
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.y; i < TILE; i += ROWS) {
        if (first_col + i < cols && first_row + threadIdx.x < rows)
            Y[(first_col + i) * ldy + first_row + threadIdx.x] = stored(tile[threadIdx.x][i]);
    }
#else
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        if (row + i * ROWS < rows && col < cols) Y[(row + i * ROWS) * ldy + col] = stored(y[i]);
    }
#endif
}
