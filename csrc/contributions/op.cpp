// Schemas of the contribution operators, typed access to them, the public C++ functions.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>

#include "contributions/operators.h"
#include "contributions/reference.h"
#include "support/memory.h"

namespace ikattn {

std::array<at::Tensor*, kContributionInputs> differentiable_inputs(ContributionCall& call) {
  AttentionOptions& options = call.source.options;
  if (!options.key_bias) options.key_bias.emplace();
  if (!options.attn_mask) options.attn_mask.emplace();
  Block& block = call.block;
  return {&call.source.attn_weights, &call.source.query,    &call.source.key,
          &call.source.w1,           &call.source.w2,       &*options.key_bias,
          &*options.attn_mask,       &call.value,           &call.out_proj_weight,
          &block.residual,           &block.norm_weight[0], &block.norm_scale[0],
          &block.norm_weight[1],     &block.norm_scale[1]};
}

namespace {

#define IKATTN_BLOCK_SCHEMA                                                                 \
  "Tensor? residual=None, Tensor? norm_weight=None, Tensor? norm_scale=None, "              \
  "bool norm_centered=True, Tensor? second_norm_weight=None, "                              \
  "Tensor? second_norm_scale=None, bool second_norm_centered=True, "                        \
  "Tensor? query_padding=None, Tensor? key_padding=None, int diagonal=0, bool[6] maps) -> " \
  "(Tensor value_norms, Tensor summed, Tensor with_residual, Tensor with_norm, "            \
  "Tensor encoder, Tensor mixing_ratios)"
#define IKATTN_SOURCE_SCHEMA \
  "Tensor? w1=None, Tensor? w2=None, " IKATTN_OPTION_SCHEMA ", float? scale=None, "
#define IKATTN_GIVEN_ARGUMENTS \
  "(Tensor attn_weights, Tensor value, Tensor out_proj_weight, *, " IKATTN_BLOCK_SCHEMA
#define IKATTN_STREAMED_ARGUMENTS                                                          \
  "(Tensor query, Tensor key, Tensor value, Tensor out_proj_weight, " IKATTN_SOURCE_SCHEMA \
      IKATTN_BLOCK_SCHEMA
// The argument `inputs` has the inputs of a ContributionCall in the order of its gradients, then
// query_padding and key_padding; gradients that are not wanted are empty.
#define IKATTN_BACKWARD_ARGUMENTS                                                       \
  "(Tensor?[] grad_maps, Tensor?[] inputs, float? p, bool is_causal, bool enable_gqa, " \
  "float eps, float? magnitude_scale, float? scale, bool norm_centered, "               \
  "bool second_norm_centered, int diagonal, bool[6] maps, bool[14] wanted) -> Tensor[]"

TORCH_LIBRARY_FRAGMENT(ikattn, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def("contribution_maps" IKATTN_GIVEN_ARGUMENTS, tags);
  m.def("streamed_contribution_maps" IKATTN_STREAMED_ARGUMENTS, tags);
  m.def("contribution_maps_backward" IKATTN_BACKWARD_ARGUMENTS, tags);
  m.def(
      "alti_distances(Tensor weights, Tensor heads, Tensor output, Tensor residual, int diagonal, "
      "bool is_squared) -> Tensor");
  m.def("check_contribution_maps" IKATTN_GIVEN_ARGUMENTS, tags);
  m.def("check_streamed_contribution_maps" IKATTN_STREAMED_ARGUMENTS, tags);
  m.def("check_contribution_maps_backward" IKATTN_BACKWARD_ARGUMENTS, tags);
  m.def("contribution_maps_reference" IKATTN_GIVEN_ARGUMENTS, tags);
  m.def("streamed_contribution_maps_reference" IKATTN_STREAMED_ARGUMENTS, tags);
}

// The reference as operators without kernels, so that every transformation sees through them.
TORCH_LIBRARY_IMPL(ikattn, CompositeImplicitAutograd, m) {
  implement<"contribution_maps_reference", MapsOperator<checked_reference_maps>::given>(m);
  implement<"streamed_contribution_maps_reference", MapsOperator<checked_reference_maps>::streamed>(
      m);
}

TORCH_LIBRARY_IMPL(ikattn, FuncTorchBatchedDecomposition, m) {
  register_contribution_maps<checked_reference_maps>(m);
}

// --- Operators that only check the arguments of others, as in
// attention/operator/check_operators.cpp; what they return is empty

bool is_symbolic(ContributionCall call) {
  const Block& block = call.block;
  if (has_symbols({&block.query_padding, &block.key_padding})) return true;
  const auto inputs = differentiable_inputs(call);
  return std::any_of(inputs.begin(), inputs.end(),
                     [](const at::Tensor* input) { return has_symbols({input}); });
}

MapTensors no_maps(const ContributionCall& call) {
  if (is_symbolic(call)) {
    check_placement(call);
  } else {
    check_contributions(call);
  }
  return {};
}

std::array<at::Tensor, kContributionInputs> no_gradients(
    const MapTensors& grad_maps, const ContributionCall& call,
    const std::array<bool, kContributionInputs>&) {
  check_placement(call);
  bool symbolic = is_symbolic(call);
  for (const at::Tensor& gradient : grad_maps) {
    check_placement(kMapsBackward, "value", call.value, {{"grad_maps", &gradient}});
    symbolic = symbolic || has_symbols({&gradient});
  }
  if (!symbolic) check_contributions_backward(grad_maps, call);
  return {};
}

TORCH_LIBRARY_IMPL(ikattn, CompositeImplicitAutograd, m) {
  m.impl("check_contribution_maps", MapsOperator<no_maps>::given);
  m.impl("check_streamed_contribution_maps", MapsOperator<no_maps>::streamed);
  m.impl("check_contribution_maps_backward", maps_backward<no_gradients>);
}

c10::List<std::optional<at::Tensor>> list_of(at::ArrayRef<at::Tensor> tensors) {
  c10::List<std::optional<at::Tensor>> list;
  for (const at::Tensor& tensor : tensors) list.push_back(or_none(tensor));
  return list;
}

MapTensors tensors_of(const MapTuple& maps) {
  return std::apply([](const auto&... map) { return MapTensors{map...}; }, maps);
}

Block block_of(const ContributionOptions& options) {
  Block block;
  block.residual = or_undefined(options.residual);
  const std::optional<NormStats>* norms[2] = {&options.norm, &options.second_norm};
  for (int n = 0; n < 2; ++n) {
    if (!norms[n]->has_value()) continue;
    block.norm_weight[n] = (*norms[n])->weight;
    block.norm_scale[n] = (*norms[n])->scale;
    block.centered[n] = (*norms[n])->centered;
  }
  block.query_padding = or_undefined(options.query_padding);
  block.key_padding = or_undefined(options.key_padding);
  block.diagonal = options.diagonal;
  block.maps = {options.value_norms,
                options.summed,
                options.with_residual && options.residual.has_value(),
                options.with_norm && options.norm.has_value(),
                options.encoder && options.second_norm.has_value(),
                options.mixing_ratios && options.residual.has_value()};
  return block;
}

ContributionMaps public_maps(const ContributionCall& call) {
  MapTensors maps = call_contribution_maps(call);
  for (int map = 0; map < kMaps; ++map) {
    if (!call.block.maps[map]) maps[map] = at::Tensor();
  }
  return {maps[0], maps[1], maps[2], maps[3], maps[4], maps[5]};
}

}  // namespace

// --- Typed access

MapTensors call_contribution_maps(const ContributionCall& call) {
  const WeightsSource& source = call.source;
  if (source.attn_weights.defined()) {
    constexpr Operator<"contribution_maps", ContributionMapsSignature> op;
    return tensors_of(
        op(source.attn_weights, call.value, call.out_proj_weight, IKATTN_BLOCK_FIELDS(call.block)));
  }
  constexpr Operator<"streamed_contribution_maps", StreamedMapsSignature> op;
  return tensors_of(op(source.query, source.key, call.value, call.out_proj_weight,
                       or_none(source.w1), or_none(source.w2), source.options, source.scale,
                       IKATTN_BLOCK_FIELDS(call.block)));
}

std::array<at::Tensor, kContributionInputs> call_contribution_maps_backward(
    const MapTensors& grad_maps, const ContributionCall& given,
    std::array<bool, kContributionInputs> wanted) {
  constexpr Operator<"contribution_maps_backward", MapsBackwardSignature> op;
  ContributionCall call = given;
  std::vector<at::Tensor> inputs;
  for (const at::Tensor* input : differentiable_inputs(call)) inputs.push_back(*input);
  const Block& block = call.block;
  inputs.push_back(block.query_padding);
  inputs.push_back(block.key_padding);
  const AttentionOptions& options = call.source.options;
  const std::vector<at::Tensor> found =
      op(list_of(grad_maps), list_of(inputs), options.p, options.is_causal, options.enable_gqa,
         options.eps, options.magnitude_scale, call.source.scale, block.centered[0],
         block.centered[1], block.diagonal, block.maps, wanted);
  std::array<at::Tensor, kContributionInputs> gradients;
  for (size_t i = 0; i < kContributionInputs; ++i) {
    if (wanted[i]) gradients[i] = found[i];
  }
  return gradients;
}

// --- Public functions

ContributionMaps contributions(const at::Tensor& attn_weights, const at::Tensor& value,
                               const at::Tensor& out_proj_weight,
                               const ContributionOptions& options) {
  ContributionCall call;
  call.source.attn_weights = attn_weights;
  call.value = value;
  call.out_proj_weight = out_proj_weight;
  call.block = block_of(options);
  return public_maps(call);
}

ContributionMaps streamed_contributions(const at::Tensor& query, const at::Tensor& key,
                                        const at::Tensor& value, const at::Tensor& out_proj_weight,
                                        const AttentionSource& source,
                                        const ContributionOptions& options) {
  ContributionCall call;
  call.source.query = query;
  call.source.key = key;
  call.source.w1 = or_undefined(source.w1);
  call.source.w2 = or_undefined(source.w2);
  call.source.options = source.options;
  call.source.scale = source.scale;
  call.value = value;
  call.out_proj_weight = out_proj_weight;
  call.block = block_of(options);
  return public_maps(call);
}

}  // namespace ikattn
