// Operators that only check the arguments of others. Every fake kernel starts with one, so that
// torch.compile, torch.export and the meta device refuse the calls that the kernels refuse, in the
// same words. Where sizes are symbols only layouts and devices are checked.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "attention/operator/arguments.h"

namespace ikattn {
namespace {

void attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
               const at::Tensor& w1, const std::optional<at::Tensor>& w2,
               IKATTN_OPTION_PARAMETERS) {
  check_attention_call(query, key, value, w1, w2, {IKATTN_OPTION_VALUES});
}

void attention_backward(const at::Tensor& grad_output, const at::Tensor& query,
                        const at::Tensor& key, const at::Tensor& value, const at::Tensor& w1,
                        const std::optional<at::Tensor>& w2, const at::Tensor& output,
                        const at::Tensor& log_normalizer, IKATTN_OPTION_PARAMETERS,
                        std::array<bool, kAttentionGradients> wanted) {
  const AttentionOptions options{IKATTN_OPTION_VALUES};
  const char* function = "implicit_kernel_attention_backward";
  const bool are_numbers = check_placement(function, query, key, value, w1, w2, options);
  if (check_placement(function, "query", query,
                      {{"grad_output", &grad_output},
                       {"output", &output},
                       {"log_normalizer", &log_normalizer}}) &&
      are_numbers) {
    check_attention_backward(grad_output, query, key, value, w1, w2, output, log_normalizer,
                             options, wanted);
  }
}

void weights(const at::Tensor& query, const at::Tensor& key, const at::Tensor& w1,
             const std::optional<at::Tensor>& w2, IKATTN_OPTION_PARAMETERS,
             bool /*average_heads*/) {
  check_attention_call(query, key, at::Tensor(), w1, w2, {IKATTN_OPTION_VALUES});
}

void weights_backward(const at::Tensor& grad_weights, const at::Tensor& query,
                      const at::Tensor& key, const at::Tensor& w1,
                      const std::optional<at::Tensor>& w2, IKATTN_OPTION_PARAMETERS,
                      bool average_heads, std::array<bool, kWeightsGradients> wanted) {
  const AttentionOptions options{IKATTN_OPTION_VALUES};
  const char* function = "implicit_kernel_weights_backward";
  const bool are_numbers = check_placement(function, query, key, at::Tensor(), w1, w2, options);
  if (check_placement(function, "query", query, {{"grad_weights", &grad_weights}}) && are_numbers) {
    check_weights_backward(grad_weights, query, key, w1, w2, options, average_heads, wanted);
  }
}

void features(const at::Tensor& x, const at::Tensor& w1, const std::optional<at::Tensor>& w2,
              bool /*tokens_first*/) {
  check_features(x, w1, w2);
}

void features_backward(const at::Tensor& grad_features, const at::Tensor& x, const at::Tensor& w1,
                       const std::optional<at::Tensor>& w2, std::array<bool, 3> wanted) {
  if (check_placement("spectral_features_backward", "x", x,
                      {{"grad_features", &grad_features}, {"w1", &w1}, {"w2", address(w2)}})) {
    check_features_backward(grad_features, x, w1, w2, wanted);
  }
}

void from_features(const at::Tensor& query_features, const at::Tensor& key_features,
                   const at::Tensor& logits, const at::Tensor& value, double eps) {
  if (check_from_features_placement(query_features, key_features, logits, value)) {
    check_from_features(query_features, key_features, logits, value, eps);
  }
}

void keep_mask(const at::Tensor& dropout_seed, c10::SymInt, c10::SymInt, c10::SymInt, c10::SymInt,
               double dropout_p) {
  check_dropout("dropout_keep_mask", dropout_p, dropout_seed);
}

TORCH_LIBRARY_FRAGMENT(ikattn, m) {
  m.def("check_implicit_kernel_attention" IKATTN_ATTENTION_SCHEMA " -> ()", attention);
  m.def("check_implicit_kernel_attention_backward" IKATTN_ATTENTION_BACKWARD_SCHEMA " -> ()",
        attention_backward);
  m.def("check_implicit_kernel_weights" IKATTN_WEIGHTS_SCHEMA " -> ()", weights);
  m.def("check_implicit_kernel_weights_backward" IKATTN_WEIGHTS_BACKWARD_SCHEMA " -> ()",
        weights_backward);
  m.def("check_spectral_features" IKATTN_FEATURES_SCHEMA " -> ()", features);
  m.def("check_spectral_features_backward" IKATTN_FEATURES_BACKWARD_SCHEMA " -> ()",
        features_backward);
  m.def("check_attention_from_features" IKATTN_FROM_FEATURES_SCHEMA " -> ()", from_features);
  m.def("check_dropout_keep_mask" IKATTN_KEEP_MASK_SCHEMA " -> ()", keep_mask);
}

}  // namespace
}  // namespace ikattn
