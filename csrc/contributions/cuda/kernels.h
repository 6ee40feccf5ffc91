// The CUDA kernels' doors: what glue.cpp calls, with the parameters the CPU kernels take.
#pragma once

#include "contributions/params.h"
#include "support/cuda/launch.h"

namespace ikattn::cuda {

// Each queues its work and returns nullptr, or why it could not. Index 0: compute in float32; 1: in
// float64.
struct ContributionKernels {
  // scratch: as large as params.vectors
  const char* (*factors[2])(const FactorsOfVectors&, void* scratch, Stream);
  const char* (*pair_norms[2])(const PairParams&, Stream);
  // scratch: pair_gradient_scratch() elements
  const char* (*pair_gradients)(const PairGradientParams&, double* scratch, Stream);
};

extern const ContributionKernels contribution_kernels;

int64_t pair_gradient_scratch(const PairGradientParams& params);

}  // namespace ikattn::cuda
