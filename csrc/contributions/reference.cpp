#include "contributions/reference.h"

#include <ATen/ATen.h>

#include "attention/operator/reference.h"

namespace ikattn {
namespace {

at::Tensor wide(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.to(at::kDouble) : tensor;
}

// The linear part of a norm on [..., D].
at::Tensor apply_norm(const at::Tensor& x, const at::Tensor& weight, bool centered,
                      const Arithmetic& arithmetic) {
  return (centered ? x - x.mean(-1, true) : x) * arithmetic.broadcast(weight, x.sizes());
}

// Returns the square root with value and gradient 0 at 0, and below it, where rounding may lead.
at::Tensor safe_root(const at::Tensor& square) {
  const at::Tensor none = square <= 0;  // false for NaN
  return at::where(none, at::zeros({}, square.options()),
                   at::sqrt(at::where(none, at::ones({}, square.options()), square)));
}

at::Tensor vector_norms(const at::Tensor& x) { return safe_root(x.square().sum(-1)); }

at::Tensor zero_where(const at::Tensor& condition, const at::Tensor& x) {
  return at::where(condition, at::zeros({}, x.options()), x);
}

// Returns weights [B, H, rows, S], zero where query or key is padding.
at::Tensor hide(at::Tensor weights, const Block& block) {
  if (block.query_padding.defined()) {
    weights = zero_where(block.query_padding.unsqueeze(1).unsqueeze(-1), weights);
  }
  if (block.key_padding.defined()) {
    weights = zero_where(block.key_padding.unsqueeze(1).unsqueeze(1), weights);
  }
  return weights;
}

// Returns bool [rows, S], true where a query is its own key.
at::Tensor own_pairs(const at::Tensor& weights, const Block& block) {
  return at::ones({weights.size(2), weights.size(3)}, weights.options().dtype(at::kBool))
      .tril(block.diagonal)
      .triu(block.diagonal);
}

}  // namespace

at::Tensor own_padding(const Block& block, int64_t rows) {
  at::Tensor padding = block.query_padding;
  if (block.key_padding.defined()) {
    const at::Tensor own = block.key_padding.narrow(1, block.diagonal, rows);
    padding = padding.defined() ? at::logical_or(padding, own) : own;
  }
  return padding;
}

at::Tensor project(const at::Tensor& heads, const at::Tensor& projection,
                   const Arithmetic& arithmetic) {
  return arithmetic.product(heads.transpose(1, 2).flatten(2), projection.t());
}

std::array<at::Tensor, 2> norm_scales(const Block& block, at::ScalarType type) {
  std::array<at::Tensor, 2> scales;
  for (int n = 0; n < 2 && block.norm_weight[n].defined(); ++n) {
    scales[n] = block.norm_scale[n].to(type);
    if (!block.query_padding.defined()) continue;
    scales[n] = at::where(block.query_padding, at::ones({}, scales[n].options()), scales[n]);
  }
  return scales;
}

std::array<at::Tensor, 3> pair_scales(const Block& block, at::ScalarType type) {
  const auto [first, second] = norm_scales(block, type);
  return {at::Tensor(), first, second.defined() ? first * second : second};
}

at::ScalarType arithmetic_type(const ContributionCall& call) {
  for (const at::Tensor* tensor : {&call.source.attn_weights, &call.source.query, &call.value,
                                   &call.out_proj_weight, &call.block.residual}) {
    if (tensor->defined() && tensor->scalar_type() == at::kDouble) return at::kDouble;
  }
  return at::kFloat;
}

int64_t rows_at_a_time(const ContributionSizes& sizes, const at::Device& device) {
  const int64_t elements = int64_t{1} << (device.is_cpu() ? 22 : 25);
  const int64_t per_row = std::max<int64_t>(1, sizes.B * sizes.H * sizes.S);
  return std::clamp<int64_t>(elements / per_row, 16, std::max<int64_t>(16, sizes.L));
}

ContributionCall rows_of(const ContributionCall& call, int64_t i0, int64_t rows) {
  ContributionCall result = call;
  const auto cut = [&](at::Tensor& tensor, int64_t axis) {
    if (tensor.defined()) tensor = tensor.narrow(axis, i0, rows);
  };
  WeightsSource& source = result.source;
  cut(source.attn_weights, 2);
  if (source.query.defined()) {
    std::optional<at::Tensor>& mask = source.options.attn_mask;
    const bool per_query = is_present(mask) && mask->dim() >= 2 && mask->size(-2) != 1;
    if (per_query) mask = mask->narrow(-2, i0, rows);
    cut(source.query, 2);
    source.first_row += i0;
  }
  cut(result.block.residual, 1);
  for (at::Tensor& scale : result.block.norm_scale) cut(scale, 1);
  cut(result.block.query_padding, 1);
  result.block.diagonal += i0;
  return result;
}

namespace {

// Returns attn_mask and, with is_causal, the triangle of the source's rows.
at::Tensor mask_of(const WeightsSource& source) {
  const at::Tensor mask = or_undefined(source.options.attn_mask);
  if (!source.options.is_causal) return mask;
  const int64_t rows = source.query.size(2);
  const at::Tensor seen =
      at::ones({rows, source.key.size(2)}, source.query.options().dtype(at::kBool))
          .tril(source.first_row);
  if (!mask.defined()) return seen;
  if (mask.scalar_type() == at::kBool) return at::logical_and(mask, seen);
  return at::where(seen, mask, at::scalar_tensor(-INFINITY, mask.options()));
}

}  // namespace

std::vector<at::Tensor> logit_terms(const WeightsSource& source, const at::Tensor& mask,
                                    at::ScalarType type) {
  std::vector<at::Tensor> terms;
  if (is_present(source.options.key_bias)) {
    at::Tensor bias = source.options.key_bias->to(type);
    if (bias.dim() == 0) bias = bias.unsqueeze(0);
    if (bias.dim() >= 2 && bias.size(-2) != 1) {
      bias = at::repeat_interleave(bias, source.query.size(1) / bias.size(-2), -2);
    }
    terms.push_back(bias.unsqueeze(-2));
  }
  if (mask.defined() && mask.scalar_type() == at::kBool) {
    const auto lowest = at::scalar_tensor(-INFINITY, source.query.options().dtype(type));
    terms.push_back(zero_where(mask, lowest));
  } else if (mask.defined()) {
    terms.push_back(mask.to(type));
  }
  return terms;
}

namespace {

at::Tensor softmax_weights(const WeightsSource& source, const at::Tensor& mask,
                           const Arithmetic& arithmetic) {
  const at::ScalarType type = compute_type(source.query.scalar_type());
  const int64_t B = source.query.size(0), H = source.query.size(1), rows = source.query.size(2);
  const int64_t d = source.query.size(3), G = source.key.size(1), S = source.key.size(2);
  const double scale = source.scale.value_or(1.0 / std::sqrt(static_cast<double>(d)));
  const std::vector<at::Tensor> terms = logit_terms(source, mask, type);
  at::Tensor key = source.key.to(type), hidden;
  for (const at::Tensor& term : terms) {
    const at::Tensor by_term = term == -INFINITY;
    hidden = hidden.defined() ? hidden.logical_or(by_term) : by_term;
  }
  if (hidden.defined() && rows > 0) {
    // A key that no row sees does not count, even if it holds NaN.
    const at::Tensor by_head = (hidden.dim() >= 2 ? hidden.all(-2) : hidden).expand({B, H, S});
    key = zero_where(by_head.unflatten(1, {G, H / G}).all(2).unsqueeze(-1), key);
  }
  const at::Tensor grouped = (source.query.to(type) * scale).reshape({B, G, H / G * rows, d});
  at::Tensor logits = arithmetic.product(grouped, key.transpose(2, 3)).view({B, H, rows, S});
  if (!hidden.defined()) return arithmetic.softmax(logits);
  for (const at::Tensor& term : terms) logits = logits + arithmetic.broadcast(term, logits.sizes());
  logits = at::where(hidden, at::scalar_tensor(-INFINITY, logits.options()), logits);
  // A row that sees nothing is zero, not NaN, in value and in gradient.
  const at::Tensor blind = (logits == -INFINITY).all(-1, true);
  return zero_where(blind, arithmetic.softmax(zero_where(blind, logits)));
}

}  // namespace

at::Tensor weights_of(const ContributionCall& call, const Arithmetic& arithmetic) {
  WeightsSource source = call.source;
  if (source.attn_weights.defined()) return source.attn_weights;
  if (call.block.query_padding.defined()) {  // NaN there would reach the gradients of keys
    source.query = zero_where(call.block.query_padding.unsqueeze(1).unsqueeze(-1), source.query);
  }
  const at::Tensor mask = mask_of(source);
  if (!source.w1.defined()) return softmax_weights(source, mask, arithmetic);
  const at::ScalarType given = source.query.scalar_type(), type = compute_type(given);
  // Weights are not rounded to 16 bits, as those of softmax are not here.
  const auto wide = [&](const at::Tensor& x) {
    return type != given && x.defined() && x.is_floating_point() ? x.to(type) : x;
  };
  AttentionOptions options = source.options;
  options.is_causal = false;
  options.attn_mask = or_none(wide(mask));
  if (is_present(options.key_bias)) options.key_bias = wide(*options.key_bias);
  return implicit_kernel_weights(wide(source.query), wide(source.key), wide(source.w1),
                                 or_none(wide(source.w2)), options);
}

Summands summands_of(const at::Tensor& value) {
  const at::Tensor broken = value.isfinite().logical_not();
  return {zero_where(broken, value), broken.any(-1, true).to(value.scalar_type())};
}

Summands part_of(const Summands& summands, int64_t first, int64_t count, int64_t heads) {
  const auto part = [&](const at::Tensor& all) {
    if (!all.defined()) return all;
    return at::repeat_interleave(all.narrow(2, first, count), heads / all.size(1), 1);
  };
  return {part(summands.value), part(summands.broken)};
}

at::Tensor weighed(const at::Tensor& weights, const Summands& summands) {
  const at::Tensor result = weights.unsqueeze(-1) * summands.value;
  if (!summands.broken.defined()) return result;
  const at::Tensor counts = (weights != 0).unsqueeze(-1).logical_and(summands.broken != 0);
  return at::where(counts, at::scalar_tensor(NAN, result.options()), result);
}

at::Tensor sum_of_weighed(const at::Tensor& weights, const Summands& summands,
                          const Arithmetic& arithmetic) {
  const at::Tensor sum = arithmetic.product(weights, summands.value);
  if (!summands.broken.defined()) return sum;
  const at::Tensor counts =
      arithmetic.product((weights != 0).to(sum.scalar_type()), summands.broken) != 0;
  return at::where(counts, at::scalar_tensor(NAN, sum.options()), sum);
}

ReferenceKeys reference_keys(const ContributionCall& call, const at::Tensor& weights) {
  ReferenceKeys keys;
  const Block& block = call.block;
  keys.value = wide(call.value);
  if (block.key_padding.defined()) {
    keys.value = zero_where(block.key_padding.unsqueeze(1).unsqueeze(-1), keys.value);
  }
  keys.projection = wide(call.out_proj_weight);
  const int64_t H = weights.size(1), d_v = call.value.size(3);
  const auto transformed = [&](const at::Tensor& values) {  // [B, S, H, D]
    const at::Tensor by_head = at::repeat_interleave(values, H / call.value.size(1), 1);
    const at::Tensor projections = keys.projection.unflatten(1, {H, d_v}).permute({1, 2, 0});
    return at::matmul(by_head, projections).transpose(1, 2);
  };
  if (block.maps[kValueNorms]) {
    keys.value_norms = vector_norms(transformed(keys.value)).transpose(1, 2);
  }
  // A key without weight does not count in pairs, nor in their gradients.
  const at::Tensor unseen = (weights == 0).flatten(1, 2).all(1);
  keys.value = zero_where(unseen.unsqueeze(1).unsqueeze(-1), keys.value);
  at::Tensor vectors = transformed(keys.value);
  keys.grams[0] = at::matmul(vectors, vectors.transpose(2, 3));
  for (int n = 0; n < 2 && block.norm_weight[n].defined(); ++n) {
    vectors = apply_norm(vectors, wide(block.norm_weight[n]), block.centered[n], kTorchArithmetic);
    keys.grams[n + 1] = at::matmul(vectors, vectors.transpose(2, 3));
  }
  return keys;
}

MapTensors reference_own_pairs(const at::Tensor& own_weights, const at::Tensor& given_others,
                               const ReferenceKeys& keys, const Block& block,
                               const Arithmetic& arithmetic) {
  const int64_t H = own_weights.size(1), rows = own_weights.size(2);
  const at::Tensor padding = own_padding(block, rows);
  const Summands summands = part_of(summands_of(keys.value), 0, keys.value.size(2), H);
  at::Tensor weights = wide(own_weights), own, others;
  if (padding.defined()) weights = zero_where(padding.unsqueeze(1), weights);
  own = project(weighed(weights, part_of(summands, block.diagonal, rows, H)), keys.projection,
                arithmetic);
  if (block.maps[kMixingRatios]) {
    others = zero_where(own_pairs(given_others, block), hide(wide(given_others), block));
    others = project(sum_of_weighed(others, summands, arithmetic), keys.projection, arithmetic);
  }
  const std::array<at::Tensor, 3> scales = pair_scales(block, at::kDouble);
  MapTensors maps;
  std::array<at::Tensor, 4> ratios;
  const auto finish = [&](Map map, int variant) {
    at::Tensor own_norms = vector_norms(own);
    if (padding.defined()) own_norms = zero_where(padding, own_norms);
    if (block.maps[kMixingRatios]) {
      at::Tensor other_norms = vector_norms(others);
      if (block.query_padding.defined()) {
        other_norms = zero_where(block.query_padding, other_norms);
      }
      const at::Tensor sum = own_norms + other_norms;
      const at::Tensor nothing = sum == 0;
      ratios[map - kSummed] =
          zero_where(nothing, other_norms / at::where(nothing, at::ones({}, sum.options()), sum));
    }
    if (map == kSummed || !block.maps[map]) return;
    maps[map] = scales[variant].defined() ? own_norms / scales[variant] : own_norms;
  };
  finish(kSummed, 0);
  if (block.residual.defined()) {
    at::Tensor residual = wide(block.residual);
    if (padding.defined()) residual = zero_where(padding.unsqueeze(-1), residual);
    own = own + residual;
    finish(kWithResidual, 0);
    for (int n = 0; n < 2 && block.norm_weight[n].defined(); ++n) {
      const at::Tensor weight = wide(block.norm_weight[n]);
      own = apply_norm(own, weight, block.centered[n], arithmetic);
      if (others.defined()) others = apply_norm(others, weight, block.centered[n], arithmetic);
      finish(n == 0 ? kWithNorm : kEncoder, n + 1);
    }
  }
  if (block.maps[kMixingRatios]) {
    for (at::Tensor& ratio : ratios) {
      if (!ratio.defined()) ratio = at::zeros_like(ratios[0]);
    }
    maps[kMixingRatios] = at::stack({ratios[0], ratios[1], ratios[2], ratios[3]});
  }
  return maps;
}

namespace {

// Returns the maps of a call from its weights and keys; value_norms is undefined.
//   weights: 0 where hidden
MapTensors reference_pairs(const at::Tensor& weights, const ReferenceKeys& keys,
                           const Block& block) {
  const at::Tensor by_key = weights.permute({0, 3, 2, 1});  // [B, S, rows, H]
  const at::Tensor unseen = (by_key == 0).all(-1);          // [B, S, rows]
  const std::array<at::Tensor, 3> scales = pair_scales(block, at::kDouble);
  const auto pair_norms = [&](int variant) {
    const at::Tensor squares = (at::matmul(by_key, keys.grams[variant]) * by_key).sum(-1);
    const at::Tensor norms = safe_root(zero_where(unseen, squares)).transpose(1, 2);
    return scales[variant].defined() ? norms / scales[variant].unsqueeze(-1) : norms;
  };
  MapTensors maps;
  if (needs_own_pairs(block)) {
    maps = reference_own_pairs(weights.diagonal(block.diagonal, 2, 3), weights, keys, block);
    const at::Tensor is_own = own_pairs(weights, block);
    for (int variant = 0; variant < 3; ++variant) {
      at::Tensor& map = maps[kWithResidual + variant];
      if (map.defined()) map = at::where(is_own, map.unsqueeze(-1), pair_norms(variant));
    }
  }
  if (block.maps[kSummed]) maps[kSummed] = pair_norms(0);
  return maps;
}

}  // namespace

MapTensors reference_maps(const ContributionCall& call) {
  // Everything is float64, which autocast does not change, also in the backward.
  ContributionCall exact = call;
  WeightsSource& source = exact.source;
  for (at::Tensor* tensor : {&source.query, &source.key, &source.w1, &source.w2}) {
    *tensor = wide(*tensor);
  }
  for (std::optional<at::Tensor>* tensor : {&source.options.key_bias, &source.options.attn_mask}) {
    if (is_present(*tensor) && (*tensor)->is_floating_point()) *tensor = wide(**tensor);
  }
  const at::Tensor weights = hide(wide(weights_of(exact)), call.block);
  const ReferenceKeys keys = reference_keys(call, weights);
  MapTensors maps = reference_pairs(weights, keys, call.block);
  maps[kValueNorms] = keys.value_norms;
  const at::ScalarType type = arithmetic_type(call);
  for (at::Tensor& map : maps) {
    if (map.defined()) map = map.to(type);
  }
  return maps;
}

MapTensors checked_reference_maps(const ContributionCall& call) {
  check_contributions(call);
  return reference_maps(call);
}

}  // namespace ikattn
