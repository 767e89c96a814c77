// Finds the blocks of frames of Zstandard (RFC 8878), and decodes their streams. common/frames.cuh makes the output.
//
//     frame     [header][block][block][block] …
//
//     block     literals: 1 or 4 streams of Huffman codes  ─┐  AT_ONCE blocks at a time: a thread for each stream,
//               sequences: 1 stream of three FSE codes     ─┤  because in a stream each code begins where the one
//                                                           ▼  before ends
//     room      bytes;  (literals up to here, output up to here, offset) of each sequence
//                                                           │  then one block after the other: all threads, 8 bytes
//                                                           ▼  of the output each
//     output    […………………………]   each byte is a literal, or a byte of the output that lies `offset` before it
//
// Nothing is read or written outside of a frame, its output and the room of the thread block, whatever a frame holds:
// where it is no frame, has another size, a dictionary or a checksum, it fails, and its output is undefined. (Offsets may
// reach further back than the window that the frame names. Other decoders may refuse such a frame.)
//
// Macros: BLOCKS, of frames that are decoded at a time; SHARED_BYTES of shared memory. It needs common/types.cuh and
// common/entropy.cuh.

constexpr int AT_ONCE = BLOCKS;
constexpr int THREADS = 512;
constexpr int STREAMS = 4;  // of literals, at most
constexpr int OF_ONE = 16;  // threads for a block
static_assert(OF_ONE * AT_ONCE <= THREADS && STREAMS <= OF_ONE && KINDS <= STREAMS, "each stream has a thread");
constexpr u32 WINDOW = 8 * THREADS;  // bytes of the output that are made at a time
constexpr int SOME = WINDOW / 3 + 3;  // sequences that may make a part of them: each makes 3 bytes and more

constexpr u32 MOST = 128 << 10;  // bytes that a block decodes to
constexpr u32 MOST_SEQUENCES = MOST / 3 + 1;

// A frame within a chunk.
struct Frame {
    u32 at, bytes;
    u8* to;
    u32 to_bytes;
    bool plain;  // it is no frame: the bytes are what they stand for
    u32 number;  // for who asks what has been decoded
};

// A block whose streams are decoded.
struct Section {
    u32 literals, literal_bytes;  // where their streams begin in the frame, with a table if it has one; and the bytes
    u32 count;  // of literals
    u32 streams;  // 0: literals are bytes of the frame
    u32 step;  // 0: all of them are one byte
    u32 room;  // where decoded literals begin in the room
    u32 sequences, end;  // where they begin in the frame, after the byte with the modes, and where the block ends
    u32 sequence_count;
    u32 entries;  // where they begin in the room
    u32 decoded;  // bytes that the block decodes to
    u32 offsets[3];  // that the next block may repeat
    u32 huffman, huffman_bytes;  // the block's table of Huffman codes, or the one before that it repeats
    u32 tables[KINDS], modes[KINDS], ends[KINDS];  // the sequences of the blocks whose tables it has
    u32 own_modes;
    u32 payload;  // where streams of literals begin behind the table
    u32 bits;  // where the stream of sequences begins
    Frame frame;
    bool first, last;  // of the frame
};

struct Shared {
    u64 some[SOME];  // sequences that are carried out
    Section section[AT_ONCE];
    Tables tables[AT_ONCE];
    u32 base[KINDS][MOST_CODES];  // the lengths of codes
    u8 bits[KINDS][MOST_CODES];  // and the bits that follow
    // The frame whose blocks are found, if one is open, and the frame whose blocks are carried out.
    Frame frame;
    u32 at, huffman, huffman_bytes, definer[KINDS], definer_modes[KINDS], definer_end[KINDS];
    bool open, first;
    u32 made, offsets[3];
    int sections;
    bool complete, failed;  // there are no more frames; something is wrong
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "a launch gives so much");

// ---- Blocks -------------------------------------------------------------------------------------------------------

// A sequence: literals and output of the block up to its end, and its offset: MOST_OFFSET at most, or one of the three
// that were in use before the block, less a number.
constexpr u32 UNKNOWN = 1 << 27, MOST_OFFSET = UNKNOWN - 1;
__device__ __forceinline__ u64 sequence(u32 literals, u32 made, u32 offset) {
    return literals | static_cast<u64>(made) << 18 | static_cast<u64>(offset) << 36;
}
__device__ __forceinline__ u32 literals_of(u64 entry) { return lowest(entry, 18); }
__device__ __forceinline__ u32 made_of(u64 entry) { return lowest(entry >> 18, 18); }
__device__ __forceinline__ u32 unknown(u32 which) { return UNKNOWN | which << 25; }
// 0 where there is no such offset.
__device__ __forceinline__ u32 known(u32 offset, const u32* before) {
    if (offset < UNKNOWN) return offset;
    const u32 was = before[offset >> 25 & 3], less = lowest(offset, 25);
    return was > less ? was - less : 0;
}

// The header of the open frame (3.1.1.1). False where it is not one of `to_bytes` bytes that can be decoded here.
__device__ bool begin(Bytes in, Shared& s) {
    const Frame& frame = s.frame;
    if (frame.bytes < 6 || static_cast<u32>(in.from(frame.at)) != 0xfd2fb528u) return false;
    const u32 head = in[frame.at + 4], single = head >> 5 & 1, form = head >> 6;
    if (head & 15) return false;  // a checksum, a dictionary, or what is reserved
    u32 at = frame.at + 5 + !single;
    const u32 sized = form ? 1u << form : single;
    if (sized) {
        const u64 found = in.from(at) & ~0ull >> (64 - 8 * sized);
        if (found + (form == 1 ? 256 : 0) != frame.to_bytes) return false;
    }
    s.at = at + sized;
    s.huffman_bytes = 0;
    for (int kind = 0; kind < KINDS; ++kind) s.definer_end[kind] = 0;
    return true;
}

// The literals of a block (3.1.1.3.1), and the bytes that they need in the room. MOST + 1 where they are none.
__device__ u32 find_literals(Bytes in, u32 at, Shared& s, Section& x) {
    const u32 head = in[at], form = head % 4, size = head >> 2 & 3;
    const u64 found = in.from(at);
    if (form < 2) {
        const u32 bytes = size % 2 ? size / 2 + 2 : 1;
        x.count = size % 2 ? lowest(found >> 4, 8 * bytes - 4) : head >> 3;
        x.literals = at + bytes;
        x.literal_bytes = form ? 1 : x.count;
        x.step = !form;
        x.streams = 0;
        return x.literals + x.literal_bytes < x.end && x.count <= MOST ? 0 : MOST + 1;
    }
    const u32 bits = size < 2 ? 10 : size == 2 ? 14 : 18;
    x.count = lowest(found >> 4, bits);
    x.literals = at + (4 + 2 * bits) / 8;
    x.literal_bytes = lowest(found >> (4 + bits), bits);
    x.step = 1;
    x.streams = size ? STREAMS : 1;
    if (x.literals + x.literal_bytes >= x.end || x.count > MOST || !x.count) return MOST + 1;
    if (form == 2) {
        s.huffman = x.literals;
        s.huffman_bytes = x.literal_bytes;
    }
    x.huffman = s.huffman;
    x.huffman_bytes = s.huffman_bytes;
    return s.huffman_bytes ? (x.count + 7) / 8 * 8 : MOST + 1;
}

// The sequences of a block behind its literals (3.1.1.3.2). False where they are none.
__device__ bool find_sequences(Bytes in, Shared& s, Section& x) {
    u32 at = x.literals + x.literal_bytes, count = in[at++];
    x.sequences = x.sequence_count = 0;
    if (!count) return at == x.end;
    if (count == 255) {
        count = in[at] + (in[at + 1] << 8) + 0x7f00;
        at += 2;
    } else if (count > 127) {
        count = ((count - 128) << 8) + in[at++];
    }
    const u32 modes = in[at++];
    if (at >= x.end || modes % 4 || !count || count > MOST_SEQUENCES) return false;
    x.sequences = at;
    x.sequence_count = count;
    for (int kind = 0; kind < KINDS; ++kind) {
        if (mode_of(modes, kind) != 3) {
            s.definer[kind] = at;
            s.definer_modes[kind] = modes;
            s.definer_end[kind] = x.end;
        }
        x.tables[kind] = s.definer[kind];
        x.modes[kind] = s.definer_modes[kind];
        x.ends[kind] = s.definer_end[kind];
        if (!x.ends[kind]) return false;
    }
    x.own_modes = modes;
    return true;
}

// What comes next in a chunk.
enum Next { FRAME, NOTHING, WRONG };

// A block of the open frame, and the bytes that it needs in the room; MOST_NEEDED + 1 where it is none.
constexpr u32 MOST_NEEDED = MOST + 8 * (MOST_SEQUENCES + 1);
__device__ u32 find_block(Bytes in, Shared& s, Section& x) {
    const u32 stop = s.frame.at + s.frame.bytes;
    x.streams = x.sequence_count = 0;
    x.step = 1;
    if (s.frame.plain) {
        x.literals = s.at;
        x.literal_bytes = x.count = min(stop - s.at, MOST);
        x.end = s.at + x.count;
        x.last = x.end == stop;
        return 8;
    }
    if (s.at + 3 > stop) return MOST_NEEDED + 1;
    const u32 head = lowest(in.from(s.at), 24), form = head >> 1 & 3, bytes = head >> 3, first = s.at + 3;
    const u32 stored = form == 1 ? 1 : bytes;
    if (form == 3 || bytes > MOST || first + stored > stop) return MOST_NEEDED + 1;
    x.end = first + stored;
    x.last = head & 1;
    if (form < 2) {
        x.literals = first;
        x.literal_bytes = stored;
        x.count = bytes;
        x.step = form == 0;
        return 8;
    }
    const u32 needed = find_literals(in, first, s, x);
    if (bytes < 2 || needed > MOST || !find_sequences(in, s, x)) return MOST_NEEDED + 1;
    return needed + 8 * (x.sequence_count + 1);
}

// Finds the next blocks of a chunk, as many as there is room for. `next` opens the next frame. False where something is
// wrong.
template <class Open>
__device__ bool find_sections(Bytes in, Shared& s, u64* room, u32 room_bytes, Open next) {
    u32 used = 0;
    for (s.sections = 0; s.sections < AT_ONCE; ++s.sections) {
        if (!s.open) {
            const Next found = next(s.frame);
            s.complete = found == NOTHING;
            if (found != FRAME) return s.complete;
            s.at = s.frame.at;
            if (!s.frame.plain && !begin(in, s)) return false;
            s.open = s.first = true;
        }
        Section& x = s.section[s.sections];
        const u32 needed = find_block(in, s, x);
        if (needed > MOST_NEEDED) return false;
        if (used + needed > room_bytes) return s.sections > 0;  // next time
        x.entries = used / 8;
        x.room = used + 8 * (x.sequence_count + 1);
        used += needed;
        x.frame = s.frame;
        x.first = s.first;
        s.at = x.end;
        s.first = false;
        s.open = !x.last;
        if (x.last && x.end != s.frame.at + s.frame.bytes) return false;
        if (x.sequence_count) continue;
        room[x.entries] = sequence(x.count, x.count, 0);
        x.decoded = x.count;
        for (int i = 0; i < 3; ++i) x.offsets[i] = unknown(i);
    }
    return true;
}

// The shares of all codes of a block. False where they are none.
__device__ bool take_all_shares(Bytes in, Section& x, Tables& t) {
    const u32 modes = x.own_modes;
    u32 at = x.sequences;
    for (int kind = 0; kind < KINDS; ++kind)
        if (mode_of(modes, kind) != 3 &&
            !(at = take_shares(in, at, x.end, mode_of(modes, kind), kind, t.shares[kind], t.log[kind])))
            return false;
    x.bits = at;
    for (int kind = 0; kind < KINDS; ++kind) {
        if (mode_of(modes, kind) != 3) continue;
        at = x.tables[kind];
        for (int each = 0; each <= kind; ++each) {  // those before it have no meaning here
            const u32 mode = mode_of(x.modes[kind], each);
            if (mode == 3) continue;
            at = take_shares(in, at, x.ends[kind], mode, each, t.shares[kind], t.log[kind]);
            if (!at) return false;
        }
    }
    return x.bits < x.end;
}

// ---- Streams ------------------------------------------------------------------------------------------------------

// One stream of literals (4.2.2). False where it is none.
__device__ bool decode_literals(Bytes in, const Section& x, u32 stream, const Tables& t, u8* to) {
    u32 first = x.payload, size = x.literals + x.literal_bytes - x.payload, count = x.count;
    if (x.streams > 1) {
        const u64 sizes = in.from(first);
        const u32 each = (count + 3) / 4;
        if (size < 6 || 3 * each > count) return false;
        first += 6;
        size -= 6;
        for (u32 i = 0; i < stream; ++i) {
            const u32 before = lowest(sizes >> (16 * i), 16);
            if (before > size) return false;
            first += before;
            size -= before;
        }
        const u32 own = lowest(sizes >> (16 * stream % 64), 16);
        if (stream < 3 && own > size) return false;
        size = stream < 3 ? own : size;
        to += stream * each;
        count = stream < 3 ? each : count - 3 * each;
    }
    Backward bits(in, first, size);
    const u32 log = t.huffman_log;
    u32 done = 0;
    const auto some = [&](u32 stop) {
        for (; done < stop && bits.left > 0; ++done) {
            const u32 entry = t.huffman.table[bits.bits(bits.left - static_cast<int>(log), log)];
            bits.left -= static_cast<int>(entry >> 8);
            to[done] = entry;
        }
    };
    some(min(count, static_cast<u32>(-reinterpret_cast<u64>(to)) % 8));
    // A word of the output at a time: half of its symbols have no more bits than are read at once.
    constexpr int SYMBOLS = 4, BITS = SYMBOLS * HUFFMAN_LOG;
    for (; bits.left >= 2 * BITS && done + 8 <= count; done += 8) {
        u64 word = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int low = bits.left - BITS;
            const u64 codes = in.from(first + low / 8) >> (low % 8);
            u32 from = BITS;
#pragma unroll
            for (int i = 0; i < SYMBOLS; ++i) {
                const u32 entry = t.huffman.table[lowest(codes >> (from - log), log)];
                from -= entry >> 8;
                word |= static_cast<u64>(entry & 255) << (8 * (SYMBOLS * half + i));
            }
            bits.left -= BITS - from;
        }
        *reinterpret_cast<u64*>(to + done) = word;
    }
    some(count);
    return done == count && bits.left == 0;
}

// The sequences of a block (3.1.1.3.2.1). False where they are none.
__device__ bool decode_sequences(Bytes in, Section& x, Tables& t, const Shared& s, u64* entries) {
    const u32 *const literal_states = t.states(LITERALS), *const offset_states = t.states(OFFSETS),
                     *const match_states = t.states(MATCHES);
    Backward bits(in, x.bits, x.end - x.bits);
    u32 offsets[3] = {unknown(0), unknown(1), unknown(2)}, literals = 0, made = 0;
    u32 l_state = bits.take(t.log[LITERALS]), o_state = bits.take(t.log[OFFSETS]), m_state = bits.take(t.log[MATCHES]);
    if (bits.left < 0) return false;
    for (u32 i = 0; i < x.sequence_count; ++i) {
        const u32 l = literal_states[l_state], o = offset_states[o_state], m = match_states[m_state];
        const bool more = i + 1 < x.sequence_count;  // the last one has no states behind it
        const u32 l_count = more ? count_of(l) : 0, o_count = more ? count_of(o) : 0, m_count = more ? count_of(m) : 0;
        const u32 states = l_count + m_count + o_count, lengths = more_of(l) + more_of(m), o_more = more_of(o);
        bits.left -= static_cast<int>(states + lengths + o_more);
        if (bits.left < 0 || o_more > 27) return false;
        // From the highest bits on: those of the offset, of the match and of the literals; then those of the states of
        // literals, matches and offsets. Together they may be more than the 57 that are surely in 8 bytes.
        const u64 low = in.from(bits.first + bits.left / 8) >> (bits.left % 8);
        const int above = bits.left + static_cast<int>(states);
        const u64 high =
            states + lengths + o_more > 56 ? in.from(bits.first + above / 8) >> (above % 8) : low >> states;
        u32 behind = static_cast<u32>(low);  // at most 26 bits
        o_state = next_of(o) + lowest(behind, o_count);
        behind >>= o_count;
        m_state = next_of(m) + lowest(behind, m_count);
        l_state = next_of(l) + lowest(behind >> m_count, l_count);
        const u32 literal = s.base[LITERALS][code_of(l)] + lowest(high, more_of(l));
        const u32 match = s.base[MATCHES][code_of(m)] + lowest(high >> more_of(l), more_of(m));
        u32 value = (1u << o_more) + lowest(high >> lengths, o_more);
        if (lengths + o_more > 56) value = (1u << o_more) + bits.bits(above + static_cast<int>(lengths), o_more);
        u32 offset = value - 3;
        if (value > 3) {
            offsets[2] = offsets[1];
            offsets[1] = offsets[0];
        } else {
            const u32 which = value - 1 + (literal == 0);
            // Less 1 of an unknown one is kept in its low bits, which count the other way.
            offset = which == 0   ? offsets[0]
                     : which == 1 ? offsets[1]
                     : which == 2 ? offsets[2]
                                  : offsets[0] + (offsets[0] < UNKNOWN ? -1 : 1);
            if (which > 1) offsets[2] = offsets[1];
            if (which > 0) offsets[1] = offsets[0];
        }
        offsets[0] = offset;
        literals += literal;
        made += literal + match;
        if (offset == 0 || (value > 3 && offset > MOST_OFFSET) || literals > x.count || made > MOST) return false;
        entries[i] = sequence(literals, made, offset);
    }
    made += x.count - literals;
    entries[x.sequence_count] = sequence(x.count, made, 0);
    x.decoded = made;
    for (int i = 0; i < 3; ++i) x.offsets[i] = offsets[i];
    return bits.left == 0 && made <= MOST;
}

// Lengths of codes, and the bits that follow them. All threads call this before they decode.
__device__ void make_codes(Shared& s) {
    for (int i = threadIdx.x; i < KINDS * MOST_CODES; i += THREADS) {
        const int kind = i / MOST_CODES, code = i % MOST_CODES, with = code - first_with_bits(kind);
        const char* const bits = kind == LITERALS ? LITERALS_BITS : MATCHES_BITS;
        const auto bits_of = [&](int which) { return which < 0 ? 0 : static_cast<int>(bits[which]); };
        s.bits[kind][code] = code >= codes(kind) ? 0 : kind == OFFSETS ? code : bits_of(with);
        u32 base = kind == MATCHES ? 3 + code : code;
        for (int each = 0; each < with && kind != OFFSETS && code < codes(kind); ++each)
            base += (1u << bits_of(each)) - 1;
        s.base[kind][code] = base;
    }
}

// Nobody may note a failure before all have seen whether there was one.
__device__ bool failed(const Shared& s) {
    __syncthreads();
    const bool found = s.failed;
    __syncthreads();
    return found;
}

// Decodes the streams of the blocks that were found.
__device__ void decode_streams(Bytes in, u64* room, Shared& s) {
    // Threads that work are apart from each other: those of a warp would wait for each other.
    const int one = threadIdx.x / OF_ONE, t = threadIdx.x % OF_ONE;
    const bool there = one < s.sections;
    Section& x = s.section[there ? one : 0];
    Tables& its = s.tables[there ? one : 0];
    if (there && t == 0 && x.streams) {
        const u32 behind = read_huffman(in, x.huffman, x.huffman_bytes, its);
        x.payload = x.huffman == x.literals ? behind : x.literals;
        if (!behind) s.failed = true;
    } else if (there && t == OF_ONE / 2 && x.sequence_count && !take_all_shares(in, x, its)) {
        s.failed = true;
    }
    if (failed(s)) return;
    const int which = t / (OF_ONE / STREAMS);
    const bool first = there && t % (OF_ONE / STREAMS) == 0;
    if (first && which < static_cast<int>(x.streams)) {
        u8* const to = reinterpret_cast<u8*>(room) + x.room;
        if (!decode_literals(in, x, which, its, to)) s.failed = true;
    }
    if (failed(s)) return;
    if (first && which < KINDS && x.sequence_count) {
        const int kind = which;
        u32* const states = its.states(kind);
        if (its.log[kind]) {
            spread(states, its.shares[kind], codes(kind), its.log[kind], s.bits[kind]);
        } else {
            const u32 code = its.shares[kind][0];
            states[0] = code << 14 | s.bits[kind][code] << 20;
        }
    }
    __syncthreads();
    if (there && t == 0 && x.sequence_count && !decode_sequences(in, x, its, s, room + x.entries)) s.failed = true;
}
