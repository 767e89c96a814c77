// Y ← Xᵀ: for instructions that want both operands contiguous along k (wgmma.cu with tf32 and int8).
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
