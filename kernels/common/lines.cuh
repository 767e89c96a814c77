// What survey.cu finds out about float32 operands, and split.cu decides from and works with. It needs common/types.cuh.

constexpr u32 INFINITE = 255u << 23;  // the bits of infinity; those of NaN are larger
constexpr int TOP = 14;  // the largest element of a line is brought to 2^TOP … 2^(TOP+1)
constexpr float LOW = 0.125f;  // elements below this may lose more than two bits

// What is known about a line, besides its exponent. The survey adds up magnitudes that are rounded down in units of at
// most 2^exponent; who counts again adds up integers, in that unit.
struct alignas(8) Line {
    double sum;  // of magnitudes
    double squares;  // of the same numbers
    u32 largest;  // the bits of the largest magnitude
    u32 unlike;  // the complement of the least of such bits among parts that are not all zeros
    u32 low;  // elements that are not zero and below LOW; no fewer
};

// Extremes over the lines of an operand that were surveyed, but for lines of zeros: see Extremes. Least values are kept
// as their bits below infinity, so that all of them begin with 0 and grow.
struct Surveyed {
    u32 mass, terms, low;
};

// What is remembered of a panel that stays on the device for several products, and is split once, where it lies.
struct Kept {
    u32 made;  // it holds planes
    Surveyed found;  // about the lines of these
};

__device__ __forceinline__ bool holds_planes(const Kept* kept) { return kept != nullptr && kept->made != 0; }

// Decisions that kernels leave for later ones.
struct State {
    u32 fallback;  // nothing is split
    u32 shifted;  // d is in use
    u32 recount;  // lines are counted again
    Surveyed sides[2];
};

template <int COUNT>
struct alignas(4 * COUNT) Floats {
    float x[COUNT];
};

__device__ __forceinline__ u32 magnitude(float x) { return __float_as_int(x) & 0x7fffffff; }

// ⌊log2⌋ of the positive float with these bits.
__device__ __forceinline__ int floor_log2(u32 bits) {
    return bits >> 23 ? static_cast<int>(bits >> 23) - 127 : -118 - __clz(bits);
}

// What brings the largest magnitude of a line to 2^TOP …; 0 for a line of zeros.
__device__ __forceinline__ int exponent_of(u32 bits) {
    return bits == 0 || bits >= INFINITE ? 0 : floor_log2(bits) - TOP;
}
