// The same mathematics in differentiable ATen: the oracle of the tests, double backward,
// torch.func, forward-mode duals. Time and memory O(B H L S).
#pragma once

#include "attention/operator/arguments.h"

namespace ikattn {

// [B, H, L, 2M], cosines first, in the arithmetic type of x.
at::Tensor reference_features(const at::Tensor& x, const at::Tensor& w1,
                              const std::optional<at::Tensor>& w2);

// What masks and biases add to logits, in float64, of which finite numbers end at a share of where
// kernels have them end (offsets.h).
at::Tensor bounded_offsets(const at::Tensor& offsets, double share = 1);

// |x|_p^2 over the last axis, with gradient 0 at x = 0.
at::Tensor reference_squared_norm(const at::Tensor& x, double p);

// (output [B, H, L, d_v], log_normalizer [B, H, L]). norm_dropout_p: the authors' variant, which
// drops entries of the matrix (|q_i|_p^2 + |k_j|_p^2) magnitude_scale, query norm included, before
// the softmax.
std::tuple<at::Tensor, at::Tensor> reference_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& w1,
    const std::optional<at::Tensor>& w2, const AttentionOptions& options,
    double norm_dropout_p = 0.0);

// attention_from_features of ikattn/attention.h.
at::Tensor reference_from_features(const at::Tensor& query_features, const at::Tensor& key_features,
                                   const at::Tensor& logits, const at::Tensor& value, double eps);
// The same where no kernel takes the call: checked, and laid out as a kernel's, which the
// projection after it reads.
at::Tensor composed_from_features(const at::Tensor& query_features, const at::Tensor& key_features,
                                  const at::Tensor& logits, const at::Tensor& value, double eps);

// keep: what dropout keeps, computed from options.dropout_seed where undefined. first_query: the
// number of the first query in its sequence, for causal calls.
at::Tensor reference_weights(const at::Tensor& query, const at::Tensor& key, const at::Tensor& w1,
                             const std::optional<at::Tensor>& w2, const AttentionOptions& options,
                             bool average_heads, const at::Tensor& keep = {},
                             int64_t first_query = 0);

}  // namespace ikattn
