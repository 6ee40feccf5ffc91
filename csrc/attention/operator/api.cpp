// Typed access to the attention operators, and the public C++ functions.
#include <ATen/ATen.h>

#include <limits>

#include "attention/operator/arguments.h"
#include "support/dispatch.h"

namespace ikattn {

std::tuple<at::Tensor, at::Tensor> call_attention(const at::Tensor& query, const at::Tensor& key,
                                                  const at::Tensor& value, const at::Tensor& w1,
                                                  const std::optional<at::Tensor>& w2,
                                                  const AttentionOptions& options) {
  static const auto op = find_operator<AttentionSignature>("ikattn::implicit_kernel_attention");
  return op.call(query, key, value, w1, w2, IKATTN_OPTION_FIELDS(options));
}

AttentionGradients call_attention_backward(
    const at::Tensor& grad_output, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const at::Tensor& w1, const std::optional<at::Tensor>& w2,
    const at::Tensor& output, const at::Tensor& log_normalizer, const AttentionOptions& options,
    std::array<bool, kAttentionGradients> wanted) {
  static const auto op =
      find_operator<AttentionBackwardSignature>("ikattn::implicit_kernel_attention_backward");
  return op.call(grad_output, query, key, value, w1, w2, output, log_normalizer,
                 IKATTN_OPTION_FIELDS(options), wanted);
}

at::Tensor call_weights(const at::Tensor& query, const at::Tensor& key, const at::Tensor& w1,
                        const std::optional<at::Tensor>& w2, const AttentionOptions& options,
                        bool average_heads) {
  static const auto op = find_operator<WeightsSignature>("ikattn::implicit_kernel_weights");
  return op.call(query, key, w1, w2, IKATTN_OPTION_FIELDS(options), average_heads);
}

WeightsGradients call_weights_backward(const at::Tensor& grad_weights, const at::Tensor& query,
                                       const at::Tensor& key, const at::Tensor& w1,
                                       const std::optional<at::Tensor>& w2,
                                       const AttentionOptions& options, bool average_heads,
                                       std::array<bool, kWeightsGradients> wanted) {
  static const auto op =
      find_operator<WeightsBackwardSignature>("ikattn::implicit_kernel_weights_backward");
  return op.call(grad_weights, query, key, w1, w2, IKATTN_OPTION_FIELDS(options), average_heads,
                 wanted);
}

at::Tensor call_features(const at::Tensor& x, const at::Tensor& w1,
                         const std::optional<at::Tensor>& w2, bool tokens_first) {
  static const auto op = find_operator<FeaturesSignature>("ikattn::spectral_features");
  return op.call(x, w1, w2, tokens_first);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> call_features_backward(
    const at::Tensor& grad_features, const at::Tensor& x, const at::Tensor& w1,
    const std::optional<at::Tensor>& w2, std::array<bool, 3> wanted) {
  static const auto op =
      find_operator<FeaturesBackwardSignature>("ikattn::spectral_features_backward");
  return op.call(grad_features, x, w1, w2, wanted);
}

at::Tensor call_from_features(const at::Tensor& query_features, const at::Tensor& key_features,
                              const at::Tensor& logits, const at::Tensor& value, double eps) {
  static const auto op = find_operator<FromFeaturesSignature>("ikattn::attention_from_features");
  return op.call(query_features, key_features, logits, value, eps);
}

at::Tensor call_dropout_keep_mask(const at::Tensor& dropout_seed, const c10::SymInt& B,
                                  const c10::SymInt& H, const c10::SymInt& L, const c10::SymInt& S,
                                  double dropout_p) {
  static const auto op = find_operator<DropoutKeepMaskSignature>("ikattn::dropout_keep_mask");
  return op.call(dropout_seed, B, H, L, S, dropout_p);
}

// --- Public functions

namespace {

// Returns the options with a dropout seed, drawn where one is needed and none was given.
AttentionOptions with_seed(const AttentionOptions& options, const at::Tensor& query) {
  AttentionOptions complete = options;
  if (options.dropout_p > 0 && !is_present(options.dropout_seed)) {
    complete.dropout_seed = draw_dropout_seed(query.device());
  }
  return complete;
}

}  // namespace

at::Tensor implicit_kernel_attention(const at::Tensor& query, const at::Tensor& key,
                                     const at::Tensor& value, const at::Tensor& w1,
                                     const std::optional<at::Tensor>& w2,
                                     const AttentionOptions& options) {
  return std::get<0>(call_attention(query, key, value, w1, w2, with_seed(options, query)));
}

at::Tensor implicit_kernel_weights(const at::Tensor& query, const at::Tensor& key,
                                   const at::Tensor& w1, const std::optional<at::Tensor>& w2,
                                   const AttentionOptions& options, bool average_heads) {
  return call_weights(query, key, w1, w2, with_seed(options, query), average_heads);
}

at::Tensor spectral_features(const at::Tensor& x, const at::Tensor& w1,
                             const std::optional<at::Tensor>& w2) {
  return call_features(x, w1, w2);
}

at::Tensor attention_from_features(const at::Tensor& query_features, const at::Tensor& key_features,
                                   const at::Tensor& logits, const at::Tensor& value, double eps) {
  return call_from_features(query_features, key_features, logits, value, eps);
}

at::Tensor draw_dropout_seed(const at::Device& device) {
  return at::randint(std::numeric_limits<int64_t>::max(), {2},
                     at::TensorOptions().dtype(at::kLong).device(device));
}

}  // namespace ikattn
