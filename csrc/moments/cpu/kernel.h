// The table through which glue.cpp reaches the kernels of one instruction set.
#pragma once

#include "moments/params.h"
#include "support/executor.h"
#include "support/exported.h"

namespace ikattn {

struct MomentsKernels {
  // Index 0: compute in float32; 1: in float64.
  void (*key_moments[2])(const KeyMomentsParams&, const Executor&);
  void (*key_moments_backward[2])(const KeyMomentsParams&, const Executor&);
  void (*from_moments[2])(const FromMomentsParams&, const Executor&);
  void (*from_moments_backward[2])(const FromMomentsParams&, const Executor&);
  void (*causal[2])(const CausalParams&, const Executor&);
  void (*causal_backward[2])(const CausalParams&, const Executor&);
};

// Those of instruction sets that were not built (cmake/ikattnKernel.cmake) are defined nowhere.
namespace baseline {
extern IKATTN_EXPORTED const MomentsKernels moments_kernels;
}
namespace avx2 {
extern IKATTN_EXPORTED const MomentsKernels moments_kernels;
}
namespace avx512 {
extern IKATTN_EXPORTED const MomentsKernels moments_kernels;
}

}  // namespace ikattn
