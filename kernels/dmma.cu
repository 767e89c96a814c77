// C ← α·op(A)·op(B) + β·C in float64 on the tensor cores.
//
// A thread block computes one BM×BN tile of C, a warp WM×WN of it, walking along k in steps of BK. Tiles of A
// and B pass through a ring of STAGES buffers in shared memory, copied there asynchronously and past the
// registers; fragments, what one warp-wide instruction takes, are read from there one slice of k ahead:
//
//     global ──cp.async──► stage s+STAGES-1 … stage s+1, stage s ──► fragments kk+1, kk ──► mma.sync ──► sums
//
// The tensor cores do not care which row of a tile is called row 0, as long as C is stored by the same names,
// nor which k is called k 0, as long as A and B agree. So the names are dealt out such that every thread
// reads pairs of neighbours, 16 bytes, whether a tile is contiguous along k or along m or n. Of 16 rows
// (columns) × 8 k, the thread with g = lane / 4 and t = lane % 4 holds
//
//                   k 2t  2t+1
//     row    2g     │  ×    ×  │        rows 2g go to the instruction as its rows g, rows 2g+1 as g+8;
//            2g+1   │  ×    ×  │        of B, columns 2g make one instruction, columns 2g+1 another.
//
// Tiles keep the order of global memory, so all transpositions are copied alike. To keep the reads of a warp
// in different banks, 16-byte units of a tile swap places (`Tile::unit`).
//
// Matrices are row-major with leading dimensions; addresses need be multiples of 8 bytes only, and copies
// are of 16 bytes where all rows of A and B begin at multiples of 16. Any m, n, k ≥ 0: what lies beyond an edge
// counts as 0 and is neither read nor written.
//
// Macros, all set by ooc_gemm/catalog.py: BM, BN, BK, WM, WN, STAGES; K_STEP: k of one instruction, 4 (on
// sm_80 all there is), 8 or 16; RESIDENT: blocks on a multiprocessor at once; GROUP: tiles walked down before
// going right, so that those that run together cover a piece of C that is about square and share their reads
// in L2; TRANS_A: A is stored k×m; TRANS_B: B is stored n×k. No headers: NVRTC comes without them.

using T = double;
using u32 = unsigned;

constexpr int WARPS_N = BN / WN;
constexpr int THREADS = 32 * (BM / WM) * WARPS_N;
constexpr int SLICE = K_STEP < 8 ? 8 : K_STEP;  // k of a fragment: the picture above, once or twice
constexpr int SLICES = BK / SLICE;
constexpr int A_ELEMENTS = BM * BK, STAGE_ELEMENTS = (BM + BN) * BK;

static_assert(BM % WM == 0 && BN % WN == 0, "warps must tile the thread block's tile exactly");
static_assert(WM % 16 == 0 && WN % 16 == 0, "a fragment has 16 rows, or columns");
static_assert(BK % SLICE == 0, "fragments must tile a step exactly");
static_assert(SLICES % 2 == 0, "a step must begin with the fragments' buffer 0, as the one before did");
static_assert(STAGES >= 2, "one stage is filled while another is multiplied");

struct alignas(16) Pair {
    T v[2];
};

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// WIDTH elements from global to shared memory, of which the first `valid` are read and the others are 0.
template <int WIDTH>
__device__ __forceinline__ void copy(u32 to, const T* from, int valid) {
    if constexpr (WIDTH == 2)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(8 * valid) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(8 * valid) : "memory");
}

// Where things lie in a tile of EXTENT rows (columns) × BK. K_INNER: it is contiguous along k, else along
// m or n; the other axis is the outer one.
template <int EXTENT, bool K_INNER>
struct Tile {
    static constexpr int INNER = K_INNER ? BK : EXTENT;

    // The place of a pair of neighbours, in 16-byte units. Eight of them fill all banks, and eight threads
    // (two g, all t) read at a time: two rows, or four pairs of k, which the swap moves apart.
    static __device__ __forceinline__ int unit(int outer, int inner) {
        const int swap = K_INNER ? (outer >> 1 & 1) * 4 : (outer >> 1 & 3) * 2;
        return (outer * (INNER / 2) + inner / 2) ^ swap;
    }
};

// Carries one tile after the other to shared memory. INNER neighbouring threads copy one piece of a stored
// row; a thread's COUNT copies lie STEP rows apart, in one column.
template <int EXTENT, bool K_INNER, int WIDTH>
struct Carrier {
    using Here = Tile<EXTENT, K_INNER>;
    static constexpr int INNER = Here::INNER / WIDTH;
    static constexpr int STEP = THREADS / INNER;
    static constexpr int COUNT = EXTENT * BK / WIDTH / THREADS;
    static_assert(THREADS % INNER == 0, "all copies of a thread lie in one column of the stored tile");
    static_assert(COUNT * WIDTH * THREADS == EXTENT * BK, "every thread copies equally much");

    const T* next;  // this thread's first element of the tile that `fetch` takes next
    long long ld;
    int extent;  // rows (columns) of op() that exist

    static __device__ __forceinline__ int inner() { return threadIdx.x % INNER * WIDTH; }
    static __device__ __forceinline__ int outer(int e) { return threadIdx.x / INNER + e * STEP; }

    __device__ __forceinline__ Carrier(const T* corner, long long ld, int extent)
        : next(corner + outer(0) * ld + inner()), ld(ld), extent(extent) {}

    // `depth` is how much of k is left. Moves on to the next tile.
    __device__ __forceinline__ void fetch(u32 to, int depth) {
        const int left = (K_INNER ? depth : extent) - inner();
        const int valid = left < 0 ? 0 : left < WIDTH ? left : WIDTH;
#pragma unroll
        for (int e = 0; e < COUNT; ++e) {
            const u32 place = to + Here::unit(outer(e), inner()) * 16 + inner() % 2 * 8;
            copy<WIDTH>(place, next + e * STEP * ld, outer(e) < (K_INNER ? extent : depth) ? valid : 0);
        }
        next += K_INNER ? BK : BK * ld;
    }
};

// A thread's part of 16 rows (columns) × SLICE: v[j][h] is row 2g+h, and k = 2t + j, or 8 more for each two.
struct Fragment {
    T v[SLICE / 4][2];
};

// `tile` starts at the warp's first row (column).
template <int EXTENT, bool K_INNER>
__device__ __forceinline__ void read(Fragment& to, const Pair* tile, int group, int k, int g, int t) {
    using Here = Tile<EXTENT, K_INNER>;
#pragma unroll
    for (int half = 0; half < SLICE / 8; ++half, k += 8) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if constexpr (K_INNER) {
                // unit(group·16 + 2g + i, k + 2t), with all that is constant in one term.
                constexpr int ROW = BK / 2;
                const int fixed = i * ROW + k / 2, swap = (g & 1) * 4;
                const Pair pair = tile[group * 16 * ROW + (fixed & ~4) + 2 * g * ROW + t + ((fixed & 4) ^ swap)];
                to.v[2 * half][i] = pair.v[0];
                to.v[2 * half + 1][i] = pair.v[1];
            } else {
                // unit(k + 2t + i, group·16 + 2g)
                constexpr int ROW = EXTENT / 2;
                const Pair pair = tile[(k + i) * ROW + group * 8 + 2 * t * ROW + (g ^ 2 * t)];
                to.v[2 * half + i][0] = pair.v[0];
                to.v[2 * half + i][1] = pair.v[1];
            }
        }
    }
}

// c += a·b for the even (odd: 1) columns of b.
__device__ __forceinline__ void multiply(T (&c)[4], const Fragment& a, const Fragment& b, int odd) {
#if __CUDA_ARCH__ < 900
#pragma unroll
    for (int j = 0; j < SLICE / 4; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                         : "+d"(c[2 * h]), "+d"(c[2 * h + 1])
                         : "d"(a.v[j][h]), "d"(b.v[j][odd]));
#elif K_STEP == 4
#pragma unroll
    for (int j = 0; j < SLICE / 4; ++j)
        asm volatile(
            "mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
            : "d"(a.v[j][0]), "d"(a.v[j][1]), "d"(b.v[j][odd]));
#elif K_STEP == 8
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
        : "d"(a.v[0][0]), "d"(a.v[0][1]), "d"(a.v[1][0]), "d"(a.v[1][1]), "d"(b.v[0][odd]), "d"(b.v[1][odd]));
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, {%0, %1, %2, %3};"
        : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
        : "d"(a.v[0][0]), "d"(a.v[0][1]), "d"(a.v[1][0]), "d"(a.v[1][1]), "d"(a.v[2][0]), "d"(a.v[2][1]),
          "d"(a.v[3][0]), "d"(a.v[3][1]), "d"(b.v[0][odd]), "d"(b.v[1][odd]), "d"(b.v[2][odd]), "d"(b.v[3][odd]));
#endif
}

using Sums = T[WM / 16][WN / 16][2][4];

// Adds up all of k. WIDTH: elements of one copy.
template <int WIDTH>
__device__ __forceinline__ void add_up(Sums& sum, const T* a_corner, long long lda, int a_extent, const T* b_corner,
                                       long long ldb, int b_extent, long long k) {
    extern __shared__ Pair stages[];
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int warp_m = warp / WARPS_N * WM, warp_n = warp % WARPS_N * WN;

    Carrier<BM, !TRANS_A, WIDTH> a_carrier(a_corner, lda, a_extent);
    Carrier<BN, TRANS_B, WIDTH> b_carrier(b_corner, ldb, b_extent);
    long long left = k;  // not yet copied
    int filled = 0;      // the stage to copy to
    // A group of copies is closed every time, with copies or without: what is waited for counts groups.
    const auto fetch = [&] {
        if (left > 0) {
            const u32 to = shared_address(stages) + filled * (STAGE_ELEMENTS * 8);
            const int depth = left < BK ? left : BK;
            a_carrier.fetch(to, depth);
            b_carrier.fetch(to + A_ELEMENTS * 8, depth);
            left -= BK;
        }
        filled = filled + 1 == STAGES ? 0 : filled + 1;
        asm volatile("cp.async.commit_group;" ::: "memory");
    };

    Fragment a[2][WM / 16], b[2][WN / 16];
    const Pair* const a_first = stages + warp_m * (TRANS_A ? 1 : BK) / 2;
    const Pair* const b_first = stages + (A_ELEMENTS + warp_n * (TRANS_B ? BK : 1)) / 2;
    const auto read_slice = [&](int buffer, int stage, int slice) {
        const int at = stage * (STAGE_ELEMENTS / 2);
#pragma unroll
        for (int i = 0; i < WM / 16; ++i) read<BM, !TRANS_A>(a[buffer][i], a_first + at, i, slice * SLICE, g, t);
#pragma unroll
        for (int j = 0; j < WN / 16; ++j) read<BN, TRANS_B>(b[buffer][j], b_first + at, j, slice * SLICE, g, t);
    };
    // After this, the oldest stage not yet read is complete, and nobody reads the one before it any more.
    const auto next_stage = [] {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();
    };

#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) fetch();
    next_stage();
    read_slice(0, 0, 0);
    int now = 0;
    for (long long steps = (k + BK - 1) / BK; steps > 0; --steps) {
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
            // The next step's first fragments are read, needlessly, after the last step too.
            if (slice + 1 == SLICES) {
                next_stage();
                now = now + 1 == STAGES ? 0 : now + 1;
            }
            read_slice((slice + 1) % 2, now, (slice + 1) % SLICES);
            if (slice == 0) fetch();
#pragma unroll
            for (int i = 0; i < WM / 16; ++i)
#pragma unroll
                for (int j = 0; j < WN / 16; ++j)
#pragma unroll
                    for (int odd = 0; odd < 2; ++odd) multiply(sum[i][j][odd], a[slice % 2][i], b[slice % 2][j], odd);
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// The grid is one-dimensional, ⌈m/BM⌉·⌈n/BN⌉ blocks of THREADS threads: grid.y would end at 65535.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
dmma(long long m, long long n, long long k, T alpha, const T* __restrict__ A, long long lda,
     const T* __restrict__ B, long long ldb, T beta, T* __restrict__ C, long long ldc) {
    const long long tiles_m = (m + BM - 1) / BM, tiles_n = (n + BN - 1) / BN;
    const long long group = blockIdx.x / (GROUP * tiles_n), within = blockIdx.x % (GROUP * tiles_n);
    const long long below = tiles_m - group * GROUP, height = below < GROUP ? below : GROUP;
    const long long m0 = (group * GROUP + within % height) * BM, n0 = within / height * BN;
    const int rows = m - m0 < BM ? m - m0 : BM, cols = n - n0 < BN ? n - n0 : BN;

    Sums sum = {};
    // As in BLAS, α = 0 reads neither A nor B.
    if (alpha != 0 && k > 0) {
        const T* const a = A + (TRANS_A ? m0 : m0 * lda);
        const T* const b = B + (TRANS_B ? n0 * ldb : n0);
        const auto bits = reinterpret_cast<unsigned long long>(A) | reinterpret_cast<unsigned long long>(B);
        if (bits % 16 == 0 && (lda | ldb) % 2 == 0) add_up<2>(sum, a, lda, rows, b, ldb, cols, k);
        else add_up<1>(sum, a, lda, rows, b, ldb, cols, k);
    }

    // Of the 16×16 elements of a pair of fragments, a thread holds rows 2g and 2g+1, columns 4t to 4t+3.
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const bool pairs = reinterpret_cast<unsigned long long>(C) % 16 == 0 && ldc % 2 == 0;
#pragma unroll
    for (int i = 0; i < WM / 16; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = warp / WARPS_N * WM + i * 16 + 2 * g + h;
            T* const line = C + (m0 + row) * ldc + n0;
            if (row >= rows) continue;
#pragma unroll
            for (int j = 0; j < WN / 16; ++j) {
#pragma unroll
                for (int q = 0; q < 2; ++q) {
                    const int col = warp % WARPS_N * WN + j * 16 + 4 * t + 2 * q;
                    Pair out = {{alpha * sum[i][j][0][2 * h + q], alpha * sum[i][j][1][2 * h + q]}};
                    Pair& c = *reinterpret_cast<Pair*>(line + col);
                    // β = 0 must not read C, which may hold anything.
                    if (pairs && col + 1 < cols) {
                        if (beta != 0) {
                            const Pair old = c;
                            out = {{out.v[0] + beta * old.v[0], out.v[1] + beta * old.v[1]}};
                        }
                        c = out;
                    } else {
#pragma unroll
                        for (int x = 0; x < 2; ++x)
                            if (col + x < cols) line[col + x] = beta == 0 ? out.v[x] : out.v[x] + beta * line[col + x];
                    }
                }
            }
        }
    }
}
