// The arguments of the edge attention operator inside the library, and their checks.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "ikattn/edge_attention.h"

namespace ikattn {

struct EdgeAttentionCall {
  at::Tensor query;        // [N_q, H, d]
  at::Tensor key;          // [N_k, H, d]
  at::Tensor value;        // [N_k, H, d_v]
  at::Tensor rowptr, col;  // [N_q + 1], [E]
  at::Tensor w1;           // [H, d, M]
  std::optional<at::Tensor> w2;
  EdgeAttentionOptions options;
};

// Throws, naming the argument, what was expected and what came. Sizes and numbers of nodes are
// looked at where they are known: not while torch.compile traces, and of nodes not on a GPU.
void check_edge_attention(const EdgeAttentionCall& call);

}  // namespace ikattn
