// C ← α·A·B + β·C with tiles on three levels, and with loads that run ahead of the products.
//
// Between the tile of a thread block and that of a thread stands that of a warp, the unit that issues
// instructions: what its 32 threads read together should be little, and side by side.
//
//       thread block BM×BN            warp WM×WN                        thread TM×TN
//      ┌─────────┬─────────┐      n →                               ┌────┐     ┌────┐
//      │ warp 0  │ warp 1  │    m │ 0 1 2 3 0 1 2 3 │               │V×V │     │    │
//      │         │         │    ↓ │ 4 5 6 7 4 5 6 7 │               └────┘     └────┘
//      ├─────────┼─────────┤      │ 0 1 2 3 0 1 2 3 │  lanes of     ┌────┐     ┌────┐
//      │ warp 2  │ warp 3  │      │ 4 5 6 7 4 5 6 7 │  V×V tiles    │    │     │    │
//      └─────────┴─────────┘                                        └────┘     └────┘
//
// For one k a warp reads WM + WN numbers for WM·WN products: for 64×32 that is 96, where 32 threads in a row
// of 8×8 each would read 264. A thread's rows (columns) are vectors of V, LANES_M (LANES_N) vectors apart,
// so that a warp reads adjacent vectors: no bank conflicts.
//
// Nobody waits for a load where products are left to do:
//
//   global memory → registers       a whole step of BK ahead, while the present one is multiplied,
//   registers → shared memory       into the other of two buffers: one __syncthreads a step is enough,
//   shared memory → registers       one k ahead, into the other of two sets of registers.
//
// Global memory is read as in `vectorized`, in 16-byte vectors where base and leading dimension allow it,
// else, and at the edges, one by one. Matrices are row-major with leading dimensions (elements from one row
// to the next). Any m, n, k ≥ 0: elements beyond an edge count as 0 and are neither read nor written.
//
// Macros, set by ooc_gemm/cuda_kernels: ELEMENT, the type of the elements and of the sums; BM, BN, BK; WM, WN;
// TM, TN.

using T = ELEMENT;

constexpr int V = 16 / sizeof(T);
constexpr int WARPS_N = BN / WN;
constexpr int THREADS = BM / WM * WARPS_N * 32;
constexpr int LANES_M = WM / TM, LANES_N = WN / TN;

struct alignas(16) Vec {
    T v[V];
};

// A row (one k) of a_tile. The vector of padding moves the next row by four banks: the threads that share a
// row of A store V rows apart, and then to different banks.
struct Column {
    Vec vec[BM / V + 1];
};

static_assert(TM % V == 0 && TN % V == 0 && BK % V == 0, "tiles are read and written as 16-byte vectors");
static_assert(LANES_M * LANES_N == 32 && WM % TM == 0 && WN % TN == 0, "32 threads tile the warp's tile");
static_assert(BM % WM == 0 && BN % WN == 0, "warps tile the thread block's tile");
static_assert(BM * BK % (THREADS * V) == 0 && BK * BN % (THREADS * V) == 0, "threads load equally much");
static_assert(BK % 2 == 0, "the sets of registers alternate from step to step");
static_assert(2 * (BM + V + BN) * BK * sizeof(T) <= 48 * 1024, "static shared memory ends at 48 KiB");

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

// A thread's share of a stored tile of ROWS×COLS, on its way from global to shared memory.
template <int ROWS, int COLS>
struct Staged {
    static constexpr int COUNT = ROWS * COLS / (THREADS * V);
    Vec vec[COUNT];

    static __device__ __forceinline__ int row(int e) { return (threadIdx.x + e * THREADS) / (COLS / V); }
    static __device__ __forceinline__ int col(int e) { return (threadIdx.x + e * THREADS) % (COLS / V) * V; }

    // `rows` and `cols` of the tile exist.
    __device__ __forceinline__ void fetch(const T* tile, long long ld, int rows, int cols, bool vector) {
#pragma unroll
        for (int e = 0; e < COUNT; ++e)
            vec[e] = load(tile + row(e) * ld + col(e), row(e) < rows ? cols - col(e) : 0, vector);
    }
};

// The grid is one-dimensional, ⌈m/BM⌉·⌈n/BN⌉ blocks of THREADS threads.
extern "C" __global__ void __launch_bounds__(THREADS)
warptile(long long m, long long n, long long k, T alpha, const T* __restrict__ A, long long lda,
         const T* __restrict__ B, long long ldb, T beta, T* __restrict__ C, long long ldc) {
    __shared__ Column a_tile[2][BK];
    __shared__ Vec b_tile[2][BK][BN / V];

    const long long tiles_n = (n + BN - 1) / BN;
    const long long m0 = blockIdx.x / tiles_n * BM, n0 = blockIdx.x % tiles_n * BN;
    // From here on indices count within the tile. So much of it exists:
    const int rows = m - m0 < BM ? m - m0 : BM, cols = n - n0 < BN ? n - n0 : BN;
    A += m0 * lda, B += n0, C += m0 * ldc + n0;
    // Tiles begin at multiples of V rows and columns, so what holds for the matrix holds for them.
    const bool a_vector = aligned(A, lda), b_vector = aligned(B, ldb), c_vector = aligned(C, ldc);

    // The first vector of this thread's rows, and of its columns.
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int y = warp / WARPS_N * (WM / V) + lane / LANES_N, x = warp % WARPS_N * (WN / V) + lane % LANES_N;

    T sum[TM][TN] = {};
    Vec a[2][TM / V], b[2][TN / V];
    Staged<BM, BK> a_staged;
    Staged<BK, BN> b_staged;
    const auto fetch = [&](long long left) {
        const int depth = left < BK ? left : BK;
        a_staged.fetch(A, lda, rows, depth, a_vector);
        b_staged.fetch(B, ldb, depth, cols, b_vector);
        A += BK, B += BK * ldb;
    };
    const auto put = [&](int buffer) {
#pragma unroll
        for (int e = 0; e < a_staged.COUNT; ++e) {
            const int i = a_staged.row(e), kk = a_staged.col(e);
#pragma unroll
            for (int v = 0; v < V; ++v) a_tile[buffer][kk + v].vec[i / V].v[i % V] = a_staged.vec[e].v[v];
        }
#pragma unroll
        for (int e = 0; e < b_staged.COUNT; ++e) b_tile[buffer][b_staged.row(e)][b_staged.col(e) / V] = b_staged.vec[e];
        __syncthreads();  // this buffer is complete, and nobody reads the other one any more
    };
    const auto read = [&](int buffer, int kk) {
#pragma unroll
        for (int i = 0; i < TM / V; ++i) a[kk % 2][i] = a_tile[buffer][kk].vec[y + i * LANES_M];
#pragma unroll
        for (int j = 0; j < TN / V; ++j) b[kk % 2][j] = b_tile[buffer][kk][x + j * LANES_N];
    };

    // As in BLAS, α = 0 reads neither A nor B.
    long long left = alpha == T(0) ? 0 : k;
    int now = 0;
    if (left > 0) {
        fetch(left);
        put(now);
        read(now, 0);
    }
    for (; left > 0; left -= BK, now ^= 1) {
        if (left > BK) fetch(left - BK);
#pragma unroll
        for (int kk = 0; kk < BK; ++kk) {
            if (kk + 1 < BK) {
                read(now, kk + 1);
            } else if (left > BK) {
                put(now ^ 1);
                read(now ^ 1, 0);
            }
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int to = 0; to < TN; ++to) {
                    // To and fro: then each product has a factor in common with the one before it, which an
                    // arithmetic unit need not fetch from the registers again.
                    const int j = i % 2 ? TN - 1 - to : to;
                    sum[i][j] += a[kk % 2][i / V].v[i % V] * b[kk % 2][j / V].v[j % V];
                }
        }
    }

#pragma unroll
    for (int i = 0; i < TM; ++i) {
        const int row = (y + i / V * LANES_M) * V + i % V;
        if (row >= rows) continue;
#pragma unroll
        for (int j = 0; j < TN; j += V) {
            const int col = (x + j / V * LANES_N) * V, count = cols - col;
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
