// Turns scores into factors of gradients in the backward pass on tensor cores: of queries, and of
// keys.
#pragma once

#include "attention/cuda/tensor_cores/pairs.h"
#include "attention/cuda/tensor_cores/rows.h"

namespace ikattn::cuda {
namespace {

// Numbers of a thread's two queries that their pairs need.
template <Pairs kPairs>
struct QueryRows {
  float delta[2], fit[2];
  float normalizer[2], low[2];  // general

  // Loads the numbers of queries i and i + 8.
  __device__ __forceinline__ void load(const AttentionParams& params, const FoldedRows& rows,
                                       int64_t bh, int64_t i) {
    const int64_t base = bh * padded_tokens(params.L);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t index = base + i + 8 * half;
      const bool there = i + 8 * half < params.L;
      delta[half] = there ? rows.delta[index] : 0.0f;
      fit[half] = there ? rows.fit[index] : 0.0f;
      if constexpr (kPairs == Pairs::kGeneral) {
        fit[half] /= static_cast<float>(4 * params.M);
        normalizer[half] = there ? rows.normalizer[index] : INFINITY;
        low[half] = there ? rows.low[index] : 0.0f;
        // A poisoned query's scores are 0.
        if (normalizer[half] != normalizer[half]) fit[half] = normalizer[half];
      }
    }
  }
  // Sets the initial products of gradients and values: -delta, but under dropout.
  __device__ __forceinline__ void begin(float (&x)[2][4]) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) x[n][c] = kDrops<kPairs> ? 0 : -delta[c / 2];
    }
  }
  // Makes factors of grad_phi_q from scores of 16 keys, and x, dP - delta, or dP under dropout.
  //   dropout_scale: the rescale of dropout
  __device__ __forceinline__ Fragment products_of(float (&s)[2][4], const float (&x)[2][4],
                                                  const FragmentPairs<kPairs>& at,
                                                  const KeyColumns& keys,
                                                  float dropout_scale) const {
    Fragment products;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float product = x[n][c];
        if constexpr (kDrops<kPairs>) {
          product = (at.drops(n, c) ? 0 : product * dropout_scale) - delta[c / 2];
        }
        // A hidden key's score is 0 where it is folded, and its value may be anything.
        const float score = s[n][c];
        product = score == 0 ? 0 : product * (score * fit[c / 2]);
        if constexpr (kPairs == Pairs::kGeneral) {
          if (product != 0) {
            const float exponential =
                at.visible.exponential(at.row_of(n, c), at.column_of(n, c), keys.terms[n][c % 2],
                                       keys.lows[n][c % 2], normalizer[c / 2], low[c / 2]);
            product = exponential == 0 ? 0 : product * exponential;
          }
        } else if (!at.sees(n, c)) {
          product = 0;
        }
        s[n][c] = product;
      }
      products.template put<Half>(n, s[n]);
    }
    return products;
  }
};

// Numbers of the 16 queries that a thread's two keys are paired with: columns of the transposed
// pairs.
struct QueryColumns {
  float normalizer[2][2], delta[2][2];
  float low[2][2];  // general
};
// Loads the numbers of the chunk-th 16 of kQueries queries, which lie one array after the other.
template <Pairs kPairs, int kQueries>
__device__ __forceinline__ QueryColumns load_queries(Shared<const float> numbers, int chunk) {
  QueryColumns queries;
  load_columns(numbers, chunk, queries.normalizer);
  load_columns(numbers + kQueries, chunk, queries.delta);
  if constexpr (kPairs == Pairs::kGeneral) load_columns(numbers + 2 * kQueries, chunk, queries.low);
  return queries;
}

// Numbers of a thread's two keys that their pairs need, and the gradients of their logits so far.
template <typename T, Pairs kPairs>
struct KeyRows {
  float fit[2], terms[2], lows[2];
  float logit_sums[2] = {};

  // Loads the numbers of keys j and j + 8.
  //   fit_of_head: KeyScales::fit
  __device__ __forceinline__ void load(const AttentionParams& params, const FoldedTokens& tokens,
                                       int64_t bk, int64_t j, float fit_of_head) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t key = j + 8 * half;
      // Folded: sqrt(K e_j), with which the score is bounded. There is nothing to fold in the
      // other.
      float scale = 1;
      if constexpr (kPairs != Pairs::kGeneral) {
        scale = key < params.S
                    ? tokens.forms.scales[bk * params.S + key] * static_cast<float>(4 * params.M)
                    : 0.0f;
      }
      fit[half] = scale * fit_of_head * (1 / kWeightScale<T>);
      const int64_t padded = bk * padded_tokens(params.S) + min(key, params.S - 1);
      terms[half] = tokens.forms.terms[padded];
      lows[half] = tokens.forms.lows[padded];
    }
  }
  // Sets the initial products of values and gradients: -delta, but under dropout.
  __device__ __forceinline__ static void begin(float (&x)[2][4], const QueryColumns& queries) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) x[n][c] = kDrops<kPairs> ? 0 : -queries.delta[n][c % 2];
    }
  }
  // Makes factors of grad_value and of grad_phi_k from scores of 16 queries, and x, dP - delta, or
  // dP under dropout.
  //   norm: 1 / (4M); dropout_scale: the rescale of dropout
  __device__ __forceinline__ void meet(float (&s)[2][4], float (&x)[2][4],
                                       const FragmentPairs<kPairs, true>& at,
                                       const QueryColumns& queries, float norm, float eps,
                                       float dropout_scale, Fragment& weights, Fragment& products) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float weight[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float score = s[n][c];
        const bool dropped = at.drops(n, c);
        if constexpr (kDrops<kPairs>) {
          x[n][c] = (dropped ? 0 : x[n][c] * dropout_scale) - queries.delta[n][c % 2];
        }
        float similarity, inverse;  // the weight is their product
        if constexpr (kPairs == Pairs::kGeneral) {
          inverse = kWeightScale<T> * at.visible.exponential(at.row_of(n, c), at.column_of(n, c),
                                                             terms[c / 2], lows[c / 2],
                                                             queries.normalizer[n][c % 2],
                                                             queries.low[n][c % 2]);
          score *= norm;
          similarity = score * score + eps;
        } else {
          similarity = score * score + terms[c / 2];
          inverse = at.sees(n, c) ? queries.normalizer[n][c % 2] * kWeightScale<T> : 0.0f;
        }
        weight[c] = s[n][c] = 0;
        if (inverse == 0) continue;  // not seen: whatever the key holds
        const float scaled = inverse * x[n][c];
        weight[c] = dropped ? 0 : similarity * inverse;
        logit_sums[c / 2] += similarity * scaled;
        s[n][c] = score * fit[c / 2] * scaled;
      }
      weights.template put<T>(n, weight);
      products.template put<Half>(n, s[n]);
    }
  }
};

}  // namespace
}  // namespace ikattn::cuda
