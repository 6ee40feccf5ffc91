// The weights of calls in 16 bits, from what the forward pass leaves.
#pragma once

#include "attention/cuda/operands/operands.h"

namespace ikattn::cuda {

// The call whose normalizers the weights have: in the general form, for all heads, of values that
// are zeros, without dropout. Its output and normalizers are in memory of the executor.
const char* normalizer_call(const WeightsParams& params, const DeviceExecutor& executor,
                            AttentionParams& call);
// Returns whether that can go to the tensor cores.
bool has_weights_on_tensor_cores(const WeightsParams& params);
// tokens: of that call, whose normalizers are there.
const char* weights_on_tensor_cores(const WeightsParams& params, const AttentionParams& call,
                                    const FoldedTokens& tokens, Stream stream);

}  // namespace ikattn::cuda
