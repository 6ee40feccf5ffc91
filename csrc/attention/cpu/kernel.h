// The table of kernels of one instruction set, which glue.cpp calls.
#pragma once

#include "attention/cpu/route.h"
#include "support/exported.h"

namespace ikattn {

struct AttentionKernels {
  // Kernels that compute in float32 at index 0, in float64 at index 1.
  void (*forward[2])(const AttentionParams&, const Route&, const Executor&);
  void (*backward[2])(const AttentionBackwardParams&, const Route&, const Executor&);
  void (*weights[2])(const WeightsParams&, const Executor&);
  void (*features[2])(const FeaturesParams&, bool backward, const Executor&);
  void (*from_features[2])(const FromFeaturesParams&, const Executor&);
  // Writes the mask of dropout, [B, H, L, S], 1 or 0.
  void (*keep_mask)(const AttentionParams&, uint8_t* keep, const Executor&);
};

IKATTN_DECLARE_KERNELS(AttentionKernels, attention_kernels)
namespace avx512_vnni {
extern IKATTN_EXPORTED const SixteenBitKernels sixteen_bit_kernels;
}
namespace avx512_bf16 {
extern IKATTN_EXPORTED const SixteenBitKernels sixteen_bit_kernels;
}
namespace amx {
extern IKATTN_EXPORTED const SixteenBitKernels sixteen_bit_kernels;
}

}  // namespace ikattn
