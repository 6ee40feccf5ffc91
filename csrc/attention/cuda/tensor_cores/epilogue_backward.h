// Turns the sums of a thread into gradients in the tensor-core backward, whichever kernel made
// them.
#pragma once

#include "attention/cuda/tensor_cores/pairs.h"
#include "attention/cuda/tensor_cores/rows.h"

namespace ikattn::cuda {
namespace {

// Scales of a key head.
struct KeyScales {
  float fit;                     // makes sqrt(K e_j) |s_ij| (dP - delta) fit; see rows.h
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
  const float dropout_scale = static_cast<float>(dropout_rescale(params.dropout_threshold));
  KeyScales scales;
  scales.fit = fit_of(2 * __uint_as_float(rows.row_bound[bk]) * value_bound);
  scales.features = 2 / (static_cast<float>(4 * params.M) * scales.fit) / units;
  scales.logit = 1 / kWeightScale<T> / units;
  scales.value = dropout_scale / kWeightScale<T> / gradient_units;
  return scales;
}

// Stores one row of gradients of F features, from `first` on, of which the thread's parts are
// sum(n, c) * scale; zeros for a row that sees nothing. All lanes of the warp call it, also without
// a row.
template <int F, typename Sum>
__device__ __forceinline__ void store_feature_row(const AttentionParams& params,
                                                  const FeatureGradients& to, int64_t heads,
                                                  int64_t bh, int64_t N, int64_t token, int first,
                                                  bool is_zero, float scale, const Sum& sum) {
  const int width = static_cast<int>(padded_columns(2 * params.M));
  const bool there = token < N;
  float most = 0;
#pragma unroll
  for (int n = 0; n < F / 8; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float size = fabsf(sum(n, c));
      most = is_finite(size) && size > most ? size : most;
    }
  }
  float fit = fitting_power(max_of_lanes<4>(most));
  if (scale != scale) fit = scale;  // a poisoned row is NaN, not 0
  if (there && threadIdx.x % 4 == 0) {
    to.scales[scale_place(first / 128, heads, bh, N) + token] = is_zero ? 0.0f : scale / fit;
  }
  Half* row = to.rows + (bh * N + token) * width + first;
#pragma unroll
  for (int n = 0; n < F / 8; n += 2) {
    if (n * 8 >= width - first) continue;  // a slice of 128, of 64 features
    const uint32_t low = pack_f16x2(sum(n, 0) * fit, sum(n, 1) * fit);
    const uint32_t high = pack_f16x2(sum(n + 1, 0) * fit, sum(n + 1, 1) * fit);
    store_tiles(row + n * 8, there, is_zero ? 0 : low, is_zero ? 0 : high);
  }
}

// Returns FoldedRows::normalizer of query i; where there is no query, as if it saw nothing.
template <bool kGeneral>
__device__ __forceinline__ float normalizer_of(const AttentionParams& params,
                                               const FoldedRows& rows, const QueryBlock& at,
                                               int64_t i) {
  if (i < params.L) return rows.normalizer[at.bh * padded_tokens(params.L) + i];
  return kGeneral ? INFINITY : 0.0f;
}
// Returns the factor of the sums of a query's features, in `units`.
template <bool kGeneral>
__device__ __forceinline__ float query_scale(const AttentionParams& params, float normalizer,
                                             float fit, float units) {
  const float norm = 1 / static_cast<float>(4 * params.M);
  return 2 * (kGeneral ? norm * norm : normalizer) / fit / units;
}
// Stores grad_phi_q of query i, F features from `first` on, of which `sum(n, c)` is the thread's
// part in `units`. All lanes of the warp call it, also where there is no such query.
template <int F, bool kGeneral, typename Sum>
__device__ __forceinline__ void store_query_gradients(const AttentionBackwardParams& params,
                                                      float normalizer, const QueryBlock& at,
                                                      int64_t i, int first, float fit, float units,
                                                      const Sum& sum,
                                                      const FeatureGradients& grad_phi_q) {
  const bool blind = normalizer == (kGeneral ? INFINITY : 0.0f);
  const float scale = query_scale<kGeneral>(params, normalizer, fit, units);
  store_feature_row<F>(params, grad_phi_q, params.B * params.H, at.bh, params.L, i, first, blind,
                       scale, sum);
}

// Whether a thread's two keys, j0 and 8 further on, are hidden. Their numbers may be anything.
struct HiddenKeys {
  bool of[2];
};
__device__ __forceinline__ HiddenKeys hidden_keys(const AttentionParams& params,
                                                  const float* logits, int64_t bk, int64_t j0) {
  HiddenKeys hidden;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t j = j0 + 8 * half;
    hidden.of[half] = j < params.S && logits[bk * params.S + j] == minus_infinity<float>();
  }
  return hidden;
}
// Calls visit(half, j) for those of a thread's two keys that there are.
template <typename Visit>
__device__ __forceinline__ void for_keys(const AttentionParams& params, int64_t j0,
                                         const Visit& visit) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (j0 + 8 * half < params.S) visit(half, j0 + 8 * half);
  }
}
// Stores the gradients of two keys' logits, from the `sums` of all lanes.
__device__ __forceinline__ void store_logit_gradients(const AttentionBackwardParams& params,
                                                      const HiddenKeys& hidden,
                                                      const FoldedGradients& gradients,
                                                      const KeyScales& scales, int64_t bk,
                                                      int64_t j0, const float (&sums)[2]) {
  if (threadIdx.x % 4 != 0) return;
  for_keys(params, j0, [&](int half, int64_t j) {
    gradients.logits[bk * params.S + j] = hidden.of[half] ? 0 : sums[half] * scales.logit;
  });
}
// Stores grad_phi_k of two keys, F features from `first` on; sum(half, n, c): the thread's parts.
// All lanes of the warp call it, also where there are no such keys.
template <int F, typename Sum>
__device__ __forceinline__ void store_feature_gradients(const AttentionBackwardParams& params,
                                                        const HiddenKeys& hidden,
                                                        const FoldedGradients& gradients,
                                                        const KeyScales& scales, int64_t bk,
                                                        int64_t j0, int first, const Sum& sum) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    store_feature_row<F>(params, gradients.phi_k, params.B * params.key_heads, bk, params.S,
                         j0 + 8 * half, first, hidden.of[half], scales.features,
                         [&](int n, int c) { return sum(half, n, c); });
  }
}
// Stores grad_value of two keys, V columns from `first` on.
template <int V, typename Sum>
__device__ __forceinline__ void store_value_gradients(const AttentionBackwardParams& params,
                                                      const HiddenKeys& hidden,
                                                      const KeyScales& scales, int64_t b,
                                                      int64_t key_head, int64_t j0, int first,
                                                      const Sum& sum) {
  const Array& grad_value = params.grad_value;
  const RowPairs pairs(grad_value);
  const int64_t head = b * grad_value.stride[0] + key_head * grad_value.stride[1];
  for_keys(params, j0, [&](int half, int64_t j) {
    pairs.store<V>(head + j * grad_value.stride[2], first, params.d_v, [&](int n) {
      return hidden.of[half]
                 ? make_float2(0, 0)
                 : make_float2(sum(half, n, 0) * scales.value, sum(half, n, 1) * scales.value);
    });
  });
}

// Stores all gradients of a thread's two keys, the first of them j0; key_sum(half, n, c) and
// value_sum(half, n, c) are its parts.
template <int F, int V, typename KeySum, typename ValueSum>
__device__ __forceinline__ void store_key_gradients(
    const AttentionBackwardParams& params, const HiddenKeys& hidden,
    const FoldedGradients& gradients, const KeyScales& scales, int64_t b, int64_t key_head,
    int64_t j0, const float (&logit_sums)[2], const KeySum& key_sum, const ValueSum& value_sum) {
  const int64_t bk = b * params.key_heads + key_head;
  const float sums[2] = {sum_of_lanes<4>(logit_sums[0]), sum_of_lanes<4>(logit_sums[1])};
  store_logit_gradients(params, hidden, gradients, scales, bk, j0, sums);
  store_feature_gradients<F>(params, hidden, gradients, scales, bk, j0, 0, key_sum);
  if (params.grad_value.type == ElementType::kNone) return;
  store_value_gradients<V>(params, hidden, scales, b, key_head, j0, 0, value_sum);
}

}  // namespace
}  // namespace ikattn::cuda
