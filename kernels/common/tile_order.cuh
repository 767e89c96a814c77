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

template <int DOWN, class Int>
__device__ __forceinline__ TilePlace<Int> place_of_tile(Int index, Int tiles_m, Int tiles_n) {
    const Int group = index / (DOWN * tiles_n), within = index % (DOWN * tiles_n);
    const Int below = tiles_m - group * DOWN, height = below < DOWN ? below : DOWN;
    return {group * DOWN + within % height, within / height};
}
