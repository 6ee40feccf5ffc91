// The mathematics of the operators in differentiable ATen: the oracle of the tests, double
// backward, torch.func, forward-mode duals. Time and memory are O(B H L S).
#pragma once

#include "attention/operator/arguments.h"

namespace ikattn {

// Returns phi(x), [B, H, L, 2M], cosines first, in the arithmetic type of x.
at::Tensor reference_features(const at::Tensor& x, const at::Tensor& w1,
                              const std::optional<at::Tensor>& w2);

// Returns offsets of logits with finite numbers clamped to a share of the bound of kernels
// (offsets.h), and the gradient of numbers that are not.
at::Tensor bounded_offsets(const at::Tensor& offsets, double share = 1);

// Adds two terms of logits. What either hides is -inf in the sum, for the other may be NaN there.
at::Tensor sum_of_logits(const at::Tensor& one, const at::Tensor& other);

// Returns |x|_p^2 over the last axis, with gradient 0 at x = 0.
at::Tensor reference_squared_norm(const at::Tensor& x, double p);

// Returns output [B, H, L, d_v] and log_normalizer [B, H, L]. norm_dropout_p is the authors'
// variant, which drops entries of the matrix (|q_i|_p^2 + |k_j|_p^2) magnitude_scale, query norm
// included, before the softmax.
std::tuple<at::Tensor, at::Tensor> reference_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& w1,
    const std::optional<at::Tensor>& w2, const AttentionOptions& options,
    double norm_dropout_p = 0.0);

// Computes attention_from_features of ikattn/attention.h.
at::Tensor reference_from_features(const at::Tensor& query_features, const at::Tensor& key_features,
                                   const at::Tensor& logits, const at::Tensor& value, double eps);
// Computes it where no kernel takes the call: checks the arguments, and lays the output out as a
// kernel does, as the projection after it reads it.
at::Tensor composed_from_features(const at::Tensor& query_features, const at::Tensor& key_features,
                                  const at::Tensor& logits, const at::Tensor& value, double eps);

// Returns the weights after dropout. keep is the mask of dropout, computed from
// options.dropout_seed where undefined; first_query is the number of the first query in its
// sequence, for causal calls.
at::Tensor reference_weights(const at::Tensor& query, const at::Tensor& key, const at::Tensor& w1,
                             const std::optional<at::Tensor>& w2, const AttentionOptions& options,
                             bool average_heads, const at::Tensor& keep = {},
                             int64_t first_query = 0);

}  // namespace ikattn
