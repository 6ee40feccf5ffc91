// The arguments of the edge attention operators inside the library, and their checks.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

#include "ikattn/edge_attention.h"

namespace ikattn {

struct EdgeAttentionCall {
  at::Tensor query;                  // [N_q, H, d]
  at::Tensor key;                    // [N_k, H, d]
  at::Tensor value;                  // [N_k, H, d_v]
  at::Tensor rowptr, col;            // [N_q + 1], [E]
  std::optional<at::Tensor> w1, w2;  // [H, d, M]; without w1: softmax attention
  EdgeAttentionOptions options;
};

struct GatAttentionCall {
  at::Tensor vector;                 // [H, 2d]
  at::Tensor target;                 // [N_q, H, d]
  at::Tensor source;                 // [N_k, H, d]
  at::Tensor value;                  // [N_k, H, d_v]
  at::Tensor rowptr, col;            // [N_q + 1], [E]
  std::optional<at::Tensor> w1, w2;  // [H, 2d, M]; without w1: the RBF kernel
  EdgeAttentionOptions options;
};

// Check a call. Errors name the argument, what was expected and what was given. Sizes are not
// checked while torch.compile traces, and numbers of nodes not on a GPU.
void check_edge_attention(const char* function, const EdgeAttentionCall& call);
void check_gat_attention(const char* function, const GatAttentionCall& call);
void check_negative_slope(const char* function, bool has_frequencies,
                          const EdgeAttentionOptions& options);

// Tells whether the numbers in a tensor can be read at no cost but a pass over them: not while a
// call is traced.
bool is_readable(const at::Tensor& tensor);

// A call of edge_attention_from_features, the part that has kernels: all floating-point tensors in
// the arithmetic type, what is hidden by logits of -inf. The weight of an edge is its score times
// exp(logits) over the sum of those into the same target. The score of features x of a query and y
// of a key is (x.y / 2F)^2 + eps, or exp(x.y) where there is no eps; F may be 0 then. There a
// LeakyReLU takes the sum of x.y and the logits.
struct EdgeFeatures {
  at::Tensor query_features;  // [N_q, H, F]
  at::Tensor key_features;    // [N_k, H, F]
  at::Tensor value;           // [N_k, H, d_v]
  at::Tensor key_logits;      // [N_k, H]
  at::Tensor edge_logits;     // [E, H] or [E, 1]; undefined: zeros
  at::Tensor keep;            // bool [E, H], what dropout keeps; undefined: all
  at::Tensor rowptr, col;     // int64 [N_q + 1], [E]
  std::optional<double> eps = 1e-5;
  double rescale = 1.0;         // of the weights that are kept
  double negative_slope = 1.0;  // of the LeakyReLU; 1: none
};

// Output [N_q, H, d_v], weights [E, H] after dropout, and log_normalizer, float64 [N_q, H].
using EdgeResults = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Check devices and, where sizes are no symbols, types and sizes; check_edges checks the numbers in
// rowptr and col.
void check_edge_features(const char* function, const EdgeFeatures& call);
void check_edge_query_gradients(const EdgeFeatures& call, const EdgeResults& results,
                                const at::Tensor& grad_output, const at::Tensor& grad_weights);
// Checks that rowptr ascends from 0 to E and that col is in [0, N_k). Both are on the CPU.
void check_edges(const char* function, const at::Tensor& rowptr, const at::Tensor& col,
                 int64_t N_k);

// The results of the first step of the backward, by target: the gradient of query_features, and for
// every edge, [E, 3, H], the gradients of its logit and of the product x.y, and its weight after
// dropout.
using EdgeQueryGradients = std::tuple<at::Tensor, at::Tensor>;

// The second step, by source: the gradients of key_features, value and key_logits from those of the
// edges.
struct EdgeKeyGradientCall {
  at::Tensor of_edges;        // [E, 3, H]
  at::Tensor query_features;  // [N_q, H, F]
  at::Tensor grad_output;     // [N_q, H, d_v]
  at::Tensor rowptr, col;
  c10::SymInt N_k;
};
using EdgeKeyGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
void check_edge_key_gradients(const EdgeKeyGradientCall& call);

}  // namespace ikattn
