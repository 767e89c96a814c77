// C ← α·(X₀ + X₁ + …) + β·C: the slices of a product whose k was cut (wgmma.cu), always in the same order.
//
// X is `slices` dense m×n matrices, one after the other. Macros: ELEMENT, the type of α, β and C; PART, that of X,
// which may be narrower: then sums that fit PART each are added up in ELEMENT; SUM: ELEMENT, or for int64 the unsigned
// type, in which sums wrap around. Launch: a thread an element.

using T = ELEMENT;

extern "C" __global__ void __launch_bounds__(256)
sum(long long m, int n, int slices, T alpha, const PART* __restrict__ X, T beta, T* __restrict__ C, long long ldc,
    const unsigned* __restrict__ skip) {
    const long long i = blockIdx.x * 256LL + threadIdx.x, all = m * n;
    if (i >= all || (skip != nullptr && *skip != 0)) return;
    SUM total = X[i];
    for (int slice = 1; slice < slices; ++slice) total += X[slice * all + i];
    total *= static_cast<SUM>(alpha);
    // In 32 bits, which divide several times faster: where k is cut, C is no larger than what all run at once, and
    // of wider sums there is a tile at a time.
    const unsigned at = static_cast<unsigned>(i), row = at / n;
    T* const c = C + row * ldc + (at - row * n);
    // β = 0 must not read C.
    *c = static_cast<T>(beta == T(0) ? total : total + static_cast<SUM>(beta) * static_cast<SUM>(*c));
}
