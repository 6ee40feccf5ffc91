// Packed attention: schemas, kernels, autograd, autocast, vmap, typed access, the C++ function.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "attention/operator/saved_options.h"
#include "packed_attention/groups.h"
#include "support/autograd.h"
#include "support/memory.h"

namespace ikattn {
namespace {

TORCH_LIBRARY_FRAGMENT(ikattn, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def("implicit_kernel_attention_varlen" IKATTN_PACKED_SCHEMA
        " -> (Tensor output, Tensor log_normalizer)",
        tags);
  m.def("implicit_kernel_attention_varlen_backward" IKATTN_PACKED_BACKWARD_SCHEMA
        " -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_w1, "
        "Tensor grad_w2, Tensor grad_key_bias)",
        tags);
  m.def("check_implicit_kernel_attention_varlen" IKATTN_PACKED_SCHEMA " -> ()");
  m.def("check_implicit_kernel_attention_varlen_backward" IKATTN_PACKED_BACKWARD_SCHEMA " -> ()");
}

// --- Every device: calls of dense attention

Grouping grouping_of(const PackedCall& call) {
  // Dropout needs runs of neighbours, for which one seed gives the mask.
  return call.query.is_cpu() || call.options.dropout_p > 0 ? Grouping::kRuns : Grouping::kPadded;
}

PackedResults packed_attention(IKATTN_PACKED_PARAMETERS) {
  const PackedCall call IKATTN_PACKED_CALL;
  check_packed_attention(kPackedAttention, call);
  const Boundaries boundaries = boundaries_of(kPackedAttention, call);
  return attend_groups(call, boundaries, groups_of(boundaries, grouping_of(call), is_causal));
}

PackedGradients packed_attention_backward(const at::Tensor& grad_output, const at::Tensor& output,
                                          const at::Tensor& log_normalizer,
                                          IKATTN_PACKED_PARAMETERS, PackedWanted wanted) {
  const PackedCall call IKATTN_PACKED_CALL;
  check_packed_attention_backward(grad_output, {output, log_normalizer}, call);
  const Boundaries boundaries = boundaries_of(kPackedAttentionBackward, call);
  return gradients_of_groups(grad_output, {output, log_normalizer}, call, boundaries,
                             groups_of(boundaries, grouping_of(call), is_causal), wanted);
}

void check(IKATTN_PACKED_PARAMETERS) {
  check_packed_attention(kPackedAttention, IKATTN_PACKED_CALL);
}

void check_backward(const at::Tensor& grad_output, const at::Tensor& output,
                    const at::Tensor& log_normalizer, IKATTN_PACKED_PARAMETERS,
                    PackedWanted /*wanted*/) {
  check_packed_attention_backward(grad_output, {output, log_normalizer}, IKATTN_PACKED_CALL);
}

TORCH_LIBRARY_IMPL(ikattn, CompositeExplicitAutograd, m) {
  implement<"implicit_kernel_attention_varlen", packed_attention>(m);
  implement<"implicit_kernel_attention_varlen_backward", packed_attention_backward>(m);
}

TORCH_LIBRARY_IMPL(ikattn, CompositeImplicitAutograd, m) {
  m.impl("check_implicit_kernel_attention_varlen", check);
  m.impl("check_implicit_kernel_attention_varlen_backward", check_backward);
}

// --- Gradients

class PackedAttention : public torch::autograd::Function<PackedAttention> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value, const at::Tensor& w1,
                               const std::optional<at::Tensor>& w2,
                               const std::optional<at::Tensor>& key_bias, const PackedCall& call) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto [output, log_normalizer] = call_packed_attention(call);
    const AttentionOptions& options = call.options;
    ctx->save_for_backward({query, key, value, w1, or_undefined(w2), or_undefined(key_bias),
                            call.cu_seqlens_q, call.cu_seqlens_k,
                            or_undefined(options.dropout_seed), output, log_normalizer});
    save_numbers(ctx, options);
    ctx->mark_non_differentiable({log_normalizer});
    ctx->set_materialize_grads(false);
    return {output, log_normalizer};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(kPackedGradients + 1);  // the inputs, then the call
    if (!grads[0].defined()) return result;
    const variable_list saved = ctx->get_saved_variables();
    // The forward has checked the longest lengths.
    const PackedCall call{saved[0],          saved[1],
                          saved[2],          saved[3],
                          or_none(saved[4]), saved[6],
                          saved[7],          std::nullopt,
                          std::nullopt,      saved_options(ctx, saved[5], at::Tensor(), saved[8])};
    const std::array<at::Tensor, kPackedGradients> inputs = {saved[0], saved[1], saved[2],
                                                             saved[3], saved[4], saved[5]};
    const auto wanted = wanted_gradients<kPackedGradients>(ctx, inputs);
    std::array<at::Tensor, kPackedGradients> gradients;
    if (at::GradMode::is_enabled()) {
      const auto views = views_of(inputs);
      PackedCall of_views = call;
      of_views.query = views[0];
      of_views.key = views[1];
      of_views.value = views[2];
      of_views.w1 = views[3];
      of_views.w2 = or_none(views[4]);
      of_views.options.key_bias = or_none(views[5]);
      const at::Tensor output = std::get<0>(reference_packed_attention(of_views));
      gradients = differentiable_gradients<kPackedGradients>({output}, {grads[0]}, views, wanted);
    } else {
      gradients = only_wanted<kPackedGradients>(
          call_packed_attention_backward(grads[0], saved[9], saved[10], call, wanted), wanted);
    }
    std::move(gradients.begin(), gradients.end(), result.begin());
    return result;
  }
};

PackedResults packed_autograd(IKATTN_PACKED_PARAMETERS) {
  const PackedCall call IKATTN_PACKED_CALL;
  check_packed_attention(kPackedAttention, call);
  if (any_transformed({&query, &key, &value, &w1}, {&w2, &key_bias})) {
    return reference_packed_attention(call);
  }
  if (!is_recorded({&query, &key, &value, &w1}, {&w2, &key_bias})) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return call_packed_attention(call);
  }
  variable_list result = PackedAttention::apply(query, key, value, w1, w2, key_bias, call);
  return {std::move(result[0]), std::move(result[1])};
}

TORCH_LIBRARY_IMPL(ikattn, Autograd, m) {
  implement<"implicit_kernel_attention_varlen", packed_autograd>(m);
}

// --- vmap: the reference, where it is not the boundaries that are stacked

PackedResults packed_reference(IKATTN_PACKED_PARAMETERS) {
  const PackedCall call IKATTN_PACKED_CALL;
  check_packed_attention(kPackedAttention, call);
  return reference_packed_attention(call);
}

TORCH_LIBRARY_IMPL(ikattn, FuncTorchBatchedDecomposition, m) {
  implement<"implicit_kernel_attention_varlen", packed_reference>(m);
}

// --- Autocast: query, key and value in the lower precision, as attention's

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
PackedResults packed_autocast(IKATTN_PACKED_PARAMETERS) {
  c10::impl::ExcludeDispatchKeyGuard guard(kKey);
  PackedCall call IKATTN_PACKED_CALL;
  const auto type = at::autocast::get_lower_precision_fp_from_device_type(kDevice);
  for (at::Tensor* tensor : {&call.query, &call.key, &call.value}) {
    *tensor = at::autocast::cached_cast(type, *tensor, kDevice);
  }
  return call_packed_attention(call);
}

TORCH_LIBRARY_IMPL(ikattn, AutocastCPU, m) {
  implement<"implicit_kernel_attention_varlen",
            packed_autocast<c10::DeviceType::CPU, c10::DispatchKey::AutocastCPU>>(m);
}
TORCH_LIBRARY_IMPL(ikattn, Autocast, m) {
  implement<"implicit_kernel_attention_varlen",
            packed_autocast<c10::DeviceType::CUDA, c10::DispatchKey::Autocast>>(m);
}

}  // namespace

at::Tensor implicit_kernel_attention_varlen(const at::Tensor& query, const at::Tensor& key,
                                            const at::Tensor& value, const at::Tensor& w1,
                                            const std::optional<at::Tensor>& w2,
                                            const PackedSequences& sequences,
                                            const AttentionOptions& options) {
  TORCH_CHECK_VALUE(!is_present(options.attn_mask), kPackedAttention,
                    ": attn_mask must be absent; key_bias and is_causal hide keys");
  const PackedCall call{query,
                        key,
                        value,
                        w1,
                        w2,
                        sequences.cu_seqlens_q,
                        sequences.cu_seqlens_k,
                        sequences.max_seqlen_q,
                        sequences.max_seqlen_k,
                        with_dropout_seed(options, query.device())};
  return std::get<0>(call_packed_attention(call));
}

}  // namespace ikattn
