// The public C++ functions of attention.
#include <ATen/ATen.h>

#include <limits>

#include "attention/operator/arguments.h"

namespace ikattn {

at::Tensor implicit_kernel_attention(const at::Tensor& query, const at::Tensor& key,
                                     const at::Tensor& value, const at::Tensor& w1,
                                     const std::optional<at::Tensor>& w2,
                                     const AttentionOptions& options) {
  return std::get<0>(
      call_attention(query, key, value, w1, w2, with_dropout_seed(options, query.device())));
}

at::Tensor implicit_kernel_weights(const at::Tensor& query, const at::Tensor& key,
                                   const at::Tensor& w1, const std::optional<at::Tensor>& w2,
                                   const AttentionOptions& options, bool average_heads) {
  return call_weights(query, key, w1, w2, with_dropout_seed(options, query.device()),
                      average_heads);
}

at::Tensor spectral_features(const at::Tensor& x, const at::Tensor& w1,
                             const std::optional<at::Tensor>& w2) {
  return call_features(x, w1, w2, /*tokens_first=*/false);
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
