// The table of kernels of one instruction set, which glue.cpp calls.
#pragma once

#include "contributions/params.h"
#include "support/executor.h"

namespace ikattn {

struct ContributionKernels {
  // Kernels that compute in float32 at index 0, in float64 at index 1.
  void (*factors[2])(const FactorsOfTokens&, const Executor&);
  void (*pair_norms[2])(const PairParams&, const Executor&);
  void (*streamed_norms[2])(const StreamedPairParams&, const Executor&);
  void (*pair_gradients)(const PairGradientParams&, const Executor&);
  void (*multiply[2])(const ProductParams&, const Executor&);
  void (*value_norms)(const FactorsOfTokens&, const Array& grams, const Executor&);  // in float32
  void (*distances[2])(const DistanceParams&, const Executor&);
};

IKATTN_DECLARE_KERNELS(ContributionKernels, contribution_kernels)

}  // namespace ikattn
