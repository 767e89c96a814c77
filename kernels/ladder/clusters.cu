// C ← α·A·B + β·C, float16 with sums in float32: pairs of thread blocks share tiles, and stay for many tiles of C.
//
// The ideas of this rung, the last one below the production kernel, are two answers to one question: what still keeps
// the tensor cores of producer.cu waiting?
//
// L2, from which every block reads its tiles. CLUSTER thread blocks, one below the other, need the same tile of B. So
// each brings a part of it, and the copy engine writes that part into the shared memory of all of them (multicast):
//
//     block 0:  A of rows 0 … 127     ┐   upper half of B's tile ──► blocks 0 and 1
//     block 1:  A of rows 128 … 255   ┘   lower half of B's tile ──► blocks 0 and 1
//
// A stage is then full when the parts of all blocks have come, and empty when the consumers of all blocks are through:
// who fills it writes to all of them.
//
// And the end of a tile, when nothing is multiplied while C is stored, and the beginning, when the ring is empty. The
// grid is persistent: as many clusters as fit on the device at once, each of which makes one tile of C after another.
// While the consumers store one, the producer already fills the ring for the next:
//
//     producer    │ tile 0 ─────────────────► │ tile 1 ─────────────────► │ tile 2 ─── …
//     consumers     │ tile 0 ─────────────► store │ tile 1 ─────────────► store │ …
//
// Rows of A and B must start at multiples of 16 bytes. Any m, n, k ≥ 0.
//
// Macros as for producer.cu, and CLUSTER: thread blocks in a cluster. What the production kernel adds: other types,
// layouts and tiles, k in slices, three products for float32, and wider stores.

#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "wgmma exists on sm_90a only"
#endif

#include "common/types.cuh"
#include "common/async_copy.cuh"
#include "common/barriers.cuh"
#include "common/cluster.cuh"
#include "common/element_types.cuh"
#include "common/tensor_copies.cuh"
#include "common/tile_order.cuh"
#include "common/wgmma.cuh"
#include "common/fragment.cuh"

constexpr int CONSUMERS = BM / 64;
constexpr int A_BYTES = BM * BK * ELEMENT_BYTES, B_BYTES = BK * BN * ELEMENT_BYTES;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
constexpr int SHARE = BK / CLUSTER;  // rows of B's tile that a block brings for all

static_assert(BM == 128, "two consumers: the registers are dealt out for those");
static_assert(BN % 64 == 0 && BK == 64, "boxes of 128 bytes a row");
static_assert(SHARE % 8 == 0, "a box starts where the swizzle does");

extern "C" __global__ void __launch_bounds__(128 * (1 + CONSUMERS), 1) __cluster_dims__(CLUSTER, 1, 1)
clusters(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, int m, int n, int k, S alpha,
         S beta, S* __restrict__ C, long long ldc) {
    extern __shared__ char memory[];
    __shared__ alignas(8) u64 barriers[2 * STAGES];

    const u32 stages = (shared_address(memory) + 1023) & ~1023u;  // the swizzle repeats every 1024 bytes
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    const int rank = static_cast<int>(cluster_rank()), warpgroup = threadIdx.x / 128;
    // Tiles of a cluster, CLUSTER·BM rows of C each.
    const int down = (m + CLUSTER * BM - 1) / (CLUSTER * BM), across = (n + BN - 1) / BN, steps = (k + BK - 1) / BK;
    const int first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, CLUSTER * CONSUMERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();  // other blocks will arrive at these barriers

    int stage = 0;
    u32 round = 0;  // both go on from tile to tile
    const auto advance = [&] {
        if (++stage == STAGES) stage = 0, round ^= 1;
    };
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x == 0) {
            for (int tile = first; tile < down * across; tile += stride) {
                const TilePlace<int> place = place_of_tile<GROUP, int>(tile, down, across);
                const int row = (place.row * CLUSTER + rank) * BM, col = place.col * BN;
                for (int step = 0; step < steps; ++step, advance()) {
                    barrier_wait(empty + 8 * stage, round ^ 1);
                    const u32 at = stages + stage * STAGE_BYTES, arrival = full + 8 * stage;
                    barrier_expect(arrival, STAGE_BYTES);  // from all blocks together
                    bring<false>(at, a_map, step * BK, row, arrival);
#pragma unroll
                    for (int box = 0; box < BN / 64; ++box) {
                        const u32 to = at + A_BYTES + (box * BK + rank * SHARE) * 128;
                        bring<(CLUSTER > 1)>(to, b_map, col + box * 64, step * BK + rank * SHARE, arrival);
                    }
                }
            }
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        const int consumer = warpgroup - 1;
        const u64 a_base = descriptor<A_MN>(stages + consumer * 64 * K_ROW);
        const u64 b_base = descriptor<B_MN>(stages + A_BYTES);
        const auto release = [&](int stage) {
            if (threadIdx.x % 128 < CLUSTER) barrier_arrive(empty + 8 * stage, threadIdx.x % 128);
        };
        for (int tile = first; tile < down * across; tile += stride) {
            const TilePlace<int> place = place_of_tile<GROUP, int>(tile, down, across);
            const int row = (place.row * CLUSTER + rank) * BM, col = place.col * BN;
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
                    multiply(sums, a_base + at + kk * (k_stride<A_MN> >> 4), b_base + at + kk * (k_stride<B_MN> >> 4),
                             1);
                }
                commit();
                finish<1>();
                if (before >= 0) release(before);
                before = stage;
            }
            finish<0>();
            settle(sums);
            if (before >= 0) release(before);  // before C is stored: the producer goes on
            store_sums(sums, C, ldc, row + consumer * 64, col, m, n, alpha, beta);
            __syncwarp();  // lanes past an edge of C were through earlier, and wgmma takes whole warps
        }
    }
    cluster_sync();  // nobody leaves while another block may still write to its memory, or arrive there
}
