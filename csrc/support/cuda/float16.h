// The 16-bit number formats, as bits, the same types under nvcc and in the interpreter.
#pragma once

#include <stdint.h>

#include "support/cuda/launch.h"

#if !defined(IKATTN_INTERPRETER)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace ikattn {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

__host__ __device__ __forceinline__ float to_float(float x) { return x; }

__host__ __device__ __forceinline__ float to_float(BFloat16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

#if defined(IKATTN_INTERPRETER)

inline float to_float(Half x) {
  const uint32_t magnitude = (x.bits & 0x7fffu) << 13;
  const uint32_t sign = (x.bits & 0x8000u) << 16;
  // The exponent's bias differs by 112; infinities and NaNs keep an exponent of ones.
  const float scaled = __uint_as_float(magnitude) * 0x1p112f;
  const uint32_t bits =
      magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : __float_as_uint(scaled);
  return __uint_as_float(bits | sign);
}

inline Half to_half(float x) {
  const _Float16 value = static_cast<_Float16>(x);
  Half result;
  memcpy(&result, &value, sizeof(result));
  return result;
}

inline BFloat16 to_bfloat16(float x) {
  const uint32_t bits = __float_as_uint(x);
  if (x != x) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

#else

__host__ __device__ __forceinline__ float to_float(Half x) {
  return __half2float(__ushort_as_half(x.bits));
}

__host__ __device__ __forceinline__ Half to_half(float x) {
  return {__half_as_ushort(__float2half_rn(x))};
}

__host__ __device__ __forceinline__ BFloat16 to_bfloat16(float x) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}

#endif

// Rounds to nearest, ties to even.
template <typename T>
__host__ __device__ __forceinline__ T from_float(float x);
template <>
__host__ __device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__host__ __device__ __forceinline__ Half from_float<Half>(float x) {
  return to_half(x);
}
template <>
__host__ __device__ __forceinline__ BFloat16 from_float<BFloat16>(float x) {
  return to_bfloat16(x);
}

// Converts between any two of double, float, Half and BFloat16, through float where one is 16 bits
// wide.
template <typename To, typename From>
__host__ __device__ __forceinline__ To convert(From x) {
  if constexpr (sizeof(From) == 8 && sizeof(To) == 8) {
    return x;
  } else if constexpr (sizeof(From) == 8) {
    return from_float<To>(static_cast<float>(x));
  } else if constexpr (sizeof(To) == 8) {
    return static_cast<To>(to_float(x));
  } else {
    return from_float<To>(to_float(x));
  }
}

}  // namespace ikattn
