// C ← α·A·B + β·C, float16 with sums in float32: the copy engine brings the tiles, a warpgroup multiplies them.
//
// The idea of this rung: threads neither load nor multiply any more. They give orders.
//
//                          one thread                        128 threads
//     A, B in global memory ──── TMA ────► tiles in shared ──── wgmma ────► sums in registers ────► C
//
// TMA, the copy engine: one instruction brings a box of a matrix that a tensor map describes. It computes the addresses,
// writes zeros for what lies past an edge, arranges the bytes so that the tensor cores read them without bank conflicts
// (the swizzle), and counts the bytes that have arrived on a barrier in shared memory.
//
// wgmma: one instruction multiplies 64×16 elements of A with 16×BN elements of B. Both come straight from shared memory,
// where a descriptor of 64 bits says how they lie. The sums, 64×BN of them, are spread over the registers of a
// warpgroup, four warps: BN/2 in each thread. The instruction runs in the background until the threads wait for it.
//
//             ◄── 64 ──►                      ◄── 64 ──►◄── 64 ──►
//            ┌──────────┐ ▲                  ┌──────────┬──────────┐ ▲
//     A tile │ rows     │ BM rows     B tile │ columns  │ columns  │ BK = 64 rows
//            │ of 128 B │                    │ 0 … 63   │ 64 … 127 │
//            └──────────┘ ▼                  └──────────┴──────────┘ ▼
//
// A row of a box is 64 elements, 128 bytes: the span of the swizzle. So B's tile comes in BN/64 boxes.
//
// One step after the other: bring, wait, multiply, wait. What hides the waiting are the other thread blocks on the
// same multiprocessor. (docs/kernels.md draws the swizzle, the descriptor, and which thread holds which sums.)
//
// Rows of A and B must start at multiples of 16 bytes. Any m, n, k ≥ 0.
//
// Macros, set by ooc_gemm/cuda_kernels: BM, BN, BK, the tile; GROUP, rows of tiles that are walked down before going
// right, so that blocks that run together share A and B in L2; CLUSTER = 1; and those of common/element_types.cuh.

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

constexpr int PARTS = BM / 64;  // of the tile, one below the other: rows of one instruction each
constexpr int A_BYTES = BM * BK * ELEMENT_BYTES, B_BYTES = BK * BN * ELEMENT_BYTES;

static_assert(BM % 64 == 0 && BN % 64 == 0 && BK == 64, "whole instructions, and boxes of 128 bytes a row");
static_assert(PARTS * ACC <= 128, "a thread has 255 registers, and these are its sums");

extern "C" __global__ void __launch_bounds__(128)
warpgroup(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, int m, int n, int k,
          S alpha, S beta, S* __restrict__ C, long long ldc) {
    extern __shared__ char memory[];
    __shared__ alignas(8) u64 barrier;

    const u32 a_tile = (shared_address(memory) + 1023) & ~1023u;  // the swizzle repeats every 1024 bytes
    const u32 b_tile = a_tile + A_BYTES, full = shared_address(&barrier);
    const TilePlace<int> place = place_of_tile<GROUP, int>(blockIdx.x, (m + BM - 1) / BM, (n + BN - 1) / BN);
    const int row = place.row * BM, col = place.col * BN;

    if (threadIdx.x == 0) {
        barrier_init(full, 1);  // one arrival in each phase: that of the thread that gives the orders
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // the copy engine sees it, too
    }
    __syncthreads();

    S sums[PARTS][ACC];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
        for (int i = 0; i < ACC; ++i) sums[part][i] = 0;
    }

    const int steps = (k + BK - 1) / BK;
    for (int step = 0; step < steps; ++step) {
        if (threadIdx.x == 0) {
            barrier_expect(full, A_BYTES + B_BYTES);
            bring<false>(a_tile, a_map, step * BK, row, full);
#pragma unroll
            for (int box = 0; box < BN / 64; ++box) {
                bring<false>(b_tile + box * BK * 128, b_map, col + box * 64, step * BK, full);
            }
        }
        barrier_wait(full, step % 2);

        begin();
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const u64 a = descriptor<A_MN>(a_tile + part * 64 * K_ROW), b = descriptor<B_MN>(b_tile);
#pragma unroll
            for (int kk = 0; kk < BK / K_STEP; ++kk) {
                multiply(sums[part], a + kk * (k_stride<A_MN> >> 4), b + kk * (k_stride<B_MN> >> 4), 1);
            }
        }
        commit();
        finish<0>();
#pragma unroll
        for (int part = 0; part < PARTS; ++part) settle(sums[part]);
        __syncthreads();  // nobody reads the tiles any more, which the next step overwrites
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        store_sums(sums[part], C, ldc, row + part * 64, col, m, n, alpha, beta);
    }
}
