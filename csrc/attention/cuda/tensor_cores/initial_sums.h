// Initial sums of the pairs of causal calls in linear time: sums over all tokens beyond a chunk, to
// which the pairs of the chunk are added. The forward's is in epilogue_forward.h.
#pragma once

#include "attention/cuda/tensor_cores/blocks.h"

namespace ikattn::cuda {

// Gradients with which the backward begins. Queries that are not in tokens.linear.quadratic_blocks
// have the gradients of their features so far where the results will be, and so have keys, with
// those of their logits. The first chunks of a head's keys go by pairs, as many as
// tokens.linear.quadratic_heads says.
struct InitialGradients {
  int chunk = 0, most = 0;       // tokens of a chunk, 0: there are none; chunks that go on, at most
  const float* value = nullptr;  // [B, key_heads, S, 64]  gradients; nullptr: not wanted

  __device__ __forceinline__ int chunk_of(int token) const { return min(token / chunk, most); }
  // Returns the first key that a block of queries sees by pairs.
  __device__ __forceinline__ int first_key(const QueryBlock& at) const {
    return chunk_of(at.i0) * chunk;
  }
  // Returns whether keys go on: after their chunk there are queries, and none of these goes by
  // pairs.
  __device__ __forceinline__ bool has_keys(const FoldedTokens& tokens, const KeyBlock& at) const {
    if (chunk == 0) return false;
    const int own = chunk_of(at.j0);
    return own < most && static_cast<uint32_t>(own) >= tokens.linear.quadratic_heads[at.bk];
  }
  // Returns the query from which on none sees these keys by pairs.
  __device__ __forceinline__ int end_of_queries(const KeyBlock& at) const {
    return (chunk_of(at.j0) + 1) * chunk;
  }
};

namespace {

// Whether kernels go on from such gradients: linear time has no wider values.
template <int V, Pairs kPairs>
constexpr bool kGoesOn = kPairs == Pairs::kCausal && V == 64;

// Returns whether a block of queries is not computed in linear time.
__device__ __forceinline__ bool is_quadratic(const AttentionParams& params,
                                             const FoldedTokens& tokens, const QueryBlock& at) {
  if (tokens.linear.quadratic_blocks == nullptr) return true;
  const int blocks = static_cast<int>((params.L + kLinearQueries - 1) / kLinearQueries);
  return tokens.linear.quadratic_blocks[at.bh * blocks + at.i0 / kLinearQueries] != 0;
}

// Calls put(n, c, x) for the thread's columns of a row of gradients of features so far, in units of
// `scale`; 0: the row is zero.
template <int F, typename Put>
__device__ __forceinline__ void for_initial_features(const FeatureGradients& so_far, int64_t heads,
                                                     int64_t bh, int64_t N, int64_t token,
                                                     float scale, const Put& put) {
  if (token >= N || scale == 0) return;
  const float unit = so_far.scales[scale_place(0, heads, bh, N) + token] / scale;
  const Half* row = so_far.rows + (bh * N + token) * F;
  for_pairs<F>([&](int column, int n) {
    const float2 two = unpack<Half>(load_vector<uint32_t>(row + column));
    put(n, 0, two.x * unit);
    put(n, 1, two.y * unit);
  });
}

}  // namespace
}  // namespace ikattn::cuda
