// Sums and maxima over neighbouring lanes of a warp: kLanes of them, a power of two. All lanes of
// the warp must come, and each has the result.
#pragma once

#include "support/cuda/launch.h"

namespace ikattn::cuda {
namespace {

template <int kLanes = 32, typename T>
__device__ __forceinline__ T sum_of_lanes(T x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// Passes over NaN.
template <int kLanes = 32, typename T>
__device__ __forceinline__ T max_of_lanes(T x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    const T other = __shfl_xor_sync(0xffffffffu, x, step);
    if (other > x || x != x) x = other;
  }
  return x;
}

}  // namespace
}  // namespace ikattn::cuda
