// The table through which glue.cpp reaches the kernels of one instruction set.
#pragma once

#include "contributions/params.h"
#include "support/executor.h"
#include "support/exported.h"

namespace ikattn {

struct ContributionKernels {
  // Index 0: compute in float32; 1: in float64.
  void (*factors[2])(const FactorsOfTokens&, const Executor&);
  void (*pair_norms[2])(const PairParams&, const Executor&);
  void (*pair_gradients)(const PairGradientParams&, const Executor&);
  void (*multiply[2])(const ProductParams&, const Executor&);
  void (*value_norms)(const FactorsOfTokens&, const Array& grams, const Executor&);  // in float32
  void (*distances[2])(const DistanceParams&, const Executor&);
};

// Those of instruction sets that were not built (cmake/ikattnKernel.cmake) are defined nowhere.
namespace baseline {
extern IKATTN_EXPORTED const ContributionKernels contribution_kernels;
}
namespace avx2 {
extern IKATTN_EXPORTED const ContributionKernels contribution_kernels;
}
namespace avx512 {
extern IKATTN_EXPORTED const ContributionKernels contribution_kernels;
}

}  // namespace ikattn
