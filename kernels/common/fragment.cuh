// From the sums of a wgmma instruction to C, as the rungs of the ladder store them. It needs common/wgmma.cuh.

// A warp has 16 of the 64 rows, and a thread, of rows r and r + 8, two neighbouring elements of every eight:
//
//     column      0  1 │ 2  3 │ 4  5 │ 6  7 ║ 8  9 │ …
//     row r       0  1 │      │      │      ║ 4  5 │       lane 4·r      holds d[0], d[1], d[4], d[5], …
//     row r + 8   2  3 │      │      │      ║ 6  7 │       the same lane holds d[2], d[3], d[6], d[7], …
//
// Lanes 4·r + 1, 4·r + 2 and 4·r + 3 hold the next pairs. `row`, `col`: of the first of the 64 rows, in C.
__device__ __forceinline__ void
store_sums(const S (&d)[ACC], S* __restrict__ C, long long ldc, int row, int col, int m, int n, S alpha, S beta) {
    const int thread = threadIdx.x % 128, lane = thread % 32;
    row += thread / 32 * 16 + lane / 4;
    col += lane % 4 * 2;
    const bool pairs = ldc % 2 == 0 && reinterpret_cast<u64>(C) % (2 * sizeof(S)) == 0;  // lie at multiples of 8 bytes
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = row + 8 * half;
        if (r >= m) return;
        S* const line = C + r * ldc;
#pragma unroll
        for (int j = 0; j < BN / 8; ++j) {
            const int c = col + 8 * j;
            S x = alpha * d[4 * j + 2 * half], y = alpha * d[4 * j + 2 * half + 1];
            if (c >= n) break;
            if (beta != 0) {  // or C is not read
                x += beta * line[c];
                if (c + 1 < n) y += beta * line[c + 1];
            }
            if (pairs && c + 1 < n) {
                *reinterpret_cast<float2*>(line + c) = {x, y};
            } else {
                line[c] = x;
                if (c + 1 < n) line[c + 1] = y;
            }
        }
    }
}
