// C ← α·A·B + β·C on Hopper's tensor cores: tiles brought by the copy engine, products by warpgroups.
//
// A thread block is one producer and CONSUMERS consumer warpgroups (128 threads each), which meet in a ring
// of STAGES buffers in shared memory. It stays on its multiprocessor and makes one BM×BN tile of C after
// another; while the consumers store one, the producer already fills the ring for the next:
//
//     producer:    draw a tile ──► tell the consumers (Draws)
//     producer:    wait empty[s] ──► bring A BM×BK and B BK×BN into stage s ──► (arrival raises full[s])
//     consumer w:  wait full[s]  ──► rows 64·w … of the tile += A·B of stage s ──► arrive at empty[s]
//
// CLUSTER thread blocks, one below the other, need the same tile of B: each brings a part of it and the copy
// engine writes that part to all of them. With ALONG_N they lie side by side, and share the tile of A.
//
// Clusters draw their tiles one by one, and not an equal number each: where a kernel of another stream still holds a
// multiprocessor for milliseconds, the cluster that waits for it makes fewer.
//
// PRODUCTS = 3 multiplies float32 with float16 instructions. split.cu has turned x·2^e into hi + lo, each
// with 11 significant bits, and a·b ≈ lo·hi + hi·lo + hi·hi: what is left out, lo·lo, lies 2^-22 below. The
// tensor cores truncate as they add up, so no sum in them may grow long: every PROMOTE elements of k it is
// added, with correct rounding, to a second sum in ordinary registers. 64 is short enough for the error of
// an SGEMM (measured: benchmarks/accuracy.py).
//
// Operands are described by tensor maps, which fill with zeros past every edge; rows must start at multiples
// of 16 bytes. A stored matrix is contiguous along k ("K-major": A as it is, B transposed) or along m or n
// ("MN-major"), which the tensor cores take for 16-bit types only.
//
// Products of residues (ozaki2, EPILOGUE = 1) are many products of the same shape, one for each plane of A and of B, in
// one launch. Only the residue of a sum modulo the plane's number is stored, in a byte.
//
// Macros: EPILOGUE (0: C with α and β; 1: residues; 2: the least of all sums); PER_MODULUS (planes) and MODULI, for
// residues; TYPE (1 float16, 2 tf32, 3 int8; with A_UNSIGNED, B_UNSIGNED), PRODUCTS, PROMOTE (0: never), BM, BN,
// BK, STAGES, CLUSTER, ALONG_N, A_MN, B_MN; RESIDENT: thread blocks on a multiprocessor at once (with small tiles two,
// so that one multiplies while the other stores); GROUP: rows of tiles walked down before going right, so that
// what runs together reuses L2.

#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "wgmma exists on sm_90a only"
#endif

#include "common/types.cuh"
#include "common/async_copy.cuh"
#include "common/barriers.cuh"
#include "common/cluster.cuh"
#include "common/element_types.cuh"
#include "common/planes.cuh"
#if EPILOGUE == 1
#include "common/residues.cuh"
#endif
#include "common/tensor_copies.cuh"
#include "common/tile_order.cuh"
#include "common/wgmma.cuh"

constexpr int BELOW = ALONG_N ? 1 : CLUSTER, BESIDE = ALONG_N ? CLUSTER : 1;  // tiles of a cluster
constexpr int CONSUMERS = BM / 64;
constexpr int THREADS = 128 * (1 + CONSUMERS);
constexpr int A_BYTES = BM * K_ROW, B_BYTES = BN * K_ROW;  // of one plane in one stage
constexpr int STAGE_BYTES = PLANES * (A_BYTES + B_BYTES);
constexpr int STEPS_TO_PROMOTE = PROMOTE ? PROMOTE / BK : 1;
// Of 65536 for all thread blocks of 384 or 512 on a multiprocessor: the producer needs few, the consumers hold the
// sums. Fewer threads get as many as they can name anyhow.
constexpr bool DEALT = CONSUMERS > 1;
constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = RESIDENT == 2 ? 88 : CONSUMERS == 3 ? 152 : 224;

static_assert(BM == 192 || BM == 128 || BM == 64, "one to three consumers: the registers are dealt out for those");
static_assert(!PROMOTE || PROMOTE % BK == 0, "sums are handed over between stages");
static_assert(RESIDENT == 1 || ACC <= 32, "two thread blocks share the registers");
static_assert(RESIDENT * (STAGES * STAGE_BYTES + 1024) <= 226 * 1024, "shared memory of a multiprocessor");

// A thread holds, of rows r and r + 8 of a warp's 16, two neighbouring elements of every eight. To store four at once,
// neighbours exchange one pair:
//
//     columns        0 1 │ 2 3 │ 4 5 │ 6 7 ║ 8 9 │ …
//     held by lane    0     1     2     3     0    1     2     3
//     stored by       0     0     2     2     1    1     3     3

// The sums of one warp, 16 rows from `row` and BN columns from `col`, to C; with three products (k > 0), they are scaled
// first. WHOLE: all of them lie within C, four at once at multiples of 16 bytes. What a row of C holds is read before any
// of it is stored, so that a warp waits twice for C and not for each of its reads.
template <bool WHOLE>
__device__ __forceinline__ void store_tile(const S (&d)[ACC], S* out, long long ldc, int row, int col, int m, int n,
                                           int k, S alpha, S beta, const int* a_exponents, const int* b_exponents) {
    const int lane = threadIdx.x % 32;
    const bool odd = lane % 2;
    row += lane / 4;
    col += WHOLE ? odd * 8 + lane / 2 % 2 * 4 : lane % 4 * 2;
    const auto column = [&](int j, int i) { return col + 16 * j + (WHOLE ? i : i / 2 * 8 + i % 2); };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = row + 8 * half;
        S* const line = out + r * ldc;
        const auto exists = [&](int j, int i) { return WHOLE || (r < m && column(j, i) < n); };
        Four old[BN / 16] = {};
        if (beta != 0) {
#pragma unroll
            for (int j = 0; j < BN / 16; ++j) {
                if constexpr (WHOLE) {
                    old[j] = *reinterpret_cast<const Four*>(line + column(j, 0));
                } else {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        if (exists(j, i)) old[j].x[i] = line[column(j, i)];
                    }
                }
            }
        }
#if PRODUCTS == 3
        const int a_exponent = k > 0 && exists(0, 0) ? a_exponents[r] : 0;
#endif
#pragma unroll
        for (int j = 0; j < BN / 16; ++j) {
            Four four;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const S first = d[8 * j + 2 * half + i], second = d[8 * j + 4 + 2 * half + i];
                four.x[i] = first, four.x[2 + i] = second;
                if (WHOLE) {
                    const S other = __shfl_xor_sync(~0u, odd ? first : second, 1);
                    four.x[i] = odd ? other : first, four.x[2 + i] = odd ? second : other;
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#if PRODUCTS == 3
                if (k > 0 && exists(j, i)) four.x[i] = scaled(four.x[i], a_exponent + b_exponents[column(j, i)]);
#endif
                four.x[i] = alpha * four.x[i] + beta * old[j].x[i];
                if (!WHOLE && exists(j, i)) line[column(j, i)] = four.x[i];
            }
            if (WHOLE) *reinterpret_cast<Four*>(line + column(j, 0)) = four;
        }
    }
}

#if EPILOGUE == 1
// The residues of the same sums, to a plane of bytes: four at once, up to a multiple of four columns.
__device__ __forceinline__ void
store_residues(const S (&d)[ACC], char* out, long long pitch, int row, int col, int m, int n, const Modulus& modulus) {
    const int lane = threadIdx.x % 32;
    const bool odd = lane % 2;
    row += lane / 4;
    col += odd * 8 + lane / 2 % 2 * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = row + 8 * half;
#pragma unroll
        for (int j = 0; j < BN / 16; ++j) {
            u32 pairs[2];  // of this thread, 8 columns apart
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int at = 8 * j + 4 * i + 2 * half;
                pairs[i] = (modulus.residue(d[at]) & 255) | (modulus.residue(d[at + 1]) & 255) << 8;
            }
            const u32 other = __shfl_xor_sync(~0u, odd ? pairs[0] : pairs[1], 1);
            const u32 word = odd ? other | pairs[1] << 16 : pairs[0] | other << 16;
            if (r < m && col + 16 * j < n) *reinterpret_cast<u32*>(out + r * pitch + col + 16 * j) = word;
        }
    }
}
#endif

#if EPILOGUE == 2
// The least of the same sums within C, to `least` if it is less.
__device__ __forceinline__ void store_least(const S (&d)[ACC], int* least, int row, int col, int m, int n) {
    const int lane = threadIdx.x % 32;
    row += lane / 4;
    col += lane % 4 * 2;
    int found = 0x7fffffff;
#pragma unroll
    for (int i = 0; i < ACC; ++i) {
        const bool inside = row + i / 2 % 2 * 8 < m && col + i / 4 * 8 + i % 2 < n;
        if (inside && d[i] < found) found = d[i];
    }
    found = __reduce_min_sync(~0u, found);
    if (lane == 0) atomicMin(least, found);
}
#endif

// ---- the kernel --------------------------------------------------------------------------------------------

// Where C has too few tiles to go round, k is cut in slices. Slice number s is stored at C + s·m·ldc; sum.cu
// adds them up, always in the same order.
//
// The tiles of a cluster, number t of C; where `per_row` is not 0, of a symmetric C (LowerTiles).
struct Tiles {
    int down, across;
    LowerTiles<(GROUP + 1) / 2> lower;

    __device__ Tiles(int m, int n, int per_row, int above)
        : down((m + BELOW * BM - 1) / (BELOW * BM)),
          across((n + BESIDE * BN - 1) / (BESIDE * BN)),
          lower{down, across, BELOW * BM, BESIDE * BN, above, per_row} {}
    __device__ int count() const { return lower.per_row ? lower.count() : down * across; }
    __device__ void place(int t, int& row, int& col) const {
        const TilePlace<int> place = lower.per_row ? lower.place(t) : place_of_tile<GROUP>(t, down, across);
        row = place.row * BELOW * BM;
        col = place.col * BESIDE * BN;
    }
};

// The numbers that a cluster draws, one after another: its first block's producer draws one and sends it to every block.
// All producers and warps of consumers read it there, and say so before the next is sent.
struct Draws {
    u32 sent;  // address in shared memory of a barrier, behind which lie another, `read`, and the number
    u32 parity = 0;  // of the barriers' phases

    static constexpr int READERS = CLUSTER * (1 + 4 * CONSUMERS);

    __device__ __forceinline__ void init() const {
        barrier_init(sent, 1);
        barrier_init(sent + 8, READERS);
    }
    // For the producer: before it reads the next of `count` numbers. Each cluster draws one more, which is sent as -1;
    // who draws the last of those sets *drawn back to 0.
    __device__ __forceinline__ void send(u32 rank, u32* drawn, int count) const {
        if (CLUSTER > 1) barrier_expect(sent, 4);
        if (rank != 0) return;
        barrier_wait(sent + 8, parity ^ 1);
        const int drawn_number = atomicAdd(drawn, 1);
        if (drawn_number == count + gridDim.x / CLUSTER - 1) *drawn = 0;
        const int number = drawn_number < count ? drawn_number : -1;
        if (CLUSTER == 1) {
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(sent + 16), "r"(number) : "memory");
            barrier_arrive(sent);
            return;
        }
#pragma unroll
        for (int to = 0; to < CLUSTER; ++to) barrier_send(sent + 16, number, sent, to);
    }
    __device__ __forceinline__ int number() const {
        barrier_wait(sent, parity);
        int found;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(found) : "r"(sent + 16) : "memory");
        return found;
    }
    // `says`: whether the calling thread is the one of its warp that says so.
    __device__ __forceinline__ void have_read(bool says) {
        if (says) barrier_arrive(sent + 8, 0);
        parity ^= 1;
    }
};

// One operand's share of a stage: EXTENT rows of op() × BK, of which this block brings part `part` of PARTS.
template <int EXTENT, bool mn, int PARTS>
__device__ __forceinline__ void bring_tile(u32 to, const TensorMap& map, int first, int k, int part, u32 full) {
    constexpr int BYTES = EXTENT * K_ROW;
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane, to += BYTES) {
        // In two planes a segment of hi is followed by one of lo, so that places count double.
        const int inner = mn ? first : k;
        if constexpr (mn) {
#pragma unroll
            for (int box = 0; box < EXTENT / 64; ++box) {
                const int rows = BK / PARTS;
                const int x = PLANES * (inner + box * 64) + plane * SEGMENT;
                bring<(PARTS > 1)>(to + (box * BK + part * rows) * 128, map, x, k + part * rows, full);
            }
        } else {
            const int rows = EXTENT / PARTS;
            const int x = PLANES == 1 ? inner : inner / SEGMENT * 2 * SEGMENT + inner % SEGMENT + plane * SEGMENT;
            bring<(PARTS > 1)>(to + part * rows * K_ROW, map, x, first + part * rows, full);
        }
    }
}

// C is not read where β = 0. With three products, row i and column j of the sum are still to be multiplied by
// 2^(a_exponents[i] + b_exponents[j]). `skip` may point to a flag that makes this launch do nothing.
//
// Of residues there are PER_MODULUS planes for each of `moduli`, or of *count where that is not null. A plane of an operand
// begins `a_lines` (`b_lines`) rows of the map behind the one before, a plane of C `plane` bytes.
//
// *drawn is 0 before and after each launch. Launches that may run at the same time have one each.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) __cluster_dims__(CLUSTER, 1, 1)
wgmma(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, int m, int n, int k,
      u32* __restrict__ drawn,
#if EPILOGUE == 1
      int a_lines, int b_lines, char* __restrict__ C, long long ldc, long long plane, const u32* __restrict__ count,
      int moduli, int per_row, int above
#else
      S alpha, S beta, S* __restrict__ C, long long ldc, const int* __restrict__ a_exponents,
      const int* __restrict__ b_exponents, const u32* __restrict__ skip, int slices, int per_row, int above
#endif
) {
#if EPILOGUE == 1
    const int slices = 1, planes = PER_MODULUS * (count == nullptr ? moduli : static_cast<int>(*count));
    const u32* const skip = nullptr;
#else
    const int a_lines = 0, b_lines = 0, planes = 1;
#endif
    extern __shared__ char memory[];
    __shared__ alignas(8) u64 barriers[2 * STAGES + 3];

    if (skip != nullptr && *skip != 0) return;

    const u32 stages = (shared_address(memory) + 1023) & ~1023u;  // the swizzle repeats every 1024 bytes
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    const u32 below = ALONG_N ? 0 : rank, beside = ALONG_N ? rank : 0;  // this block's tile among those of the cluster
    const Tiles tiles(m, n, per_row, above);
    const int all_steps = (k + BK - 1) / BK, slice_steps = (all_steps + slices - 1) / slices;
    const int jobs_of_plane = tiles.count() * slices, jobs = jobs_of_plane * planes;
    const auto plane_of = [&](int job) { return EPILOGUE == 1 ? job / jobs_of_plane : 0; };
    const auto place = [&](int job, int& row, int& col) {
        tiles.place((job - plane_of(job) * jobs_of_plane) / slices, row, col);
        row += below * BM;
        col += beside * BN;
    };
    const auto steps_of = [&](int job, int& first, int& last) {
        first = job % slices * slice_steps;
        last = first + slice_steps < all_steps ? first + slice_steps : all_steps;
    };
    Draws draws{empty + 8 * STAGES};

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, CLUSTER * CONSUMERS);
        }
        draws.init();
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (CLUSTER > 1) cluster_sync();
    else __syncthreads();

    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == 0) {
        if (DEALT) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x == 0) {
            int stage = 0;
            u32 round = 1;  // the parity of a barrier's phase before its first: waiting for it is free
            for (;;) {
                draws.send(rank, drawn, jobs);
                const int job = draws.number();
                draws.have_read(true);
                if (job < 0) break;
                int row, col, first, last;
                place(job, row, col);
                steps_of(job, first, last);
                row += plane_of(job) * a_lines;
                col += plane_of(job) * b_lines;
                // Every other tile is brought from the end of k, which is still in L2; sums of integers are the same.
                const bool back = TYPE == INT8 && draws.parity == 0;
                for (int step = first; step < last; ++step) {
                    barrier_wait(empty + 8 * stage, round);
                    const u32 at = stages + stage * STAGE_BYTES, arrival = full + 8 * stage;
                    const int from = (back ? first + last - 1 - step : step) * BK;
                    barrier_expect(arrival, STAGE_BYTES);
                    bring_tile<BM, A_MN, BESIDE>(at, a_map, row, from, beside, arrival);
                    bring_tile<BN, B_MN, BELOW>(at + PLANES * A_BYTES, b_map, col, from, below, arrival);
                    if (++stage == STAGES) stage = 0, round ^= 1;
                }
            }
        }
        __syncwarp();
    } else {
        if (DEALT) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        const int consumer = warpgroup - 1, thread = threadIdx.x % 128, lane = thread % 32;
        // This warpgroup's 64 rows within the tile of A, and everybody's tile of B.
        const u64 a_base = descriptor<A_MN>(stages + consumer * 64 * K_ROW);
        const u64 b_base = descriptor<B_MN>(stages + PLANES * A_BYTES);
        const auto release = [&](int stage) {
            if (thread < CLUSTER) barrier_arrive(empty + 8 * stage, thread);
        };
        int stage = 0;
        u32 round = 0;
        S sums[ACC];
#if PROMOTE
        S total[ACC];
#endif
        for (;;) {
            const int job = draws.number();
            __syncwarp();
            draws.have_read(lane == 0);
            if (job < 0) break;
            int first, last;
            steps_of(job, first, last);
            const int steps = last - first;
#if PROMOTE
#pragma unroll
            for (int i = 0; i < ACC; ++i) total[i] = 0;
#endif
            int before = -1;  // the stage whose products may still be under way
            for (int step = 0; step < steps; ++step) {
                barrier_wait(full + 8 * stage, round);
                const u64 at = static_cast<u64>(stage * STAGE_BYTES) >> 4;
                begin();
                const int fresh = PROMOTE ? step % STEPS_TO_PROMOTE == 0 : step == 0;
                // Small products first: they are truncated least while the sum is small.
#pragma unroll
                for (int product = 0; product < PRODUCTS; ++product) {
                    const u64 a = a_base + at + (product == 0 && PRODUCTS > 1 ? A_BYTES >> 4 : 0);
                    const u64 b = b_base + at + (product == 1 ? B_BYTES >> 4 : 0);
#pragma unroll
                    for (int kk = 0; kk < BK / K_STEP; ++kk) {
                        multiply(sums, a + kk * (k_stride<A_MN> >> 4), b + kk * (k_stride<B_MN> >> 4),
                                 !(fresh && product == 0 && kk == 0));
                    }
                }
                commit();
#if PROMOTE
                if (STEPS_TO_PROMOTE == 1 || (step + 1) % STEPS_TO_PROMOTE == 0 || step + 1 == steps) {
                    finish<0>();
                    settle(sums);
                    if (before >= 0) release(before);
                    release(stage);
                    before = -1;
#pragma unroll
                    for (int i = 0; i < ACC; ++i) total[i] += sums[i];
                } else
#endif
                {
                    finish<1>();
                    if (before >= 0) release(before);
                    before = stage;
                }
                if (++stage == STAGES) stage = 0, round ^= 1;
            }
            finish<0>();
            settle(sums);
            if (before >= 0) release(before);
#if PROMOTE
            S(&d)[ACC] = total;
#else
            S(&d)[ACC] = sums;
            if (steps <= 0) {
#pragma unroll
                for (int i = 0; i < ACC; ++i) d[i] = 0;
            }
#endif

            int row, col;
            place(job, row, col);
            row += consumer * 64 + thread / 32 * 16;
#if EPILOGUE == 1
            store_residues(d, C + plane_of(job) * plane, ldc, row, col, m, n, modulus(plane_of(job) / PER_MODULUS));
#elif EPILOGUE == 2
            store_least(d, C, row, col, m, n);
#else
            S* const out = C + job % slices * m * ldc;
            const bool aligned = ldc % 4 == 0 && reinterpret_cast<u64>(out) % sizeof(Four) == 0;
            if (aligned && row + 16 <= m && col + BN <= n) {
                store_tile<true>(d, out, ldc, row, col, m, n, k, alpha, beta, a_exponents, b_exponents);
            } else {
                store_tile<false>(d, out, ldc, row, col, m, n, k, alpha, beta, a_exponents, b_exponents);
            }
#endif
        }
    }
    // Nobody leaves while another block may still write to, or arrive in, this one's memory.
    if (CLUSTER > 1) cluster_sync();
}
