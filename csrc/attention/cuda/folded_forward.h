// What both forward kernels on tensor cores make of the sums of a row.
#pragma once

#include "attention/cuda/warpgroup_tiles.h"

namespace ikattn::cuda {

// The folded form, by warpgroups.
const char* warpgroup_forward(const AttentionParams& params, const DeviceExecutor& executor,
                              const FoldedTokens& tokens);

namespace {

// Of a row; `reference` is log Z where the sum is 1.
__device__ __forceinline__ double log_normalizer_of(float sum, double reference) {
  return sum == 0 ? minus_infinity<double>() : log(static_cast<double>(sum)) + reference;
}
template <typename T, bool kGeneral>
__device__ __forceinline__ double reference_of(const FoldedTokens& tokens, int64_t bk,
                                               float largest) {
  return kGeneral ? static_cast<double>(largest) - log(static_cast<double>(kWeightScale<T>))
                  : static_cast<double>(tokens.largest[bk]) - static_cast<double>(tokens.log_scale);
}
// kept: the rescale of dropout, over the scale of the value.
__device__ __forceinline__ float attended(float weighted, float sum, float kept) {
  return sum == 0 ? 0.0f : sum != sum ? sum : weighted * (kept / sum);
}

}  // namespace
}  // namespace ikattn::cuda
