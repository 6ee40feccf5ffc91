// Argument checks of the edge attention operator.
#include "support/checks.h"

#include <ATen/ATen.h>

#include "attention/arguments.h"
#include "edge_attention/arguments.h"

namespace ikattn {
namespace {

constexpr const char* kName = "implicit_kernel_edge_attention";

void check_nodes(const char* name, const at::Tensor& tensor, const at::Tensor& query,
                 const char* shape) {
  TORCH_CHECK(tensor.dim() == 3, kName, ": ", name, " must have shape ", shape, ", got ",
              tensor.sizes());
  TORCH_CHECK_TYPE(tensor.scalar_type() == query.scalar_type(), kName, ": ", name,
                   " must have the dtype of query, ", query.scalar_type(), ", got ",
                   tensor.scalar_type());
  TORCH_CHECK(tensor.size(1) == query.size(1), kName, ": ", name, " must have shape ", shape,
              " with H = ", query.size(1), " (the heads of query), got ", tensor.sizes());
}

void check_bias(const char* name, const std::optional<at::Tensor>& bias, const at::Tensor& query,
                at::IntArrayRef sizes, const char* shape) {
  if (!is_present(bias)) return;
  check_side_type(kName, name, *bias, "query", query.scalar_type());
  const bool fits = bias->dim() == 1 ? bias->size(0) == sizes[0] || bias->size(0) == 1
                                     : bias->dim() == 2 && broadcasts_to(bias->sizes(), sizes);
  TORCH_CHECK(fits, kName, ": ", name, " must have shape ", shape, " = ", sizes, ", got ",
              bias->sizes());
}

void check_index_type(const char* name, const at::Tensor& index) {
  const at::ScalarType type = index.scalar_type();
  TORCH_CHECK_TYPE(type == at::kLong || type == at::kInt, kName, ": ", name,
                   " must be int64 or int32, got ", type);
  TORCH_CHECK(index.dim() == 1, kName, ": ", name, " must have one axis, got ", index.sizes());
}

// Whether the numbers in a tensor may be looked at, at no cost but a pass over them.
bool is_readable(const at::Tensor& tensor) {
  const c10::DispatchKeySet wrappers({c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                                      c10::DispatchKey::FuncTorchGradWrapper,
                                      c10::DispatchKey::Functionalize});
  return tensor.is_cpu() && !tensor.key_set().has_any(wrappers);
}

}  // namespace

void check_edges(const char* function, const at::Tensor& rowptr, const at::Tensor& col,
                 int64_t N_k) {
  const at::Tensor ends = rowptr.to(at::kLong).contiguous(), sources = col.to(at::kLong);
  const int64_t* end = ends.const_data_ptr<int64_t>();
  const int64_t rows = ends.size(0) - 1;
  TORCH_CHECK_VALUE(end[0] == 0, function, ": rowptr must begin with 0, got ", end[0]);
  for (int64_t i = 0; i < rows; ++i) {
    TORCH_CHECK_VALUE(end[i] <= end[i + 1], function, ": rowptr must ascend, got ", end[i],
                      " before ", end[i + 1], " at ", i);
  }
  TORCH_CHECK_VALUE(end[rows] == col.size(0), function, ": rowptr must end with E = ", col.size(0),
                    " (the edges of col), got ", end[rows]);
  if (col.size(0) == 0) return;
  const auto [least, most] = at::aminmax(sources);
  const int64_t low = least.item<int64_t>(), high = most.item<int64_t>();
  TORCH_CHECK_INDEX(low >= 0 && high < N_k, function, ": col must hold sources in [0, ", N_k,
                    ") (the nodes of key), got ", low < 0 ? low : high);
}

void check_edge_attention(const EdgeAttentionCall& call) {
  const at::Tensor &query = call.query, &key = call.key, &value = call.value;
  const EdgeAttentionOptions& options = call.options;
  check_placement(kName, "query", query,
                  {{"key", &key},
                   {"value", &value},
                   {"rowptr", &call.rowptr},
                   {"col", &call.col},
                   {"w1", &call.w1},
                   {"w2", address(call.w2)},
                   {"key_bias", address(options.key_bias)},
                   {"edge_bias", address(options.edge_bias)},
                   {"dropout_seed", address(options.dropout_seed)}});
  if (has_symbols({&query, &key, &value, &call.rowptr, &call.col, &call.w1, address(call.w2),
                   address(options.key_bias), address(options.edge_bias)})) {
    return;
  }
  TORCH_CHECK_TYPE(is_supported_float(query.scalar_type()), kName,
                   ": query must be float64, float32, bfloat16 or float16, got ",
                   query.scalar_type());
  TORCH_CHECK(query.dim() == 3, kName, ": query must have shape [N_q, H, d], got ", query.sizes());
  check_nodes("key", key, query, "[N_k, H, d]");
  check_nodes("value", value, query, "[N_k, H, d_v]");
  const int64_t H = query.size(1), d = query.size(2), N_k = key.size(0);
  TORCH_CHECK(key.size(2) == d, kName, ": key must have the head size of query, ", d, ", got ",
              key.sizes());
  TORCH_CHECK(value.size(0) == N_k, kName, ": value must have the nodes of key, ", N_k, ", got ",
              value.sizes());
  TORCH_CHECK(call.w1.dim() == 3, kName, ": w1 must have shape [H, d, M], got ", call.w1.sizes());
  check_frequencies(kName, "query", call.w1, call.w2, query.scalar_type(), 1, H, H, d);
  check_index_type("rowptr", call.rowptr);
  check_index_type("col", call.col);
  TORCH_CHECK(call.rowptr.size(0) == query.size(0) + 1, kName,
              ": rowptr must have shape [N_q + 1] = [", query.size(0) + 1, "], got ",
              call.rowptr.sizes());
  check_bias("key_bias", options.key_bias, query, {N_k, H}, "[N_k] or [N_k, H]");
  check_bias("edge_bias", options.edge_bias, query, {call.col.size(0), H}, "[E] or [E, H]");
  check_numbers(kName, options.p, options.eps, options.magnitude_scale);
  check_dropout(kName, options.dropout_p, options.dropout_seed);
  if (is_readable(call.rowptr) && is_readable(call.col)) {
    check_edges(kName, call.rowptr, call.col, N_k);
  }
}

void check_edge_features(const char* function, const EdgeFeatures& call) {
  const at::Tensor& query = call.query_features;
  check_placement(function, "query_features", query,
                  {{"key_features", &call.key_features},
                   {"value", &call.value},
                   {"key_logits", &call.key_logits},
                   {"edge_logits", &call.edge_logits},
                   {"keep", &call.keep},
                   {"rowptr", &call.rowptr},
                   {"col", &call.col}});
  if (has_symbols({&query, &call.key_features, &call.value, &call.key_logits, &call.edge_logits,
                   &call.keep, &call.rowptr, &call.col})) {
    return;
  }
  const at::ScalarType type = query.scalar_type();
  TORCH_CHECK_TYPE(type == at::kFloat || type == at::kDouble, function,
                   ": query_features must be float32 or float64, got ", type);
  TORCH_CHECK(query.dim() == 3 && query.size(2) > 0, function,
              ": query_features must have shape [N_q, H, F], got ", query.sizes());
  TORCH_CHECK(call.key_features.dim() == 3, function,
              ": key_features must have shape [N_k, H, F], got ", call.key_features.sizes());
  const int64_t N_q = query.size(0), H = query.size(1), F = query.size(2);
  const int64_t N_k = call.key_features.size(0), E = call.col.numel();
  TORCH_CHECK(call.value.dim() == 3, function, ": value must have shape [N_k, H, d_v], got ",
              call.value.sizes());
  const auto check = [&](const char* name, const at::Tensor& tensor, at::IntArrayRef sizes,
                         at::ScalarType wanted) {
    check_like(function, name, tensor, sizes, wanted, query.device());
  };
  check("key_features", call.key_features, {N_k, H, F}, type);
  check("value", call.value, {N_k, H, call.value.size(2)}, type);
  check("key_logits", call.key_logits, {N_k, H}, type);
  if (call.edge_logits.defined()) {
    const bool shared = call.edge_logits.dim() == 2 && call.edge_logits.size(1) == 1;
    check("edge_logits", call.edge_logits, {E, shared ? 1 : H}, type);
  }
  if (call.keep.defined()) check("keep", call.keep, {E, H}, at::kBool);
  check("rowptr", call.rowptr, {N_q + 1}, at::kLong);
  check("col", call.col, {E}, at::kLong);
}

void check_edge_features_backward(const char* function, const at::Tensor& grad_output,
                                  const at::Tensor& grad_weights, const EdgeFeatures& call,
                                  const at::Tensor& log_normalizer) {
  const at::Tensor& query = call.query_features;
  check_placement(function, "query_features", query,
                  {{"grad_output", &grad_output},
                   {"grad_weights", &grad_weights},
                   {"log_normalizer", &log_normalizer}});
  check_edge_features(function, call);
  if (has_symbols({&query, &call.value, &call.col, &grad_output, &grad_weights, &log_normalizer})) {
    return;
  }
  const int64_t N_q = query.size(0), H = query.size(1);
  const at::ScalarType type = query.scalar_type();
  const at::Device device = query.device();
  check_like(function, "grad_output", grad_output, {N_q, H, call.value.size(2)}, type, device);
  if (grad_weights.defined()) {
    check_like(function, "grad_weights", grad_weights, {call.col.size(0), H}, type, device);
  }
  check_like(function, "log_normalizer", log_normalizer, {N_q, H}, at::kDouble, device);
}

}  // namespace ikattn
