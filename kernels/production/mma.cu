// C ← α·op(A)·op(B) + β·C on the tensor cores of sm_80 and later, with instructions that a warp issues.
//
// The kernel of GPUs that have no wgmma (wgmma.cu, Hopper): same types, same operands, same arithmetic. A
// thread block computes one BM×BN tile of C, a warp WM×WN of it, in steps of BK along k:
//
//     global ──cp.async──► stage s+STAGES-1 … stage s+1, stage s ──ldmatrix──► fragments ──mma.sync──► sums
//
// To the instructions all types look alike. They take 32 bytes of k at a time (K_STEP elements), as matrices
// of 8 rows × 16 bytes, which `ldmatrix` deals out to the threads of a warp:
//
//              16 bytes  16 bytes                        16 bytes  16 bytes
//     8 rows    [ 0 ]     [ 2 ]           8 columns       [ 0 ]     [ 1 ]
//     8 rows    [ 1 ]     [ 3 ]           8 columns       [ 2 ]     [ 3 ]
//              a fragment of A                  two fragments of B, one below the other
//
// That is for operands contiguous along k. Others are contiguous along m or n (MN): 16-bit ones are transposed
// on the way, 8×8 elements at a time; 32-bit ones need not be, for there a matrix is 8 rows × 4 k, an element a
// thread, which every thread reads for itself. 16-byte units of a tile swap places (`place`), so that what is
// read at a time lies in different banks.
//
// PRODUCTS = 3 multiplies float32 that split.cu has turned into two float16, x = 2^e·(hi + lo): a·b ≈
// lo·hi + hi·lo + hi·hi. The tensor cores truncate as they add up, so every step's sum is added, with
// correct rounding, to a second one in ordinary registers.
//
// Slice y of the grid multiplies its part of k and stores at C + y·m·ldc, for a sum over slices to follow.
//
// Matrices are row-major; rows of A and B begin at multiples of 16 bytes. Any m, n, k ≥ 0: what lies beyond an
// edge counts as 0 and is neither read nor written.
//
// Macros, all set by ooc_gemm/cuda_kernels: TYPE (1 float16, 2 tf32, 3 int8; with A_UNSIGNED, B_UNSIGNED),
// PRODUCTS, BM, BN, BK, WM, WN, STAGES, A_MN, B_MN; RESIDENT: blocks on a multiprocessor at once; GROUP: tiles
// walked down before going right, so that what runs together reuses L2.

#include "common/async_copy.cuh"
#include "common/element_types.cuh"
#include "common/pair_of_c.cuh"
#include "common/planes.cuh"
#include "common/tile_order.cuh"
#include "common/types.cuh"

constexpr int SLICES = BK / K_STEP;
constexpr int UNIT = 16;
constexpr int WARPS_N = BN / WN;
constexpr int THREADS = 32 * (BM / WM) * WARPS_N;
constexpr int A_BYTES = BM * BK * ELEMENT_BYTES, B_BYTES = BN * BK * ELEMENT_BYTES;  // of one plane in one stage
constexpr int STAGE_BYTES = PLANES * (A_BYTES + B_BYTES);

static_assert(ELEMENT_BYTES > 1 || (!A_MN && !B_MN), "four neighbours along k share a register");
static_assert(PRODUCTS == 1 || SEGMENT % BK == 0, "a step lies in one segment");
static_assert(BM % WM == 0 && BN % WN == 0, "warps must tile the thread block's tile exactly");
static_assert(WM % 16 == 0 && WN % 16 == 0, "ldmatrix brings 16 rows of A, 16 columns of B");
static_assert(SLICES % 2 == 0, "a step must begin with the fragments' buffer 0, as the one before did");
static_assert(STAGES >= 2, "one stage is filled while another is multiplied");

// A unit from global to shared memory, of which the first `size` bytes are read and the others are 0: all or none
// where WHOLE. Only all or none of a copy are asked for: of a part, tools that watch accesses would see the whole.
template <bool WHOLE>
__device__ __forceinline__ void copy(u32 to, const char* from, int size) {
    if (WHOLE || size == 0 || size == UNIT) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
        return;
    }
#pragma unroll 1
    for (int at = 0; at < UNIT; at += 4) {
        const int left = size - at;
        if (left >= 4 || left <= 0) {
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to + at), "l"(from + at),
                         "r"(left > 0 ? 4 : 0)
                         : "memory");
        } else {
            u32 word = 0;
            for (int b = 0; b < left; ++b) word |= static_cast<u32>(static_cast<unsigned char>(from[at + b])) << 8 * b;
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + at), "r"(word) : "memory");
        }
    }
}

// A tile of EXTENT rows (columns) of one plane, as stored: rows of UNITS, contiguous along k or along m or n.
template <int EXTENT, bool MN>
struct Tile {
    static constexpr int ROWS = MN ? BK : EXTENT;
    static constexpr int UNITS = (MN ? EXTENT : BK) * ELEMENT_BYTES / UNIT;
    static constexpr bool WORDS =
        MN && ELEMENT_BYTES == 4;  // read one by one: two neighbouring units of each of four rows
    static_assert((UNITS == 4 && !WORDS) || UNITS % 8 == 0, "eight units fill all banks");

    // What a row's units are moved by: eight rows, one below the other, get eight different places.
    static __device__ __forceinline__ int swap(int row) {
        return WORDS ? row % 4 * 2 : UNITS == 4 ? row / 2 % 4 : row % 8;
    }
    static __device__ __forceinline__ int place(int row, int unit) { return (row * UNITS + (unit ^ swap(row))) * UNIT; }
};

// Carries one tile after the other to shared memory. UNITS neighbouring threads copy one stored row; a
// thread's COUNT copies lie STEP rows apart, in one column.
template <int EXTENT, bool MN>
struct Carrier {
    using Here = Tile<EXTENT, MN>;
    static constexpr int STEP = THREADS / Here::UNITS;
    static constexpr int COUNT = Here::ROWS / STEP;
    static_assert(THREADS % Here::UNITS == 0, "all copies of a thread lie in one column of the stored tile");
    static_assert(COUNT * STEP == Here::ROWS, "every thread copies equally much");

    const char* corner;  // this thread's first unit at k = 0
    long long ld;        // in bytes
    int extent;          // rows (columns) of op() that exist

    static __device__ __forceinline__ int row() { return threadIdx.x / Here::UNITS; }
    static __device__ __forceinline__ int unit() { return threadIdx.x % Here::UNITS; }

    // Bytes from the beginning of a stored row to element i.
    static __device__ __forceinline__ long long along(long long i) {
        return PLANES == 2 ? i / SEGMENT * (2 * SEGMENT * ELEMENT_BYTES) + i % SEGMENT * ELEMENT_BYTES
                           : i * ELEMENT_BYTES;
    }

    // `first` is the first row (column) of op(), of `all`; `elements` from one stored row to the next.
    __device__ __forceinline__ Carrier(const void* matrix, long long elements, long long first, long long all)
        : ld(elements * ELEMENT_BYTES * PLANES), extent(all - first < EXTENT ? all - first : EXTENT) {
        const int inner = unit() * (UNIT / ELEMENT_BYTES);
        corner =
            static_cast<const char*>(matrix) + (MN ? row() : first + row()) * ld + along(MN ? first + inner : inner);
    }

    // The tile that begins at k; `depth` is how much of k exists from there on. WHOLE: all units of rows as stored
    // are whole.
    template <bool WHOLE>
    __device__ __forceinline__ void fetch(u32 to, long long k, int depth) const {
        const int left = (MN ? extent : depth) * ELEMENT_BYTES - unit() * UNIT;
        const int valid = left <= 0 ? 0 : WHOLE || left >= UNIT ? UNIT : left;
        const char* from = corner + (MN ? k * ld : along(k));
#pragma unroll
        for (int e = 0; e < COUNT; ++e, from += STEP * ld) {
            const int r = row() + e * STEP, size = r < (MN ? depth : extent) ? valid : 0;
#pragma unroll
            for (int plane = 0; plane < PLANES; ++plane)
                copy<WHOLE>(to + plane * EXTENT * BK * ELEMENT_BYTES + Here::place(r, unit()),
                            from + plane * SEGMENT * ELEMENT_BYTES, size);
        }
    }
};

// Reads fragments: four matrices at a time, whose rows' addresses the warp's four groups of eight threads give;
// or a thread's own elements of them, in row (column) lane / 4 and k lane % 4 of each. OUTER_FIRST: matrix 1
// lies beside matrix 0 along m or n (A), else along k (B).
template <int EXTENT, bool MN, bool OUTER_FIRST>
struct Reader {
    using Here = Tile<EXTENT, MN>;
    u32 base;  // of this thread's row, its units not yet counted
    int first, swap;

    // `offset`: where the warp begins in the tile's rows (columns).
    __device__ __forceinline__ Reader(u32 tile, int offset) {
        const int matrix = threadIdx.x % 32 / 8, line = threadIdx.x % 8;
        const int row = Here::WORDS ? threadIdx.x % 4
                        : MN        ? deep(matrix) * 8 + line
                                    : offset + outer(matrix) * 8 + line;
        base = tile + row * Here::UNITS * UNIT;
        first = MN ? offset * ELEMENT_BYTES / UNIT + outer(matrix) : deep(matrix);
        swap = Here::swap(row);
        if (Here::WORDS) {
            base += threadIdx.x / 4 % 4 * ELEMENT_BYTES;
            first = (offset + threadIdx.x % 32 / 4) * ELEMENT_BYTES / UNIT;
        }
    }

    // Where one of the four matrices lies, along m or n and along k.
    static __device__ __forceinline__ int outer(int matrix) { return OUTER_FIRST ? matrix % 2 : matrix / 2; }
    static __device__ __forceinline__ int deep(int matrix) { return OUTER_FIRST ? matrix / 2 : matrix % 2; }

    // Rows (columns) 16·i … of the warp, in one slice of k.
    __device__ __forceinline__ void read(u32 (&to)[4], u32 stage, int i, int slice) const {
        // Neither 16 rows down nor 16 steps of k change `swap`.
        const int rows = MN ? slice * K_STEP : i * 16, unit = first + (MN ? i : slice) * 2;
        const u32 at = base + stage + rows * Here::UNITS * UNIT + (unit ^ swap) * UNIT;
        if constexpr (Here::WORDS)
#pragma unroll
            for (int x = 0; x < 4; ++x)
                asm volatile("ld.shared.u32 %0, [%1];"
                             : "=r"(to[x])
                             : "r"(base + stage + (rows + deep(x) * 4) * Here::UNITS * UNIT +
                                   ((first + (i * 2 + outer(x)) * 2) ^ swap) * UNIT)
                             : "memory");
        else if constexpr (MN)
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                         : "r"(at)
                         : "memory");
        else
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                         : "r"(at)
                         : "memory");
#if TYPE == 2
        // The instruction would cut the bits off.
#pragma unroll
        for (int x = 0; x < 4; ++x) asm("cvt.rna.tf32.f32 %0, %0;" : "+r"(to[x]));
#endif
    }
};

#define SHAPE_AND_TYPES(shape, d, a, b) "mma.sync.aligned." shape ".row.col." d "." a "." b "." d
#define REGISTERS " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#if TYPE == 1
#define MULTIPLY SHAPE_AND_TYPES("m16n8k16", "f32", "f16", "f16") REGISTERS
#elif TYPE == 2
#define MULTIPLY SHAPE_AND_TYPES("m16n8k8", "f32", "tf32", "tf32") REGISTERS
#else
#define MULTIPLY SHAPE_AND_TYPES("m16n8k32", "s32", A_INT8, B_INT8) REGISTERS
#endif

// d += a·b of 16×K_STEP and K_STEP×8: the thread with g = lane / 4, t = lane % 4 holds columns 2t and 2t+1 of
// row g, then of row g + 8.
__device__ __forceinline__ void multiply(S (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(MULTIPLY
                 : SUM_REGISTER(d[0]), SUM_REGISTER(d[1]), SUM_REGISTER(d[2]), SUM_REGISTER(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The grid is ⌈m/BM⌉·⌈n/BN⌉ blocks of THREADS threads, times the slices of k.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
mma(long long m, long long n, long long k, S alpha, const void* __restrict__ A, long long lda,
    const void* __restrict__ B, long long ldb, S beta, S* __restrict__ C, long long ldc
#if PRODUCTS == 3
    ,
    const int* __restrict__ a_exponents, const int* __restrict__ b_exponents, const u32* __restrict__ skip
#endif
) {
#if PRODUCTS == 3
    if (skip != nullptr && *skip != 0) return;
#endif
    extern __shared__ uint4 stages[];
    const u32 shared = shared_address(stages);

    // A launch has less than 2^31 blocks; divisions of 64 bits would take as long as a short tile.
    const u32 tiles_m = (m + BM - 1) / BM, tiles_n = (n + BN - 1) / BN;
    const TilePlace<u32> place = place_of_tile<GROUP>(blockIdx.x, tiles_m, tiles_n);
    const long long m0 = static_cast<long long>(place.row) * BM, n0 = static_cast<long long>(place.col) * BN;

    // As in BLAS, α = 0 reads neither A nor B.
    const u32 steps = alpha == S(0) ? 0 : (k + BK - 1) / BK, share = (steps + gridDim.y - 1) / gridDim.y;
    u32 next = blockIdx.y * share;
    const u32 last = next + share < steps ? next + share : steps;

    const Carrier<BM, A_MN> a_carrier(A, lda, m0, m);
    const Carrier<BN, B_MN> b_carrier(B, ldb, n0, n);
    int todo = last - next;  // below 0 in a slice past the end
    u32 filled = 0;  // the stage to copy to
    // A group of copies is closed every time, with copies or without: what is waited for counts groups.
    const auto fetch = [&] {
        if (next < last) {
            const long long at = static_cast<long long>(next) * BK;
            const int depth = k - at < BK ? k - at : BK;
            const u32 b_tile = shared + filled + PLANES * A_BYTES;
            // Only tiles at an edge have units that are cut; planes of split.cu end in zeros, up to a segment.
            const int cut = (A_MN ? a_carrier.extent : depth) | (B_MN ? b_carrier.extent : depth);
            if (PLANES == 2 || cut % (UNIT / ELEMENT_BYTES) == 0) {
                a_carrier.template fetch<true>(shared + filled, at, depth);
                b_carrier.template fetch<true>(b_tile, at, depth);
            } else {
                a_carrier.template fetch<false>(shared + filled, at, depth);
                b_carrier.template fetch<false>(b_tile, at, depth);
            }
            ++next;
        }
        filled = filled + STAGE_BYTES == STAGES * STAGE_BYTES ? 0 : filled + STAGE_BYTES;
        commit_copies();
    };

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_m = warp / WARPS_N * WM, warp_n = warp % WARPS_N * WN;
    const Reader<BM, A_MN, true> a_reader(shared, warp_m);
    const Reader<BN, B_MN, false> b_reader(shared + PLANES * A_BYTES, warp_n);
    u32 a[2][PLANES][WM / 16][4], b[2][PLANES][WN / 16][4];
    const auto read_slice = [&](int buffer, u32 stage, int slice) {
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane) {
#pragma unroll
            for (int i = 0; i < WM / 16; ++i) a_reader.read(a[buffer][plane][i], stage + plane * A_BYTES, i, slice);
#pragma unroll
            for (int j = 0; j < WN / 16; ++j) b_reader.read(b[buffer][plane][j], stage + plane * B_BYTES, j, slice);
        }
    };
    // After this, the oldest stage not yet read is complete, and nobody reads the one before it any more.
    const auto next_stage = [] { wait_for_copies<STAGES - 2>(); };

    S sum[WM / 16][WN / 8][4] = {};
#if PRODUCTS == 3
    S total[WM / 16][WN / 8][4] = {};
#else
    auto& total = sum;
#endif
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) fetch();
    next_stage();
    read_slice(0, 0, 0);
    u32 now = 0;
    for (; todo > 0; --todo) {
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
            // The next step's first fragments are read, needlessly, after the last step too.
            if (slice + 1 == SLICES) {
                next_stage();
                now = now + STAGE_BYTES == STAGES * STAGE_BYTES ? 0 : now + STAGE_BYTES;
            }
            read_slice((slice + 1) % 2, now, (slice + 1) % SLICES);
            if (slice == 0) fetch();
            // Small products first: they are truncated least while the sum is small.
#pragma unroll
            for (int product = 0; product < PRODUCTS; ++product)
#pragma unroll
                for (int i = 0; i < WM / 16; ++i)
#pragma unroll
                    for (int j = 0; j < WN / 8; ++j) {
                        const u32(&x)[4] = a[slice % 2][product == 0 && PRODUCTS == 3][i];
                        const u32(&y)[4] = b[slice % 2][product == 1][j / 2];
                        multiply(sum[i][j], x, y[j % 2 * 2], y[j % 2 * 2 + 1]);
                    }
        }
#if PRODUCTS == 3
#pragma unroll
        for (int i = 0; i < WM / 16; ++i)
#pragma unroll
            for (int j = 0; j < WN / 8; ++j)
#pragma unroll
                for (int x = 0; x < 4; ++x) total[i][j][x] += sum[i][j][x], sum[i][j][x] = 0;
#endif
    }
    wait_for_own_copies();

    S* const out = C + blockIdx.y * m * ldc;
    const bool pairs = ldc % 2 == 0 && reinterpret_cast<u64>(out) % sizeof(Pair) == 0;
#pragma unroll
    for (int i = 0; i < WM / 16; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const long long row = m0 + warp_m + i * 16 + half * 8 + lane / 4;
            if (row >= m) continue;
            S* const line = out + row * ldc;
#if PRODUCTS == 3
            const int a_exponent = steps > 0 ? a_exponents[row] : 0;
#endif
            const auto column = [&](int j) { return n0 + warp_n + j * 8 + lane % 4 * 2; };
            // A row of C is read before any of it is stored: a read that follows a store would be waited for by itself.
            // β = 0 must not read C, which may hold anything.
            Pair old[WN / 8] = {};
            if (beta != S(0)) {
#pragma unroll
                for (int j = 0; j < WN / 8; ++j) old[j] = read_pair(line, column(j), n, pairs);
            }
#pragma unroll
            for (int j = 0; j < WN / 8; ++j) {
                const long long col = column(j);
                Pair pair = {{total[i][j][2 * half], total[i][j][2 * half + 1]}};
#pragma unroll
                for (int x = 0; x < 2; ++x) {
                    if (col + x >= n) continue;
#if PRODUCTS == 3
                    if (steps > 0) pair.v[x] = scaled(pair.v[x], a_exponent + b_exponents[col + x]);
#endif
                    pair.v[x] = alpha * pair.v[x] + beta * old[j].v[x];
                }
                write_pair(line, col, n, pairs, pair);
            }
        }
    }
}
