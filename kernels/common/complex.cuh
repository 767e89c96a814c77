// A complex number of the type REAL, as it lies in memory.

struct alignas(2 * sizeof(REAL)) Complex {
    REAL re, im;
};
