// C ← α·Z + β·C, where Z is known by its residues: what products of residues leave (wgmma.cu).
//
//     planes   r₀ r₀ r₀ r₀ …      one behind the other          Z = Σ P/M·y − q·P      (moduli.py)
//              r₁ r₁ r₁ r₁ …
//
// y is made of the residues of a pair of moduli, whose product is M, by one instruction that multiplies two bytes by 16
// bits each. Sums are integers in words of 32 bits, and wrap around: two words for a C of int64, four for float64. Of float64, Z is
// then rounded once and multiplied by a power of two (common/scales.cuh).
//
// Of complex numbers there are three planes for each modulus, of re·re, im·im and (re + im)·(re + im), from which their
// re and im are found before anything is rounded.
//
// Macros: ELEMENT, FLOATING (whether it is double), PARTS (1, or 2 for complex numbers), LIMBS, RAISED (more than any |y|,
// so that y + RAISED has no sign), and TABLES, of which there is one for each number of moduli. Launch: a thread for
// every four elements of a row; a row has whole blocks.

#include "common/types.cuh"
#include "common/scales.cuh"

using T = ELEMENT;

constexpr int THREADS = 256;
constexpr int PLANES = PARTS == 2 ? 3 : 1;  // of a modulus
constexpr int FRACTION_BITS = 39;  // as in moduli.py
constexpr int MOST = 16;  // moduli

struct Pair {
    u32 factors;  // v and v′, 16 bits each
    u32 fraction;  // 1/M with FRACTION_BITS behind the point
    u32 weight[LIMBS];  // P/M

    // y, when it is raised.
    __device__ __forceinline__ int y(int r, int s) const {
        return r * static_cast<short>(factors) + s * static_cast<short>(factors >> 16) + RAISED;
    }
};
struct Table {
    int count;
    Pair pairs[MOST / 2];
    u32 negative[LIMBS];  // −P
    u32 start[LIMBS];  // what a sum begins with, for each y is raised, and q
    u64 start_fraction;
};
constexpr Table ALL[] = {TABLES};
constexpr int KINDS = sizeof(ALL) / sizeof(Table);

// An integer in the making: words with their carries, but for the last, whose carries are lost.
struct Sum {
    u64 limbs[LIMBS - 1];
    u32 last;
    u64 fraction;

    __device__ __forceinline__ void clear(const Table& table) {
        fraction = table.start_fraction;
        last = table.start[LIMBS - 1];
#pragma unroll
        for (int i = 0; i < LIMBS - 1; ++i) limbs[i] = table.start[i];
    }
    __device__ __forceinline__ void add(const u32 (&weight)[LIMBS], u32 times) {
        last += times * weight[LIMBS - 1];
#pragma unroll
        for (int i = 0; i < LIMBS - 1; ++i) limbs[i] += static_cast<u64>(times) * weight[i];
    }
    __device__ __forceinline__ void add(const Pair& pair, int raised) {
        const u32 y = static_cast<u32>(raised);
        fraction += static_cast<u64>(y) * pair.fraction;
        add(pair.weight, y);
    }
    // Takes q·P off, and lets limbs carry.
    __device__ __forceinline__ void reduce(const Table& table) {
        add(table.negative, static_cast<u32>(fraction >> FRACTION_BITS));
#pragma unroll
        for (int i = 1; i < LIMBS - 1; ++i) limbs[i] += limbs[i - 1] >> 32;
        last += static_cast<u32>(limbs[LIMBS - 2] >> 32);
    }
    // The lowest 64 bits, and the highest.
    __device__ __forceinline__ u64 low() const {
        const u32 second = LIMBS > 2 ? static_cast<u32>(limbs[LIMBS > 2]) : last;
        return static_cast<u32>(limbs[0]) | static_cast<u64>(second) << 32;
    }
    __device__ __forceinline__ u64 high() const {
        return static_cast<u32>(limbs[LIMBS - 2]) | static_cast<u64>(last) << 32;
    }
};

// The sum·2^e, rounded to 53 bits, and once more where it is subnormal; of integers the sum, modulo 2^64.
__device__ __forceinline__ T number(const Sum& sum, int e) {
#if FLOATING
    u64 low = sum.low(), high = sum.high();
    const bool negative = static_cast<i64>(high) < 0;
    if (negative) low = 0 - low, high = ~high + (low == 0);
    int dropped = 0;  // bits that `high` does not hold after the shift
    if (high == 0) {
        high = low;
    } else {
        const int zeros = __clzll(static_cast<i64>(high));
        if (zeros > 0) high = high << zeros | low >> (64 - zeros);
        if (low << zeros != 0) high |= 1;  // which is all that rounding has to know of them
        dropped = 64 - zeros;
    }
    const double size = scaled(__ull2double_rn(high), dropped + e);
    return negative ? -size : size;
#else
    return static_cast<T>(sum.low());
#endif
}

// α or β. It is applied to one part of a number at a time where it has one part only: a product with α + 0i would make
// NaN of what is infinite.
struct Factor {
    T x[PARTS];

    __device__ __forceinline__ Factor(T re, T im) {
        x[PARTS - 1] = im;
        x[0] = re;
    }
    __device__ __forceinline__ bool zero() const { return x[0] == 0 && x[PARTS - 1] == 0; }
    __device__ __forceinline__ void times(T (&y)[PARTS]) const {
#if PARTS == 2
        const T re = y[0], im = y[1];
        if (x[1] == 0) y[0] = x[0] * re, y[1] = x[0] * im;
        else if (x[0] == 0) y[0] = -x[1] * im, y[1] = x[1] * re;
        else y[0] = x[0] * re - x[1] * im, y[1] = x[0] * im + x[1] * re;
#elif FLOATING
        y[0] *= x[0];
#else
        y[0] = static_cast<T>(static_cast<u64>(x[0]) * static_cast<u64>(y[0]));  // wraps around
#endif
    }
};

__device__ __forceinline__ T plus(T x, T y) {
#if FLOATING
    return x + y;
#else
    return static_cast<T>(static_cast<u64>(x) + static_cast<u64>(y));
#endif
}

// Four elements of C or their parts, of which the first `there` exist.
struct Four {
    T x[4 * PARTS];

    struct alignas(16) Pair {
        T x[2];
    };
    static __device__ __forceinline__ bool whole(const T* at, int there) {
        return there >= 4 && reinterpret_cast<u64>(at) % sizeof(Pair) == 0;
    }
    __device__ __forceinline__ void load(const T* from, int there) {
#pragma unroll
        for (int i = 0; i < 4 * PARTS; i += 2) {
            if (whole(from, there)) {
                const Pair pair = *reinterpret_cast<const Pair*>(from + i);
                x[i] = pair.x[0], x[i + 1] = pair.x[1];
            } else {
                if (i / PARTS < there) x[i] = from[i];
                if ((i + 1) / PARTS < there) x[i + 1] = from[i + 1];
            }
        }
    }
    __device__ __forceinline__ void store(T* to, int there) const {
#pragma unroll
        for (int i = 0; i < 4 * PARTS; i += 2) {
            if (whole(to, there)) {
                *reinterpret_cast<Pair*>(to + i) = {{x[i], x[i + 1]}};
            } else {
                if (i / PARTS < there) to[i] = x[i];
                if ((i + 1) / PARTS < there) to[i + 1] = x[i + 1];
            }
        }
    }
};

// α·Z of four elements by the table for `count` moduli, which is number KIND or one after it. `from`: their words of the
// first plane.
template <int KIND>
__device__ __forceinline__ Four recombine_by(int count, const u32* from, i64 plane, const Factor& alpha,
                                             int row_exponent, const int (&column_exponents)[4]) {
    static constexpr Table table = ALL[KIND];
    if constexpr (KIND + 1 < KINDS) {
        if (count != table.count)
            return recombine_by<KIND + 1>(count, from, plane, alpha, row_exponent, column_exponents);
    }
    Sum sums[4 * PARTS];
#pragma unroll
    for (int i = 0; i < 4 * PARTS; ++i) sums[i].clear(table);
#pragma unroll
    for (int l = 0; l < table.count; l += 2) {
        const Pair& pair = table.pairs[l / 2];
        u32 words[2][PLANES];
#pragma unroll
        for (int i = 0; i < 2 * PLANES; ++i)
            words[i / PLANES][i % PLANES] = l + i / PLANES < table.count ? from[(l * PLANES + i) * plane] : 0;
#if PARTS == 2
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            int re[2], im[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const auto byte = [&](int part) {
                    return static_cast<int>(static_cast<signed char>(words[i][part] >> 8 * e));
                };
                re[i] = byte(0) - byte(1), im[i] = byte(2) - byte(0) - byte(1);
            }
            sums[2 * e].add(pair, pair.y(re[0], re[1]));
            sums[2 * e + 1].add(pair, pair.y(im[0], im[1]));
        }
#else
        const int factors = static_cast<int>(pair.factors);
        const int low = static_cast<int>(__byte_perm(words[0][0], words[1][0], 0x5140));  // of elements 0 and 1
        const int high = static_cast<int>(__byte_perm(words[0][0], words[1][0], 0x7362));
        sums[0].add(pair, __dp2a_lo(factors, low, RAISED));
        sums[1].add(pair, __dp2a_hi(factors, low, RAISED));
        sums[2].add(pair, __dp2a_lo(factors, high, RAISED));
        sums[3].add(pair, __dp2a_hi(factors, high, RAISED));
#endif
    }
    Four found;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        T z[PARTS];
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            Sum& sum = sums[e * PARTS + part];
            sum.reduce(table);
            z[part] = number(sum, -row_exponent - column_exponents[e]);
        }
        alpha.times(z);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) found.x[e * PARTS + part] = z[part];
    }
    return found;
}

// `pitch`: words from row to row of a plane, `plane`: from plane to plane. Rows of C lie `ldc` elements apart. Exponents
// and `state` are null for integers.
extern "C" __global__ void __launch_bounds__(THREADS, PARTS == 2 ? 1 : 4)
recombine(int m, int n, T alpha_re, T alpha_im, const u32* __restrict__ planes, i64 pitch, i64 plane, T beta_re,
          T beta_im, T* __restrict__ C, i64 ldc, const int* __restrict__ row_exponents,
          const int* __restrict__ column_exponents, const State* __restrict__ state) {
    if (FLOATING && state->fallback != 0) return;
    const int across = (n + 4 * THREADS - 1) / (4 * THREADS);
    const i64 row = blockIdx.x / across;
    const int col = blockIdx.x % across * 4 * THREADS + 4 * threadIdx.x, there = n - col;
    if (there <= 0) return;
    const u32* const from = planes + row * pitch + col / 4;
    T* const to = C + (row * ldc + col) * PARTS;
    const Factor alpha(alpha_re, alpha_im), beta(beta_re, beta_im);
    Four old = {};
    if (!beta.zero()) old.load(to, there);
    int exponent = 0, exponents[4] = {};
#if FLOATING
    exponent = row_exponents[row];
#pragma unroll
    for (int e = 0; e < 4; ++e)
        if (e < there) exponents[e] = column_exponents[col + e];
#endif
    const int count = FLOATING ? static_cast<int>(state->moduli) : ALL[0].count;
    Four found = recombine_by<0>(count, from, plane, alpha, exponent, exponents);
    if (!beta.zero()) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            T c[PARTS];
#pragma unroll
            for (int part = 0; part < PARTS; ++part) c[part] = old.x[e * PARTS + part];
            beta.times(c);
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                found.x[e * PARTS + part] = plus(found.x[e * PARTS + part], c[part]);
        }
    }
    found.store(to, there);
}
