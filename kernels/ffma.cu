// C ← α·op(A)·op(B) + β·C on ordinary arithmetic units, as fast as they go.
using T = ELEMENT;

constexpr int V = 16 / sizeof(T);
constexpr int LANES_M = WM / TM, LANES_N = WN / TN;
constexpr int WARPS_M = BM / WM, WARPS_N = BN / WN;
constexpr int THREADS = 32 * WARPS_M * WARPS_N * SLICES;
constexpr int DEPTH = BK / SLICES;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
constexpr bool ASYNC = true;
constexpr int SLOTS = STAGES;
#else
constexpr bool ASYNC = false;
constexpr int SLOTS = 2;
#endif

struct alignas(16) Vec {
    T v[V];
};

constexpr int A_ROW = BM / V + 1, B_ROW = BN / V + 1;  // vectors
constexpr int SLOT = BK * (A_ROW + B_ROW);

static_assert(LANES_M * LANES_N == 32 && LANES_M % 2 == 0 && LANES_N % 2 == 0, "");
static_assert(BM % WM == 0 && BN % WN == 0 && TM % V == 0 && TN % V == 0 && DEPTH % 2 == 0, "");

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
using Address = unsigned;
__device__ __forceinline__ Address address_of(Vec* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
#else
using Address = char*;
__device__ __forceinline__ Address address_of(Vec* p) { return reinterpret_cast<char*>(p); }
#endif
template <typename Piece>
__device__ __forceinline__ void copy(Address to, const T* from, bool wanted) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    if (sizeof(Piece) == 16)
        asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}"
        :: "r"(to), "l"(from), "r"(int(wanted)));
    else
        asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.ca.shared.global [%0], [%1], %3;}"
        :: "r"(to), "l"(from), "r"(int(wanted)), "n"(sizeof(Piece)));
#else
    if (wanted) *reinterpret_cast<Piece*>(to) = *reinterpret_cast<const Piece*>(from);
#endif
}
template <typename Piece>
__device__ __forceinline__ void copy_or_zero(Address to, const T* from, bool exists) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    const int bytes = exists ? sizeof(Piece) : 0;
    if (sizeof(Piece) == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(bytes));
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" :: "r"(to), "l"(from), "r"(bytes), "n"(sizeof(Piece)));
#else
    *reinterpret_cast<Piece*>(to) = exists ? *reinterpret_cast<const Piece*>(from) : Piece{};
#endif
}
__device__ __forceinline__ void commit() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
__device__ __forceinline__ void await() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
#endif
}

template <bool VECTOR>
struct PieceOf {
    using type = T;
};
template <>
struct PieceOf<true> {
    using type = Vec;
};

template <int EXTENT, bool K_INNER, bool FAST>
struct Carrier {
    static constexpr bool VECTOR = FAST && !K_INNER;
    using Piece = typename PieceOf<VECTOR>::type;
    static constexpr int W = VECTOR ? V : 1;
    static constexpr int UNITS = K_INNER ? 8 : EXTENT / W;   // along contiguous axis, of threads
    static constexpr int ACROSS = UNITS < THREADS ? UNITS : THREADS;
    static constexpr int DOWN = THREADS / ACROSS;
    // repetitions along x and k
    static constexpr int REP_X = K_INNER ? EXTENT / DOWN : UNITS / ACROSS;
    static constexpr int REP_K = K_INNER ? BK / 8 : BK / DOWN;
    static constexpr int COUNT = REP_X * REP_K;
    static_assert(THREADS % ACROSS == 0 && UNITS % ACROSS == 0, "");
    static_assert(K_INNER ? EXTENT % DOWN == 0 && BK % 8 == 0 : BK % DOWN == 0, "");
    static constexpr int ROW = EXTENT / V + 1;

    const T* next;
    long long ld;
    int extent;

    static __device__ __forceinline__ int x0() { return K_INNER ? threadIdx.x / ACROSS : threadIdx.x % ACROSS * W; }
    static __device__ __forceinline__ int k0() { return K_INNER ? threadIdx.x % ACROSS : threadIdx.x / ACROSS; }
    static __device__ __forceinline__ constexpr int dx(int e) { return e % REP_X * (K_INNER ? DOWN : ACROSS * W); }
    static __device__ __forceinline__ constexpr int dk(int e) { return e / REP_X * (K_INNER ? 8 : DOWN); }

    __device__ __forceinline__ Carrier(const T* matrix, long long ld, long long first, int extent)
        : next(matrix + (K_INNER ? (first + x0()) * ld + k0() : first + x0() + k0() * ld)), ld(ld), extent(extent) {}

    __device__ __forceinline__ const T* from(int e) const {
        return next + (K_INNER ? dx(e) * ld + dk(e) : dk(e) * ld + dx(e));
    }
    static __device__ __forceinline__ int offset() { return k0() * ROW * 16 + x0() * int(sizeof(T)); }
    static __device__ __forceinline__ constexpr int step(int e) { return dk(e) * ROW * 16 + dx(e) * int(sizeof(T)); }
    __device__ __forceinline__ void first(Vec* tile, int depth) {
        const Address start = address_of(tile) + offset();
#pragma unroll
        for (int e = 0; e < COUNT; ++e)
            if (FAST || x0() + dx(e) < extent) copy_or_zero<Piece>(start + step(e), from(e), k0() + dk(e) < depth);
        next += K_INNER ? depth : depth * ld;
    }
    // part of parts
    __device__ __forceinline__ void fetch(Vec* tile, bool wanted, int part, int parts) {
        const Address start = address_of(tile) + offset();
#pragma unroll
        for (int e = 0; e < COUNT; ++e)
            if (e * parts / COUNT == part) copy<Piece>(start + step(e), from(e), wanted && (FAST || x0() + dx(e) < extent));
        if (part == parts - 1) next += K_INNER ? BK : BK * ld;
    }
};

template <bool FAST>
__device__ __forceinline__ void work(Vec* memory, long long m, long long n, long long k, T alpha, const T* A, long long lda,
     const T* B, long long ldb, T beta, T* C, long long ldc, long long m0, long long n0) {
    const int rows = m - m0 < BM ? m - m0 : BM, cols = n - n0 < BN ? n - n0 : BN;
    Carrier<BM, !TRANS_A, FAST> a_carrier(A, lda, m0, rows);
    Carrier<BN, TRANS_B, FAST> b_carrier(B, ldb, n0, cols);
    if (alpha == T(0)) k = 0;
    const int steps = (k + BK - 1) / BK;

    const int warp = threadIdx.x / 32 % (WARPS_M * WARPS_N), lane = threadIdx.x % 32, slice = threadIdx.x / (THREADS / SLICES);
#if LANES == 0
    const int lane_m = lane / LANES_N, lane_n = lane % LANES_N;
#else
    const int lane_m = lane / 2 % 2 + lane / (2 * LANES_N) * 2, lane_n = lane % 2 + lane / 4 % (LANES_N / 2) * 2;
#endif
    const int thread_m = warp / WARPS_N * WM + lane_m * V, thread_n = warp % WARPS_N * WN + lane_n * V;

    T sum[TM][TN] = {};
    if (steps > 0) {
        const int depth = k - (steps - 1LL) * BK;
        a_carrier.first(memory, depth);
        b_carrier.first(memory + BK * A_ROW, depth);
        commit();
#pragma unroll
        for (int s = 1; s < SLOTS - 1; ++s) {
            a_carrier.fetch(memory + s * SLOT, s < steps, 0, 1);
            b_carrier.fetch(memory + s * SLOT + BK * A_ROW, s < steps, 0, 1);
            commit();
        }
        await();
        __syncthreads();
        Vec a[2][TM / V], b[2][TN / V];
        const Vec* a_base = memory + slice * DEPTH * A_ROW + thread_m / V;
        const Vec* b_base = memory + BK * A_ROW + slice * DEPTH * B_ROW + thread_n / V;
        const auto read = [&](int into, const Vec* a_tile, const Vec* b_tile, int kk) {
#pragma unroll
            for (int i = 0; i < TM / V; ++i) a[into][i] = a_tile[kk * A_ROW + i * LANES_M];
#pragma unroll
            for (int j = 0; j < TN / V; ++j) b[into][j] = b_tile[kk * B_ROW + j * LANES_N];
        };
        const Vec *a_tile = a_base, *b_tile = b_base;
        read(0, a_tile, b_tile, 0);
        int slot_read = 0, slot_write = SLOTS - 1;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            const bool more = step + SLOTS - 1 < steps;
#pragma unroll
            for (int kk = 0; kk < DEPTH; ++kk) {
                if (kk == DEPTH - 1) {
                    await();
                    __syncthreads();
                    slot_read = slot_read == SLOTS - 1 ? 0 : slot_read + 1;
                    a_tile = a_base + slot_read * SLOT;
                    b_tile = b_base + slot_read * SLOT;
                }
                read((kk + 1) % 2, a_tile, b_tile, (kk + 1) % DEPTH);
#if SPREAD
                if (kk < DEPTH - 1) {
                    a_carrier.fetch(memory + slot_write * SLOT, more, kk, DEPTH - 1);
                    b_carrier.fetch(memory + slot_write * SLOT + BK * A_ROW, more, kk, DEPTH - 1);
                }
#else
                if (kk == 0) {
                    a_carrier.fetch(memory + slot_write * SLOT, more, 0, 1);
                    b_carrier.fetch(memory + slot_write * SLOT + BK * A_ROW, more, 0, 1);
                }
#endif
                if (kk == (SPREAD ? DEPTH - 2 : 0)) commit();
#pragma unroll
                for (int i = 0; i < TM; ++i)
#pragma unroll
                    for (int jj = 0; jj < TN; ++jj) {
                        const int j = SERPENT && i % 2 ? TN - 1 - jj : jj;
                        sum[i][j] += a[kk % 2][i / V].v[i % V] * b[kk % 2][j / V].v[j % V];
                    }
            }
            slot_write = slot_write == SLOTS - 1 ? 0 : slot_write + 1;
        }
    }

    if (SLICES > 1) {
        // partial sums
        T* partial = reinterpret_cast<T*>(memory);
        constexpr int GROUP_THREADS = THREADS / SLICES;
        const int t = threadIdx.x % GROUP_THREADS;
        for (int s = 1; s < SLICES; ++s) {
            __syncthreads();
            if (slice == s)
#pragma unroll
                for (int i = 0; i < TM; ++i)
#pragma unroll
                    for (int j = 0; j < TN; ++j) partial[(i * TN + j) * GROUP_THREADS + t] = sum[i][j];
            __syncthreads();
            if (slice == 0)
#pragma unroll
                for (int i = 0; i < TM; ++i)
#pragma unroll
                    for (int j = 0; j < TN; ++j) sum[i][j] += partial[(i * TN + j) * GROUP_THREADS + t];
        }
        if (slice != 0) return;
    }

    T* const corner = C + (m0 + thread_m) * ldc + n0 + thread_n;
    if (FAST) {
#pragma unroll
        for (int i = 0; i < TM; ++i) {
#pragma unroll
            for (int j = 0; j < TN; j += V) {
                Vec* const at = reinterpret_cast<Vec*>(corner + (i / V * LANES_M * V + i % V) * ldc + j * LANES_N);
                Vec c;
                if (beta == T(0)) {
#pragma unroll
                    for (int e = 0; e < V; ++e) c.v[e] = alpha * sum[i][j + e];
                } else {
                    c = *at;
#pragma unroll
                    for (int e = 0; e < V; ++e) c.v[e] = alpha * sum[i][j + e] + beta * c.v[e];
                }
                *at = c;
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < TM; ++i) {
#pragma unroll
            for (int j = 0; j < TN; ++j) {
                const int down = i / V * LANES_M * V + i % V, right = j / V * LANES_N * V + j % V;
                if (thread_m + down < rows && thread_n + right < cols) {
                    T& c = corner[down * ldc + right];
                    c = beta == T(0) ? alpha * sum[i][j] : alpha * sum[i][j] + beta * c;
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
ffma(long long m, long long n, long long k, T alpha, const T* __restrict__ A, long long lda,
      const T* __restrict__ B, long long ldb, T beta, T* __restrict__ C, long long ldc
#if GUARDED
      , const unsigned* __restrict__ run
#endif
) {
#if GUARDED
    if (*run == 0) return;
#endif
    extern __shared__ Vec memory[];
    const long long tiles_m = (m + BM - 1) / BM, tiles_n = (n + BN - 1) / BN;
    const long long group = blockIdx.x / (GROUP * tiles_n), within = blockIdx.x % (GROUP * tiles_n);
    const long long below = tiles_m - group * GROUP, height = below < GROUP ? below : GROUP;
    const long long m0 = (group * GROUP + within % height) * BM, n0 = within / height * BN;
    const auto aligned = [](const T* p, long long ld) { return (reinterpret_cast<unsigned long long>(p) | ld * sizeof(T)) % 16 == 0; };
    const bool fast = m - m0 >= BM && n - n0 >= BN && (!TRANS_A || aligned(A, lda)) && (TRANS_B || aligned(B, ldb)) && aligned(C, ldc);
    if (fast)
        work<true>(memory, m, n, k, alpha, A, lda, B, ldb, beta, C, ldc, m0, n0);
    else
        work<false>(memory, m, n, k, alpha, A, lda, B, ldb, beta, C, ldc, m0, n0);
}
