// Attention over the edges of a graph by implicit and other kernels: the public C++ functions.
//
//   N_q targets, N_k sources, E edges, H heads, d head size of query and key, d_v head size of
//   value, M frequencies
//
//   weight_e = (s_ij^2 + eps) exp(g_j + key_bias_j + edge_bias_e) / Z_i,  edge e from j to i
//
// with s and g as in ikattn/attention.h, and Z_i the sum over the edges that come into i. All
// functions return the output [N_q, H, d_v], zero for a target without edges, and the weights after
// dropout, [E, H]. They throw c10::Error on wrong arguments; rowptr and col are checked on the CPU
// only.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "ikattn/version.h"

namespace ikattn {

// Everything about a call that is not one of its main tensors.
struct EdgeAttentionOptions {
  // Order of the norm in a key's magnitude, any real >= 1; nullopt: no magnitude, g_j = 0.
  std::optional<double> p = 2.0;
  // Added to the logits of all edges of a source; broadcastable to [N_k, H]. -inf hides it.
  std::optional<at::Tensor> key_bias = std::nullopt;
  // Added to the logit of an edge; [E], or broadcastable to [E, H]. -inf hides the edge.
  std::optional<at::Tensor> edge_bias = std::nullopt;
  // Probability, in [0, 1), with which a normalised weight is set to zero; in steps of 1/256.
  double dropout_p = 0.0;
  // Added to s_ij^2; at least 1e-30, for float64 nodes 1e-290.
  double eps = 1e-5;
  // Factor of |k|_p^2; nullopt: 1 / (2 sqrt d), the paper's.
  std::optional<double> magnitude_scale = std::nullopt;
  // int64 [2] on query's device: seed and offset of the dropout mask, the same mask on every
  // device. nullopt: drawn from the default generator of that device when dropout_p > 0.
  std::optional<at::Tensor> dropout_seed = std::nullopt;
  // Slope, for negative numbers, of a LeakyReLU that takes the logit with its biases before the
  // softmax; 1: none. Others are for exponential scores alone: no frequencies, p = 2.
  double negative_slope = 1.0;
};

// Attention of every target to the sources of the edges that come into it.
//   query [N_q, H, d]   key [N_k, H, d]   value [N_k, H, d_v]   w1, w2 [H, d, M]
//   rowptr int64 or int32 [N_q + 1], col [E]: edges sorted by target; those into target i come from
//   the sources col[rowptr[i]] .. col[rowptr[i + 1] - 1]. An edge that occurs twice counts twice.
std::tuple<at::Tensor, at::Tensor> implicit_kernel_edge_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& rowptr, const at::Tensor& col, const at::Tensor& w1,
    const std::optional<at::Tensor>& w2 = std::nullopt, const EdgeAttentionOptions& options = {});

// Computes attention with the RBF kernel instead of (s^2 + eps): exp(-|q_i - k_j|^2 / (2 sqrt d) +
// g_j), which for p = 2 is softmax attention, exp(q_i.k_j / sqrt d). options.eps is not used.
std::tuple<at::Tensor, at::Tensor> softmax_edge_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& rowptr, const at::Tensor& col, const EdgeAttentionOptions& options = {});

// The paper's form for GAT: similarity of a learned vector a and the concatenation of an edge's
// ends, x = [target_i || source_j], times exp(|x|_p^2 / (2 sqrt(2d))). Nothing of size [E, 2d].
//   vector [H, 2d]   target [N_q, H, d]   source [N_k, H, d]   value [N_k, H, d_v]
//   w1, w2 [H, 2d, M]; without w1 the RBF kernel, of which p = 2 makes exp(a.x / sqrt(2d)).
std::tuple<at::Tensor, at::Tensor> gat_edge_attention(
    const at::Tensor& vector, const at::Tensor& target, const at::Tensor& source,
    const at::Tensor& value, const at::Tensor& rowptr, const at::Tensor& col,
    const std::optional<at::Tensor>& w1 = std::nullopt,
    const std::optional<at::Tensor>& w2 = std::nullopt, const EdgeAttentionOptions& options = {});

}  // namespace ikattn
