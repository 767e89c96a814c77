// C ← α·A·B + β·C with several rows of C a thread.
//
// With one thread an element, `tiled` loads two numbers from shared memory for every product, and that is
// what bounds it. Here a thread computes TM elements below each other: for each k it loads one number of
// b_tile and uses it TM times, so a product costs 1 + 1/TM loads.
//
//                            b_tile  BK×BN
//                           ┌─────────────┐
//                           │      ▪      │ kk       one b …
//                           └─────────────┘
//                a_tile     ┌─────────────┐
//                BM×BK ┌──┐ │             │
//                      │▪ │ │      █      │          … for TM elements of one column,
//                      │▪ │ │      █      │ TM       a warp side by side: its loads of b_tile are 32
//                      │▪ │ │      █      │          neighbours, those of a_tile one for all
//                      └──┘ └─────────────┘
//                       kk     C  BM×BN
//
// Matrices are row-major with leading dimensions (elements from one row to the next). Any m, n, k ≥ 0:
// elements beyond an edge count as 0 and are neither read nor written.
//
// Macros, set by ooc_gemm/cuda_kernels: ELEMENT, the type of the elements and of the sums; BM, BN, BK, TM.

using T = ELEMENT;

constexpr int THREADS = BM / TM * BN;

static_assert(BM % TM == 0, "threads must tile the thread block's tile exactly");
static_assert(BN % 32 == 0, "a warp lies along one row");
static_assert(BM * BK % THREADS == 0 && BK * BN % THREADS == 0, "every thread loads equally many elements");
static_assert((BM + BN) * BK * sizeof(T) <= 48 * 1024, "static shared memory ends at 48 KiB");

// The grid is one-dimensional, ⌈m/BM⌉·⌈n/BN⌉ blocks of THREADS threads.
extern "C" __global__ void __launch_bounds__(THREADS)
microtile(long long m, long long n, long long k, T alpha, const T* __restrict__ A, long long lda,
          const T* __restrict__ B, long long ldb, T beta, T* __restrict__ C, long long ldc) {
    __shared__ T a_tile[BM][BK];
    __shared__ T b_tile[BK][BN];

    const long long tiles_n = (n + BN - 1) / BN;
    const long long m0 = blockIdx.x / tiles_n * BM, n0 = blockIdx.x % tiles_n * BN;
    // From here on indices count within the tile. So much of it exists:
    const int rows = m - m0 < BM ? m - m0 : BM, cols = n - n0 < BN ? n - n0 : BN;
    A += m0 * lda, B += n0, C += m0 * ldc + n0;

    // This thread's column of the tile, and the first of its rows.
    const int col = threadIdx.x % BN, row = threadIdx.x / BN * TM;

    T sum[TM] = {};
    // As in BLAS, α = 0 reads neither A nor B.
    for (long long left = alpha == T(0) ? 0 : k; left > 0; left -= BK, A += BK, B += BK * ldb) {
        const int depth = left < BK ? left : BK;
#pragma unroll
        for (int e = 0; e < BM * BK; e += THREADS) {
            const int i = (e + threadIdx.x) / BK, kk = (e + threadIdx.x) % BK;
            a_tile[i][kk] = i < rows && kk < depth ? A[i * lda + kk] : T(0);
        }
#pragma unroll
        for (int e = 0; e < BK * BN; e += THREADS) {
            const int kk = (e + threadIdx.x) / BN, j = (e + threadIdx.x) % BN;
            b_tile[kk][j] = kk < depth && j < cols ? B[kk * ldb + j] : T(0);
        }
        __syncthreads();  // the tiles are complete
#pragma unroll
        for (int kk = 0; kk < BK; ++kk) {
            const T b = b_tile[kk][col];
#pragma unroll
            for (int i = 0; i < TM; ++i) sum[i] += a_tile[row + i][kk] * b;
        }
        __syncthreads();  // nobody reads them any more
    }

    if (col >= cols) return;
#pragma unroll
    for (int i = 0; i < TM; ++i) {
        if (row + i >= rows) return;
        T& c = C[(row + i) * ldc + col];
        // β = 0 must not read C, which may hold anything.
        c = beta == T(0) ? alpha * sum[i] : alpha * sum[i] + beta * c;
    }
}
