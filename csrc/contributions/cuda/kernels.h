// The entry points of maps on CUDA: what glue.cpp calls, with the parameters that the CPU kernels
// take.
#pragma once

#include "contributions/params.h"
#include "support/cuda/launch.h"

namespace ikattn::cuda {

// Each queues its work and returns nullptr, or why it could not. Index 0: compute in float32; 1: in
// float64.
struct ContributionKernels {
  // scratch: as large as params.vectors, but for roots of Gram matrices
  const char* (*factors[2])(const FactorsOfVectors&, void* scratch, Stream);
  // scratch: pair_norm_scratch() bytes
  const char* (*pair_norms[2])(const PairParams&, void* scratch, Stream);
  // scratch: pair_gradient_scratch() elements
  const char* (*pair_gradients)(const PairGradientParams&, double* scratch, Stream);
};

extern const ContributionKernels contribution_kernels;

// Whether factors come of Gram matrices: in float32, of so many heads as have room beside others.
inline bool takes_gram_matrices(const FactorParams& params, bool in_float64) {
  return !in_float64 && params.H <= 64;
}

int64_t pair_norm_scratch(const PairParams& params, bool in_float64);
int64_t pair_gradient_scratch(const PairGradientParams& params);

}  // namespace ikattn::cuda
