// CPU: tensors as the kernels see them, threads, the choice of instruction set.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "moments/arguments.h"
#include "moments/cpu/kernel.h"
#include "support/checks.h"
#include "support/cpu_glue.h"
#include "support/memory.h"

namespace ikattn {
namespace {

const MomentsKernels& kernels() { return IKATTN_KERNELS(moments_kernels); }

// Returns the multiply-adds of one pass of some tokens.
double work_of(int64_t tokens, int64_t F, int64_t d_v) {
  return static_cast<double>(tokens) * static_cast<double>(F * (F + 1) / 2) *
         static_cast<double>(d_v + 1);
}

at::Tensor not_wanted(const at::Tensor& like) { return at::empty({0}, like.options()); }

KeyMomentsParams key_params(const KeyMomentsSizes& sizes, const at::Tensor& key_features,
                            const at::Tensor& logits, const at::Tensor& value,
                            const at::Tensor& moments, const at::Tensor& reference) {
  KeyMomentsParams params{sizes.B, sizes.K, sizes.G, sizes.S, sizes.F / 2, sizes.d_v};
  params.features = array_of(key_features);
  params.logits = array_of(logits);
  params.value = array_of(value);
  params.moments = array_of(moments);
  params.reference = array_of(reference);
  return params;
}

FromMomentsParams query_params(const FromMomentsSizes& sizes, const at::Tensor& query_features,
                               const at::Tensor& moments, const at::Tensor& reference,
                               const at::Tensor& output, const at::Tensor& log_normalizer,
                               double eps) {
  FromMomentsParams params{sizes.B, sizes.H, sizes.K, sizes.L, sizes.F / 2, sizes.d_v, eps};
  params.features = array_of(query_features);
  params.moments = array_of(moments);
  params.reference = array_of(reference);
  params.output = array_of(output);
  params.log_normalizer = array_of(log_normalizer);
  return params;
}

TwoTensors key_moments_cpu(const at::Tensor& key_features, const at::Tensor& logits,
                           const at::Tensor& value) {
  const KeyMomentsSizes sizes = check_key_moments(key_features, logits, value);
  const auto options = key_features.options();
  const auto [moments, reference] = with_memory_for("key_moments", "the moments", [&] {
    return std::pair{at::empty({sizes.B, sizes.K, sizes.entries(), sizes.d_v + 1},
                               options.dtype(compute_type(key_features.scalar_type()))),
                     at::empty({sizes.B, sizes.K}, options.dtype(at::kDouble))};
  });
  kernels().key_moments[compute_index(key_features)](
      key_params(sizes, key_features, logits, value, moments, reference),
      TorchExecutor("key_moments", work_of(sizes.B * sizes.K * sizes.S, sizes.F, sizes.d_v)));
  return {moments, reference};
}

void add_key_moments_cpu(at::Tensor& moments, at::Tensor& reference, const at::Tensor& key_features,
                         const at::Tensor& logits, const at::Tensor& value) {
  const KeyMomentsSizes sizes =
      check_add_key_moments(moments, reference, key_features, logits, value);
  KeyMomentsParams params = key_params(sizes, key_features, logits, value, moments, reference);
  params.grows = true;
  kernels().key_moments[compute_index(key_features)](
      params, TorchExecutor("add_key_moments_",
                            work_of(sizes.B * sizes.K * (sizes.S + 1), sizes.F, sizes.d_v)));
}

ThreeTensors key_moments_backward_cpu(const at::Tensor& grad_moments,
                                      const at::Tensor& key_features, const at::Tensor& logits,
                                      const at::Tensor& value, const at::Tensor& reference,
                                      std::array<bool, 3> wanted) {
  const char* function = "key_moments_backward";
  const KeyMomentsSizes sizes =
      check_key_moments_backward(grad_moments, key_features, logits, value, reference);
  KeyMomentsParams params = key_params(sizes, key_features, logits, value, grad_moments, reference);
  const auto gradient = [&](bool is_wanted, const at::Tensor& like, Array& array) {
    const at::Tensor result = is_wanted ? at::empty_like(like) : not_wanted(like);
    if (is_wanted) array = array_of(result);
    return result;
  };
  const bool shares_values = sizes.G != sizes.K;
  const auto [grad_features, grad_logits, grad_value] =
      with_memory_for(function, "the gradients", [&] {
        const at::Tensor of_heads =
            wanted[2] && shares_values
                ? at::empty({sizes.B, sizes.K, sizes.S, sizes.d_v}, grad_moments.options())
                : value;
        return std::tuple{gradient(wanted[0], key_features, params.grad_features),
                          gradient(wanted[1], logits, params.grad_logits),
                          gradient(wanted[2], of_heads, params.grad_value)};
      });
  kernels().key_moments_backward[compute_index(key_features)](
      params,
      TorchExecutor(function, 2 * work_of(sizes.B * sizes.K * sizes.S, sizes.F, sizes.d_v)));
  if (!wanted[2] || !shares_values) return {grad_features, grad_logits, grad_value};
  const at::Tensor summed = grad_value.unflatten(1, {sizes.G, sizes.K / sizes.G}).sum(2);
  return {grad_features, grad_logits, at::empty_like(value).copy_(summed)};
}

TwoTensors from_moments_cpu(const at::Tensor& query_features, const at::Tensor& moments,
                            const at::Tensor& reference, double eps) {
  const FromMomentsSizes sizes = check_from_moments(query_features, moments, reference, eps);
  const auto options = query_features.options();
  const auto [output, log_normalizer] =
      with_memory_for("attention_from_moments", "the output and its normalizer", [&] {
        return std::pair{at::empty({sizes.B, sizes.L, sizes.H, sizes.d_v}, options).transpose(1, 2),
                         at::empty({sizes.B, sizes.H, sizes.L}, options.dtype(at::kDouble))};
      });
  kernels().from_moments[compute_index(query_features)](
      query_params(sizes, query_features, moments, reference, output, log_normalizer, eps),
      TorchExecutor("attention_from_moments",
                    work_of(sizes.B * sizes.H * sizes.L, sizes.F, sizes.d_v)));
  return {output, log_normalizer};
}

TwoTensors from_moments_backward_cpu(const at::Tensor& grad_output,
                                     const at::Tensor& query_features, const at::Tensor& moments,
                                     const at::Tensor& reference, const at::Tensor& output,
                                     const at::Tensor& log_normalizer, double eps,
                                     std::array<bool, 2> wanted) {
  const char* function = "attention_from_moments_backward";
  const FromMomentsSizes sizes = check_from_moments_backward(
      grad_output, query_features, moments, reference, output, log_normalizer, eps);
  FromMomentsParams params =
      query_params(sizes, query_features, moments, reference, output, log_normalizer, eps);
  params.grad_output = array_of(grad_output);
  const auto [grad_features, grad_moments] = with_memory_for(function, "the gradients", [&] {
    return std::pair{
        wanted[0] ? at::empty_like(query_features) : not_wanted(query_features),
        wanted[1] ? at::empty(moments.sizes(), moments.options()) : not_wanted(moments)};
  });
  if (wanted[0]) params.grad_features = array_of(grad_features);
  if (wanted[1]) params.grad_moments = array_of(grad_moments);
  kernels().from_moments_backward[compute_index(query_features)](
      params,
      TorchExecutor(function, 2 * work_of(sizes.B * sizes.H * sizes.L, sizes.F, sizes.d_v)));
  return {grad_features, grad_moments};
}

// Returns the multiply-adds of pairs and of both sums, over the tokens of a causal call.
double causal_work(const CausalSizes& sizes) {
  return 2 * work_of(sizes.queries.B * sizes.queries.H * sizes.queries.L, sizes.queries.F,
                     sizes.queries.d_v);
}

FourTensors causal_cpu(const at::Tensor& query_features, const at::Tensor& key_features,
                       const at::Tensor& logits, const at::Tensor& value, const at::Tensor& moments,
                       const at::Tensor& reference, double eps) {
  const char* function = "causal_attention_from_moments";
  const CausalSizes sizes =
      check_causal(query_features, key_features, logits, value, moments, reference, eps);
  const auto [B, H, K, L, F, d_v] = sizes.queries;
  const auto options = query_features.options();
  const auto [output, log_normalizer, all_moments, all_reference] =
      with_memory_for(function, "the output, its normalizer and the moments", [&] {
        return FourTensors{at::empty({B, L, H, d_v}, options).transpose(1, 2),
                           at::empty({B, H, L}, options.dtype(at::kDouble)),
                           at::empty(moments.sizes(), moments.options()),
                           at::empty({B, K}, options.dtype(at::kDouble))};
      });
  const CausalParams params{
      query_params(sizes.queries, query_features, moments, reference, output, log_normalizer, eps),
      key_params(sizes.keys, key_features, logits, value, all_moments, all_reference)};
  kernels().causal[compute_index(query_features)](params,
                                                  TorchExecutor(function, causal_work(sizes)));
  return {output, log_normalizer, all_moments, all_reference};
}

FiveTensors causal_backward_cpu(const at::Tensor& grad_output,
                                const std::optional<at::Tensor>& grad_all_moments,
                                const at::Tensor& query_features, const at::Tensor& key_features,
                                const at::Tensor& logits, const at::Tensor& value,
                                const at::Tensor& moments, const at::Tensor& reference,
                                const at::Tensor& output, const at::Tensor& log_normalizer,
                                double eps, std::array<bool, 5> wanted) {
  const char* function = "causal_attention_from_moments_backward";
  const CausalSizes sizes =
      check_causal_backward(grad_output, grad_all_moments, query_features, key_features, logits,
                            value, moments, reference, output, log_normalizer, eps);
  const auto [B, K, G, L, F, d_v] = sizes.keys;
  const at::Tensor none = not_wanted(moments);
  CausalParams params{
      query_params(sizes.queries, query_features, moments, reference, output, log_normalizer, eps),
      key_params(sizes.keys, key_features, logits, value, none, none)};
  params.queries.grad_output = array_of(grad_output);
  params.keys.moments = grad_all_moments ? array_of(*grad_all_moments) : Array{};
  const auto gradient = [&](bool is_wanted, at::IntArrayRef shape, Array& array) {
    if (!is_wanted) return none;
    const at::Tensor result = at::empty(shape, moments.options());
    array = array_of(result);
    return result;
  };
  // Gradients of keys are in the arithmetic type, for they are sums of two parts.
  const auto [of_query, of_key, of_logits, of_value,
              of_moments] = with_memory_for(function, "the gradients", [&] {
    return FiveTensors{gradient(wanted[0], query_features.sizes(), params.queries.grad_features),
                       gradient(wanted[1], key_features.sizes(), params.keys.grad_features),
                       gradient(wanted[2], logits.sizes(), params.keys.grad_logits),
                       gradient(wanted[3], {B, K, L, d_v}, params.keys.grad_value),
                       gradient(wanted[4], moments.sizes(), params.queries.grad_moments)};
  });
  kernels().causal_backward[compute_index(query_features)](
      params, TorchExecutor(function, 2.5 * causal_work(sizes)));
  const auto finished = [&](bool is_wanted, const at::Tensor& result, const at::Tensor& like) {
    return is_wanted ? at::empty_like(like).copy_(result) : not_wanted(like);
  };
  const bool shares_values = wanted[3] && G != K;
  return {finished(wanted[0], of_query, query_features), finished(wanted[1], of_key, key_features),
          finished(wanted[2], of_logits, logits),
          finished(wanted[3], shares_values ? of_value.unflatten(1, {G, K / G}).sum(2) : of_value,
                   value),
          of_moments};
}

TORCH_LIBRARY_IMPL(ikattn, CPU, m) {
  implement<"causal_attention_from_moments", causal_cpu>(m);
  implement<"causal_attention_from_moments_backward", causal_backward_cpu>(m);
  implement<"key_moments", key_moments_cpu>(m);
  implement<"add_key_moments_", add_key_moments_cpu>(m);
  implement<"key_moments_backward", key_moments_backward_cpu>(m);
  implement<"attention_from_moments", from_moments_cpu>(m);
  implement<"attention_from_moments_backward", from_moments_backward_cpu>(m);
}

}  // namespace
}  // namespace ikattn
