// Copies from global to shared memory that run in the background (cp.async, sm_80 and later). A thread's copies are
// put in groups, which complete in the order in which they were closed.

// The address of an element of shared memory, as the instructions take it.
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Closes a group: the copies that the thread has started since the last one.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the last PENDING groups are complete, for all threads of the block.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
    __syncthreads();
}

// Waits for all copies of this thread.
__device__ __forceinline__ void wait_for_own_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
