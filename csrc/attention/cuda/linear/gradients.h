// Gradients of the backward in linear time. With d_i = dO_i . (O_i - m), of what rows are less the
// keys' m,
//   dphi_q_a = 2 / Z_i sum_b q_b (sum_c dO_ic moment_abc - d_i gram_ab)
//   dphi_k_a = 2 sum_b k_b (sum_c (v_jc - m_c) moment'_abc - gram'_ab)
//   dv_j = sum_ab k_a k_b moment'_ab + K eps e_j sum_i dO_i / Z_i
// where moment' and gram' are the queries', of dO_i / Z_i and d_i / Z_i.
//
// In causal calls dphi_q has the sums and the m of the keys before a chunk. The others have the
// sums of the queries after one, with the m of all keys that such queries see.
//
// The brackets are sums over b, products, and then over columns, in registers. Both are in units of
// scaled values and gradients, as in tensor_cores/rows.h.
#pragma once

#include "attention/cuda/linear/linear.h"

namespace ikattn::cuda {

// The side of which gradients of features are made.
struct GradientSide {
  LinearTokens tokens;
  Array rows;           // [B, row_heads, N, row_columns]  Half or bfloat16: dO, or the value
  const float* scales;  // [B, heads, scale_stride]  of a token: 1 / Z, or that of its features
  int64_t scale_stride;
  const float* deltas = nullptr;               // [B, heads, padded N]  nullptr: 1
  const uint32_t* quadratic_blocks = nullptr;  // queries' blocks, FoldedTokens::linear
  const float* pair_units;                     // [B, key_heads]
  FeatureGradients gradients;
  // Numbers of keys: their logits, and the gradients of these, [B, heads, N]; m, [B, heads, 64].
  const float* logits = nullptr;
  float* grad_logits = nullptr;
  const float* centers = nullptr;
};

const char* feature_gradients(const AttentionParams& params, const GradientSide& side,
                              const LinearSums& sums, Stream stream);

}  // namespace ikattn::cuda
