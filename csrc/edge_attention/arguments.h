// The arguments of the edge attention operators inside the library, and their checks.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

#include "ikattn/edge_attention.h"

namespace ikattn {

struct EdgeAttentionCall {
  at::Tensor query;        // [N_q, H, d]
  at::Tensor key;          // [N_k, H, d]
  at::Tensor value;        // [N_k, H, d_v]
  at::Tensor rowptr, col;  // [N_q + 1], [E]
  at::Tensor w1;           // [H, d, M]
  std::optional<at::Tensor> w2;
  EdgeAttentionOptions options;
};

// Throws, naming the argument, what was expected and what came. Sizes and numbers of nodes are
// looked at where they are known: not while torch.compile traces, and of nodes not on a GPU.
void check_edge_attention(const EdgeAttentionCall& call);

// A call of edge_attention_from_features, the part that has kernels: all floating-point tensors in
// the arithmetic type, what is hidden by logits of -inf.
struct EdgeFeatures {
  at::Tensor query_features;  // [N_q, H, F]
  at::Tensor key_features;    // [N_k, H, F]
  at::Tensor value;           // [N_k, H, d_v]
  at::Tensor key_logits;      // [N_k, H]
  at::Tensor edge_logits;     // [E, H] or [E, 1]; undefined: zeros
  at::Tensor keep;            // bool [E, H], what dropout keeps; undefined: all
  at::Tensor rowptr, col;     // int64 [N_q + 1], [E]
  double eps = 1e-5;
  double rescale = 1.0;  // of the weights that are kept
};

// (output [N_q, H, d_v], weights [E, H] after dropout, log_normalizer float64 [N_q, H])
using EdgeResults = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Devices and, where they are no symbols, types and sizes; of the numbers in rowptr and col, see
// check_edges.
void check_edge_features(const char* function, const EdgeFeatures& call);
void check_edge_features_backward(const char* function, const at::Tensor& grad_output,
                                  const at::Tensor& grad_weights, const EdgeFeatures& call,
                                  const at::Tensor& log_normalizer);
// That rowptr ascends from 0 to E and that col is in [0, N_k). Both are on the CPU.
void check_edges(const char* function, const at::Tensor& rowptr, const at::Tensor& col,
                 int64_t N_k);

EdgeResults call_from_edge_features(const EdgeFeatures& call);

// Of query_features, key_features, value, key_logits; and of the logit of every edge, [E, H].
using EdgeGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
EdgeGradients call_from_edge_features_backward(const at::Tensor& grad_output,
                                               const at::Tensor& grad_weights,
                                               const EdgeFeatures& call,
                                               const at::Tensor& log_normalizer);

}  // namespace ikattn
