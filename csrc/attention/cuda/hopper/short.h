// Short calls on Hopper. The forward is one launch: a block makes the features of a head's keys in
// shared memory, and of its queries in registers (short_forward.cu). The pairs of the backward take
// one launch, too, which makes scores once (short_backward.cu).
#pragma once

#include "attention/cuda/features/angle_operands.h"
#include "attention/cuda/operands/operands.h"
#include "attention/cuda/tensor_cores/rows.h"

namespace ikattn::cuda {

// Returns whether the shared memory of a block holds a head's keys, values and frequencies. The
// call is one that Hopper's own kernels take, without a mask of pairs and without dropout. Tokens
// are of 16 bits and at most 128 dimensions, and there are at most 32 frequencies, or 64 columns of
// the value.
bool fits_short_forward(const AttentionParams& params, bool int8_scores);

// Computes output and log Z of heads in the folded form. The tokens have no features.
const char* warpgroup_short_forward(const AttentionParams& params, Stream stream,
                                    const AngleOperands& operands, const FoldedTokens& tokens,
                                    bool int8_scores);

// Returns whether a block takes all keys of a head, of a call that Hopper's own kernels take: they
// must fit, and there must be nearly as many key heads as multiprocessors.
bool fits_short_backward(const AttentionParams& params);

// Computes all gradients of heads in the folded form, up to those of features.
const char* warpgroup_short_backward(const AttentionBackwardParams& params,
                                     const DeviceExecutor& executor, const FoldedTokens& tokens,
                                     const FoldedRows& rows, const float* logits,
                                     const FoldedGradients& gradients);

}  // namespace ikattn::cuda
