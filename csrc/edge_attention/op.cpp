// Schema of the edge attention operator, the public C++ function, autocast.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "edge_attention/arguments.h"
#include "edge_attention/reference.h"
#include "ikattn/attention.h"
#include "support/checks.h"
#include "support/dispatch.h"

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
  m.def(
      "implicit_kernel_edge_attention(Tensor query, Tensor key, Tensor value, Tensor rowptr, "
      "Tensor col, Tensor w1, Tensor? w2=None, *, float? p=2.0, Tensor? key_bias=None, "
      "Tensor? edge_bias=None, float dropout_p=0.0, float eps=1e-05, "
      "float? magnitude_scale=None, Tensor? dropout_seed=None) -> (Tensor output, Tensor weights)",
      {at::Tag::pt2_compliant_tag});
}

Result call_edge_attention(const EdgeAttentionCall& call) {
  static const auto op =
      find_operator<EdgeAttentionSignature>("ikattn::implicit_kernel_edge_attention");
  const EdgeAttentionOptions& options = call.options;
  return op.call(call.query, call.key, call.value, call.rowptr, call.col, call.w1, call.w2,
                 options.p, options.key_bias, options.edge_bias, options.dropout_p, options.eps,
                 options.magnitude_scale, options.dropout_seed);
}

// No kernel of its own: every transformation sees through.
Result edge_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                      const at::Tensor& rowptr, const at::Tensor& col, const at::Tensor& w1,
                      const std::optional<at::Tensor>& w2, IKATTN_EDGE_OPTION_PARAMETERS) {
  const EdgeAttentionCall call{query, key, value, rowptr, col, w1, w2, {IKATTN_EDGE_OPTION_VALUES}};
  check_edge_attention(call);
  return reference_edge_attention(call);
}

TORCH_LIBRARY_IMPL(ikattn, CompositeImplicitAutograd, m) {
  m.impl("implicit_kernel_edge_attention", edge_attention);
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
