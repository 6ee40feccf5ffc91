// Schemas of the attention operators; the reference as operators, and in the place of kernels.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "attention/operator/arguments.h"
#include "attention/operator/reference.h"
#include "support/memory.h"

namespace ikattn {
namespace {

TORCH_LIBRARY_FRAGMENT(ikattn, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def("implicit_kernel_attention" IKATTN_ATTENTION_SCHEMA
        " -> (Tensor output, Tensor log_normalizer)",
        tags);
  m.def("implicit_kernel_attention_backward" IKATTN_ATTENTION_BACKWARD_SCHEMA
        " -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_w1, "
        "Tensor grad_w2, Tensor grad_key_bias, Tensor grad_attn_mask)",
        tags);
  m.def("implicit_kernel_weights" IKATTN_WEIGHTS_SCHEMA " -> Tensor", tags);
  m.def("implicit_kernel_weights_backward" IKATTN_WEIGHTS_BACKWARD_SCHEMA
        " -> (Tensor grad_query, Tensor grad_key, Tensor grad_w1, Tensor grad_w2, "
        "Tensor grad_key_bias, Tensor grad_attn_mask)",
        tags);
  m.def("spectral_features" IKATTN_FEATURES_SCHEMA " -> Tensor", tags);
  m.def("spectral_features_backward" IKATTN_FEATURES_BACKWARD_SCHEMA
        " -> (Tensor grad_x, Tensor grad_w1, Tensor grad_w2)",
        tags);
  m.def("attention_from_features" IKATTN_FROM_FEATURES_SCHEMA " -> Tensor", tags);
  m.def("dropout_keep_mask" IKATTN_KEEP_MASK_SCHEMA " -> Tensor", tags);
  m.def(
      "implicit_kernel_attention_reference(Tensor query, Tensor key, Tensor value, Tensor w1, "
      "Tensor? w2=None, " IKATTN_OPTION_SCHEMA
      ", float norm_dropout_p=0.0) -> "
      "(Tensor output, Tensor log_normalizer)",
      {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
  m.def("implicit_kernel_weights_reference" IKATTN_WEIGHTS_SCHEMA " -> Tensor", tags);
  m.def("spectral_features_reference" IKATTN_FEATURES_SCHEMA " -> Tensor", tags);
  m.def("attention_from_features_reference" IKATTN_FROM_FEATURES_SCHEMA " -> Tensor", tags);
}

// --- The reference as operators: no kernel of their own, so that every transformation sees through

std::tuple<at::Tensor, at::Tensor> attention_reference_op(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& w1,
    const std::optional<at::Tensor>& w2, IKATTN_OPTION_PARAMETERS, double norm_dropout_p) {
  const AttentionOptions options{IKATTN_OPTION_VALUES};
  check_attention_call(query, key, value, w1, w2, options);
  return reference_attention(query, key, value, w1, w2, options, norm_dropout_p);
}

std::tuple<at::Tensor, at::Tensor> attention_decomposition(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& w1,
    const std::optional<at::Tensor>& w2, IKATTN_OPTION_PARAMETERS) {
  return attention_reference_op(query, key, value, w1, w2, IKATTN_OPTION_VALUES, 0);
}

at::Tensor weights_reference_op(const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& w1, const std::optional<at::Tensor>& w2,
                                IKATTN_OPTION_PARAMETERS, bool average_heads) {
  const AttentionOptions options{IKATTN_OPTION_VALUES};
  check_attention_call(query, key, at::Tensor(), w1, w2, options);
  return reference_weights(query, key, w1, w2, options, average_heads);
}

at::Tensor features_reference_op(const at::Tensor& x, const at::Tensor& w1,
                                 const std::optional<at::Tensor>& w2, bool /*tokens_first*/) {
  check_features(x, w1, w2);
  return reference_features(x, w1, w2).to(x.scalar_type());
}

at::Tensor from_features_reference_op(const at::Tensor& query_features,
                                      const at::Tensor& key_features, const at::Tensor& logits,
                                      const at::Tensor& value, double eps) {
  if (check_from_features_placement(query_features, key_features, logits, value)) {
    check_from_features(query_features, key_features, logits, value, eps);
  }
  return reference_from_features(query_features, key_features, logits, value, eps);
}

TORCH_LIBRARY_IMPL(ikattn, CompositeImplicitAutograd, m) {
  implement<"implicit_kernel_attention_reference", attention_reference_op>(m);
  implement<"implicit_kernel_weights_reference", weights_reference_op>(m);
  implement<"spectral_features_reference", features_reference_op>(m);
  implement<"attention_from_features_reference", from_features_reference_op>(m);
}

TORCH_LIBRARY_IMPL(ikattn, CompositeExplicitAutograd, m) {
  implement<"attention_from_features", composed_from_features>(m);
}

// vmap: the reference instead of a loop over the batch.
TORCH_LIBRARY_IMPL(ikattn, FuncTorchBatchedDecomposition, m) {
  implement<"implicit_kernel_attention", attention_decomposition>(m);
  implement<"implicit_kernel_weights", weights_reference_op>(m);
  implement<"spectral_features", features_reference_op>(m);
  implement<"attention_from_features", from_features_reference_op>(m);
}
}  // namespace
}  // namespace ikattn
