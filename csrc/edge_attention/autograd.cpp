// The Autograd key of edge_attention_from_features: kernels forward and backward, and the
// reference's graph where torch.func, forward-mode duals or create_graph need it.
#include "support/autograd.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include "edge_attention/operators.h"
#include "edge_attention/reference.h"
#include "support/memory.h"

namespace ikattn {
namespace {

constexpr size_t kInputs = 5;  // query_features, key_features, value, key_logits, edge_logits

class FromEdgeFeatures : public torch::autograd::Function<FromEdgeFeatures> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& query_features,
                               const at::Tensor& key_features, const at::Tensor& value,
                               const at::Tensor& key_logits,
                               const std::optional<at::Tensor>& edge_logits,
                               const EdgeFeatures& call) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto [output, weights, log_normalizer] = call_from_edge_features(call);
    ctx->save_for_backward({query_features, key_features, value, key_logits,
                            or_undefined(edge_logits), call.keep, call.rowptr, call.col, output,
                            log_normalizer});
    ctx->saved_data["eps"] = call.eps;
    ctx->saved_data["rescale"] = call.rescale;
    ctx->saved_data["negative_slope"] = call.negative_slope;
    ctx->mark_non_differentiable({log_normalizer});
    ctx->set_materialize_grads(false);
    return {output, weights, log_normalizer};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(kInputs + 1);  // the inputs, then the call
    if (!grads[0].defined() && !grads[1].defined()) return result;
    const variable_list saved = ctx->get_saved_variables();
    const EdgeFeatures call{saved[0],
                            saved[1],
                            saved[2],
                            saved[3],
                            saved[4],
                            saved[5],
                            saved[6],
                            saved[7],
                            ctx->saved_data["eps"].toOptional<double>(),
                            ctx->saved_data["rescale"].toDouble(),
                            ctx->saved_data["negative_slope"].toDouble()};
    const std::array<at::Tensor, kInputs> inputs = {saved[0], saved[1], saved[2], saved[3],
                                                    saved[4]};
    const auto wanted = wanted_gradients<kInputs>(ctx, inputs);
    std::array<at::Tensor, kInputs> gradients;
    const bool creates_graph = at::GradMode::is_enabled();
    if (creates_graph || is_batched(grads[0]) || is_batched(grads[1])) {
      const at::AutoGradMode records(true);
      const auto views = views_of(inputs);
      EdgeFeatures of_views = call;
      of_views.query_features = views[0];
      of_views.key_features = views[1];
      of_views.value = views[2];
      of_views.key_logits = views[3];
      of_views.edge_logits = views[4];
      const EdgeResults found = reference_from_edge_features(of_views);
      variable_list outputs, grad_outputs;
      const std::array<at::Tensor, 2> results = {std::get<0>(found), std::get<1>(found)};
      for (size_t i = 0; i < 2; ++i) {
        if (!grads[i].defined() || !results[i].requires_grad()) continue;
        outputs.push_back(results[i]);
        grad_outputs.push_back(grads[i]);
      }
      gradients =
          differentiable_gradients<kInputs>(outputs, grad_outputs, views, wanted, creates_graph);
    } else {
      const at::Tensor grad_output = grads[0].defined() ? grads[0] : at::zeros_like(saved[8]);
      const auto [grad_query, of_edges] =
          call_edge_query_gradients(call, saved[8], saved[9], grad_output, or_none(grads[1]));
      gradients[0] = grad_query;
      if (wanted[1] || wanted[2] || wanted[3]) {
        std::tie(gradients[1], gradients[2], gradients[3]) = call_edge_key_gradients(
            of_edges, saved[0], grad_output, call.rowptr, call.col, saved[1].sym_size(0));
      }
      if (wanted[4]) {
        gradients[4] = of_edges.select(1, 0);
        if (call.edge_logits.sym_size(1) == 1) gradients[4] = gradients[4].sum(1, true);
      }
      for (size_t k = 0; k < kInputs; ++k) {
        if (!wanted[k]) gradients[k] = at::Tensor();
      }
    }
    std::move(gradients.begin(), gradients.end(), result.begin());
    return result;
  }
};

EdgeResults from_edge_features_autograd(const EdgeFeatures& call) {
  check_edge_features(kFromEdgeFeatures, call);
  const std::optional<at::Tensor> edge_logits = or_none(call.edge_logits);
  if (any_transformed({&call.query_features, &call.key_features, &call.value, &call.key_logits},
                      {&edge_logits})) {
    return reference_from_edge_features(call);
  }
  if (!is_recorded({&call.query_features, &call.key_features, &call.value, &call.key_logits},
                   {&edge_logits})) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return call_from_edge_features(call);
  }
  const variable_list results = FromEdgeFeatures::apply(
      call.query_features, call.key_features, call.value, call.key_logits, edge_logits, call);
  return {results[0], results[1], results[2]};
}

TORCH_LIBRARY_IMPL(ikattn, Autograd, m) {
  implement<"edge_attention_from_features", from_edge_features<from_edge_features_autograd>>(m);
}

}  // namespace
}  // namespace ikattn
