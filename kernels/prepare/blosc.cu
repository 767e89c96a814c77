// Decodes chunks that came to the device as they are stored, and are containers of blosc with zstd in them:
//
//     [header: 16 bytes][where each block begins: 4 bytes][block][block] …
//
//     block     [bytes: 4][frame of zstd], or several of them, for some bytes of all elements each
//
// Some thread blocks share a chunk: each decodes some of its blocks, one after the other, to a room of its own. From
// there the elements are put together again (where blosc has shuffled them) by all threads. A chunk with another
// compressor in it, or with blocks of more than MOST_BLOCK bytes, counts as failed.
//
// Macros: those of common/zstd.cuh. Launch: THREADS threads in one dimension, with SHARED_BYTES of shared memory.

#include "common/types.cuh"
#include "common/entropy.cuh"
#include "common/zstd.cuh"
#include "common/frames.cuh"

constexpr u32 MOST_BLOCK = 1 << 20;  // bytes of a block
constexpr u32 VERSION = 2, ZSTD = 4;  // in headers
constexpr u32 BYTES_SHUFFLED = 1, NOT_COMPRESSED = 2, BITS_SHUFFLED = 4, NOT_SPLIT = 16;  // flags there
constexpr u32 MOST_SPLIT = 16, LEAST_SPLIT = 128;  // bytes of elements that are split, and of parts
constexpr u32 NO_BLOCK = ~0u;

// A chunk, and where one thread is in it.
struct Container {
    u32 bytes, to_bytes, size, block, blocks, flags;  // `size`: of an element
    u32 next, stop, split, splits, at;

    // Finds one of so many parts. False where the chunk is no container.
    __device__ bool open(Bytes in, const Chunk& chunk, u32 part, u32 parts) {
        bytes = chunk.bytes;
        to_bytes = chunk.to_bytes;
        split = 0;
        if (bytes < 16 || in[0] != VERSION) return false;
        flags = in[2];
        size = in[3];
        block = static_cast<u32>(in.from(8));
        blocks = block ? (to_bytes + block - 1) / block : 0;
        next = static_cast<u64>(part) * blocks / parts;
        stop = static_cast<u64>(part + 1) * blocks / parts;
        const bool sized = static_cast<u32>(in.from(4)) == to_bytes && static_cast<u32>(in.from(12)) == bytes;
        const bool simple = flags >> 5 == ZSTD && !(flags & NOT_COMPRESSED);
        return sized && simple && size && block && block <= min(to_bytes, MOST_BLOCK) && blocks <= (bytes - 16) / 4;
    }
    __device__ u32 bytes_of(u32 which) const { return which + 1 < blocks ? block : to_bytes - which * block; }
    __device__ bool shuffled() const {
        return (flags & BYTES_SHUFFLED && size > 1) || (flags & BITS_SHUFFLED && block >= size);
    }
    // The next frame, for a block that is decoded to `to`.
    __device__ Next find(Bytes in, Frame& frame, u8* to) {
        if (next == stop) return NOTHING;
        const u32 length = bytes_of(next);
        if (split == 0) {
            at = static_cast<u32>(in.from(16 + 4 * next));
            const bool whole = flags & NOT_SPLIT || size > MOST_SPLIT || block / size < LEAST_SPLIT || length < block;
            splits = whole ? 1 : size;
        }
        const u32 each = length / splits;
        if (at > bytes || bytes - at < 4 || each * splits != length) return WRONG;
        const u32 stored = static_cast<u32>(in.from(at));
        at += 4;
        if (stored > bytes - at) return WRONG;
        const bool last = split + 1 == splits;
        frame = {at, stored, to + split * each, each, stored == each, last ? next : NO_BLOCK};
        at += stored;
        split = last ? 0 : split + 1;
        next += last;
        return FRAME;
    }
};

// 8 × 8 bits, row after row from the lowest byte on, transposed.
__device__ __forceinline__ u64 transposed(u64 x) {
    u64 t = (x ^ x >> 7) & 0x00aa00aa00aa00aaull;
    x ^= t ^ t << 7;
    t = (x ^ x >> 14) & 0x0000cccc0000ccccull;
    x ^= t ^ t << 14;
    t = (x ^ x >> 28) & 0x00000000f0f0f0f0ull;
    return x ^ t ^ t << 28;
}

// Puts the elements of a block of so many bytes together.
__device__ void unshuffle(const Container& c, const u8* from, u8* to, u32 bytes) {
    const u32 count = bytes / c.size;
    u32 done = count * c.size;
    if (c.flags & BITS_SHUFFLED && count % 8) {
        done = 0;  // such blocks are as they were
    } else if (c.flags & BITS_SHUFFLED) {
        // One byte of 8 elements: of each of 8 planes of bits, a byte.
        const u32 plane = count / 8;
        for (u32 i = threadIdx.x; i < count / 8 * c.size; i += THREADS) {
            const u32 group = i % plane, byte = i / plane;
            u64 x = 0;
#pragma unroll
            for (u32 bit = 0; bit < 8; ++bit)
                x |= static_cast<u64>(from[(8 * byte + bit) * plane + group]) << (8 * bit);
            x = transposed(x);
#pragma unroll
            for (u32 each = 0; each < 8; ++each) to[(8 * group + each) * c.size + byte] = x >> (8 * each);
        }
    } else {
        for (u32 i = threadIdx.x; i < done; i += THREADS) to[i % count * c.size + i / count] = from[i];
    }
    for (u32 i = done + threadIdx.x; i < bytes; i += THREADS) to[i] = from[i];
}

// The arguments are those of `decode_each`.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
blosc(Chunks chunks, int count, int parts, const u64* from, u8* to, u64* rooms, u32 room_bytes, u32* failures) {
    const u32 rest = room_bytes - MOST_BLOCK;  // of the room, beside a block
    const auto one = [&](Bytes in, const Chunk& chunk, int part, u8* output, u64* room, Shared& s) {
        u8* const block = reinterpret_cast<u8*>(room) + rest;
        Container container;
        if (!container.open(in, chunk, part, parts)) return false;
        const bool shuffled = container.shuffled();
        const auto next = [&](Frame& frame) {
            return container.find(in, frame, shuffled ? block : output + container.next * container.block);
        };
        const auto finished = [&](u32 which) {
            if (which == NO_BLOCK || !shuffled) return;
            __syncthreads();
            unshuffle(container, block, output + which * container.block, container.bytes_of(which));
        };
        return decode(in, room, rest, s, next, finished);
    };
    decode_each(chunks, count, parts, from, to, rooms, room_bytes, failures, one);
}
