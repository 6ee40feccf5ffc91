// The folded form in 16-bit operands, which the tensor cores read.
//
//   phi_k' = c sqrt(e_j) phi(k_j),  e_j = exp(g_j - max g),  S = phi_q . phi_k'
//   w = S S + K eps e_j,  K = (4 M c)^2
// K cancels in the output; c moves the weights to where their 16-bit type is dense: up to 2^15 for
// Half, and bfloat16 takes any.
#pragma once

#include "attention/cuda/tokens.h"
#include "attention/fast_path.h"
#include "support/cuda/float16.h"

namespace ikattn::cuda {

// Width of the feature rows that the kernels are compiled for, or 0.
constexpr int64_t padded_features(int64_t F) {
  return F <= 64 ? 64 : F <= 128 ? 128 : F <= 256 ? 256 : 0;
}

// Per-token numbers that are copied 64 at a time lie in rows of this many.
__host__ __device__ inline int64_t padded_tokens(int64_t N) { return (N + 63) / 64 * 64; }

struct FoldedTokens {
  const Half* phi_q;     // [B, H, L, padded F]
  const Half* phi_k;     // [B, key_heads, S, padded F]
  const float* scales;   // [B, key_heads, S]  c sqrt(e_j); 0: hidden or poisoned
  const float* eps;      // [B, key_heads, padded S]  K eps e_j; 0: hidden; NaN: poisoned
  const float* largest;  // [B, key_heads]  max g
  // [B, key_heads]  bits: kSpread: magnitudes differ too much for rows that do not see the largest;
  // kUnclean: some key or value, hidden or not, is not finite
  const uint32_t* state;
  float root_scale;  // sqrt(K)
  float log_scale;   // log K
};
constexpr uint32_t kSpread = 1, kUnclean = 2;

// Where every row sees the largest key, the folded form is right for any spread of magnitudes.
__host__ __device__ inline bool every_row_sees_all(const AttentionParams& params) {
  return params.mask.type == ElementType::kNone && !params.is_causal;
}

// Folds prepared logits; features are made from the tokens again, in float32, and rounded once.
// clean_queries: features that are not finite become zero.
const char* fold_tokens(const AttentionParams& params, const DeviceExecutor& executor,
                        const SplitLogits<float>& logits, bool clean_queries, FoldedTokens& folded);

// The forward pass of the heads whose keys are not kSpread.
const char* folded_forward(const AttentionParams& params, const DeviceExecutor& executor,
                           const FoldedTokens& tokens);

// The backward pass of those heads, as far as `gradients` and grad_value.
const char* folded_backward(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                            const SplitLogits<float>& logits, const FoldedTokens& tokens,
                            const PairGradients<float>& gradients);

}  // namespace ikattn::cuda
