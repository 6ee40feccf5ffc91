// Tokens as the pair kernels read them, and who makes them so.
#pragma once

#include "attention/calls/params.h"
#include "support/cuda/executor.h"

namespace ikattn::cuda {

// Logits stand in exponents, where one T would cost |logit| ulp of every weight: they are two.
// A hidden key whose numbers are not finite has low NaN; of other hidden keys it is 0.
template <typename T>
struct SplitLogits {
  T* high;
  T* low;
  T* norms = nullptr;            // norms |k|_p of keys, where their gradient needs them
  float* value_norms = nullptr;  // |v|_2, where they are asked for; not finite where v is not
};

// Numbers of the tokens that every pair kernel reads, in the compute type.
template <typename T>
struct PreparedTokens {
  const T* phi_q;       // [B, H, L, F]
  const T* phi_k;       // [B, key_heads, S, F], zero where the key is poisoned
  SplitLogits<T> keys;  // [B, key_heads, S]  g + key_bias; -inf: hidden; NaN: poisoned
};

// The keys' logits, and the features of queries and keys, one after the other.
template <typename T>
const char* prepare_logits(const AttentionParams& params, const DeviceExecutor& executor,
                           bool wants_value_norms, SplitLogits<T>& logits);
template <typename T>
const char* prepare_features(const AttentionParams& params, const DeviceExecutor& executor,
                             PreparedTokens<T>& prepared);

// Features of queries and keys and the keys' logits, in memory of the executor. Fills `prepared`.
template <typename T>
const char* prepare_tokens(const AttentionParams& params, const DeviceExecutor& executor,
                           PreparedTokens<T>& prepared);

// Returns the head, of `count` that serve all `heads`, that serves `head`. A grid has no 2^32
// blocks, so there are no more heads; and a division in 64 bits would be a call.
__host__ __device__ inline unsigned shared_head(unsigned head, int64_t heads, int64_t count) {
  return head / (static_cast<unsigned>(heads) / static_cast<unsigned>(count));
}

// Returns the key head, of all batches', that a query head of all batches' attends to.
__host__ __device__ inline int64_t key_head_of(const AttentionParams& params, int64_t bh) {
  return bh / params.H * params.key_heads + bh % params.H * params.key_heads / params.H;
}

// Returns whether a side of the pairs is asked for; the frequencies' gradients come from both.
inline bool wants_frequencies(const AttentionBackwardParams& params) {
  return params.grad_w1 || params.grad_w2;
}
inline bool wants_queries(const AttentionBackwardParams& params) {
  return params.grad_query || wants_frequencies(params);
}
inline bool wants_keys(const AttentionBackwardParams& params) {
  return params.grad_key || params.grad_key_bias || params.grad_value || wants_frequencies(params);
}

// Returns the data of an array, nullptr where it is absent.
template <typename T>
inline T* data_of(const Array& array) {
  return array ? static_cast<T*>(array.data) : nullptr;
}

// Gradients that the pairs leave to the tokens.
template <typename T>
struct PairGradients {
  T* phi_q;   // [B, H, L, F]
  T* phi_k;   // [B, key_heads, S, F]
  T* logits;  // [B, key_heads, S], for the magnitude's part of grad_key and for key_bias
};

// Passes gradients on to tokens and frequencies: writes grad_query and grad_key, and adds to
// grad_w1 and grad_w2; absent ones are left out.
template <typename T>
const char* token_gradients(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                            const SplitLogits<T>& keys, const PairGradients<T>& gradients);

// Passes gradients of ikattn::features on to tokens and frequencies; params.features holds them.
template <typename T>
const char* feature_gradients(const FeaturesParams& params, const DeviceExecutor& executor);

template <typename T>
const char* attention_forward(const AttentionParams& params, const DeviceExecutor& executor);

}  // namespace ikattn::cuda
