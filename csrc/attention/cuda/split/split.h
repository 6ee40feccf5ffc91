// Attention in float32 on tensor cores: every number is the sum of two of Half, and a product of
// two is three of the 16-bit rate. split/README.md says which file does what.
//
// A row of an operand is multiplied with a power of two of its own, its unit's inverse, so that its
// largest number is near Half's largest: two splits then hold 23 bits of it, down to 2^-40 of the
// largest. What becomes of pairs in registers is split in the same way (RowFits).
#pragma once

#include "attention/cuda/cuda_cores/cuda_cores.h"
#include "attention/cuda/operands/operands.h"

namespace ikattn::cuda {

// Rows of float32 as (high + low) units.
struct SplitRows {
  Half* high;  // [heads, N, padded columns], likewise low
  Half* low;
  float* units;  // [heads, padded N]  powers of two; 0: a row of zeros, or none; NaN: not finite
};

// Operands of both passes.
struct SplitTokens {
  SplitRows query, key;  // features; a row that is not finite is zeros
  SplitRows value;       // values of B G heads
  // [B, key_heads, padded S]  logits of two parts; high -inf: hidden, or none
  const float* high;
  const float* low;
};

// Operands of the backward's queries.
struct SplitQueries {
  SplitRows gradient;  // grad_output
  // [B, H, padded L]  RowState's; high of log Z is infinity where there is no query
  const float* high;
  const float* low;
  const float* delta;
};

// Splits what prepare_tokens() and prepare_rows() have made, in memory of the executor.
const char* split_tokens(const AttentionParams& params, const DeviceExecutor& executor,
                         const PreparedTokens<float>& prepared, SplitTokens& tokens);
const char* split_queries(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                          const RowState<float>& rows, SplitQueries& queries);

// Output and log Z.
const char* split_forward(const AttentionParams& params, const DeviceExecutor& executor,
                          const PreparedTokens<float>& prepared);

// Computes grad_value, and all that `gradients` asks for.
const char* split_pair_gradients(const AttentionBackwardParams& params,
                                 const DeviceExecutor& executor,
                                 const PreparedTokens<float>& prepared, const RowState<float>& rows,
                                 const PairGradients<float>& gradients);

// grad_phi_q [B, H, L, F], by blocks that own queries.
const char* split_query_gradients(const AttentionBackwardParams& params, Stream stream,
                                  const SplitTokens& tokens, const SplitQueries& queries,
                                  float* grad_phi_q);
// gradients.phi_k and logits, and grad_value, by blocks that own keys.
const char* split_key_gradients(const AttentionBackwardParams& params, Stream stream,
                                const SplitTokens& tokens, const SplitQueries& queries,
                                const PairGradients<float>& gradients);

}  // namespace ikattn::cuda
