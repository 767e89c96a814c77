// The codes of Zstandard (RFC 8878, 4): streams of bits, and the tables by which codes of variable length are read, Huffman
// codes of literals and FSE codes of sequences. Nothing is read outside of the bytes that describe a table. It needs
// common/types.cuh.

using u8 = unsigned char;
using u16 = unsigned short;

// Lengths of literals, offsets, and lengths of matches: the number of codes, and the most bits of a state.
enum Kind { LITERALS, OFFSETS, MATCHES, KINDS };
constexpr int MOST_CODES = 53, MOST_LOG = 9, OFFSETS_LOG = 8;
__device__ constexpr int codes(int kind) { return kind == LITERALS ? 36 : kind == OFFSETS ? 32 : MOST_CODES; }
__device__ constexpr int most_log(int kind) { return kind == OFFSETS ? OFFSETS_LOG : MOST_LOG; }
constexpr int HUFFMAN_LOG = 11, WEIGHTS_LOG = 6, WEIGHTS = 12;

// Shares of codes where a block does not say them (3.1.1.3.2.2), plus 1: a string has no negative numbers.
#define USUAL_LITERALS "\5\4\3\3\3\3\3\3\3\3\3\3\3\2\2\2\3\3\3\3\3\3\3\3\3\4\3\2\2\2\2\2\0\0\0\0"
#define USUAL_OFFSETS "\2\2\2\2\2\2\3\3\3\2\2\2\2\2\2\2\2\2\2\2\2\2\2\2\0\0\0\0\0"
#define USUAL_MATCHES \
    "\2\5\4\3\3\3\3\3\3\2\2\2\2\2\2\2\2\2\2\2\2\2\2\2\2\2\2\2\2\2\2\2\2\2\2\2\2\2\2\2\2\2\2\2\2\2\0\0\0\0\0\0\0"

// Bits that follow a code of a length, from the first code with any; shorter lengths are their codes.
#define LITERALS_BITS "\1\1\1\1\2\2\3\3\4\6\7\10\11\12\13\14\15\16\17\20"
#define MATCHES_BITS "\1\1\1\1\2\2\3\3\4\4\5\7\10\11\12\13\14\15\16\17\20"
__device__ constexpr int first_with_bits(int kind) { return kind == LITERALS ? 16 : 32; }

// An entry has a symbol, and its bits (8).
struct Huffman {
    u16 table[1 << HUFFMAN_LOG];
    u32 weight_table[1 << WEIGHTS_LOG];
    u8 weights[256];
};

// Tables for the streams of a block: first for literals, then for sequences. An entry of FSE codes has the next state
// without its bits, their number (10), the code (14), and the bits that follow it (20).
struct Tables {
    union {
        Huffman huffman;
        u32 fse[(2 << MOST_LOG) + (1 << OFFSETS_LOG)];
    };
    short shares[KINDS][MOST_CODES];
    short weight_shares[WEIGHTS + 1];
    u8 log[KINDS];
    u8 huffman_log;
    __device__ __forceinline__ u32* states(int kind) {
        return fse + (kind == LITERALS ? 0 : kind == MATCHES ? 1 << MOST_LOG : 2 << MOST_LOG);
    }
};

// ---- Bits -------------------------------------------------------------------------------------------------------

// A frame begins where 8 bytes can be read at once, and at least 16 bytes that may be anything follow it.
struct Bytes {
    const u64* words;
    __device__ __forceinline__ u32 operator[](u32 at) const { return reinterpret_cast<const u8*>(words)[at]; }
    // 8 bytes from anywhere, of which the lowest comes first.
    __device__ __forceinline__ u64 from(u32 at) const {
        const u32 shift = 8 * (at % 8);
        const u64 low = words[at / 8], high = words[at / 8 + 1];
        return shift ? low >> shift | high << (64 - shift) : low;
    }
};

__device__ __forceinline__ u32 lowest(u64 x, u32 count) { return static_cast<u32>(x) & ((1u << count) - 1); }
__device__ __forceinline__ u32 log2_floor(u32 x) { return 31 - __clz(static_cast<int>(x)); }

// A stream that is read from its end: `left` bits are left, from the first bit of the byte `first` on.
struct Backward {
    Bytes bytes;
    u32 first;
    int left;

    // The last byte has a 1 behind the last bit. Left are -1 bits where there is none.
    __device__ __forceinline__ Backward(Bytes in, u32 start, u32 size) : bytes(in), first(start), left(-1) {
        if (size && in[start + size - 1]) left = static_cast<int>(8 * (size - 1) + log2_floor(in[start + size - 1]));
    }
    // Up to 31 bits, above bit `low` of the stream. Bits before its beginning are 0.
    __device__ __forceinline__ u32 bits(int low, u32 count) const {
        if (low >= 0) return lowest(bytes.from(first + low / 8) >> (low % 8), count);
        const int there = low + static_cast<int>(count);
        return there > 0 ? lowest(bytes.from(first), there) << -low : 0;
    }
    __device__ __forceinline__ u32 take(u32 count) {
        left -= static_cast<int>(count);
        return bits(left, count);
    }
};

// ---- Tables of FSE codes ------------------------------------------------------------------------------------------

// The shares of codes, from the frame (4.1.1). The first byte behind them, or 0 where they are no shares.
__device__ u32 read_shares(Bytes in, u32 at, u32 end, short* shares, int most, int most_log, u8& log) {
    if (at >= end) return 0;
    const u32 first = at;
    u32 bit = 4;
    log = in[at] % 16 + 5;
    if (log > most_log) return 0;
    int left = 1 << log, code = 0;
    while (left > 0 && code < most) {
        if (first + bit / 8 >= end) return 0;
        const u32 count = log2_floor(left + 1) + 1;
        const u32 half = (1u << (count - 1)) - 1, below = (1u << count) - 1 - (left + 1);
        u32 found = lowest(in.from(first + bit / 8) >> (bit % 8), count);
        bit += count;
        if ((found & half) < below) {  // it is one bit shorter
            found &= half;
            --bit;
        } else if (found > half) {
            found -= below;
        }
        const int share = static_cast<int>(found) - 1;
        left -= share < 0 ? 1 : share;
        shares[code++] = static_cast<short>(share);
        if (share) continue;
        for (u32 more = 3; more == 3;) {  // how many codes after it have no share either
            if (first + bit / 8 >= end) return 0;
            more = lowest(in.from(first + bit / 8) >> (bit % 8), 2);
            bit += 2;
            if (code + static_cast<int>(more) > most) return 0;
            for (u32 i = 0; i < more; ++i) shares[code++] = 0;
        }
    }
    if (left) return 0;
    while (code < most) shares[code++] = 0;
    const u32 behind = first + (bit + 7) / 8;
    return behind <= end ? behind : 0;
}

// The table of states, from the shares, which become what each code has had.
__device__ void spread(u32* table, short* shares, int most, int log, const u8* bits) {
    const u32 size = 1u << log, step = size / 2 + size / 8 + 3;
    u32 high = size, at = 0;
    for (int code = 0; code < most; ++code)
        if (shares[code] < 0) table[--high] = code;
    for (int code = 0; code < most; ++code) {
        for (int i = 0; i < shares[code]; ++i) {
            table[at] = code;
            do at = (at + step) % size;
            while (at >= high);
        }
        if (shares[code] < 0) shares[code] = 1;
    }
    for (u32 state = 0; state < size; ++state) {
        const u32 code = table[state], had = static_cast<u32>(shares[code]++), count = log - log2_floor(had);
        table[state] = ((had << count) - size) | count << 10 | code << 14 | (bits ? bits[code] : 0u) << 20;
    }
}
__device__ __forceinline__ u32 next_of(u32 entry) { return entry % (1 << 10); }
__device__ __forceinline__ u32 count_of(u32 entry) { return entry >> 10 & 15; }
__device__ __forceinline__ u32 code_of(u32 entry) { return entry >> 14 & 63; }
__device__ __forceinline__ u32 more_of(u32 entry) { return entry >> 20; }

// The shares of the codes of a kind where a block has the usual ones, or describes them at `at`: the first byte behind,
// or 0 where they are none. One code alone has a table of one state.
__device__ u32 take_shares(Bytes in, u32 at, u32 end, u32 mode, int kind, short* shares, u8& log) {
    if (mode == 2) return read_shares(in, at, end, shares, codes(kind), most_log(kind), log);
    if (mode == 1) {
        log = 0;
        shares[0] = in[at];
        return at < end && in[at] < codes(kind) ? at + 1 : 0;
    }
    log = kind == OFFSETS ? 5 : 6;
    const char* const usual = kind == LITERALS ? USUAL_LITERALS : kind == OFFSETS ? USUAL_OFFSETS : USUAL_MATCHES;
    const int count = kind == LITERALS  ? sizeof USUAL_LITERALS
                      : kind == OFFSETS ? sizeof USUAL_OFFSETS
                                        : sizeof USUAL_MATCHES;
    for (int code = 0; code < codes(kind); ++code) shares[code] = code < count - 1 ? usual[code] - 1 : 0;
    return at;
}

__device__ __forceinline__ u32 mode_of(u32 modes, int kind) { return modes >> (6 - 2 * kind) & 3; }

// ---- Tables of Huffman codes --------------------------------------------------------------------------------------

// Weights of symbols (4.2.1), which say how many bits each has, and the table of them. The first byte behind the
// weights, or 0 where they are none.
__device__ u32 read_huffman(Bytes in, u32 at, u32 size, Tables& t) {
    u32 count = 0, behind;
    if (!size) return 0;
    const u32 head = in[at++], end = at - 1 + size;
    if (head < 128) {
        behind = at + head;
        u8 log;
        if (behind > end) return 0;
        const u32 first = read_shares(in, at, behind, t.weight_shares, WEIGHTS + 1, WEIGHTS_LOG, log);
        if (!first) return 0;
        spread(t.huffman.weight_table, t.weight_shares, WEIGHTS + 1, log, nullptr);
        Backward stream(in, first, behind - first);
        u32 state = stream.take(log), other = stream.take(log);
        if (stream.left < 0) return 0;
        for (;;) {
            if (count > 253) return 0;
            const u32 entry = t.huffman.weight_table[state];
            t.huffman.weights[count++] = code_of(entry);
            const u32 next = next_of(entry) + stream.take(count_of(entry));
            state = other;
            other = next;
            if (stream.left >= 0) continue;
            t.huffman.weights[count++] = code_of(t.huffman.weight_table[state]);
            break;
        }
    } else {
        count = head - 127;
        behind = at + (count + 1) / 2;
        if (behind > end) return 0;
        for (u32 i = 0; i < count; ++i) t.huffman.weights[i] = i % 2 ? in[at + i / 2] % 16 : in[at + i / 2] / 16;
    }
    u32 total = 0, starts[WEIGHTS + 1] = {};
    for (u32 i = 0; i < count; ++i) {
        if (t.huffman.weights[i] > HUFFMAN_LOG) return 0;
        total += (1u << t.huffman.weights[i]) / 2;
        ++starts[t.huffman.weights[i]];
    }
    if (!total) return 0;
    const u32 log = log2_floor(total) + 1, left = (1u << log) - total;
    if (log > HUFFMAN_LOG || left != 1u << log2_floor(left)) return 0;
    t.huffman.weights[count] = log2_floor(left) + 1;  // of the last symbol, which is not said
    ++starts[t.huffman.weights[count++]];
    t.huffman_log = log;
    u32 start = 0;
    for (u32 weight = 1; weight <= log; ++weight) {
        const u32 symbols = starts[weight];
        starts[weight] = start;
        start += symbols << (weight - 1);
    }
    for (u32 symbol = 0; symbol < count; ++symbol) {
        const u32 weight = t.huffman.weights[symbol];
        if (!weight) continue;
        const u32 stop = starts[weight] + (1u << (weight - 1));
        for (; starts[weight] < stop; ++starts[weight])
            t.huffman.table[starts[weight]] = symbol | (log + 1 - weight) << 8;
    }
    return behind;
}
