// Which tile of C a thread block computes. Blocks run roughly in the order of their index: walking down DOWN tiles
// before going right makes those that run together cover a piece of C that is about square, which reads the least of
// A and B from beyond L2.
//
//     0 2 4 │     DOWN = 2, tiles_m = 3, tiles_n = 3
//     1 3 5 │
//     ──────┘
//     6 7 8

template <class Int>
struct TilePlace {
    Int row, col;  // counted in tiles
};

// Of a symmetric matrix only tiles with elements on or below the diagonal are counted: each group of DOWN rows of tiles
// ends where its last row meets the diagonal.
//
//     0 2       │     DOWN = 2, tiles_m = 4, tiles_n = 4
//     1 3       │
//     ──────────┘
//     4 6 8 10
//     5 7 9 11
template <int DOWN>
struct LowerTiles {
    int tiles_m, tiles_n, tile_rows, tile_cols;
    int above;    // rows of the matrix above the first one
    int per_row;  // columns for each row: 2 where the parts of a complex element are two columns

    __device__ __forceinline__ int height(int group) const {
        const int below = tiles_m - group * DOWN;
        return below < DOWN ? below : DOWN;
    }
    __device__ __forceinline__ int width(int group) const {
        const long long stop = above + static_cast<long long>(group * DOWN + height(group)) * tile_rows;
        const long long tiles = (per_row * stop + tile_cols - 1) / tile_cols;
        return tiles < tiles_n ? static_cast<int>(tiles) : tiles_n;
    }
    __device__ __forceinline__ int count() const {
        int sum = 0;
        for (int group = 0; group * DOWN < tiles_m; ++group) sum += height(group) * width(group);
        return sum;
    }
    __device__ __forceinline__ TilePlace<int> place(int index) const {
        int group = 0, tiles = height(0) * width(0);
        while (index >= tiles) {
            index -= tiles;
            ++group;
            tiles = height(group) * width(group);
        }
        return {group * DOWN + index % height(group), index / height(group)};
    }
};

template <int DOWN, class Int>
__device__ __forceinline__ TilePlace<Int> place_of_tile(Int index, Int tiles_m, Int tiles_n) {
    const Int group = index / (DOWN * tiles_n), within = index % (DOWN * tiles_n);
    const Int below = tiles_m - group * DOWN, height = below < DOWN ? below : DOWN;
    return {group * DOWN + within % height, within / height};
}
