// Writes the residues of an operand modulo small numbers, which instructions for 8-bit integers multiply.
//
//     X   x x x x …          planes   r₀ r₀ r₀ r₀ …      one behind the other, each along k
//         x x x x …                   r₁ r₁ r₁ r₁ …      rₗ = x modulo pₗ
//
// Integers are taken as they are. float64 numbers are scaled and rounded to integers before (common/scales.cuh). A
// complex number has three planes for each modulus: of re, of im, and of re + im. Products of these make a complex
// product (recombine.cu), exactly, so that nothing is lost where they cancel.
//
// An integer of 64 bits is Σ dᵢ·256ⁱ with digits from −128 to 127. Two instructions multiply its eight digits by the
// residues of 256ⁱ and add up.
//
// Macros: ELEMENT, FLOATING (whether it is double), PARTS (1, or 2 for complex numbers), CONJUGATE, COUNT (moduli; at
// most, where FLOATING), MODULI. Launch: a thread for every EACH elements of a row; a row has whole blocks.

#include "common/types.cuh"
#include "common/residues.cuh"
#include "common/scales.cuh"

constexpr int THREADS = 256;
constexpr int PLANES = PARTS == 2 ? 3 : 1;  // of a modulus

constexpr int EACH = 8 / PARTS;  // elements of a thread

struct alignas(8 * sizeof(ELEMENT) < 16 ? 8 * sizeof(ELEMENT) : 16) Eight {
    ELEMENT x[8];
};
struct alignas(EACH) Bytes {
    u32 words[EACH / 4];
};

// The digits of an integer, a byte each.
struct Digits {
    u32 low, high;

    __device__ __forceinline__ Digits(i64 x) {
        constexpr u64 HALVES = 0x0080808080808080;  // 128 in each but the highest: bytes from 0 become digits
        const u64 digits = (static_cast<u64>(x) + HALVES) ^ HALVES;
        low = static_cast<u32>(digits), high = static_cast<u32>(digits >> 32);
    }
    __device__ __forceinline__ Digits() : low(0), high(0) {}
    __device__ __forceinline__ int residue(const Modulus& m) const {
        const int sum = __dp4a(static_cast<int>(high), static_cast<int>(m.high), 0);
        return m.residue_of_small(__dp4a(static_cast<int>(low), static_cast<int>(m.low), sum));
    }
};

// `pitch`: words from row to row of a plane, `plane`: from plane to plane. Rows of X lie `ld` elements apart, and
// begin where EACH may be read at once. `state` is null for integers.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
residues(int rows, int cols, const ELEMENT* __restrict__ X, i64 ld, const int* __restrict__ depth, int sign,
         const int* __restrict__ exponents, u32* __restrict__ planes, i64 pitch, i64 plane,
         const State* __restrict__ state) {
    if (FLOATING && state->fallback != 0) return;
    const int across = (cols + EACH * THREADS - 1) / (EACH * THREADS);
    const i64 row = blockIdx.x / across;
    const int col = (blockIdx.x % across * THREADS + threadIdx.x) * EACH;
    if (col >= cols) return;
    const ELEMENT* const from = X + (row * ld + col) * PARTS;
    Eight eight = {};
    if (col + EACH <= cols) {
        eight = *reinterpret_cast<const Eight*>(from);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (col + i / PARTS < cols) eight.x[i] = from[i];
    }

    Digits digits[PLANES][EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        i64 whole[PARTS];
#if FLOATING
        const int d = state->shifted == 0 || col + e >= cols ? 0 : depth[col + e];
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const double x = eight.x[e * PARTS + part];
            whole[part] = d == DROPPED ? 0 : __double2ll_rn(scaled(x, sign * d + exponents[row]));
        }
#else
        whole[0] = eight.x[e];
#endif
        if (CONJUGATE) whole[PARTS - 1] = -whole[PARTS - 1];
#pragma unroll
        for (int part = 0; part < PARTS; ++part) digits[part][e] = Digits(whole[part]);
        if (PARTS == 2) digits[PLANES - 1][e] = Digits(whole[0] + whole[PARTS - 1]);
    }

    const int count = FLOATING ? static_cast<int>(state->moduli) : COUNT;
    u32* to = planes + row * pitch + col / 4;
#pragma unroll
    for (int l = 0; l < COUNT; ++l) {
        if (l >= count) break;
        const Modulus m = modulus(l);
#pragma unroll
        for (int part = 0; part < PLANES; ++part, to += plane) {
            Bytes bytes = {};
#pragma unroll
            for (int e = 0; e < EACH; ++e) bytes.words[e / 4] |= (digits[part][e].residue(m) & 255) << 8 * (e % 4);
            *reinterpret_cast<Bytes*>(to) = bytes;
        }
    }
}
