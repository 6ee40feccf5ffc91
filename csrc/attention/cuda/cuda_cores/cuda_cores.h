// Both passes on CUDA cores, of every argument, in float32 or float64: forward.cu and backward.cu
// say when.
#pragma once

#include "attention/cuda/operands/tokens.h"

namespace ikattn::cuda {

// Output and log Z; of weights, for their backward, what comes in for their rows.
template <typename T>
const char* forward_on_cuda_cores(const AttentionParams& params, Stream stream,
                                  const PreparedTokens<T>& tokens);

template <typename T>
const char* weights_on_cuda_cores(const WeightsParams& params, const DeviceExecutor& executor);

// State that a query brings to every pair of its row. high NaN: the row is poisoned.
template <typename T>
struct RowState {
  SplitLogits<T> log_normalizer;  // [B, H, L]
  // [B, H, L]  sum over d_v of output grad_output; of weights, the output alone is that sum
  T* delta;
};

template <typename T>
const char* prepare_rows(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                         const PreparedTokens<T>& tokens, RowState<T>& rows);
// Computes grad_value, and all that `gradients` asks for.
template <typename T>
const char* pair_gradients(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                           const PreparedTokens<T>& tokens, const RowState<T>& rows,
                           const PairGradients<T>& gradients);
template <typename T>
const char* mask_gradient(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                          const PreparedTokens<T>& tokens, const RowState<T>& rows);
// Adds up the gradient of key_bias from the gradients of the keys' logits, [B, key_heads, S].
template <typename T>
const char* bias_gradient(const AttentionBackwardParams& params, Stream stream,
                          const T* grad_logits);

}  // namespace ikattn::cuda
