// The Autograd key of the operators of moments. References and normalizers are constants, for they
// cancel in every attention.
#include "support/autograd.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "moments/arguments.h"
#include "moments/reference.h"
#include "support/checks.h"
#include "support/memory.h"

namespace ikattn {
namespace {

class KeyMomentsFunction : public torch::autograd::Function<KeyMomentsFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& key_features,
                               const at::Tensor& logits, const at::Tensor& value) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [moments, reference] = call_key_moments(key_features, logits, value);
    ctx->save_for_backward({key_features, logits, value, reference});
    ctx->mark_non_differentiable({reference});
    ctx->set_materialize_grads(false);
    return {moments, reference};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(3);
    if (!grads[0].defined()) return result;
    const variable_list saved = ctx->get_saved_variables();
    const std::array<at::Tensor, 3> inputs = {saved[0], saved[1], saved[2]};
    const auto wanted = wanted_gradients<3>(ctx, inputs);
    std::array<at::Tensor, 3> gradients;
    if (at::GradMode::is_enabled()) {
      const auto views = views_of(inputs);
      const at::Tensor moments = std::get<0>(reference_key_moments(views[0], views[1], views[2]));
      gradients = differentiable_gradients<3>({moments}, {grads[0]}, views, wanted);
    } else {
      gradients = only_wanted<3>(
          call_key_moments_backward(grads[0], inputs[0], inputs[1], inputs[2], saved[3], wanted),
          wanted);
    }
    std::move(gradients.begin(), gradients.end(), result.begin());
    return result;
  }
};

class FromMomentsFunction : public torch::autograd::Function<FromMomentsFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& query_features,
                               const at::Tensor& moments, const at::Tensor& reference, double eps) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [output, log_normalizer] = call_from_moments(query_features, moments, reference, eps);
    ctx->save_for_backward({query_features, moments, reference, output, log_normalizer});
    ctx->saved_data["eps"] = eps;
    ctx->mark_non_differentiable({log_normalizer});
    ctx->set_materialize_grads(false);
    return {output, log_normalizer};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(4);  // query_features and moments, then reference and eps
    if (!grads[0].defined()) return result;
    const variable_list saved = ctx->get_saved_variables();
    const std::array<at::Tensor, 2> inputs = {saved[0], saved[1]};
    const double eps = ctx->saved_data["eps"].toDouble();
    const auto wanted = wanted_gradients<2>(ctx, inputs);
    std::array<at::Tensor, 2> gradients;
    if (at::GradMode::is_enabled()) {
      const auto views = views_of(inputs);
      const at::Tensor output =
          std::get<0>(reference_from_moments(views[0], views[1], saved[2], eps));
      gradients = differentiable_gradients<2>({output}, {grads[0]}, views, wanted);
    } else {
      gradients =
          only_wanted<2>(call_from_moments_backward(grads[0], inputs[0], inputs[1], saved[2],
                                                    saved[3], saved[4], eps, wanted),
                         wanted);
    }
    std::move(gradients.begin(), gradients.end(), result.begin());
    return result;
  }
};

class CausalFunction : public torch::autograd::Function<CausalFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& query_features,
                               const at::Tensor& key_features, const at::Tensor& logits,
                               const at::Tensor& value, const at::Tensor& moments,
                               const at::Tensor& reference, double eps) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [output, log_normalizer, all_moments, all_reference] =
        call_causal(query_features, key_features, logits, value, moments, reference, eps);
    ctx->save_for_backward(
        {query_features, key_features, logits, value, moments, reference, output, log_normalizer});
    ctx->saved_data["eps"] = eps;
    ctx->mark_non_differentiable({log_normalizer, all_reference});
    ctx->set_materialize_grads(false);
    return {output, log_normalizer, all_moments, all_reference};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(7);  // the five differentiable inputs, then reference and eps
    if (!grads[0].defined() && !grads[2].defined()) return result;
    const variable_list saved = ctx->get_saved_variables();
    const std::array<at::Tensor, 5> inputs = {saved[0], saved[1], saved[2], saved[3], saved[4]};
    const double eps = ctx->saved_data["eps"].toDouble();
    const auto wanted = wanted_gradients<5>(ctx, inputs);
    const at::Tensor grad_output = grads[0].defined() ? grads[0] : at::zeros_like(saved[6]);
    std::array<at::Tensor, 5> gradients;
    if (at::GradMode::is_enabled()) {
      const auto views = views_of(inputs);
      const auto [output, logs, all_moments, all] =
          reference_causal(views[0], views[1], views[2], views[3], views[4], saved[5], eps);
      variable_list outputs = {output}, incoming = {grad_output};
      if (grads[2].defined()) {
        outputs.push_back(all_moments);
        incoming.push_back(grads[2]);
      }
      gradients = differentiable_gradients<5>(outputs, incoming, views, wanted);
    } else {
      gradients = only_wanted<5>(
          call_causal_backward(grad_output, or_none(grads[2]), inputs[0], inputs[1], inputs[2],
                               inputs[3], inputs[4], saved[5], saved[6], saved[7], eps, wanted),
          wanted);
    }
    std::move(gradients.begin(), gradients.end(), result.begin());
    return result;
  }
};

TwoTensors key_moments_autograd(const at::Tensor& key_features, const at::Tensor& logits,
                                const at::Tensor& value) {
  check_placement("key_moments", "key_features", key_features,
                  {{"logits", &logits}, {"value", &value}});
  if (any_transformed({&key_features, &logits, &value}, {})) {
    check_key_moments(key_features, logits, value);
    return reference_key_moments(key_features, logits, value);
  }
  if (!is_recorded({&key_features, &logits, &value}, {})) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return call_key_moments(key_features, logits, value);
  }
  variable_list result = KeyMomentsFunction::apply(key_features, logits, value);
  return {std::move(result[0]), std::move(result[1])};
}

void add_key_moments_autograd(at::Tensor& moments, at::Tensor& reference,
                              const at::Tensor& key_features, const at::Tensor& logits,
                              const at::Tensor& value) {
  TORCH_CHECK(!is_recorded({&moments, &key_features, &logits, &value}, {}) &&
                  !any_transformed({&moments, &key_features, &logits, &value}, {}),
              "add_key_moments_: no gradient would reach what requires one; call it under "
              "torch.no_grad(), or key_moments and merge_moments");
  // This is checked before anything is written, where torch would refuse only afterwards.
  TORCH_CHECK(
      c10::InferenceMode::is_enabled() || (!moments.is_inference() && !reference.is_inference()),
      "add_key_moments_: moments and reference must be ordinary tensors outside of "
      "torch.inference_mode(), got those of an inference mode; clone them");
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    call_add_key_moments(moments, reference, key_features, logits, value);
  }
  for (at::Tensor* written : {&moments, &reference}) {
    if (!written->is_inference()) torch::autograd::increment_version(*written);
  }
}

TwoTensors from_moments_autograd(const at::Tensor& query_features, const at::Tensor& moments,
                                 const at::Tensor& reference, double eps) {
  check_placement("attention_from_moments", "query_features", query_features,
                  {{"moments", &moments}, {"reference", &reference}});
  if (any_transformed({&query_features, &moments}, {})) {
    check_from_moments(query_features, moments, reference, eps);
    return reference_from_moments(query_features, moments, reference, eps);
  }
  if (!is_recorded({&query_features, &moments}, {})) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return call_from_moments(query_features, moments, reference, eps);
  }
  variable_list result = FromMomentsFunction::apply(query_features, moments, reference, eps);
  return {std::move(result[0]), std::move(result[1])};
}

FourTensors causal_autograd(const at::Tensor& query_features, const at::Tensor& key_features,
                            const at::Tensor& logits, const at::Tensor& value,
                            const at::Tensor& moments, const at::Tensor& reference, double eps) {
  check_placement("causal_attention_from_moments", "query_features", query_features,
                  {{"key_features", &key_features},
                   {"logits", &logits},
                   {"value", &value},
                   {"moments", &moments},
                   {"reference", &reference}});
  if (any_transformed({&query_features, &key_features, &logits, &value, &moments}, {})) {
    check_causal(query_features, key_features, logits, value, moments, reference, eps);
    return reference_causal(query_features, key_features, logits, value, moments, reference, eps);
  }
  if (!is_recorded({&query_features, &key_features, &logits, &value, &moments}, {})) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return call_causal(query_features, key_features, logits, value, moments, reference, eps);
  }
  variable_list result =
      CausalFunction::apply(query_features, key_features, logits, value, moments, reference, eps);
  return {std::move(result[0]), std::move(result[1]), std::move(result[2]), std::move(result[3])};
}

TORCH_LIBRARY_IMPL(ikattn, Autograd, m) {
  implement<"causal_attention_from_moments", causal_autograd>(m);
  implement<"key_moments", key_moments_autograd>(m);
  implement<"add_key_moments_", add_key_moments_autograd>(m);
  implement<"attention_from_moments", from_moments_autograd>(m);
}

}  // namespace
}  // namespace ikattn
