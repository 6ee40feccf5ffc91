// Argument checks of the edge attention operator.
#include "support/checks.h"

#include <ATen/ATen.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <cmath>

#include "attention/operator/arguments.h"
#include "edge_attention/operators.h"

namespace ikattn {
namespace {

void check_nodes(const char* function, const char* name, const at::Tensor& tensor,
                 const char* first_name, const at::Tensor& first, const char* shape) {
  TORCH_CHECK(tensor.dim() == 3, function, ": ", name, " must have shape ", shape, ", got ",
              tensor.sizes());
  TORCH_CHECK_TYPE(tensor.scalar_type() == first.scalar_type(), function, ": ", name,
                   " must have the dtype of ", first_name, ", ", first.scalar_type(), ", got ",
                   tensor.scalar_type());
  TORCH_CHECK(tensor.size(1) == first.size(1), function, ": ", name, " must have shape ", shape,
              " with H = ", first.size(1), " (the heads of ", first_name, "), got ",
              tensor.sizes());
}

void check_bias(const char* function, const char* name, const std::optional<at::Tensor>& bias,
                const char* first_name, const at::Tensor& first, at::IntArrayRef sizes,
                const char* shape) {
  if (!is_present(bias)) return;
  check_side_type(function, name, *bias, first_name, first.scalar_type());
  const bool fits = bias->dim() == 1 ? bias->size(0) == sizes[0] || bias->size(0) == 1
                                     : bias->dim() == 2 && broadcasts_to(bias->sizes(), sizes);
  TORCH_CHECK(fits, function, ": ", name, " must have shape ", shape, " = ", sizes, ", got ",
              bias->sizes());
}

void check_index_type(const char* function, const char* name, const at::Tensor& index) {
  const at::ScalarType type = index.scalar_type();
  TORCH_CHECK_TYPE(type == at::kLong || type == at::kInt, function, ": ", name,
                   " must be int64 or int32, got ", type);
  TORCH_CHECK(index.dim() == 1, function, ": ", name, " must have one axis, got ", index.sizes());
}

// Checks eps. A score may be eps, and exp(logit - largest) as small: their product must not
// underflow.
void check_eps(const char* function, double eps, at::ScalarType type) {
  const double least = type == at::kDouble ? 1e-290 : 1e-30;
  TORCH_CHECK_VALUE(eps >= least, function, ": eps must be at least ", least,
                    type == at::kDouble ? " in float64" : " in float32 arithmetic", ", got ", eps);
}

// The targets and sources of a call by their names in the operator, and the arguments of all forms.
struct Ends {
  const char *function, *target_name, *source_name;
  const at::Tensor &target, &source, &value, &rowptr, &col;
  const std::optional<at::Tensor>&w1, &w2;
  const EdgeAttentionOptions& options;
};

bool are_placed(const Ends& ends, const at::Tensor* vector) {
  const EdgeAttentionOptions& options = ends.options;
  return check_placement(ends.function, ends.target_name, ends.target,
                         {{ends.source_name, &ends.source},
                          {"value", &ends.value},
                          {"rowptr", &ends.rowptr},
                          {"col", &ends.col},
                          {"vector", vector},
                          {"w1", address(ends.w1)},
                          {"w2", address(ends.w2)},
                          {"key_bias", address(options.key_bias)},
                          {"edge_bias", address(options.edge_bias)},
                          {"dropout_seed", address(options.dropout_seed)}});
}

// Checks frequencies of vectors of `size`.
void check_ends(const Ends& ends, int64_t size, const char* shape_of_frequencies) {
  const char *function = ends.function, *name = ends.target_name;
  const at::Tensor &target = ends.target, &source = ends.source, &value = ends.value;
  const EdgeAttentionOptions& options = ends.options;
  const at::ScalarType type = target.scalar_type();
  TORCH_CHECK_TYPE(is_supported_float(type), function, ": ", name,
                   " must be float64, float32, bfloat16 or float16, got ", type);
  TORCH_CHECK(target.dim() == 3, function, ": ", name, " must have shape [N_q, H, d], got ",
              target.sizes());
  check_nodes(function, ends.source_name, source, name, target, "[N_k, H, d]");
  check_nodes(function, "value", value, name, target, "[N_k, H, d_v]");
  const int64_t H = target.size(1), d = target.size(2), N_k = source.size(0);
  TORCH_CHECK(source.size(2) == d, function, ": ", ends.source_name, " must have the head size of ",
              name, ", ", d, ", got ", source.sizes());
  TORCH_CHECK(value.size(0) == N_k, function, ": value must have the nodes of ", ends.source_name,
              ", ", N_k, ", got ", value.sizes());
  if (is_present(ends.w1)) {
    TORCH_CHECK(ends.w1->dim() == 3, function, ": w1 must have shape ", shape_of_frequencies,
                ", got ", ends.w1->sizes());
    check_frequencies(function, name, *ends.w1, ends.w2, type, 1, H, H, size);
  } else {
    TORCH_CHECK(!is_present(ends.w2), function, ": w2 must be None where w1 is");
  }
  check_index_type(function, "rowptr", ends.rowptr);
  check_index_type(function, "col", ends.col);
  TORCH_CHECK(ends.rowptr.size(0) == target.size(0) + 1, function,
              ": rowptr must have shape [N_q + 1] = [", target.size(0) + 1, "], got ",
              ends.rowptr.sizes());
  check_bias(function, "key_bias", options.key_bias, name, target, {N_k, H}, "[N_k] or [N_k, H]");
  check_bias(function, "edge_bias", options.edge_bias, name, target, {ends.col.size(0), H},
             "[E] or [E, H]");
  check_numbers(function, options.p, options.eps, options.magnitude_scale);
  check_negative_slope(function, is_present(ends.w1), options);
  if (is_present(ends.w1)) check_eps(function, options.eps, type);
  check_dropout(function, options.dropout_p, options.dropout_seed);
  if (options.dropout_p > 0) {
    TORCH_CHECK(options.dropout_seed->sym_numel() == 2, function,
                ": dropout_seed must be an int64 tensor of shape [2], got ",
                options.dropout_seed->sym_sizes());
  }
  if (is_readable(ends.rowptr) && is_readable(ends.col)) {
    check_edges(function, ends.rowptr, ends.col, N_k);
  }
}

}  // namespace

void check_negative_slope(const char* function, bool has_frequencies,
                          const EdgeAttentionOptions& options) {
  const double slope = options.negative_slope;
  if (slope == 1) return;
  TORCH_CHECK_VALUE(std::isfinite(slope), function, ": negative_slope must be finite, got ", slope);
  TORCH_CHECK_VALUE(
      !has_frequencies && options.p == 2.0 && !options.magnitude_scale, function,
      ": negative_slope must be 1 (no LeakyReLU) unless logits are products alone: no "
      "frequencies, p = 2, no magnitude_scale; got ",
      slope);
}

bool is_readable(const at::Tensor& tensor) {
  const c10::DispatchKeySet wrappers({c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                                      c10::DispatchKey::FuncTorchGradWrapper,
                                      c10::DispatchKey::Functionalize});
  return tensor.is_cpu() && !tensor.key_set().has_any(wrappers) &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set();
}

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

void check_edge_attention(const char* function, const EdgeAttentionCall& call) {
  const Ends ends{function,    "query",  "key",   call.query, call.key,    call.value,
                  call.rowptr, call.col, call.w1, call.w2,    call.options};
  if (!are_placed(ends, nullptr)) return;
  check_ends(ends, call.query.dim() == 3 ? call.query.size(2) : 0, "[H, d, M]");
}

void check_gat_attention(const char* function, const GatAttentionCall& call) {
  const Ends ends{function,    "target", "source", call.target, call.source, call.value,
                  call.rowptr, call.col, call.w1,  call.w2,     call.options};
  if (!are_placed(ends, &call.vector)) return;
  const at::Tensor& target = call.target;
  check_ends(ends, target.dim() == 3 ? 2 * target.size(2) : 0, "[H, 2d, M]");
  check_side_type(function, "vector", call.vector, "target", target.scalar_type());
  const int64_t H = target.size(1), size = 2 * target.size(2);
  TORCH_CHECK(call.vector.dim() == 2 && call.vector.size(0) == H && call.vector.size(1) == size,
              function, ": vector must have shape [H, 2d] = [", H, ", ", size, "], got ",
              call.vector.sizes());
}

void check_edge_features(const char* function, const EdgeFeatures& call) {
  const at::Tensor& query = call.query_features;
  const bool are_numbers = check_placement(function, "query_features", query,
                                           {{"key_features", &call.key_features},
                                            {"value", &call.value},
                                            {"key_logits", &call.key_logits},
                                            {"edge_logits", &call.edge_logits},
                                            {"keep", &call.keep},
                                            {"rowptr", &call.rowptr},
                                            {"col", &call.col}});
  if (!are_numbers) return;
  const at::ScalarType type = query.scalar_type();
  TORCH_CHECK_TYPE(type == at::kFloat || type == at::kDouble, function,
                   ": query_features must be float32 or float64, got ", type);
  if (call.eps) check_eps(function, *call.eps, type);
  TORCH_CHECK_VALUE(std::isfinite(call.negative_slope) && (!call.eps || call.negative_slope == 1),
                    function, ": negative_slope must be ", call.eps ? "1 with eps" : "finite",
                    ", got ", call.negative_slope);
  TORCH_CHECK(query.dim() == 3 && (query.size(2) > 0 || !call.eps), function,
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

void check_edge_query_gradients(const EdgeFeatures& call, const EdgeResults& results,
                                const at::Tensor& grad_output, const at::Tensor& grad_weights) {
  const char* function = kEdgeQueryGradients;
  const auto& [output, weights, log_normalizer] = results;
  const at::Tensor& query = call.query_features;
  const bool are_numbers = check_placement(function, "query_features", query,
                                           {{"output", &output},
                                            {"log_normalizer", &log_normalizer},
                                            {"grad_output", &grad_output},
                                            {"grad_weights", &grad_weights}});
  check_edge_features(function, call);
  if (!are_numbers || has_symbols({&call.value, &call.col})) return;
  const at::ScalarType type = query.scalar_type();
  const auto check = [&](const char* name, const at::Tensor& tensor, at::IntArrayRef sizes,
                         at::ScalarType wanted) {
    check_like(function, name, tensor, sizes, wanted, query.device());
  };
  const int64_t N_q = query.size(0), H = query.size(1), d_v = call.value.size(2);
  check("output", output, {N_q, H, d_v}, type);
  check("log_normalizer", log_normalizer, {N_q, H}, at::kDouble);
  check("grad_output", grad_output, {N_q, H, d_v}, type);
  if (grad_weights.defined()) check("grad_weights", grad_weights, {call.col.size(0), H}, type);
}

void check_edge_key_gradients(const EdgeKeyGradientCall& call) {
  const char* function = kEdgeKeyGradients;
  const at::Tensor& query = call.query_features;
  const bool are_numbers = check_placement(function, "query_features", query,
                                           {{"of_edges", &call.of_edges},
                                            {"grad_output", &call.grad_output},
                                            {"rowptr", &call.rowptr},
                                            {"col", &call.col}});
  if (!are_numbers || call.N_k.is_symbolic()) return;
  const at::ScalarType type = query.scalar_type();
  TORCH_CHECK_TYPE(type == at::kFloat || type == at::kDouble, function,
                   ": query_features must be float32 or float64, got ", type);
  TORCH_CHECK(query.dim() == 3, function, ": query_features must have shape [N_q, H, F], got ",
              query.sizes());
  TORCH_CHECK(call.grad_output.dim() == 3, function,
              ": grad_output must have shape [N_q, H, d_v], got ", call.grad_output.sizes());
  TORCH_CHECK_VALUE(call.N_k >= 0, function, ": sources must be a number of nodes, got ", call.N_k);
  const int64_t N_q = query.size(0), H = query.size(1), E = call.col.numel();
  const auto check = [&](const char* name, const at::Tensor& tensor, at::IntArrayRef sizes,
                         at::ScalarType wanted) {
    check_like(function, name, tensor, sizes, wanted, query.device());
  };
  check("of_edges", call.of_edges, {E, 3, H}, type);
  check("grad_output", call.grad_output, {N_q, H, call.grad_output.size(2)}, type);
  check("rowptr", call.rowptr, {N_q + 1}, at::kLong);
  check("col", call.col, {E}, at::kLong);
}

}  // namespace ikattn
