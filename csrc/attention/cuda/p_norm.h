// |x|_p of tokens.
#pragma once

#include "attention/cuda/tiles.h"
#include "support/cuda/warps.h"

namespace ikattn::cuda {
namespace {

// x^p, 0 <= x <= 1. Of numbers of 16 bits in float32: they, and weights that follow, hold less; and
// a power in float64 costs tenfold.
__device__ __forceinline__ double power_of_element(double x, double p, ElementType type) {
  const bool is_half = type == ElementType::kFloat16 || type == ElementType::kBFloat16;
  return is_half ? static_cast<double>(powf(static_cast<float>(x), static_cast<float>(p)))
                 : pow(x, p);
}

// |k|_p of a row of a warp's own. Scaled by the largest element, so that powers neither overflow
// nor vanish; squares of what is at most float32 do neither in float64.
__device__ __forceinline__ double p_norm(const Tokens& key, int64_t j, int64_t d, double p,
                                         int lane) {
  if (p == 2 && key.array->type != ElementType::kFloat64) {
    double squares = 0;
    for (int64_t c = lane; c < d; c += 32) {
      const double x = key.load<double>(j, c);
      squares += x * x;
    }
    return sqrt(sum_of_lanes(squares));
  }
  double largest = 0;
  for (int64_t c = lane; c < d; c += 32) largest = fmax(largest, fabs(key.load<double>(j, c)));
  largest = max_of_lanes(largest);
  double sum = 0;
  for (int64_t c = lane; c < d && largest > 0; c += 32) {
    const double x = fabs(key.load<double>(j, c)) / largest;
    sum += p == 2 ? x * x : p == 1 ? x : power_of_element(x, p, key.array->type);
  }
  sum = sum_of_lanes(sum);
  return largest == 0 ? 0 : largest * (p == 2 ? sqrt(sum) : p == 1 ? sum : pow(sum, 1 / p));
}

}  // namespace
}  // namespace ikattn::cuda
