// C ← α·A·B + β·C, float16 with sums in float32: one warpgroup orders copies, the others multiply.
//
// The idea of this rung: whoever orders copies does nothing else, so that nobody who multiplies waits for a stage to be
// empty. The ring is that of ring.cu; the two kinds of warpgroups meet in its barriers, and nowhere else:
//
//     producer:    wait empty[s] ──► order A BM×BK and B BK×BN into stage s ──► (their arrival raises full[s])
//     consumer w:  wait full[s]  ──► rows 64·w … of the tile += A·B of stage s ──► arrive at empty[s]
//
// Registers go where they are needed. A multiprocessor has 65536, and a launch gives every thread of a block the same
// number of them: 168 for 384 threads. The producer needs a few, a consumer needs BN/2 for its sums alone, and some for
// everything else:
//
//     at launch            3 warpgroups × 128 threads × 168                        = 64512
//     after setmaxnreg     128 threads × 40 (producer) + 256 threads × 232         = 64512
//
// setmaxnreg is an order of a whole warpgroup; the one that wants more waits until another has given some away.
//
// Rows of A and B must start at multiples of 16 bytes. Any m, n, k ≥ 0.
//
// Macros as for ring.cu. A consumer for every 64 rows of the tile.

#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "wgmma exists on sm_90a only"
#endif

#include "common/types.cuh"
#include "common/async_copy.cuh"
#include "common/barriers.cuh"
#include "common/element_types.cuh"
#include "common/tensor_copies.cuh"
#include "common/tile_order.cuh"
#include "common/wgmma.cuh"
#include "common/fragment.cuh"

constexpr int CONSUMERS = BM / 64;
constexpr int A_BYTES = BM * BK * ELEMENT_BYTES, B_BYTES = BK * BN * ELEMENT_BYTES;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

static_assert(BM == 128, "two consumers: the registers are dealt out for those");
static_assert(BN % 64 == 0 && BK == 64, "boxes of 128 bytes a row");

extern "C" __global__ void __launch_bounds__(128 * (1 + CONSUMERS), 1)
producer(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, int m, int n, int k, S alpha,
         S beta, S* __restrict__ C, long long ldc) {
    extern __shared__ char memory[];
    __shared__ alignas(8) u64 barriers[2 * STAGES];

    const u32 stages = (shared_address(memory) + 1023) & ~1023u;  // the swizzle repeats every 1024 bytes
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    const TilePlace<int> place = place_of_tile<GROUP, int>(blockIdx.x, (m + BM - 1) / BM, (n + BN - 1) / BN);
    const int row = place.row * BM, col = place.col * BN, steps = (k + BK - 1) / BK;
    const int warpgroup = threadIdx.x / 128;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, CONSUMERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    int stage = 0;
    u32 round = 0;
    const auto advance = [&] {
        if (++stage == STAGES) stage = 0, round ^= 1;
    };
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x == 0) {
            for (int step = 0; step < steps; ++step, advance()) {
                barrier_wait(empty + 8 * stage, round ^ 1);  // free in the first round: the stages are empty
                const u32 at = stages + stage * STAGE_BYTES, arrival = full + 8 * stage;
                barrier_expect(arrival, STAGE_BYTES);
                bring<false>(at, a_map, step * BK, row, arrival);
#pragma unroll
                for (int box = 0; box < BN / 64; ++box) {
                    bring<false>(at + A_BYTES + box * BK * 128, b_map, col + box * 64, step * BK, arrival);
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        const int consumer = warpgroup - 1;
        const u64 a_base = descriptor<A_MN>(stages + consumer * 64 * K_ROW);
        const u64 b_base = descriptor<B_MN>(stages + A_BYTES);
        S sums[ACC];
#pragma unroll
        for (int i = 0; i < ACC; ++i) sums[i] = 0;

        int before = -1;  // the stage whose products may still be under way
        for (int step = 0; step < steps; ++step, advance()) {
            barrier_wait(full + 8 * stage, round);
            const u64 at = static_cast<u64>(stage * STAGE_BYTES) >> 4;
            begin();
#pragma unroll
            for (int kk = 0; kk < BK / K_STEP; ++kk) {
                multiply(sums, a_base + at + kk * (k_stride<A_MN> >> 4), b_base + at + kk * (k_stride<B_MN> >> 4), 1);
            }
            commit();
            finish<1>();
            if (before >= 0 && threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * before, 0);
            before = stage;
        }
        finish<0>();
        settle(sums);
        store_sums(sums, C, ldc, row + consumer * 64, col, m, n, alpha, beta);
    }
}
