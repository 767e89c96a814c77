// C's elements from the type in which they were summed to the type in which C is stored, in place: each row of a
// finished block is packed at its own beginning, from which it is copied to the host.
//
//     a row of sums    [  x0  |  x1  |  x2  |  x3  | … ]      elements of FROM
//     afterwards       [y0|y1|y2|y3| …      …          ]      elements of TO, which are no larger
//
// A thread block packs one row, TILE elements at a time: it reads all of them before it writes the first, and what it
// writes ends before the elements that it has not read yet. Floats are rounded to the nearest number, of two nearest
// ones to the even one.
//
// What TO cannot hold is counted for each chunk of C: integers past its limits, with the least and the greatest of
// them, and finite numbers that became infinite. A complex element counts where it was finite and one of its parts
// became infinite.
//
// Macros: FROM, TO: types of elements, of complex ones of their parts (for float16, TO is unsigned short); KIND (1
// real, 2 complex, 3 integers, perhaps held in floating point, 4 float16). Launch: THREADS threads for each row.

#define COMPLEX_KIND 2
#define INTEGER_KIND 3
#define HALF_KIND 4

constexpr int THREADS = 256, EACH = 8, TILE = THREADS * EACH;

// What does not fit of one chunk. All of it is 0 where everything does: limits of integers lie on either side of 0.
struct Lost {
    unsigned long long elements;
    long long least, greatest;
};

#if KIND == COMPLEX_KIND
struct alignas(2 * sizeof(FROM)) Sum {
    FROM re, im;
};
struct alignas(2 * sizeof(TO)) Element {
    TO re, im;
};
#else
using Sum = FROM;
using Element = TO;
#endif
static_assert(sizeof(Element) <= sizeof(Sum), "a row becomes no longer");

#if KIND == INTEGER_KIND
constexpr bool SIGNED = static_cast<TO>(-1) < static_cast<TO>(0);
constexpr int BITS = 8 * sizeof(TO) - (SIGNED ? 1 : 0);
constexpr long long GREATEST = BITS > 62 ? 0x7fffffffffffffffll : (1ll << (BITS % 63)) - 1;
constexpr long long LEAST = SIGNED ? -GREATEST - 1 : 0;
#else
template <class Real>
__device__ __forceinline__ bool finite(Real x) {
    return x - x == 0;
}
template <class Real>
__device__ __forceinline__ bool infinite(Real x) {
    return x == x && !finite(x);
}
__device__ __forceinline__ bool infinite(unsigned short half) { return (half & 0x7fff) == 0x7c00; }
#endif

#if KIND == HALF_KIND
__device__ __forceinline__ unsigned short to_half(float x) {
    unsigned short half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
    return half;
}
__device__ __forceinline__ unsigned short to_half(double x) {
    unsigned short half;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(half) : "d"(x));
    return half;
}
#endif

// The element of C; `fits` becomes false where TO cannot hold it.
__device__ __forceinline__ Element narrowed(Sum x, bool& fits) {
#if KIND == INTEGER_KIND
    const long long exact = static_cast<long long>(x);
    fits = LEAST <= exact && exact <= GREATEST;
    return static_cast<Element>(exact);
#elif KIND == COMPLEX_KIND
    const Element y = {static_cast<TO>(x.re), static_cast<TO>(x.im)};
    fits = !(infinite(y.re) || infinite(y.im)) || !(finite(x.re) && finite(x.im));
    return y;
#else
#if KIND == HALF_KIND
    const Element y = to_half(x);
#else
    const Element y = static_cast<Element>(x);
#endif
    fits = !infinite(y) || !finite(x);
    return y;
#endif
}

// C: the rows of a block that are packed, `pitch` sums apart, `cols` of which are used. The first of them is row `row`
// of its chunk. Chunks are height × width; `lost` has `across` of them side by side.
extern "C" __global__ void __launch_bounds__(THREADS)
narrow(long long cols, Sum* C, long long pitch, long long row, long long height, long long width, long long across,
       Lost* lost) {
    Sum* const from = C + blockIdx.x * pitch;
    Element* const to = reinterpret_cast<Element*>(from);
    Lost* const chunks = lost + (row + blockIdx.x) / height * across;
    // What this thread has found in the chunk that ends before column `end`.
    Lost found = {0, 0, 0};
    long long end = 0;
    const auto tell = [&] {
        if (!found.elements) return;
        Lost* const chunk = chunks + (end / width - 1);
        atomicAdd(&chunk->elements, found.elements);
#if KIND == INTEGER_KIND
        atomicMin(&chunk->least, found.least);
        atomicMax(&chunk->greatest, found.greatest);
#endif
        found = {0, 0, 0};
    };
    for (long long start = threadIdx.x; start - threadIdx.x < cols; start += TILE) {
        Sum x[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (start + i * THREADS < cols) x[i] = from[start + i * THREADS];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const long long col = start + i * THREADS;
            if (col >= cols) break;
            bool fits;
            to[col] = narrowed(x[i], fits);
            if (fits) continue;
            if (col >= end) {
                tell();
                end = (col / width + 1) * width;
            }
            ++found.elements;
#if KIND == INTEGER_KIND
            const long long exact = static_cast<long long>(x[i]);
            found.least = exact < found.least ? exact : found.least;
            found.greatest = exact > found.greatest ? exact : found.greatest;
#endif
        }
    }
    tell();
}
