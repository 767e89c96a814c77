// C ← α·op(A)·op(B) + β·C on ordinary arithmetic units, as fast as they go.
//
// A thread block computes a BM×BN tile of C, walking along k in steps of BK; a warp computes WM×WN of it,
// and a thread TM×TN of that. Each number is copied twice, ever closer to the arithmetic, and both copies
// run ahead of it:
//
//     global memory ─────────────────► shared memory ─────────────► registers ───► sums, in registers
//                    STAGES - 1 steps                  one k ahead
//                    ahead, cp.async
//              ┌────────┬────────┬────────┬────────┐
//        ring: │ step s │  s + 1 │  s + 2 │  s + 3 │   STAGES slots. While step s is multiplied, s + 3 is
//              └────────┴────────┴────────┴────────┘   copied over s - 1: one barrier a step is enough.
//
// What bounds such a kernel is how many instructions a multiprocessor can issue. For each k, a thread with
// 16×8 sums issues 128 multiply-adds and 6 reads of a vector; all else, copies and addresses, comes once a
// step. Smaller tiles, for smaller C, do worse: 8×8 sums take 4 reads for 64 multiply-adds. Where even they
// leave multiprocessors idle, SPLIT blocks share a tile: each takes a part of k, and in the end they add up
// their sums through each other's shared memory, always in the same order.
//
// Matrices are row-major with leading dimensions (elements from one row to the next) and no assumed
// alignment. Any m, n, k ≥ 0: elements beyond an edge count as 0 and are neither read nor written.
//
// Macros, all set by ooc_gemm/cuda_kernels: ELEMENT, the type of the elements and of the sums; BM, BN, BK,
// WM, WN, TM, TN, STAGES, SPLIT as above; PARTS, over how many of its k the copies of a step are spread, as all
// at once they hold up the reads behind them; RESIDENT, blocks on a multiprocessor at once; TRANS_A: A is
// stored k×m; TRANS_B: B is stored n×k; GUARDED: a last argument says whether to run at all, for a launch whose
// need shows on the device.

#include "common/async_copy.cuh"
#include "common/cluster.cuh"
#include "common/types.cuh"

using T = ELEMENT;

// Turing has no asynchronous copies: there the next step waits in registers, and two slots are enough.
constexpr bool ASYNC = __CUDA_ARCH__ >= 800;
constexpr int SLOTS = ASYNC ? STAGES : 2;
constexpr int BLOCKS = ASYNC ? RESIDENT : (RESIDENT + 1) / 2;  // on a multiprocessor: they bound its registers

// Before Hopper, no block sees another's shared memory: there the first of the SPLIT does the work of all.
#if SPLIT > 1 && __CUDA_ARCH__ >= 900
#define CLUSTER __cluster_dims__(SPLIT)
constexpr int SHARES = SPLIT;
#else
#define CLUSTER
constexpr int SHARES = 1;
#endif

template <int N>
struct alignas(N * sizeof(T)) Pack {
    T v[N];
};

constexpr int V = 16 / sizeof(T);  // the widest access there is
using Vec = Pack<V>;

constexpr int WARPS_M = BM / WM, WARPS_N = BN / WN;
constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int LANES_M = WM / TM, LANES_N = WN / TN;

// A slot, in vectors: BK rows of A's tile, then BK rows of B's; what a thread reads for one k lies in a row.
// The vector of padding moves each row by four banks from the one before: where neighbouring threads copy
// neighbouring k, their stores fall into different banks.
constexpr int A_ROW = BM / V + 1, B_ROW = BN / V + 1;
constexpr int B_TILE = BK * A_ROW;
constexpr int SLOT = B_TILE + BK * B_ROW;

constexpr int GROUP = 16;  // tiles of C that blocks walk down before going right

static_assert(BM % WM == 0 && BN % WN == 0, "warps must tile the block's tile exactly");
static_assert(LANES_M * LANES_N == 32, "the lanes of a warp must tile its part exactly");
static_assert(LANES_M % 2 == 0 && LANES_N % 4 == 0, "lanes are numbered by blocks of 2×4");
static_assert(TM % V == 0 && TN % V == 0, "a thread reads its rows and columns as vectors");
static_assert(BK % 2 == 0, "the registers of one k are free again two k later, also across steps");
static_assert(STAGES >= 2, "one slot is read while another is filled");
static_assert(PARTS < BK, "the copies of a step begin before its last k, which waits for those of the next");
static_assert(TM % SPLIT == 0, "blocks that share a tile finish equally many rows of it");

// BYTES of global memory, or as many zeros, to `offset` in a tile in shared memory, in the background.
template <int BYTES>
__device__ __forceinline__ void copy_async(void* to, int offset, const T* from, bool exists) {
    const unsigned at = shared_address(to) + offset;
    const int bytes = exists ? BYTES : 0;
    if constexpr (BYTES == 16)  // past L1, which would gain nothing
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes));
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(at), "l"(from), "n"(BYTES), "r"(bytes));
}

// Until all but the last PENDING groups of copies have arrived, those of all threads.
template <int PENDING>
__device__ __forceinline__ void await() {
    if constexpr (ASYNC) wait_for_copies<PENDING>();
    else __syncthreads();
}

// The same place in the shared memory of another block of the cluster.
__device__ __forceinline__ const Vec* in_block(const Vec* own, int rank) {
    const Vec* theirs;
    asm("mapa.u64 %0, %1, %2;" : "=l"(theirs) : "l"(own), "r"(rank));
    return theirs;
}

// Carries one EXTENT×BK tile after the other from global to shared memory. K_INNER: the stored matrix is
// contiguous along k (A as it is, B transposed), else along m or n. WHOLE: all that the tiles cover of m or n
// exists, and vectors along it are aligned.
template <int EXTENT, bool K_INNER, bool WHOLE>
struct Carrier {
    // A thread copies COUNT pieces of W elements, neighbouring threads neighbouring ones. Elements that are
    // neighbours along k go to different rows, so there a piece is one element.
    static constexpr int W = WHOLE && !K_INNER ? V : 1;
    static constexpr int INNER = (K_INNER ? BK : EXTENT) / W;
    static constexpr int COUNT = EXTENT * BK / (W * THREADS);
    static_assert(EXTENT * BK % (W * THREADS) == 0, "every thread copies equally many pieces");
    static_assert(INNER % THREADS == 0 || THREADS % INNER == 0, "its pieces lie at constant distances");
    using Piece = Pack<W>;

    const T* next;  // this thread's first element of the tile that `fetch` takes next
    i64 ld;
    int extent;  // rows or columns of op() that exist, of EXTENT
    Piece staged[ASYNC ? 1 : COUNT];

    // The tiles that start at row or column `x0`, from `k0` on.
    __device__ Carrier(const T* matrix, i64 ld, i64 x0, i64 k0, int extent)
        : next(matrix + ((K_INNER ? x0 : k0) + outer(0)) * ld + (K_INNER ? k0 : x0) + inner(0)),
          ld(ld),
          extent(extent) {}

    // This thread's e-th piece: its place in the tile as stored, as in op(), and in bytes in shared memory.
    static __device__ int inner(int e) { return threadIdx.x % INNER * W + e * THREADS % INNER * W; }
    static __device__ int outer(int e) { return threadIdx.x / INNER + e * THREADS / INNER; }
    static __device__ int x(int e) { return K_INNER ? outer(e) : inner(e); }
    static __device__ int k(int e) { return K_INNER ? inner(e) : outer(e); }
    static __device__ int offset(int e) { return k(e) * (EXTENT / V + 1) * sizeof(Vec) + x(e) * sizeof(T); }
    static __device__ char* first(Vec* tile) { return reinterpret_cast<char*>(tile) + offset(0); }
    static __device__ int beyond_first(int e) { return offset(e) - offset(0); }

    // Starts to copy one of `parts` of a tile; zeros for what does not exist, for the first `lack` k, and if
    // it is not `wanted`. The last part moves on.
    __device__ __forceinline__ void fetch(Vec* tile, bool wanted, int lack, int part, int parts) {
#pragma unroll
        for (int e = 0; e < COUNT; ++e) {
            if (e * parts / COUNT != part) continue;
            const T* const from = next + (outer(e) - outer(0)) * ld + (inner(e) - inner(0));
            const bool exists = wanted && (WHOLE || x(e) < extent) && k(e) >= lack;
            if constexpr (ASYNC) copy_async<sizeof(Piece)>(first(tile), beyond_first(e), from, exists);
            else staged[e] = exists ? *reinterpret_cast<const Piece*>(from) : Piece{};
        }
        if (part == parts - 1) next += K_INNER ? BK : BK * ld;
    }

    // Ends it, where copies are not asynchronous: what `fetch` left in registers goes to shared memory.
    __device__ __forceinline__ void put(Vec* tile) const {
        if constexpr (!ASYNC)
#pragma unroll
            for (int e = 0; e < COUNT; ++e) *reinterpret_cast<Piece*>(first(tile) + beyond_first(e)) = staged[e];
    }
};

// The first `exist` elements of a vector of C; all of them where WHOLE.
template <bool WHOLE>
__device__ __forceinline__ Vec load(const T* at, int exist) {
    if constexpr (WHOLE) return *reinterpret_cast<const Vec*>(at);
    Vec c{};
#pragma unroll
    for (int e = 0; e < V; ++e)
        if (e < exist) c.v[e] = at[e];
    return c;
}

template <bool WHOLE>
__device__ __forceinline__ void store(T* at, const Vec& c, int exist) {
    if constexpr (WHOLE) *reinterpret_cast<Vec*>(at) = c;
    else
#pragma unroll
        for (int e = 0; e < V; ++e)
            if (e < exist) at[e] = c.v[e];
}

// What a launch is asked for.
struct Problem {
    i64 m, n, k;
    const T *A, *B;
    T* C;
    i64 lda, ldb, ldc;
    T alpha, beta;
};

// One block's work: of tile (tile_m, tile_n) of C, share `rank` of k. WHOLE: all of the tile exists, and its
// operands and itself can be read and written in vectors.
template <bool WHOLE>
__device__ __forceinline__ void multiply(const Problem& p, int tile_m, int tile_n, int rank) {
    extern __shared__ Vec memory[];
    const i64 m0 = i64(tile_m) * BM, n0 = i64(tile_n) * BN;
    const int rows = p.m - m0 < BM ? p.m - m0 : BM, cols = p.n - n0 < BN ? p.n - n0 : BN;  // that exist

    // Steps begin at multiples of BK, less `lack`: the step that is short is the first, outside of the loop.
    // As in BLAS, α = 0 reads neither A nor B.
    const i64 all = p.alpha == T(0) ? 0 : (p.k + BK - 1) / BK, begin = all * rank / SHARES;
    const int steps = all * (rank + 1) / SHARES - begin, lack = all * BK - p.k;
    Carrier<BM, !TRANS_A, WHOLE> a_carrier(p.A, p.lda, m0, begin * BK - lack, rows);
    Carrier<BN, TRANS_B, WHOLE> b_carrier(p.B, p.ldb, n0, begin * BK - lack, cols);
    const auto fetch = [&](int slot, bool wanted, int lack, int part, int parts) {
        a_carrier.fetch(memory + slot * SLOT, wanted, lack, part, parts);
        b_carrier.fetch(memory + slot * SLOT + B_TILE, wanted, lack, part, parts);
        if (ASYNC && part == parts - 1) commit_copies();
    };
    const auto put = [&](int slot) {
        a_carrier.put(memory + slot * SLOT);
        b_carrier.put(memory + slot * SLOT + B_TILE);
    };

    // A thread's rows and columns come in vectors, LANES_M and LANES_N vectors apart, so the lanes of a warp
    // read adjacent vectors, or the same one. Shared memory serves eight lanes at a time, which want the
    // fewest vectors as a block of 2×4:
    //     0 1 4 5
    //     2 3 6 7
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int lane_m = lane / 2 % 2 + lane / (2 * LANES_N) * 2;
    const int lane_n = lane % 2 + lane / 4 % (LANES_N / 2) * 2;
    const int thread_m = warp / WARPS_N * WM + lane_m * V, thread_n = warp % WARPS_N * WN + lane_n * V;

    T sum[TM][TN] = {};
    Vec a[2][TM / V], b[2][TN / V];  // for even k and for odd
    const auto read = [&](int slot, int kk) {
        const Vec* const a_row = memory + slot * SLOT + kk * A_ROW + thread_m / V;
        const Vec* const b_row = memory + slot * SLOT + B_TILE + kk * B_ROW + thread_n / V;
#pragma unroll
        for (int i = 0; i < TM / V; ++i) a[kk % 2][i] = a_row[i * LANES_M];
#pragma unroll
        for (int j = 0; j < TN / V; ++j) b[kk % 2][j] = b_row[j * LANES_N];
    };
    // To and fro along the rows: each product shares a factor with the one before, which is then at hand
    // without another access to the registers.
    const auto add_products = [&](int kk) {
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int turn = 0; turn < TN; ++turn) {
                const int j = i % 2 ? TN - 1 - turn : turn;
                sum[i][j] += a[kk % 2][i / V].v[i % V] * b[kk % 2][j / V].v[j % V];
            }
    };

    if (steps > 0) {
#pragma unroll
        for (int s = 0; s < SLOTS - 1; ++s) {
            fetch(s, s < steps, begin + s == 0 ? lack : 0, 0, 1);
            put(s);
        }
        await<SLOTS - 2>();
        read(0, 0);
    }
    int now = 0, before = SLOTS - 1;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
#pragma unroll
        for (int kk = 0; kk < BK - 1; ++kk) {
            read(now, kk + 1);
            if (kk < PARTS) fetch(before, step + SLOTS - 1 < steps, 0, kk, PARTS);
            add_products(kk);
        }
        put(before);
        // From here on the next step is complete, and nobody reads this one: all have it in registers.
        await<SLOTS - 2>();
        before = now;
        now = now + 1 == SLOTS ? 0 : now + 1;
        read(now, 0);
        add_products(BK - 1);
    }

    // Blocks that share a tile lay out their sums, and each adds up ROWS of those of every thread: the ones
    // from rank·ROWS on, which then are the first in sum[][].
    constexpr int ROWS = TM / SHARES;
    if constexpr (SHARES > 1) {
        await<0>();  // the ring is no longer needed
        Vec* const place = memory + threadIdx.x;
#pragma unroll
        for (int i = 0; i < TM * TN; ++i) place[i / V * THREADS].v[i % V] = sum[i / TN][i % TN];
        cluster_sync();
        const Vec* const mine = place + rank * (ROWS * TN / V) * THREADS;
#pragma unroll
        for (int i = 0; i < ROWS * TN; i += V) {
            Vec total{};
#pragma unroll
            for (int r = 0; r < SHARES; ++r) {
                const Vec part = in_block(mine, r)[i / V * THREADS];
#pragma unroll
                for (int e = 0; e < V; ++e) total.v[e] += part.v[e];
            }
#pragma unroll
            for (int e = 0; e < V; ++e) sum[i / TN][i % TN + e] = total.v[e];
        }
        cluster_sync();  // a block's shared memory goes when it ends
    }

#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int nth = (SHARES > 1 ? rank * ROWS : 0) + i;
        const int row = thread_m + nth / V * LANES_M * V + nth % V;
        T* const c_row = p.C + (m0 + row) * p.ldc + n0 + thread_n;
#pragma unroll
        for (int j = 0; j < TN; j += V) {
            const int exist = row < rows ? cols - thread_n - j * LANES_N : 0;
            // β = 0 must not read C, which may hold anything.
            Vec c{};
            if (p.beta != T(0)) c = load<WHOLE>(c_row + j * LANES_N, exist);
#pragma unroll
            for (int e = 0; e < V; ++e) c.v[e] = p.alpha * sum[i][j + e] + p.beta * c.v[e];
            store<WHOLE>(c_row + j * LANES_N, c, exist);
        }
    }
}

__device__ bool aligned(const T* matrix, i64 ld) {
    return reinterpret_cast<unsigned long long>(matrix) % 16 == 0 && ld % V == 0;
}

// The grid is one-dimensional, ⌈m/BM⌉·⌈n/BN⌉·SPLIT blocks of THREADS threads: grid.y would end at 65535.
extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, BLOCKS)
ffma(i64 m, i64 n, i64 k, T alpha, const T* __restrict__ A, i64 lda, const T* __restrict__ B, i64 ldb, T beta,
     T* __restrict__ C, i64 ldc
#if GUARDED
     ,
     const unsigned* __restrict__ run
#endif
) {
#if GUARDED
    if (*run == 0) return;
#endif
    const i64 tile = blockIdx.x / SPLIT;
    const int rank = blockIdx.x % SPLIT;
    if (rank >= SHARES) return;

    const i64 tiles_m = (m + BM - 1) / BM, tiles_n = (n + BN - 1) / BN;
    // As in tile_order.cuh. Written out: by the function's result the compiler would order registers otherwise.
    const i64 group = tile / (GROUP * tiles_n), within = tile % (GROUP * tiles_n);
    const i64 below = tiles_m - group * GROUP, height = below < GROUP ? below : GROUP;
    const int tile_m = group * GROUP + within % height, tile_n = within / height;
    const Problem p{m, n, k, A, B, C, lda, ldb, ldc, alpha, beta};
    const bool vectors = (!TRANS_A || aligned(A, lda)) && (TRANS_B || aligned(B, ldb)) && aligned(C, ldc);
    if ((tile_m + 1LL) * BM <= m && (tile_n + 1LL) * BN <= n && vectors) multiply<true>(p, tile_m, tile_n, rank);
    else multiply<false>(p, tile_m, tile_n, rank);
}
