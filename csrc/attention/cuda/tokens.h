// Tokens as the pair kernels read them, and who makes them so.
#pragma once

#include "attention/cuda/kernels.h"

namespace ikattn::cuda {

// Logits stand in exponents, where one T would cost |logit| ulp of every weight: they are two.
template <typename T>
struct SplitLogits {
  T* high;
  T* low;
};

// What every pair kernel reads of the tokens, in the compute type.
template <typename T>
struct PreparedTokens {
  const T* phi_q;       // [B, H, L, F]
  const T* phi_k;       // [B, key_heads, S, F], zero where the key is poisoned
  SplitLogits<T> keys;  // [B, key_heads, S]  g + key_bias; -inf: hidden; NaN: poisoned
};

// The keys' logits, and the features of queries and keys, one after the other.
template <typename T>
const char* prepare_logits(const AttentionParams& params, const DeviceExecutor& executor,
                           SplitLogits<T>& logits);
template <typename T>
const char* prepare_features(const AttentionParams& params, const DeviceExecutor& executor,
                             PreparedTokens<T>& prepared);

// Features of queries and keys and the keys' logits, in memory of the executor. Fills `prepared`.
template <typename T>
const char* prepare_tokens(const AttentionParams& params, const DeviceExecutor& executor,
                           PreparedTokens<T>& prepared);

// The features' gradients [B, heads, N, F], back to tokens and frequencies: grad_query and grad_key
// are written, grad_w1 and grad_w2 added to, those that are there.
//   grad_logits [B, key_heads, S]: of the keys' logits, for the magnitude's part of grad_key
template <typename T>
const char* token_gradients(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                            const PreparedTokens<T>& prepared, const T* grad_phi_q,
                            const T* grad_phi_k, const T* grad_logits);

template <typename T>
const char* attention_forward(const AttentionParams& params, const DeviceExecutor& executor);

// The same with the tokens prepared already.
template <typename T>
const char* attention_forward(const AttentionParams& params, const DeviceExecutor& executor,
                              const PreparedTokens<T>& tokens);

}  // namespace ikattn::cuda
