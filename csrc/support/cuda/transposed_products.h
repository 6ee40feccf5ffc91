// wgmma whose operands both lie [inner][row or column] in shared memory: one form more than those
// of warpgroups.h, in a header of its own because few kernels need it.
#pragma once

#include "support/cuda/warpgroups.h"

namespace ikattn {

// Begins d (+)= a^T b: a [16][64] and b [16][64] lie [inner][row] and [inner][column]. The next 16
// of the inner axis are 2048 bytes on.
template <typename T>
__device__ __forceinline__ void wgmma_transposed(float (&d)[32], uint64_t a, uint64_t b,
                                                 bool accumulate) {
#if defined(IKATTN_INTERPRETER)
  interpreter::begin_transposed_product<T>(d, a, b, accumulate);
#elif IKATTN_WARPGROUP_CODE
#define IKATTN_TRANSPOSED(type)                                                                    \
  asm volatile(                                                                                    \
      "{.reg .pred p; setp.ne.b32 p, %34, 0;"                                                      \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                  \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "    \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 1, "   \
      "1;}"                                                                                        \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),        \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),    \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])                                         \
      : "l"(a), "l"(b), "r"(int{accumulate}))
  if constexpr (std::is_same_v<T, BFloat16>) {
    IKATTN_TRANSPOSED("bf16");
  } else {
    IKATTN_TRANSPOSED("f16");
  }
#undef IKATTN_TRANSPOSED
#else
  (void)d, (void)a, (void)b, (void)accumulate;
#endif
}

}  // namespace ikattn
