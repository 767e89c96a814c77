// Y ← Xᵀ: for instructions that want both operands contiguous along k (wgmma.cu with tf32 and int8), and for
// chunks of a symmetric C, which are written as they are and as mirror images. mirror: C's lower triangle, in
// place, to its upper one.
//
// Warps read and write whole 32-element rows; the turn happens in shared memory, whose rows are one element
// longer so that a column falls into 32 different banks.
//
// Macros: ELEMENT. Launch: blocks of 32×8 threads, one for each 32×32 tile, in one dimension.

using T = ELEMENT;

constexpr int TILE = 32, ROWS = 8;

extern "C" __global__ void __launch_bounds__(TILE * ROWS)
transpose(int rows, int cols, const T* __restrict__ X, long long ldx, T* __restrict__ Y, long long ldy) {
    __shared__ T tile[TILE][TILE + 1];
    const int across = (cols + TILE - 1) / TILE;
    const int row = blockIdx.x / across * TILE, col = blockIdx.x % across * TILE;
#pragma unroll
    for (int i = threadIdx.y; i < TILE; i += ROWS) {
        if (row + i < rows && col + threadIdx.x < cols) tile[i][threadIdx.x] = X[(row + i) * ldx + col + threadIdx.x];
    }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.y; i < TILE; i += ROWS) {
        if (col + i < cols && row + threadIdx.x < rows) Y[(col + i) * ldy + row + threadIdx.x] = tile[threadIdx.x][i];
    }
}

// Blocks above the diagonal have nothing to do; one on it reads its tile before it writes there.
extern "C" __global__ void __launch_bounds__(TILE * ROWS) mirror(int n, T* C, long long ldc) {
    __shared__ T tile[TILE][TILE + 1];
    const int across = (n + TILE - 1) / TILE;
    const int row = blockIdx.x / across * TILE, col = blockIdx.x % across * TILE;
    if (col > row) return;
#pragma unroll
    for (int i = threadIdx.y; i < TILE; i += ROWS) {
        if (row + i < n && col + threadIdx.x < n) tile[i][threadIdx.x] = C[(row + i) * ldc + col + threadIdx.x];
    }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.y; i < TILE; i += ROWS) {
        const int to_row = col + i, to_col = row + threadIdx.x;
        if (to_col < n && to_row < to_col) C[to_row * ldc + to_col] = tile[threadIdx.x][i];
    }
}
