// Norm-aware contributions: the amount of each token that a layer of attention really moves.
//
// G. Kobayashi, T. Kuribayashi, S. Yokoi, K. Inui, "Attention is Not Only a Weight", EMNLP 2020,
// and "Incorporating Residual and Normalization Layers into Analysis of Masked Language Models",
// EMNLP 2021; A. Modarressi et al., "GlobEnc", NAACL 2022, for the encoder map.
//
//   B batch, H query heads, G key/value heads (G divides H), L queries, S keys,
//   d_v head size of value, D model size
//
//   f_h(x_j) = W_O^h v_j^h, with W_O the weight of the out-projection and v the value, its bias
//   included; y_ij = sum_h a_ij^h f_h(x_j) is the contribution of token j to query i.
//
// No tensor ever has both L x S and D: time O(B L S H^2 + B S H d_v D), memory the maps themselves
// and O(B S H^2).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "ikattn/attention.h"

namespace ikattn {

// A normalisation layer as it acted on one batch: a linear map, once its scale is known.
struct NormStats {
  at::Tensor weight;     // [D], gamma
  at::Tensor scale;      // [B, L], what the rows of its true input were divided by, eps inside
  bool centered = true;  // whether the mean is taken off first (LayerNorm); RMSNorm: false
};

// The block around the attention, and which maps are wanted.
struct ContributionOptions {
  // [B, L, D], added to the attention's output: x_i comes to y_ii. Needs queries that are among the
  // keys.
  std::optional<at::Tensor> residual = std::nullopt;
  std::optional<NormStats> norm = std::nullopt;            // after the residual sum
  std::optional<NormStats> second_norm = std::nullopt;     // after norm, the block's second one
  std::optional<at::Tensor> query_padding = std::nullopt;  // bool [B, L], true = padding
  std::optional<at::Tensor> key_padding = std::nullopt;    // bool [B, S]
  // The token of query i is that of key i + diagonal.
  int64_t diagonal = 0;

  bool value_norms = true;
  bool summed = true;
  bool with_residual = true;  // the last three where residual, norm and second_norm are given
  bool with_norm = true;
  bool encoder = true;
  bool mixing_ratios = true;
};

// Undefined where not wanted or not defined. In float64 if an input is, otherwise in float32.
// Masked and padded pairs are 0.
struct ContributionMaps {
  at::Tensor value_norms;    // [B, H, S]  |f_h(x_j)|
  at::Tensor summed;         // [B, L, S]  |y_ij|
  at::Tensor with_residual;  // [B, L, S]  |y_ij + [j is i] x_i|
  at::Tensor with_norm;      // [B, L, S]  the same through norm
  at::Tensor encoder;        // [B, L, S]  and through second_norm
  // [4, B, L], one row for each of the four maps above: the norm of the sum over other tokens, over
  // that plus the norm of the token's own part. 0 where there is neither, and for undefined maps.
  at::Tensor mixing_ratios;
};

//   attn_weights [B, H, L, S]   value [B, G, S, d_v]   out_proj_weight [D, H d_v]
// Differentiable with respect to all of them, residual and norms. Throws c10::Error on wrong
// arguments.
ContributionMaps contributions(const at::Tensor& attn_weights, const at::Tensor& value,
                               const at::Tensor& out_proj_weight,
                               const ContributionOptions& options = {});

// The source of weights from query and key, which are never in memory as a whole.
struct AttentionSource {
  // The implicit kernel's frequencies; absent: dot attention, softmax(scale q.k + ...).
  std::optional<at::Tensor> w1 = std::nullopt, w2 = std::nullopt;
  std::optional<double> scale = std::nullopt;  // of dot attention; nullopt: 1 / sqrt(d)
  // The options of implicit_kernel_attention. Dot attention reads key_bias, attn_mask, is_causal
  // and enable_gqa. Dropout must be 0.
  AttentionOptions options;
};

// Computes the maps from query [B, H, L, d] and key [B, G, S, d], without a tensor [B, H, L, S].
ContributionMaps streamed_contributions(const at::Tensor& query, const at::Tensor& key,
                                        const at::Tensor& value, const at::Tensor& out_proj_weight,
                                        const AttentionSource& source = {},
                                        const ContributionOptions& options = {});

}  // namespace ikattn
