// Implicit-kernel attention within each of many sequences that follow each other in memory, without
// padding: the public C++ function. The letters are those of ikattn/attention.h, and
//
//   N sequences, T_q queries and T_k keys of all sequences together
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "ikattn/attention.h"

namespace ikattn {

// The begins of sequences, like FlashAttention's: int32 or int64 [N + 1], from 0 to T_q and T_k, on
// the CPU or on query's device. On a GPU the call waits until it can read them; numbers on the CPU
// cost no wait.
struct PackedSequences {
  at::Tensor cu_seqlens_q;
  at::Tensor cu_seqlens_k;
  // At least the longest sequence, where given: a longer one is an error.
  std::optional<int64_t> max_seqlen_q = std::nullopt;
  std::optional<int64_t> max_seqlen_k = std::nullopt;
};

// Attention of every query to the keys of its sequence.
//   query [T_q, H, d]   key [T_k, G, d]   value [T_k, G, d_v]
//   w1, w2 [H, d, M] or [G, d, M], optionally with a leading axis N; w2 absent: stationary kernel
// Three options differ from those of dense attention; attn_mask must be absent:
//   key_bias      broadcastable to [H, T_k] or [G, T_k]
//   is_causal     the last query of a sequence sees all its keys, the one before it all but the
//                 last, and so on: aligned at the bottom right, as in FlashAttention
//   dropout_seed  [2]: the mask of the padded call, sequence n being batch item n
// Returns [T_q, H, d_v]. A row that sees no key is zero. Throws c10::Error on wrong arguments.
at::Tensor implicit_kernel_attention_varlen(const at::Tensor& query, const at::Tensor& key,
                                            const at::Tensor& value, const at::Tensor& w1,
                                            const std::optional<at::Tensor>& w2,
                                            const PackedSequences& sequences,
                                            const AttentionOptions& options = {});

}  // namespace ikattn
