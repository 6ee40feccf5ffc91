// The arguments of the attention operators inside the library, and their checks.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cmath>
#include <optional>
#include <tuple>

#include "ikattn/attention.h"
#include "support/checks.h"
#include "support/dispatch.h"

// AttentionOptions, spelled out for the dispatcher, whose functions take every option as an
// argument. A new option is added to the struct and to these four lists, in the same order.
#define IKATTN_OPTION_SCHEMA                                                                    \
  "*, float? p=2.0, Tensor? key_bias=None, Tensor? attn_mask=None, float dropout_p=0.0, "       \
  "bool is_causal=False, bool enable_gqa=False, float eps=1e-05, float? magnitude_scale=None, " \
  "Tensor? dropout_seed=None"
#define IKATTN_OPTION_PARAMETERS                                                   \
  std::optional<double> p, const std::optional<at::Tensor>&key_bias,               \
      const std::optional<at::Tensor>&attn_mask, double dropout_p, bool is_causal, \
      bool enable_gqa, double eps, std::optional<double> magnitude_scale,          \
      const std::optional<at::Tensor>&dropout_seed
#define IKATTN_OPTION_VALUES \
  p, key_bias, attn_mask, dropout_p, is_causal, enable_gqa, eps, magnitude_scale, dropout_seed
#define IKATTN_OPTION_FIELDS(options)                                                             \
  (options).p, (options).key_bias, (options).attn_mask, (options).dropout_p, (options).is_causal, \
      (options).enable_gqa, (options).eps, (options).magnitude_scale, (options).dropout_seed

// The schema of each operator, shared with the operator that only checks its arguments.
#define IKATTN_ATTENTION_SCHEMA \
  "(Tensor query, Tensor key, Tensor value, Tensor w1, Tensor? w2=None, " IKATTN_OPTION_SCHEMA ")"
#define IKATTN_ATTENTION_BACKWARD_SCHEMA                                                 \
  "(Tensor grad_output, Tensor query, Tensor key, Tensor value, Tensor w1, Tensor? w2, " \
  "Tensor output, Tensor log_normalizer, " IKATTN_OPTION_SCHEMA ", bool[7] wanted)"
#define IKATTN_WEIGHTS_SCHEMA                                                    \
  "(Tensor query, Tensor key, Tensor w1, Tensor? w2=None, " IKATTN_OPTION_SCHEMA \
  ", bool average_heads=False)"
#define IKATTN_WEIGHTS_BACKWARD_SCHEMA                                  \
  "(Tensor grad_weights, Tensor query, Tensor key, Tensor w1, Tensor? " \
  "w2=None, " IKATTN_OPTION_SCHEMA ", bool average_heads, bool[6] wanted)"
#define IKATTN_FEATURES_SCHEMA "(Tensor x, Tensor w1, Tensor? w2=None, bool tokens_first=False)"
#define IKATTN_FEATURES_BACKWARD_SCHEMA \
  "(Tensor grad_features, Tensor x, Tensor w1, Tensor? w2, bool[3] wanted)"
#define IKATTN_FROM_FEATURES_SCHEMA                                            \
  "(Tensor query_features, Tensor key_features, Tensor logits, Tensor value, " \
  "float eps=1e-05)"
#define IKATTN_KEEP_MASK_SCHEMA \
  "(Tensor dropout_seed, SymInt B, SymInt H, SymInt L, SymInt S, float dropout_p)"

namespace ikattn {

// Gradients of attention: query, key, value, w1, w2, key_bias, attn_mask.
constexpr int kAttentionGradients = 7;
// Gradients of the weights: those of attention without value.
constexpr int kWeightsGradients = 6;

using AttentionGradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using WeightsGradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

using AttentionSignature = std::tuple<at::Tensor, at::Tensor>(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& w1,
    const std::optional<at::Tensor>& w2, IKATTN_OPTION_PARAMETERS);
using AttentionBackwardSignature = AttentionGradients(
    const at::Tensor& grad_output, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const at::Tensor& w1, const std::optional<at::Tensor>& w2,
    const at::Tensor& output, const at::Tensor& log_normalizer, IKATTN_OPTION_PARAMETERS,
    std::array<bool, kAttentionGradients> wanted);
using WeightsSignature = at::Tensor(const at::Tensor& query, const at::Tensor& key,
                                    const at::Tensor& w1, const std::optional<at::Tensor>& w2,
                                    IKATTN_OPTION_PARAMETERS, bool average_heads);
using WeightsBackwardSignature = WeightsGradients(const at::Tensor& grad_weights,
                                                  const at::Tensor& query, const at::Tensor& key,
                                                  const at::Tensor& w1,
                                                  const std::optional<at::Tensor>& w2,
                                                  IKATTN_OPTION_PARAMETERS, bool average_heads,
                                                  std::array<bool, kWeightsGradients> wanted);
// tokens_first: in memory the result is [B, N, H, 2M] rather than [B, H, N, 2M].
using FeaturesSignature = at::Tensor(const at::Tensor& x, const at::Tensor& w1,
                                     const std::optional<at::Tensor>& w2, bool tokens_first);
using FeaturesBackwardSignature = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
    const at::Tensor& grad_features, const at::Tensor& x, const at::Tensor& w1,
    const std::optional<at::Tensor>& w2, std::array<bool, 3> wanted);
using FromFeaturesSignature = at::Tensor(const at::Tensor& query_features,
                                         const at::Tensor& key_features, const at::Tensor& logits,
                                         const at::Tensor& value, double eps);
using DropoutKeepMaskSignature = at::Tensor(const at::Tensor& dropout_seed, c10::SymInt B,
                                            c10::SymInt H, c10::SymInt L, c10::SymInt S,
                                            double dropout_p);

inline auto spelled_out(const AttentionOptions& options) {
  return std::forward_as_tuple(IKATTN_OPTION_FIELDS(options));
}

// The operators as functions, which take AttentionOptions in the place of the options.
inline constexpr Operator<"implicit_kernel_attention", AttentionSignature> call_attention;
inline constexpr Operator<"implicit_kernel_attention_backward", AttentionBackwardSignature>
    call_attention_backward;
inline constexpr Operator<"implicit_kernel_weights", WeightsSignature> call_weights;
inline constexpr Operator<"implicit_kernel_weights_backward", WeightsBackwardSignature>
    call_weights_backward;
inline constexpr Operator<"spectral_features", FeaturesSignature> call_features;
inline constexpr Operator<"spectral_features_backward", FeaturesBackwardSignature>
    call_features_backward;
inline constexpr Operator<"attention_from_features", FromFeaturesSignature> call_from_features;
inline constexpr Operator<"dropout_keep_mask", DropoutKeepMaskSignature> call_dropout_keep_mask;

// Returns the options with a dropout seed, drawn on the device where one is needed and none is
// given.
template <typename Options>
Options with_dropout_seed(Options options, const at::Device& device) {
  if (options.dropout_p > 0 && !is_present(options.dropout_seed)) {
    options.dropout_seed = draw_dropout_seed(device);
  }
  return options;
}

// Sizes of a checked call, letters as in ikattn/attention.h.
struct AttentionSizes {
  int64_t B, H, G, L, S, d, d_v, M;
  int64_t frequency_heads, frequency_batches;
};

// Checks a call, whose value is undefined for the weights. Errors name the argument, what was
// expected and what was given.
AttentionSizes check_attention(const char* function, const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value, const at::Tensor& w1,
                               const std::optional<at::Tensor>& w2,
                               const AttentionOptions& options);

// Checks a call of attention, or without a value of the weights. Where sizes are symbols of
// torch.compile it checks layouts and devices only.
void check_attention_call(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const at::Tensor& w1, const std::optional<at::Tensor>& w2,
                          const AttentionOptions& options);
AttentionSizes check_attention_backward(const at::Tensor& grad_output, const at::Tensor& query,
                                        const at::Tensor& key, const at::Tensor& value,
                                        const at::Tensor& w1, const std::optional<at::Tensor>& w2,
                                        const at::Tensor& output, const at::Tensor& log_normalizer,
                                        const AttentionOptions& options,
                                        const std::array<bool, kAttentionGradients>& wanted);
AttentionSizes check_weights_backward(const at::Tensor& grad_weights, const at::Tensor& query,
                                      const at::Tensor& key, const at::Tensor& w1,
                                      const std::optional<at::Tensor>& w2,
                                      const AttentionOptions& options, bool average_heads,
                                      const std::array<bool, kWeightsGradients>& wanted);

struct FeatureSizes {
  int64_t B, H, N, d, M, frequency_batches;
};
// Checks a call of features; where sizes are symbols, those that it returns are 0.
FeatureSizes check_features(const at::Tensor& x, const at::Tensor& w1,
                            const std::optional<at::Tensor>& w2);
FeatureSizes check_features_backward(const at::Tensor& grad_features, const at::Tensor& x,
                                     const at::Tensor& w1, const std::optional<at::Tensor>& w2,
                                     const std::array<bool, 3>& wanted);

struct FromFeaturesSizes {
  int64_t B, H, L, S, F, d_v, key_heads, value_heads;
};
FromFeaturesSizes check_from_features(const at::Tensor& query_features,
                                      const at::Tensor& key_features, const at::Tensor& logits,
                                      const at::Tensor& value, double eps);
bool check_from_features_placement(const at::Tensor& query_features, const at::Tensor& key_features,
                                   const at::Tensor& logits, const at::Tensor& value);

// Checks a side input, which may have the type `wanted` of the tensor named `of`, or float32.
void check_side_type(const char* function, const char* name, const at::Tensor& tensor,
                     const char* of, at::ScalarType wanted);

// Checks the frequencies; `of` names the tensor that they multiply: query, or x.
void check_frequencies(const char* function, const char* of, const at::Tensor& w1,
                       const std::optional<at::Tensor>& w2, at::ScalarType type, int64_t B,
                       int64_t H, int64_t G, int64_t d);

void check_numbers(const char* function, const std::optional<double>& p, double eps,
                   const std::optional<double>& magnitude_scale);

void check_dropout(const char* function, double dropout_p,
                   const std::optional<at::Tensor>& dropout_seed);

// Checks the layout and the device of every tensor of a call; see support/checks.h.
bool check_placement(const char* function, const at::Tensor& query, const at::Tensor& key,
                     const at::Tensor& value, const at::Tensor& w1,
                     const std::optional<at::Tensor>& w2, const AttentionOptions& options);

inline double magnitude_scale_or_default(const std::optional<double>& scale, int64_t d) {
  return scale.has_value() ? *scale : 0.5 / std::sqrt(static_cast<double>(d));
}

}  // namespace ikattn
