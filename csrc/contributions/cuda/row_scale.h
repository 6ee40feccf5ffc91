// Powers of two that scale rows of float32 before they are split into operands of Half.
#pragma once

#include "support/cuda/intrinsics.h"
#include "support/cuda/warps.h"

namespace ikattn::cuda {
namespace {

// Returns the number without its sign as bits, which are ordered as numbers are, NaN's last.
__device__ __forceinline__ uint32_t magnitude_bits(float x) {
  return __float_as_uint(x) & 0x7fffffffu;
}

// Range of a row's elements: the largest magnitude, and the smallest that is not zero, less one, as
// bits.
struct RowRange {
  uint32_t largest = 0, smallest = ~0u;

  __device__ __forceinline__ void add(float x) {
    largest = max(largest, magnitude_bits(x));
    smallest = min(smallest, magnitude_bits(x) - 1);  // zero is the largest of all then
  }
  // Combines the ranges of `kLanes` neighbours.
  template <int kLanes>
  __device__ __forceinline__ void combine() {
    largest = max_of_lanes<kLanes>(largest);
    smallest = ~max_of_lanes<kLanes>(~smallest);
  }
  // Returns whether elements differ by more than kSplits operands of Half have digits for. An
  // element 2^20 times smaller than the largest keeps 19 bits. In one number an element of bfloat16
  // that is 2^28 times smaller keeps all.
  template <int kSplits>
  __device__ __forceinline__ bool is_wide() const {
    constexpr uint32_t kReach = kSplits == 2 ? 20 : 28;
    const bool is_finite = largest < 0x7f800000u;
    return largest != 0 && is_finite && largest >> 23 > ((smallest + 1) >> 23) + kReach;
  }
};

// A power of two that makes the largest of a row one from 2^14 to below 2^15, but for those below
// 2^-112, and its inverse. Both are normal numbers of float32. Of a wide row it is negative.
struct RowScale {
  float scale;

  RowScale() = default;
  __device__ __forceinline__ explicit RowScale(uint32_t largest, bool is_wide = false) {
    const uint32_t exponent = 268u - min(max(largest >> 23, 15u), 254u);
    scale = __uint_as_float(exponent << 23 | (is_wide ? 0x80000000u : 0u));
  }
  __device__ __forceinline__ bool is_wide() const { return scale < 0; }
  __device__ __forceinline__ float inverse() const {
    return __uint_as_float((254u - exponent()) << 23);
  }
  // Returns one of two halves whose product is the inverse; they differ by a factor of two at most.
  // Multiplied by another row's inverse, all numbers between stay within float32 if the product
  // does.
  __device__ __forceinline__ float half_of_inverse(uint32_t half) const {
    return __uint_as_float((381u - exponent() + half) / 2 << 23);
  }

 private:
  __device__ __forceinline__ uint32_t exponent() const { return __float_as_uint(scale) >> 23; }
};

// Splits two neighbours of a row, times its scale, into kSplits operands of Half: the first
// rounded, the second what it leaves.
template <int kSplits>
__device__ __forceinline__ void split_pair(float x, float y, uint32_t (&numbers)[kSplits]) {
  numbers[0] = pack_f16x2(x, y);
  if constexpr (kSplits == 2) {
    const float2 first = unpack<Half>(numbers[0]);
    numbers[1] = pack_f16x2(x - first.x, y - first.y);
  }
}

}  // namespace
}  // namespace ikattn::cuda
