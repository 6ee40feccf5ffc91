// The maps' gradients on any device, over a Device that has, beside what the maps take,
//   pair_gradients(params, like, work)
// and maybe, for weights from query and key,
//   why_gradients_in_blocks(call, sizes, wanted),
//   streamed_gradients(call, grads, keys, sizes, wanted, totals)
// which go through all pairs where why_gradients_in_blocks() is nullptr. Otherwise pairs are gone
// through in float64, with the weights of some queries at a time. A query's own pair, and mixing
// ratios, go through the reference's graph, with arithmetic of our own; the keys' part once for all
// queries, by products of matrices.
#pragma once

#include <torch/csrc/autograd/autograd.h>

#include "contributions/key_gradients.h"

namespace ikattn {
namespace {

// Returns the gradients of the norms of every variant [B, rows, S] from those of the maps, without
// the own pairs of the maps that compute those apart.
using NormGradients = std::array<at::Tensor, 3>;

inline NormGradients norm_gradients_of(const MapTensors& grads, const Block& block,
                                       at::ScalarType type) {
  NormGradients result;
  const std::array<at::Tensor, 3> scales = pair_scales(block, type);
  for (int variant = 0; variant < 3; ++variant) {
    at::Tensor total = grads[kWithResidual + variant];
    if (total.defined()) {
      total = total.to(type, false, /*copy=*/true);
      total.diagonal(block.diagonal, 1, 2).zero_();
      if (variant > 0) total.div_(scales[variant].unsqueeze(-1));
    }
    if (variant == 0 && grads[kSummed].defined()) {
      const at::Tensor summed = grads[kSummed].to(type);
      total = total.defined() ? total.add_(summed) : summed;
    }
    result[variant] = total;
  }
  return result;
}

// Adds the scales' gradients by all pairs but the own ones: d(n / s) = -n / s^2.
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
      // The incoming gradient of a pair whose norm is 0 may be anything.
      const at::Tensor products = g.mul(norms[n + 1]).masked_fill_(norms[n + 1] == 0, 0);
      const at::Tensor part = summed_to(products, {g.size(0), g.size(1), 1}).squeeze(-1);
      sum = sum.defined() ? sum + part : part;
    }
    const size_t input = kNormScale + 2 * n;
    if (sum.defined() && wanted[input]) totals.add(input, -sum / scales[n], i0);
  }
}

// Returns the gradients of these maps for the queries [i0, i0 + rows).
inline MapTensors rows_of(const MapTensors& grads, const Block& block, int64_t i0, int64_t rows) {
  MapTensors result;
  for (int map = kSummed; map < kMaps; ++map) {
    if (!block.maps[map]) continue;
    result[map] = grads[map].narrow(map == kMixingRatios ? 2 : 1, i0, rows);
  }
  return result;
}

// Adds the gradients through a query's own pair, and through mixing ratios, to grad_pairs and
// `totals`.
//   given_pairs [B, H, rows], weights of own pairs; with mixing ratios [B, H, rows, S], of all
inline void add_own_gradients(const at::Tensor& given_pairs, const Keys& keys, const Block& given,
                              const MapTensors& grads, int64_t i0, const Wanted& wanted,
                              const at::Tensor& grad_pairs, Totals& totals) {
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
  at::Tensor pairs = given_pairs.detach().to(at::kDouble, false, /*copy=*/true);
  if (grad_pairs.defined()) leaves.push_back(pairs.requires_grad_());
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
  if (first > 0 && found[0].defined()) grad_pairs.add_(found[0]);
  for (size_t n = first; n < found.size(); ++n) totals.add(places[n - first], found[n], i0);
}

// The inputs of weights, detached: leaves of a graph where they are wanted, by Input.
using SourceLeaves = std::array<at::Tensor, 6>;

// Replaces the call's inputs by the leaves, converted to `type`.
inline SourceLeaves source_leaves(ContributionCall& call, at::ScalarType type,
                                  const Wanted& wanted) {
  SourceLeaves leaves;
  const auto inputs = differentiable_inputs(call);
  for (size_t n = 0; n < leaves.size(); ++n) {
    at::Tensor& input = *inputs[kSources + n];
    if (!input.defined() || !input.is_floating_point()) continue;
    input = input.detach().to(type);
    if (!wanted[kSources + n]) continue;
    input = input.alias().requires_grad_();
    leaves[n] = input;
  }
  return leaves;
}

// Returns the weights of some queries as a graph; given weights are their own leaf.
struct WeightsGraph {
  at::Tensor weights;
  SourceLeaves leaves;
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
  graph.leaves = source_leaves(call, type, wanted);
  graph.weights = weights_of(call, kGraphArithmetic);
  return graph;
}

// Adds the gradients of the leaves from those of the graph's results.
inline void add_source_gradients(const torch::autograd::variable_list& made,
                                 const torch::autograd::variable_list& gradients,
                                 const SourceLeaves& of_graph, int64_t i0, Totals& totals) {
  torch::autograd::variable_list leaves;
  std::vector<size_t> places;
  for (size_t n = 0; n < of_graph.size(); ++n) {
    if (!of_graph[n].defined()) continue;
    leaves.push_back(of_graph[n]);
    places.push_back(kSources + n);
  }
  const auto found = torch::autograd::grad(made, leaves, gradients,
                                           /*retain_graph=*/false, /*create_graph=*/false,
                                           /*allow_unused=*/true);
  for (size_t n = 0; n < found.size(); ++n) totals.add(places[n], found[n], i0);
}

// Computes all pairs of some queries but their own: writes grad_weights, and adds to the keys'
// sums.
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
concept StreamsGradients =
    requires(const ContributionCall& call, const ContributionSizes& sizes, const Wanted& wanted) {
      Device::why_gradients_in_blocks(call, sizes, wanted);
    };

// Computes all pairs, with the weights of some queries at a time.
template <typename Device>
void add_gradients_in_blocks(const ContributionCall& call, const MapTensors& grad_maps,
                             const Keys& keys, const ContributionSizes& sizes, const Wanted& wanted,
                             Totals& totals) {
  const at::ScalarType type = arithmetic_type(call);
  const bool wants_weights = std::any_of(wanted.begin(), wanted.begin() + kValue, std::identity());
  const int64_t step = rows_at_a_time(sizes, call.value.device());
  for (int64_t i0 = 0; i0 < sizes.L; i0 += step) {
    const int64_t rows = std::min(step, sizes.L - i0);
    const ContributionCall round = rows_of(call, i0, rows);
    const MapTensors grads = rows_of(grad_maps, call.block, i0, rows);
    const WeightsGraph graph = weights_graph(round, type, wanted);
    const at::Tensor weights = graph.weights.detach();
    at::Tensor grad_weights;
    if (wanted[kWeights]) {
      grad_weights = totals.inputs[kWeights].narrow(2, i0, rows);
    } else if (wants_weights) {
      grad_weights = at::zeros(weights.sizes(), weights.options().dtype(type));
    }
    const NormGradients incoming = norm_gradients_of(grads, round.block, at::kDouble);
    add_pair_gradients<Device>(weights, keys, round.block, incoming, grad_weights, totals);
    add_scale_gradients<Device>(weights, keys, round.block, incoming, i0, wanted, totals);
    if (needs_own_gradients(call.block)) {
      const auto own = [&](const at::Tensor& of_all) {
        const bool takes_all = !of_all.defined() || call.block.maps[kMixingRatios];
        return takes_all ? of_all : of_all.diagonal(round.block.diagonal, 2, 3);
      };
      add_own_gradients(own(weights), keys, round.block, grads, i0, wanted, own(grad_weights),
                        totals);
    }
    if (wants_weights && !wanted[kWeights]) {
      add_source_gradients({graph.weights}, {grad_weights}, graph.leaves, i0, totals);
    }
  }
}

// Returns the outer products of the keys by variant, [B, S, H, H] of `type`; undefined where not
// wanted.
inline std::array<at::Tensor, 3> matrices_of(const Totals& totals, const ContributionSizes& sizes,
                                             at::ScalarType type) {
  std::array<at::Tensor, 3> matrices;
  for (int variant = 0; variant < 3; ++variant) {
    const at::Tensor& outer = totals.outer[variant];
    if (!outer.defined()) continue;
    matrices[variant] = with_memory_for(kMapsBackward, "the outer products of the keys",
                                        [&] { return unpacked(outer, sizes.H, sizes.S).to(type); });
  }
  return matrices;
}

// Returns the outer products of the keys, after the gradients of all pairs and of their inputs.
template <typename Device>
std::array<at::Tensor, 3> through_pairs(const ContributionCall& call, const MapTensors& grad_maps,
                                        const ContributionSizes& sizes, at::ScalarType key_type,
                                        const Wanted& wanted, Totals& totals) {
  if constexpr (StreamsGradients<Device>) {
    if (Device::why_gradients_in_blocks(call, sizes, wanted) == nullptr) {
      const Keys keys = prepare_keys<Device>(call, sizes, at::kFloat);
      auto matrices = Device::streamed_gradients(call, grad_maps, keys, sizes, wanted, totals);
      for (at::Tensor& matrix : matrices) {
        if (matrix.defined()) matrix = matrix.to(key_type);
      }
      return matrices;
    }
  }
  const Keys keys = prepare_keys<Device>(call, sizes, at::kDouble);
  for (int variant = 0; wants_keys(wanted) && variant < 3; ++variant) {
    const at::Tensor& factors = keys.factors[variant];
    if (!factors.defined()) continue;
    totals.outer[variant] = with_memory_for(kMapsBackward, "the outer products of the keys",
                                            [&] { return at::zeros_like(factors); });
  }
  add_gradients_in_blocks<Device>(call, grad_maps, keys, sizes, wanted, totals);
  return matrices_of(totals, sizes, key_type);
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
  for (int map = 0; map < kMaps; ++map) {
    block.maps[map] = block.maps[map] && grad_maps[map].defined();
  }
  const at::Tensor grad_value_norms =
      block.maps[kValueNorms] ? grad_maps[kValueNorms] : at::Tensor();
  block.maps[kValueNorms] = false;  // of the keys only factors are needed
  const at::ScalarType type = arithmetic_type(call);
  // More vectors than dimensions are always linearly dependent: where their sum vanishes, all
  // digits of the outer products are needed.
  const at::ScalarType key_type = sizes.H > sizes.D ? at::kDouble : type;

  Totals totals;
  const auto inputs = differentiable_inputs(call);
  for (size_t i = 0; i < kContributionInputs; ++i) {
    if (!wanted[i]) continue;
    TORCH_CHECK(inputs[i]->defined(), kMapsBackward, ": the gradient of input ", i,
                " is wanted, which was not given");
    const auto options = inputs[i]->options().dtype(i < kValue ? type : key_type);
    totals.inputs[i] = with_memory_for(kMapsBackward, "the gradients",
                                       [&] { return at::zeros(inputs[i]->sizes(), options); });
  }
  const auto matrices = through_pairs<Device>(call, grad_maps, sizes, key_type, wanted, totals);
  if (wants_keys(wanted)) {
    add_key_gradients(stored_keys(call, key_type), matrices, block, sizes, grad_value_norms, wanted,
                      totals);
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
