// X ← X − scale·r − scale·c, in place: a panel whose rows, or columns, are centred.
//
// `rows_by` and `cols_by` hold a float64 for each row and each column: means, or sums that `scale` makes means of.
// Either may be null. Elements are widened to float64 and rounded once, so that means that are large beside the
// deviations cost no digits.
//
// Macros: ELEMENT, type of X. Launch: blocks of 32×8 threads, one for each 32×32 tile of X, in one dimension.

constexpr int TILE = 32, ROWS = 8;
constexpr int EACH = TILE / ROWS;  // rows of a thread: so many loads are under way at once

extern "C" __global__ void __launch_bounds__(TILE * ROWS)
centre(long long rows, long long cols, ELEMENT* X, long long ldx, const double* __restrict__ rows_by,
       const double* __restrict__ cols_by, double scale) {
    const unsigned across = static_cast<unsigned>((cols + TILE - 1) / TILE);
    const long long row = static_cast<long long>(blockIdx.x / across) * TILE + threadIdx.y;
    const long long col = static_cast<long long>(blockIdx.x % across) * TILE + threadIdx.x;
    if (col >= cols) return;
    const double by = cols_by ? cols_by[col] * scale : 0.0;
    double x[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const long long at = row + i * ROWS;
        x[i] = at < rows ? static_cast<double>(X[at * ldx + col]) - (rows_by ? rows_by[at] * scale : 0.0) : 0.0;
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const long long at = row + i * ROWS;
        if (at < rows) X[at * ldx + col] = static_cast<ELEMENT>(x[i] - by);
    }
}
