// Schemas of the edge attention operators, their implementation on devices without kernels, and
// vmap. The whole operators are in forms.cpp.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "edge_attention/operators.h"
#include "edge_attention/reference.h"
#include "support/memory.h"

namespace ikattn {
namespace {

#define IKATTN_EDGE_OPTIONS_SCHEMA \
  "Tensor? key_bias=None, Tensor? edge_bias=None, float dropout_p=0.0, "

TORCH_LIBRARY_FRAGMENT(ikattn, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def(
      "implicit_kernel_edge_attention(Tensor query, Tensor key, Tensor value, Tensor rowptr, "
      "Tensor col, Tensor w1, Tensor? w2=None, *, float? p=2.0, " IKATTN_EDGE_OPTIONS_SCHEMA
      "float eps=1e-05, float? magnitude_scale=None, Tensor? dropout_seed=None) -> (Tensor output, "
      "Tensor weights)",
      tags);
  m.def(
      "softmax_edge_attention(Tensor query, Tensor key, Tensor value, Tensor rowptr, Tensor col, "
      "*, float? p=2.0, " IKATTN_EDGE_OPTIONS_SCHEMA
      "float? magnitude_scale=None, Tensor? dropout_seed=None, float negative_slope=1.0) -> "
      "(Tensor "
      "output, Tensor weights)",
      tags);
  m.def(
      "gat_edge_attention(Tensor vector, Tensor target, Tensor source, Tensor value, Tensor "
      "rowptr, Tensor col, Tensor? w1=None, Tensor? w2=None, *, float? "
      "p=2.0, " IKATTN_EDGE_OPTIONS_SCHEMA
      "float eps=1e-05, float? magnitude_scale=None, Tensor? dropout_seed=None, float "
      "negative_slope=1.0) -> (Tensor output, Tensor weights)",
      tags);
  m.def("edge_attention_from_features(" IKATTN_EDGE_FEATURES_SCHEMA
        ") -> (Tensor output, Tensor weights, Tensor log_normalizer)",
        tags);
  m.def("edge_attention_from_features_reference(" IKATTN_EDGE_FEATURES_SCHEMA
        ") -> (Tensor output, Tensor weights, Tensor log_normalizer)",
        tags);
  m.def("edge_query_gradients(" IKATTN_EDGE_QUERY_GRADIENTS_SCHEMA
        ") -> (Tensor grad_query_features, Tensor of_edges)",
        tags);
  m.def("edge_key_gradients(" IKATTN_EDGE_KEY_GRADIENTS_SCHEMA
        ") -> (Tensor grad_key_features, Tensor grad_value, Tensor grad_key_logits)",
        tags);
  m.def("check_edge_attention_from_features(" IKATTN_EDGE_FEATURES_SCHEMA ") -> ()", tags);
  m.def("check_edge_query_gradients(" IKATTN_EDGE_QUERY_GRADIENTS_SCHEMA ") -> ()", tags);
  m.def("check_edge_key_gradients(" IKATTN_EDGE_KEY_GRADIENTS_SCHEMA ") -> ()", tags);
}

// --- Operators that only check, as in attention/operator/check_operators.cpp: fake kernels begin
// with them

void check_from_features(IKATTN_EDGE_FEATURES_PARAMETERS) {
  check_edge_features(kFromEdgeFeatures, {IKATTN_EDGE_FEATURES_VALUES});
}

void check_query_gradients(IKATTN_EDGE_QUERY_GRADIENTS_PARAMETERS) {
  check_edge_query_gradients({IKATTN_EDGE_FEATURES_VALUES}, {output, {}, log_normalizer},
                             grad_output, or_undefined(grad_weights));
}

void check_key_gradients(IKATTN_EDGE_KEY_GRADIENTS_PARAMETERS) {
  check_edge_key_gradients({IKATTN_EDGE_KEY_GRADIENTS_VALUES});
}

TORCH_LIBRARY_IMPL(ikattn, CompositeImplicitAutograd, m) {
  m.impl("check_edge_attention_from_features", check_from_features);
  m.impl("check_edge_query_gradients", check_query_gradients);
  m.impl("check_edge_key_gradients", check_key_gradients);
}

// --- Devices without kernels, and vmap

EdgeResults checked_reference(const EdgeFeatures& call) {
  check_edge_features(kFromEdgeFeatures, call);
  return reference_from_edge_features(call);
}

EdgeQueryGradients query_gradients(IKATTN_EDGE_QUERY_GRADIENTS_PARAMETERS) {
  const EdgeFeatures call{IKATTN_EDGE_FEATURES_VALUES};
  check_edge_query_gradients(call, {output, {}, log_normalizer}, grad_output,
                             or_undefined(grad_weights));
  return reference_edge_query_gradients(call, output, log_normalizer, grad_output,
                                        or_undefined(grad_weights));
}

EdgeKeyGradients key_gradients(IKATTN_EDGE_KEY_GRADIENTS_PARAMETERS) {
  const EdgeKeyGradientCall call{IKATTN_EDGE_KEY_GRADIENTS_VALUES};
  check_edge_key_gradients(call);
  return reference_edge_key_gradients(call);
}

TORCH_LIBRARY_IMPL(ikattn, CompositeExplicitAutograd, m) {
  implement<"edge_attention_from_features", from_edge_features<checked_reference>>(m);
  implement<"edge_query_gradients", query_gradients>(m);
  implement<"edge_key_gradients", key_gradients>(m);
}

// The reference as an operator, through which every transformation sees; exported programs
// decompose to it.
TORCH_LIBRARY_IMPL(ikattn, CompositeImplicitAutograd, m) {
  implement<"edge_attention_from_features_reference", from_edge_features<checked_reference>>(m);
}

TORCH_LIBRARY_IMPL(ikattn, FuncTorchBatchedDecomposition, m) {
  implement<"edge_attention_from_features", from_edge_features<reference_from_edge_features>>(m);
}

}  // namespace

}  // namespace ikattn
