// Residues of least magnitude of integers, each in a byte. They need common/types.cuh, and the macro MODULI, which
// ooc_gemm/cuda_kernels/moduli.py sets.

struct Modulus {
    int p;        // 128 < p ≤ 256
    int inverse;  // 2^38/p, rounded
    u32 low, high;  // the residues of 256^0 … 256^3 and of 256^4 … 256^7, a byte each

    // The residue of x in [−p/2, p/2), for |x| ≤ 2^30. x·inverse is within 2^29 of 2^38·(x/p), so its quotient by
    // 2^38 is within 1/512 of x/p, which is at least 1/510 away from half an integer where p is odd. Where p is 256,
    // it is exact.
    __device__ __forceinline__ int residue(int x) const {
        const int quotient = static_cast<int>((static_cast<i64>(x) * inverse + (1LL << 37)) >> 38);
        return x - quotient * p;
    }
};

__device__ __forceinline__ Modulus modulus(int number) {
    static constexpr Modulus all[] = {MODULI};
    return all[number];
}
