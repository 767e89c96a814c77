// C ← α·A·B + β·C with a block of registers a thread.
//
// A thread computes TM×TN neighbouring elements. For each k it loads TM numbers of a_tile and TN of b_tile
// into registers and multiplies every one with every other: TM·TN products for TM + TN loads. 8×8 is 4
// products a load; `microtile` has less than one.
//
//                            b_tile  BK×BN
//                           ┌─────────────┐
//                           │      ▪▪▪    │ kk       TN numbers
//                           └─────────────┘
//                a_tile     ┌─────────────┐
//                BM×BK ┌──┐ │             │
//                TM    │▪ │ │      ███    │          the outer product of the two, summed in TM×TN
//                      │▪ │ │      ███    │          registers
//                      │▪ │ │      ███    │
//                      └──┘ └─────────────┘
//                       kk     C  BM×BN
//
// Matrices are row-major with leading dimensions (elements from one row to the next). Any m, n, k ≥ 0:
// elements beyond an edge count as 0 and are neither read nor written.
//
// Macros, set by ooc_gemm/catalog.py: ELEMENT, the type of the elements and of the sums; BM, BN, BK, TM, TN.

using T = ELEMENT;

constexpr int THREADS_N = BN / TN;
constexpr int THREADS = BM / TM * THREADS_N;

static_assert(BM % TM == 0 && BN % TN == 0, "threads must tile the thread block's tile exactly");
static_assert(THREADS % 32 == 0, "a partly filled warp wastes its lanes in every instruction");
static_assert(BM * BK % THREADS == 0 && BK * BN % THREADS == 0, "every thread loads equally many elements");
static_assert((BM + BN) * BK * sizeof(T) <= 48 * 1024, "static shared memory ends at 48 KiB");

// The grid is one-dimensional, ⌈m/BM⌉·⌈n/BN⌉ blocks of THREADS threads.
extern "C" __global__ void __launch_bounds__(THREADS)
register_block(long long m, long long n, long long k, T alpha, const T* __restrict__ A, long long lda,
               const T* __restrict__ B, long long ldb, T beta, T* __restrict__ C, long long ldc) {
