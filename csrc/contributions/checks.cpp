// Argument checks of the contribution operators.
#include <ATen/ATen.h>

#include <cmath>

#include "contributions/arguments.h"

namespace ikattn {

const char* name_of(const ContributionCall& call) {
  return call.source.attn_weights.defined() ? "contributions" : "streamed_contributions";
}

namespace {

void check_type(const char* function, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(is_supported_float(tensor.scalar_type()), function, ": ", name,
                   " must be float64, float32, bfloat16 or float16, got ", tensor.scalar_type());
}

void check_shape(const char* function, const char* name, const at::Tensor& tensor,
                 at::IntArrayRef sizes, const char* letters) {
  TORCH_CHECK(tensor.sizes() == sizes, function, ": ", name, " must have shape ", letters, " = ",
              sizes, ", got ", tensor.sizes());
}

void check_padding(const char* function, const char* name, const at::Tensor& padding,
                   at::IntArrayRef sizes, const char* letters) {
  if (!padding.defined()) return;
  TORCH_CHECK_TYPE(padding.scalar_type() == at::kBool, function, ": ", name,
                   " must be bool (true = padding), got ", padding.scalar_type());
  check_shape(function, name, padding, sizes, letters);
}

void check_block(const char* function, const ContributionSizes& sizes, const Block& block) {
  constexpr const char* kWeight[2] = {"norm weight", "second_norm weight"};
  constexpr const char* kScale[2] = {"norm scale", "second_norm scale"};
  check_padding(function, "query_padding", block.query_padding, {sizes.B, sizes.L}, "[B, L]");
  check_padding(function, "key_padding", block.key_padding, {sizes.B, sizes.S}, "[B, S]");
  if (block.residual.defined()) {
    check_type(function, "residual", block.residual);
    check_shape(function, "residual", block.residual, {sizes.B, sizes.L, sizes.D}, "[B, L, D]");
  }
  for (int n = 0; n < 2; ++n) {
    const at::Tensor &weight = block.norm_weight[n], &scale = block.norm_scale[n];
    TORCH_CHECK(weight.defined() == scale.defined(), function, ": ",
                weight.defined() ? kScale[n] : kWeight[n], " must be given with the other one");
    if (!weight.defined()) continue;
    check_type(function, kWeight[n], weight);
    check_type(function, kScale[n], scale);
    check_shape(function, kWeight[n], weight, {sizes.D}, "[D]");
    check_shape(function, kScale[n], scale, {sizes.B, sizes.L}, "[B, L]");
  }
  TORCH_CHECK(!block.norm_weight[0].defined() || block.residual.defined(), function,
              ": residual must be given with norm: a normalisation follows the residual sum");
  TORCH_CHECK(!block.norm_weight[1].defined() || block.norm_weight[0].defined(), function,
              ": norm must be given with second_norm");
  TORCH_CHECK(
      !needs_own_pairs(block) || (block.diagonal >= 0 && block.diagonal <= sizes.S - sizes.L),
      function,
      ": a residual and mixing ratios need every query among the keys: diagonal + L must "
      "be at most S, got diagonal ",
      block.diagonal, ", L ", sizes.L, ", S ", sizes.S);
  constexpr const char* kName[4] = {"summed", "with_residual", "with_norm", "encoder"};
  constexpr const char* kNeeds[4] = {"", "residual", "norm", "second_norm"};
  const bool defined[4] = {true, block.residual.defined(), block.norm_weight[0].defined(),
                           block.norm_weight[1].defined()};
  for (int map = 0; map < 4; ++map) {
    TORCH_CHECK(!block.maps[kSummed + map] || defined[map], function, ": ", kNeeds[map],
                " must be given for the map ", kName[map]);
  }
}

}  // namespace

void check_placement(const ContributionCall& call) {
  const WeightsSource& source = call.source;
  const Block& block = call.block;
  check_placement(name_of(call), "value", call.value,
                  {{"attn_weights", &source.attn_weights},
                   {"query", &source.query},
                   {"key", &source.key},
                   {"w1", &source.w1},
                   {"w2", &source.w2},
                   {"key_bias", address(source.options.key_bias)},
                   {"attn_mask", address(source.options.attn_mask)},
                   {"out_proj_weight", &call.out_proj_weight},
                   {"residual", &block.residual},
                   {"norm weight", &block.norm_weight[0]},
                   {"norm scale", &block.norm_scale[0]},
                   {"second_norm weight", &block.norm_weight[1]},
                   {"second_norm scale", &block.norm_scale[1]},
                   {"query_padding", &block.query_padding},
                   {"key_padding", &block.key_padding}});
}

ContributionSizes check_contributions(const ContributionCall& call) {
  const char* function = name_of(call);
  check_placement(call);
  const WeightsSource& source = call.source;
  const at::Tensor &weights = source.attn_weights, &value = call.value;
  const at::Tensor& projection = call.out_proj_weight;
  check_type(function, "value", value);
  check_type(function, "out_proj_weight", projection);
  TORCH_CHECK(value.dim() == 4, function, ": value must have shape [B, G, S, d_v], got ",
              value.sizes());
  ContributionSizes sizes;
  sizes.B = value.size(0);
  sizes.G = value.size(1);
  sizes.S = value.size(2);
  sizes.d_v = value.size(3);
  if (weights.defined()) {
    check_type(function, "attn_weights", weights);
    TORCH_CHECK(weights.dim() == 4, function, ": attn_weights must have shape [B, H, L, S], got ",
                weights.sizes());
    sizes.H = weights.size(1);
    sizes.L = weights.size(2);
    TORCH_CHECK(weights.size(0) == sizes.B && weights.size(3) == sizes.S, function,
                ": attn_weights must have shape [B, H, L, S] with B = ", sizes.B, ", S = ", sizes.S,
                " (the batch and keys of value), got ", weights.sizes());
  } else {
    const at::Tensor &query = source.query, &key = source.key;
    check_type(function, "query", query);
    TORCH_CHECK(query.dim() == 4, function, ": query must have shape [B, H, L, d], got ",
                query.sizes());
    sizes.H = query.size(1);
    sizes.L = query.size(2);
    TORCH_CHECK_VALUE(source.options.dropout_p == 0, function,
                      ": dropout_p must be 0: maps are of the weights themselves, got ",
                      source.options.dropout_p);
    TORCH_CHECK_VALUE(!source.scale || std::isfinite(*source.scale), function,
                      ": scale must be finite, got ", source.scale.value_or(0));
    // Everything else about query, key, mask and bias is as in the attention operator. Dot
    // attention has no frequencies: one of zeros stands in for them.
    const at::Tensor w1 = source.w1.defined()
                              ? source.w1
                              : at::zeros({}, query.options()).expand({sizes.H, query.size(3), 1});
    TORCH_CHECK(source.w1.defined() || !source.w2.defined(), function,
                ": w1 must be given with w2");
    check_attention(function, query, key, at::Tensor(), w1, or_none(source.w2), source.options);
    TORCH_CHECK(key.size(0) == sizes.B && key.size(1) == sizes.G && key.size(2) == sizes.S,
                function, ": value must have shape [B, G, S, d_v] = [", key.size(0), ", ",
                key.size(1), ", ", key.size(2), ", d_v], got ", value.sizes());
  }
  TORCH_CHECK(sizes.H >= 1 && sizes.G >= 1 && sizes.H % sizes.G == 0, function,
              ": the heads of value must divide those of the weights, ", sizes.H, ", got ",
              sizes.G);
  TORCH_CHECK(projection.dim() == 2 && projection.size(1) == sizes.H * sizes.d_v, function,
              ": out_proj_weight must have shape [D, H d_v] with H d_v = ", sizes.H, " x ",
              sizes.d_v, ", got ", projection.sizes());
  sizes.D = projection.size(0);
  check_block(function, sizes, call.block);
  return sizes;
}

ContributionSizes check_contributions_backward(const MapTensors& grad_maps,
                                               const ContributionCall& call) {
  const ContributionSizes sizes = check_contributions(call);
  for (int map = 0; map < kMaps; ++map) {
    const at::Tensor& gradient = grad_maps[map];
    if (!gradient.defined()) continue;
    std::vector<int64_t> expected = {sizes.B, sizes.L, sizes.S};
    if (map == kValueNorms) expected = {sizes.B, sizes.H, sizes.S};
    if (map == kMixingRatios) expected = {4, sizes.B, sizes.L};
    check_like(kMapsBackward, "grad_maps", gradient, expected, gradient.scalar_type(),
               call.value.device());
  }
  return sizes;
}

}  // namespace ikattn
