// A key's triangular factor as right operands of products, in Half over a power of two: what every
// kernel that writes them shares.
#pragma once

#include "contributions/cuda/streamed/streamed.h"
#include "support/cuda/intrinsics.h"

namespace ikattn::cuda {
namespace {

// Scale of a key's factor, which makes its largest entry one below 2^15. Where one is not finite,
// ones in their place tell whether the key is weighed, and the unit what then is.
struct FactorScale {
  bool is_finite;
  double to_half;
  float unit;

  // Takes the largest entry without its sign, NaN if one is
  __device__ __forceinline__ explicit FactorScale(float largest) {
    is_finite = largest - largest == 0;
    const int exponent = is_finite && largest > 0 ? ilogbf(largest) : 0;
    to_half = ldexp(1.0, 14 - exponent);
    unit = is_finite ? ldexpf(1.0f, exponent - 14) : largest;
  }
};

// Returns two numbers that a lane's register `index` of tile (n, k) holds, the second in y: 8 rows
// and 16 heads of the factor, or, reversed, 8 heads and 16 rows.
//   factor(entry)  float, of the matrix row by row
template <typename Factor>
__device__ __forceinline__ uint2 fragment_register(const FactorScale& scale, int H,
                                                   bool is_reversed, int n, int k, int lane,
                                                   int index, const Factor& factor) {
  const int outer = 8 * n + lane / 4, inner = 16 * k + lane % 4 * 2 + index * 8;
  float x[2] = {};
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int row = is_reversed ? inner + c : outer, head = is_reversed ? outer : inner + c;
    if (row > head || head >= H) continue;
    const double entry = static_cast<double>(factor(factor_entry(H, row, head)));
    x[c] = scale.is_finite ? static_cast<float>(entry * scale.to_half) : 1.0f;
  }
  const uint32_t leading = pack_f16x2(x[0], x[1]);
  const float2 two = unpack<Half>(leading);
  return make_uint2(leading, pack_f16x2(x[0] - two.x, x[1] - two.y));
}

}  // namespace
}  // namespace ikattn::cuda
