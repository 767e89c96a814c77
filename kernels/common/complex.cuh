// A complex number of float32, as it lies in memory.

struct alignas(8) Complex {
    float re, im;
};
