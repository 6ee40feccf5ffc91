// Numbers: infinities, logits of two parts, and elements of the axis of tokens.
#pragma once

#include "attention/cuda/operands/tokens.h"
#include "support/cuda/elements.h"
#include "support/cuda/launch.h"

namespace ikattn::cuda {
namespace {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename T>
__device__ __forceinline__ T minus_infinity() {
  return static_cast<T>(-INFINITY);
}

template <typename T>
__device__ __forceinline__ bool is_finite(T x) {
  return x - x == T(0);
}

// A number as the sum of two, of which the second is less than a rounding of the first.
template <typename T>
struct TwoParts {
  T high, low;
};

// Returns a + b without a rounding.
template <typename T>
__device__ __forceinline__ TwoParts<T> exact_sum(T a, T b) {
  const T sum = a + b, of_b = sum - a;
  return {sum, (a - (sum - of_b)) + (b - of_b)};
}

// Returns the logit of a pair, from its key's logit and the mask.
template <typename T>
__device__ __forceinline__ TwoParts<T> masked_logit(TwoParts<T> key, T mask) {
  const TwoParts<T> sum = exact_sum(key.high, mask);
  const T low = sum.low + key.low, total = sum.high + low;
  return {total, low - (total - sum.high)};
}
// Returns that logit, less the reference of the weights. Large parts cancel first.
template <typename T>
__device__ __forceinline__ T relative_logit(TwoParts<T> key, T mask, TwoParts<T> reference) {
  const TwoParts<T> sum = exact_sum(key.high, mask);
  return (sum.high - reference.high) + ((sum.low + key.low) - reference.low);
}

// Size from which the second part of a logit counts for exponentials: below, it leaves weights of
// Half the room that the largest eps for tensor cores needs.
template <typename T>
constexpr T kLargeLogit = sizeof(T) == 4 ? T(1 << 18) : T(1LL << 47);
template <typename T>
__device__ __forceinline__ bool is_large(T logit) {
  return (logit < -kLargeLogit<T> && logit != minus_infinity<T>()) || logit > kLargeLogit<T>;
}

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }

// The axis of tokens of one (batch, head) of an array [B, H, N, width].
struct Tokens {
  const Array* array;
  int64_t base;

  __device__ Tokens(const Array& a, int64_t b, int64_t h)
      : array(&a), base(b * a.stride[0] + h * a.stride[1]) {}
  template <typename T>
  __device__ __forceinline__ T load(int64_t token, int64_t column) const {
    return load_element<T>(*array, base + token * array->stride[2] + column * array->stride[3]);
  }
  template <typename T>
  __device__ __forceinline__ void store(int64_t token, int64_t column, T value) const {
    store_element<T>(*array, base + token * array->stride[2] + column * array->stride[3], value);
  }
};

template <typename T>
__device__ __forceinline__ void store_split(const SplitLogits<T>& logits, int64_t index,
                                            double value) {
  const T high = static_cast<T>(value);
  logits.high[index] = high;
  logits.low[index] = is_finite(value) ? static_cast<T>(value - static_cast<double>(high)) : T(0);
}

}  // namespace
}  // namespace ikattn::cuda
