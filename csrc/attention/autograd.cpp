// The Autograd key of the attention operators.
//
// A call without anything special goes to the kernels, and so does its backward. The differentiable
// reference steps in where the kernels cannot: under torch.func and for forward-mode duals (in the
// forward), and under create_graph (in the backward).
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <initializer_list>

#include "attention/arguments.h"
#include "attention/reference.h"

namespace ikattn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool is_transformed(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.key_set().has(c10::DispatchKey::FuncTorchGradWrapper) ||
                              tensor._fw_grad(0).defined());
}

bool any_transformed(std::initializer_list<const at::Tensor*> tensors,
                     std::initializer_list<const std::optional<at::Tensor>*> optional) {
  for (const at::Tensor* tensor : tensors) {
    if (is_transformed(*tensor)) return true;
  }
  for (const std::optional<at::Tensor>* tensor : optional) {
    if (tensor->has_value() && is_transformed(**tensor)) return true;
  }
  return false;
}

at::Tensor or_undefined(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() ? *tensor : at::Tensor();
}

std::optional<at::Tensor> or_none(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

// What of AttentionOptions is not a tensor.
void save_numbers(AutogradContext* ctx, const AttentionOptions& options) {
  ctx->saved_data["p"] = options.p;
  ctx->saved_data["dropout_p"] = options.dropout_p;
  ctx->saved_data["is_causal"] = options.is_causal;
  ctx->saved_data["enable_gqa"] = options.enable_gqa;
  ctx->saved_data["eps"] = options.eps;
  ctx->saved_data["magnitude_scale"] = options.magnitude_scale;
}

AttentionOptions saved_options(AutogradContext* ctx, const at::Tensor& key_bias,
                               const at::Tensor& attn_mask, const at::Tensor& dropout_seed) {
  AttentionOptions options;
  options.p = ctx->saved_data["p"].toOptional<double>();
  options.key_bias = or_none(key_bias);
  options.attn_mask = or_none(attn_mask);
  options.dropout_p = ctx->saved_data["dropout_p"].toDouble();
  options.is_causal = ctx->saved_data["is_causal"].toBool();
  options.enable_gqa = ctx->saved_data["enable_gqa"].toBool();
  options.eps = ctx->saved_data["eps"].toDouble();
  options.magnitude_scale = ctx->saved_data["magnitude_scale"].toOptional<double>();
  options.dropout_seed = or_none(dropout_seed);
  return options;
}

// Which of the inputs want a gradient. The context numbers the tensors that are present.
template <size_t kCount>
std::array<bool, kCount> wanted_gradients(AutogradContext* ctx,
                                          const std::array<at::Tensor, kCount>& inputs) {
  std::array<bool, kCount> wanted{};
  size_t edge = 0;
  for (size_t i = 0; i < kCount; ++i) {
    if (!inputs[i].defined()) continue;
    wanted[i] = ctx->needs_input_grad(edge++) && inputs[i].is_floating_point();
  }
  return wanted;
}

// Gradients of `output` by the reference's graph, itself differentiable.
template <size_t kCount>
std::array<at::Tensor, kCount> differentiable_gradients(
    const at::Tensor& output, const at::Tensor& grad_output,
    const std::array<at::Tensor, kCount>& inputs, const std::array<bool, kCount>& wanted) {
  variable_list sources;
  for (size_t i = 0; i < kCount; ++i) {
    if (wanted[i]) sources.push_back(inputs[i]);
  }
  const variable_list found = torch::autograd::grad({output}, sources, {grad_output},
                                                    /*retain_graph=*/true, /*create_graph=*/true,
                                                    /*allow_unused=*/true);
  std::array<at::Tensor, kCount> gradients;
  size_t next = 0;
  for (size_t i = 0; i < kCount; ++i) {
    if (wanted[i]) gradients[i] = found[next++];
  }
  return gradients;
}

// Undefined where not wanted: the operators return empty tensors there.
template <size_t kCount, typename Tuple>
std::array<at::Tensor, kCount> only_wanted(const Tuple& all,
                                           const std::array<bool, kCount>& wanted) {
  std::array<at::Tensor, kCount> gradients =
      std::apply([](const auto&... each) { return std::array<at::Tensor, kCount>{each...}; }, all);
  for (size_t i = 0; i < kCount; ++i) {
    if (!wanted[i]) gradients[i] = at::Tensor();
  }
  return gradients;
}

class Attention : public torch::autograd::Function<Attention> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value, const at::Tensor& w1,
                               const std::optional<at::Tensor>& w2,
                               const std::optional<at::Tensor>& key_bias,
                               const std::optional<at::Tensor>& attn_mask,
                               const AttentionOptions& options) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [output, log_normalizer] = call_attention(query, key, value, w1, w2, options);
    ctx->save_for_backward({query, key, value, w1, or_undefined(w2), or_undefined(key_bias),
                            or_undefined(attn_mask), or_undefined(options.dropout_seed), output,
                            log_normalizer});
    save_numbers(ctx, options);
    ctx->mark_non_differentiable({log_normalizer});
    ctx->set_materialize_grads(false);
    return {output, log_normalizer};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(8);  // the seven differentiable inputs, then the options
    if (!grads[0].defined()) return result;
    const variable_list saved = ctx->get_saved_variables();
    const std::array<at::Tensor, 7> inputs = {saved[0], saved[1], saved[2], saved[3],
                                              saved[4], saved[5], saved[6]};
    const AttentionOptions options = saved_options(ctx, saved[5], saved[6], saved[7]);
    const auto wanted = wanted_gradients<7>(ctx, inputs);
    const std::optional<at::Tensor> w2 = or_none(inputs[4]);
    std::array<at::Tensor, 7> gradients;
    if (at::GradMode::is_enabled()) {
      const at::Tensor output =
          std::get<0>(reference_attention(inputs[0], inputs[1], inputs[2], inputs[3], w2, options));
      gradients = differentiable_gradients<7>(output, grads[0], inputs, wanted);
    } else {
      gradients = only_wanted<7>(
          call_attention_backward(grads[0], inputs[0], inputs[1], inputs[2], inputs[3], w2,
                                  saved[8], saved[9], options, wanted),
          wanted);
    }
    std::move(gradients.begin(), gradients.end(), result.begin());
    return result;
  }
};

class Weights : public torch::autograd::Function<Weights> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& w1, const std::optional<at::Tensor>& w2,
                            const std::optional<at::Tensor>& key_bias,
                            const std::optional<at::Tensor>& attn_mask,
                            const AttentionOptions& options, bool average_heads) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const at::Tensor weights = call_weights(query, key, w1, w2, options, average_heads);
    ctx->save_for_backward({query, key, w1, or_undefined(w2), or_undefined(key_bias),
                            or_undefined(attn_mask), or_undefined(options.dropout_seed)});
    save_numbers(ctx, options);
    ctx->saved_data["average_heads"] = average_heads;
    ctx->set_materialize_grads(false);
    return weights;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(8);  // the six differentiable inputs, options, average_heads
    if (!grads[0].defined()) return result;
    const variable_list saved = ctx->get_saved_variables();
    const std::array<at::Tensor, 6> inputs = {saved[0], saved[1], saved[2],
                                              saved[3], saved[4], saved[5]};
    const AttentionOptions options = saved_options(ctx, saved[4], saved[5], saved[6]);
    const bool average_heads = ctx->saved_data["average_heads"].toBool();
    const auto wanted = wanted_gradients<6>(ctx, inputs);
    const std::optional<at::Tensor> w2 = or_none(inputs[3]);
    std::array<at::Tensor, 6> gradients;
    if (at::GradMode::is_enabled()) {
      const at::Tensor weights =
          reference_weights(inputs[0], inputs[1], inputs[2], w2, options, average_heads);
      gradients = differentiable_gradients<6>(weights, grads[0], inputs, wanted);
    } else {
      gradients = only_wanted<6>(call_weights_backward(grads[0], inputs[0], inputs[1], inputs[2],
                                                       w2, options, average_heads, wanted),
                                 wanted);
    }
    std::move(gradients.begin(), gradients.end(), result.begin());
    return result;
  }
};

class Features : public torch::autograd::Function<Features> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& w1,
                            const std::optional<at::Tensor>& w2) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({x, w1, or_undefined(w2)});
    ctx->set_materialize_grads(false);
    return call_features(x, w1, w2);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(3);
    if (!grads[0].defined()) return result;
    const variable_list saved = ctx->get_saved_variables();
    const std::array<at::Tensor, 3> inputs = {saved[0], saved[1], saved[2]};
    const auto wanted = wanted_gradients<3>(ctx, inputs);
    const std::optional<at::Tensor> w2 = or_none(inputs[2]);
    std::array<at::Tensor, 3> gradients;
    if (at::GradMode::is_enabled()) {
      const at::Tensor features =
          reference_features(inputs[0], inputs[1], w2).to(inputs[0].scalar_type());
      gradients = differentiable_gradients<3>(features, grads[0], inputs, wanted);
    } else {
      gradients = only_wanted<3>(call_features_backward(grads[0], inputs[0], inputs[1], w2, wanted),
                                 wanted);
    }
    std::move(gradients.begin(), gradients.end(), result.begin());
    return result;
  }
};

std::tuple<at::Tensor, at::Tensor> attention_autograd(const at::Tensor& query,
                                                      const at::Tensor& key,
                                                      const at::Tensor& value, const at::Tensor& w1,
                                                      const std::optional<at::Tensor>& w2,
                                                      IKATTN_OPTION_PARAMETERS) {
  const AttentionOptions options{IKATTN_OPTION_VALUES};
  check_placement("implicit_kernel_attention", query, key, value, w1, w2, options);
  if (any_transformed({&query, &key, &value, &w1}, {&w2, &key_bias, &attn_mask})) {
    return reference_attention(query, key, value, w1, w2, options);
  }
  const variable_list result =
      Attention::apply(query, key, value, w1, w2, key_bias, attn_mask, options);
  return {result[0], result[1]};
}

at::Tensor weights_autograd(const at::Tensor& query, const at::Tensor& key, const at::Tensor& w1,
                            const std::optional<at::Tensor>& w2, IKATTN_OPTION_PARAMETERS,
                            bool average_heads) {
  const AttentionOptions options{IKATTN_OPTION_VALUES};
  check_placement("implicit_kernel_weights", query, key, at::Tensor(), w1, w2, options);
  if (any_transformed({&query, &key, &w1}, {&w2, &key_bias, &attn_mask})) {
    return reference_weights(query, key, w1, w2, options, average_heads);
  }
  return Weights::apply(query, key, w1, w2, key_bias, attn_mask, options, average_heads);
}

at::Tensor features_autograd(const at::Tensor& x, const at::Tensor& w1,
                             const std::optional<at::Tensor>& w2) {
  check_placement("spectral_features", "x", x, {{"w1", &w1}, {"w2", address(w2)}});
  if (any_transformed({&x, &w1}, {&w2})) {
    return reference_features(x, w1, w2).to(x.scalar_type());
  }
  return Features::apply(x, w1, w2);
}

TORCH_LIBRARY_IMPL(ikattn, Autograd, m) {
  m.impl("implicit_kernel_attention", attention_autograd);
  m.impl("implicit_kernel_weights", weights_autograd);
  m.impl("spectral_features", features_autograd);
}

}  // namespace
}  // namespace ikattn
