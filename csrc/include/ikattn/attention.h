// Implicit-kernel attention: the public C++ functions.
//
// They call the operators torch.ops.ikattn.* of Python, gradients included, without Python in the
// process. Definitions and symbols: K. Song, Y. Jung, D. Kim, I. Moon, "Implicit Kernel Attention",
// AAAI 2021 (arXiv 2006.06147).
//
//   B batch, H query heads, G key/value heads (G divides H), L queries, S keys,
//   d head size of query and key, d_v head size of value, M frequencies, F = 2 M features
//
//   weight_ij = (s_ij^2 + eps) exp(g_j + key_bias_j + mask_ij) / Z_i
//   g_j       = magnitude_scale |k_j|_p^2
//   s_ij      = phi(q_i) . phi(k_j) / (4 M)
//   phi(x)    = [cos 2pi x.w1 + cos 2pi x.w2, sin 2pi x.w1 + sin 2pi x.w2]
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "ikattn/version.h"

namespace ikattn {

// The options of a call beside its five main tensors.
struct AttentionOptions {
  // Order of the norm in a key's magnitude, any real >= 1; nullopt: no magnitude, g_j = 0.
  std::optional<double> p = 2.0;
  // Added to the logit of a key in every row; broadcastable to [B, H, S] or [B, G, S].
  // -inf hides a key.
  std::optional<at::Tensor> key_bias = std::nullopt;
  // Broadcastable to [B, H, L, S]. Bool: true = may attend. Floating point: added to the logit.
  std::optional<at::Tensor> attn_mask = std::nullopt;
  // Probability, in [0, 1), with which a normalised weight is set to zero; in steps of 1/256.
  double dropout_p = 0.0;
  // Query i sees keys 0..i (aligned at the top left); combines with attn_mask.
  bool is_causal = false;
  // Allows key and value to have fewer heads than query.
  bool enable_gqa = false;
  // Added to s_ij^2; positive.
  double eps = 1e-5;
  // Factor of |k|_p^2; nullopt: 1 / (2 sqrt d), the paper's.
  std::optional<double> magnitude_scale = std::nullopt;
  // int64 [2] on query's device: seed and offset of the dropout mask, the same mask on every
  // device. [7] for a part of a larger call, with its mask: then the first batch item and head of
  // the part, the heads of the larger call, and the first query and key, multiples of 16. nullopt:
  // drawn from the default generator of that device when dropout_p > 0.
  std::optional<at::Tensor> dropout_seed = std::nullopt;
};

// Implicit-kernel attention.
//   query [B, H, L, d]   key [B, G, S, d]   value [B, G, S, d_v]
//   w1, w2 [H, d, M] or [G, d, M], optionally with a leading axis B; w2 absent: stationary kernel
// Returns [B, H, L, d_v]. A row that sees no key is zero. Throws c10::Error on wrong arguments.
at::Tensor implicit_kernel_attention(const at::Tensor& query, const at::Tensor& key,
                                     const at::Tensor& value, const at::Tensor& w1,
                                     const std::optional<at::Tensor>& w2 = std::nullopt,
                                     const AttentionOptions& options = {});

// The attention weights after dropout: [B, H, L, S], or their mean over heads, [B, L, S], without a
// tensor of the former size.
at::Tensor implicit_kernel_weights(const at::Tensor& query, const at::Tensor& key,
                                   const at::Tensor& w1,
                                   const std::optional<at::Tensor>& w2 = std::nullopt,
                                   const AttentionOptions& options = {},
                                   bool average_heads = false);

// phi(x): x [B, H, L, d], w1 and w2 as above. Returns [B, H, L, 2 M], cosines first.
at::Tensor spectral_features(const at::Tensor& x, const at::Tensor& w1,
                             const std::optional<at::Tensor>& w2 = std::nullopt);

// Attention from features that were computed before, as for decoding, where queries arrive one by
// one.
//   query_features [B, H, L, F]   key_features [B, K, S, F]   of spectral_features, float32 or
//   float64; value [B, G, S, d_v] of any floating type; K and G divide H
//   logits, of the features' type, broadcastable to [B, H, L, S]: what is added to
//   log(s_ij^2 + eps), magnitudes of keys and masks together; -inf hides a key
// Returns [B, H, L, d_v] of value's type. A row that sees no key is zero.
at::Tensor attention_from_features(const at::Tensor& query_features, const at::Tensor& key_features,
                                   const at::Tensor& logits, const at::Tensor& value,
                                   double eps = 1e-5);

// Draws a dropout seed and offset, two int64 numbers on the device, from its default generator.
at::Tensor draw_dropout_seed(const at::Device& device);

}  // namespace ikattn
