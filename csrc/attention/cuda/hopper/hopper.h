// Pairs on Hopper, of heads in the folded form: what the drivers call.
#pragma once

#include "attention/cuda/operands/operands.h"
#include "attention/cuda/tensor_cores/rows.h"

namespace ikattn::cuda {

// Output and log Z.
const char* warpgroup_forward(const AttentionParams& params, const DeviceExecutor& executor,
                              const FoldedTokens& tokens);
// Computes the forward with scores in int8, from Int8Features.
const char* warpgroup_int8_forward(const AttentionParams& params, const DeviceExecutor& executor,
                                   const FoldedTokens& tokens);

// grad_phi_q; and grad_phi_k, grad_value and the gradients of the keys' logits.
const char* warpgroup_query_gradients(const AttentionBackwardParams& params,
                                      const DeviceExecutor& executor, const FoldedTokens& tokens,
                                      const FoldedRows& rows, const FeatureGradients& grad_phi_q);
const char* warpgroup_key_gradients(const AttentionBackwardParams& params,
                                    const DeviceExecutor& executor, const FoldedTokens& tokens,
                                    const FoldedRows& rows, const float* logits,
                                    const FoldedGradients& gradients);

}  // namespace ikattn::cuda
