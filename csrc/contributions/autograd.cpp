// The Autograd key of the contribution operators: kernels forward, the reference's graph backward,
// and the reference throughout where torch.func, forward-mode duals or create_graph need it.
#include "support/autograd.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>

#include "attention/operator/saved_options.h"
#include "contributions/operators.h"
#include "contributions/reference.h"

namespace ikattn {
namespace {

class Maps : public torch::autograd::Function<Maps> {
 public:
  // `present` has the differentiable inputs that are defined, for autograd; all are in `call`.
  static variable_list forward(AutogradContext* ctx, at::TensorList /*present*/,
                               const ContributionCall& call) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const MapTensors maps = call_contribution_maps(call);
    variable_list saved;
    ContributionCall inputs = call;
    for (const at::Tensor* input : differentiable_inputs(inputs)) saved.push_back(*input);
    saved.push_back(call.block.query_padding);
    saved.push_back(call.block.key_padding);
    ctx->save_for_backward(saved);
    save_numbers(ctx, call.source.options);
    ctx->saved_data["scale"] = call.source.scale;
    ctx->saved_data["norm_centered"] = call.block.centered[0];
    ctx->saved_data["second_norm_centered"] = call.block.centered[1];
    ctx->saved_data["diagonal"] = call.block.diagonal;
    int64_t wanted = 0;
    variable_list results(maps.begin(), maps.end()), unwanted;
    for (int map = 0; map < kMaps; ++map) {
      if (call.block.maps[map]) wanted |= int64_t{1} << map;
      if (!call.block.maps[map]) unwanted.push_back(results[map]);
    }
    ctx->saved_data["maps"] = wanted;
    ctx->mark_non_differentiable(unwanted);
    ctx->set_materialize_grads(false);
    return results;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    MapTensors grad_maps;
    std::copy(grads.begin(), grads.end(), grad_maps.begin());
    ContributionCall call = saved_call(ctx);
    std::array<at::Tensor, kContributionInputs> inputs;
    const auto addresses = differentiable_inputs(call);
    for (size_t i = 0; i < kContributionInputs; ++i) inputs[i] = *addresses[i];
    const auto wanted = wanted_gradients<kContributionInputs>(ctx, inputs);
    std::array<at::Tensor, kContributionInputs> gradients;
    // vmap cannot loop over an operator that takes a list of tensors.
    const bool batched = std::any_of(grads.begin(), grads.end(), is_batched);
    const bool creates_graph = at::GradMode::is_enabled();
    if (creates_graph || batched) {
      const at::AutoGradMode records(true);
      const ExactArithmetic exact;  // in what comes back, too
      const auto views = views_of(inputs);
      for (size_t i = 0; i < kContributionInputs; ++i) *addresses[i] = views[i];
      const MapTensors maps = reference_maps(call);
      variable_list outputs, grad_outputs;
      for (int map = 0; map < kMaps; ++map) {
        if (!grad_maps[map].defined() || !maps[map].defined()) continue;
        if (!maps[map].requires_grad()) continue;  // of an input that no gradient is asked for
        outputs.push_back(maps[map]);
        grad_outputs.push_back(grad_maps[map]);
      }
      gradients = differentiable_gradients<kContributionInputs>(outputs, grad_outputs, views,
                                                                wanted, creates_graph);
    } else {
      gradients = call_contribution_maps_backward(grad_maps, call, wanted);
    }
    variable_list result;
    for (size_t i = 0; i < kContributionInputs; ++i) {
      if (inputs[i].defined()) result.push_back(gradients[i]);
    }
    result.emplace_back();  // the call
    return result;
  }

 private:
  static ContributionCall saved_call(AutogradContext* ctx) {
    ContributionCall call;
    call.source.options = saved_options(ctx, at::Tensor(), at::Tensor(), at::Tensor());
    const variable_list saved = ctx->get_saved_variables();
    const auto targets = differentiable_inputs(call);
    for (size_t i = 0; i < kContributionInputs; ++i) *targets[i] = saved[i];
    Block& block = call.block;
    block.query_padding = saved[kContributionInputs];
    block.key_padding = saved[kContributionInputs + 1];
    call.source.scale = ctx->saved_data["scale"].toOptional<double>();
    block.centered = {ctx->saved_data["norm_centered"].toBool(),
                      ctx->saved_data["second_norm_centered"].toBool()};
    block.diagonal = ctx->saved_data["diagonal"].toInt();
    const int64_t maps = ctx->saved_data["maps"].toInt();
    for (int map = 0; map < kMaps; ++map) block.maps[map] = (maps >> map & 1) != 0;
    return call;
  }
};

MapTensors maps_autograd(const ContributionCall& given) {
  ContributionCall call = given;
  check_placement(call);
  variable_list present;
  bool transformed = false;
  for (const at::Tensor* input : differentiable_inputs(call)) {
    if (input->defined()) present.push_back(*input);
    transformed = transformed || is_transformed(*input);
  }
  const ExactArithmetic exact;
  if (transformed) return checked_reference_maps(call);
  const variable_list maps = Maps::apply(at::TensorList(present), call);
  MapTensors result;
  std::copy(maps.begin(), maps.end(), result.begin());
  return result;
}

TORCH_LIBRARY_IMPL(ikattn, Autograd, m) { register_contribution_maps<maps_autograd>(m); }

}  // namespace
}  // namespace ikattn
