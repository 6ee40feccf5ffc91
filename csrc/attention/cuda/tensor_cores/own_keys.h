// Steps of the kernels whose blocks own keys: copies of queries, and a warp's sums for its keys.
#pragma once

#include "attention/cuda/tensor_cores/backward_pairs.h"
#include "attention/cuda/tensor_cores/epilogue_backward.h"
#include "attention/cuda/tensor_cores/tiles.h"

namespace ikattn::cuda {
namespace {

// The tiles of kQueries queries that a block passes along: the same of each head that shares its
// keys, one head after the other.
template <int kQueries>
struct QueryTiles {
  int first_head, heads;
  int first, count;  // first tile and number of tiles of each head

  __device__ __forceinline__ QueryTiles(const AttentionParams& params, const KeyBlock& at)
      : first_head(at.key_head * at.group),
        heads(at.group),
        first(at.first_tile * (kStep / kQueries)),
        count(at.tiles) {
    if constexpr (kQueries != kStep) {
      const int64_t left = params.L - int64_t{first} * kQueries;
      count = left > 0 ? static_cast<int>((left + kQueries - 1) / kQueries) : 0;
    }
  }
  __device__ __forceinline__ int steps() const { return count * heads; }
  __device__ __forceinline__ int64_t head(int step) const {
    return int64_t{first_head + step / count};
  }
  __device__ __forceinline__ int64_t first_query(int step) const {
    return int64_t{first + step % count} * kQueries;
  }
};

// Copies of these tiles into stages, a thread's share; L says where they lie: features from
// kFeatures on, rows of grad_output from kGradients, and from kNumbers the queries' numbers for
// their pairs.
template <typename L, typename T, int F, int V, Pairs kPairs, int kQueries>
struct QueryCopy {
  const AttentionBackwardParams& params;
  const FoldedTokens& tokens;
  const FoldedRows& rows;
  const QueryTiles<kQueries>& tiles;
  int64_t b;
  RowCopy<F> feature_rows;
  RowCopy<V> gradient_rows;

  __device__ __forceinline__ QueryCopy(const AttentionBackwardParams& params,
                                       const FoldedTokens& tokens, const FoldedRows& rows,
                                       const QueryTiles<kQueries>& tiles, int64_t b)
      : params(params),
        tokens(tokens),
        rows(rows),
        tiles(tiles),
        b(b),
        feature_rows(F, F),
        gradient_rows(V, V) {}

  // Returns the first row of a step's tile, of [B, H, L].
  __device__ __forceinline__ int64_t row(int step) const {
    return (b * params.H + tiles.head(step)) * params.L + tiles.first_query(step);
  }
  // Begins to copy the tile into the stage at `base`.
  __device__ __forceinline__ void operator()(uint32_t base, int step) const {
    const int64_t first = row(step), i0 = tiles.first_query(step);
    const int count = remaining_of(params.L, i0);
    const T* gradients = static_cast<const T*>(rows.gradients) + first * V;
    feature_rows.template begin<kQueries>(base + L::kFeatures,
                                          feature_rows.source(tokens.phi_q + first * F), count);
    gradient_rows.template begin<kQueries>(base + L::kGradients, gradient_rows.source(gradients),
                                           count);
    copy_numbers(base + L::kNumbers,
                 (b * params.H + tiles.head(step)) * padded_tokens(params.L) + i0);
    cp_async_commit();
  }

 private:
  // Begins to copy normalizers, deltas and, in the general form, lows, one array after the other.
  __device__ __forceinline__ void copy_numbers(uint32_t place, int64_t first) const {
    constexpr int kArrays = kPairs == Pairs::kGeneral ? 3 : 2, kThreads = kQueries / 4;
    if (threadIdx.x >= kArrays * kThreads) return;
    const int which = threadIdx.x / kThreads;
    const float* from = which == 0                 ? rows.normalizer
                        : which < 2 || kArrays < 3 ? rows.delta
                                                   : rows.low;
    cp_async_16(place + threadIdx.x * 16, from + first + threadIdx.x % kThreads * 4);
  }
};

// Sums of a warp for its 16 keys, over 16 queries at a time. T: type of the values and grad_output.
template <typename T, int F, int V, Pairs kPairs>
struct KeySums {
  FragmentAddresses gradient_columns, query_rows, gradient_rows;  // in a stage
  KeyRows<T, kPairs> keys;  // and the gradients of their logits
  float features[1][F / 8][4] = {}, values[1][V / 8][4] = {};

  // Finds the fragments of queries' features and of rows of grad_output, from a stage's begin on.
  __device__ __forceinline__ KeySums(uint32_t queries, uint32_t gradients)
      : gradient_columns(FragmentAddresses::of_columns(gradients, 2 * V)),
        query_rows(FragmentAddresses::of_rows(queries, 2 * F)),
        gradient_rows(FragmentAddresses::of_rows(gradients, 2 * V)) {}

  // Adds to x V dO^T of the chunk-th 16 queries of a stage.
  template <typename Values>
  __device__ __forceinline__ void multiply_values(float (&x)[1][2][4], const Values& own_values,
                                                  uint32_t stage, int chunk) const {
    multiply_by_columns<T, V / 16>(x, own_values, [&](int k) {
      return stage + gradient_columns.at<2 * V>(0, k) + chunk * (16 * 2 * V);
    });
  }
  // Adds w^T dO to grad_value, and dS^T phi_q to grad_phi_k, where weights and dS follow from
  // scores s and from x as KeyRows::meet() has them.
  __device__ __forceinline__ void add(float (&s)[2][4], float (&x)[2][4],
                                      const FragmentPairs<kPairs, true>& pairs,
                                      const QueryColumns& queries, float norm, float eps,
                                      float dropout_scale, uint32_t stage, int chunk) {
    Fragment weights[1], products[1];
    keys.meet(s, x, pairs, queries, norm, eps, dropout_scale, weights[0], products[0]);
    rejoin_after<kPairs>();
    multiply_by_rows<T>(values, weights, [&](int n) {
      return stage + gradient_rows.at<2 * V>(0, n) + chunk * (16 * 2 * V);
    });
    multiply_by_rows<Half>(features, products, [&](int n) {
      return stage + query_rows.at<2 * F>(0, n) + chunk * (16 * 2 * F);
    });
  }
  // Stores rows of the results, of the block's keys.
  __device__ __forceinline__ void store(const AttentionBackwardParams& params, const float* logits,
                                        const FoldedGradients& gradients, const KeyScales& scales,
                                        const KeyBlock& at) const {
    // Found anew: no register holds it over the tiles.
    const int thread = static_cast<int>(unknown_to_compiler(threadIdx.x));
    const int64_t j = at.j0 + thread / 32 * 16 + thread % 32 / 4;
    store_key_gradients<F, V>(
        params, hidden_keys(params, logits, at.bk, j), gradients, scales, at.b, at.key_head, j,
        keys.logit_sums, [&](int half, int n, int c) { return features[0][n][2 * half + c]; },
        [&](int half, int n, int c) { return values[0][n][2 * half + c]; });
  }
};

}  // namespace
}  // namespace ikattn::cuda
