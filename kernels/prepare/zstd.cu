// Decodes chunks that came to the device as they are stored, and are a frame of Zstandard each: common/frames.cuh. A chunk
// has one part.
//
// Macros: those of common/zstd.cuh. Launch: THREADS threads in one dimension, with SHARED_BYTES of shared memory.

#include "common/types.cuh"
#include "common/entropy.cuh"
#include "common/zstd.cuh"
#include "common/frames.cuh"

// The arguments are those of `decode_each`.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
zstd(Chunks chunks, int count, int parts, const u64* from, u8* to, u64* rooms, u32 room_bytes, u32* failures) {
    const auto one = [&](Bytes in, const Chunk& chunk, int, u8* output, u64* room, Shared& s) {
        bool found = false;
        const auto next = [&](Frame& frame) {
            if (found) return NOTHING;
            frame = {0, chunk.bytes, output, chunk.to_bytes, false, 0};
            found = true;
            return FRAME;
        };
        return decode(in, room, room_bytes, s, next, [](u32) {});
    };
    decode_each(chunks, count, parts, from, to, rooms, room_bytes, failures, one);
}
