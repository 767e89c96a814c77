// Makes the output of frames of Zstandard, whose blocks common/zstd.cuh decodes, and of the chunks of a stored matrix in
// which kernels find frames. It needs common/zstd.cuh.
//
// WINDOW bytes of the output are made at a time. A byte whose source is among them is looked for further back, until it
// is a literal or lies before them.

// A chunk and its output, in units of 16 bytes from the first of all; the output has as many bytes as it must have.
struct Chunk {
    u32 at, bytes, to, to_bytes;
};
constexpr int MOST_CHUNKS = 128;
struct Chunks {
    Chunk chunk[MOST_CHUNKS];
};

// ---- Output -------------------------------------------------------------------------------------------------------

// Sequences that make a part of the output of a block. The first of them follows one that ends at `before`.
struct Some {
    const u64* entries;  // behind the last sequence, all end behind any byte
    u64 before;
    const u8 *literals, *output;  // of the block
    u32 step;  // from literal to literal
    u32 made;  // bytes of the frame before the block
    u32 begin;  // where the part begins
    const u32* offsets;

    // The first sequence that ends behind a byte.
    __device__ __forceinline__ int holds(u32 at) const {
        int first = 0;
#pragma unroll
        for (int size = SOME; size > 1; size -= size / 2)
            if (made_of(entries[first + size / 2 - 1]) <= at) first += size / 2;
        return first;
    }

    // Where a byte comes from, which the sequence `one` makes. Null where that is not in the frame.
    __device__ __forceinline__ const u8* source(u32 at, int one) const {
        for (;;) {
            const u64 last = one ? entries[one - 1] : before;
            const u32 first = made_of(last), literal = literals_of(entries[one]) - literals_of(last), in = at - first;
            if (in < literal) return literals + (literals_of(last) + in) * step;
            const u32 offset = known(static_cast<u32>(entries[one] >> 36), offsets), match = first + literal;
            if (offset == 0 || offset > made + match) return nullptr;
            // A match may repeat what it has just made.
            const u32 back = at - match < offset ? offset : ((at - match) / offset + 1) * offset;
            const int from = static_cast<int>(at) - static_cast<int>(back);
            if (from < static_cast<int>(begin)) return output + from;
            at = from;
            one = holds(at);
        }
    }
};

// Carries out the sequences of a block. False, for some threads, where an offset leads out of the frame.
__device__ bool carry_out(Bytes in, const Section& x, Shared& s, const u64* room, u8* output) {
    const u32 entries = x.sequence_count + 1;
    const u8* const literals =
        x.streams ? reinterpret_cast<const u8*>(room) + x.room : reinterpret_cast<const u8*>(in.words) + x.literals;
    bool right = true;
    u64 before = 0;
    for (u32 begin = 0, first = 0; begin < x.decoded;) {
        for (int i = threadIdx.x; i < SOME; i += THREADS)
            s.some[i] = first + i < entries ? room[x.entries + first + i] : ~0ull;
        __syncthreads();
        // Each thread makes the 8 bytes of a word.
        const u32 shift = reinterpret_cast<u64>(output + begin) % 8, end = min(begin + WINDOW - shift, x.decoded);
        const Some some = {s.some, before, literals, output, x.step, s.made, begin, s.offsets};
        const u32 word = 8 * threadIdx.x;
        if (word < end - begin + shift) {
            const u32 start = begin + word - shift;  // wraps around where the word begins before the block
            const u32 least = word < shift ? shift - word : 0, most = min(end - start, 8u);
            int one = some.holds(start + least);
            const u8* from[8];
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                from[i] = literals;
                if (i < least || i >= most) continue;
                while (made_of(s.some[one]) <= start + i) ++one;
                const u8* const found = some.source(start + i, one);
                right &= found != nullptr;
                if (found) from[i] = found;
            }
            u64 made = 0;
#pragma unroll
            for (u32 i = 0; i < 8; ++i)
                if (i >= least && i < most) made |= static_cast<u64>(*from[i]) << (8 * i);
            if (least == 0 && most == 8) {
                *reinterpret_cast<u64*>(output + static_cast<int>(start)) = made;
            } else {
                for (u32 i = least; i < most; ++i) output[static_cast<int>(start + i)] = made >> (8 * i);
            }
        }
        const int done = some.holds(end);
        before = done ? s.some[done - 1] : before;
        first += done;
        begin = end;
        __syncthreads();
    }
    return right;
}

// ---- Chunks -------------------------------------------------------------------------------------------------------

// Decodes the frames of a chunk. `next` is called by one thread, and makes the next frame known: as of Next.
// `finished` is called by all with the number of a frame that is decoded, and returns when all threads are done with
// it. All threads return the same: false where something is wrong.
template <class Open, class Finished>
__device__ bool decode(Bytes in, u64* room, u32 room_bytes, Shared& s, Open next, Finished finished) {
    if (threadIdx.x == 0) s.open = s.complete = s.failed = false;
    for (;;) {
        __syncthreads();
        if (threadIdx.x == 0 && !find_sections(in, s, room, room_bytes, next)) s.failed = true;
        if (failed(s)) return false;
        decode_streams(in, room, s);
        if (failed(s)) return false;
        for (int one = 0; one < s.sections; ++one) {
            const Section& x = s.section[one];
            if (x.first) {
                if (threadIdx.x == 0) {
                    s.made = 0;
                    for (int i = 0; i < 3; ++i) s.offsets[i] = i == 0 ? 1 : 4 * i;
                }
                __syncthreads();
            }
            const u32 made = s.made + x.decoded;
            const bool fits = x.last ? made == x.frame.to_bytes : made <= x.frame.to_bytes;
            if (!fits) return false;  // the same for all
            if (!carry_out(in, x, s, room, x.frame.to + s.made)) s.failed = true;
            if (failed(s)) return false;
            if (threadIdx.x == 0) {
                u32 offsets[3];
                for (int i = 0; i < 3; ++i) offsets[i] = known(x.offsets[i], s.offsets);
                for (int i = 0; i < 3; ++i) s.offsets[i] = offsets[i];
                s.made = made;
            }
            if (x.last) finished(x.frame.number);
            __syncthreads();
        }
        if (s.complete) return true;
    }
}

// What a kernel does. `one` decodes one of `parts` of a chunk: it is called by all threads, which it gives the same
// answer, false where the part cannot be decoded. How many cannot is added to `failures`. Each thread block takes one
// part after the other. The chunks begin in units of 16 bytes from `from`, and their output from `to`. Each thread
// block has `room_bytes` of `rooms`.
template <class One>
__device__ void decode_each(const Chunks& chunks, int count, int parts, const u64* from, u8* to, u64* rooms,
                            u32 room_bytes, u32* failures, One one) {
    extern __shared__ u64 shared_memory[];
    Shared& s = *reinterpret_cast<Shared*>(shared_memory);
    make_codes(s);
    u64* const room = rooms + static_cast<u64>(blockIdx.x) * (room_bytes / 8);
    for (int i = blockIdx.x; i < count * parts; i += gridDim.x) {
        const Chunk& chunk = chunks.chunk[i / parts];
        const Bytes in = {from + 2 * static_cast<u64>(chunk.at)};
        __syncthreads();
        const bool right = one(in, chunk, i % parts, to + 16 * static_cast<u64>(chunk.to), room, s);
        if (!right && threadIdx.x == 0) atomicAdd(failures, 1u);
    }
}
