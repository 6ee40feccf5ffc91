// How the sums of a thread become gradients in the tensor-core backward, whichever kernel made
// them.
#pragma once

#include "attention/cuda/folded_backward.h"
#include "attention/cuda/folded_tiles.h"

namespace ikattn::cuda {
namespace {

// Of a key head.
struct KeyScales {
  float fit;                     // makes sqrt(K e_j) |s_ij| (dP - delta) fit; see folded_backward.h
  float features, logit, value;  // multiply what pairs add up to
};
template <typename T>
__device__ __forceinline__ KeyScales key_scales_of(const AttentionParams& params,
                                                   const FoldedTokens& tokens,
                                                   const FoldedRows& rows, int64_t bk,
                                                   int64_t value_head) {
  const float value_units = value_scale_of(tokens, value_head);
  const float gradient_units = gradient_scale_of(rows, bk);
  const float units = gradient_units * value_units;
  const float value_bound = __uint_as_float(tokens.value_bounds[bk]) * value_units;
  const float kept = static_cast<float>(dropout_rescale(params.dropout_threshold));
  KeyScales scales;
  scales.fit = fit_of(2 * __uint_as_float(rows.row_bound[bk]) * value_bound);
  scales.features = 2 / (static_cast<float>(4 * params.M) * scales.fit) / units;
  scales.logit = 1 / kWeightScale<T> / units;
  scales.value = kept / kWeightScale<T> / gradient_units;
  return scales;
}

// grad_phi_q of query i, of which `sum(n, c)` is the thread's part in `units`.
template <int F, bool kGeneral, typename Sum>
__device__ __forceinline__ void store_query_gradients(const AttentionBackwardParams& params,
                                                      const FoldedRows& rows, const QueryBlock& at,
                                                      int64_t i, float fit, float units,
                                                      const Sum& sum, float* grad_phi_q) {
  const float normalizer = rows.normalizer[at.bh * padded_tokens(params.L) + i];
  const bool blind = normalizer == (kGeneral ? INFINITY : 0.0f);
  const float norm = 1 / static_cast<float>(4 * params.M);
  const float scale = 2 * (kGeneral ? norm * norm : normalizer) / fit / units;
  const int width = static_cast<int>(2 * params.M);
  float* row = grad_phi_q + (at.bh * params.L + i) * width;
  for_columns<F>(width, [&](int f, int n, int c) { row[f] = blind ? 0 : sum(n, c) * scale; });
}

// grad_phi_k, grad_value and the logits' gradients of a thread's two keys, the first of them j0;
// key_sum(half, n, c) and value_sum(half, n, c) are its parts.
template <int F, int V, typename KeySum, typename ValueSum>
__device__ __forceinline__ void store_key_gradients(
    const AttentionBackwardParams& params, const float* logits,
    const PairGradients<float>& gradients, const KeyScales& scales, int64_t b, int64_t key_head,
    int64_t j0, const float (&logit_sums)[2], const KeySum& key_sum, const ValueSum& value_sum) {
  const int64_t bk = b * params.key_heads + key_head;
  const int width = static_cast<int>(2 * params.M), d_v = static_cast<int>(params.d_v);
  const Tokens grad_value(params.grad_value, b, key_head);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t j = j0 + 8 * half;
    const float logit = sum_of_lanes<4>(logit_sums[half]);
    if (j >= params.S) continue;
    // A hidden key's numbers may be anything.
    const bool hidden = logits[bk * params.S + j] == minus_infinity<float>();
    if (threadIdx.x % 4 == 0) {
      gradients.logits[bk * params.S + j] = hidden ? 0 : logit * scales.logit;
    }
    float* row = gradients.phi_k + (bk * params.S + j) * width;
    for_columns<F>(width, [&](int f, int n, int c) {
      row[f] = hidden ? 0 : key_sum(half, n, c) * scales.features;
    });
    if (params.grad_value.type == ElementType::kNone) continue;
    for_columns<V>(d_v, [&](int column, int n, int c) {
      grad_value.store<float>(j, column, hidden ? 0 : value_sum(half, n, c) * scales.value);
    });
  }
}

}  // namespace
}  // namespace ikattn::cuda
