// The two kernels from values and projection to factors.
#pragma once

#include "contributions/cuda/given_pairs.h"
#include "contributions/cuda/kernels.h"

namespace ikattn::cuda {

// Computes ContributionKernels::gram_factors.
const char* gram_factors(const TokenGramParams& params, Stream stream);
// Computes all wanted results from the sums in params.parts.
const char* gram_roots(const TokenGramParams& params, Stream stream);

}  // namespace ikattn::cuda
