// C ← α·A·B + β·C with a block of registers a thread.
//
// A thread computes TM×TN neighbouring elements. For each k it loads TM numbers of a_tile and TN of b_tile
// into registers and multiplies every one with every other: TM·TN products for TM + TN loads. 8×8 is 4
// products a load; `microtile` has less than one.
//
//                            b_tile  BK×BN
//                           ┌─────────────┐
//                           │      ▪▪▪    │ kk       TN numbers
//                           └─────────────┘
//                a_tile     ┌─────────────┐
//                BM×BK ┌──┐ │             │
//                TM    │▪ │ │      ███    │          the outer product of the two, summed in TM×TN
//                      │▪ │ │      ███    │          registers
//                      │▪ │ │      ███    │
//                      └──┘ └─────────────┘
//                       kk     C  BM×BN
//
// Matrices are row-major with leading dimensions (elements from one row to the next). Any m, n, k ≥ 0:
// elements beyond an edge count as 0 and are neither read nor written.
//
// Macros, set by ooc_gemm/cuda_kernels: ELEMENT, the type of the elements and of the sums; BM, BN, BK, TM, TN.

using T = ELEMENT;

constexpr int THREADS_N = BN / TN;
constexpr int THREADS = BM / TM * THREADS_N;

static_assert(BM % TM == 0 && BN % TN == 0, "threads must tile the thread block's tile exactly");
static_assert(THREADS % 32 == 0, "a partly filled warp wastes its lanes in every instruction");
static_assert(BM * BK % THREADS == 0 && BK * BN % THREADS == 0, "every thread loads equally many elements");
static_assert((BM + BN) * BK * sizeof(T) <= 48 * 1024, "static shared memory ends at 48 KiB");

// The grid is one-dimensional, ⌈m/BM⌉·⌈n/BN⌉ blocks of THREADS threads.
extern "C" __global__ void __launch_bounds__(THREADS)
register_block(long long m, long long n, long long k, T alpha, const T* __restrict__ A, long long lda,
               const T* __restrict__ B, long long ldb, T beta, T* __restrict__ C, long long ldc) {
    __shared__ T a_tile[BM][BK];
    __shared__ T b_tile[BK][BN];

    const long long tiles_n = (n + BN - 1) / BN;
    const long long m0 = blockIdx.x / tiles_n * BM, n0 = blockIdx.x % tiles_n * BN;
    // From here on indices count within the tile. So much of it exists:
    const int rows = m - m0 < BM ? m - m0 : BM, cols = n - n0 < BN ? n - n0 : BN;
    A += m0 * lda, B += n0, C += m0 * ldc + n0;

    // The first row and column, in the tile, of this thread's elements.
    const int row = threadIdx.x / THREADS_N * TM, col = threadIdx.x % THREADS_N * TN;

    T sum[TM][TN] = {};
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
            T a[TM], b[TN];
#pragma unroll
            for (int i = 0; i < TM; ++i) a[i] = a_tile[row + i][kk];
#pragma unroll
            for (int j = 0; j < TN; ++j) b[j] = b_tile[kk][col + j];
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) sum[i][j] += a[i] * b[j];
        }
        __syncthreads();  // nobody reads them any more
    }

#pragma unroll
    for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int j = 0; j < TN; ++j) {
            if (row + i < rows && col + j < cols) {
                T& c = C[(row + i) * ldc + col + j];
                // β = 0 must not read C, which may hold anything.
                c = beta == T(0) ? alpha * sum[i][j] : alpha * sum[i][j] + beta * c;
            }
        }
    }
}
