// Argument checks of packed attention.
#include "support/checks.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "attention/operator/arguments.h"
#include "packed_attention/arguments.h"
#include "support/autograd.h"
#include "support/philox.h"

namespace ikattn {
namespace {

void check_tokens(const char* function, const char* name, const at::Tensor& tensor,
                  const at::Tensor& query, const char* shape) {
  TORCH_CHECK(tensor.dim() == 3, function, ": ", name, " must have shape ", shape, ", got ",
              tensor.sizes());
  TORCH_CHECK_TYPE(tensor.scalar_type() == query.scalar_type(), function, ": ", name,
                   " must have the dtype of query, ", query.scalar_type(), ", got ",
                   tensor.scalar_type());
  TORCH_CHECK(tensor.size(-1) <= int64_t{1} << 32, function, ": ", name,
              " must have a head size of at most 2^32, got ", tensor.sizes());
}

void check_offsets(const char* function, const char* name, const at::Tensor& offsets,
                   const at::Tensor& query) {
  check_dense(function, name, offsets);
  const at::ScalarType type = offsets.scalar_type();
  TORCH_CHECK_TYPE(type == at::kInt || type == at::kLong, function, ": ", name,
                   " must be int32 or int64, got ", type);
  TORCH_CHECK(offsets.dim() == 1 && offsets.sym_numel() >= 1, function, ": ", name,
              " must have shape [N + 1], got ", offsets.sym_sizes());
  TORCH_CHECK(offsets.is_cpu() || offsets.device() == query.device(), function, ": ", name,
              " must be on the CPU or on the device of query, ", query.device(), ", got ",
              offsets.device());
}

std::vector<int64_t> on_host(const char* function, const char* name, const at::Tensor& offsets,
                             int64_t tokens, const char* of_tokens, const char* limit_name,
                             const std::optional<c10::SymInt>& limit) {
  TORCH_CHECK(!is_batched(offsets), function, ": ", name,
              " must be the same for all calls that torch.vmap makes one of");
  std::vector<int64_t> ends;
  if (is_transformed(offsets)) {  // torch.func wraps every argument; one number at a time it tells
    for (int64_t n = 0; n < offsets.size(0); ++n) ends.push_back(offsets[n].item<int64_t>());
  } else {
    const at::Tensor numbers = offsets.to(at::kCPU, at::kLong).contiguous();
    const int64_t* begin = numbers.const_data_ptr<int64_t>();
    ends.assign(begin, begin + numbers.numel());
  }
  TORCH_CHECK_VALUE(ends.front() == 0, function, ": ", name, " must begin with 0, got ",
                    ends.front());
  int64_t longest = 0;
  for (size_t n = 1; n < ends.size(); ++n) {
    TORCH_CHECK_VALUE(ends[n - 1] <= ends[n], function, ": ", name, " must ascend, got ",
                      ends[n - 1], " before ", ends[n], " at ", n);
    longest = std::max(longest, ends[n] - ends[n - 1]);
  }
  TORCH_CHECK_VALUE(ends.back() == tokens, function, ": ", name, " must end with ", tokens, ", ",
                    of_tokens, ", got ", ends.back());
  if (limit) {
    const int64_t most = limit->guard_int(__FILE__, __LINE__);
    TORCH_CHECK_VALUE(longest <= most, function, ": ", limit_name,
                      " must be at least the longest sequence's length, ", longest, ", got ", most);
  }
  return ends;
}

}  // namespace

void check_packed_attention(const char* function, const PackedCall& call) {
  const at::Tensor& query = call.query;
  const AttentionOptions& options = call.options;
  const bool are_numbers = check_placement(function, "query", query,
                                           {{"key", &call.key},
                                            {"value", &call.value},
                                            {"w1", &call.w1},
                                            {"w2", address(call.w2)},
                                            {"key_bias", address(options.key_bias)},
                                            {"dropout_seed", address(options.dropout_seed)}});
  check_offsets(function, "cu_seqlens_q", call.cu_seqlens_q, query);
  check_offsets(function, "cu_seqlens_k", call.cu_seqlens_k, query);
  if (!are_numbers || has_symbols({&call.cu_seqlens_q, &call.cu_seqlens_k})) return;
  TORCH_CHECK_TYPE(is_supported_float(query.scalar_type()), function,
                   ": query must be float64, float32, bfloat16 or float16, got ",
                   query.scalar_type());
  check_tokens(function, "query", query, query, "[T_q, H, d]");
  check_tokens(function, "key", call.key, query, "[T_k, G, d]");
  check_tokens(function, "value", call.value, query, "[T_k, G, d_v]");
  const int64_t H = query.size(1), d = query.size(2), T_k = call.key.size(0), G = call.key.size(1);
  TORCH_CHECK(H >= 1 && d >= 1, function,
              ": query must have at least one head and a head size of at least 1, got ",
              query.sizes());
  TORCH_CHECK(call.key.size(2) == d, function, ": key must have the head size of query, ", d,
              ", got ", call.key.sizes());
  TORCH_CHECK(G == H || (options.enable_gqa && G >= 1 && H % G == 0), function,
              ": key must have the heads of query, ", H,
              ", or with enable_gqa a divisor of them, got ", call.key.sizes());
  TORCH_CHECK(call.value.size(0) == T_k && call.value.size(1) == G, function,
              ": value must have the tokens and heads of key, ", T_k, " and ", G, ", got ",
              call.value.sizes());
  TORCH_CHECK(call.cu_seqlens_k.size(0) == call.cu_seqlens_q.size(0), function,
              ": cu_seqlens_k must have the shape of cu_seqlens_q, ", call.cu_seqlens_q.sizes(),
              ", got ", call.cu_seqlens_k.sizes());
  const int64_t N = call.cu_seqlens_q.size(0) - 1;
  check_frequencies(function, "query", call.w1, call.w2, query.scalar_type(), N, H, G, d);
  if (is_present(options.key_bias)) {
    const at::Tensor& bias = *options.key_bias;
    TORCH_CHECK_TYPE(bias.is_floating_point(), function, ": key_bias must be floating point, got ",
                     bias.scalar_type());
    check_side_type(function, "key_bias", bias, "query", query.scalar_type());
    TORCH_CHECK(broadcasts_to(bias.sizes(), {H, T_k}) || broadcasts_to(bias.sizes(), {G, T_k}),
                function, ": key_bias must broadcast to [H, T_k] = [", H, ", ", T_k,
                G == H ? "]" : "] (or the heads of key)", ", got ", bias.sizes());
  }
  check_numbers(function, options.p, options.eps, options.magnitude_scale);
  check_dropout(function, options.dropout_p, options.dropout_seed);
  TORCH_CHECK(options.dropout_p == 0 || options.dropout_seed->numel() == kDropoutNumbers, function,
              ": dropout_seed must be an int64 tensor of shape [2], got ",
              options.dropout_p == 0 ? at::IntArrayRef() : options.dropout_seed->sizes());
}

void check_packed_attention_backward(const at::Tensor& grad_output, const PackedResults& results,
                                     const PackedCall& call) {
  const char* function = kPackedAttentionBackward;
  check_packed_attention(function, call);
  const auto& [output, log_normalizer] = results;
  const bool are_numbers = check_placement(function, "query", call.query,
                                           {{"grad_output", &grad_output},
                                            {"output", &output},
                                            {"log_normalizer", &log_normalizer},
                                            {"value", &call.value}});
  if (!are_numbers) return;
  const int64_t T_q = call.query.size(0), H = call.query.size(1), d_v = call.value.size(2);
  const at::ScalarType type = call.query.scalar_type();
  check_like(function, "grad_output", grad_output, {T_q, H, d_v}, type, call.query.device());
  check_like(function, "output", output, {T_q, H, d_v}, type, call.query.device());
  check_like(function, "log_normalizer", log_normalizer, {H, T_q}, at::kDouble,
             call.query.device());
}

Boundaries boundaries_of(const char* function, const PackedCall& call) {
  Boundaries result;
  result.queries = on_host(function, "cu_seqlens_q", call.cu_seqlens_q, call.query.size(0),
                           "the tokens of query", "max_seqlen_q", call.max_seqlen_q);
  const bool is_same = call.cu_seqlens_k.is_same(call.cu_seqlens_q) &&
                       call.key.size(0) == call.query.size(0) &&
                       call.max_seqlen_k == call.max_seqlen_q;
  result.keys = is_same ? result.queries
                        : on_host(function, "cu_seqlens_k", call.cu_seqlens_k, call.key.size(0),
                                  "the tokens of key", "max_seqlen_k", call.max_seqlen_k);
  return result;
}

}  // namespace ikattn
