// C ← α·A·B + β·C with the elements of a thread apart, so that those of a warp are side by side.
//
// In `register` a thread owns a block of neighbouring elements. Then its neighbour's lie TN columns on: a
// warp reads b_tile with stride TN, out of few banks, and writes C with stride TN, in many small pieces.
// Here the elements of a thread are independent of each other, THREADS_M rows and THREADS_N columns apart:
//
//                   0 1 2 3 0 1 2 3     TN = 2, THREADS_N = 4: the column of the thread that owns it.
//               0   █ · · · █ · · ·
//               1   · · · · · · · ·     TM = 3, THREADS_M = 2; the elements of thread (0, 0) are marked.
//               0   █ · · · █ · · ·     Any row of C, and of b_tile, is read and written by neighbours.
//               1   · · · · · · · ·
//               0   █ · · · █ · · ·
//               1   · · · · · · · ·
//
// Nothing asks for squares: the tile of A is BM×BK and that of B is BK×BN, and no two sides need be equal.
//
// Matrices are row-major with leading dimensions (elements from one row to the next). Any m, n, k ≥ 0:
// elements beyond an edge count as 0 and are neither read nor written.
//
// Macros, set by ooc_gemm/cuda_kernels: ELEMENT, the type of the elements and of the sums; BM, BN, BK, TM, TN.

using T = ELEMENT;

constexpr int THREADS_M = BM / TM, THREADS_N = BN / TN;
constexpr int THREADS = THREADS_M * THREADS_N;

static_assert(BM % TM == 0 && BN % TN == 0, "threads must tile the thread block's tile exactly");
static_assert(THREADS_N % 32 == 0, "a warp lies along one row");
static_assert(BM * BK % THREADS == 0 && BK * BN % THREADS == 0, "every thread loads equally many elements");
static_assert((BM + BN) * BK * sizeof(T) <= 48 * 1024, "static shared memory ends at 48 KiB");

// The grid is one-dimensional, ⌈m/BM⌉·⌈n/BN⌉ blocks of THREADS threads.
extern "C" __global__ void __launch_bounds__(THREADS)
rectangular(long long m, long long n, long long k, T alpha, const T* __restrict__ A, long long lda,
            const T* __restrict__ B, long long ldb, T beta, T* __restrict__ C, long long ldc) {
    __shared__ T a_tile[BM][BK];
    __shared__ T b_tile[BK][BN];

    const long long tiles_n = (n + BN - 1) / BN;
    const long long m0 = blockIdx.x / tiles_n * BM, n0 = blockIdx.x % tiles_n * BN;
    // From here on indices count within the tile. So much of it exists:
    const int rows = m - m0 < BM ? m - m0 : BM, cols = n - n0 < BN ? n - n0 : BN;
    A += m0 * lda, B += n0, C += m0 * ldc + n0;

    const int y = threadIdx.x / THREADS_N, x = threadIdx.x % THREADS_N;

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
            // One number for all of a warp, and 32 neighbours: neither has bank conflicts.
#pragma unroll
            for (int i = 0; i < TM; ++i) a[i] = a_tile[y + i * THREADS_M][kk];
#pragma unroll
            for (int j = 0; j < TN; ++j) b[j] = b_tile[kk][x + j * THREADS_N];
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
            const int row = y + i * THREADS_M, col = x + j * THREADS_N;
            if (row < rows && col < cols) {
                T& c = C[row * ldc + col];
                // β = 0 must not read C, which may hold anything.
                c = beta == T(0) ? alpha * sum[i][j] : alpha * sum[i][j] + beta * c;
            }
        }
    }
}
