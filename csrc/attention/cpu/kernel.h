// The table through which glue.cpp reaches the kernels of one instruction set.
#pragma once

#include "attention/calls/params.h"
#include "support/executor.h"

namespace ikattn {

struct AttentionKernels {
  // Index 0: compute in float32; 1: in float64.
  void (*forward[2])(const AttentionParams&, const Executor&);
  void (*backward[2])(const AttentionBackwardParams&, const Executor&);
  void (*weights[2])(const WeightsParams&, const Executor&);
  void (*features[2])(const FeaturesParams&, bool backward, const Executor&);
  void (*from_features[2])(const FromFeaturesParams&, const Executor&);
};

// For bfloat16 inputs, and float32 that may be rounded to it, in place of index 0.
struct SixteenBitKernels {
  void (*forward)(const AttentionParams&, const Executor&);
  void (*backward)(const AttentionBackwardParams&, const Executor&);
};

// Those of instruction sets that were not built (cmake/ikattnKernel.cmake) are defined nowhere.
namespace baseline {
extern const AttentionKernels attention_kernels;
}
namespace avx2 {
extern const AttentionKernels attention_kernels;
}
namespace avx512 {
extern const AttentionKernels attention_kernels;
}
namespace avx512_vnni {
extern const SixteenBitKernels sixteen_bit_kernels;
}
namespace avx512_bf16 {
extern const SixteenBitKernels sixteen_bit_kernels;
}
namespace amx {
extern const SixteenBitKernels sixteen_bit_kernels;
}

}  // namespace ikattn
