// What split.cu and the kernels that multiply its planes agree on.

constexpr int SEGMENT = 64;  // elements of hi, then of lo, along the contiguous axis

// x·2^e, rounded once. 2^e alone may be out of range; where half of it is, so is the result.
__device__ __forceinline__ float scaled(float x, int e) {
    const auto power = [](int e) { return __int_as_float((127 + (e < -126 ? -126 : e > 127 ? 127 : e)) << 23); };
    return x * power(e >> 1) * power(e - (e >> 1));
}
