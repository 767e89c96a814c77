// Copies of boxes of a matrix to shared memory by the copy engine (TMA, sm_90). They need common/types.cuh, and the macro
// CLUSTER: thread blocks in a cluster.

// What the engine knows of a matrix: address, sizes, box and swizzle. ooc_gemm/cuda_kernels/wgmma.py lets the driver
// make it.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

// The box at (x, y), x along the contiguous axis; `everywhere`: to all blocks of the cluster.
template <bool everywhere>
__device__ __forceinline__ void bring(u32 to, const TensorMap& map, int x, int y, u32 barrier) {
    if constexpr (everywhere) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
            " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
            "l"(&map), "r"(x), "r"(y), "r"(barrier), "h"(static_cast<unsigned short>((1 << CLUSTER) - 1))
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
            " [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
            "l"(&map), "r"(x), "r"(y), "r"(barrier)
            : "memory");
    }
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
