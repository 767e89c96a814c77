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
// TN; TRANS_A: A is stored k×m; TRANS_B: B is stored n×k; GUARDED: a last argument
// says whether to run at all, for a launch whose need shows on the device. No headers: NVRTC comes without them.

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

// Carries one EXTENT×BK tile after the other from global to shared memory. K_INNER: the stored matrix is
// contiguous along k (A as it is, B transposed), else along m or n. INNER neighbouring threads take one
// piece of a stored row; a thread's COUNT elements lie OUTER_STEP rows apart, in one column.
template <int EXTENT, bool K_INNER>
struct Carrier {
    static constexpr int INNER = K_INNER ? BK : EXTENT;
    static constexpr int COUNT = EXTENT * BK / THREADS;
    static constexpr int OUTER_STEP = THREADS / INNER;
    static_assert(EXTENT * BK % THREADS == 0, "every thread loads equally many elements");
    static_assert(THREADS % INNER == 0, "all elements of a thread lie in one column of the stored tile");

    const T* next;  // this thread's first element of the tile that `fetch` takes next
    long long ld;
    int extent;  // rows and columns of op() that exist, of EXTENT
    T staged[COUNT];

    static __device__ __forceinline__ int inner() { return threadIdx.x % INNER; }
    static __device__ __forceinline__ int outer(int e) { return threadIdx.x / INNER + e * OUTER_STEP; }
    static __device__ __forceinline__ int x(int e) { return K_INNER ? outer(e) : inner(); }
    static __device__ __forceinline__ int k(int e) { return K_INNER ? inner() : outer(e); }

    // The tiles whose first row or column of op() is `first`, of `all`, starting at k = 0.
    __device__ __forceinline__ Carrier(const T* matrix, long long ld, long long first, long long all)
        : next(matrix + (K_INNER ? first * ld : first) + outer(0) * ld + inner()),
          ld(ld),
          extent(all - first < EXTENT ? all - first : EXTENT) {}

    // Global memory → registers; `depth` is how much of k is left. Moves on to the next tile.
    __device__ __forceinline__ void fetch(int depth) {
        const T* source = next;
#pragma unroll
        for (int e = 0; e < COUNT; ++e, source += OUTER_STEP * ld)
            staged[e] = x(e) < extent && k(e) < depth ? *source : T(0);
        next += K_INNER ? BK : BK * ld;
    }

    // Registers → shared memory.
    __device__ __forceinline__ void put(Row<EXTENT>* tile) const {
#pragma unroll
        for (int e = 0; e < COUNT; ++e) tile[k(e)].vec[x(e) / V].v[x(e) % V] = staged[e];
    }
};

// The grid is one-dimensional, ⌈m/BM⌉·⌈n/BN⌉ blocks of THREADS threads: grid.y would end at 65535.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
ffma(long long m, long long n, long long k, T alpha, const T* __restrict__ A, long long lda,
      const T* __restrict__ B, long long ldb, T beta, T* __restrict__ C, long long ldc
#if GUARDED
      , const unsigned* __restrict__ run
#endif
) {
#if GUARDED
    if (*run == 0) return;
#endif
    __shared__ Row<BM> a_tile[2][BK];
    __shared__ Row<BN> b_tile[2][BK];

    const long long tiles_m = (m + BM - 1) / BM, tiles_n = (n + BN - 1) / BN;
    const long long group = blockIdx.x / (GROUP * tiles_n), within = blockIdx.x % (GROUP * tiles_n);
    const long long below = tiles_m - group * GROUP, height = below < GROUP ? below : GROUP;
    const long long m0 = (group * GROUP + within % height) * BM, n0 = within / height * BN;

    // A thread's elements are vectors of V rows (columns), THREADS_M (THREADS_N) vectors apart: the threads
    // of a warp then read adjacent vectors, or the same one.
    const int thread_m = threadIdx.x / THREADS_N, thread_n = threadIdx.x % THREADS_N;

    T sum[TM][TN] = {};
    Carrier<BM, !TRANS_A> a_carrier(A, lda, m0, m);
    Carrier<BN, TRANS_B> b_carrier(B, ldb, n0, n);
    const auto fetch = [&](long long left) {
        const int depth = left < BK ? left : BK;
        a_carrier.fetch(depth);
        b_carrier.fetch(depth);
    };
    const auto put = [&](int buffer) {
        a_carrier.put(a_tile[buffer]);
        b_carrier.put(b_tile[buffer]);
    };

    // As in BLAS, α = 0 reads neither A nor B.
    long long left = alpha == T(0) ? 0 : k;
    int now = 0;
    if (left > 0) {
        fetch(left);
        put(now);
    }
    for (; left > 0; left -= BK, now ^= 1) {
        // After this, buffer `now` is complete and nobody reads the other one any more.
        __syncthreads();
        if (left > BK) fetch(left - BK);
        // By two: the next k's vectors are loaded while this one's products are summed. More would spill.
#pragma unroll 2
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
        if (left > BK) put(now ^ 1);
    }

    // This thread's first element of C, and how many rows and columns exist from there on.
    T* const corner = C + (m0 + thread_m * V) * ldc + n0 + thread_n * V;
    const int rows = a_carrier.extent - thread_m * V, cols = b_carrier.extent - thread_n * V;
#pragma unroll
    for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int j = 0; j < TN; ++j) {
            const int down = i / V * THREADS_M * V + i % V, right = j / V * THREADS_N * V + j % V;
            if (down < rows && right < cols) {
                T& c = corner[down * ldc + right];
                // β = 0 must not read C, which may hold anything.
                c = beta == T(0) ? alpha * sum[i][j] : alpha * sum[i][j] + beta * c;
            }
        }
    }
}
