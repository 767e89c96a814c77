// Elements of the tensor cores' instructions, by the macros TYPE (1 float16, 2 tf32, 3 int8), A_UNSIGNED and B_UNSIGNED
// (of int8), and PRODUCTS (3: float32 in two planes of float16, see planes.cuh).

constexpr int FLOAT16 = 1, TF32 = 2, INT8 = 3;

// S: type of sums, α, β and C. SUM_REGISTER: its registers in assembly, read and written.
#if TYPE == 3
using S = int;
#define SUM_REGISTER "+r"
#else
using S = float;
#define SUM_REGISTER "+f"
#endif

constexpr int ELEMENT_BYTES = TYPE == FLOAT16 ? 2 : TYPE == TF32 ? 4 : 1;
constexpr int K_STEP = 32 / ELEMENT_BYTES;  // k of one instruction
constexpr int PLANES = PRODUCTS == 3 ? 2 : 1;

static_assert(PRODUCTS == 1 || (TYPE == FLOAT16 && PRODUCTS == 3), "only float32 comes in two planes");

// Names of 8-bit types in instructions.
#if A_UNSIGNED
#define A_INT8 "u8"
#else
#define A_INT8 "s8"
#endif
#if B_UNSIGNED
#define B_INT8 "u8"
#else
#define B_INT8 "s8"
#endif
