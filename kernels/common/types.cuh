// Short names of integer types.

using i64 = long long;
using u32 = unsigned;
using u64 = unsigned long long;
