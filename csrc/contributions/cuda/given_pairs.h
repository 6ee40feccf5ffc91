// Norms of pairs whose weights are given, on tensor cores.
#pragma once

#include "contributions/cuda/streamed/streamed.h"

namespace ikattn::cuda {

// Beyond them CUDA cores take the call, whose factors come of no Gram matrix either.
constexpr int64_t kMostGivenHeads = 64;

// The factors of all variants, one after the other, as factor_fragments() makes them of two parts.
struct GivenFactors {
  const uint32_t* fragments = nullptr;  // [variants, B, S, 2, tiles, 32, 2]
  const float* units = nullptr;         // [variants, B, S]
  int64_t variant_words = 0;
};

bool takes_given_pairs(const PairParams& params, bool in_float64);
// scratch: as in ContributionKernels
const char* given_pair_norms(const PairParams& params, void* scratch, Stream stream);

}  // namespace ikattn::cuda
