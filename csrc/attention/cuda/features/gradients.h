// Gradients that a pair of features, and a key's magnitude, pass on to the token.
#pragma once

#include <cmath>

#include "attention/cuda/operands/math.h"

namespace ikattn::cuda {

// Gradients of the keys' magnitudes, which grad_key receives.
template <typename T>
struct Magnitude {
  const T* grad_logits = nullptr;  // [B, heads, N]; nullptr: nothing
  const T* logits = nullptr;       // [B, heads, N]  -inf: hidden
  const T* norms = nullptr;        // [B, heads, N]  |x|_p, where p is not 2
  double p = 0, scale = 0;

  Magnitude() = default;
  Magnitude(const AttentionParams& params, const SplitLogits<T>& keys, const T* gradients)
      : grad_logits(params.p > 0 ? gradients : nullptr),
        logits(keys.high),
        norms(keys.norms),
        p(params.p),
        scale(params.magnitude_scale) {}
};

// Calls side(of keys?, gradients of features, of tokens, magnitude) for the sides of which
// gradients are asked for.
template <typename T, typename Gradients, typename Side>
const char* for_sides(const AttentionBackwardParams& params, const SplitLogits<T>& keys,
                      const Gradients& gradients, const Side& side) {
  if (wants_queries(params)) {
    if (const char* error = side(false, gradients.phi_q, params.grad_query, Magnitude<T>())) {
      return error;
    }
  }
  if (!params.grad_key && !wants_frequencies(params)) return nullptr;
  return side(true, gradients.phi_k, params.grad_key, Magnitude<T>(params, keys, gradients.logits));
}

namespace {

// Returns the derivative of an angle in radians: 2 pi, twice where one angle stands for both.
__device__ __forceinline__ double angle_units(bool stationary) {
  constexpr double kTwoPi = 6.283185307179586476925;
  return stationary ? 2 * kTwoPi : kTwoPi;
}

// Returns an angle's gradient. A hidden token may hold NaN, and has no gradient.
template <typename T>
__device__ __forceinline__ T angle_gradient(T units, T sine, T cosine, T grad_sin, T grad_cos) {
  const T gradient = units * (cosine * grad_sin - sine * grad_cos);
  return grad_cos == T(0) && grad_sin == T(0) ? T(0) : gradient;
}

// Returns x^exponent for x >= 0; of float32 to a relative error of some |exponent log2 x| 1e-7.
__device__ __forceinline__ float power(float x, double exponent) {
  if (exponent == 0) return 1;  // also for x = 0
  return exp2f(static_cast<float>(exponent) * log2f(x));
}
__device__ __forceinline__ double power(double x, double exponent) { return pow(x, exponent); }

// The magnitude of one key.
template <typename T>
struct KeyMagnitude {
  T factor = 0, norm = 1;

  __device__ __forceinline__ KeyMagnitude(const Magnitude<T>& magnitude, int64_t index) {
    if (magnitude.grad_logits == nullptr) return;
    if (magnitude.logits[index] == minus_infinity<T>()) return;
    if (magnitude.norms != nullptr) norm = magnitude.norms[index];
    if (norm != T(0)) {
      factor = magnitude.grad_logits[index] * static_cast<T>(2 * magnitude.scale);
    }
  }
  // Returns factor / 2 times the slope of |x|_p^2 along one of its elements.
  __device__ __forceinline__ T slope(T x, double p) const {
    if (p == 2) return factor * x;
    if (x == T(0)) return 0;
    const T size = factor * norm * power((x < T(0) ? -x : x) / norm, p - 1);
    return x < T(0) ? -size : size;
  }
};

}  // namespace
}  // namespace ikattn::cuda
