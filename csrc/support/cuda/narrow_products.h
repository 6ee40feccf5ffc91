// wgmma of few columns: forms beside those of warpgroups.h, in a header of their own because few
// kernels need them.
#pragma once

#include "support/cuda/warpgroups.h"

namespace ikattn {

// Begins d (+)= a b of 16 or 32 columns: a is [64][16], b [16][2 kCount] lies [column][inner].
template <typename T, int kCount>
__device__ __forceinline__ void wgmma_narrow(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b,
                                             bool accumulate) {
  static_assert(kCount == 8 || kCount == 16);
#if defined(IKATTN_INTERPRETER)
  interpreter::begin_product({d, kCount, a, 0, b, accumulate, false, interpreter::kProductType<T>},
                             interpreter::Place::current());
#elif IKATTN_WARPGROUP_CODE
#define IKATTN_SUMS_8(i)                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define IKATTN_NARROW_16(type)                                                   \
  asm volatile(                                                                  \
      "{.reg .pred p; setp.ne.b32 p, %13, 0;"                                    \
      "wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type                \
      " {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;}" \
      : IKATTN_SUMS_8(0)                                                         \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}))
#define IKATTN_NARROW_32(type)                                                    \
  asm volatile(                                                                   \
      "{.reg .pred p; setp.ne.b32 p, %21, 0;"                                     \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type                 \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, " \
      "{%16, %17, %18, %19}, %20, p, 1, 1, 0;}"                                   \
      : IKATTN_SUMS_8(0), IKATTN_SUMS_8(8)                                        \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}))
  if constexpr (kCount == 8 && std::is_same_v<T, BFloat16>) {
    IKATTN_NARROW_16("bf16");
  } else if constexpr (kCount == 8) {
    IKATTN_NARROW_16("f16");
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    IKATTN_NARROW_32("bf16");
  } else {
    IKATTN_NARROW_32("f16");
  }
#undef IKATTN_NARROW_32
#undef IKATTN_NARROW_16
#undef IKATTN_SUMS_8
#else
  (void)d, (void)a, (void)b, (void)accumulate;
#endif
}

}  // namespace ikattn
