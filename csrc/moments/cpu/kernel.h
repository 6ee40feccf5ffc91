// The table of kernels of one instruction set, which glue.cpp calls.
#pragma once

#include "moments/params.h"
#include "support/executor.h"

namespace ikattn {

struct MomentsKernels {
  // Kernels that compute in float32 at index 0, in float64 at index 1.
  void (*key_moments[2])(const KeyMomentsParams&, const Executor&);
  void (*key_moments_backward[2])(const KeyMomentsParams&, const Executor&);
  void (*from_moments[2])(const FromMomentsParams&, const Executor&);
  void (*from_moments_backward[2])(const FromMomentsParams&, const Executor&);
  void (*causal[2])(const CausalParams&, const Executor&);
  void (*causal_backward[2])(const CausalParams&, const Executor&);
};

IKATTN_DECLARE_KERNELS(MomentsKernels, moments_kernels)

}  // namespace ikattn
