// C ← α·A·B + β·C in accesses of 16 bytes.
//
// A warp's access of 4 bytes a thread and one of 16 cost an instruction each, so vectors make four times as
// many numbers arrive per instruction, from global as from shared memory. For A this takes a turn: a thread
// wants TM numbers of one column, which lie a row apart. So a_tile is stored transposed, k outermost:
//
//          A                      a_tile                        b_tile
//       k →                      m →                           n →
//     m ┌──────────┐           k ┌─────────────────┐         k ┌─────────────────┐
//     ↓ │▪▪▪▪      │           ↓ │ ▪               │         ↓ │                 │
//       │          │             │ ▪      ████ ████│ kk        │     ████ ████   │ kk
//       │          │             │ ▪               │           │                 │
//       └──────────┘             │ ▪               │           └─────────────────┘
//      one load of 16 bytes      └─────────────────┘       one load of 16 bytes, one store
//      becomes four stores    for each k a thread loads TM/V vectors of a_tile and TN/V of b_tile
//
// As in `rectangular`, what one thread loads is apart (by THREADS_M or THREADS_N vectors), so that what
// neighbours load is side by side.
//
// A 16-byte access must be aligned. Whether base and leading dimension allow it is seen at run time; where
// they do not, and at the edges, the same elements are loaded one by one.
//
// Matrices are row-major with leading dimensions (elements from one row to the next). Any m, n, k ≥ 0:
// elements beyond an edge count as 0 and are neither read nor written.
//
// Macros, set by ooc_gemm/cuda_kernels: ELEMENT, the type of the elements and of the sums; BM, BN, BK, TM, TN.

using T = ELEMENT;

constexpr int V = 16 / sizeof(T);
constexpr int THREADS_M = BM / TM, THREADS_N = BN / TN;
constexpr int THREADS = THREADS_M * THREADS_N;

struct alignas(16) Vec {
    T v[V];
};

// A row (one k) of a_tile. The vector of padding moves the next row by four banks: the threads that share a
// row of A store V rows apart, and then to different banks.
struct Column {
    Vec vec[BM / V + 1];
};

static_assert(TM % V == 0 && TN % V == 0 && BK % V == 0, "tiles are read and written as 16-byte vectors");
static_assert(BM % TM == 0 && BN % TN == 0, "threads must tile the thread block's tile exactly");
static_assert(THREADS % 32 == 0, "a partly filled warp wastes its lanes in every instruction");
static_assert(BM * BK % (THREADS * V) == 0 && BK * BN % (THREADS * V) == 0, "threads load equally much");
static_assert((BM + V + BN) * BK * sizeof(T) <= 48 * 1024, "static shared memory ends at 48 KiB");

// The vectors of A's tile and of B's that a thread carries, and where they begin: row and column as stored.
constexpr int A_COUNT = BM * BK / (THREADS * V), B_COUNT = BK * BN / (THREADS * V);
__device__ __forceinline__ int a_row(int e) { return (threadIdx.x + e * THREADS) / (BK / V); }
__device__ __forceinline__ int a_col(int e) { return (threadIdx.x + e * THREADS) % (BK / V) * V; }
__device__ __forceinline__ int b_row(int e) { return (threadIdx.x + e * THREADS) / (BN / V); }
__device__ __forceinline__ int b_col(int e) { return (threadIdx.x + e * THREADS) % (BN / V) * V; }

__device__ __forceinline__ bool aligned(const T* matrix, long long ld) {
    return reinterpret_cast<unsigned long long>(matrix) % sizeof(Vec) == 0 && ld % V == 0;
}

// The first V elements of a row that has `count` left; zeros where they are fewer.
__device__ __forceinline__ Vec load(const T* from, int count, bool vector) {
    if (vector && count >= V) return *reinterpret_cast<const Vec*>(from);
    Vec some;
#pragma unroll
    for (int v = 0; v < V; ++v) some.v[v] = v < count ? from[v] : T(0);
    return some;
}

// The grid is one-dimensional, ⌈m/BM⌉·⌈n/BN⌉ blocks of THREADS threads.
extern "C" __global__ void __launch_bounds__(THREADS)
vectorized(long long m, long long n, long long k, T alpha, const T* __restrict__ A, long long lda,
           const T* __restrict__ B, long long ldb, T beta, T* __restrict__ C, long long ldc) {
    __shared__ Column a_tile[BK];
    __shared__ Vec b_tile[BK][BN / V];

    const long long tiles_n = (n + BN - 1) / BN;
    const long long m0 = blockIdx.x / tiles_n * BM, n0 = blockIdx.x % tiles_n * BN;
    // From here on indices count within the tile. So much of it exists:
    const int rows = m - m0 < BM ? m - m0 : BM, cols = n - n0 < BN ? n - n0 : BN;
    A += m0 * lda, B += n0, C += m0 * ldc + n0;

    const int y = threadIdx.x / THREADS_N, x = threadIdx.x % THREADS_N;
    // Tiles begin at multiples of V rows and columns, so what holds for the matrix holds for them.
    const bool a_vector = aligned(A, lda), b_vector = aligned(B, ldb), c_vector = aligned(C, ldc);

    T sum[TM][TN] = {};
    // As in BLAS, α = 0 reads neither A nor B.
    for (long long left = alpha == T(0) ? 0 : k; left > 0; left -= BK, A += BK, B += BK * ldb) {
        const int depth = left < BK ? left : BK;
        // All loads before the first store, which waits for what it stores.
        Vec a_some[A_COUNT], b_some[B_COUNT];
#pragma unroll
        for (int e = 0; e < A_COUNT; ++e)
            a_some[e] = load(A + a_row(e) * lda + a_col(e), a_row(e) < rows ? depth - a_col(e) : 0, a_vector);
#pragma unroll
        for (int e = 0; e < B_COUNT; ++e)
            b_some[e] = load(B + b_row(e) * ldb + b_col(e), b_row(e) < depth ? cols - b_col(e) : 0, b_vector);
#pragma unroll
        for (int e = 0; e < A_COUNT; ++e)
#pragma unroll
            for (int v = 0; v < V; ++v) a_tile[a_col(e) + v].vec[a_row(e) / V].v[a_row(e) % V] = a_some[e].v[v];
#pragma unroll
        for (int e = 0; e < B_COUNT; ++e) b_tile[b_row(e)][b_col(e) / V] = b_some[e];
        __syncthreads();  // the tiles are complete
#pragma unroll
        for (int kk = 0; kk < BK; ++kk) {
            Vec a[TM / V], b[TN / V];
#pragma unroll
            for (int i = 0; i < TM / V; ++i) a[i] = a_tile[kk].vec[y + i * THREADS_M];
#pragma unroll
            for (int j = 0; j < TN / V; ++j) b[j] = b_tile[kk][x + j * THREADS_N];
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) sum[i][j] += a[i / V].v[i % V] * b[j / V].v[j % V];
        }
        __syncthreads();  // nobody reads them any more
    }

#pragma unroll
    for (int i = 0; i < TM; ++i) {
        const int row = (y + i / V * THREADS_M) * V + i % V;
        if (row >= rows) continue;
#pragma unroll
        for (int j = 0; j < TN; j += V) {
            const int col = (x + j / V * THREADS_N) * V, count = cols - col;
            T* const c = C + row * ldc + col;
            const bool vector = c_vector && count >= V;
            // β = 0 must not read C, which may hold anything.
            Vec out = beta == T(0) ? Vec{} : load(c, count, vector);
#pragma unroll
            for (int v = 0; v < V; ++v)
                out.v[v] = beta == T(0) ? alpha * sum[i][j + v] : alpha * sum[i][j + v] + beta * out.v[v];
            if (vector) {
                *reinterpret_cast<Vec*>(c) = out;
            } else {
#pragma unroll
                for (int v = 0; v < V; ++v)
                    if (v < count) c[v] = out.v[v];
            }
        }
    }
}
