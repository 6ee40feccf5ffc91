// What the registrations of the operators share.
#pragma once

#include "edge_attention/arguments.h"
#include "support/checks.h"

// The arguments of edge_attention_from_features, which its backward operator takes, too.
#define IKATTN_EDGE_FEATURES_SCHEMA                                                 \
  "Tensor query_features, Tensor key_features, Tensor value, Tensor key_logits, "   \
  "Tensor? edge_logits, Tensor? keep, Tensor rowptr, Tensor col, float eps=1e-05, " \
  "float rescale=1.0"
#define IKATTN_EDGE_FEATURES_BACKWARD_SCHEMA                               \
  "Tensor grad_output, Tensor? grad_weights, " IKATTN_EDGE_FEATURES_SCHEMA \
  ", *, Tensor "                                                           \
  "log_normalizer"
#define IKATTN_EDGE_FEATURES_PARAMETERS                                                      \
  const at::Tensor &query_features, const at::Tensor &key_features, const at::Tensor &value, \
      const at::Tensor &key_logits, const std::optional<at::Tensor>&edge_logits,             \
      const std::optional<at::Tensor>&keep, const at::Tensor &rowptr, const at::Tensor &col, \
      double eps, double rescale
#define IKATTN_EDGE_FEATURES_VALUES                                                               \
  query_features, key_features, value, key_logits, or_undefined(edge_logits), or_undefined(keep), \
      rowptr, col, eps, rescale

namespace ikattn {

constexpr const char* kFromEdgeFeatures = "edge_attention_from_features";
constexpr const char* kFromEdgeFeaturesBackward = "edge_attention_from_features_backward";

using FromEdgeFeaturesSignature = EdgeResults(IKATTN_EDGE_FEATURES_PARAMETERS);
using FromEdgeFeaturesBackwardSignature =
    EdgeGradients(const at::Tensor& grad_output, const std::optional<at::Tensor>& grad_weights,
                  IKATTN_EDGE_FEATURES_PARAMETERS, const at::Tensor& log_normalizer);

// A dispatcher function from one that takes the call as a whole.
template <EdgeResults (*kResultsOf)(const EdgeFeatures&)>
EdgeResults from_edge_features(IKATTN_EDGE_FEATURES_PARAMETERS) {
  return kResultsOf({IKATTN_EDGE_FEATURES_VALUES});
}

}  // namespace ikattn
