#include "nn/attend.h"

#include <cmath>
#include <limits>
#include <optional>

#include "ikattn/attention.h"
#include "support/checks.h"

namespace ikattn::nn {
namespace {

using at::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Tensor hidden(const Tensor& mask) {
  return mask.scalar_type() == at::kBool ? mask : mask == -kInfinity;
}

Tensor as_bias(const Tensor& mask, at::ScalarType type) {
  if (mask.scalar_type() != at::kBool) return mask;
  return at::zeros_like(mask, mask.options().dtype(type)).masked_fill(mask, -kInfinity);
}

// Returns |k_j|_p^2 / (2 sqrt d) - |k_j|_2^2 / (2 sqrt d), the difference of RBF logits from
// dot-product ones: [N, H, 1, S], undefined where it is zero.
Tensor rbf_key_bias(const Tensor& key, std::optional<double> p) {
  if (p == 2.0) return {};
  const auto wide = key.to(compute_type(key.scalar_type()));
  auto bias = -wide.square().sum(-1);
  if (p.has_value()) {
    const auto zero = (wide == 0).all(-1);  // whose second derivative by the norm would be NaN
    const auto others = wide.masked_fill(zero.unsqueeze(-1), 1);
    const auto norm = at::linalg_vector_norm(others, *p, at::IntArrayRef{-1});
    bias = bias + norm.square().masked_fill(zero, 0);
  }
  return (bias / (2 * std::sqrt(key.size(-1)))).to(key.scalar_type()).unsqueeze(-2);
}

}  // namespace

std::pair<Tensor, Tensor> attend_softmax(const MultiheadAttentionOptions& options, Heads heads,
                                         const Masks& masks, at::ScalarType mask_type,
                                         const Wanted& wanted) {
  Tensor bias;
  const auto add = [&bias](const Tensor& term) { bias = bias.defined() ? bias + term : term; };
  if (masks.padding.defined()) {
    // The weight of a padded key is 0, but 0 * NaN would reach the output.
    const auto away = hidden(masks.padding).unsqueeze(1).unsqueeze(-1);
    heads.key = heads.key.masked_fill(away, 0);
    heads.value = heads.value.masked_fill(away, 0);
  }
  if (options.kernel() == Kernel::kRbf) bias = rbf_key_bias(heads.key, options.p());
  if (masks.padding.defined()) {
    add(as_bias(masks.padding, mask_type).unsqueeze(1).unsqueeze(1));
  }
  if (masks.attention.defined()) add(as_bias(masks.attention, mask_type));

  Tensor empty;  // rows without a visible key
  if (bias.defined()) {
    empty = hidden(bias).all(-1, /*keepdim=*/true);
    bias = bias.masked_fill(empty, 0);
  }
  const auto clear = [&empty](const Tensor& x) {
    return empty.defined() ? x.masked_fill(empty, 0) : x;
  };
  const auto& [query, key, value] = heads;
  if (!wanted.weights) {
    return {clear(at::scaled_dot_product_attention(query, key, value, or_none(bias),
                                                   wanted.dropout_p, masks.is_causal)),
            Tensor()};
  }
  auto logits = (query * std::sqrt(1.0 / query.size(-1))).matmul(key.transpose(-2, -1));
  if (bias.defined()) logits = logits + bias;
  auto weights = clear(logits.softmax(-1));
  if (wanted.dropout_p > 0) weights = at::dropout(weights, wanted.dropout_p, /*train=*/true);
  return {weights.matmul(value), wanted.average ? weights.mean(1) : weights};
}

std::pair<Tensor, Tensor> attend_implicit(const MultiheadAttentionImpl& module, const Heads& heads,
                                          const Masks& masks, at::ScalarType mask_type,
                                          const Wanted& wanted) {
  AttentionOptions options;
  options.p = module.options.p();
  if (masks.padding.defined()) options.key_bias = as_bias(masks.padding, mask_type).unsqueeze(1);
  if (masks.attention.defined()) {
    const bool is_bool = masks.attention.scalar_type() == at::kBool;
    options.attn_mask = is_bool ? masks.attention.logical_not() : masks.attention;
  }
  options.is_causal = masks.is_causal;
  options.dropout_p = wanted.dropout_p;
  if (wanted.dropout_p > 0) {
    // both calls have one seed, so that the returned weights are those of the output
    options.dropout_seed = draw_dropout_seed(heads.query.device());
  }
  const auto [w1, w2] = module.spectral->frequencies();
  const auto output =
      implicit_kernel_attention(heads.query, heads.key, heads.value, w1, w2, options);
  if (!wanted.weights) return {output, Tensor()};
  return {output, implicit_kernel_weights(heads.query, heads.key, w1, w2, options, wanted.average)};
}

}  // namespace ikattn::nn
