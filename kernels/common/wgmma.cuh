// The tensor cores' instructions of a warpgroup, four warps side by side (sm_90a). They need common/types.cuh and
// common/element_types.cuh, and the macros BN, BK, A_MN and B_MN: whether an operand lies along m or n, and not along k.

constexpr int K_ROW = BK * ELEMENT_BYTES;  // bytes of a row of a K-major tile
constexpr int ACC = BN / 2;  // sums a consumer thread holds: 64·BN / 128

static_assert(TYPE == FLOAT16 || (!A_MN && !B_MN), "only 16-bit operands may be MN-major");
static_assert(K_ROW == 128 || K_ROW == 64, "a row of a K-major tile is one span of the swizzle");
static_assert((!B_MN || BN % 64 == 0), "instructions have 64 rows, MN-major boxes 64 columns");
static_assert(BN == 64 || BN == 128 || BN == 192 || BN == 256, "the instructions written out below");

// Accumulators belong to the tensor cores between `begin` and `finish`.
__device__ __forceinline__ void begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void finish() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Where a tile lies in shared memory, as the tensor cores are told: address, the distance between blocks of
// 64 along m or n (MN-major) and between groups of eight rows, in units of 16 bytes; and the swizzle.
template <bool mn>
__device__ __forceinline__ u64 descriptor(u32 address) {
    constexpr u64 row = mn ? 128 : K_ROW;
    constexpr u64 swizzle = row == 128 ? 1 : 2;
    constexpr u64 leading = mn ? BK * 128 : 16;
    return (swizzle << 62) | ((8 * row >> 4) << 32) | ((leading >> 4) << 16) | ((address & 0x3ffff) >> 4);
}

// Bytes from one instruction's k to the next within a stage.
template <bool mn>
constexpr int k_stride = mn ? K_STEP * 128 : 32;

// The instruction names all of a thread's sums: they are listed 32 at a time.
// clang-format off
#define NAMES_0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_1 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NAMES_2 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define NAMES_3 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define SUM(i) SUM_REGISTER(d[i])
#define SUMS_4(i) SUM(i), SUM(i + 1), SUM(i + 2), SUM(i + 3)
#define SUMS_32(i) SUMS_4(i), SUMS_4(i + 4), SUMS_4(i + 8), SUMS_4(i + 12), SUMS_4(i + 16), SUMS_4(i + 20), SUMS_4(i + 24), SUMS_4(i + 28)
// clang-format on
#if BN == 64
#define SHAPE "m64n64"
#define SUMS SUMS_32(0)
#define NAMES NAMES_0
#define A_B_P "%32, %33, p"
#define KEEP "%34"
#elif BN == 128
#define SHAPE "m64n128"
#define SUMS SUMS_32(0), SUMS_32(32)
#define NAMES NAMES_0 NAMES_1
#define A_B_P "%64, %65, p"
#define KEEP "%66"
#elif BN == 192
#define SHAPE "m64n192"
#define SUMS SUMS_32(0), SUMS_32(32), SUMS_32(64)
#define NAMES NAMES_0 NAMES_1 NAMES_2
#define A_B_P "%96, %97, p"
#define KEEP "%98"
#else
#define SHAPE "m64n256"
#define SUMS SUMS_32(0), SUMS_32(32), SUMS_32(64), SUMS_32(96)
#define NAMES NAMES_0 NAMES_1 NAMES_2 NAMES_3
#define A_B_P "%128, %129, p"
#define KEEP "%130"
#endif
#define DIGIT(x) #x
#define TEXT(x) DIGIT(x)
#if TYPE == 1
#define KIND "k16.f32.f16.f16"
#define SIGNS ", 1, 1, " TEXT(A_MN) ", " TEXT(B_MN)
#elif TYPE == 2
#define KIND "k8.f32.tf32.tf32"
#define SIGNS ", 1, 1"
#else
#define KIND "k32.s32." A_INT8 "." B_INT8
#define SIGNS ""
#endif

// d ← (keep ? d : 0) + a·b for one K_STEP, under way until `finish`.
__device__ __forceinline__ void multiply(S (&d)[ACC], u64 a, u64 b, int keep) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " KEEP
                 ", 0;\n"
                 "wgmma.mma_async.sync.aligned." SHAPE KIND " {" NAMES "}, " A_B_P SIGNS ";\n}"
                 : SUMS
                 : "l"(a), "l"(b), "r"(keep));
}

// The compiler must not read sums earlier than this.
__device__ __forceinline__ void settle(S (&d)[ACC]) {
#pragma unroll
    for (int i = 0; i < ACC; ++i) asm volatile("" : SUM(i)::"memory");
}

struct alignas(4 * sizeof(S)) Four {
    S x[4];
};
