// C ← α·op(A)·op(B) + β·C in float64 on the tensor cores. A, B and C may be float32 (SOURCE), whose products and
// sums are float64 all the same: elements are converted between shared memory and registers, C is rounded once.
//
// A thread block computes one BM×BN tile of C, a warp WM×WN of it, walking along k in steps of BK. Tiles of A
// and B pass through a ring of STAGES buffers in shared memory, copied there asynchronously and past the
// registers; from there each warp reads fragments, what one warp-wide instruction takes, one ahead of their use:
//
//     global ──cp.async──► stage s+STAGES-1 … stage s+1, stage s ──► fragments ──mma.sync──► sums
//
// The tensor cores do not care which row of a tile is called row 0, as long as C is stored by the same names,
// nor which k is called k 0, as long as A and B agree. So the names are dealt out such that every thread
// reads pairs of neighbours (16 bytes of float64), whichever way a tile lies. Of 16 rows (columns) × 8 k, the thread with
// g = lane / 4 and t = lane % 4 holds
//
//                   k 2t  2t+1
//     row    2g     │  ×    ×  │        of the left operand, rows 2g are the instruction's rows g, rows 2g+1
//            2g+1   │  ×    ×  │        its rows g+8; of the right one, columns 2g make one instruction,
//                                       columns 2g+1 another.
//
// The instruction wants its registers in the order of two rows of one k for its left operand, of two k of one
// column for its right one: so they need no moves where the left one is contiguous along m (or n), the right
// one along k. Where A is contiguous along k, the kernel computes Cᵀ = op(B)ᵀ·op(A)ᵀ (FLIP): then A is the right
// operand, and the ordinary A·B comes out even.
//
// To keep the reads of a warp in different banks, pairs of a tile, its units, swap places (`unit`).
//
// Slice y of the grid multiplies its part of k and stores at C + y·m·ldc, for a sum over slices to follow.
//
// Matrices are row-major with leading dimensions; addresses need be multiples of an element only, and copies
// are of pairs where all rows of A and B begin at multiples of a pair. Any m, n, k ≥ 0: what lies beyond an edge
// counts as 0 and is neither read nor written.
//
// Macros, all set by ooc_gemm/cuda_kernels: SOURCE (double or float), the type of the elements of A, B and C;
// GUARDED: a last argument says whether to run at all, for a launch whose need shows on the device; BM, BN, BK, WM,
// WN, STAGES; FOLD: steps whose sum is added to that of all without a rounding error (TwoSum: Knuth, The Art of
// Computer Programming, volume 2, 4.2.2, theorem B), or 0 for one ordinary sum; K_STEP: k of one instruction, 4, 8
// or 16 (on less than sm_90, 4 is all there is); RESIDENT: blocks on a multiprocessor at once; GROUP: tiles walked
// down before going right, so that those that run together cover a piece of C that is about square and share their
// reads in L2; TRANS_A: A is stored k×m; TRANS_B: B is stored n×k.

#include "common/async_copy.cuh"
#include "common/tile_order.cuh"
#include "common/types.cuh"

using S = SOURCE;
using T = double;

#include "common/pair_of_c.cuh"

constexpr bool A_K = !TRANS_A, B_K = TRANS_B;  // contiguous along k
constexpr bool FLIP = A_K;

constexpr int WARPS_N = BN / WN;
constexpr int THREADS = 32 * (BM / WM) * WARPS_N;
constexpr int SLICE = K_STEP < 8 ? 8 : K_STEP;  // k of a fragment: the picture above, once or twice
constexpr int BL = FLIP ? BN : BM, BR = FLIP ? BM : BN;  // of the left operand, of the right one
constexpr int LEFT = (FLIP ? WN : WM) / 16, RIGHT = (FLIP ? WM : WN) / 16;  // fragments of a warp
constexpr int TURNS = BK / SLICE * RIGHT;  // of a step: one right fragment each
constexpr int SIZE = sizeof(S), UNIT = 2 * SIZE;
constexpr int STAGE_BYTES = (BM + BN) * BK * SIZE;

static_assert(BM % WM == 0 && BN % WN == 0, "warps must tile the thread block's tile exactly");
static_assert(WM % 16 == 0 && WN % 16 == 0, "a fragment has 16 rows, or columns");
static_assert(BK % SLICE == 0, "fragments must tile a step exactly");
static_assert(BK / SLICE % 2 == 0, "a step must begin with the fragments' buffer 0, as the one before did");
static_assert(BK % 16 == 0, "eight units, which fill all banks, for a row of a right tile");
static_assert(STAGES >= 3, "one stage is filled while one is multiplied and the next is ready to be read");

// WIDTH elements from global to shared memory, of which the first `valid` are read and the others are 0: all or
// none where WHOLE. Of one of two the instruction could read half of a pair, but tools that watch accesses
// would see all of it.
template <int WIDTH, bool WHOLE>
__device__ __forceinline__ void copy(u32 to, const S* from, int valid) {
    if (WIDTH == 2 && (WHOLE || valid != 1)) {
        if (UNIT == 16)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(SIZE * valid)
                         : "memory");
        else
            asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(SIZE * valid)
                         : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(from), "r"(SIZE * valid), "n"(SIZE)
                     : "memory");
        if (WIDTH == 2 && SIZE == 8) asm volatile("st.shared.f64 [%0], %1;" ::"r"(to + SIZE), "d"(0.0) : "memory");
        if (WIDTH == 2 && SIZE == 4) asm volatile("st.shared.f32 [%0], %1;" ::"r"(to + SIZE), "f"(0.0f) : "memory");
    }
}

// The place of an element in a tile, in units. Eight of float64 fill all banks, and eight threads (two g, all
// t) read at a time: of a tile contiguous along k the pairs of k of rows 2g + i, of another one the pair of
// rows 2g of every k = 2t + i.
template <int EXTENT, bool K_INNER>
__device__ __forceinline__ int unit(int row, int k) {
    return K_INNER ? row * (BK / 2) + (k / 2 ^ (row / 2 % 2 * 4 + row / 4 % 4)) : k * (EXTENT / 2) + (row / 2 ^ k % 8);
}

// Carries tiles of an operand to shared memory, one after the other. K_INNER: it is stored contiguous along
// k, else along m or n; the other axis is the outer one. INNER neighbouring threads copy one piece of a stored
// row, WIDTH elements each; a thread's COUNT copies lie STEP rows apart, in one column.
template <int EXTENT, bool K_INNER, int WIDTH, bool WHOLE>
struct Carrier {
    static constexpr int INNER = (K_INNER ? BK : EXTENT) / WIDTH;
    static constexpr int STEP = THREADS / INNER;
    static constexpr int COUNT = EXTENT * BK / WIDTH / THREADS;
    static_assert(THREADS % INNER == 0, "all copies of a thread lie in one column of the stored tile");
    static_assert(COUNT * WIDTH * THREADS == EXTENT * BK, "every thread copies equally much");

    const S* next;  // what `fetch` takes next
    long long ld;
    int extent;  // rows (columns) of op() that exist

    static __device__ __forceinline__ int inner() { return threadIdx.x % INNER * WIDTH; }
    static __device__ __forceinline__ int outer(int e) { return threadIdx.x / INNER + e * STEP; }

    __device__ __forceinline__ Carrier(const S* corner, long long ld, int extent)
        : next(corner + outer(0) * ld + inner()), ld(ld), extent(extent) {}

    // Copy number e of a tile, each once and in order; `depth` is how much of k is left, and may be none.
    __device__ __forceinline__ void fetch(int e, u32 to, int depth) {
        const int row = K_INNER ? outer(e) : inner(), k = K_INNER ? inner() : outer(e);
        const int left = (K_INNER ? depth : extent) - inner();
        const int valid = left < 0 ? 0 : left < WIDTH ? left : WIDTH;
        const int place = unit<EXTENT, K_INNER>(row, k) * UNIT + (K_INNER ? k : row) % 2 * SIZE;
        copy<WIDTH, WHOLE>(to + place, next, outer(e) < (K_INNER ? extent : depth) ? valid : 0);
        next += STEP * ld;
        if (K_INNER && e + 1 == COUNT) next += BK - EXTENT * ld;
    }
};

// A thread's part of 16 rows (columns) × SLICE: v[j][h] is row 2g+h, and k = 2t + j, or 8 more for each two.
struct Fragment {
    T v[SLICE / 4][2];
};

__device__ __forceinline__ void load(T& x, T& y, u32 from) {
    if (SIZE == 8) {
        asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(x), "=d"(y) : "r"(from));
    } else {
        float first, second;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(first), "=f"(second) : "r"(from));
        x = first, y = second;
    }
}

// Fragment number i of a warp in a slice of k; `tile` is where the warp's rows begin. Units as above, with all
// that is constant in one term.
template <int EXTENT, bool K_INNER>
__device__ __forceinline__ void read_fragment(Fragment& to, u32 tile, int i, int slice, int g, int t) {
#pragma unroll
    for (int half = 0; half < SLICE / 8; ++half) {
        const int k = slice * SLICE + half * 8;  // + 2t
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (K_INNER) {
                const u32 at = tile + (g * BK + (t ^ (g % 2 * 4 + g / 2) ^ k / 2 % 8)) * UNIT;
                load(to.v[2 * half][h], to.v[2 * half + 1][h], at + ((i * 16 + h) * (BK / 2) + k / 16 * 8) * UNIT);
            } else {
                const u32 at = tile + (t * EXTENT + (g ^ (2 * t + h))) * UNIT;
                load(to.v[2 * half + h][0], to.v[2 * half + h][1], at + ((k + h) * (EXTENT / 2) + i * 8) * UNIT);
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

// An operand from the thread block's corner on.
struct Operand {
    const S* corner;
    long long ld;
    int extent;  // rows (columns) of op() that exist, at most a tile's
};

// Adds up all of k. WIDTH: elements of a copy. WHOLE: rows as stored have whole copies only.
template <int WIDTH, bool WHOLE>
__device__ __forceinline__ void add_up(Sums& sum, const Operand& a, const Operand& b, long long k) {
    extern __shared__ Pair stages[];
    const u32 first = shared_address(stages);
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int warp_m = warp / WARPS_N * WM, warp_n = warp % WARPS_N * WN;

    constexpr int RIGHT_TILE = BL * BK * SIZE;  // bytes from a stage's beginning
    const Operand& left = FLIP ? b : a;
    const Operand& right = FLIP ? a : b;
    constexpr bool LEFT_K = FLIP ? B_K : A_K, RIGHT_K = FLIP ? A_K : B_K;
    using LeftCarrier = Carrier<BL, LEFT_K, WIDTH, WHOLE>;
    using RightCarrier = Carrier<BR, RIGHT_K, WIDTH, WHOLE>;
    constexpr int COPIES = LeftCarrier::COUNT + RightCarrier::COUNT;
    constexpr bool SPREAD = WIDTH == 2;  // the usual case: copies between the products of a step
    LeftCarrier left_carrier(left.corner, left.ld, left.extent);
    RightCarrier right_carrier(right.corner, right.ld, right.extent);
    // Some of a step's copies: `part` of `parts`. Past the end of k they fill in zeros, which nobody reads.
    const auto fetch = [&](int stage, int depth, int part, int parts) {
        const u32 to = first + stage * STAGE_BYTES;
        // Many small copies at once: unrolled, they would take too many registers.
#pragma unroll SPREAD ? COPIES : 1
        for (int e = COPIES * part / parts; e < COPIES * (part + 1) / parts; ++e) {
            if (e < LeftCarrier::COUNT) left_carrier.fetch(e, to, depth);
            else right_carrier.fetch(e - LeftCarrier::COUNT, to + RIGHT_TILE, depth);
        }
        if (part + 1 == parts) commit_copies();
    };
    const auto depth_of = [](long long k) { return k < 0 ? 0 : k < BK ? static_cast<int>(k) : BK; };

    const u32 left_first = first + (FLIP ? warp_n : warp_m) * (LEFT_K ? BK : 1) * SIZE;
    const u32 right_first = first + RIGHT_TILE + (FLIP ? warp_m : warp_n) * (RIGHT_K ? BK : 1) * SIZE;
    // Fragments are read one ahead of their products: the right operand's one by one, the left one's by slice.
    Fragment l[2][LEFT], r[2];
    const auto read = [&](int stage, int turn) {
        const int slice = turn / RIGHT;
        if (turn % RIGHT == 0)
#pragma unroll
            for (int i = 0; i < LEFT; ++i)
                read_fragment<BL, LEFT_K>(l[slice % 2][i], left_first + stage * STAGE_BYTES, i, slice, g, t);
        read_fragment<BR, RIGHT_K>(r[turn % 2], right_first + stage * STAGE_BYTES, turn % RIGHT, slice, g, t);
    };

#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) fetch(s, depth_of(k - s * BK), 0, 1);
    wait_for_copies<STAGES - 2>();
    read(0, 0);
    int now = 0;
    Sums part = {}, lost = {};  // the sum of FOLD steps, and what additions of these have rounded away
    T *const all = sum[0][0][0], *const some = part[0][0][0], *const low = lost[0][0][0];
    for (; k > 0; k -= BK) {
        // The next stage is complete, and nobody reads any more of the one before, which is filled now.
        wait_for_copies<STAGES - 3>();
        const int before = now == 0 ? STAGES - 1 : now - 1, depth = depth_of(k - (STAGES - 1) * BK);
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            // What follows the last step's last turn is read needlessly.
            if (turn + 1 == TURNS) now = now + 1 == STAGES ? 0 : now + 1;
            read(now, (turn + 1) % TURNS);
            if (SPREAD) fetch(before, depth, turn, TURNS);
            else if (turn == 0) fetch(before, depth, 0, 1);
#pragma unroll
            for (int i = 0; i < LEFT; ++i)
#pragma unroll
                for (int odd = 0; odd < 2; ++odd)
                    multiply((FOLD ? part : sum)[i][turn % RIGHT][odd], l[turn / RIGHT % 2][i], r[turn % 2], odd);
        }
        if (FOLD && static_cast<u32>(k - 1) / BK % FOLD == 0)
#pragma unroll
            for (int e = 0; e < LEFT * RIGHT * 8; ++e) {
                const T whole = all[e] + some[e], added = whole - all[e];
                low[e] += (all[e] - (whole - added)) + (some[e] - added);
                all[e] = whole, some[e] = 0;
            }
    }
    if (FOLD)
#pragma unroll
        for (int e = 0; e < LEFT * RIGHT * 8; ++e)
            if (low[e] - low[e] == 0) all[e] += low[e];  // infinite sums have lost NaN
    wait_for_own_copies();
}

__device__ __forceinline__ void
make_tile(u32 tile, long long m, long long n, long long k, T alpha, const S* __restrict__ A, long long lda,
          const S* __restrict__ B, long long ldb, T beta, S* __restrict__ C, long long ldc) {
    // A launch has less than 2^31 blocks; divisions of 64 bits would take as long as a short tile.
    const u32 tiles_m = (m + BM - 1) / BM, tiles_n = (n + BN - 1) / BN;
    const TilePlace<u32> place = place_of_tile<GROUP>(tile, tiles_m, tiles_n);
    const long long m0 = static_cast<long long>(place.row) * BM, n0 = static_cast<long long>(place.col) * BN;
    const int rows = m - m0 < BM ? m - m0 : BM, cols = n - n0 < BN ? n - n0 : BN;

    const u32 steps = (k + BK - 1) / BK, share = (steps + gridDim.y - 1) / gridDim.y;
    const long long deep = static_cast<long long>(share) * BK, k0 = blockIdx.y * deep;
    const long long depth = k - k0 < deep ? k - k0 : deep;

    Sums sum = {};
    // As in BLAS, α = 0 reads neither A nor B.
    if (alpha != 0 && depth > 0) {
        const Operand a = {A + (A_K ? m0 * lda + k0 : k0 * lda + m0), lda, rows};
        const Operand b = {B + (B_K ? n0 * ldb + k0 : k0 * ldb + n0), ldb, cols};
        const u64 bits = reinterpret_cast<u64>(A) | reinterpret_cast<u64>(B);
        const bool aligned = bits % UNIT == 0 && (lda | ldb) % 2 == 0;
        const bool whole = ((A_K ? k : m) | (B_K ? k : n)) % 2 == 0;
        if (aligned && whole) add_up<2, true>(sum, a, b, depth);
        else if (aligned) add_up<2, false>(sum, a, b, depth);
        else add_up<1, true>(sum, a, b, depth);
    }

    // A thread holds pairs of neighbours in C: of each 16×16, rows 2g and 2g+1 and columns 4t to 4t+3, or
    // where flipped the other way round.
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int warp_m = warp / WARPS_N * WM, warp_n = warp % WARPS_N * WN;
    constexpr int DOWN = FLIP ? 4 : 2, ACROSS = 4 / DOWN;
    S* const out = C + blockIdx.y * m * ldc;
    const bool pairs = reinterpret_cast<u64>(out) % UNIT == 0 && ldc % 2 == 0;
#pragma unroll
    for (int i = 0; i < WM / 16; ++i) {
#pragma unroll
        for (int h = 0; h < DOWN; ++h) {
            const int row = warp_m + i * 16 + (FLIP ? 4 * t : 2 * g) + h;
            if (row >= rows) continue;
            S* const line = out + (m0 + row) * ldc + n0;
            const auto column = [&](int j, int q) { return warp_n + j * 16 + (FLIP ? 2 * g : 4 * t + 2 * q); };
            // A row of C is read before any of it is stored: a read that follows a store would be waited for by itself.
            // β = 0 must not read C, which may hold anything.
            Pair olds[WN / 16][ACROSS] = {};
            if (beta != 0) {
#pragma unroll
                for (int j = 0; j < WN / 16; ++j) {
#pragma unroll
                    for (int q = 0; q < ACROSS; ++q) olds[j][q] = read_pair(line, column(j, q), cols, pairs);
                }
            }
#pragma unroll
            for (int j = 0; j < WN / 16; ++j) {
                const T(&d)[2][4] = sum[FLIP ? j : i][FLIP ? i : j];
#pragma unroll
                for (int q = 0; q < ACROSS; ++q) {
                    // d[odd][2·(odd row of the left operand) + (even column of the right one) / 2 % 2]
                    const T x = FLIP ? d[h % 2][h / 2] : d[0][2 * (h % 2) + q];
                    const T y = FLIP ? d[h % 2][2 + h / 2] : d[1][2 * (h % 2) + q];
                    const Pair& old = olds[j][q];
                    const Pair c = {
                        {static_cast<S>(alpha * x + beta * old.v[0]), static_cast<S>(alpha * y + beta * old.v[1])}};
                    write_pair(line, column(j, q), cols, pairs, c);
                }
            }
        }
    }
}

// The grid is ⌈m/BM⌉·⌈n/BN⌉ blocks of THREADS threads, times the slices of k. With GUARDED, and without FOLD, there
// may be fewer: then each makes several tiles, because thousands of blocks that do nothing take some 50 µs.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
dmma(long long m, long long n, long long k, T alpha, const S* __restrict__ A, long long lda, const S* __restrict__ B,
     long long ldb, T beta, S* __restrict__ C, long long ldc
#if GUARDED
     ,
     const u32* __restrict__ guard
#endif
) {
#if GUARDED
    if (*guard == 0) return;
#endif
#if GUARDED && !FOLD
    for (u32 tile = blockIdx.x; tile < (m + BM - 1) / BM * ((n + BN - 1) / BN); tile += gridDim.x) {
        make_tile(tile, m, n, k, alpha, A, lda, B, ldb, beta, C, ldc);
        __syncthreads();  // nobody reads what the next tile replaces
    }
#else
    make_tile(blockIdx.x, m, n, k, alpha, A, lda, B, ldb, beta, C, ldc);
#endif
}
