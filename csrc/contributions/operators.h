// The contribution operators' dispatcher signatures over one function of a ContributionCall.
#pragma once

#include <torch/library.h>

#include "contributions/arguments.h"

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

template <MapTensors (*kMapsOf)(const ContributionCall&)>
void register_contribution_maps(torch::Library& m) {
  m.impl("contribution_maps", MapsOperator<kMapsOf>::given);
  m.impl("streamed_contribution_maps", MapsOperator<kMapsOf>::streamed);
}

}  // namespace ikattn
