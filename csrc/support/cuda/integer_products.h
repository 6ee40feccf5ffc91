// Products of integers of 8 bits by mma.sync, and which GPUs gain by them.
//
// Fragments, by lane: g = lane / 4, t = lane % 4. A register holds four, the first in its low byte.
//   A 16x32          a0 (g, 4t..4t+3)  a1 (g+8, 4t..)  a2 (g, 4t+16..)  a3 (g+8, 4t+16..)
//   B 32x8  (k, n)   b0 (4t..4t+3, g)  b1 (4t+16..4t+19, g)
//   C 16x8, int32    as float32's in intrinsics.h
// So to ldmatrix_x4 they are fragments of 16-bit elements of half as many columns.
#pragma once

#include "support/cuda/intrinsics.h"

#if defined(IKATTN_INTERPRETER)
#include "support/interpreter/integer_products.h"
#else

namespace ikattn {

// d += a b for a 16x32 and a 32x8 tile.
__device__ __forceinline__ void mma_m16n8k32_int8(int32_t (&d)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Whether the current device multiplies these at twice the rate of 16 bits, or more. Of compute
// capability 10 and 11 no rate is published, and 10.3 needs more than one instruction.
inline bool has_integer_products() {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  return major == 8 || major == 9 || major == 12;
}

}  // namespace ikattn

#endif  // IKATTN_INTERPRETER
