// C ← α·Z + β·C in complex numbers, where Z comes out of a real product (embed.cu): with re and im side by side,
// as in C itself, or of few rows in twice as many, those of re and those of im in turn.
//
//     LAYOUT = 0, of an A doubled:        1, of rows of re and of im of A times B as it lies:
//
//       rows 2i  [ …  re(z)  … ]            rows 2i  [ …  re·re  re·im  … ]    z = re·re − im·im
//          2i+1  [ …  im(z)  … ]               2i+1  [ …  im·re  im·im  … ]        + i·(re·im + im·re)
//
//     2, of a B doubled:
//
//       rows i   [ … re(z) im(z) … ]
//
// α and β are applied here, to finished sums, and to one part of a number at a time where they have one part only:
// a product with α + 0i would make NaN of what is infinite.
//
// Macros: REAL (float, or double for the fallback of ozaki2); GUARDED: a last argument says whether to run at all; LAYOUT;
// CONJUGATE_A, CONJUGATE_B, which LAYOUT = 1 takes into account. Launch: a thread an element of C.

#include "common/complex.cuh"

__device__ __forceinline__ Complex times(REAL re, REAL im, Complex x) {
    if (im == 0) return {re * x.re, re * x.im};
    if (re == 0) return {-im * x.im, im * x.re};
    return {re * x.re - im * x.im, re * x.im + im * x.re};
}

// Rows of P lie `ldp` real numbers apart, those of C `ldc` complex elements.
extern "C" __global__ void __launch_bounds__(256)
combine(long long m, int n, REAL alpha_re, REAL alpha_im, const REAL* __restrict__ P, long long ldp, REAL beta_re,
        REAL beta_im, Complex* __restrict__ C, long long ldc
#if GUARDED
        ,
        const unsigned* run
#endif
) {
#if GUARDED
    if (*run == 0) return;
#endif
    const long long i = blockIdx.x * 256LL + threadIdx.x, row = i / n;
    const int col = i % n;
    if (row >= m) return;
    const REAL* const first = P + (LAYOUT == 2 ? row : 2 * row) * ldp;
    const REAL* const second = first + ldp;
    Complex z;
#if LAYOUT == 2
    z = {first[2 * col], first[2 * col + 1]};
#elif LAYOUT == 1
    constexpr REAL a = CONJUGATE_A ? -1 : 1, b = CONJUGATE_B ? -1 : 1;  // signs of im
    z = {first[2 * col] - a * b * second[2 * col + 1], b * first[2 * col + 1] + a * second[2 * col]};
#else
    z = {first[col], second[col]};
#endif
    z = times(alpha_re, alpha_im, z);
    Complex& c = C[row * ldc + col];
    if (beta_re != 0 || beta_im != 0) {  // else C may hold anything
        const Complex old = times(beta_re, beta_im, c);
        z = {z.re + old.re, z.im + old.im};
    }
    c = z;
}
