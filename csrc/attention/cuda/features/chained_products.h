// Turns angles, in registers, into their gradients and the left operand of the next product. Angles
// are made again in the backward pass, rather than read.
#pragma once

#include "attention/cuda/features/angle_products.h"
#include "attention/cuda/features/gradients.h"

namespace ikattn::cuda {
namespace {

// Rounds to the nearest TF32, or splits into two.
template <int kSplits>
__device__ __forceinline__ Tf32Block<kSplits> rounded(Block block) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if constexpr (kSplits == 1) block.element[i][c] = tf32_rounded(block.element[i][c]);
    }
  }
  return Tf32Block<kSplits>(block);
}

__device__ __forceinline__ Block finite_of(Block block) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (!is_finite(block.element[i][c])) block.element[i][c] = 0;
    }
  }
  return block;
}

// Adds left[m] right to sums[m][n], where `left` has 16 columns and right's 16 rows begin at row0;
// 16 columns of right in each sums[.][n].
template <int kSplits, int kRows, typename T, typename Clean>
__device__ __forceinline__ void multiply_by_rows(float (&sums)[kRows][4][2][4],
                                                 const Tf32Block<kSplits> (&left)[kRows],
                                                 const Slice<T>& right, int row0,
                                                 const Clean& clean) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const Tf32Block<kSplits> block = rounded<kSplits>(clean(right.transposed_block(row0, 16 * n)));
#pragma unroll
    for (int m = 0; m < kRows; ++m) multiply(sums[m][n], left[m], block);
  }
}

// Turns an angle, in units of `angle_unit`, into its gradient.
__device__ __forceinline__ void to_gradient(float& angle, float units, float grad_sin,
                                            float grad_cos, float angle_unit = 1) {
  float sine, cosine;
  fast_sincos_of_fraction(remainder_in_cycles(angle, angle_unit), &sine, &cosine);
  angle = angle_gradient(units, sine, cosine, grad_sin, grad_cos);
}

}  // namespace
}  // namespace ikattn::cuda
