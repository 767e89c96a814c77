// C ← α·A·B + β·C, one thread an element: the first rung of the ladder, twice.
//
// A thread walks along its row of A and down its column of B, 2·k loads for one element of C:
//
//                                b       k×n
//                                ┌───┬─┬───┐
//                                │   │↓│   │
//                                │   │↓│   │
//                  a  m×k        └───┴─┴───┘
//                 ┌─────────┐    ┌─────────┐
//                 │→→→→→→→→→│    │    ·    │  C m×n
//                 └─────────┘    └─────────┘
//
// COALESCED says which way the 32 threads of a warp, neighbours in threadIdx.x, lie in C:
//
//   1: along a row.   B and C: 32 neighbouring elements, one access of 128 bytes; A: one element for all.
//   0: down a column. A and C: 32 elements ld apart, 32 accesses of 32 bytes, of which 4 are used.
//
// Matrices are row-major with leading dimensions (elements from one row to the next). Any m, n, k ≥ 0.
//
// Macros, set by ooc_gemm/cuda_kernels: ELEMENT, the type of the elements and of the sums; BM, BN: rows and
// columns of C that a thread block computes; COALESCED.

using T = ELEMENT;

static_assert((COALESCED ? BN : BM) % 32 == 0, "a warp lies along one row, or down one column");

// The grid is one-dimensional, ⌈m/BM⌉·⌈n/BN⌉ blocks; a block is BN×BM threads, or BM×BN if not COALESCED.
extern "C" __global__ void __launch_bounds__(BM * BN)
naive(long long m, long long n, long long k, T alpha, const T* __restrict__ A, long long lda, const T* __restrict__ B,
      long long ldb, T beta, T* __restrict__ C, long long ldc) {
    const long long tiles_n = (n + BN - 1) / BN;
    const long long row = blockIdx.x / tiles_n * BM + (COALESCED ? threadIdx.y : threadIdx.x);
    const long long col = blockIdx.x % tiles_n * BN + (COALESCED ? threadIdx.x : threadIdx.y);
    if (row >= m || col >= n) return;

    T sum = 0;
    // As in BLAS, α = 0 reads neither A nor B.
    const long long depth = alpha == T(0) ? 0 : k;
    for (long long kk = 0; kk < depth; ++kk) sum += A[row * lda + kk] * B[kk * ldb + col];

    T& c = C[row * ldc + col];
    // β = 0 must not read C, which may hold anything.
    c = beta == T(0) ? alpha * sum : alpha * sum + beta * c;
}
