// The arguments of the operators of moments inside the library, and their checks.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

#include "ikattn/moments.h"
#include "support/dispatch.h"

// The schema of each operator, shared with the operator that only checks its arguments.
#define IKATTN_KEY_MOMENTS_SCHEMA "(Tensor key_features, Tensor logits, Tensor value)"
#define IKATTN_ADD_KEY_MOMENTS_SCHEMA                                               \
  "(Tensor(a!) moments, Tensor(b!) reference, Tensor key_features, Tensor logits, " \
  "Tensor value)"
#define IKATTN_KEY_MOMENTS_BACKWARD_SCHEMA                                   \
  "(Tensor grad_moments, Tensor key_features, Tensor logits, Tensor value, " \
  "Tensor reference, bool[3] wanted)"
#define IKATTN_FROM_MOMENTS_SCHEMA \
  "(Tensor query_features, Tensor moments, Tensor reference, float eps=1e-05)"
#define IKATTN_FROM_MOMENTS_BACKWARD_SCHEMA                                        \
  "(Tensor grad_output, Tensor query_features, Tensor moments, Tensor reference, " \
  "Tensor output, Tensor log_normalizer, float eps, bool[2] wanted)"
#define IKATTN_CAUSAL_SCHEMA                                                   \
  "(Tensor query_features, Tensor key_features, Tensor logits, Tensor value, " \
  "Tensor moments, Tensor reference, float eps=1e-05)"
#define IKATTN_CAUSAL_BACKWARD_SCHEMA                                                    \
  "(Tensor grad_output, Tensor? grad_all_moments, Tensor query_features, "               \
  "Tensor key_features, Tensor logits, Tensor value, Tensor moments, Tensor reference, " \
  "Tensor output, Tensor log_normalizer, float eps, bool[5] wanted)"
#define IKATTN_MERGE_MOMENTS_SCHEMA \
  "(Tensor moments, Tensor reference, Tensor other_moments, Tensor other_reference)"

namespace ikattn {

using TwoTensors = std::tuple<at::Tensor, at::Tensor>;
using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using FourTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using FiveTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

using KeyMomentsSignature = TwoTensors(const at::Tensor& key_features, const at::Tensor& logits,
                                       const at::Tensor& value);
using AddKeyMomentsSignature = void(at::Tensor& moments, at::Tensor& reference,
                                    const at::Tensor& key_features, const at::Tensor& logits,
                                    const at::Tensor& value);
using KeyMomentsBackwardSignature = ThreeTensors(const at::Tensor& grad_moments,
                                                 const at::Tensor& key_features,
                                                 const at::Tensor& logits, const at::Tensor& value,
                                                 const at::Tensor& reference,
                                                 std::array<bool, 3> wanted);
using FromMomentsSignature = TwoTensors(const at::Tensor& query_features, const at::Tensor& moments,
                                        const at::Tensor& reference, double eps);
using FromMomentsBackwardSignature =
    TwoTensors(const at::Tensor& grad_output, const at::Tensor& query_features,
               const at::Tensor& moments, const at::Tensor& reference, const at::Tensor& output,
               const at::Tensor& log_normalizer, double eps, std::array<bool, 2> wanted);

using CausalSignature = FourTensors(const at::Tensor& query_features,
                                    const at::Tensor& key_features, const at::Tensor& logits,
                                    const at::Tensor& value, const at::Tensor& moments,
                                    const at::Tensor& reference, double eps);
using CausalBackwardSignature =
    FiveTensors(const at::Tensor& grad_output, const std::optional<at::Tensor>& grad_all_moments,
                const at::Tensor& query_features, const at::Tensor& key_features,
                const at::Tensor& logits, const at::Tensor& value, const at::Tensor& moments,
                const at::Tensor& reference, const at::Tensor& output,
                const at::Tensor& log_normalizer, double eps, std::array<bool, 5> wanted);

// The operators as functions.
inline constexpr Operator<"key_moments", KeyMomentsSignature> call_key_moments;
inline constexpr Operator<"add_key_moments_", AddKeyMomentsSignature> call_add_key_moments;
inline constexpr Operator<"key_moments_backward", KeyMomentsBackwardSignature>
    call_key_moments_backward;
inline constexpr Operator<"attention_from_moments", FromMomentsSignature> call_from_moments;
inline constexpr Operator<"attention_from_moments_backward", FromMomentsBackwardSignature>
    call_from_moments_backward;
inline constexpr Operator<"causal_attention_from_moments", CausalSignature> call_causal;
inline constexpr Operator<"causal_attention_from_moments_backward", CausalBackwardSignature>
    call_causal_backward;

// Sizes of a checked call.
struct KeyMomentsSizes {
  int64_t B, K, G, S, F, d_v;
  int64_t entries() const { return F * (F + 1) / 2 + 1; }
};
struct FromMomentsSizes {
  int64_t B, H, K, L, F, d_v;
};
struct CausalSizes {
  FromMomentsSizes queries;
  KeyMomentsSizes keys;
};

// Check a call. Errors name the argument, what was expected and what was given. Where sizes are
// symbols of torch.compile, layouts and devices alone are checked, and sizes returned are 0.
KeyMomentsSizes check_key_moments(const at::Tensor& key_features, const at::Tensor& logits,
                                  const at::Tensor& value, const char* function = "key_moments");
KeyMomentsSizes check_add_key_moments(const at::Tensor& moments, const at::Tensor& reference,
                                      const at::Tensor& key_features, const at::Tensor& logits,
                                      const at::Tensor& value);
KeyMomentsSizes check_key_moments_backward(const at::Tensor& grad_moments,
                                           const at::Tensor& key_features, const at::Tensor& logits,
                                           const at::Tensor& value, const at::Tensor& reference);
FromMomentsSizes check_from_moments(const at::Tensor& query_features, const at::Tensor& moments,
                                    const at::Tensor& reference, double eps,
                                    const char* function = "attention_from_moments");
FromMomentsSizes check_from_moments_backward(
    const at::Tensor& grad_output, const at::Tensor& query_features, const at::Tensor& moments,
    const at::Tensor& reference, const at::Tensor& output, const at::Tensor& log_normalizer,
    double eps, const char* function = "attention_from_moments_backward");

CausalSizes check_causal(const at::Tensor& query_features, const at::Tensor& key_features,
                         const at::Tensor& logits, const at::Tensor& value,
                         const at::Tensor& moments, const at::Tensor& reference, double eps,
                         const char* function = "causal_attention_from_moments");
CausalSizes check_causal_backward(const at::Tensor& grad_output,
                                  const std::optional<at::Tensor>& grad_all_moments,
                                  const at::Tensor& query_features, const at::Tensor& key_features,
                                  const at::Tensor& logits, const at::Tensor& value,
                                  const at::Tensor& moments, const at::Tensor& reference,
                                  const at::Tensor& output, const at::Tensor& log_normalizer,
                                  double eps);

}  // namespace ikattn
