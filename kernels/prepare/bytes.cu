// Cuts integers into planes of their bytes: x = Σ xₚ·256ᵖ, where the highest byte of a signed x is signed, and all
// others are unsigned. Instructions for 8-bit integers multiply the planes.
//
//     X   x x x x …          Y   x₀ x₀ x₀ x₀ …      one plane after the other, each as X lies
//                                x₁ x₁ x₁ x₁ …
//
// Macros: ELEMENT, an unsigned type. Launch: a thread for every four elements, which are all there: rows of panels
// are padded.

#include "common/types.cuh"

constexpr int BYTES = sizeof(ELEMENT);

struct alignas(BYTES == 2 ? 8 : 16) Four {
    ELEMENT x[4];
};

extern "C" __global__ void __launch_bounds__(256) cut(i64 fours, const Four* __restrict__ X, u32* __restrict__ Y) {
    const i64 i = blockIdx.x * 256LL + threadIdx.x;
    if (i >= fours) return;
    const Four four = X[i];
#pragma unroll
    for (int plane = 0; plane < BYTES; ++plane) {
        u32 word = 0;
#pragma unroll
        for (int e = 0; e < 4; ++e) word |= static_cast<u32>(four.x[e] >> 8 * plane & 255) << 8 * e;
        Y[plane * fours + i] = word;
    }
}
