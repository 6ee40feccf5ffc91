// Powers of two that rows of float32 are multiplied with before they become numbers of Half.
#pragma once

#include "support/cuda/intrinsics.h"
#include "support/cuda/warps.h"

namespace ikattn::cuda {
namespace {

// The number without its sign as bits, which are ordered as numbers are, those of NaN the last.
__device__ __forceinline__ uint32_t magnitude_bits(float x) {
  return __float_as_uint(x) & 0x7fffffffu;
}

// A power of two that makes the largest of a row one from 2^14 to below 2^15, but for those below
// 2^-112, and its inverse. Both are normal numbers of float32.
struct RowScale {
  float scale;

  RowScale() = default;
  // largest: magnitude_bits()
  __device__ __forceinline__ explicit RowScale(uint32_t largest) {
    scale = __uint_as_float((268u - min(max(largest >> 23, 15u), 254u)) << 23);
  }
  __device__ __forceinline__ float inverse() const {
    return __uint_as_float((254u - exponent()) << 23);
  }
  // The inverse is the product of both halves, which differ by a factor of two at most. So where
  // it meets another row's inverse, what is between stays within float32 if the product does.
  __device__ __forceinline__ float half_of_inverse(uint32_t half) const {
    return __uint_as_float((381u - exponent() + half) / 2 << 23);
  }

 private:
  __device__ __forceinline__ uint32_t exponent() const { return __float_as_uint(scale) >> 23; }
};

// Two neighbours of a row, times its scale, as kNumbers of Half each: the first rounded, the second
// what it leaves.
template <int kNumbers>
__device__ __forceinline__ void split_pair(float x, float y, uint32_t (&numbers)[kNumbers]) {
  numbers[0] = pack_f16x2(x, y);
  if constexpr (kNumbers == 2) {
    const float2 first = unpack<Half>(numbers[0]);
    numbers[1] = pack_f16x2(x - first.x, y - first.y);
  }
}

}  // namespace
}  // namespace ikattn::cuda
