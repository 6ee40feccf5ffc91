// Argument checks of the operators of moments, and operators that only check, with which fake
// kernels start.
#include "support/checks.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <torch/library.h>

#include "attention/operator/arguments.h"
#include "moments/arguments.h"

namespace ikattn {
namespace {

void check_float(const char* function, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(is_supported_float(tensor.scalar_type()), function, ": ", name,
                   " must be float64, float32, bfloat16 or float16, got ", tensor.scalar_type());
}

void check_features(const char* function, const char* name, const at::Tensor& features,
                    const char* shape) {
  check_float(function, name, features);
  constexpr int64_t kMostFeatures = int64_t{1} << 21;  // two of each frequency
  TORCH_CHECK(features.dim() == 4 && features.size(1) >= 1 && features.size(3) >= 2 &&
                  features.size(3) <= kMostFeatures && features.size(3) % 2 == 0,
              function, ": ", name, " must have shape ", shape,
              " with at least one head and an even number F of features, from 2 to 2^21, got ",
              features.sizes());
}

bool place_keys(const char* function, const at::Tensor& key_features, const at::Tensor& logits,
                const at::Tensor& value) {
  return check_placement(function, "key_features", key_features,
                         {{"logits", &logits}, {"value", &value}});
}

bool place_queries(const char* function, const at::Tensor& query_features,
                   const at::Tensor& moments, const at::Tensor& reference) {
  return check_placement(function, "query_features", query_features,
                         {{"moments", &moments}, {"reference", &reference}});
}

bool place_causal(const char* function, const at::Tensor& query_features,
                  const at::Tensor& key_features, const at::Tensor& logits, const at::Tensor& value,
                  const at::Tensor& moments, const at::Tensor& reference) {
  return check_placement(function, "query_features", query_features,
                         {{"key_features", &key_features},
                          {"logits", &logits},
                          {"value", &value},
                          {"moments", &moments},
                          {"reference", &reference}});
}

}  // namespace

KeyMomentsSizes check_key_moments(const at::Tensor& key_features, const at::Tensor& logits,
                                  const at::Tensor& value, const char* function) {
  if (!place_keys(function, key_features, logits, value)) return {};
  check_features(function, "key_features", key_features, "[B, K, S, F]");
  const int64_t B = key_features.size(0), K = key_features.size(1), S = key_features.size(2);
  check_float(function, "logits", logits);
  TORCH_CHECK(logits.sizes() == at::IntArrayRef({B, K, S}), function,
              ": logits must have shape [B, K, S] = [", B, ", ", K, ", ", S, "], got ",
              logits.sizes());
  check_float(function, "value", value);
  TORCH_CHECK(value.dim() == 4 && value.size(0) == B && value.size(1) >= 1 &&
                  K % value.size(1) == 0 && value.size(2) == S,
              function, ": value must have shape [B, G, S, d_v] with B = ", B,
              ", heads that divide K = ", K, " and S = ", S, ", got ", value.sizes());
  return {B, K, value.size(1), S, key_features.size(3), value.size(3)};
}

KeyMomentsSizes check_add_key_moments(const at::Tensor& moments, const at::Tensor& reference,
                                      const at::Tensor& key_features, const at::Tensor& logits,
                                      const at::Tensor& value) {
  const char* function = "add_key_moments_";
  const KeyMomentsSizes sizes = check_key_moments(key_features, logits, value, function);
  check_like(function, "moments", moments, {sizes.B, sizes.K, sizes.entries(), sizes.d_v + 1},
             compute_type(key_features.scalar_type()), key_features.device());
  check_like(function, "reference", reference, {sizes.B, sizes.K}, at::kDouble,
             key_features.device());
  for (const auto& [name, tensor] : {std::pair{"moments", &moments}, {"reference", &reference}}) {
    TORCH_CHECK(at::has_internal_overlap(*tensor) == at::MemOverlap::No ||
                    tensor->is_non_overlapping_and_dense(),
                function, ": ", name, " must have a place in memory for each number, got strides ",
                tensor->strides());
  }
  return sizes;
}

KeyMomentsSizes check_key_moments_backward(const at::Tensor& grad_moments,
                                           const at::Tensor& key_features, const at::Tensor& logits,
                                           const at::Tensor& value, const at::Tensor& reference) {
  const char* function = "key_moments_backward";
  const KeyMomentsSizes sizes = check_key_moments(key_features, logits, value, function);
  check_like(function, "grad_moments", grad_moments,
             {sizes.B, sizes.K, sizes.entries(), sizes.d_v + 1},
             compute_type(key_features.scalar_type()), key_features.device());
  check_like(function, "reference", reference, {sizes.B, sizes.K}, at::kDouble,
             key_features.device());
  return sizes;
}

FromMomentsSizes check_from_moments(const at::Tensor& query_features, const at::Tensor& moments,
                                    const at::Tensor& reference, double eps, const char* function) {
  if (!place_queries(function, query_features, moments, reference)) return {};
  check_features(function, "query_features", query_features, "[B, H, L, F]");
  const int64_t B = query_features.size(0), H = query_features.size(1), F = query_features.size(3);
  const int64_t E = F * (F + 1) / 2 + 1;
  const at::ScalarType type = compute_type(query_features.scalar_type());
  TORCH_CHECK_TYPE(moments.scalar_type() == type, function, ": moments must be ", type, " for ",
                   query_features.scalar_type(), " features, got ", moments.scalar_type());
  TORCH_CHECK(moments.dim() == 4 && moments.size(0) == B && moments.size(1) >= 1 &&
                  H % moments.size(1) == 0 && moments.size(2) == E && moments.size(3) >= 1,
              function, ": moments must have shape [B, K, E, d_v + 1] with B = ", B,
              ", heads that divide H = ", H, " and E = F (F + 1) / 2 + 1 = ", E, ", got ",
              moments.sizes());
  const int64_t K = moments.size(1);
  check_like(function, "reference", reference, {B, K}, at::kDouble, query_features.device());
  check_numbers(function, std::nullopt, eps, std::nullopt);
  const double least = type == at::kDouble ? 1e-290 : 1e-30;  // less would be nothing
  TORCH_CHECK_VALUE(eps >= least, function, ": eps must be at least ", least, " for ", type,
                    " moments, got ", eps);
  return {B, H, K, query_features.size(2), F, moments.size(3) - 1};
}

FromMomentsSizes check_from_moments_backward(const at::Tensor& grad_output,
                                             const at::Tensor& query_features,
                                             const at::Tensor& moments, const at::Tensor& reference,
                                             const at::Tensor& output,
                                             const at::Tensor& log_normalizer, double eps,
                                             const char* function) {
  const FromMomentsSizes sizes =
      check_from_moments(query_features, moments, reference, eps, function);
  const std::array<int64_t, 4> output_sizes = {sizes.B, sizes.H, sizes.L, sizes.d_v};
  const at::ScalarType type = query_features.scalar_type();
  check_like(function, "output", output, output_sizes, type, query_features.device());
  check_like(function, "log_normalizer", log_normalizer, {sizes.B, sizes.H, sizes.L}, at::kDouble,
             query_features.device());
  check_like(function, "grad_output", grad_output, output_sizes, type, query_features.device());
  return sizes;
}

CausalSizes check_causal(const at::Tensor& query_features, const at::Tensor& key_features,
                         const at::Tensor& logits, const at::Tensor& value,
                         const at::Tensor& moments, const at::Tensor& reference, double eps,
                         const char* function) {
  if (!place_causal(function, query_features, key_features, logits, value, moments, reference)) {
    return {};
  }
  const FromMomentsSizes queries =
      check_from_moments(query_features, moments, reference, eps, function);
  const KeyMomentsSizes keys = check_key_moments(key_features, logits, value, function);
  const at::ScalarType type = query_features.scalar_type();
  TORCH_CHECK_TYPE(key_features.scalar_type() == type, function, ": key_features must be ", type,
                   " as query_features, got ", key_features.scalar_type());
  TORCH_CHECK(
      keys.B == queries.B && keys.K == queries.K && keys.S == queries.L && keys.F == queries.F,
      function, ": key_features must have shape [B, K, L, F] = [", queries.B, ", ", queries.K, ", ",
      queries.L, ", ", queries.F, "], got ", key_features.sizes());
  TORCH_CHECK(keys.d_v == queries.d_v, function, ": value must have d_v = ", queries.d_v,
              " numbers, one less than moments, got ", value.sizes());
  return {queries, keys};
}

CausalSizes check_causal_backward(const at::Tensor& grad_output,
                                  const std::optional<at::Tensor>& grad_all_moments,
                                  const at::Tensor& query_features, const at::Tensor& key_features,
                                  const at::Tensor& logits, const at::Tensor& value,
                                  const at::Tensor& moments, const at::Tensor& reference,
                                  const at::Tensor& output, const at::Tensor& log_normalizer,
                                  double eps) {
  const char* function = "causal_attention_from_moments_backward";
  const CausalSizes sizes =
      check_causal(query_features, key_features, logits, value, moments, reference, eps, function);
  check_from_moments_backward(grad_output, query_features, moments, reference, output,
                              log_normalizer, eps, function);
  if (grad_all_moments) {
    check_like(function, "grad_all_moments", *grad_all_moments, moments.sizes(),
               moments.scalar_type(), moments.device());
  }
  return sizes;
}

namespace {

void causal_backward(const at::Tensor& grad_output,
                     const std::optional<at::Tensor>& grad_all_moments,
                     const at::Tensor& query_features, const at::Tensor& key_features,
                     const at::Tensor& logits, const at::Tensor& value, const at::Tensor& moments,
                     const at::Tensor& reference, const at::Tensor& output,
                     const at::Tensor& log_normalizer, double eps, std::array<bool, 5>) {
  const char* function = "causal_attention_from_moments_backward";
  const bool are_numbers =
      place_causal(function, query_features, key_features, logits, value, moments, reference);
  if (check_placement(function, "query_features", query_features,
                      {{"grad_output", &grad_output},
                       {"grad_all_moments", address(grad_all_moments)},
                       {"output", &output},
                       {"log_normalizer", &log_normalizer}}) &&
      are_numbers) {
    check_causal_backward(grad_output, grad_all_moments, query_features, key_features, logits,
                          value, moments, reference, output, log_normalizer, eps);
  }
}

void add_key_moments(const at::Tensor& moments, const at::Tensor& reference,
                     const at::Tensor& key_features, const at::Tensor& logits,
                     const at::Tensor& value) {
  const char* function = "add_key_moments_";
  const bool are_numbers = place_keys(function, key_features, logits, value);
  if (check_placement(function, "key_features", key_features,
                      {{"moments", &moments}, {"reference", &reference}}) &&
      are_numbers) {
    check_add_key_moments(moments, reference, key_features, logits, value);
  }
}

void key_moments_backward(const at::Tensor& grad_moments, const at::Tensor& key_features,
                          const at::Tensor& logits, const at::Tensor& value,
                          const at::Tensor& reference, std::array<bool, 3>) {
  const char* function = "key_moments_backward";
  const bool are_numbers = place_keys(function, key_features, logits, value);
  if (check_placement(function, "key_features", key_features,
                      {{"grad_moments", &grad_moments}, {"reference", &reference}}) &&
      are_numbers) {
    check_key_moments_backward(grad_moments, key_features, logits, value, reference);
  }
}

void from_moments_backward(const at::Tensor& grad_output, const at::Tensor& query_features,
                           const at::Tensor& moments, const at::Tensor& reference,
                           const at::Tensor& output, const at::Tensor& log_normalizer, double eps,
                           std::array<bool, 2>) {
  const char* function = "attention_from_moments_backward";
  const bool are_numbers = place_queries(function, query_features, moments, reference);
  if (check_placement(function, "query_features", query_features,
                      {{"grad_output", &grad_output},
                       {"output", &output},
                       {"log_normalizer", &log_normalizer}}) &&
      are_numbers) {
    check_from_moments_backward(grad_output, query_features, moments, reference, output,
                                log_normalizer, eps);
  }
}

TORCH_LIBRARY_FRAGMENT(ikattn, m) {
  m.def("check_key_moments" IKATTN_KEY_MOMENTS_SCHEMA " -> ()",
        [](const at::Tensor& key_features, const at::Tensor& logits, const at::Tensor& value) {
          check_key_moments(key_features, logits, value);
        });
  m.def(
      "check_add_key_moments_(Tensor moments, Tensor reference, Tensor key_features, Tensor "
      "logits, Tensor value) -> ()",
      add_key_moments);
  m.def("check_key_moments_backward" IKATTN_KEY_MOMENTS_BACKWARD_SCHEMA " -> ()",
        key_moments_backward);
  m.def("check_attention_from_moments" IKATTN_FROM_MOMENTS_SCHEMA " -> ()",
        [](const at::Tensor& query_features, const at::Tensor& moments, const at::Tensor& reference,
           double eps) { check_from_moments(query_features, moments, reference, eps); });
  m.def("check_attention_from_moments_backward" IKATTN_FROM_MOMENTS_BACKWARD_SCHEMA " -> ()",
        from_moments_backward);
  m.def("check_causal_attention_from_moments" IKATTN_CAUSAL_SCHEMA " -> ()",
        [](const at::Tensor& query_features, const at::Tensor& key_features,
           const at::Tensor& logits, const at::Tensor& value, const at::Tensor& moments,
           const at::Tensor& reference, double eps) {
          check_causal(query_features, key_features, logits, value, moments, reference, eps);
        });
  m.def("check_causal_attention_from_moments_backward" IKATTN_CAUSAL_BACKWARD_SCHEMA " -> ()",
        causal_backward);
}

}  // namespace
}  // namespace ikattn
