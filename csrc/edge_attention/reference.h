// The mathematics in differentiable ATen: time and memory O(E H (M + d_v)).
#pragma once

#include <tuple>

#include "edge_attention/arguments.h"

namespace ikattn {

// (output [N_q, H, d_v], weights [E, H] after dropout), in the dtype of query. The arguments have
// been checked.
std::tuple<at::Tensor, at::Tensor> reference_edge_attention(const EdgeAttentionCall& call);

}  // namespace ikattn
