// Schemas of the attention operators, typed access to them, the public C++ functions, autocast.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "attention/operator/arguments.h"
#include "attention/operator/reference.h"
#include "support/dispatch.h"
#include "support/memory.h"

namespace ikattn {
namespace {

TORCH_LIBRARY_FRAGMENT(ikattn, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def("implicit_kernel_attention" IKATTN_ATTENTION_SCHEMA
        " -> (Tensor output, Tensor log_normalizer)",
        tags);
  m.def("implicit_kernel_attention_backward" IKATTN_ATTENTION_BACKWARD_SCHEMA
        " -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_w1, "
        "Tensor grad_w2, Tensor grad_key_bias, Tensor grad_attn_mask)",
        tags);
  m.def("implicit_kernel_weights" IKATTN_WEIGHTS_SCHEMA " -> Tensor", tags);
  m.def("implicit_kernel_weights_backward" IKATTN_WEIGHTS_BACKWARD_SCHEMA
        " -> (Tensor grad_query, Tensor grad_key, Tensor grad_w1, Tensor grad_w2, "
        "Tensor grad_key_bias, Tensor grad_attn_mask)",
        tags);
  m.def("spectral_features" IKATTN_FEATURES_SCHEMA " -> Tensor", tags);
  m.def("spectral_features_backward" IKATTN_FEATURES_BACKWARD_SCHEMA
        " -> (Tensor grad_x, Tensor grad_w1, Tensor grad_w2)",
        tags);
  m.def("attention_from_features" IKATTN_FROM_FEATURES_SCHEMA " -> Tensor", tags);
  m.def("dropout_keep_mask" IKATTN_KEEP_MASK_SCHEMA " -> Tensor", tags);
  m.def(
      "implicit_kernel_attention_reference(Tensor query, Tensor key, Tensor value, Tensor w1, "
      "Tensor? w2=None, " IKATTN_OPTION_SCHEMA
      ", float norm_dropout_p=0.0) -> "
      "(Tensor output, Tensor log_normalizer)",
      {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
  m.def("implicit_kernel_weights_reference" IKATTN_WEIGHTS_SCHEMA " -> Tensor", tags);
  m.def("spectral_features_reference" IKATTN_FEATURES_SCHEMA " -> Tensor", tags);
  m.def("attention_from_features_reference" IKATTN_FROM_FEATURES_SCHEMA " -> Tensor", tags);
}

// --- The reference as operators: no kernel of their own, so that every transformation sees through

std::tuple<at::Tensor, at::Tensor> attention_reference_op(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& w1,
    const std::optional<at::Tensor>& w2, IKATTN_OPTION_PARAMETERS, double norm_dropout_p) {
  const AttentionOptions options{IKATTN_OPTION_VALUES};
  check_attention_call(query, key, value, w1, w2, options);
  return reference_attention(query, key, value, w1, w2, options, norm_dropout_p);
}

std::tuple<at::Tensor, at::Tensor> attention_decomposition(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& w1,
    const std::optional<at::Tensor>& w2, IKATTN_OPTION_PARAMETERS) {
  return attention_reference_op(query, key, value, w1, w2, IKATTN_OPTION_VALUES, 0);
}

at::Tensor weights_reference_op(const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& w1, const std::optional<at::Tensor>& w2,
                                IKATTN_OPTION_PARAMETERS, bool average_heads) {
  const AttentionOptions options{IKATTN_OPTION_VALUES};
  check_attention_call(query, key, at::Tensor(), w1, w2, options);
  return reference_weights(query, key, w1, w2, options, average_heads);
}

at::Tensor features_reference_op(const at::Tensor& x, const at::Tensor& w1,
                                 const std::optional<at::Tensor>& w2, bool /*tokens_first*/) {
  check_features_call(x, w1, w2);
  return reference_features(x, w1, w2).to(x.scalar_type());
}

at::Tensor from_features_reference_op(const at::Tensor& query_features,
                                      const at::Tensor& key_features, const at::Tensor& logits,
                                      const at::Tensor& value, double eps) {
  check_from_features_placement(query_features, key_features, logits, value);
  if (!has_symbols({&query_features, &key_features, &logits, &value})) {
    check_from_features(query_features, key_features, logits, value, eps);
  }
  return reference_from_features(query_features, key_features, logits, value, eps);
}

TORCH_LIBRARY_IMPL(ikattn, CompositeImplicitAutograd, m) {
  implement<"implicit_kernel_attention_reference", attention_reference_op>(m);
  implement<"implicit_kernel_weights_reference", weights_reference_op>(m);
  implement<"spectral_features_reference", features_reference_op>(m);
  implement<"attention_from_features_reference", from_features_reference_op>(m);
}

TORCH_LIBRARY_IMPL(ikattn, CompositeExplicitAutograd, m) {
  implement<"attention_from_features", composed_from_features>(m);
}

// vmap: the reference instead of a loop over the batch.
TORCH_LIBRARY_IMPL(ikattn, FuncTorchBatchedDecomposition, m) {
  implement<"implicit_kernel_attention", attention_decomposition>(m);
  implement<"implicit_kernel_weights", weights_reference_op>(m);
  implement<"spectral_features", features_reference_op>(m);
  implement<"attention_from_features", from_features_reference_op>(m);
}

// --- Autocast: query, key and value in the lower precision; frequencies, bias and mask as they
// are, for angles and logits are formed in float32 whatever the storage type.

template <c10::DeviceType kDevice>
struct Autocast {
  static constexpr c10::DispatchKey key() {
    return kDevice == c10::DeviceType::CUDA ? c10::DispatchKey::Autocast
                                            : c10::DispatchKey::AutocastCPU;
  }
  static at::Tensor lower(const at::Tensor& tensor) {
    return at::autocast::cached_cast(at::autocast::get_lower_precision_fp_from_device_type(kDevice),
                                     tensor, kDevice);
  }

  static std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& query,
                                                      const at::Tensor& key_,
                                                      const at::Tensor& value, const at::Tensor& w1,
                                                      const std::optional<at::Tensor>& w2,
                                                      IKATTN_OPTION_PARAMETERS) {
    c10::impl::ExcludeDispatchKeyGuard guard(key());
    return call_attention(lower(query), lower(key_), lower(value), w1, w2, {IKATTN_OPTION_VALUES});
  }
  static at::Tensor weights(const at::Tensor& query, const at::Tensor& key_, const at::Tensor& w1,
                            const std::optional<at::Tensor>& w2, IKATTN_OPTION_PARAMETERS,
                            bool average_heads) {
    c10::impl::ExcludeDispatchKeyGuard guard(key());
    return call_weights(lower(query), lower(key_), w1, w2, {IKATTN_OPTION_VALUES}, average_heads);
  }
  static at::Tensor features(const at::Tensor& x, const at::Tensor& w1,
                             const std::optional<at::Tensor>& w2, bool tokens_first) {
    c10::impl::ExcludeDispatchKeyGuard guard(key());
    return call_features(lower(x), w1, w2, tokens_first);
  }
  static at::Tensor from_features(const at::Tensor& query_features, const at::Tensor& key_features,
                                  const at::Tensor& logits, const at::Tensor& value, double eps) {
    c10::impl::ExcludeDispatchKeyGuard guard(key());
    const auto wide = [](const at::Tensor& tensor) {  // features come lowered under autocast
      return tensor.to(compute_type(tensor.scalar_type()));
    };
    return call_from_features(wide(query_features), wide(key_features), wide(logits), value, eps);
  }
  static void register_in(torch::Library& m) {
    implement<"implicit_kernel_attention", attention>(m);
    implement<"implicit_kernel_weights", weights>(m);
    implement<"spectral_features", features>(m);
    implement<"attention_from_features", from_features>(m);
  }
};

TORCH_LIBRARY_IMPL(ikattn, AutocastCPU, m) { Autocast<c10::DeviceType::CPU>::register_in(m); }
TORCH_LIBRARY_IMPL(ikattn, Autocast, m) { Autocast<c10::DeviceType::CUDA>::register_in(m); }

// Options with a dropout seed where one is needed and none was given.
AttentionOptions with_seed(const AttentionOptions& options, const at::Tensor& query) {
  AttentionOptions complete = options;
  if (options.dropout_p > 0 && !is_present(options.dropout_seed)) {
    complete.dropout_seed = draw_dropout_seed(query.device());
  }
  return complete;
}

}  // namespace

// --- Typed access

std::tuple<at::Tensor, at::Tensor> call_attention(const at::Tensor& query, const at::Tensor& key,
                                                  const at::Tensor& value, const at::Tensor& w1,
                                                  const std::optional<at::Tensor>& w2,
                                                  const AttentionOptions& options) {
  static const auto op = find_operator<AttentionSignature>("ikattn::implicit_kernel_attention");
  return op.call(query, key, value, w1, w2, IKATTN_OPTION_FIELDS(options));
}

AttentionGradients call_attention_backward(
    const at::Tensor& grad_output, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const at::Tensor& w1, const std::optional<at::Tensor>& w2,
    const at::Tensor& output, const at::Tensor& log_normalizer, const AttentionOptions& options,
    std::array<bool, kAttentionGradients> wanted) {
  static const auto op =
      find_operator<AttentionBackwardSignature>("ikattn::implicit_kernel_attention_backward");
  return op.call(grad_output, query, key, value, w1, w2, output, log_normalizer,
                 IKATTN_OPTION_FIELDS(options), wanted);
}

at::Tensor call_weights(const at::Tensor& query, const at::Tensor& key, const at::Tensor& w1,
                        const std::optional<at::Tensor>& w2, const AttentionOptions& options,
                        bool average_heads) {
  static const auto op = find_operator<WeightsSignature>("ikattn::implicit_kernel_weights");
  return op.call(query, key, w1, w2, IKATTN_OPTION_FIELDS(options), average_heads);
}

WeightsGradients call_weights_backward(const at::Tensor& grad_weights, const at::Tensor& query,
                                       const at::Tensor& key, const at::Tensor& w1,
                                       const std::optional<at::Tensor>& w2,
                                       const AttentionOptions& options, bool average_heads,
                                       std::array<bool, kWeightsGradients> wanted) {
  static const auto op =
      find_operator<WeightsBackwardSignature>("ikattn::implicit_kernel_weights_backward");
  return op.call(grad_weights, query, key, w1, w2, IKATTN_OPTION_FIELDS(options), average_heads,
                 wanted);
}

at::Tensor call_features(const at::Tensor& x, const at::Tensor& w1,
                         const std::optional<at::Tensor>& w2, bool tokens_first) {
  static const auto op = find_operator<FeaturesSignature>("ikattn::spectral_features");
  return op.call(x, w1, w2, tokens_first);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> call_features_backward(
    const at::Tensor& grad_features, const at::Tensor& x, const at::Tensor& w1,
    const std::optional<at::Tensor>& w2, std::array<bool, 3> wanted) {
  static const auto op =
      find_operator<FeaturesBackwardSignature>("ikattn::spectral_features_backward");
  return op.call(grad_features, x, w1, w2, wanted);
}

at::Tensor call_from_features(const at::Tensor& query_features, const at::Tensor& key_features,
                              const at::Tensor& logits, const at::Tensor& value, double eps) {
  static const auto op = find_operator<FromFeaturesSignature>("ikattn::attention_from_features");
  return op.call(query_features, key_features, logits, value, eps);
}

at::Tensor call_dropout_keep_mask(const at::Tensor& dropout_seed, const c10::SymInt& B,
                                  const c10::SymInt& H, const c10::SymInt& L, const c10::SymInt& S,
                                  double dropout_p) {
  static const auto op = find_operator<DropoutKeepMaskSignature>("ikattn::dropout_keep_mask");
  return op.call(dropout_seed, B, H, L, S, dropout_p);
}

// --- Public functions

at::Tensor implicit_kernel_attention(const at::Tensor& query, const at::Tensor& key,
                                     const at::Tensor& value, const at::Tensor& w1,
                                     const std::optional<at::Tensor>& w2,
                                     const AttentionOptions& options) {
  return std::get<0>(call_attention(query, key, value, w1, w2, with_seed(options, query)));
}

at::Tensor implicit_kernel_weights(const at::Tensor& query, const at::Tensor& key,
                                   const at::Tensor& w1, const std::optional<at::Tensor>& w2,
                                   const AttentionOptions& options, bool average_heads) {
  return call_weights(query, key, w1, w2, with_seed(options, query), average_heads);
}

at::Tensor spectral_features(const at::Tensor& x, const at::Tensor& w1,
                             const std::optional<at::Tensor>& w2) {
  return call_features(x, w1, w2);
}

at::Tensor attention_from_features(const at::Tensor& query_features, const at::Tensor& key_features,
                                   const at::Tensor& logits, const at::Tensor& value, double eps) {
  return call_from_features(query_features, key_features, logits, value, eps);
}

at::Tensor draw_dropout_seed(const at::Device& device) {
  return at::randint(std::numeric_limits<int64_t>::max(), {2},
                     at::TensorOptions().dtype(at::kLong).device(device));
}

}  // namespace ikattn
