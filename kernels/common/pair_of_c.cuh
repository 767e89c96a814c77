// Two neighbouring elements of a row of C, of type S, which must be defined before.
//
// `line` is the row, `col` the column of the first of the two, and `cols` how many columns there are: those past them are
// neither read nor written. `aligned`: whether pairs begin at multiples of their size, so that both go at once.

struct alignas(2 * sizeof(S)) Pair {
    S v[2];
};

template <typename COLUMN>
__device__ __forceinline__ Pair read_pair(const S* line, COLUMN col, COLUMN cols, bool aligned) {
    Pair found = {};
    if (aligned && col + 1 < cols) {
        found = *reinterpret_cast<const Pair*>(line + col);
    } else {
        if (col < cols) found.v[0] = line[col];
        if (col + 1 < cols) found.v[1] = line[col + 1];
    }
    return found;
}

template <typename COLUMN>
__device__ __forceinline__ void write_pair(S* line, COLUMN col, COLUMN cols, bool aligned, const Pair& pair) {
    if (aligned && col + 1 < cols) {
        *reinterpret_cast<Pair*>(line + col) = pair;
    } else {
        if (col < cols) line[col] = pair.v[0];
        if (col + 1 < cols) line[col + 1] = pair.v[1];
    }
}
