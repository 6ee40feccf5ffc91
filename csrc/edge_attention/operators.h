// The schemas and signatures of the operators.
#pragma once

#include "edge_attention/arguments.h"
#include "support/checks.h"
#include "support/dispatch.h"

// The arguments of edge_attention_from_features, shared with edge_query_gradients.
#define IKATTN_EDGE_FEATURES_SCHEMA                                                  \
  "Tensor query_features, Tensor key_features, Tensor value, Tensor key_logits, "    \
  "Tensor? edge_logits, Tensor? keep, Tensor rowptr, Tensor col, float? eps=1e-05, " \
  "float rescale=1.0, float negative_slope=1.0"
#define IKATTN_EDGE_FEATURES_PARAMETERS                                                      \
  const at::Tensor &query_features, const at::Tensor &key_features, const at::Tensor &value, \
      const at::Tensor &key_logits, const std::optional<at::Tensor>&edge_logits,             \
      const std::optional<at::Tensor>&keep, const at::Tensor &rowptr, const at::Tensor &col, \
      std::optional<double> eps, double rescale, double negative_slope
#define IKATTN_EDGE_FEATURES_VALUES                                                               \
  query_features, key_features, value, key_logits, or_undefined(edge_logits), or_undefined(keep), \
      rowptr, col, eps, rescale, negative_slope

#define IKATTN_EDGE_QUERY_GRADIENTS_SCHEMA \
  IKATTN_EDGE_FEATURES_SCHEMA              \
  ", *, Tensor output, Tensor log_normalizer, Tensor grad_output, Tensor? grad_weights=None"
#define IKATTN_EDGE_QUERY_GRADIENTS_PARAMETERS                                                 \
  IKATTN_EDGE_FEATURES_PARAMETERS, const at::Tensor &output, const at::Tensor &log_normalizer, \
      const at::Tensor &grad_output, const std::optional<at::Tensor>&grad_weights

#define IKATTN_EDGE_KEY_GRADIENTS_SCHEMA                                                    \
  "Tensor of_edges, Tensor query_features, Tensor grad_output, Tensor rowptr, Tensor col, " \
  "SymInt sources"
#define IKATTN_EDGE_KEY_GRADIENTS_PARAMETERS                                                   \
  const at::Tensor &of_edges, const at::Tensor &query_features, const at::Tensor &grad_output, \
      const at::Tensor &rowptr, const at::Tensor &col, c10::SymInt sources
#define IKATTN_EDGE_KEY_GRADIENTS_VALUES of_edges, query_features, grad_output, rowptr, col, sources

namespace ikattn {

constexpr const char* kFromEdgeFeatures = "edge_attention_from_features";
constexpr const char* kEdgeQueryGradients = "edge_query_gradients";
constexpr const char* kEdgeKeyGradients = "edge_key_gradients";

using FromEdgeFeaturesSignature = EdgeResults(IKATTN_EDGE_FEATURES_PARAMETERS);
using EdgeQueryGradientsSignature = EdgeQueryGradients(IKATTN_EDGE_QUERY_GRADIENTS_PARAMETERS);
using EdgeKeyGradientsSignature = EdgeKeyGradients(IKATTN_EDGE_KEY_GRADIENTS_PARAMETERS);

inline auto spelled_out(const EdgeFeatures& call) {
  return std::make_tuple(call.query_features, call.key_features, call.value, call.key_logits,
                         or_none(call.edge_logits), or_none(call.keep), call.rowptr, call.col,
                         call.eps, call.rescale, call.negative_slope);
}

// The operators as functions, the first two with EdgeFeatures in the place of its fields.
inline constexpr Operator<"edge_attention_from_features", FromEdgeFeaturesSignature>
    call_from_edge_features;
inline constexpr Operator<"edge_query_gradients", EdgeQueryGradientsSignature>
    call_edge_query_gradients;
inline constexpr Operator<"edge_key_gradients", EdgeKeyGradientsSignature> call_edge_key_gradients;

// Makes a dispatcher function from one that takes the call as a struct.
template <EdgeResults (*kResultsOf)(const EdgeFeatures&)>
EdgeResults from_edge_features(IKATTN_EDGE_FEATURES_PARAMETERS) {
  return kResultsOf({IKATTN_EDGE_FEATURES_VALUES});
}

}  // namespace ikattn
