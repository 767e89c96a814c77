// C ← α·op(A)·op(B) + β·C on ordinary arithmetic units: tiles in shared memory, blocks in registers.
//
// One thread block computes one BM×BN tile of C, walking along k in steps of BK. One thread computes
// TM×TN elements of the tile, so each number read from shared memory is used TN (or TM) times:
//
//                     b  BK×BN
//                   ┌─────────┐
//                   └─────────┘         while the tiles of this step are multiplied, the elements of the
//     a  BM×BK ┌─┐  ┌─────────┐         next one are on their way from global memory into registers;
//              │ │  │ C BM×BN │         they go to the other of two buffers in shared memory, so one
//              └─┘  └─────────┘         __syncthreads a step is enough.
//
// Both tiles lie in shared memory with k as the outer index: what a thread needs for one k is contiguous.
// Matrices are row-major with leading dimensions (elements from one row to the next) and no assumed
// alignment. Any m, n, k ≥ 0: elements beyond an edge count as 0 and are neither read nor written.
//
// Macros, all set by ooc_gemm/nvrtc.py: ELEMENT, the type of the elements and of the sums; BM, BN, BK, TM,
// TN; TRANS_A: A is stored k×m; TRANS_B: B is stored n×k. No headers: NVRTC comes without them.

using T = ELEMENT;

constexpr int THREADS_M = BM / TM;
constexpr int THREADS_N = BN / TN;
constexpr int THREADS = THREADS_M * THREADS_N;
constexpr int V = 16 / sizeof(T);

// Blocks on a multiprocessor at once. One computes while the other waits at its barrier; it also bounds
// the registers of a thread (65536 / 512 = 128 at 256 threads).
constexpr int RESIDENT = 2;

// Blocks run roughly in the order of their index. Walking down GROUP tiles of C before going right makes
// those that run together cover a piece of C that is about square, which reads the least of A and B from
// beyond L2: about √(multiprocessors × RESIDENT).
constexpr int GROUP = 16;

// The widest load from shared memory, and the unit its rows are padded by.
struct alignas(16) Vec {
    T v[V];
};

static_assert(BM % TM == 0 && BN % TN == 0, "threads must tile the thread block's tile exactly");
static_assert(TM % V == 0 && TN % V == 0, "a thread reads its rows and columns as 16-byte vectors");
static_assert(BM * BK % THREADS == 0 && BN * BK % THREADS == 0, "every thread loads equally many elements");
static_assert(THREADS % 32 == 0, "a partly filled warp wastes its lanes in every instruction");
static_assert(THREADS <= 512, "RESIDENT blocks must fit the 1024 threads of the smallest multiprocessor");
static_assert(2 * BK * (BM / V + BN / V + 2) * sizeof(Vec) <= 48 * 1024, "static shared memory ends at 48 KiB");

// One row (one k) of a tile in shared memory, EXTENT elements of m or n. The vector of padding moves the
// next k by four banks: where k runs fastest over the threads (K_INNER below) and BK = 8, the stores of a
// warp fall into different banks.
template <int EXTENT>
struct Row {
    Vec vec[EXTENT / V + 1];
};

// Moving one EXTENT×BK tile from global to shared memory, THREADS elements at a time. K_INNER: the stored
// matrix is contiguous along k (A as it is, B transposed), else along m or n. Neighbouring threads always
// take neighbouring addresses of the stored row.
template <int EXTENT, bool K_INNER>
struct Mover {
    static constexpr int COUNT = EXTENT * BK / THREADS;
    T staged[COUNT];

    static __device__ __forceinline__ int x_of(int i) { return K_INNER ? i / BK : i % EXTENT; }
    static __device__ __forceinline__ int k_of(int i) { return K_INNER ? i % BK : i / EXTENT; }

    // Global memory → registers. `source` is the tile's first element, `extent` and `depth` are how much
    // of the matrix lies beyond it along m or n, and along k.
    __device__ __forceinline__ void fetch(const T* source, long long ld, long long extent, long long depth) {
#pragma unroll
        for (int e = 0; e < COUNT; ++e) {
            const int i = threadIdx.x + e * THREADS;
            const int x = x_of(i), k = k_of(i);
            const bool inside = x < extent && k < depth;
            staged[e] = inside ? source[K_INNER ? x * ld + k : k * ld + x] : T(0);
        }
    }

    // Registers → shared memory.
    __device__ __forceinline__ void put(Row<EXTENT>* tile) const {
#pragma unroll
        for (int e = 0; e < COUNT; ++e) {
            const int i = threadIdx.x + e * THREADS;
            const int x = x_of(i);
            tile[k_of(i)].vec[x / V].v[x % V] = staged[e];
        }
    }
};

// The grid is one-dimensional, ⌈m/BM⌉·⌈n/BN⌉ blocks of THREADS threads: grid.y would end at 65535.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
tiled(long long m, long long n, long long k, T alpha, const T* __restrict__ A, long long lda,
      const T* __restrict__ B, long long ldb, T beta, T* __restrict__ C, long long ldc) {
    __shared__ Row<BM> a_tile[2][BK];
    __shared__ Row<BN> b_tile[2][BK];

    const long long tiles_m = (m + BM - 1) / BM, tiles_n = (n + BN - 1) / BN;
    const long long group = blockIdx.x / (GROUP * tiles_n), within = blockIdx.x % (GROUP * tiles_n);
    const long long left = tiles_m - group * GROUP, height = left < GROUP ? left : GROUP;
    const long long m0 = (group * GROUP + within % height) * BM, n0 = within / height * BN;

    // A thread's elements are vectors of V rows (columns), THREADS_M (THREADS_N) vectors apart: the threads
    // of a warp then read adjacent vectors, or the same one.
    const int thread_m = threadIdx.x / THREADS_N, thread_n = threadIdx.x % THREADS_N;

    T sum[TM][TN] = {};
    Mover<BM, !TRANS_A> a_mover;
    Mover<BN, TRANS_B> b_mover;
    const auto fetch = [&](long long k0) {
        a_mover.fetch(A + (TRANS_A ? k0 * lda + m0 : m0 * lda + k0), lda, m - m0, k - k0);
        b_mover.fetch(B + (TRANS_B ? n0 * ldb + k0 : k0 * ldb + n0), ldb, n - n0, k - k0);
    };

    // As in BLAS, α = 0 reads neither A nor B.
    const long long depth = alpha == T(0) ? 0 : k;
    if (depth > 0) {
        fetch(0);
        a_mover.put(a_tile[0]);
        b_mover.put(b_tile[0]);
    }
    int now = 0;
    for (long long k0 = 0; k0 < depth; k0 += BK, now ^= 1) {
        // Buffer `now` is filled, and nobody reads the other one any more.
        __syncthreads();
        const bool more = k0 + BK < depth;
        if (more) fetch(k0 + BK);
#pragma unroll
        for (int kk = 0; kk < BK; ++kk) {
            Vec a[TM / V], b[TN / V];
#pragma unroll
            for (int i = 0; i < TM / V; ++i) a[i] = a_tile[now][kk].vec[i * THREADS_M + thread_m];
#pragma unroll
            for (int j = 0; j < TN / V; ++j) b[j] = b_tile[now][kk].vec[j * THREADS_N + thread_n];
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) sum[i][j] += a[i / V].v[i % V] * b[j / V].v[j % V];
        }
        if (more) {
            a_mover.put(a_tile[now ^ 1]);
            b_mover.put(b_tile[now ^ 1]);
        }
    }

#pragma unroll
    for (int i = 0; i < TM; ++i) {
        const long long row = m0 + (i / V * THREADS_M + thread_m) * V + i % V;
#pragma unroll
        for (int j = 0; j < TN; ++j) {
            const long long col = n0 + (j / V * THREADS_N + thread_n) * V + j % V;
            if (row < m && col < n) {
                T& c = C[row * ldc + col];
                // β = 0 must not read C, which may hold anything.
                c = beta == T(0) ? alpha * sum[i][j] : alpha * sum[i][j] + beta * c;
            }
        }
    }
}
