// Short calls on Hopper. The forward in one launch: a block makes the features of a head's keys in
// shared memory, and of its queries in registers (short_forward.cu). The pairs of the backward in
// one, of which scores are made once (short_backward.cu).
#pragma once

#include "attention/cuda/features/angle_operands.h"
#include "attention/cuda/operands/operands.h"
#include "attention/cuda/tensor_cores/rows.h"

namespace ikattn::cuda {

// Whether the shared memory of a block holds a head's keys, values and frequencies, of a call that
// Hopper's own kernels take, without a mask of pairs and without dropout. Tokens are of 16 bits and
// at most 128 dimensions, and there are at most 32 frequencies, or 64 columns of the value.
bool fits_short_forward(const AttentionParams& params, bool int8_scores);

// Output and log Z of heads in the folded form. The tokens have no features.
const char* warpgroup_short_forward(const AttentionParams& params, Stream stream,
                                    const AngleOperands& operands, const FoldedTokens& tokens,
                                    bool int8_scores);

// Whether a block has the keys of a head, of a call that Hopper's own kernels take, and key heads
// are so many that blocks of whole ones are not fewer than multiprocessors by much.
bool fits_short_backward(const AttentionParams& params);

// All gradients of heads in the folded form, as far as features.
const char* warpgroup_short_backward(const AttentionBackwardParams& params,
                                     const DeviceExecutor& executor, const FoldedTokens& tokens,
                                     const FoldedRows& rows, const float* logits,
                                     const FoldedGradients& gradients);

}  // namespace ikattn::cuda
