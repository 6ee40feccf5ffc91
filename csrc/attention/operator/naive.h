// The formulas of ikattn/attention.h, one function each, for tensors of one arithmetic type and
// the same heads. reference.cpp adds masks, biases, dropout, and what keeps NaN where it is seen.
//
//   output = weights(logits(scores(features(q), features(k)), eps) + g + key_bias + mask) v
#pragma once

#include <ATen/ATen.h>

#include <numbers>
#include <optional>
#include <utility>

#include "support/checks.h"

namespace ikattn::naive {

// phi(x) = [cos 2pi x.w1 + cos 2pi x.w2, sin 2pi x.w1 + sin 2pi x.w2]; without w2, w2 = w1.
inline at::Tensor features(const at::Tensor& x, const at::Tensor& w1,
                           const std::optional<at::Tensor>& w2) {
  const at::Tensor t1 = 2 * std::numbers::pi * at::matmul(x, w1);
  if (!is_present(w2)) return 2 * at::cat({at::cos(t1), at::sin(t1)}, -1);
  const at::Tensor t2 = 2 * std::numbers::pi * at::matmul(x, *w2);
  return at::cat({at::cos(t1) + at::cos(t2), at::sin(t1) + at::sin(t2)}, -1);
}

// s_ij = phi(q_i) . phi(k_j) / (4 M), where phi has F = 2 M features.
inline at::Tensor scores(const at::Tensor& phi_q, const at::Tensor& phi_k, int64_t F) {
  return at::matmul(phi_q, phi_k.transpose(-2, -1)) / (2.0 * static_cast<double>(F));
}

// log(s_ij^2 + eps), to which g_j, key_bias_j and mask_ij are added.
inline at::Tensor logits(const at::Tensor& s, double eps) { return at::log(s * s + eps); }

// weight_ij = exp(logit_ij) / Z_i and log Z_i; a row of -inf has zeros.
inline std::pair<at::Tensor, at::Tensor> weights(const at::Tensor& logits) {
  // A column of weight zero gives the maximum an element where S = 0.
  const at::Tensor largest =
      at::amax(at::constant_pad_nd(logits.detach(), {0, 1}, -INFINITY), {-1}, true);
  const at::Tensor base = largest.masked_fill(largest == -INFINITY, 0);
  const at::Tensor w = at::exp(logits - base), Z = w.sum(-1, true);
  return {w / Z.masked_fill(Z == 0, 1), (at::log(Z) + base).squeeze(-1)};
}

}  // namespace ikattn::naive
