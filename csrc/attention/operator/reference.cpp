#include "attention/operator/reference.h"

#include <ATen/ATen.h>

#include <limits>

#include "attention/calls/offsets.h"
#include "attention/operator/naive.h"
#include "support/exact_arithmetic.h"
#include "support/philox.h"

namespace ikattn {
namespace {

int64_t static_size(const at::Tensor& tensor, int64_t axis) {
  return tensor.sym_size(axis).guard_int(__FILE__, __LINE__);
}

// Repeats each of an axis' heads so that there are H.
at::Tensor to_heads(const at::Tensor& tensor, int64_t axis, int64_t H) {
  const int64_t heads = static_size(tensor, axis);
  return heads == H || heads == 1 ? tensor : tensor.repeat_interleave(H / heads, axis);
}

struct Logits {
  at::Tensor weights;         // [B, H, L, S], normalised, before dropout
  at::Tensor log_normalizer;  // [B, H, L]
  at::Tensor seen;            // [B|1, H|1, S] or undefined: keys that some row sees
};

// Returns true where a pair is visible, [B|1, H|1, L|1, S|1]; undefined where all are. The first
// query is number first_query of its sequence.
at::Tensor visible_pairs(const at::Tensor& query, const at::Tensor& key, int64_t H,
                         const AttentionOptions& options, int64_t first_query) {
  at::Tensor visible;
  const auto add = [&](const at::Tensor& more) {
    visible = visible.defined() ? at::logical_and(visible, more) : more;
  };
  if (is_present(options.attn_mask)) {
    const at::Tensor& mask = *options.attn_mask;
    at::Tensor shown = mask.scalar_type() == at::kBool ? mask : mask != -INFINITY;
    while (shown.dim() < 4) shown = shown.unsqueeze(0);
    add(shown);
  }
  if (is_present(options.key_bias)) {
    at::Tensor shown = *options.key_bias != -INFINITY;
    while (shown.dim() < 3) shown = shown.unsqueeze(0);
    add(to_heads(shown, -2, H).unsqueeze(-2));
  }
  if (options.is_causal) {
    const auto index = at::TensorOptions().device(query.device()).dtype(at::kLong);
    const at::Tensor i = at::arange(query.sym_size(2), index).unsqueeze(-1);
    const at::Tensor j = at::arange(key.sym_size(2), index).unsqueeze(0);
    add((j <= i + first_query).unsqueeze(0).unsqueeze(0));
  }
  return visible;
}

// Returns log(s^2 + eps) + g_j + key_bias_j + mask_ij of all pairs, not yet masked.
at::Tensor pair_logits(const at::Tensor& query, const at::Tensor& key, const at::Tensor& w1,
                       const std::optional<at::Tensor>& w2, int64_t H,
                       const AttentionOptions& options, double norm_dropout_p) {
  const at::ScalarType type = query.scalar_type();
  const at::Tensor phi_q = reference_features(query, w1, w2);
  const at::Tensor phi_k = reference_features(key, w1, w2);
  at::Tensor logits =
      naive::logits(naive::scores(phi_q, phi_k, 2 * static_size(w1, -1)), options.eps);
  if (options.p) {
    const double scale = magnitude_scale_or_default(options.magnitude_scale, static_size(key, -1));
    at::Tensor magnitude = (scale * reference_squared_norm(key, *options.p)).unsqueeze(-2);
    if (norm_dropout_p > 0) {
      magnitude = magnitude + (scale * reference_squared_norm(query, *options.p)).unsqueeze(-1);
      magnitude = at::dropout(magnitude, norm_dropout_p, true);
    }
    logits = logits + magnitude;
  }
  if (is_present(options.key_bias)) {
    at::Tensor bias = bounded_offsets(options.key_bias->to(type));
    while (bias.dim() < 3) bias = bias.unsqueeze(0);
    logits = logits + to_heads(bias, -2, H).unsqueeze(-2);
  }
  if (is_present(options.attn_mask) && options.attn_mask->scalar_type() != at::kBool) {
    logits = logits + bounded_offsets(options.attn_mask->to(type));
  }
  return logits;
}

// Returns the weights of a call in its arithmetic type.
Logits normalised_weights(at::Tensor query, at::Tensor key, const at::Tensor& w1,
                          const std::optional<at::Tensor>& w2, const AttentionOptions& options,
                          double norm_dropout_p, int64_t first_query = 0) {
  const at::ScalarType type = compute_type(query.scalar_type());
  const int64_t H = static_size(query, 1);
  std::optional<at::Tensor> w2_heads;
  if (is_present(w2)) w2_heads = to_heads(*w2, -3, H);
  query = query.to(type);
  key = to_heads(key.to(type), 1, H);
  Logits result;
  const at::Tensor visible = visible_pairs(query, key, H, options, first_query);
  if (visible.defined()) {
    // A key that no row sees, and a row that sees none, must not reach the arithmetic: 0 * NaN in
    // the gradient would be NaN.
    result.seen = visible.any(-2);
    key = at::where(result.seen.unsqueeze(-1), key, at::zeros({}, key.options()));
    const at::Tensor seeing = visible.any(-1).unsqueeze(-1);
    query = at::where(seeing, query, at::zeros({}, query.options()));
  }
  at::Tensor logits =
      pair_logits(query, key, to_heads(w1, -3, H), w2_heads, H, options, norm_dropout_p);
  if (visible.defined()) {
    logits = at::where(visible, logits, at::scalar_tensor(-INFINITY, logits.options()));
  }
  std::tie(result.weights, result.log_normalizer) = naive::weights(logits);
  return result;
}

at::Tensor keep_mask(const at::Tensor& weights, const AttentionOptions& options) {
  return call_dropout_keep_mask(*options.dropout_seed, weights.sym_size(0), weights.sym_size(1),
                                weights.sym_size(2), weights.sym_size(3), options.dropout_p);
}

at::Tensor apply_dropout(const at::Tensor& weights, const AttentionOptions& options,
                         const at::Tensor& given_keep = {}) {
  if (options.dropout_p == 0) return weights;
  const at::Tensor keep = given_keep.defined() ? given_keep : keep_mask(weights, options);
  const double rescale = dropout_rescale(dropout_threshold(options.dropout_p));
  return at::where(keep, weights * rescale, at::zeros({}, weights.options()));
}

}  // namespace

at::Tensor bounded_offsets(const at::Tensor& offsets, double share) {
  const double farthest = share * bounded_offset(std::numeric_limits<double>::max());
  const at::Tensor known = offsets.detach();
  const at::Tensor bounded = known.clamp(-farthest, farthest) + (offsets - known);
  return at::where(known.isfinite(), bounded, offsets);
}

at::Tensor sum_of_logits(const at::Tensor& one, const at::Tensor& other) {
  const at::Tensor sum = one + other;
  const at::Tensor hidden = (one == -INFINITY).logical_or(other == -INFINITY);
  return at::where(hidden, at::full({}, -INFINITY, sum.options()), sum);
}

at::Tensor reference_squared_norm(const at::Tensor& x, double p) {
  if (p == 2 || static_size(x, -1) == 0) return (x * x).sum(-1);
  if (p == 1) return x.abs().sum(-1).square();
  // Every derivative of a zero vector is 0; the norm's own second one would be NaN. Over the
  // largest element, a constant, powers stay in range.
  const at::Tensor zero = (x == 0).all(-1, true), largest = at::amax(x.detach().abs(), {-1}, true);
  const at::Tensor unit =
      largest.masked_fill(zero.logical_or(at::isfinite(largest).logical_not()), 1);
  const at::Tensor norm = at::linalg_vector_norm(x.masked_fill(zero, 1) / unit, p, {-1}, true);
  return (norm * unit).square().masked_fill(zero, 0).squeeze(-1);
}

at::Tensor reference_features(const at::Tensor& x, const at::Tensor& w1,
                              const std::optional<at::Tensor>& w2) {
  const ExactArithmetic exact;
  const at::ScalarType type = compute_type(x.scalar_type());
  std::optional<at::Tensor> second;
  if (is_present(w2)) second = w2->to(type);
  return naive::features(x.to(type), w1.to(type), second);
}

std::tuple<at::Tensor, at::Tensor> reference_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& w1,
    const std::optional<at::Tensor>& w2, const AttentionOptions& options, double norm_dropout_p) {
  const ExactArithmetic exact;
  const Logits logits = normalised_weights(query, key, w1, w2, options, norm_dropout_p);
  at::Tensor values = to_heads(value.to(logits.weights.scalar_type()), 1, static_size(query, 1));
  if (logits.seen.defined()) {
    values = at::where(logits.seen.unsqueeze(-1), values, at::zeros({}, values.options()));
  }
  const at::Tensor output = at::matmul(apply_dropout(logits.weights, options), values);
  return {output.to(query.scalar_type()), logits.log_normalizer.detach().to(at::kDouble)};
}

at::Tensor reference_from_features(const at::Tensor& query_features, const at::Tensor& key_features,
                                   const at::Tensor& logits, const at::Tensor& value, double eps) {
  const ExactArithmetic exact;
  const int64_t H = static_size(query_features, 1), F = static_size(query_features, 3);
  at::Tensor bias = logits;
  while (bias.dim() < 4) bias = bias.unsqueeze(0);
  const at::Tensor visible = bias != -INFINITY;
  const at::Tensor seen = visible.any(-2).unsqueeze(-1);
  const at::Tensor nothing = at::zeros({}, query_features.options());
  const at::Tensor keys = at::where(seen, to_heads(key_features, 1, H), nothing);
  const at::Tensor queries = at::where(visible.any(-1).unsqueeze(-1), query_features, nothing);
  const at::Tensor logits_of_pairs = naive::logits(naive::scores(queries, keys, F), eps) + bias;
  const at::Tensor weights = naive::weights(at::where(visible, logits_of_pairs, bias)).first;
  const at::Tensor values = to_heads(value.to(query_features.scalar_type()), 1, H);
  return at::matmul(weights, at::where(seen, values, nothing)).to(value.scalar_type());
}

at::Tensor reference_weights(const at::Tensor& query, const at::Tensor& key, const at::Tensor& w1,
                             const std::optional<at::Tensor>& w2, const AttentionOptions& options,
                             bool average_heads, const at::Tensor& keep, int64_t first_query) {
  const ExactArithmetic exact;
  const Logits logits = normalised_weights(query, key, w1, w2, options, 0.0, first_query);
  const at::Tensor weights = apply_dropout(logits.weights, options, keep);
  return (average_heads ? weights.mean(1) : weights).to(query.scalar_type());
}

at::Tensor composed_from_features(const at::Tensor& query_features, const at::Tensor& key_features,
                                  const at::Tensor& logits, const at::Tensor& value, double eps) {
  check_from_features(query_features, key_features, logits, value, eps);
  return reference_from_features(query_features, key_features, logits, value, eps)
      .transpose(1, 2)
      .contiguous()
      .transpose(1, 2);
}

}  // namespace ikattn
