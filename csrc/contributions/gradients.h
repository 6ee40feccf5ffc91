// The maps' gradients on any device, over a Device that has, beside what the maps take,
//   pair_gradients(params, like, work)
// Pairs are gone through in float64, keys in the arithmetic type of the call. All pairs but a
// query's own go through it; the own pairs, and mixing ratios, through the reference's graph, with
// arithmetic of our own; the keys' part once for all queries, by products of matrices.
#pragma once

#include <torch/csrc/autograd/autograd.h>

#include "contributions/maps.h"

namespace ikattn {
namespace {

using Gradients = std::array<at::Tensor, kContributionInputs>;
using Wanted = std::array<bool, kContributionInputs>;

// Places in differentiable_inputs().
enum Input {
  kWeights = 0,
  kSources = 1,  // of streamed weights: query, key, w1, w2, key_bias, attn_mask
  kMask = 6,     // the last of these
  kValue = 7,
  kProjection = 8,
  kResidual = 9,
  kNormWeight = 10,  // the second norm's weight and scale are 2 behind the first one's
  kNormScale = 11,
};

// Of inputs that have an axis over the queries, that axis; else -1.
inline int64_t query_axis(size_t input, const at::Tensor& tensor) {
  if (input == kWeights || input == kSources) return 2;
  if (input == kMask) return tensor.dim() >= 2 && tensor.size(-2) != 1 ? tensor.dim() - 2 : -1;
  return input == kResidual || input == kNormScale || input == kNormScale + 2 ? 1 : -1;
}

// What is added up over all queries.
struct Totals {
  Gradients inputs;                 // those wanted, in the type of their sums
  std::array<at::Tensor, 3> outer;  // as in PairGradientParams

  // Adds the gradient of some queries.
  void add(size_t input, const at::Tensor& part, int64_t i0) {
    if (!part.defined()) return;
    at::Tensor& total = inputs[input];
    const int64_t axis = query_axis(input, total);
    (axis < 0 ? total : total.narrow(axis, i0, part.size(axis))).add_(part);
  }
};

// The gradients of the norms of every variant [B, rows, S] from those of the maps, without the own
// pairs of the maps that have those apart.
using NormGradients = std::array<at::Tensor, 3>;

inline NormGradients norm_gradients_of(const MapTensors& grads, const Block& block) {
  NormGradients result;
  const std::array<at::Tensor, 3> scales = pair_scales(block, at::kDouble);
  for (int variant = 0; variant < 3; ++variant) {
    at::Tensor total = grads[kWithResidual + variant];
    if (total.defined()) {
      total = total.to(at::kDouble, false, /*copy=*/true);
      total.diagonal(block.diagonal, 1, 2).zero_();
      if (variant > 0) total.div_(scales[variant].unsqueeze(-1));
    }
    if (variant == 0 && grads[kSummed].defined()) {
      const at::Tensor summed = grads[kSummed].to(at::kDouble);
      total = total.defined() ? total.add_(summed) : summed;
    }
    result[variant] = total;
  }
  return result;
}

// The scales' gradients by all pairs but the own ones: d(n / s) = -n / s^2.
template <typename Device>
void add_scale_gradients(const at::Tensor& weights, const Keys& keys, const Block& block,
                         const NormGradients& incoming, int64_t i0, const Wanted& wanted,
                         Totals& totals) {
  if (!wanted[kNormScale] && !wanted[kNormScale + 2]) return;
  std::array<at::Tensor, 3> norms;
  bool any = false;
  for (int variant = 1; variant < 3; ++variant) {
    if (!incoming[variant].defined()) continue;
    norms[variant] = at::empty(incoming[variant].sizes(), incoming[variant].options());
    any = true;
  }
  if (!any) return;
  pair_norms<Device>(weights, keys, block, norms);
  const std::array<at::Tensor, 2> scales = norm_scales(block, at::kDouble);
  at::Tensor sum;  // over the variants that the norm is part of, of g n
  for (int n = 1; n >= 0; --n) {
    const at::Tensor& g = incoming[n + 1];
    if (g.defined()) {
      // What comes in at a pair without norm may be anything.
      const at::Tensor products = g.mul(norms[n + 1]).masked_fill_(norms[n + 1] == 0, 0);
      const at::Tensor part = summed_to(products, {g.size(0), g.size(1), 1}).squeeze(-1);
      sum = sum.defined() ? sum + part : part;
    }
    const size_t input = kNormScale + 2 * n;
    if (sum.defined() && wanted[input]) totals.add(input, -sum / scales[n], i0);
  }
}

// What goes through a query's own pair, and through mixing ratios: to grad_weights and `totals`.
inline void add_own_gradients(const at::Tensor& weights, const Keys& keys, const Block& given,
                              const MapTensors& grads, int64_t i0, const Wanted& wanted,
                              const at::Tensor& grad_weights, Totals& totals) {
  using torch::autograd::variable_list;
  const at::AutoGradMode gradients_on(true);
  Block block = given;
  variable_list leaves;
  std::vector<size_t> places;
  const auto leaf = [&](const at::Tensor& tensor, size_t place) {
    at::Tensor copy = tensor.detach().to(at::kDouble, false, /*copy=*/true);
    if (!wanted[place]) return copy;
    leaves.push_back(copy.requires_grad_());
    places.push_back(place);
    return copy;
  };
  const bool all_weights = block.maps[kMixingRatios];
  at::Tensor pairs = all_weights ? weights : weights.diagonal(block.diagonal, 2, 3);
  pairs = pairs.detach().to(at::kDouble, false, /*copy=*/true);
  if (grad_weights.defined()) leaves.push_back(pairs.requires_grad_());
  const size_t first = leaves.size();
  ReferenceKeys sources;
  sources.value = leaf(keys.value, kValue);
  sources.projection = leaf(keys.projection, kProjection);
  if (block.residual.defined()) block.residual = leaf(block.residual, kResidual);
  for (int n = 0; n < 2 && block.norm_weight[n].defined(); ++n) {
    block.norm_weight[n] = leaf(block.norm_weight[n], kNormWeight + 2 * n);
    block.norm_scale[n] = leaf(block.norm_scale[n], kNormScale + 2 * n);
  }
  const at::Tensor own = all_weights ? pairs.diagonal(block.diagonal, 2, 3) : pairs;
  const MapTensors maps = reference_own_pairs(own, pairs, sources, block, kGraphArithmetic);
  variable_list results, incoming;
  for (int map = kWithResidual; map < kMaps; ++map) {
    if (!maps[map].defined() || !grads[map].defined() || !maps[map].requires_grad()) continue;
    const at::Tensor gradient =
        map == kMixingRatios ? grads[map] : grads[map].diagonal(block.diagonal, 1, 2);
    results.push_back(maps[map]);
    incoming.push_back(gradient.to(at::kDouble));
  }
  if (results.empty()) return;
  const variable_list found = torch::autograd::grad(results, leaves, incoming,
                                                    /*retain_graph=*/false, /*create_graph=*/false,
                                                    /*allow_unused=*/true);
  if (first > 0 && found[0].defined()) {
    (all_weights ? grad_weights : grad_weights.diagonal(block.diagonal, 2, 3)).add_(found[0]);
  }
  for (size_t n = first; n < found.size(); ++n) totals.add(places[n - first], found[n], i0);
}

// The weights of some queries as a graph over detached leaves, by Input; the given weights are no
// leaf but themselves.
struct WeightsGraph {
  at::Tensor weights;
  std::array<at::Tensor, 6> leaves;
};

inline WeightsGraph weights_graph(const ContributionCall& round, at::ScalarType type,
                                  const Wanted& wanted) {
  WeightsGraph graph;
  if (round.source.attn_weights.defined()) {
    graph.weights = round.source.attn_weights;
    return graph;
  }
  const at::AutoGradMode gradients_on(true);
  ContributionCall call = round;
  const auto inputs = differentiable_inputs(call);
  for (size_t n = 0; n < graph.leaves.size(); ++n) {
    at::Tensor& input = *inputs[kSources + n];
    if (!input.defined() || !input.is_floating_point()) continue;
    input = input.detach().to(type);
    if (!wanted[kSources + n]) continue;
    input = input.alias().requires_grad_();
    graph.leaves[n] = input;
  }
  graph.weights = weights_of(call, kGraphArithmetic);
  return graph;
}

inline void add_source_gradients(const WeightsGraph& graph, const at::Tensor& grad_weights,
                                 int64_t i0, Totals& totals) {
  torch::autograd::variable_list leaves;
  std::vector<size_t> places;
  for (size_t n = 0; n < graph.leaves.size(); ++n) {
    if (!graph.leaves[n].defined()) continue;
    leaves.push_back(graph.leaves[n]);
    places.push_back(kSources + n);
  }
  const auto found = torch::autograd::grad({graph.weights}, leaves, {grad_weights},
                                           /*retain_graph=*/false, /*create_graph=*/false,
                                           /*allow_unused=*/true);
  for (size_t n = 0; n < found.size(); ++n) totals.add(places[n], found[n], i0);
}

// [B, blocks, triangle(H), 64] of symmetric matrices -> [B, S, H, H]
inline at::Tensor unpacked(const at::Tensor& outer, int64_t H, int64_t S) {
  // Made where it is used: a copy from the host would wait, and could not be captured in a graph.
  const at::Tensor heads = at::arange(H, outer.options().dtype(at::kLong));
  const at::Tensor h = at::minimum(heads.unsqueeze(1), heads);
  const at::Tensor k = at::maximum(heads.unsqueeze(1), heads);
  const at::Tensor index = (h * H - (h * (h - 1)).div_(2, "floor") + (k - h)).flatten();
  const at::Tensor matrices = outer.index_select(2, index).transpose(2, 3);
  return matrices.reshape({outer.size(0), outer.size(1) * kFactorBlock, H, H}).narrow(1, 0, S);
}

// Keys that something comes in for, the others zero: what they hold may be NaN.
inline Keys seen_keys(const Keys& keys, const std::array<at::Tensor, 3>& matrices,
                      const at::Tensor& grad_value_norms) {
  const int64_t B = keys.value.size(0), S = keys.value.size(2);
  at::Tensor unseen = at::ones({B, S}, keys.value.options().dtype(at::kBool));
  for (const at::Tensor& matrix : matrices) {
    if (matrix.defined()) unseen.logical_and_((matrix == 0).flatten(2).all(-1));
  }
  if (grad_value_norms.defined()) unseen.logical_and_((grad_value_norms == 0).all(1));
  Keys result = keys;
  result.value = keys.value.masked_fill(unseen.unsqueeze(1).unsqueeze(-1), 0);
  return result;
}

// From the outer products, and the gradient of value norms, to value, projection and norm weights:
// the gradient of f_h(x_j) is sum_k outer_hk f_k(x_j).
inline void add_key_gradients(const Keys& keys, const Block& block, const ContributionSizes& sizes,
                              const at::Tensor& grad_value_norms, const Wanted& wanted,
                              Totals& totals) {
  const auto [B, H, G, L, S, d_v, D] = sizes;
  std::array<at::Tensor, 3> matrices;
  bool any = grad_value_norms.defined();
  for (int variant = 0; variant < 3; ++variant) {
    if (!totals.outer[variant].defined()) continue;
    matrices[variant] = with_memory_for(kMapsBackward, "the outer products of the keys", [&] {
      return unpacked(totals.outer[variant], H, S).to(keys.value.scalar_type());
    });
    any = true;
  }
  if (!any) return;
  const Keys seen = seen_keys(keys, matrices, grad_value_norms);
  const int64_t step = tokens_at_a_time(sizes, keys.value.device());
  for (int64_t j0 = 0; j0 < S; j0 += step) {
    const int64_t tokens = std::min(step, S - j0), count = B * tokens;
    at::Tensor vectors = at::empty({count, H, D}, keys.value.options());
    for (int64_t h = 0; h < H; ++h) {
      at::Tensor target = vectors.select(1, h);
      transform(seen, sizes, h, j0, tokens, target);
    }
    // Forward through the norms, then back, adding each variant's part.
    std::array<at::Tensor, 3> variants = {vectors};
    std::array<at::Tensor, 2> centered;
    const int last = matrices[2].defined() ? 2 : matrices[1].defined() ? 1 : 0;
    for (int n = 0; n < last; ++n) {
      centered[n] = variants[n];
      if (block.centered[n]) centered[n] = centered[n] - centered[n].mean(-1, true);
      variants[n + 1] = centered[n] * keys.weights[n];
    }
    at::Tensor gradient;
    for (int variant = last; variant >= 0; --variant) {
      if (matrices[variant].defined()) {
        const at::Tensor own = matrices[variant].narrow(1, j0, tokens).reshape({count, H, H});
        const at::Tensor part = kArithmetic.product(own, variants[variant]);
        gradient = gradient.defined() ? gradient.add_(part) : part;
      }
      if (variant == 0) break;
      const int n = variant - 1;
      if (wanted[kNormWeight + 2 * n]) {
        totals.add(kNormWeight + 2 * n, summed_to(gradient * centered[n], {D}), 0);
      }
      gradient.mul_(keys.weights[n]);
      if (block.centered[n]) gradient.sub_(gradient.mean(-1, true));
    }
    if (grad_value_norms.defined()) {
      // In float64: squares may leave the range of float32.
      const at::Tensor norms =
          at::linalg_vector_norm(vectors, 2, at::IntArrayRef{-1}, false, at::kDouble);
      const at::Tensor incoming =
          grad_value_norms.narrow(2, j0, tokens).transpose(1, 2).reshape({count, H});
      const at::Tensor slope = (incoming / norms).masked_fill_(norms == 0, 0);
      const at::Tensor part = vectors * slope.to(vectors.scalar_type()).unsqueeze(-1);
      gradient = gradient.defined() ? gradient.add_(part) : part;
    }
    for (int64_t h = 0; h < H; ++h) {
      const at::Tensor of_head = gradient.select(1, h);
      if (wanted[kValue]) {
        const at::Tensor part =
            kArithmetic.product(of_head, keys.projection.narrow(1, h * d_v, d_v));
        totals.inputs[kValue]
            .select(1, h / (H / G))
            .narrow(1, j0, tokens)
            .add_(part.view({B, tokens, d_v}));
      }
      if (wanted[kProjection]) {
        at::Tensor total = totals.inputs[kProjection].narrow(1, h * d_v, d_v);
        multiply_into(total, of_head.t(), tokens_of(seen, sizes, h, j0, tokens),
                      /*accumulate=*/true);
      }
    }
  }
}

// Through all pairs of some queries but their own: grad_weights is written, the keys' sums grow.
template <typename Device>
void add_pair_gradients(const at::Tensor& weights, const Keys& keys, const Block& block,
                        const NormGradients& incoming, const at::Tensor& grad_weights,
                        Totals& totals) {
  PairGradientParams params;
  set_pairs(params, weights, keys, block, incoming);
  if (params.variants == 0) return;
  if (grad_weights.defined()) params.grad_weights = array_of(grad_weights);
  int index = 0;
  for (int variant = 0; variant < 3; ++variant) {
    if (!incoming[variant].defined()) continue;
    const at::Tensor& outer = totals.outer[variant];
    params.outer[index++] = outer.defined() ? outer.mutable_data_ptr<double>() : nullptr;
  }
  Device::pair_gradients(params, keys.value, 3 * pair_work(params));
}

template <typename Device>
Gradients contribution_gradients_of(const MapTensors& grad_maps, const ContributionCall& given,
                                    const Wanted& wanted) {
  const c10::InferenceMode ordinary_mode(false);
  const at::AutoGradMode gradients_off(false);
  const ExactArithmetic exact;
  const ContributionSizes sizes = check_contributions_backward(grad_maps, given);
  ContributionCall call = given;
  Block& block = call.block;
  bool needs_own = false;
  for (int map = 0; map < kMaps; ++map) {
    block.maps[map] = block.maps[map] && grad_maps[map].defined();
    needs_own = needs_own || (block.maps[map] && map >= kWithResidual);
  }
  const at::Tensor grad_value_norms =
      block.maps[kValueNorms] ? grad_maps[kValueNorms] : at::Tensor();
  block.maps[kValueNorms] = false;  // of the keys only factors are needed
  const at::ScalarType type = arithmetic_type(call);
  // More vectors than dimensions always depend on each other: where their sum vanishes, all digits
  // of the outer products are needed.
  const at::ScalarType key_type = sizes.H > sizes.D ? at::kDouble : type;
  const Keys keys = prepare_keys<Device>(call, sizes, at::kDouble);

  Totals totals;
  const auto inputs = differentiable_inputs(call);
  bool wants_weights = false, wants_keys = wanted[kValue] || wanted[kProjection] ||
                                           wanted[kNormWeight] || wanted[kNormWeight + 2];
  for (size_t i = 0; i < kContributionInputs; ++i) {
    if (!wanted[i]) continue;
    TORCH_CHECK(inputs[i]->defined(), kMapsBackward, ": the gradient of input ", i,
                " is wanted, which was not given");
    const auto options = inputs[i]->options().dtype(i < kValue ? type : key_type);
    totals.inputs[i] = with_memory_for(kMapsBackward, "the gradients",
                                       [&] { return at::zeros(inputs[i]->sizes(), options); });
    wants_weights = wants_weights || i < kValue;
  }
  for (int variant = 0; wants_keys && variant < 3; ++variant) {
    const at::Tensor& factors = keys.factors[variant];
    if (!factors.defined()) continue;
    totals.outer[variant] = with_memory_for(kMapsBackward, "the outer products of the keys",
                                            [&] { return at::zeros_like(factors); });
  }

  const int64_t step = rows_at_a_time(sizes, call.value.device());
  for (int64_t i0 = 0; i0 < sizes.L; i0 += step) {
    const int64_t rows = std::min(step, sizes.L - i0);
    const ContributionCall round = rows_of(call, i0, rows);
    MapTensors grads;
    for (int map = kSummed; map < kMaps; ++map) {
      if (!block.maps[map]) continue;
      grads[map] = grad_maps[map].narrow(map == kMixingRatios ? 2 : 1, i0, rows);
    }
    const WeightsGraph graph = weights_graph(round, type, wanted);
    const at::Tensor weights = graph.weights.detach();
    at::Tensor grad_weights;
    if (wanted[kWeights]) {
      grad_weights = totals.inputs[kWeights].narrow(2, i0, rows);
    } else if (wants_weights) {
      grad_weights = at::zeros(weights.sizes(), weights.options().dtype(type));
    }
    const NormGradients incoming = norm_gradients_of(grads, round.block);
    add_pair_gradients<Device>(weights, keys, round.block, incoming, grad_weights, totals);
    add_scale_gradients<Device>(weights, keys, round.block, incoming, i0, wanted, totals);
    if (needs_own) {
      add_own_gradients(weights, keys, round.block, grads, i0, wanted, grad_weights, totals);
    }
    if (wants_weights && !wanted[kWeights]) {
      add_source_gradients(graph, grad_weights, i0, totals);
    }
  }
  if (wants_keys) {
    add_key_gradients(stored_keys(call, key_type), block, sizes, grad_value_norms, wanted, totals);
  }
  if (wanted[kValue] && block.key_padding.defined()) {
    totals.inputs[kValue].masked_fill_(block.key_padding.unsqueeze(1).unsqueeze(-1), 0);
  }
  for (size_t i = 0; i < kContributionInputs; ++i) {
    if (wanted[i]) totals.inputs[i] = totals.inputs[i].to(inputs[i]->scalar_type());
  }
  return totals.inputs;
}

}  // namespace
}  // namespace ikattn
