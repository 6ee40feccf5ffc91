// Numbers of rows that the parts of the tensor-core backward share.
//
// With S = phi_q . phi_k' of the folded form and Z' = sum_j w:
//   x = (dP - delta) / Z',  dphi_q = 2 sum_j S x phi_k',  dphi_k = 2 c sqrt(e_j) sum_i S x phi_q
//   dV = sum_i (w / Z') dO,  dlog = sum_i w x
// S x is a factor of products, in Half. What it is multiplied with to fit there follows from
// w / Z' <= 1, so that neither magnitudes nor eps can make it overflow:
//   by query: |S| <= sqrt(Z')
//   by key:   sqrt(K e_j) |S| / Z' <= min(1 / (2 sqrt(eps)), sqrt(K / Z'))
// and |dP - delta| <= 2 |dO_i| max_j |V_j|. In the general form, with E = exp(logit) / Z,
//   dphi_q = 2 / (4 M) sum_j s E (dP - delta) phi_k,  |s| E <= 1 / (2 sqrt(eps)), by key likewise.
#pragma once

#include "attention/cuda/operands/operands.h"

namespace ikattn::cuda {

// Numbers of a query that its pairs need.
struct FoldedRows {
  // [B, H, padded L]  folded: 1 / Z', 0: sees nothing, or is none; general: log Z, likewise
  // infinity. NaN: poisoned
  float* normalizer;
  float* low;       // [B, H, padded L]  general: the rest of log Z
  float* delta;     // [B, H, padded L]  sum over d_v of output grad_output
  float* fit;       // [B, H, padded L]  makes S (dP - delta), or s E (dP - delta), fit, by query
  void* gradients;  // [B, H, L, padded d_v], T: grad_output; rows that are not finite are zero
  // [B, key_heads]  bits of max |dO_i|, where grad_output is multiplied with a power of two that
  // follows from it, as float32 is, and where pairs are not needed; nullptr: it is not
  uint32_t* gradient_bound;
  // [B, key_heads]  bits of max |dO_i| / Z', of calls that take linear time; else nullptr
  uint32_t* weighted_bound;
  uint32_t* row_bound;  // [B, key_heads]  bits of max |dO_i| min(1 / (2 sqrt(eps)), sqrt(K / Z'))
};

// Returns the factor of grad_output; the value has a scale of its own. Everything here is in these
// units: products of both, as delta is, in the product of the two.
__device__ __forceinline__ float gradient_scale_of(const FoldedRows& rows, int64_t bk) {
  return rows.gradient_bound == nullptr ? 1.0f
                                        : fitting_power(__uint_as_float(rows.gradient_bound[bk]));
}

// Returns the factor by which a bounded number fits in Half: rounding may pass a bound, and so 2^15
// is left of 2^16. Bounds that nothing reaches must not make scales of infinity.
__device__ __forceinline__ float fit_of(float bound) {
  return bound > 1e-25f ? 32768.0f / min(bound, 1e30f) : 1.0f;
}

// Fills `rows`, in memory of the executor.
const char* make_folded_rows(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                             const Route& route, const FoldedTokens& tokens, FoldedRows& rows);

struct InitialGradients;

// One kernel's blocks own queries, and one's own keys, so that no sum depends on the order in which
// blocks run.

// grad_phi_q, but of heads that need none of it (tokens.linear.quadratic_heads), and from `initial`
// on. general_alone: other kernels have the folded form.
const char* folded_query_gradients(const AttentionBackwardParams& params, Stream stream,
                                   const FoldedTokens& tokens, const FoldedRows& rows,
                                   const FeatureGradients& grad_phi_q,
                                   const InitialGradients& initial, bool general_alone);

// grad_phi_k, grad_value and the gradients of the keys' logits, of which those of `logits` are
// read; likewise.
const char* folded_key_gradients(const AttentionBackwardParams& params, Stream stream,
                                 const FoldedTokens& tokens, const FoldedRows& rows,
                                 const float* logits, const FoldedGradients& gradients,
                                 const InitialGradients& initial, bool general_alone);

// Computes the gradients of queries of wide rows.
const char* wide_query_gradients(const AttentionBackwardParams& params, Stream stream,
                                 const FoldedTokens& tokens, const FoldedRows& rows,
                                 const FeatureGradients& grad_phi_q);
const char* wide_key_gradients(const AttentionBackwardParams& params, Stream stream,
                               const FoldedTokens& tokens, const FoldedRows& rows,
                               const float* logits, const FoldedGradients& gradients);

}  // namespace ikattn::cuda
