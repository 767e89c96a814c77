// What the kernels agree on that scale float64 numbers to integers and back. They need common/types.cuh.
//
// An element x of row i of op(A), at column k of it, becomes the integer nearest to x·2^(d[k] + e[i]); in op(B) it is
// −d[k], and e belongs to its column. So the d cancel in products, which are 2^(e[i] + e[j]) times too large.

constexpr int DROPPED = -(1 << 20);  // d of a k that meets nothing but zeros: its elements count as zeros

// Decisions that kernels leave for later ones. The host sets all words to 0, but `least` to a large number.
struct State {
    u32 fallback;  // no product of residues is made
    u32 moduli;    // so many are used
    u32 shifted;   // d is in use
    int least;     // the least sum of products of magnitudes (scale.cu)
};

// x·2^e. 2^e alone may be out of range; where half of it is, so is the result. It is rounded once at most if |x| is 0 or
// no less than 1. Of smaller x, only subnormal results may be rounded twice, which are no part of any integer.
__device__ __forceinline__ double scaled(double x, int e) {
    const auto power = [](int e) {
        return __longlong_as_double(static_cast<i64>(1023 + (e < -1022 ? -1022 : e > 1023 ? 1023 : e)) << 52);
    };
    return x * power(e >> 1) * power(e - (e >> 1));
}
