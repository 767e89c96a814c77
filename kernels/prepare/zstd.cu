// Decodes chunks that came to the device as they are stored, and are a frame of Zstandard each: common/zstd.cuh. A thread
// block takes one chunk after the other.
//
// Macros: those of common/zstd.cuh. Launch: THREADS threads in one dimension, with SHARED_BYTES of shared memory.

#include "common/types.cuh"
#include "common/zstd.cuh"

// Decodes `count` chunks, which begin in units of 16 bytes from `from`, to `to`. Each thread block has `room_bytes` of
// `rooms`. How many chunks cannot be decoded is added to `failures`.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
zstd(Chunks chunks, int count, const u64* from, u8* to, u64* rooms, u32 room_bytes, u32* failures) {
    extern __shared__ u64 shared_memory[];
    Shared& s = *reinterpret_cast<Shared*>(shared_memory);
    make_codes(s);
    u64* const room = rooms + static_cast<u64>(blockIdx.x) * (room_bytes / 8);
    for (int i = blockIdx.x; i < count; i += gridDim.x) {
        const Chunk& chunk = chunks.chunk[i];
        bool found = false;
        const auto next = [&](Frame& frame) {
            if (found) return NOTHING;
            frame = {0, chunk.bytes, to + 16 * static_cast<u64>(chunk.to), chunk.to_bytes, false, 0};
            found = true;
            return FRAME;
        };
        __syncthreads();
        const Bytes in = {from + 2 * static_cast<u64>(chunk.at)};
        const bool right = decode(in, room, room_bytes, s, next, [](u32) {});
        if (!right && threadIdx.x == 0) atomicAdd(failures, 1u);
    }
}
