// Clusters of thread blocks (sm_90 and later), which see each other's shared memory.

// Waits for all threads of all blocks of the cluster; what they have written to shared memory is visible then.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
