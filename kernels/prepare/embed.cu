// Complex products as real ones: with re and im side by side in memory, the floats of C = A·B are those of
// one real product of twice the sizes,
//
//     [ … re im … ]   [ … re im … ]   [   re  im   ]      two rows of B′ for a row of B along n,
//     [   C  m×2n ] = [   A  m×2k ] · [  -im  re   ]      or two columns for a column along k
//                                     [   B′ 2k×2n ]
//
// A stored along k is taken as it lies, and so is C. What is left to make is B′, twice as large as B, and,
// for an A stored along m, its re and im in rows of their own. Four real multiplications for a complex one:
// three would need sums of elements, which cost accuracy, and temporaries of C.
//
// Macros: REAL (float, or double for the fallback of ozaki2); GUARDED: a last argument says whether to run at all; MODE
// (1: rows of re and of im; 2: B′ from rows along n; 3: B′ᵀ from rows along k); CONJUGATE: X;
// CONJUGATE_OTHER, for B′: A, which changes the sign of what im of A meets. Launch: blocks of 32×8 threads.

#include "common/complex.cuh"

constexpr int ROWS = 1, DOUBLE_N = 2, DOUBLE_K = 3;

// X has rows × cols complex elements, rows `ldx` of them apart; rows of Y lie `ldy` real numbers apart.
extern "C" __global__ void __launch_bounds__(256)
embed(int rows, int cols, const Complex* __restrict__ X, long long ldx, REAL* __restrict__ Y, long long ldy
#if GUARDED
      ,
      const unsigned* run
#endif
) {
#if GUARDED
    if (*run == 0) return;
#endif
    const int across = (cols + 31) / 32;
    const int row = blockIdx.x / across * 8 + threadIdx.y, col = blockIdx.x % across * 32 + threadIdx.x;
    if (row >= rows || col >= cols) return;
    Complex x = X[row * ldx + col];
    if (CONJUGATE) x.im = -x.im;
    constexpr REAL sign = CONJUGATE_OTHER ? -1 : 1;
    REAL* const first = Y + 2 * row * ldy;
    REAL* const second = first + ldy;
    if (MODE == ROWS) {
        first[col] = x.re;
        second[col] = x.im;
    } else if (MODE == DOUBLE_N) {
        reinterpret_cast<Complex*>(first)[col] = {x.re, x.im};
        reinterpret_cast<Complex*>(second)[col] = {-sign * x.im, sign * x.re};
    } else {
        reinterpret_cast<Complex*>(first)[col] = {x.re, -sign * x.im};
        reinterpret_cast<Complex*>(second)[col] = {x.im, sign * x.re};
    }
}
