// Pairs on Hopper, of heads in the folded form unless said otherwise: what the drivers call.
#pragma once

#include "attention/cuda/operands/operands.h"
#include "attention/cuda/tensor_cores/rows.h"

namespace ikattn::cuda {

// Output and log Z.
const char* warpgroup_forward(const AttentionParams& params, const DeviceExecutor& executor,
                              const FoldedTokens& tokens);
// The same of Int8Features.
const char* warpgroup_int8_forward(const AttentionParams& params, const DeviceExecutor& executor,
                                   const FoldedTokens& tokens);
// The same of heads in the general form, with float masks of pairs that TMA can copy (offsets.h).
const char* warpgroup_general_forward(const AttentionParams& params, const DeviceExecutor& executor,
                                      const FoldedTokens& tokens);

// grad_phi_q; and grad_phi_k, grad_value and the gradients of the keys' logits. general_alone:
// those of heads in the folded form are there.
const char* warpgroup_query_gradients(const AttentionBackwardParams& params,
                                      const DeviceExecutor& executor, const FoldedTokens& tokens,
                                      const FoldedRows& rows, const FeatureGradients& grad_phi_q,
                                      bool general_alone);
const char* warpgroup_key_gradients(const AttentionBackwardParams& params,
                                    const DeviceExecutor& executor, const FoldedTokens& tokens,
                                    const FoldedRows& rows, const float* logits,
                                    const FoldedGradients& gradients, bool general_alone);

}  // namespace ikattn::cuda
