// C ← α·op(A)·op(B) + β·C in float64 on the tensor cores.
//
// A thread block computes one BM×BN tile of C, a warp WM×WN of it, walking along k in steps of BK. Tiles of A
// and B pass through a ring of STAGES buffers in shared memory, copied there asynchronously and past the
// registers; of a slice of k, each warp reads fragments, what one warp-wide instruction takes:
//
//     global ──cp.async──► stage s+STAGES-1 … stage s+1, stage s ──► fragments ──mma.sync──► sums
//
// The tensor cores do not care which row of a tile is called row 0, as long as C is stored by the same names,
// nor which k is called k 0, as long as A and B agree. So the names are dealt out such that every thread
// reads pairs of neighbours, 16 bytes, whether a tile is contiguous along k or along m or n. Of 16 rows
// (columns) × 8 k, the thread with g = lane / 4 and t = lane % 4 holds
//
//                   k 2t  2t+1
//     row    2g     │  ×    ×  │        of the left operand, rows 2g are the instruction's rows g, rows 2g+1
//            2g+1   │  ×    ×  │        its rows g+8; of the right one, columns 2g make one instruction,
//                                       columns 2g+1 another.
//
// In registers, the instruction wants rows g and g+8 of one k side by side, and of a column two k. So the left
// operand is best contiguous along m or n, the right one along k; otherwise pairs are taken apart, one move
// for each register. Hence FLIP: where A lies along k, the kernel computes Cᵀ = op(B)ᵀ·op(A)ᵀ.
//
// Tiles keep the order of global memory, so all transpositions are copied alike. To keep the reads of a warp
// in different banks, 16-byte units of a tile swap places (`Tile::unit`).
//
// Slice y of the grid multiplies its part of k and stores at C + y·m·ldc, for a sum over slices to follow.
//
// Matrices are row-major with leading dimensions; addresses need be multiples of 8 bytes only, and copies
// are of 16 bytes where all rows of A and B begin at multiples of 16. Any m, n, k ≥ 0: what lies beyond an edge
// counts as 0 and is neither read nor written.
//
// Macros, all set by ooc_gemm/catalog.py: BM, BN, BK, WM, WN, STAGES; K_STEP: k of one instruction, 4, 8 or 16
// (on less than sm_90, 4 is all there is); RESIDENT: blocks on a multiprocessor at once; GROUP: tiles walked
// down before going right, so that those that run together cover a piece of C that is about square and share
// their reads in L2; TRANS_A: A is stored k×m; TRANS_B: B is stored n×k. No headers: NVRTC comes without them.

using T = double;
using u32 = unsigned;
using u64 = unsigned long long;

constexpr int WARPS_N = BN / WN;
constexpr int THREADS = 32 * (BM / WM) * WARPS_N;
constexpr int SLICE = K_STEP < 8 ? 8 : K_STEP;  // k of a fragment: the picture above, once or twice
constexpr int A_ELEMENTS = BM * BK, STAGE_ELEMENTS = (BM + BN) * BK;

constexpr bool A_K = !TRANS_A, B_K = TRANS_B;  // contiguous along k
constexpr bool FLIP = A_K;
constexpr int LEFT = (FLIP ? WN : WM) / 16, RIGHT = (FLIP ? WM : WN) / 16;  // fragments of a warp

static_assert(BM % WM == 0 && BN % WN == 0, "warps must tile the thread block's tile exactly");
static_assert(WM % 16 == 0 && WN % 16 == 0, "a fragment has 16 rows, or columns");
static_assert(BK % SLICE == 0, "fragments must tile a step exactly");
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
        const T* from = next;
#pragma unroll
        for (int e = 0; e < COUNT; ++e, from += STEP * ld) {
            const u32 place = to + Here::unit(outer(e), inner()) * 16 + inner() % 2 * 8;
            copy<WIDTH>(place, from, outer(e) < (K_INNER ? extent : depth) ? valid : 0);
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

// Of the left operand's fragment i and the right one's j: [i][j][odd columns].
using Sums = T[LEFT][RIGHT][2][4];

// Adds up all of k. WIDTH: elements of one copy.
template <int WIDTH>
__device__ __forceinline__ void add_up(Sums& sum, const T* a_corner, long long lda, int a_extent, const T* b_corner,
                                       long long ldb, int b_extent, long long k) {
    extern __shared__ Pair stages[];
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int warp_m = warp / WARPS_N * WM, warp_n = warp % WARPS_N * WN;

    Carrier<BM, A_K, WIDTH> a_carrier(a_corner, lda, a_extent);
    Carrier<BN, B_K, WIDTH> b_carrier(b_corner, ldb, b_extent);
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

    const Pair* const a_first = stages + warp_m * (A_K ? BK : 1) / 2;
    const Pair* const b_first = stages + (A_ELEMENTS + warp_n * (B_K ? BK : 1)) / 2;
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) fetch();
    int now = 0;
    for (long long steps = (k + BK - 1) / BK; steps > 0; --steps) {
        // After this, the oldest stage not yet read is complete, and nobody reads the one before it any more.
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();
        const int at = now * (STAGE_ELEMENTS / 2);
#pragma unroll
        for (int kk = 0; kk < BK; kk += SLICE) {
            Fragment l[LEFT], r[RIGHT];
#pragma unroll
            for (int i = 0; i < LEFT; ++i) {
                if constexpr (FLIP) read<BN, B_K>(l[i], b_first + at, i, kk, g, t);
                else read<BM, A_K>(l[i], a_first + at, i, kk, g, t);
            }
#pragma unroll
            for (int j = 0; j < RIGHT; ++j) {
                if constexpr (FLIP) read<BM, A_K>(r[j], a_first + at, j, kk, g, t);
                else read<BN, B_K>(r[j], b_first + at, j, kk, g, t);
            }
            if (kk == 0) fetch();  // while fragments are on their way
#pragma unroll
            for (int i = 0; i < LEFT; ++i)
#pragma unroll
                for (int j = 0; j < RIGHT; ++j)
#pragma unroll
                    for (int odd = 0; odd < 2; ++odd) multiply(sum[i][j][odd], l[i], r[j], odd);
        }
        now = now + 1 == STAGES ? 0 : now + 1;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// The grid is ⌈m/BM⌉·⌈n/BN⌉ blocks of THREADS threads, times the slices of k.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
dmma(long long m, long long n, long long k, T alpha, const T* __restrict__ A, long long lda,
     const T* __restrict__ B, long long ldb, T beta, T* __restrict__ C, long long ldc) {
    const long long tiles_m = (m + BM - 1) / BM, tiles_n = (n + BN - 1) / BN;
    const long long group = blockIdx.x / (GROUP * tiles_n), within = blockIdx.x % (GROUP * tiles_n);
    const long long below = tiles_m - group * GROUP, height = below < GROUP ? below : GROUP;
    const long long m0 = (group * GROUP + within % height) * BM, n0 = within / height * BN;
    const int rows = m - m0 < BM ? m - m0 : BM, cols = n - n0 < BN ? n - n0 : BN;

    const long long share = (k + gridDim.y - 1) / gridDim.y, deep = (share + BK - 1) / BK * BK;
    const long long k0 = blockIdx.y * deep, depth = k - k0 < deep ? k - k0 : deep;

    Sums sum = {};
    // As in BLAS, α = 0 reads neither A nor B.
    if (alpha != 0 && depth > 0) {
        const T* const a = A + (A_K ? m0 * lda + k0 : k0 * lda + m0);
        const T* const b = B + (B_K ? n0 * ldb + k0 : k0 * ldb + n0);
        const u64 bits = reinterpret_cast<u64>(A) | reinterpret_cast<u64>(B);
        if (bits % 16 == 0 && (lda | ldb) % 2 == 0) add_up<2>(sum, a, lda, rows, b, ldb, cols, depth);
        else add_up<1>(sum, a, lda, rows, b, ldb, cols, depth);
    }

    // A thread holds pairs of neighbours in C: of each 16×16, rows 2g and 2g+1 and columns 4t to 4t+3, or
    // where flipped the other way round.
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int warp_m = warp / WARPS_N * WM, warp_n = warp % WARPS_N * WN;
    constexpr int DOWN = FLIP ? 4 : 2, ACROSS = 4 / DOWN;
    T* const out = C + blockIdx.y * m * ldc;
    const bool pairs = reinterpret_cast<u64>(out) % 16 == 0 && ldc % 2 == 0;
#pragma unroll
    for (int i = 0; i < WM / 16; ++i) {
#pragma unroll
        for (int h = 0; h < DOWN; ++h) {
            const int row = warp_m + i * 16 + (FLIP ? 4 * t : 2 * g) + h;
            if (row >= rows) continue;
            T* const line = out + (m0 + row) * ldc + n0;
#pragma unroll
            for (int j = 0; j < WN / 16; ++j) {
                const T(&d)[2][4] = sum[FLIP ? j : i][FLIP ? i : j];
#pragma unroll
                for (int q = 0; q < ACROSS; ++q) {
                    const int col = warp_n + j * 16 + (FLIP ? 2 * g : 4 * t + 2 * q);
                    // d[odd][2·(odd row of the left operand) + (even column of the right one) / 2 % 2]
                    const T x = FLIP ? d[h % 2][h / 2] : d[0][2 * (h % 2) + q];
                    const T y = FLIP ? d[h % 2][2 + h / 2] : d[1][2 * (h % 2) + q];
                    Pair c = {{alpha * x, alpha * y}};
                    // β = 0 must not read C, which may hold anything.
                    if (pairs && col + 1 < cols) {
                        Pair& to = *reinterpret_cast<Pair*>(line + col);
                        if (beta != 0) {
                            const Pair old = to;
                            c = {{c.v[0] + beta * old.v[0], c.v[1] + beta * old.v[1]}};
                        }
                        to = c;
                    } else {
#pragma unroll
                        for (int z = 0; z < 2; ++z)
                            if (col + z < cols) line[col + z] = beta == 0 ? c.v[z] : c.v[z] + beta * line[col + z];
                    }
                }
            }
        }
    }
}
