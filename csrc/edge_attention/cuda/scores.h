// The products, logits and weights of edges, by one warp.
#pragma once

#include "edge_attention/params.h"
#include "support/cuda/warps.h"

namespace ikattn::cuda {
namespace {

// a.b of rows in global memory, in every lane.
template <typename T>
__device__ __forceinline__ T warp_dot(const T* a, const T* b, int64_t count, int lane) {
  T sum = 0;
  for (int64_t k = lane; k < count; k += 32) sum += a[k] * b[k];
  return sum_of_lanes(sum);
}

// What is added to the logarithm of the score of edge e; of an exponential score, without it.
template <typename T>
__device__ __forceinline__ T bias_of(const EdgeParams<T>& p, int64_t e, int64_t h) {
  const T of_key = p.key_logits[p.source[e] * p.H + h];
  if (p.edge_logits == nullptr) return of_key;
  return of_key + p.edge_logits[p.edge_heads == 1 ? e : e * p.H + h];
}

template <typename T>
__device__ __forceinline__ T product_of(const EdgeParams<T>& p, int64_t i, int64_t e, int64_t h,
                                        int lane) {
  const T product = warp_dot(p.query_features + (i * p.H + h) * p.F,
                             p.key_features + (p.source[e] * p.H + h) * p.F, p.F, lane);
  return p.exponential ? product : product / static_cast<T>(2 * p.F);
}

__device__ __forceinline__ float exponential_of(float x) { return expf(x); }
__device__ __forceinline__ double exponential_of(double x) { return exp(x); }

// score * exp(bias - shift); 0 where the edge is hidden. A shift of -inf: none of them is seen.
template <typename T>
__device__ __forceinline__ T weight_of(const EdgeParams<T>& p, T product, T bias, double shift) {
  if (bias == -INFINITY) return 0;
  const double finite = shift == -INFINITY ? 0.0 : shift;
  const T logit = p.exponential ? bias + product : bias;
  const T weight = exponential_of(static_cast<T>(static_cast<double>(logit) - finite));
  return p.exponential ? weight : weight * (product * product + p.eps);
}

template <typename T>
__device__ __forceinline__ T dropped(const EdgeParams<T>& p, int64_t edge_head, T weight) {
  if (p.keep == nullptr) return weight;
  return p.keep[edge_head] ? weight * p.rescale : T(0);
}

}  // namespace
}  // namespace ikattn::cuda
