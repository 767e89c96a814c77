// Barriers in shared memory (mbarrier, sm_90), on which arrivals and bytes are counted. They need common/types.cuh.
//
// A barrier is in a phase until all arrivals, and all bytes that were announced, have come; then the next phase begins.
// Who waits names the parity of a phase, 0 for the first, and goes on when that phase is over. A new barrier behaves as
// if a phase of parity 1 had just ended.

__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// After what this thread has written to shared memory, which is there for all who have waited.
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// A word for the same address in block `rank` of the cluster, whose barrier of the same address waits for its bytes.
// The cluster has several blocks: a tool that checks memory takes such a write in a cluster of one for an error.
__device__ __forceinline__ void barrier_send(u32 to, u32 word, u32 barrier, u32 rank) {
    asm volatile(
        "{\n.reg .b32 to, there;\n"
        "mapa.shared::cluster.u32 to, %0, %3;\n"
        "mapa.shared::cluster.u32 there, %2, %3;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [to], %1, [there];\n}" ::"r"(to),
        "r"(word), "r"(barrier), "r"(rank)
        : "memory");
}

// At the barrier of the same address in block `rank` of the cluster. Not `.release.cluster`, which would wait
// for all of the thread's writes to global memory; who arrives has only read.
__device__ __forceinline__ void barrier_arrive(u32 barrier, u32 rank) {
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}
