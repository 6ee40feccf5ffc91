// The two kernels from values and projection to factors.
#pragma once

#include "contributions/cuda/given_pairs.h"
#include "contributions/cuda/kernels.h"

namespace ikattn::cuda {

// As in ContributionKernels.
const char* gram_factors(const TokenGramParams& params, Stream stream);
// From the sums in params.parts to all that is wanted.
const char* gram_roots(const TokenGramParams& params, Stream stream);

}  // namespace ikattn::cuda
