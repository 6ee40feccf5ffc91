// The mathematics in differentiable ATen: every device, double backward, torch.func, duals. Time
// and memory O(E H (F + d_v)).
#pragma once

#include "edge_attention/arguments.h"

namespace ikattn {

EdgeResults reference_from_edge_features(const EdgeFeatures& call);
EdgeQueryGradients reference_edge_query_gradients(const EdgeFeatures& call,
                                                  const at::Tensor& output,
                                                  const at::Tensor& log_normalizer,
                                                  const at::Tensor& grad_output,
                                                  const at::Tensor& grad_weights);
EdgeKeyGradients reference_edge_key_gradients(const EdgeKeyGradientCall& call);

// Returns the target of each edge, [E].
at::Tensor targets_of(const at::Tensor& rowptr, const at::Tensor& col);

// Sums over the edges of each node: [E, ..] to [count, ..].
at::Tensor sum_to(const at::Tensor& nodes, const at::Tensor& of_edges, const c10::SymInt& count);

}  // namespace ikattn
