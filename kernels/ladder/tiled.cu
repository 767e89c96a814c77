// C ← α·A·B + β·C with square tiles in shared memory.
//
// One thread block computes one TILE×TILE tile of C, walking along k in steps of TILE. Its threads first
// copy the two tiles of the step into shared memory; each element is then used TILE times from there:
//
//                          ┌──────┐
//                          │b_tile│  ↓ k
//                          └──────┘
//                ┌──────┐  ┌──────┐
//                │a_tile│  │  C   │  TILE×TILE
//                └──────┘  └──────┘
//                  → k
//
// So global memory is read TILE times less than by `naive`. The block of threads may be smaller than the
// tile: BLOCK_X×BLOCK_Y threads cover it in several steps, and a thread computes the elements it falls on.
// Here TILE = 4 of BLOCK 4×2; the elements of thread (1, 0) are marked:
//
//                x → 0 1 2 3
//            y ↓ 0   · █ · ·
//                1   · · · ·
//                0   · █ · ·    one load of b_tile now serves two elements
//                1   · · · ·
//
// Matrices are row-major with leading dimensions (elements from one row to the next). Any m, n, k ≥ 0:
// elements beyond an edge count as 0 and are neither read nor written.
//
// Macros, set by ooc_gemm/cuda_kernels: ELEMENT, the type of the elements and of the sums; TILE; BLOCK_X,
// BLOCK_Y.

using T = ELEMENT;

constexpr int DOWN = TILE / BLOCK_Y;    // elements of a thread in one column of the tile
constexpr int ACROSS = TILE / BLOCK_X;  // and in one row

static_assert(TILE % BLOCK_X == 0 && TILE % BLOCK_Y == 0, "every thread computes equally many elements");
static_assert(BLOCK_X * BLOCK_Y % 32 == 0, "a partly filled warp wastes its lanes in every instruction");
static_assert(2 * TILE * TILE * sizeof(T) <= 48 * 1024, "static shared memory ends at 48 KiB");

// The grid is one-dimensional, ⌈m/TILE⌉·⌈n/TILE⌉ blocks of BLOCK_X×BLOCK_Y threads.
extern "C" __global__ void __launch_bounds__(BLOCK_X * BLOCK_Y)
tiled(long long m, long long n, long long k, T alpha, const T* __restrict__ A, long long lda, const T* __restrict__ B,
      long long ldb, T beta, T* __restrict__ C, long long ldc) {
    __shared__ T a_tile[TILE][TILE];
    __shared__ T b_tile[TILE][TILE];

    const long long tiles_n = (n + TILE - 1) / TILE;
    const long long m0 = blockIdx.x / tiles_n * TILE, n0 = blockIdx.x % tiles_n * TILE;
    // From here on indices count within the tile. So much of it exists:
    const int rows = m - m0 < TILE ? m - m0 : TILE, cols = n - n0 < TILE ? n - n0 : TILE;
    A += m0 * lda, B += n0, C += m0 * ldc + n0;

    const int x = threadIdx.x, y = threadIdx.y;

    T sum[DOWN][ACROSS] = {};
    // As in BLAS, α = 0 reads neither A nor B.
    for (long long left = alpha == T(0) ? 0 : k; left > 0; left -= TILE, A += TILE, B += TILE * ldb) {
        const int depth = left < TILE ? left : TILE;
#pragma unroll
        for (int i = 0; i < DOWN; ++i) {
#pragma unroll
            for (int j = 0; j < ACROSS; ++j) {
                const int row = y + i * BLOCK_Y, col = x + j * BLOCK_X;
                a_tile[row][col] = row < rows && col < depth ? A[row * lda + col] : T(0);
                b_tile[row][col] = row < depth && col < cols ? B[row * ldb + col] : T(0);
            }
        }
        __syncthreads();  // the tiles are complete
#pragma unroll 4
        for (int kk = 0; kk < TILE; ++kk)
#pragma unroll
            for (int i = 0; i < DOWN; ++i)
#pragma unroll
                for (int j = 0; j < ACROSS; ++j) sum[i][j] += a_tile[y + i * BLOCK_Y][kk] * b_tile[kk][x + j * BLOCK_X];
        __syncthreads();  // nobody reads them any more
    }

#pragma unroll
    for (int i = 0; i < DOWN; ++i) {
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) {
            const int row = y + i * BLOCK_Y, col = x + j * BLOCK_X;
            if (row < rows && col < cols) {
                T& c = C[row * ldc + col];
                // β = 0 must not read C, which may hold anything.
                c = beta == T(0) ? alpha * sum[i][j] : alpha * sum[i][j] + beta * c;
            }
        }
    }
}
