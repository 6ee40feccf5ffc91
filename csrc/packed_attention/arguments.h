// The arguments of the operators of packed attention inside the library, and their checks.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "ikattn/packed_attention.h"
#include "support/dispatch.h"

#define IKATTN_PACKED_OPTION_SCHEMA                                                         \
  "*, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, float? p=2.0, Tensor? "         \
  "key_bias=None, float dropout_p=0.0, bool is_causal=False, bool enable_gqa=False, float " \
  "eps=1e-05, float? magnitude_scale=None, Tensor? dropout_seed=None"
#define IKATTN_PACKED_SCHEMA                                                              \
  "(Tensor query, Tensor key, Tensor value, Tensor w1, Tensor? w2, Tensor cu_seqlens_q, " \
  "Tensor cu_seqlens_k, " IKATTN_PACKED_OPTION_SCHEMA ")"
#define IKATTN_PACKED_BACKWARD_SCHEMA                                                     \
  "(Tensor grad_output, Tensor output, Tensor log_normalizer, Tensor query, Tensor key, " \
  "Tensor value, Tensor w1, Tensor? w2, Tensor cu_seqlens_q, Tensor "                     \
  "cu_seqlens_k, " IKATTN_PACKED_OPTION_SCHEMA ", bool[6] wanted)"
#define IKATTN_PACKED_PARAMETERS                                                                   \
  const at::Tensor &query, const at::Tensor &key, const at::Tensor &value, const at::Tensor &w1,   \
      const std::optional<at::Tensor>&w2, const at::Tensor &cu_seqlens_q,                          \
      const at::Tensor &cu_seqlens_k, std::optional<c10::SymInt> max_seqlen_q,                     \
      std::optional<c10::SymInt> max_seqlen_k, std::optional<double> p,                            \
      const std::optional<at::Tensor>&key_bias, double dropout_p, bool is_causal, bool enable_gqa, \
      double eps, std::optional<double> magnitude_scale,                                           \
      const std::optional<at::Tensor>&dropout_seed
#define IKATTN_PACKED_CALL                                                               \
  {                                                                                      \
    query, key, value, w1, w2, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, { \
      p, key_bias, std::nullopt, dropout_p, is_causal, enable_gqa, eps, magnitude_scale, \
          dropout_seed                                                                   \
    }                                                                                    \
  }

namespace ikattn {

constexpr const char* kPackedAttention = "implicit_kernel_attention_varlen";
constexpr const char* kPackedAttentionBackward = "implicit_kernel_attention_varlen_backward";

// Gradients: query, key, value, w1, w2, key_bias.
constexpr int kPackedGradients = 6;
using PackedWanted = std::array<bool, kPackedGradients>;
using PackedGradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

struct PackedCall {
  at::Tensor query;                       // [T_q, H, d]
  at::Tensor key;                         // [T_k, G, d]
  at::Tensor value;                       // [T_k, G, d_v]
  at::Tensor w1;                          // [H or G, d, M], or [N, H or G, d, M]
  std::optional<at::Tensor> w2;           // likewise
  at::Tensor cu_seqlens_q, cu_seqlens_k;  // [N + 1]
  std::optional<c10::SymInt> max_seqlen_q, max_seqlen_k;
  AttentionOptions options;  // without attn_mask
};

// Output [T_q, H, d_v], and log_normalizer, float64 [H, T_q].
using PackedResults = std::tuple<at::Tensor, at::Tensor>;

using PackedSignature = PackedResults(IKATTN_PACKED_PARAMETERS);
using PackedBackwardSignature = PackedGradients(const at::Tensor& grad_output,
                                                const at::Tensor& output,
                                                const at::Tensor& log_normalizer,
                                                IKATTN_PACKED_PARAMETERS, PackedWanted wanted);

inline auto spelled_out(const PackedCall& call) {
  const AttentionOptions& options = call.options;
  return std::tie(call.query, call.key, call.value, call.w1, call.w2, call.cu_seqlens_q,
                  call.cu_seqlens_k, call.max_seqlen_q, call.max_seqlen_k, options.p,
                  options.key_bias, options.dropout_p, options.is_causal, options.enable_gqa,
                  options.eps, options.magnitude_scale, options.dropout_seed);
}

// The operators as functions, which take a PackedCall in the place of its fields.
inline constexpr Operator<"implicit_kernel_attention_varlen", PackedSignature>
    call_packed_attention;
inline constexpr Operator<"implicit_kernel_attention_varlen_backward", PackedBackwardSignature>
    call_packed_attention_backward;

// Check a call. Errors name the argument, what was expected and what was given. Where sizes are
// symbols of torch.compile only layouts and devices are checked.
void check_packed_attention(const char* function, const PackedCall& call);
void check_packed_attention_backward(const at::Tensor& grad_output, const PackedResults& results,
                                     const PackedCall& call);

// The begins of the sequences of a checked call, [N + 1] each, on the host.
struct Boundaries {
  std::vector<int64_t> queries, keys;

  int64_t count() const { return static_cast<int64_t>(queries.size()) - 1; }
  int64_t length(int64_t sequence) const { return queries[sequence + 1] - queries[sequence]; }
  int64_t key_count(int64_t sequence) const { return keys[sequence + 1] - keys[sequence]; }
};

// Returns the boundaries of a call. Throws where they do not ascend from 0 to the number of tokens,
// or a sequence is too long.
Boundaries boundaries_of(const char* function, const PackedCall& call);

}  // namespace ikattn
