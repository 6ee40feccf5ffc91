// The forms of attention over edges, each a composition for every device and transformation: a
// similarity of features of nodes and logits, then edge_attention_from_features, which has kernels.
// Their public C++ functions, and autocast.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

#include "attention/operator/arguments.h"
#include "attention/operator/reference.h"
#include "edge_attention/operators.h"
#include "edge_attention/reference.h"
#include "ikattn/attention.h"
#include "support/autograd.h"
#include "support/dispatch.h"
#include "support/memory.h"
#include "support/philox.h"

namespace ikattn {
namespace {

using Result = std::tuple<at::Tensor, at::Tensor>;

// --- What the forms share

// Returns [N], [N, 1] or [N, H] in the arithmetic type, with two axes.
at::Tensor two_axes(const at::Tensor& bias, at::ScalarType type) {
  return (bias.dim() == 1 ? bias.unsqueeze(-1) : bias).to(type);
}

// Returns the mask of dropout, [E, H]. Edge e is pair (e / 16, e % 16) of a matrix, so that groups
// of the generator are whole.
at::Tensor kept_edges(const EdgeAttentionOptions& options, const c10::SymInt& E,
                      const c10::SymInt& H) {
  return call_dropout_keep_mask(*options.dropout_seed, 1, H, (E + 15) / 16, 16, options.dropout_p)
      .flatten(2)
      .narrow_symint(2, 0, E)
      .squeeze(0)
      .transpose(0, 1)
      .contiguous();
}

// A call with its nodes. A node without a visible edge must not reach the arithmetic, where 0 * NaN
// in the gradient would be NaN.
struct Nodes {
  EdgeFeatures edges;   // with the biases as logits
  at::ScalarType type;  // of the arithmetic
  c10::SymInt N_q, N_k;
  at::Tensor key_bias, edge_bias;  // [N_k, H|1] and [E, H|1], or undefined

  at::Tensor targets(const at::Tensor& tensor) const {
    return only([&] { return are_seen(targets_of(edges.rowptr, edges.col), N_q); }, tensor);
  }
  at::Tensor sources(const at::Tensor& tensor) const {
    return only([&] { return are_seen(edges.col, N_k); }, tensor);
  }
  void add_to_key_logits(const at::Tensor& logits) {
    edges.key_logits = edges.key_logits.defined() ? edges.key_logits + logits : logits;
  }
  void add_to_edge_logits(const at::Tensor& logits) {
    edges.edge_logits =
        edges.edge_logits.defined() ? sum_of_logits(logits, edges.edge_logits) : logits;
  }

 private:
  template <typename Seen>
  at::Tensor only(const Seen& seen, const at::Tensor& tensor) const {
    const at::Tensor wide = tensor.to(type);
    // No copy is needed where all numbers are finite.
    if (is_readable(wide) && std::isfinite(wide.detach().sum().item<double>())) return wide;
    return at::where(seen().unsqueeze(-1), wide, at::zeros({}, wide.options()));
  }
  // Tells whether an edge that is not hidden ends at a node: [count, H|1].
  at::Tensor are_seen(const at::Tensor& ends, const c10::SymInt& count) const {
    at::Tensor visible = at::ones_symint({ends.sym_size(0), 1}, ends.options().dtype(type));
    if (key_bias.defined()) {
      visible = visible * (key_bias.index_select(0, edges.col) != -INFINITY);
    }
    if (edge_bias.defined()) visible = visible * (edge_bias != -INFINITY);
    return sum_to(ends, visible, count) > 0;
  }
};

Nodes nodes_of(const at::Tensor& targets, const at::Tensor& value, const at::Tensor& rowptr,
               const at::Tensor& col, const EdgeAttentionOptions& options) {
  const c10::SymInt H = value.sym_size(1), E = col.sym_size(0);
  Nodes nodes;
  nodes.type = compute_type(value.scalar_type());
  nodes.N_q = targets.sym_size(0);
  nodes.N_k = value.sym_size(0);
  EdgeFeatures& edges = nodes.edges;
  edges.eps = std::nullopt;
  edges.negative_slope = options.negative_slope;
  edges.rowptr = rowptr.to(at::kLong);
  edges.col = col.to(at::kLong);
  if (is_present(options.key_bias)) {
    const at::Tensor bias = two_axes(*options.key_bias, nodes.type);
    nodes.key_bias = bias.expand_symint({nodes.N_k, bias.sym_size(1)});
    edges.key_logits = bias.expand_symint({nodes.N_k, H});
  }
  if (is_present(options.edge_bias)) {
    const at::Tensor bias = two_axes(*options.edge_bias, nodes.type);
    edges.edge_logits = nodes.edge_bias = bias.expand_symint({E, bias.sym_size(1)});
  }
  if (options.dropout_p > 0) {
    edges.keep = kept_edges(options, E, H);
    edges.rescale = dropout_rescale(dropout_threshold(options.dropout_p));
  }
  return nodes;
}

Result finish(Nodes& nodes, at::ScalarType stored) {
  EdgeFeatures& edges = nodes.edges;
  if (!edges.key_logits.defined()) {
    edges.key_logits =
        at::zeros_symint({edges.value.sym_size(0), edges.value.sym_size(1)}, edges.value.options());
  }
  const EdgeResults results = call_from_edge_features(edges);
  return {std::get<0>(results).to(stored), std::get<1>(results).to(stored)};
}

// Returns features [N, H, 2M] of [N, H, d], in the arithmetic type.
at::Tensor node_features(const at::Tensor& nodes, const at::Tensor& w1,
                         const std::optional<at::Tensor>& w2) {
  const at::ScalarType type = nodes.scalar_type();
  const std::optional<at::Tensor> second = is_present(w2) ? or_none(w2->to(type)) : std::nullopt;
  const at::Tensor heads = nodes.transpose(0, 1).unsqueeze(0);
  return call_features(heads, w1.to(type), second, /*tokens_first=*/true)
      .squeeze(0)
      .transpose(0, 1);
}

double root_of_size(const at::Tensor& nodes) {
  return std::sqrt(static_cast<double>(nodes.sym_size(-1).guard_int(__FILE__, __LINE__)));
}

// --- Pairs: a query and a key of every node

Result pairs_by_implicit_kernel(const EdgeAttentionCall& call) {
  const EdgeAttentionOptions& options = call.options;
  Nodes nodes = nodes_of(call.query, call.value, call.rowptr, call.col, options);
  const at::Tensor key = nodes.sources(call.key);
  EdgeFeatures& edges = nodes.edges;
  edges.eps = options.eps;
  edges.query_features = node_features(nodes.targets(call.query), *call.w1, call.w2);
  edges.key_features = node_features(key, *call.w1, call.w2);
  edges.value = nodes.sources(call.value);
  if (options.p) {
    const double scale = options.magnitude_scale.value_or(0.5 / root_of_size(call.key));
    nodes.add_to_key_logits(scale * reference_squared_norm(key, *options.p));
  }
  return finish(nodes, call.query.scalar_type());
}

// Computes the RBF kernel times the magnitude: softmax attention where the magnitude is that of the
// 2-norm.
Result pairs_by_softmax(const EdgeAttentionCall& call) {
  const EdgeAttentionOptions& options = call.options;
  Nodes nodes = nodes_of(call.query, call.value, call.rowptr, call.col, options);
  const at::Tensor key = nodes.sources(call.key);
  const double root = root_of_size(call.key), scale = options.magnitude_scale.value_or(0.5 / root);
  nodes.edges.query_features = nodes.targets(call.query) / root;
  nodes.edges.key_features = key;
  nodes.edges.value = nodes.sources(call.value);
  if (options.p != 2.0 || scale != 0.5 / root) {
    at::Tensor logits = (-0.5 / root) * reference_squared_norm(key, 2);
    if (options.p) logits = logits + scale * reference_squared_norm(key, *options.p);
    nodes.add_to_key_logits(logits);
  }
  return finish(nodes, call.query.scalar_type());
}

// --- GAT: a learned vector a and the concatenation x = [z_i || z_j] of an edge's ends

// Returns |x|_p^2 from the squared norms of both parts.
at::Tensor joint_squared_norm(const at::Tensor& first, const at::Tensor& second, double p) {
  const at::Tensor most = at::maximum(first, second), least = at::minimum(first, second);
  if (p == 2) return most + least;
  // The derivative of a power at 0 may be infinite: there it is replaced by that of a constant, and
  // also where the quotient's would overflow. Such a norm is below the rounding error of one that
  // matters.
  const double least_normal = most.scalar_type() == at::kDouble
                                  ? std::numeric_limits<double>::min()
                                  : static_cast<double>(std::numeric_limits<float>::min());
  const at::Tensor one = at::ones({}, most.options()), nothing = at::zeros({}, most.options());
  const at::Tensor usable = (least > std::sqrt(least_normal)).logical_and(at::isfinite(most));
  const at::Tensor ratio = at::where(usable, least, one) / at::where(usable, most, one);
  const at::Tensor power = at::where(usable, at::pow(ratio, p / 2), nothing);
  return most * at::pow(1 + power, 2 / p);
}

// Returns the angles of the learned vector [H, 2d] with frequencies [H, 2d, M], in cycles: [H, M].
// It avoids matmul, which may round to TF32.
at::Tensor angles_of(const at::Tensor& vector, const at::Tensor& w) {
  return (vector.unsqueeze(-1) * w).sum(-2);
}

// Returns the fraction of an angle in cycles.
at::Tensor fraction(const at::Tensor& angle) { return angle - angle.detach().round(); }

// The angle of a concatenation is the sum of its parts' angles, u_i + v_j. With t1 and t2 the
// angles of a, phi(a).phi(x) is for each of the two sets of frequencies
//   sum over m of cos(t1 - u - v) + cos(t2 - u - v)
// which is the product of (cos, sin)(t1 - u) + (cos, sin)(t2 - u) and (cos, sin)(v): features of
// targets and of sources, 2M for each set. An angle of a is that of one more coordinate of the
// targets, which is 1. One stationary kernel has t1 = t2, and all its features in one set.
void take_joint_features(EdgeFeatures& edges, const at::Tensor& vector, const at::Tensor& target,
                         const at::Tensor& source, const at::Tensor& w1,
                         const std::optional<at::Tensor>& w2) {
  const c10::SymInt d = target.sym_size(-1);
  const at::Tensor a = vector.to(target.scalar_type()), first = w1.to(target.scalar_type());
  const std::optional<at::Tensor> second =
      is_present(w2) ? or_none(w2->to(target.scalar_type())) : std::nullopt;
  const at::Tensor frequencies = second ? at::cat({first, *second}, -1) : first;
  const auto of_targets = [&](const at::Tensor& w) {
    const at::Tensor of_one_set = fraction(angles_of(a, w)).unsqueeze(-2);
    const at::Tensor angles = second ? at::cat({of_one_set, of_one_set}, -1) : of_one_set;
    return at::cat({frequencies.narrow_symint(-2, 0, d).neg(), angles}, -2);
  };
  edges.query_features = node_features(at::constant_pad_nd(target, {0, 1}, 1), of_targets(first),
                                       second ? or_none(of_targets(*second)) : std::nullopt);
  edges.key_features = node_features(source, frequencies.narrow_symint(-2, d, d), std::nullopt);
}

Result gat(const GatAttentionCall& call) {
  const EdgeAttentionOptions& options = call.options;
  Nodes nodes = nodes_of(call.target, call.value, call.rowptr, call.col, options);
  const at::Tensor target = nodes.targets(call.target), source = nodes.sources(call.source);
  const double root = root_of_size(call.vector),
               scale = options.magnitude_scale.value_or(0.5 / root);
  EdgeFeatures& edges = nodes.edges;
  edges.value = nodes.sources(call.value);
  const auto add_norm = [&](double factor, double p) {
    const at::Tensor of_source = reference_squared_norm(source, p);
    if (p == 2) {  // the target's part is the same for all its edges
      nodes.add_to_key_logits(factor * of_source);
      return;
    }
    const at::Tensor of_target = reference_squared_norm(target, p);
    const at::Tensor to = targets_of(edges.rowptr, edges.col);
    nodes.add_to_edge_logits(factor * joint_squared_norm(of_target.index_select(0, to),
                                                         of_source.index_select(0, edges.col), p));
  };
  if (is_present(call.w1)) {
    edges.eps = options.eps;
    // Two sets of frequencies have twice the product, for the score divides by their number.
    take_joint_features(edges, call.vector, target, source, *call.w1, call.w2);
    if (options.p) add_norm(scale, *options.p);
  } else {
    const c10::SymInt d = target.sym_size(-1);
    const at::Tensor a = call.vector.to(nodes.type) / root;
    nodes.add_to_key_logits((source * a.narrow_symint(-1, d, d)).sum(-1));
    if (options.negative_slope == 1) {  // the target's part is the same for all its edges
      edges.query_features = target.narrow(-1, 0, 0);
      edges.key_features = source.narrow(-1, 0, 0);
    } else {
      edges.query_features = (target * a.narrow_symint(-1, 0, d)).sum(-1, /*keepdim=*/true);
      edges.key_features = at::ones_symint({nodes.N_k, source.sym_size(1), 1}, source.options());
    }
    if (options.p != 2.0 || scale != 0.5 / root) {
      add_norm(-0.5 / root, 2);
      if (options.p) add_norm(scale, *options.p);
    }
  }
  return finish(nodes, call.target.scalar_type());
}

// --- Operators

#define IKATTN_EDGE_BIAS_PARAMETERS                                  \
  std::optional<double> p, const std::optional<at::Tensor>&key_bias, \
      const std::optional<at::Tensor>&edge_bias, double dropout_p
#define IKATTN_EDGE_LAST_PARAMETERS \
  std::optional<double> magnitude_scale, const std::optional<at::Tensor>&dropout_seed
#define IKATTN_EDGE_OPTIONS \
  {p, key_bias, edge_bias, dropout_p, eps, magnitude_scale, dropout_seed, negative_slope}

Result implicit_kernel_op(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const at::Tensor& rowptr, const at::Tensor& col, const at::Tensor& w1,
                          const std::optional<at::Tensor>& w2, IKATTN_EDGE_BIAS_PARAMETERS,
                          double eps, IKATTN_EDGE_LAST_PARAMETERS) {
  const double negative_slope = EdgeAttentionOptions().negative_slope;  // is not asked for
  const EdgeAttentionCall call{query, key, value, rowptr, col, w1, w2, IKATTN_EDGE_OPTIONS};
  check_edge_attention("implicit_kernel_edge_attention", call);
  return pairs_by_implicit_kernel(call);
}

Result softmax_op(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const at::Tensor& rowptr, const at::Tensor& col, IKATTN_EDGE_BIAS_PARAMETERS,
                  IKATTN_EDGE_LAST_PARAMETERS, double negative_slope) {
  const double eps = EdgeAttentionOptions().eps;  // is not asked for
  const EdgeAttentionCall call{query, key, value, rowptr, col, {}, {}, IKATTN_EDGE_OPTIONS};
  check_edge_attention("softmax_edge_attention", call);
  return pairs_by_softmax(call);
}

Result gat_op(const at::Tensor& vector, const at::Tensor& target, const at::Tensor& source,
              const at::Tensor& value, const at::Tensor& rowptr, const at::Tensor& col,
              const std::optional<at::Tensor>& w1, const std::optional<at::Tensor>& w2,
              IKATTN_EDGE_BIAS_PARAMETERS, double eps, IKATTN_EDGE_LAST_PARAMETERS,
              double negative_slope) {
  const GatAttentionCall call{
      vector, target, source, value, rowptr, col, w1, w2, IKATTN_EDGE_OPTIONS};
  check_gat_attention("gat_edge_attention", call);
  return gat(call);
}

TORCH_LIBRARY_IMPL(ikattn, CompositeImplicitAutograd, m) {
  implement<"implicit_kernel_edge_attention", implicit_kernel_op>(m);
  implement<"softmax_edge_attention", softmax_op>(m);
  implement<"gat_edge_attention", gat_op>(m);
}

// --- Typed access

Result call_implicit_kernel(const EdgeAttentionCall& call) {
  constexpr Operator<"implicit_kernel_edge_attention", decltype(implicit_kernel_op)> op;
  const EdgeAttentionOptions& options = call.options;
  return op(call.query, call.key, call.value, call.rowptr, call.col, *call.w1, call.w2, options.p,
            options.key_bias, options.edge_bias, options.dropout_p, options.eps,
            options.magnitude_scale, options.dropout_seed);
}

Result call_softmax(const EdgeAttentionCall& call) {
  constexpr Operator<"softmax_edge_attention", decltype(softmax_op)> op;
  const EdgeAttentionOptions& options = call.options;
  return op(call.query, call.key, call.value, call.rowptr, call.col, options.p, options.key_bias,
            options.edge_bias, options.dropout_p, options.magnitude_scale, options.dropout_seed,
            options.negative_slope);
}

Result call_gat(const GatAttentionCall& call) {
  constexpr Operator<"gat_edge_attention", decltype(gat_op)> op;
  const EdgeAttentionOptions& options = call.options;
  return op(call.vector, call.target, call.source, call.value, call.rowptr, call.col, call.w1,
            call.w2, options.p, options.key_bias, options.edge_bias, options.dropout_p, options.eps,
            options.magnitude_scale, options.dropout_seed, options.negative_slope);
}

// --- Autocast: nodes in the lower precision; frequencies and biases as they are

template <c10::DeviceType kDevice>
struct Autocast {
  static at::Tensor lower(const at::Tensor& tensor) {
    return at::autocast::cached_cast(at::autocast::get_lower_precision_fp_from_device_type(kDevice),
                                     tensor, kDevice);
  }
  static Result implicit_kernel(const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, const at::Tensor& rowptr,
                                const at::Tensor& col, const at::Tensor& w1,
                                const std::optional<at::Tensor>& w2, IKATTN_EDGE_BIAS_PARAMETERS,
                                double eps, IKATTN_EDGE_LAST_PARAMETERS) {
    const double negative_slope = EdgeAttentionOptions().negative_slope;
    c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
    return call_implicit_kernel(
        {lower(query), lower(key), lower(value), rowptr, col, w1, w2, IKATTN_EDGE_OPTIONS});
  }
  static Result softmax(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                        const at::Tensor& rowptr, const at::Tensor& col,
                        IKATTN_EDGE_BIAS_PARAMETERS, IKATTN_EDGE_LAST_PARAMETERS,
                        double negative_slope) {
    c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
    const double eps = EdgeAttentionOptions().eps;
    return call_softmax(
        {lower(query), lower(key), lower(value), rowptr, col, {}, {}, IKATTN_EDGE_OPTIONS});
  }
  static Result gat(const at::Tensor& vector, const at::Tensor& target, const at::Tensor& source,
                    const at::Tensor& value, const at::Tensor& rowptr, const at::Tensor& col,
                    const std::optional<at::Tensor>& w1, const std::optional<at::Tensor>& w2,
                    IKATTN_EDGE_BIAS_PARAMETERS, double eps, IKATTN_EDGE_LAST_PARAMETERS,
                    double negative_slope) {
    c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
    return call_gat({vector, lower(target), lower(source), lower(value), rowptr, col, w1, w2,
                     IKATTN_EDGE_OPTIONS});
  }
};

template <c10::DeviceType kDevice>
void register_autocast(torch::Library& m) {
  m.impl("implicit_kernel_edge_attention", Autocast<kDevice>::implicit_kernel);
  m.impl("softmax_edge_attention", Autocast<kDevice>::softmax);
  m.impl("gat_edge_attention", Autocast<kDevice>::gat);
}

TORCH_LIBRARY_IMPL(ikattn, AutocastCPU, m) { register_autocast<c10::DeviceType::CPU>(m); }
TORCH_LIBRARY_IMPL(ikattn, Autocast, m) { register_autocast<c10::DeviceType::CUDA>(m); }

}  // namespace

Result implicit_kernel_edge_attention(const at::Tensor& query, const at::Tensor& key,
                                      const at::Tensor& value, const at::Tensor& rowptr,
                                      const at::Tensor& col, const at::Tensor& w1,
                                      const std::optional<at::Tensor>& w2,
                                      const EdgeAttentionOptions& options) {
  check_negative_slope("implicit_kernel_edge_attention", /*has_frequencies=*/true, options);
  return call_implicit_kernel(
      {query, key, value, rowptr, col, w1, w2, with_dropout_seed(options, query.device())});
}

Result softmax_edge_attention(const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value, const at::Tensor& rowptr,
                              const at::Tensor& col, const EdgeAttentionOptions& options) {
  return call_softmax(
      {query, key, value, rowptr, col, {}, {}, with_dropout_seed(options, query.device())});
}

Result gat_edge_attention(const at::Tensor& vector, const at::Tensor& target,
                          const at::Tensor& source, const at::Tensor& value,
                          const at::Tensor& rowptr, const at::Tensor& col,
                          const std::optional<at::Tensor>& w1, const std::optional<at::Tensor>& w2,
                          const EdgeAttentionOptions& options) {
  return call_gat({vector, target, source, value, rowptr, col, w1, w2,
                   with_dropout_seed(options, target.device())});
}

}  // namespace ikattn
