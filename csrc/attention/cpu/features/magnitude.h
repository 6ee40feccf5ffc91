// The magnitude of a key, g = magnitude_scale |k|_p^2, and its gradient.
#pragma once

#include "attention/calls/offsets.h"
#include "attention/calls/params.h"
#include "support/cpu/elements.h"
#include "support/cpu/vector_math.h"

namespace ikattn::IKATTN_ISA {
namespace {

// Returns x^p for x >= 0: by products and a square root where p is a small multiple of 1/2, by pow
// otherwise.
template <typename T>
inline T nonnegative_power(T x, double p) {
  const double twice = 2 * p;
  if (twice > 16 || twice != static_cast<int>(twice)) return power(x, static_cast<T>(p));
  T result = (static_cast<int>(twice) & 1) ? square_root(x) : T(1);
  for (int i = 0; i < static_cast<int>(p); ++i) result *= x;
  return result;
}

template <typename T>
inline T largest_magnitude(const T* x, int64_t d) {
  T largest = 0;
  for (int64_t c = 0; c < d; ++c) {
    const T size = x[c] < 0 ? -x[c] : x[c];
    largest = size > largest ? size : largest;
  }
  return largest;
}

// Returns |x|_p of a contiguous row. It divides by the largest element, so that powers neither
// overflow nor vanish.
template <typename T>
inline double p_norm(const T* x, int64_t d, double p) {
  const T largest = largest_magnitude(x, d);
  if (largest == 0) return 0;
  double sum = 0;
  for (int64_t c = 0; c < d; ++c) {
    sum += static_cast<double>(nonnegative_power((x[c] < 0 ? -x[c] : x[c]) / largest, p));
  }
  return static_cast<double>(largest) * power(sum, 1 / p);
}

// Returns the magnitude in float64 whatever T is: g stands in an exponent, where float32 would cost
// |g| 6e-8 of every weight.
template <typename T>
inline double squared_norm(const T* x, int64_t d, double p) {
  if (p == 2) {
    constexpr int kParts = 8;
    double sums[kParts] = {};
    const auto add = [&](T element, int part) {
      sums[part] += static_cast<double>(element) * static_cast<double>(element);
    };
    const int64_t whole = d - d % kParts;
    for (int64_t c = 0; c < whole; c += kParts) {
      for (int part = 0; part < kParts; ++part) add(x[c + part], part);
    }
    for (int64_t c = whole; c < d; ++c) add(x[c], static_cast<int>(c - whole));
    double sum = 0;
    for (const double part : sums) sum += part;
    return sum;
  }
  const double norm = p_norm(x, d, p);
  return norm * norm;
}

// Adds factor * d|x|_p^2 / dx_c = factor * 2 |x|_p (|x_c| / |x|_p)^(p-1) sign(x_c) to grad[c]; zero
// at x = 0.
template <typename T>
inline void add_squared_norm_gradient(const T* x, int64_t d, double p, T factor, T* grad) {
  if (p == 2) {
    for (int64_t c = 0; c < d; ++c) grad[c] += 2 * factor * x[c];
    return;
  }
  const T norm = static_cast<T>(p_norm(x, d, p));
  if (norm == 0) return;
  for (int64_t c = 0; c < d; ++c) {
    const T size = x[c] < 0 ? -x[c] : x[c];
    if (size == 0) continue;
    const T slope = 2 * factor * norm * nonnegative_power(size / norm, p - 1);
    grad[c] += x[c] < 0 ? -slope : slope;
  }
}

// Returns key_bias_j; for a bool mask 0 where the key is visible, and -inf where it is hidden.
inline double bias_of_key(const Array& bias, int64_t offset) {
  if (!bias) return 0;
  if (bias.type != ElementType::kBool) return load_element<double>(bias, offset);
  return static_cast<const uint8_t*>(bias.data)[offset] ? 0 : -infinity<double>();
}

// Computes g_j + key_bias_j of the keys [begin, end) of key head (b, head). -inf: the key is
// hidden; NaN: the key has an element that is not finite, and every row that sees it becomes NaN.
template <typename T>
void key_logits(const AttentionParams& params, int64_t b, int64_t head, int64_t begin, int64_t end,
                T* row, double* out) {
  const Array& key = params.key;
  const Array& bias = params.key_bias;
  const int64_t group = head * params.G / params.key_heads;
  for (int64_t j = begin; j < end; ++j) {
    double logit =
        bias_of_key(bias, b * bias.stride[0] + head * bias.stride[1] + j * bias.stride[2]);
    if (logit != -infinity<double>()) {
      logit = bounded_offset(logit);
      load_row(key, b * key.stride[0] + group * key.stride[1] + j * key.stride[2], key.stride[3],
               params.d, row);
      if (params.p > 0) {
        logit += params.magnitude_scale * squared_norm(row, params.d, params.p);
      }
      if (!is_finite(logit) || !all_finite(row, params.d)) {
        logit = not_a_number<double>();
      }
    }
    out[j - begin] = logit;
  }
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
