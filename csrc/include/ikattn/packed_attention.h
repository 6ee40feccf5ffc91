// Implicit-kernel attention within each of many sequences that lie one after the other, without
// padding: the public C++ function. Letters as in ikattn/attention.h, and
//
//   N sequences, T_q queries and T_k keys of all sequences together
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "ikattn/version.h"

namespace ikattn {

// Where sequences begin, as FlashAttention has it: int32 or int64 [N + 1], from 0 to T_q and T_k,
// on the CPU or on query's device. On a GPU the call waits until it can read them; numbers on the
// CPU cost no wait.
struct PackedSequences {
  at::Tensor cu_seqlens_q;
  at::Tensor cu_seqlens_k;
  // At least the longest sequence, where given: a longer one is an error.
  std::optional<int64_t> max_seqlen_q = std::nullopt;
  std::optional<int64_t> max_seqlen_k = std::nullopt;
};

// Everything about a call that is neither a main tensor nor where sequences begin.
struct PackedAttentionOptions {
  // Order of the norm in a key's magnitude, any real >= 1; nullopt: no magnitude, g_j = 0.
  std::optional<double> p = 2.0;
  // Added to the logit of a key in every row; broadcastable to [H, T_k] or [G, T_k]. -inf hides it.
  std::optional<at::Tensor> key_bias = std::nullopt;
  // Probability, in [0, 1), with which a normalised weight is set to zero; in steps of 1/256.
  double dropout_p = 0.0;
  // The last query of a sequence sees all its keys, the one before it all but the last, and so on:
  // aligned at the bottom right, as in FlashAttention.
  bool is_causal = false;
  // Allows key and value to have fewer heads than query.
  bool enable_gqa = false;
  // Added to s_ij^2; positive.
  double eps = 1e-5;
  // Factor of |k|_p^2; nullopt: 1 / (2 sqrt d), the paper's.
  std::optional<double> magnitude_scale = std::nullopt;
  // int64 [2] on query's device: the mask of the padded call, sequence n being batch item n.
  // nullopt: drawn from the default generator of that device when dropout_p > 0.
  std::optional<at::Tensor> dropout_seed = std::nullopt;
};

// Attention of every query to the keys of its sequence.
//   query [T_q, H, d]   key [T_k, G, d]   value [T_k, G, d_v]
//   w1, w2 [H, d, M] or [G, d, M], optionally with a leading axis N; w2 absent: stationary kernel
// Returns [T_q, H, d_v]. A row that sees no key is zero. Throws c10::Error on wrong arguments.
at::Tensor implicit_kernel_attention_varlen(const at::Tensor& query, const at::Tensor& key,
                                            const at::Tensor& value, const at::Tensor& w1,
                                            const std::optional<at::Tensor>& w2,
                                            const PackedSequences& sequences,
                                            const PackedAttentionOptions& options = {});

}  // namespace ikattn
