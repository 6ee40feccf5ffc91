// Schemas of the edge attention operators, typed access to them, the public C++ function, autocast.
//
// implicit_kernel_edge_attention is a composition for every device and transformation: features of
// the nodes, then edge_attention_from_features, which has kernels.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "attention/arguments.h"
#include "attention/reference.h"
#include "edge_attention/operators.h"
#include "edge_attention/reference.h"
#include "ikattn/attention.h"
#include "support/autograd.h"
#include "support/dispatch.h"
#include "support/memory.h"
#include "support/philox.h"

#define IKATTN_EDGE_OPTION_PARAMETERS                                          \
  std::optional<double> p, const std::optional<at::Tensor>&key_bias,           \
      const std::optional<at::Tensor>&edge_bias, double dropout_p, double eps, \
      std::optional<double> magnitude_scale, const std::optional<at::Tensor>&dropout_seed
#define IKATTN_EDGE_OPTION_VALUES \
  p, key_bias, edge_bias, dropout_p, eps, magnitude_scale, dropout_seed

namespace ikattn {
namespace {

using Result = std::tuple<at::Tensor, at::Tensor>;
using EdgeAttentionSignature = Result(const at::Tensor& query, const at::Tensor& key,
                                      const at::Tensor& value, const at::Tensor& rowptr,
                                      const at::Tensor& col, const at::Tensor& w1,
                                      const std::optional<at::Tensor>& w2,
                                      IKATTN_EDGE_OPTION_PARAMETERS);

TORCH_LIBRARY_FRAGMENT(ikattn, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def(
      "implicit_kernel_edge_attention(Tensor query, Tensor key, Tensor value, Tensor rowptr, "
      "Tensor col, Tensor w1, Tensor? w2=None, *, float? p=2.0, Tensor? key_bias=None, "
      "Tensor? edge_bias=None, float dropout_p=0.0, float eps=1e-05, "
      "float? magnitude_scale=None, Tensor? dropout_seed=None) -> (Tensor output, Tensor weights)",
      tags);
  m.def("edge_attention_from_features(" IKATTN_EDGE_FEATURES_SCHEMA
        ") -> (Tensor output, Tensor weights, Tensor log_normalizer)",
        tags);
  m.def("edge_attention_from_features_backward(" IKATTN_EDGE_FEATURES_BACKWARD_SCHEMA
        ") -> (Tensor grad_query_features, Tensor grad_key_features, Tensor grad_value, "
        "Tensor grad_key_logits, Tensor grad_logits)",
        tags);
  m.def("check_edge_attention_from_features(" IKATTN_EDGE_FEATURES_SCHEMA ") -> ()", tags);
  m.def("check_edge_attention_from_features_backward(" IKATTN_EDGE_FEATURES_BACKWARD_SCHEMA
        ") -> ()",
        tags);
}

// --- Operators that only check, as in attention/check_operators.cpp: fake kernels begin with them

void check_from_features(IKATTN_EDGE_FEATURES_PARAMETERS) {
  check_edge_features(kFromEdgeFeatures, {IKATTN_EDGE_FEATURES_VALUES});
}

void check_from_features_backward(const at::Tensor& grad_output,
                                  const std::optional<at::Tensor>& grad_weights,
                                  IKATTN_EDGE_FEATURES_PARAMETERS,
                                  const at::Tensor& log_normalizer) {
  check_edge_features_backward(kFromEdgeFeaturesBackward, grad_output, or_undefined(grad_weights),
                               {IKATTN_EDGE_FEATURES_VALUES}, log_normalizer);
}

TORCH_LIBRARY_IMPL(ikattn, CompositeImplicitAutograd, m) {
  m.impl("check_edge_attention_from_features", check_from_features);
  m.impl("check_edge_attention_from_features_backward", check_from_features_backward);
}

// --- Devices without kernels, and vmap

EdgeGradients backward_by_reference(const at::Tensor& grad_output,
                                    const std::optional<at::Tensor>& grad_weights,
                                    IKATTN_EDGE_FEATURES_PARAMETERS,
                                    const at::Tensor& log_normalizer) {
  const at::AutoGradMode records(true);
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  const c10::impl::ForceDispatchKeyGuard differentiates(  // although called below autograd
      keys.included_, keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  EdgeFeatures call{IKATTN_EDGE_FEATURES_VALUES};
  check_edge_features_backward(kFromEdgeFeaturesBackward, grad_output, or_undefined(grad_weights),
                               call, log_normalizer);
  if (!call.edge_logits.defined()) {
    call.edge_logits = at::zeros({col.size(0), key_logits.size(1)}, key_logits.options());
  }
  call.edge_logits = call.edge_logits.expand({col.size(0), key_logits.size(1)});
  torch::autograd::variable_list inputs;
  for (at::Tensor* tensor : {&call.query_features, &call.key_features, &call.value,
                             &call.key_logits, &call.edge_logits}) {
    *tensor = tensor->detach().requires_grad_();
    inputs.push_back(*tensor);
  }
  const EdgeResults results = reference_from_edge_features(call);
  torch::autograd::variable_list outputs = {std::get<0>(results)}, grads = {grad_output};
  if (is_present(grad_weights)) {
    outputs.push_back(std::get<1>(results));
    grads.push_back(*grad_weights);
  }
  auto found = torch::autograd::grad(outputs, inputs, grads);
  return {found[0], found[1], found[2], found[3], found[4]};
}

EdgeResults checked_reference(const EdgeFeatures& call) {
  check_edge_features(kFromEdgeFeatures, call);
  return reference_from_edge_features(call);
}

TORCH_LIBRARY_IMPL(ikattn, CompositeExplicitAutograd, m) {
  implement<"edge_attention_from_features", from_edge_features<checked_reference>>(m);
  implement<"edge_attention_from_features_backward", backward_by_reference>(m);
}

TORCH_LIBRARY_IMPL(ikattn, FuncTorchBatchedDecomposition, m) {
  implement<"edge_attention_from_features", from_edge_features<reference_from_edge_features>>(m);
}

// --- The whole from its parts

// [N] or [N, 1] or [N, H], in the arithmetic type, with two axes.
at::Tensor two_axes(const at::Tensor& bias, at::ScalarType type) {
  return (bias.dim() == 1 ? bias.unsqueeze(-1) : bias).to(type);
}

// [N, H, d] -> [N, H, 2M], in the arithmetic type, which is that of the nodes.
at::Tensor node_features(const at::Tensor& nodes, const at::Tensor& w1,
                         const std::optional<at::Tensor>& w2) {
  const at::ScalarType type = nodes.scalar_type();
  const std::optional<at::Tensor> second = is_present(w2) ? or_none(w2->to(type)) : std::nullopt;
  const at::Tensor heads = nodes.transpose(0, 1).unsqueeze(0);
  return call_features(heads, w1.to(type), second).squeeze(0).transpose(0, 1);
}

// What dropout keeps, [E, H]. Edge e is pair (e / 16, e % 16) of a matrix: whole groups of the
// generator.
at::Tensor kept_edges(const EdgeAttentionOptions& options, const c10::SymInt& E,
                      const c10::SymInt& H) {
  return call_dropout_keep_mask(*options.dropout_seed, 1, H, (E + 15) / 16, 16, options.dropout_p)
      .flatten(2)
      .narrow_symint(2, 0, E)
      .squeeze(0)
      .transpose(0, 1);
}

Result attend(const EdgeAttentionCall& call) {
  const EdgeAttentionOptions& options = call.options;
  const at::ScalarType type = compute_type(call.query.scalar_type());
  const c10::SymInt N_q = call.query.sym_size(0), N_k = call.key.sym_size(0);
  const c10::SymInt E = call.col.sym_size(0), H = call.query.sym_size(1);
  EdgeFeatures edges;
  edges.eps = options.eps;
  edges.rowptr = call.rowptr.to(at::kLong);
  edges.col = call.col.to(at::kLong);

  at::Tensor of_keys;
  if (is_present(options.key_bias)) {
    const at::Tensor bias = two_axes(*options.key_bias, type);
    of_keys = bias.expand_symint({N_k, bias.sym_size(1)});
  }
  if (is_present(options.edge_bias)) {
    const at::Tensor bias = two_axes(*options.edge_bias, type);
    edges.edge_logits = bias.expand_symint({E, bias.sym_size(1)});
  }

  // What no edge reads must not reach the arithmetic: 0 * NaN in the gradient would be NaN.
  at::Tensor visible;  // [E, H|1], of every edge
  if (of_keys.defined()) visible = of_keys.index_select(0, edges.col) != -INFINITY;
  if (edges.edge_logits.defined()) {
    const at::Tensor shown = edges.edge_logits != -INFINITY;
    visible = visible.defined() ? visible.logical_and(shown) : shown;
  }
  const auto seen = [&](const at::Tensor& nodes, const c10::SymInt& count) {  // [count, H|1]
    const auto options = call.query.options().dtype(type);
    if (visible.defined()) return sum_to(nodes, visible.to(type), count) > 0;
    return (at::zeros_symint({count}, options).index_fill(0, nodes, 1) > 0).unsqueeze(-1);
  };
  const auto only = [&](const at::Tensor& of_nodes, const at::Tensor& tensor) {
    const at::Tensor wide = tensor.to(type);
    return at::where(of_nodes.unsqueeze(-1), wide, at::zeros({}, wide.options()));
  };
  const at::Tensor read = seen(edges.col, N_k);
  const at::Tensor reading = seen(targets_of(edges.rowptr, edges.col), N_q);
  const at::Tensor key = only(read, call.key);
  edges.query_features = node_features(only(reading, call.query), call.w1, call.w2);
  edges.key_features = node_features(key, call.w1, call.w2);
  edges.value = only(read, call.value);

  edges.key_logits = at::zeros_symint({N_k, H}, key.options());
  if (options.p) {
    const int64_t d = call.key.sym_size(-1).guard_int(__FILE__, __LINE__);
    const double scale = magnitude_scale_or_default(options.magnitude_scale, d);
    edges.key_logits = scale * reference_squared_norm(key, *options.p);
  }
  if (of_keys.defined()) edges.key_logits = edges.key_logits + of_keys;
  if (options.dropout_p > 0) {
    edges.keep = kept_edges(options, E, H);
    edges.rescale = dropout_rescale(dropout_threshold(options.dropout_p));
  }
  const EdgeResults results = call_from_edge_features(edges);
  const at::ScalarType stored = call.query.scalar_type();
  return {std::get<0>(results).to(stored), std::get<1>(results).to(stored)};
}

Result edge_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                      const at::Tensor& rowptr, const at::Tensor& col, const at::Tensor& w1,
                      const std::optional<at::Tensor>& w2, IKATTN_EDGE_OPTION_PARAMETERS) {
  const EdgeAttentionCall call{query, key, value, rowptr, col, w1, w2, {IKATTN_EDGE_OPTION_VALUES}};
  check_edge_attention(call);
  return attend(call);
}

Result call_edge_attention(const EdgeAttentionCall& call) {
  static const auto op =
      find_operator<EdgeAttentionSignature>("ikattn::implicit_kernel_edge_attention");
  const EdgeAttentionOptions& options = call.options;
  return op.call(call.query, call.key, call.value, call.rowptr, call.col, call.w1, call.w2,
                 options.p, options.key_bias, options.edge_bias, options.dropout_p, options.eps,
                 options.magnitude_scale, options.dropout_seed);
}

TORCH_LIBRARY_IMPL(ikattn, CompositeImplicitAutograd, m) {
  implement<"implicit_kernel_edge_attention", edge_attention>(m);
}

// Nodes in the lower precision; frequencies and biases as they are, as in attention/op.cpp.
template <c10::DeviceType kDevice>
Result autocast(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                const at::Tensor& rowptr, const at::Tensor& col, const at::Tensor& w1,
                const std::optional<at::Tensor>& w2, IKATTN_EDGE_OPTION_PARAMETERS) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const auto lower = [](const at::Tensor& tensor) {
    return at::autocast::cached_cast(at::autocast::get_lower_precision_fp_from_device_type(kDevice),
                                     tensor, kDevice);
  };
  return call_edge_attention(
      {lower(query), lower(key), lower(value), rowptr, col, w1, w2, {IKATTN_EDGE_OPTION_VALUES}});
}

TORCH_LIBRARY_IMPL(ikattn, AutocastCPU, m) {
  m.impl("implicit_kernel_edge_attention", autocast<c10::DeviceType::CPU>);
}
TORCH_LIBRARY_IMPL(ikattn, Autocast, m) {
  m.impl("implicit_kernel_edge_attention", autocast<c10::DeviceType::CUDA>);
}

}  // namespace

EdgeResults call_from_edge_features(const EdgeFeatures& call) {
  static const auto op =
      find_operator<FromEdgeFeaturesSignature>("ikattn::edge_attention_from_features");
  return op.call(call.query_features, call.key_features, call.value, call.key_logits,
                 or_none(call.edge_logits), or_none(call.keep), call.rowptr, call.col, call.eps,
                 call.rescale);
}

EdgeGradients call_from_edge_features_backward(const at::Tensor& grad_output,
                                               const at::Tensor& grad_weights,
                                               const EdgeFeatures& call,
                                               const at::Tensor& log_normalizer) {
  static const auto op = find_operator<FromEdgeFeaturesBackwardSignature>(
      "ikattn::edge_attention_from_features_backward");
  return op.call(grad_output, or_none(grad_weights), call.query_features, call.key_features,
                 call.value, call.key_logits, or_none(call.edge_logits), or_none(call.keep),
                 call.rowptr, call.col, call.eps, call.rescale, log_normalizer);
}

Result implicit_kernel_edge_attention(const at::Tensor& query, const at::Tensor& key,
                                      const at::Tensor& value, const at::Tensor& rowptr,
                                      const at::Tensor& col, const at::Tensor& w1,
                                      const std::optional<at::Tensor>& w2,
                                      const EdgeAttentionOptions& options) {
  EdgeAttentionCall call{query, key, value, rowptr, col, w1, w2, options};
  if (options.dropout_p > 0 && !is_present(options.dropout_seed)) {
    call.options.dropout_seed = draw_dropout_seed(query.device());
  }
  return call_edge_attention(call);
}

}  // namespace ikattn
