// Schemas of the operators of moments, their references, vmap, autocast, and the public C++
// functions.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "moments/arguments.h"
#include "moments/reference.h"
#include "support/checks.h"
#include "support/memory.h"

namespace ikattn {
namespace {

TORCH_LIBRARY_FRAGMENT(ikattn, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def("key_moments" IKATTN_KEY_MOMENTS_SCHEMA " -> (Tensor moments, Tensor reference)", tags);
  m.def("add_key_moments_" IKATTN_ADD_KEY_MOMENTS_SCHEMA " -> ()", tags);
  m.def("key_moments_backward" IKATTN_KEY_MOMENTS_BACKWARD_SCHEMA
        " -> (Tensor grad_key_features, Tensor grad_logits, Tensor grad_value)",
        tags);
  m.def("attention_from_moments" IKATTN_FROM_MOMENTS_SCHEMA
        " -> (Tensor output, Tensor log_normalizer)",
        tags);
  m.def("attention_from_moments_backward" IKATTN_FROM_MOMENTS_BACKWARD_SCHEMA
        " -> (Tensor grad_query_features, Tensor grad_moments)",
        tags);
  m.def("causal_attention_from_moments" IKATTN_CAUSAL_SCHEMA
        " -> (Tensor output, Tensor log_normalizer, Tensor all_moments, Tensor all_reference)",
        tags);
  m.def("causal_attention_from_moments_backward" IKATTN_CAUSAL_BACKWARD_SCHEMA
        " -> (Tensor grad_query_features, Tensor grad_key_features, Tensor grad_logits, "
        "Tensor grad_value, Tensor grad_moments)",
        tags);
  m.def("causal_attention_from_moments_reference" IKATTN_CAUSAL_SCHEMA
        " -> (Tensor output, Tensor log_normalizer, Tensor all_moments, Tensor all_reference)",
        tags);
  m.def("key_moments_reference" IKATTN_KEY_MOMENTS_SCHEMA " -> (Tensor moments, Tensor reference)",
        tags);
  m.def("attention_from_moments_reference" IKATTN_FROM_MOMENTS_SCHEMA
        " -> (Tensor output, Tensor log_normalizer)",
        tags);
  m.def("merge_moments" IKATTN_MERGE_MOMENTS_SCHEMA " -> (Tensor moments, Tensor reference)", tags);
}

TwoTensors key_moments_reference_op(const at::Tensor& key_features, const at::Tensor& logits,
                                    const at::Tensor& value) {
  check_key_moments(key_features, logits, value);
  return reference_key_moments(key_features, logits, value);
}

TwoTensors from_moments_reference_op(const at::Tensor& query_features, const at::Tensor& moments,
                                     const at::Tensor& reference, double eps) {
  check_from_moments(query_features, moments, reference, eps);
  return reference_from_moments(query_features, moments, reference, eps);
}

FourTensors causal_reference_op(const at::Tensor& query_features, const at::Tensor& key_features,
                                const at::Tensor& logits, const at::Tensor& value,
                                const at::Tensor& moments, const at::Tensor& reference,
                                double eps) {
  check_causal(query_features, key_features, logits, value, moments, reference, eps);
  return reference_causal(query_features, key_features, logits, value, moments, reference, eps);
}

void check_mergeable(const at::Tensor& moments, const at::Tensor& reference,
                     const at::Tensor& other_moments, const at::Tensor& other_reference) {
  const char* function = "merge_moments";
  const bool are_numbers = check_placement(function, "moments", moments,
                                           {{"reference", &reference},
                                            {"other_moments", &other_moments},
                                            {"other_reference", &other_reference}});
  if (!are_numbers) return;
  const at::ScalarType type = moments.scalar_type();
  TORCH_CHECK_TYPE(type == at::kFloat || type == at::kDouble, function,
                   ": moments must be float32 or float64, got ", type);
  TORCH_CHECK(moments.dim() == 4, function, ": moments must have shape [B, K, E, d_v + 1], got ",
              moments.sizes());
  check_like(function, "other_moments", other_moments, moments.sizes(), type, moments.device());
  for (const auto& [name, tensor] :
       {NamedTensor{"reference", &reference}, NamedTensor{"other_reference", &other_reference}}) {
    check_like(function, name, *tensor, {moments.size(0), moments.size(1)}, at::kDouble,
               moments.device());
  }
}

TwoTensors merge_moments_op(const at::Tensor& moments, const at::Tensor& reference,
                            const at::Tensor& other_moments, const at::Tensor& other_reference) {
  check_mergeable(moments, reference, other_moments, other_reference);
  return reference_merged(moments, reference, other_moments, other_reference);
}

TORCH_LIBRARY_IMPL(ikattn, CompositeImplicitAutograd, m) {
  implement<"key_moments_reference", key_moments_reference_op>(m);
  implement<"attention_from_moments_reference", from_moments_reference_op>(m);
  implement<"causal_attention_from_moments_reference", causal_reference_op>(m);
  implement<"merge_moments", merge_moments_op>(m);
}

// vmap: the reference instead of a loop over the batch.
TORCH_LIBRARY_IMPL(ikattn, FuncTorchBatchedDecomposition, m) {
  implement<"key_moments", key_moments_reference_op>(m);
  implement<"attention_from_moments", from_moments_reference_op>(m);
  implement<"causal_attention_from_moments", causal_reference_op>(m);
}

// Autocast: features come lowered under it, and sums of their products are made in float32.
template <c10::DeviceType kDevice>
struct Autocast {
  static c10::DispatchKeySet keys() {
    return c10::DispatchKeySet(kDevice == c10::DeviceType::CUDA ? c10::DispatchKey::Autocast
                                                                : c10::DispatchKey::AutocastCPU);
  }
  static at::Tensor wide(const at::Tensor& tensor) {
    return tensor.to(compute_type(tensor.scalar_type()));
  }
  static TwoTensors key_moments(const at::Tensor& key_features, const at::Tensor& logits,
                                const at::Tensor& value) {
    c10::impl::ExcludeDispatchKeyGuard guard(keys());
    return call_key_moments(wide(key_features), wide(logits), value);
  }
  static TwoTensors from_moments(const at::Tensor& query_features, const at::Tensor& moments,
                                 const at::Tensor& reference, double eps) {
    c10::impl::ExcludeDispatchKeyGuard guard(keys());
    return call_from_moments(wide(query_features), moments, reference, eps);
  }
  static FourTensors causal(const at::Tensor& query_features, const at::Tensor& key_features,
                            const at::Tensor& logits, const at::Tensor& value,
                            const at::Tensor& moments, const at::Tensor& reference, double eps) {
    c10::impl::ExcludeDispatchKeyGuard guard(keys());
    return call_causal(wide(query_features), wide(key_features), logits, value, moments, reference,
                       eps);
  }
  static void register_in(torch::Library& m) {
    implement<"causal_attention_from_moments", causal>(m);
    implement<"key_moments", key_moments>(m);
    implement<"attention_from_moments", from_moments>(m);
  }
};

TORCH_LIBRARY_IMPL(ikattn, AutocastCPU, m) { Autocast<c10::DeviceType::CPU>::register_in(m); }
TORCH_LIBRARY_IMPL(ikattn, Autocast, m) { Autocast<c10::DeviceType::CUDA>::register_in(m); }

}  // namespace

KeyMoments key_moments(const at::Tensor& key_features, const at::Tensor& logits,
                       const at::Tensor& value) {
  auto [moments, reference] = call_key_moments(key_features, logits, value);
  return {moments, reference};
}

void add_key_moments(const KeyMoments& keys, const at::Tensor& key_features,
                     const at::Tensor& logits, const at::Tensor& value) {
  at::Tensor moments = keys.moments, reference = keys.reference;
  call_add_key_moments(moments, reference, key_features, logits, value);
}

std::tuple<at::Tensor, at::Tensor> attention_from_moments(const at::Tensor& query_features,
                                                          const KeyMoments& keys, double eps) {
  return call_from_moments(query_features, keys.moments, keys.reference, eps);
}

std::tuple<at::Tensor, at::Tensor, KeyMoments> causal_attention_from_moments(
    const at::Tensor& query_features, const at::Tensor& key_features, const at::Tensor& logits,
    const at::Tensor& value, const KeyMoments& keys, double eps) {
  auto [output, log_normalizer, moments, reference] =
      call_causal(query_features, key_features, logits, value, keys.moments, keys.reference, eps);
  return {output, log_normalizer, {moments, reference}};
}

KeyMoments merge_moments(const KeyMoments& keys, const KeyMoments& others) {
  auto [moments, reference] =
      merge_moments_op(keys.moments, keys.reference, others.moments, others.reference);
  return {moments, reference};
}

}  // namespace ikattn
