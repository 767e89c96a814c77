// Y ← Xᵀ: for instructions that want both operands contiguous along k (wgmma.cu with tf32 and int8), and for
// chunks of a symmetric C, which are written as they are and as mirror images. mirror: C's lower triangle, in
// place, to its upper one.
//
// Warps read and write whole rows of 32 words; a word holds V elements of 1 or 2 bytes, or one that is longer.
// The turn happens in shared memory. A thread turns V×V elements: the words that it needs come from rows that
// lie V apart, so rows are stored in an order in which those of a warp follow each other, one word longer than
// they must be, and fall into 32 different banks. Words that stand out over an edge, and all of them where
// rows do not begin at whole words, are read and written element by element.
//
// Macros: ELEMENT. Launch: blocks of 32×8 threads in one dimension; for transpose one for each tile of
// (32·V)², for mirror one for each of 32².

using T = ELEMENT;

constexpr int LANES = 32, ROWS = 8, V = sizeof(T) < 4 ? 4 / sizeof(T) : 1, SIDE = LANES * V;

struct alignas(V * sizeof(T)) Word {
    T of[V];
};

extern "C" __global__ void __launch_bounds__(LANES * ROWS)
transpose(int rows, int cols, const T* __restrict__ X, long long ldx, T* __restrict__ Y, long long ldy) {
    __shared__ Word tile[SIDE][LANES + 1];
    const int across = (cols + SIDE - 1) / SIDE;
    const int row = blockIdx.x / across * SIDE, col = blockIdx.x % across * SIDE;
    const int x = threadIdx.x * V;
    const bool x_whole = (reinterpret_cast<unsigned long long>(X) | ldx * sizeof(T)) % sizeof(Word) == 0;
    const bool y_whole = (reinterpret_cast<unsigned long long>(Y) | ldy * sizeof(T)) % sizeof(Word) == 0;
#pragma unroll 4
    for (int i = threadIdx.y; i < SIDE && row + i < rows; i += ROWS) {
        const T* const from = X + (row + i) * ldx + col + x;
        Word word = {};
        if (x_whole && col + x + V <= cols) {
            word = *reinterpret_cast<const Word*>(from);
        } else {
#pragma unroll
            for (int e = 0; e < V; ++e) {
                if (col + x + e < cols) word.of[e] = from[e];
            }
        }
        tile[i % V * LANES + i / V][threadIdx.x] = word;
    }
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.y; i < LANES && col + i * V < cols; i += ROWS) {
        Word in[V];
#pragma unroll
        for (int e = 0; e < V; ++e) in[e] = tile[e * LANES + threadIdx.x][i];
#pragma unroll
        for (int j = 0; j < V; ++j) {
            if (col + i * V + j >= cols) break;
            T* const to = Y + (col + i * V + j) * ldy + row + x;
            Word word;
#pragma unroll
            for (int e = 0; e < V; ++e) word.of[e] = in[e].of[j];
            if (y_whole && row + x + V <= rows) {
                *reinterpret_cast<Word*>(to) = word;
            } else {
#pragma unroll
                for (int e = 0; e < V; ++e) {
                    if (row + x + e < rows) to[e] = word.of[e];
                }
            }
        }
    }
}

// Blocks above the diagonal have nothing to do; one on it reads its tile before it writes there.
extern "C" __global__ void __launch_bounds__(LANES * ROWS) mirror(int n, T* C, long long ldc) {
    __shared__ T tile[LANES][LANES + 1];
    const int across = (n + LANES - 1) / LANES;
    const int row = blockIdx.x / across * LANES, col = blockIdx.x % across * LANES;
    if (col > row) return;
#pragma unroll
    for (int i = threadIdx.y; i < LANES; i += ROWS) {
        if (row + i < n && col + threadIdx.x < n) tile[i][threadIdx.x] = C[(row + i) * ldc + col + threadIdx.x];
    }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.y; i < LANES; i += ROWS) {
        const int to_row = col + i, to_col = row + threadIdx.x;
        if (to_col < n && to_row < to_col) C[to_row * ldc + to_col] = tile[threadIdx.x][i];
    }
}
