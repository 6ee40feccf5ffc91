// The mathematics in differentiable ATen: every device, double backward, torch.func, duals. Time
// and memory O(E H (F + d_v)).
#pragma once

#include "edge_attention/arguments.h"

namespace ikattn {

EdgeResults reference_from_edge_features(const EdgeFeatures& call);

// The node each edge goes to, [E].
at::Tensor targets_of(const at::Tensor& rowptr, const at::Tensor& col);

// Sums over the edges of each node: [E, ..] -> [count, ..].
at::Tensor sum_to(const at::Tensor& nodes, const at::Tensor& of_edges, const c10::SymInt& count);

}  // namespace ikattn
