// CPU: checks, memory, threads and the choice of instruction set.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "edge_attention/cpu/kernel.h"
#include "edge_attention/operators.h"
#include "edge_attention/reference.h"
#include "support/cpu_glue.h"
#include "support/memory.h"

namespace ikattn {
namespace {

const EdgeAttentionKernels& kernels() { return IKATTN_KERNELS(edge_attention_kernels); }

template <typename T>
const T* read(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}

template <typename T>
T* write(const at::Tensor& tensor) {
  return tensor.mutable_data_ptr<T>();
}

EdgeFeatures contiguous(const EdgeFeatures& given) {
  EdgeFeatures call = given;
  for (at::Tensor* tensor :
       {&call.query_features, &call.key_features, &call.value, &call.key_logits, &call.edge_logits,
        &call.keep, &call.rowptr, &call.col}) {
    if (tensor->defined()) *tensor = tensor->contiguous();
  }
  return call;
}

template <typename T>
void describe(const EdgeFeatures& call, EdgeParams<T>& params) {
  params.N_q = call.query_features.size(0);
  params.N_k = call.key_features.size(0);
  params.E = call.col.size(0);
  params.H = call.query_features.size(1);
  params.F = call.query_features.size(2);
  params.d_v = call.value.size(2);
  params.rowptr = read<int64_t>(call.rowptr);
  params.source = read<int64_t>(call.col);
  params.query_features = read<T>(call.query_features);
  params.key_features = read<T>(call.key_features);
  params.value = read<T>(call.value);
  params.key_logits = read<T>(call.key_logits);
  params.edge_logits = read<T>(call.edge_logits);
  params.edge_heads = call.edge_logits.defined() ? call.edge_logits.size(1) : 0;
  params.keep = read<bool>(call.keep);
  params.rescale = static_cast<T>(call.rescale);
  params.eps = static_cast<T>(call.eps);
}

double work_of(const EdgeFeatures& call) {
  return static_cast<double>(call.col.size(0)) * static_cast<double>(call.query_features.size(1)) *
         static_cast<double>(call.query_features.size(2) + call.value.size(2));
}

EdgeResults forward(const EdgeFeatures& given) {
  check_edge_features(kFromEdgeFeatures, given);
  check_edges(kFromEdgeFeatures, given.rowptr, given.col, given.key_features.size(0));
  const EdgeFeatures call = contiguous(given);
  const int64_t N_q = call.query_features.size(0), H = call.query_features.size(1);
  const auto options = call.query_features.options();
  const at::Tensor output = at::empty({N_q, H, call.value.size(2)}, options);
  const at::Tensor weights = at::empty({call.col.size(0), H}, options);
  const at::Tensor log_normalizer = at::empty({N_q, H}, options.dtype(at::kDouble));
  const TorchExecutor executor(kFromEdgeFeatures, work_of(call));
  const auto run = [&]<typename T>(auto kernel) {
    EdgeForwardParams<T> params;
    describe(call, params);
    params.output = write<T>(output);
    params.weights = write<T>(weights);
    params.log_normalizer = write<double>(log_normalizer);
    kernel(params, executor);
  };
  if (compute_index(output) == 1) {
    run.template operator()<double>(kernels().forward_double);
  } else {
    run.template operator()<float>(kernels().forward_float);
  }
  return {output, weights, log_normalizer};
}

// Edges by source: those of source j are the numbers from colptr[j] up to colptr[j + 1], ascending.
struct BySource {
  at::Tensor colptr, edges;
};

BySource by_source(const at::Tensor& col, int64_t N_k) {
  const int64_t E = col.size(0);
  BySource result{at::zeros({N_k + 1}, col.options()), at::empty({E}, col.options())};
  const int64_t* source = read<int64_t>(col);
  int64_t* ends = write<int64_t>(result.colptr);
  int64_t* edges = write<int64_t>(result.edges);
  // ends[j + 1] goes from the number of edges of j to where they begin, and so to where they end.
  for (int64_t e = 0; e < E; ++e) ++ends[source[e] + 1];
  int64_t begin = 0;
  for (int64_t j = 0; j < N_k; ++j) begin += std::exchange(ends[j + 1], begin);
  for (int64_t e = 0; e < E; ++e) edges[ends[source[e] + 1]++] = e;
  return result;
}

EdgeGradients backward(const at::Tensor& grad_output, const std::optional<at::Tensor>& grad_weights,
                       IKATTN_EDGE_FEATURES_PARAMETERS, const at::Tensor& log_normalizer) {
  const EdgeFeatures given{IKATTN_EDGE_FEATURES_VALUES};
  check_edge_features_backward(kFromEdgeFeaturesBackward, grad_output, or_undefined(grad_weights),
                               given, log_normalizer);
  check_edges(kFromEdgeFeaturesBackward, rowptr, col, key_features.size(0));
  const EdgeFeatures call = contiguous(given);
  const int64_t H = call.query_features.size(1), N_k = call.key_features.size(0);
  const int64_t E = call.col.size(0);
  const BySource sources = by_source(call.col, N_k);
  const at::Tensor target = targets_of(call.rowptr, call.col);
  const at::Tensor of_output = grad_output.contiguous(), normalizer = log_normalizer.contiguous();
  const at::Tensor of_weights =
      is_present(grad_weights) ? grad_weights->contiguous() : at::Tensor();
  const auto options = call.query_features.options();
  const at::Tensor grad_query = at::empty_like(call.query_features);
  const at::Tensor grad_key = at::empty_like(call.key_features);
  const at::Tensor grad_value = at::empty_like(call.value);
  const at::Tensor grad_key_logits = at::empty_like(call.key_logits);
  const at::Tensor grad_logits = at::empty({E, H}, options);
  const at::Tensor weights = at::empty({E, H}, options), similarity = at::empty({E, H}, options);
  const TorchExecutor executor(kFromEdgeFeaturesBackward, 3 * work_of(call));
  const auto run = [&]<typename T>(auto kernel) {
    EdgeBackwardParams<T> params;
    describe(call, params);
    params.colptr = read<int64_t>(sources.colptr);
    params.by_source = read<int64_t>(sources.edges);
    params.target = read<int64_t>(target);
    params.log_normalizer = read<double>(normalizer);
    params.grad_output = read<T>(of_output);
    params.grad_weights = read<T>(of_weights);
    params.grad_query_features = write<T>(grad_query);
    params.grad_key_features = write<T>(grad_key);
    params.grad_value = write<T>(grad_value);
    params.grad_key_logits = write<T>(grad_key_logits);
    params.grad_logits = write<T>(grad_logits);
    params.weights = write<T>(weights);
    params.grad_similarity = write<T>(similarity);
    kernel(params, executor);
  };
  if (compute_index(weights) == 1) {
    run.template operator()<double>(kernels().backward_double);
  } else {
    run.template operator()<float>(kernels().backward_float);
  }
  return {grad_query, grad_key, grad_value, grad_key_logits, grad_logits};
}

TORCH_LIBRARY_IMPL(ikattn, CPU, m) {
  implement<"edge_attention_from_features", from_edge_features<forward>>(m);
  implement<"edge_attention_from_features_backward", backward>(m);
}

}  // namespace
}  // namespace ikattn
