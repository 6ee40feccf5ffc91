// The contribution operators' dispatcher signatures over one function of a ContributionCall.
#pragma once

#include <torch/library.h>

#include "contributions/arguments.h"
#include "support/memory.h"

namespace ikattn {

// An empty tensor stands for a map that is not there.
inline MapTuple tuple_of(const MapTensors& maps, const at::Tensor& like) {
  const auto or_empty = [&](const at::Tensor& map) {
    return map.defined() ? map : at::empty({0}, like.options().dtype(at::kFloat));
  };
  return {or_empty(maps[0]), or_empty(maps[1]), or_empty(maps[2]),
          or_empty(maps[3]), or_empty(maps[4]), or_empty(maps[5])};
}

template <MapTensors (*kMapsOf)(const ContributionCall&)>
struct MapsOperator {
  static MapTuple given(const at::Tensor& attn_weights, const at::Tensor& value,
                        const at::Tensor& out_proj_weight, IKATTN_BLOCK_PARAMETERS) {
    ContributionCall call;
    call.source.attn_weights = attn_weights;
    return finish(call, value, out_proj_weight, Block{IKATTN_BLOCK_VALUES});
  }

  static MapTuple streamed(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const at::Tensor& out_proj_weight, const std::optional<at::Tensor>& w1,
                           const std::optional<at::Tensor>& w2, IKATTN_OPTION_PARAMETERS,
                           std::optional<double> scale, IKATTN_BLOCK_PARAMETERS) {
    ContributionCall call;
    call.source.query = query;
    call.source.key = key;
    call.source.w1 = or_undefined(w1);
    call.source.w2 = or_undefined(w2);
    call.source.options = AttentionOptions{IKATTN_OPTION_VALUES};
    call.source.scale = scale;
    return finish(call, value, out_proj_weight, Block{IKATTN_BLOCK_VALUES});
  }

 private:
  static MapTuple finish(ContributionCall& call, const at::Tensor& value,
                         const at::Tensor& out_proj_weight, const Block& block) {
    call.value = value;
    call.out_proj_weight = out_proj_weight;
    call.block = block;
    return tuple_of(kMapsOf(call), value);
  }
};

using MapGradientsOf = std::array<at::Tensor, kContributionInputs> (*)(
    const MapTensors& grad_maps, const ContributionCall& call,
    const std::array<bool, kContributionInputs>& wanted);

template <MapGradientsOf kGradientsOf>
std::vector<at::Tensor> maps_backward(const c10::List<std::optional<at::Tensor>>& grad_maps,
                                      const c10::List<std::optional<at::Tensor>>& inputs,
                                      std::optional<double> p, bool is_causal, bool enable_gqa,
                                      double eps, std::optional<double> magnitude_scale,
                                      std::optional<double> scale, bool norm_centered,
                                      bool second_norm_centered, int64_t diagonal,
                                      std::array<bool, kMaps> maps,
                                      std::array<bool, kContributionInputs> wanted) {
  TORCH_CHECK(grad_maps.size() == kMaps && inputs.size() == kContributionInputs + 2,
              "contribution_maps_backward: grad_maps must have ", int{kMaps},
              " entries and inputs ", kContributionInputs + 2, ", got ", grad_maps.size(), " and ",
              inputs.size());
  ContributionCall call;
  const auto targets = differentiable_inputs(call);
  const auto element = [](const c10::List<std::optional<at::Tensor>>& list, size_t index) {
    const at::Tensor tensor = or_undefined(list.get(index));
    return tensor.defined() ? tensor.resolve_neg() : tensor;  // torch resolves none in a list
  };
  for (size_t i = 0; i < kContributionInputs; ++i) *targets[i] = element(inputs, i);
  AttentionOptions& options = call.source.options;
  options.p = p;
  options.is_causal = is_causal;
  options.enable_gqa = enable_gqa;
  options.eps = eps;
  options.magnitude_scale = magnitude_scale;
  call.source.scale = scale;
  Block& block = call.block;
  block.query_padding = element(inputs, kContributionInputs);
  block.key_padding = element(inputs, kContributionInputs + 1);
  block.centered = {norm_centered, second_norm_centered};
  block.diagonal = diagonal;
  block.maps = maps;
  MapTensors gradients;
  for (size_t map = 0; map < kMaps; ++map) gradients[map] = element(grad_maps, map);
  const auto found = kGradientsOf(gradients, call, wanted);
  std::vector<at::Tensor> result;
  for (const at::Tensor& gradient : found) {
    result.push_back(gradient.defined() ? gradient : at::empty({0}, call.value.options()));
  }
  return result;
}

template <MapTensors (*kMapsOf)(const ContributionCall&)>
void register_contribution_maps(torch::Library& m) {
  implement<"contribution_maps", MapsOperator<kMapsOf>::given>(m);
  implement<"streamed_contribution_maps", MapsOperator<kMapsOf>::streamed>(m);
}

}  // namespace ikattn
