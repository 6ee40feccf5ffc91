// The Autograd key of the attention operators.
//
// A call without anything special goes to the kernels, and so does its backward. The differentiable
// reference steps in where the kernels cannot: under torch.func and for forward-mode duals (in the
// forward), and under create_graph (in the backward).
#include "support/autograd.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include "attention/operator/arguments.h"
#include "attention/operator/reference.h"
#include "attention/operator/saved_options.h"
#include "support/memory.h"

namespace ikattn {
namespace {

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
      const auto views = views_of(inputs);
      const at::Tensor output =
          std::get<0>(reference_attention(views[0], views[1], views[2], views[3], or_none(views[4]),
                                          saved_options(ctx, views[5], views[6], saved[7])));
      gradients = differentiable_gradients<7>({output}, {grads[0]}, views, wanted);
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
      const auto views = views_of(inputs);
      const at::Tensor weights =
          reference_weights(views[0], views[1], views[2], or_none(views[3]),
                            saved_options(ctx, views[4], views[5], saved[6]), average_heads);
      gradients = differentiable_gradients<6>({weights}, {grads[0]}, views, wanted);
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
                            const std::optional<at::Tensor>& w2, bool tokens_first) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({x, w1, or_undefined(w2)});
    ctx->set_materialize_grads(false);
    return call_features(x, w1, w2, tokens_first);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(4);  // the inputs, then tokens_first
    if (!grads[0].defined()) return result;
    const variable_list saved = ctx->get_saved_variables();
    const std::array<at::Tensor, 3> inputs = {saved[0], saved[1], saved[2]};
    const auto wanted = wanted_gradients<3>(ctx, inputs);
    const std::optional<at::Tensor> w2 = or_none(inputs[2]);
    std::array<at::Tensor, 3> gradients;
    if (at::GradMode::is_enabled()) {
      const auto views = views_of(inputs);
      const at::Tensor features =
          reference_features(views[0], views[1], or_none(views[2])).to(views[0].scalar_type());
      gradients = differentiable_gradients<3>({features}, {grads[0]}, views, wanted);
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
    check_attention_call(query, key, value, w1, w2, options);
    return reference_attention(query, key, value, w1, w2, options);
  }
  if (!is_recorded({&query, &key, &value, &w1}, {&w2, &key_bias, &attn_mask})) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return call_attention(query, key, value, w1, w2, options);
  }
  variable_list result = Attention::apply(query, key, value, w1, w2, key_bias, attn_mask, options);
  return {std::move(result[0]), std::move(result[1])};
}

at::Tensor weights_autograd(const at::Tensor& query, const at::Tensor& key, const at::Tensor& w1,
                            const std::optional<at::Tensor>& w2, IKATTN_OPTION_PARAMETERS,
                            bool average_heads) {
  const AttentionOptions options{IKATTN_OPTION_VALUES};
  check_placement("implicit_kernel_weights", query, key, at::Tensor(), w1, w2, options);
  if (any_transformed({&query, &key, &w1}, {&w2, &key_bias, &attn_mask})) {
    check_attention_call(query, key, at::Tensor(), w1, w2, options);
    return reference_weights(query, key, w1, w2, options, average_heads);
  }
  if (!is_recorded({&query, &key, &w1}, {&w2, &key_bias, &attn_mask})) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return call_weights(query, key, w1, w2, options, average_heads);
  }
  return Weights::apply(query, key, w1, w2, key_bias, attn_mask, options, average_heads);
}

at::Tensor features_autograd(const at::Tensor& x, const at::Tensor& w1,
                             const std::optional<at::Tensor>& w2, bool tokens_first) {
  check_placement("spectral_features", "x", x, {{"w1", &w1}, {"w2", address(w2)}});
  if (any_transformed({&x, &w1}, {&w2})) {
    check_features(x, w1, w2);
    return reference_features(x, w1, w2).to(x.scalar_type());
  }
  if (!is_recorded({&x, &w1}, {&w2})) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return call_features(x, w1, w2, tokens_first);
  }
  return Features::apply(x, w1, w2, tokens_first);
}

// Takes the reference where a gradient is recorded, for decoding needs none.
at::Tensor from_features_autograd(const at::Tensor& query_features, const at::Tensor& key_features,
                                  const at::Tensor& logits, const at::Tensor& value, double eps) {
  const bool are_numbers =
      check_from_features_placement(query_features, key_features, logits, value);
  if (any_transformed({&query_features, &key_features, &logits, &value}, {}) ||
      is_recorded({&query_features, &key_features, &logits, &value}, {})) {
    if (are_numbers) check_from_features(query_features, key_features, logits, value, eps);
    return reference_from_features(query_features, key_features, logits, value, eps);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_from_features(query_features, key_features, logits, value, eps);
}

TORCH_LIBRARY_IMPL(ikattn, Autograd, m) {
  implement<"implicit_kernel_attention", attention_autograd>(m);
  implement<"implicit_kernel_weights", weights_autograd>(m);
  implement<"spectral_features", features_autograd>(m);
  implement<"attention_from_features", from_features_autograd>(m);
}

}  // namespace
}  // namespace ikattn
