#include "edge_attention/reference.h"

#include <ATen/ATen.h>

#include <limits>

namespace ikattn {
namespace {

// The largest over the edges of each node; -inf for a node without one. Not differentiable.
at::Tensor largest_of(const at::Tensor& nodes, const at::Tensor& of_edges,
                      const c10::SymInt& count) {
  c10::SymDimVector sizes(of_edges.sym_sizes().begin(), of_edges.sym_sizes().end());
  sizes[0] = count;
  const at::Tensor least =
      at::zeros_symint(sizes, of_edges.options()).fill_(-std::numeric_limits<double>::infinity());
  const at::Tensor index = nodes.unsqueeze(-1).expand_symint(of_edges.sym_sizes());
  return at::scatter_reduce(least, 0, index, of_edges.detach(), "amax");
}

}  // namespace

at::Tensor targets_of(const at::Tensor& rowptr, const at::Tensor& col) {
  const at::Tensor edge =
      at::arange(col.sym_size(0), at::TensorOptions().dtype(at::kLong).device(col.device()));
  return at::searchsorted(rowptr, edge, /*out_int32=*/false, /*right=*/true) - 1;
}

at::Tensor sum_to(const at::Tensor& nodes, const at::Tensor& of_edges, const c10::SymInt& count) {
  c10::SymDimVector sizes(of_edges.sym_sizes().begin(), of_edges.sym_sizes().end());
  sizes[0] = count;
  return at::index_add(at::zeros_symint(sizes, of_edges.options()), 0, nodes, of_edges);
}

EdgeResults reference_from_edge_features(const EdgeFeatures& call) {
  const c10::SymInt N_q = call.query_features.sym_size(0), F = call.query_features.sym_size(-1);
  const at::Tensor& source = call.col;
  const at::Tensor target = targets_of(call.rowptr, source);
  const at::Tensor products =
      call.query_features.index_select(0, target) * call.key_features.index_select(0, source);
  const at::Tensor s = products.sum(-1) / (2 * F);
  at::Tensor bias = call.key_logits.index_select(0, source);
  if (call.edge_logits.defined()) bias = bias + call.edge_logits;
  const at::Tensor least = at::full({}, -INFINITY, s.options());
  const at::Tensor logits = at::where(bias == -INFINITY, least, at::log(s * s + call.eps) + bias);

  const at::Tensor nothing = at::zeros({}, s.options());
  const at::Tensor largest = largest_of(target, logits, N_q);
  const at::Tensor shift = at::where(largest == -INFINITY, nothing, largest);
  const at::Tensor w = at::exp(logits - shift.index_select(0, target));
  const at::Tensor sum = sum_to(target, w, N_q);
  const at::Tensor divisor = at::where(sum == 0, at::ones({}, sum.options()), sum);
  at::Tensor weights = w / divisor.index_select(0, target);
  if (call.keep.defined()) weights = at::where(call.keep, weights * call.rescale, nothing);
  const at::Tensor weighted = weights.unsqueeze(-1) * call.value.index_select(0, source);
  const at::Tensor log_normalizer = (at::log(sum) + shift).detach().to(at::kDouble);
  return {sum_to(target, weighted, N_q), weights, log_normalizer};
}

}  // namespace ikattn
