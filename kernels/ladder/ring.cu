// C ← α·A·B + β·C, float16 with sums in float32: copies run ahead of the products, in a ring of stages.
//
// The idea of this rung: while the tensor cores multiply one pair of tiles, the next pairs are under way. A thread block
// alone keeps the tensor cores busy, so it may have the whole shared memory: for STAGES pairs of tiles, and for larger
// tiles, of which each element is used more often.
//
//             stage 0     stage 1     stage 2     stage 3
//           ┌───────────┬───────────┬───────────┬───────────┐
//     ┌────►│multiplied │ arrived   │ under way │ under way ├────┐      step 0 is in stage 0, … step 4 again
//     │     └───────────┴───────────┴───────────┴───────────┘    │
//     └──────────────────────────────────────────────────────────┘
//
// Two barriers a stage say whose it is:
//
//     full[s]    counts bytes: the copy engine has brought what was ordered  ──► warpgroups may multiply
//     empty[s]   counts warpgroups: both have multiplied what lies there     ──► the next copy may be ordered
//
// Each goes through one phase in every round of the ring, so that a waiting thread needs to know only whether the round
// is even or odd. Products overlap as well: a warpgroup orders those of a step before it waits for those of the step
// before, and gives away that stage only then.
//
// What is left to the next rung: the thread that orders copies multiplies, too. When a stage is not yet empty, its whole
// warpgroup waits with it.
//
// Rows of A and B must start at multiples of 16 bytes. Any m, n, k ≥ 0.
//
// Macros as for warpgroup.cu, and STAGES. A warpgroup for every 64 rows of the tile.

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

constexpr int WARPGROUPS = BM / 64;
constexpr int A_BYTES = BM * BK * ELEMENT_BYTES, B_BYTES = BK * BN * ELEMENT_BYTES;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;

static_assert(BM % 64 == 0 && BN % 64 == 0 && BK == 64, "whole instructions, and boxes of 128 bytes a row");
static_assert(STAGES >= 2, "one is multiplied while another is filled");

extern "C" __global__ void __launch_bounds__(128 * WARPGROUPS)
ring(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, int m, int n, int k, S alpha,
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
            barrier_init(empty + 8 * s, WARPGROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    // Orders the tiles of a step. In the first round of the ring every stage is empty, and waiting is free.
    const auto order = [&](int step) {
        const int stage = step % STAGES;
        const u32 at = stages + stage * STAGE_BYTES, arrival = full + 8 * stage;
        barrier_wait(empty + 8 * stage, step / STAGES % 2 ^ 1);
        barrier_expect(arrival, STAGE_BYTES);
        bring<false>(at, a_map, step * BK, row, arrival);
#pragma unroll
        for (int box = 0; box < BN / 64; ++box) {
            bring<false>(at + A_BYTES + box * BK * 128, b_map, col + box * 64, step * BK, arrival);
        }
    };
    if (threadIdx.x == 0) {
        for (int step = 0; step < STAGES - 1 && step < steps; ++step) order(step);
    }

    // This warpgroup's 64 rows of the tile of A, and everybody's tile of B, in stage 0.
    const u64 a_base = descriptor<A_MN>(stages + warpgroup * 64 * K_ROW), b_base = descriptor<B_MN>(stages + A_BYTES);
    S sums[ACC];
#pragma unroll
    for (int i = 0; i < ACC; ++i) sums[i] = 0;

    int stage = 0;
    u32 round = 0;
    for (int step = 0; step < steps; ++step) {
        barrier_wait(full + 8 * stage, round);
        const u64 at = static_cast<u64>(stage * STAGE_BYTES) >> 4;
        begin();
#pragma unroll
        for (int kk = 0; kk < BK / K_STEP; ++kk) {
            multiply(sums, a_base + at + kk * (k_stride<A_MN> >> 4), b_base + at + kk * (k_stride<B_MN> >> 4), 1);
        }
        commit();
        finish<1>();  // the products of the step before: their stage is the one that is filled next
        if (step > 0 && threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * ((step - 1) % STAGES), 0);
        if (threadIdx.x == 0 && step + STAGES - 1 < steps) order(step + STAGES - 1);
        __syncwarp();
        if (++stage == STAGES) stage = 0, round ^= 1;
    }
    finish<0>();
    settle(sums);
    store_sums(sums, C, ldc, row + warpgroup * 64, col, m, n, alpha, beta);
}
