#include "edge_attention/reference.h"

#include <ATen/ATen.h>

#include "attention/arguments.h"
#include "attention/reference.h"
#include "support/philox.h"

namespace ikattn {
namespace {

// Which node every edge comes from and goes to, [E].
struct Ends {
  at::Tensor source, target;
};

Ends ends_of(const at::Tensor& rowptr, const at::Tensor& col) {
  const auto index = at::TensorOptions().dtype(at::kLong).device(col.device());
  const at::Tensor edge = at::arange(col.sym_size(0), index);
  const at::Tensor target =
      at::searchsorted(rowptr.to(at::kLong), edge, /*out_int32=*/false, /*right=*/true) - 1;
  return {col.to(at::kLong), target};
}

// Sums over the edges of each node: [E, ..] -> [nodes, ..].
at::Tensor sum_to(const at::Tensor& nodes, const at::Tensor& of_edges, const c10::SymInt& count) {
  c10::SymDimVector sizes(of_edges.sym_sizes().begin(), of_edges.sym_sizes().end());
  sizes[0] = count;
  return at::index_add(at::zeros_symint(sizes, of_edges.options()), 0, nodes, of_edges);
}

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

// [N] or [N, 1] or [N, H], in the arithmetic type, with two axes.
at::Tensor two_axes(const at::Tensor& bias, at::ScalarType type) {
  return (bias.dim() == 1 ? bias.unsqueeze(-1) : bias).to(type);
}

// [N, H, d] -> [N, H, 2M]
at::Tensor node_features(const at::Tensor& nodes, const at::Tensor& w1,
                         const std::optional<at::Tensor>& w2) {
  return reference_features(nodes.transpose(0, 1), w1, w2).transpose(0, 1);
}

at::Tensor kept(const at::Tensor& weights, const EdgeAttentionOptions& options) {
  if (options.dropout_p == 0) return weights;
  // Edge e of head h is pair (e / 16, e % 16) of a matrix: whole groups of the generator.
  const c10::SymInt E = weights.sym_size(0), H = weights.sym_size(1);
  const at::Tensor keep =
      call_dropout_keep_mask(*options.dropout_seed, 1, H, (E + 15) / 16, 16, options.dropout_p)
          .flatten(2)
          .narrow_symint(2, 0, E)
          .squeeze(0)
          .transpose(0, 1);
  const double rescale = dropout_rescale(dropout_threshold(options.dropout_p));
  return at::where(keep, weights * rescale, at::zeros({}, weights.options()));
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> reference_edge_attention(const EdgeAttentionCall& call) {
  const EdgeAttentionOptions& options = call.options;
  const at::ScalarType type = compute_type(call.query.scalar_type());
  const c10::SymInt N_q = call.query.sym_size(0), N_k = call.key.sym_size(0);
  const c10::SymInt H = call.query.sym_size(1);
  const auto [source, target] = ends_of(call.rowptr, call.col);

  at::Tensor bias;  // of every edge, [E, H|1]
  const auto add = [&](const at::Tensor& more) { bias = bias.defined() ? bias + more : more; };
  if (is_present(options.key_bias)) {
    const at::Tensor of_keys = two_axes(*options.key_bias, type);
    add(of_keys.expand_symint({N_k, of_keys.sym_size(1)}).index_select(0, source));
  }
  if (is_present(options.edge_bias)) add(two_axes(*options.edge_bias, type));
  at::Tensor visible = at::ones_symint({source.sym_size(0), H}, source.options().dtype(at::kBool));
  if (bias.defined()) visible = visible.logical_and(bias != -INFINITY);

  // What no edge reads must not reach the arithmetic: 0 * NaN in the gradient would be NaN.
  const at::Tensor counted = visible.to(type), nothing = at::zeros({}, counted.options());
  const auto only = [&](const at::Tensor& nodes, const at::Tensor& tensor,
                        const c10::SymInt& count) {
    return at::where((sum_to(nodes, counted, count) > 0).unsqueeze(-1), tensor.to(type), nothing);
  };
  const at::Tensor query = only(target, call.query, N_q), key = only(source, call.key, N_k);
  const at::Tensor value = only(source, call.value, N_k);

  const at::Tensor phi_q = node_features(query, call.w1, call.w2).index_select(0, target);
  const at::Tensor phi_k = node_features(key, call.w1, call.w2).index_select(0, source);
  const at::Tensor s = (phi_q * phi_k).sum(-1) / (4 * call.w1.sym_size(-1));
  at::Tensor logits = at::log(s * s + options.eps);
  if (options.p) {
    const int64_t d = call.key.sym_size(-1).guard_int(__FILE__, __LINE__);
    const double scale = magnitude_scale_or_default(options.magnitude_scale, d);
    logits = logits + (scale * reference_squared_norm(key, *options.p)).index_select(0, source);
  }
  if (bias.defined()) {
    logits = at::where(visible, logits + bias, at::full({}, -INFINITY, logits.options()));
  }

  const at::Tensor largest = largest_of(target, logits, N_q);
  const at::Tensor shift = at::where(largest == -INFINITY, nothing, largest);
  const at::Tensor w = at::exp(logits - shift.index_select(0, target));
  const at::Tensor sum = sum_to(target, w, N_q);
  const at::Tensor divisor = at::where(sum == 0, at::ones({}, sum.options()), sum);
  const at::Tensor weights = kept(w / divisor.index_select(0, target), options);
  const at::Tensor weighted = weights.unsqueeze(-1) * value.index_select(0, source);
  const at::ScalarType stored = call.query.scalar_type();
  return {sum_to(target, weighted, N_q).to(stored), weights.to(stored)};
}

}  // namespace ikattn
