// The best few elements of each row of a block of C, and their columns: of C·scale − shift, best first, of equal ones
// the lower column first.
//
//     a row of C   ┌─────────────────────────────────┐     each of 256 threads has the largest of its elements;
//                  └─────────────────────────────────┘     the `keep`-th largest of these 256 is a bound that at
//                    ▲   ▲   ▲  largest of a thread        least `keep` elements reach
//
//     Only threads whose largest element reaches the bound look at theirs once more, and put those that reach it
//     on a list, which is ranked.
//
// What was found in blocks before this one is put on the list, too. Its last score is a bound as well, so that of later
// blocks hardly any thread has a second look. Where more elements than the list has room for reach the bound, as where
// many are equal, the best are found one after the other, each in a pass over the row.
//
// NaN is never among the best, nor is −∞. Macros: ELEMENT, type of C; SCORE, float or double. Launch: a block of
// THREADS threads for each row.

constexpr int THREADS = 256;
constexpr int ROOM = 1024;  // of the list
constexpr int END = 0x7fffffff;  // after all columns

using T = ELEMENT;
using S = SCORE;

// Whether a score is better than another one. Their columns decide between equal ones.
__device__ __forceinline__ bool better(S x, int column, S than, int other) {
    return x > than || (x == than && column < other);
}

// A row, and what its elements are worth.
struct Row {
    const T* elements;
    const S *scale, *shift;  // null: 1 and 0
    long long same;  // column of the row itself, which does not count; negative or beyond the row: none
    S nothing;  // −∞

    __device__ __forceinline__ S operator[](int column) const {
        S x = static_cast<S>(elements[column]);
        if (scale) x *= scale[column];
        if (shift) x -= shift[column];
        return column == same ? nothing : x;
    }
};

// Record `row` of `out`: `keep` scores (no more than THREADS), and as many columns of C; −∞ and −1 where there are no more. A
// record has `bytes` bytes. `first`: the block's first column in C. `diagonal`: the column of row 0 itself in the
// block. `fresh`: nothing is in `out` yet.
extern "C" __global__ void __launch_bounds__(THREADS)
best(int cols, const T* __restrict__ C, long long ldc, const S* __restrict__ scale, const S* __restrict__ shift,
     int others, int first, long long diagonal, int keep, int fresh, S nothing, char* __restrict__ out,
     long long bytes) {
    __shared__ S most[THREADS], scores[ROOM], bound;
    __shared__ int columns[ROOM], places[THREADS], count;
    S* const to = reinterpret_cast<S*>(out + blockIdx.x * bytes);
    int* const to_columns = reinterpret_cast<int*>(to + keep);
    const int t = threadIdx.x;
    const long long number = blockIdx.x;
    const Row row{C + number * ldc, scale, shift, others ? number + diagonal : -1, nothing};
    // A thread has one element that was found before, if any.
    const bool has = !fresh && t < keep && to_columns[t] >= 0;
    const S before = has ? to[t] : nothing, known = fresh ? nothing : to[keep - 1];
    const int before_column = has ? to_columns[t] : -1;
    S mine = nothing;
#pragma unroll 8
    for (int column = t; column < cols; column += THREADS) {
        const S x = row[column];
        if (x > mine) mine = x;
    }
    most[t] = mine;
    if (t == 0) {
        count = 0;
        bound = known;
    }
    __syncthreads();
    int ahead = 0;
#pragma unroll 8
    for (int i = 0; i < THREADS; ++i) ahead += better(most[i], i, mine, t);
    if (ahead == keep - 1 && mine > known) bound = mine;  // one thread has this place
    __syncthreads();
    const S needed = bound;
    if (has) {
        const int at = atomicAdd(&count, 1);
        if (at < ROOM) {
            scores[at] = before;
            columns[at] = before_column;
        }
    }
    if (mine > nothing && mine >= needed) {
        for (int column = t; column < cols; column += THREADS) {
            const S x = row[column];
            if (x > nothing && x >= needed) {
                const int at = atomicAdd(&count, 1);
                if (at < ROOM) {
                    scores[at] = x;
                    columns[at] = first + column;
                }
            }
        }
    }
    __syncthreads();
    const int found = count;
    if (found <= ROOM) {
        for (int i = t; i < found; i += THREADS) {
            int place = 0;
            for (int j = 0; j < found; ++j) place += better(scores[j], columns[j], scores[i], columns[i]);
            if (place < keep) {
                to[place] = scores[i];
                to_columns[place] = columns[i];
            }
        }
        for (int i = found + t; i < keep; i += THREADS) {
            to[i] = nothing;
            to_columns[i] = -1;
        }
        return;
    }
    S last = -nothing;
    int last_column = -1;
    for (int place = 0; place < keep; ++place) {
        const bool left = has && better(last, last_column, before, before_column);
        S x = left ? before : nothing;
        int at = left ? before_column : END;
        for (int column = t; column < cols; column += THREADS) {
            const S y = row[column];
            if (better(last, last_column, y, first + column) && better(y, first + column, x, at)) {
                x = y;
                at = first + column;
            }
        }
        most[t] = x;
        places[t] = at;
        for (int half = THREADS / 2; half; half /= 2) {
            __syncthreads();
            if (t < half && better(most[t + half], places[t + half], most[t], places[t])) {
                most[t] = most[t + half];
                places[t] = places[t + half];
            }
        }
        __syncthreads();
        last = most[0];
        last_column = places[0];
        if (t == 0) {
            to[place] = last;
            to_columns[place] = last_column;
        }
        __syncthreads();
    }
}
