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

struct FoldedTokens {
  const Half* phi_q;     // [B, H, L, padded F]
  const Half* phi_k;     // [B, key_heads, S, padded F]
  const float* eps;      // [B, key_heads, S padded to 64]  K eps e_j; 0: hidden; NaN: poisoned
  const float* largest;  // [B, key_heads]  max g
  // [B, key_heads]  bits: kSpread: magnitudes differ too much for rows that do not see the largest;
  // kPoisoned: some key is
  const uint32_t* state;
  float log_scale;  // log K
};
constexpr uint32_t kSpread = 1, kPoisoned = 2;

// Where every row sees the largest key, the folded form is right for any spread of magnitudes.
inline bool every_row_sees_all(const AttentionParams& params) {
  return params.mask.type == ElementType::kNone && !params.is_causal;
}

// Folds prepared logits; features are made from the tokens again, in float32, and rounded once.
const char* fold_tokens(const AttentionParams& params, const DeviceExecutor& executor,
                        const SplitLogits<float>& logits, FoldedTokens& folded);

// The forward pass of the heads whose keys are not kSpread.
const char* folded_forward(const AttentionParams& params, const DeviceExecutor& executor,
                           const FoldedTokens& tokens);

}  // namespace ikattn::cuda
