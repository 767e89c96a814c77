// x ← (x − 2p)/√(2p(1 − p)), in place: a panel of op(A) whose elements at each place along k are standardized by
// half their mean p, as numbers of successes of two trials are. Missing elements become 0.
//
//      ALONG_K 0: a row of X is a place            ALONG_K 1: a column of X is a place
//     ┌──────────────────────┐                    ┌────────────┐
//     │ block 0 ───────────► │ m                  │ block 0, 32 columns: 32 rows at a time
//     │ block 1              │                    │     │      │
//     └──────────────────────┘                    └─────▼──────┘ k
//
// A block reads its places twice: first it adds up what is there, in float64 and always in the same order, then it
// changes it. The operations and their order are those of the CPU (statistics/standardized.py), so that whole
// numbers give the same bits. A place where p or 1 − p is less than `least` is left out: its elements become 0.
//
// shares: p of each place; NaN where all elements are missing, and far above 1 where an element is no number from 0
// to 2, which leaves the place out. lacking: the number of missing elements at places
// that are not left out is added to it. M, which may be null: a panel like X, 1 where such an element is missing,
// else 0.
//
// Macros: REAL, type of X; ALONG_K. Launch: one block for each place, or each 32 of them.

using Real = REAL;

constexpr int LANES = 32, WARPS = ALONG_K ? 32 : 8, THREADS = LANES * WARPS;
constexpr int PLACES = ALONG_K ? LANES : 1;   // of a block
constexpr int STEP = THREADS / PLACES;        // elements of a place that are read at once
constexpr int NUMBER = 1, IS_NAN = 2;         // what is missing: elements equal to a number; NaN
constexpr double MARGIN = 1.0 / 1024;         // by which elements may be less than 0, or more than 2
constexpr double OUTSIDE = 1e300;             // what any other one adds to the sum

struct Found {
    double sum;
    int count;
};

struct Factors {
    Real high, low, by;
    bool counts;  // the place is not left out
};

__device__ __forceinline__ bool is_missing(Real x, int gone, Real missing) {
    return (gone == NUMBER && x == missing) || (gone == IS_NAN && x != x);
}

extern "C" __global__ void __launch_bounds__(THREADS)
standardize(int k, int m, Real* __restrict__ X, long long ldx, int gone, Real missing, double least, int scaled,
            double* __restrict__ shares, signed char* __restrict__ M, long long ldm, unsigned long long* lacking) {
    __shared__ Found parts[STEP][PLACES];
    __shared__ Factors found[PLACES];
    const int number = ALONG_K ? threadIdx.x % LANES : 0;               // of the place in its block
    const int first = ALONG_K ? threadIdx.x / LANES : threadIdx.x;     // of its elements
    const long long place = static_cast<long long>(blockIdx.x) * PLACES + number;
    const long long along = ALONG_K ? ldx : 1, mark = ALONG_K ? ldm : 1;
    Real* const x = X + (ALONG_K ? place : place * ldx);

    Found mine = {0, 0};
    if (place < k) {
#pragma unroll 4
        for (int i = first; i < m; i += STEP) {
            const Real value = x[i * along];
            if (!is_missing(value, gone, missing)) {
                mine.sum += value >= -MARGIN && value <= 2 + MARGIN ? double(value) : OUTSIDE;  // also for NaN
                ++mine.count;
            }
        }
    }
    parts[first][number] = mine;
    __syncthreads();
    for (int half = STEP / 2; half > 0; half /= 2) {
        if (first < half) {
            parts[first][number].sum += parts[first + half][number].sum;
            parts[first][number].count += parts[first + half][number].count;
        }
        __syncthreads();
    }
    if (first == 0 && place < k) {
        const Found all = parts[0][number];
        const double p = all.sum / (2.0 * all.count), other = 1.0 - p;
        const bool counts = !((p < other ? p : other) < least);  // also where p is NaN
        const double mean = counts && p == p ? 2.0 * p : 0.0, variance = mean * (1.0 - mean / 2.0);
        const Real high = static_cast<Real>(mean);
        const double by = counts && variance > 0 ? (scaled ? 1.0 / sqrt(variance) : 1.0) : 0.0;
        found[number] = {high, static_cast<Real>(mean - high), static_cast<Real>(by), counts};
        shares[place] = p;
        if (counts && all.count < m) atomicAdd(lacking, static_cast<unsigned long long>(m - all.count));
    }
    __syncthreads();

    if (place >= k) return;
    const Factors f = found[number];
    signed char* const marks = M ? M + (ALONG_K ? place : place * ldm) : nullptr;
#pragma unroll 4
    for (int i = first; i < m; i += STEP) {
        const Real value = x[i * along];
        const bool lacks = is_missing(value, gone, missing);
        x[i * along] = lacks ? Real(0) : ((value - f.high) - f.low) * f.by;
        if (marks) marks[i * mark] = lacks && f.counts;
    }
}
