#include "edge_attention/reference.h"

#include <ATen/ATen.h>

#include <limits>

#include "attention/operator/reference.h"

namespace ikattn {
namespace {

// Returns the largest over the edges of each node; -inf for a node without one. Not differentiable.
at::Tensor largest_of(const at::Tensor& nodes, const at::Tensor& of_edges,
                      const c10::SymInt& count) {
  c10::SymDimVector sizes(of_edges.sym_sizes().begin(), of_edges.sym_sizes().end());
  sizes[0] = count;
  const at::Tensor least =
      at::full_symint(sizes, -std::numeric_limits<double>::infinity(), of_edges.options());
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

namespace {

// The target of every edge, its products [E, H], its score's logarithm plus logits (-inf where it
// is hidden), and for exponential scores the slope of the LeakyReLU, undefined where there is none.
struct EdgeLogits {
  at::Tensor target, product, logits, slope;
};

EdgeLogits logits_of(const EdgeFeatures& call) {
  const at::Tensor target = targets_of(call.rowptr, call.col);
  const at::Tensor products =
      call.query_features.index_select(0, target) * call.key_features.index_select(0, call.col);
  at::Tensor product = products.sum(-1);
  at::Tensor bias = call.key_logits.index_select(0, call.col);
  if (call.edge_logits.defined()) bias = sum_of_logits(bias, call.edge_logits);
  at::Tensor score = product;
  if (call.eps) {
    product = product / (2 * call.query_features.sym_size(-1));
    score = at::log(product * product + *call.eps);
  }
  const at::Tensor least = at::full({}, -INFINITY, score.options());
  at::Tensor sum = score + bias, slope;
  if (call.negative_slope != 1) {
    slope = at::where(sum > 0, at::ones({}, sum.options()),
                      at::full({}, call.negative_slope, sum.options()));
    sum = slope * sum;
  }
  return {target, product, at::where(bias == -INFINITY, least, sum), slope};
}

at::Tensor dropped(const EdgeFeatures& call, const at::Tensor& weights) {
  if (!call.keep.defined()) return weights;
  return at::where(call.keep, weights * call.rescale, at::zeros({}, weights.options()));
}

}  // namespace

EdgeResults reference_from_edge_features(const EdgeFeatures& call) {
  const c10::SymInt N_q = call.query_features.sym_size(0);
  const auto [target, product, logits, slope] = logits_of(call);
  const at::Tensor largest = largest_of(target, logits, N_q);
  const at::Tensor nothing = at::zeros({}, logits.options());
  const at::Tensor shift = at::where(largest == -INFINITY, nothing, largest);
  const at::Tensor w = at::exp(logits - shift.index_select(0, target));
  const at::Tensor sum = sum_to(target, w, N_q);
  const at::Tensor divisor = at::where(sum == 0, at::ones({}, sum.options()), sum);
  const at::Tensor shares =
      at::where(logits == -INFINITY, nothing, w / divisor.index_select(0, target));
  const at::Tensor weights = dropped(call, shares);
  const at::Tensor weighted = weights.unsqueeze(-1) * call.value.index_select(0, call.col);
  const at::Tensor log_normalizer = (at::log(sum) + shift).detach().to(at::kDouble);
  return {sum_to(target, weighted, N_q), weights, log_normalizer};
}

EdgeQueryGradients reference_edge_query_gradients(const EdgeFeatures& call,
                                                  const at::Tensor& output,
                                                  const at::Tensor& log_normalizer,
                                                  const at::Tensor& grad_output,
                                                  const at::Tensor& grad_weights) {
  const c10::SymInt N_q = call.query_features.sym_size(0);
  const auto [target, product, logits, activation] = logits_of(call);
  const at::Tensor shift = at::where(log_normalizer == -INFINITY, 0.0, log_normalizer);
  const at::Tensor weights =
      at::exp(logits.to(at::kDouble) - shift.index_select(0, target)).to(logits.scalar_type());
  const at::Tensor kept = dropped(call, weights);
  at::Tensor gradient =
      (grad_output.index_select(0, target) * call.value.index_select(0, call.col)).sum(-1);
  at::Tensor mean = (grad_output * output).sum(-1);
  if (grad_weights.defined()) {
    gradient = gradient + grad_weights;
    mean = mean + sum_to(target, kept * grad_weights, N_q);
  }
  const auto unless_hidden = [&, logits = logits](const at::Tensor& of_edges) {
    return at::where(logits == -INFINITY, at::zeros({}, of_edges.options()), of_edges);
  };
  at::Tensor grad_logits = weights * (dropped(call, gradient) - mean.index_select(0, target));
  if (activation.defined()) grad_logits = grad_logits * activation;
  grad_logits = unless_hidden(grad_logits);
  at::Tensor grad_product = grad_logits;
  if (call.eps) {
    const at::Tensor slope = product / (product * product + *call.eps);
    grad_product = unless_hidden(grad_logits * slope / call.query_features.sym_size(-1));
  }
  const at::Tensor keys = call.key_features.index_select(0, call.col);
  const at::Tensor moved =
      at::where((logits == -INFINITY).unsqueeze(-1), at::zeros({}, keys.options()), keys);
  return {sum_to(target, grad_product.unsqueeze(-1) * moved, N_q),
          at::stack({grad_logits, grad_product, unless_hidden(kept)}, 1)};
}

EdgeKeyGradients reference_edge_key_gradients(const EdgeKeyGradientCall& call) {
  const at::Tensor target = targets_of(call.rowptr, call.col);
  const auto spread = [&](int64_t which, const at::Tensor& of_targets) {
    const at::Tensor factor = call.of_edges.select(1, which).unsqueeze(-1);
    const at::Tensor there = of_targets.index_select(0, target);
    const at::Tensor nothing = at::zeros({}, there.options());
    return sum_to(call.col, factor * at::where(factor == 0, nothing, there), call.N_k);
  };
  return {spread(1, call.query_features), spread(2, call.grad_output),
          sum_to(call.col, call.of_edges.select(1, 0), call.N_k)};
}

}  // namespace ikattn
