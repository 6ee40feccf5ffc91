// CPU: checks, memory, threads and the choice of instruction set.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "edge_attention/cpu/kernel.h"
#include "edge_attention/operators.h"
#include "edge_attention/tensors.h"
#include "support/cpu_glue.h"
#include "support/memory.h"

namespace ikattn {
namespace {

const EdgeAttentionKernels& kernels() { return IKATTN_KERNELS(edge_attention_kernels); }

// function(params, kernels) with the kernels of the tensor's type and the instruction set in use.
template <template <typename> class Params, typename Function>
void with_kernels(const at::Tensor& like, const Function& function) {
  if (compute_index(like) == 1) {
    function(Params<double>(), kernels().of_double);
  } else {
    function(Params<float>(), kernels().of_float);
  }
}

// Multiply-adds of one pass over the edges.
double work_of(const at::Tensor& col, const at::Tensor& features, const at::Tensor& values) {
  return static_cast<double>(col.size(0)) * static_cast<double>(features.size(1)) *
         static_cast<double>(features.size(2) + values.size(2));
}

EdgeResults forward(const EdgeFeatures& given) {
  check_edge_features(kFromEdgeFeatures, given);
  check_edges(kFromEdgeFeatures, given.rowptr, given.col, given.key_features.size(0));
  const EdgeFeatures call = contiguous(given);
  const EdgeResults results = empty_results(call);
  const auto& [output, weights, log_normalizer] = results;
  const TorchExecutor executor(kFromEdgeFeatures,
                               work_of(call.col, call.query_features, call.value));
  with_kernels<EdgeForwardParams>(output, [&, &output = output, &weights = weights,
                                           &log_normalizer = log_normalizer]<typename T>(
                                              EdgeForwardParams<T> params, const auto& kernels) {
    describe(call, params);
    params.output = write<T>(output);
    params.weights = write<T>(weights);
    params.log_normalizer = write<double>(log_normalizer);
    kernels.forward(params, executor);
  });
  return results;
}

EdgeQueryGradients query_gradients(IKATTN_EDGE_QUERY_GRADIENTS_PARAMETERS) {
  const EdgeFeatures given{IKATTN_EDGE_FEATURES_VALUES};
  check_edge_query_gradients(given, {output, {}, log_normalizer}, grad_output,
                             or_undefined(grad_weights));
  check_edges(kEdgeQueryGradients, rowptr, col, key_features.size(0));
  const EdgeFeatures call = contiguous(given);
  const at::Tensor of_output = grad_output.contiguous(), normalizer = log_normalizer.contiguous();
  const at::Tensor of_weights = contiguous(or_undefined(grad_weights));
  const at::Tensor outputs = output.contiguous();
  const at::Tensor grad_query = in_large_pages(at::empty_like(call.query_features));
  const at::Tensor of_edges = in_large_pages(
      at::empty({call.col.size(0), 3, call.query_features.size(1)}, grad_query.options()));
  const TorchExecutor executor(kEdgeQueryGradients,
                               2 * work_of(call.col, call.query_features, call.value));
  with_kernels<EdgeQueryGradientParams>(
      of_edges, [&]<typename T>(EdgeQueryGradientParams<T> params, const auto& kernels) {
        describe(call, params);
        params.output = read<T>(outputs);
        params.log_normalizer = read<double>(normalizer);
        params.grad_output = read<T>(of_output);
        params.grad_weights = read<T>(of_weights);
        params.grad_query_features = write<T>(grad_query);
        params.of_edges = write<T>(of_edges);
        kernels.query_gradients(params, executor);
      });
  return {grad_query, of_edges};
}

// Edges by source: those of source j are the numbers edges[k], and lead to targets[k], for k from
// colptr[j] up to colptr[j + 1], ascending.
struct BySource {
  at::Tensor colptr, edges, targets;
};

BySource by_source(const at::Tensor& rowptr, const at::Tensor& col, int64_t N_k) {
  const int64_t E = col.size(0), N_q = rowptr.size(0) - 1;
  const auto options = col.options();
  BySource result{at::zeros({N_k + 1}, options), at::empty({E}, options), at::empty({E}, options)};
  const int64_t *end = read<int64_t>(rowptr), *source = read<int64_t>(col);
  int64_t* ends = write<int64_t>(result.colptr);
  int64_t *edges = write<int64_t>(result.edges), *targets = write<int64_t>(result.targets);
  // ends[j + 1] goes from the number of edges of j to where they begin, and so to where they end.
  for (int64_t e = 0; e < E; ++e) ++ends[source[e] + 1];
  int64_t begin = 0;
  for (int64_t j = 0; j < N_k; ++j) begin += std::exchange(ends[j + 1], begin);
  for (int64_t i = 0; i < N_q; ++i) {
    for (int64_t e = end[i]; e < end[i + 1]; ++e) {
      const int64_t place = ends[source[e] + 1]++;
      edges[place] = e;
      targets[place] = i;
    }
  }
  return result;
}

EdgeKeyGradients key_gradients(IKATTN_EDGE_KEY_GRADIENTS_PARAMETERS) {
  check_edge_key_gradients({IKATTN_EDGE_KEY_GRADIENTS_VALUES});
  const int64_t N_k = sources.expect_int(), H = query_features.size(1);
  check_edges(kEdgeKeyGradients, rowptr, col, N_k);
  const at::Tensor features = query_features.contiguous(), given = of_edges.contiguous();
  const at::Tensor of_output = grad_output.contiguous(), source = col.contiguous();
  const BySource edges = by_source(rowptr.contiguous(), source, N_k);
  const auto options = features.options();
  const at::Tensor grad_key = in_large_pages(at::empty({N_k, H, features.size(2)}, options));
  const at::Tensor grad_value = in_large_pages(at::empty({N_k, H, of_output.size(2)}, options));
  const at::Tensor grad_key_logits = at::empty({N_k, H}, options);
  const TorchExecutor executor(kEdgeKeyGradients, work_of(col, features, of_output));
  with_kernels<EdgeKeyGradientParams>(
      features, [&]<typename T>(EdgeKeyGradientParams<T> params, const auto& kernels) {
        params = {features.size(0),
                  N_k,
                  col.size(0),
                  H,
                  features.size(2),
                  of_output.size(2),
                  read<int64_t>(edges.colptr),
                  read<int64_t>(edges.edges),
                  read<int64_t>(edges.targets),
                  read<T>(features),
                  read<T>(of_output),
                  read<T>(given),
                  write<T>(grad_key),
                  write<T>(grad_value),
                  write<T>(grad_key_logits)};
        kernels.key_gradients(params, executor);
      });
  return {grad_key, grad_value, grad_key_logits};
}

TORCH_LIBRARY_IMPL(ikattn, CPU, m) {
  implement<"edge_attention_from_features", from_edge_features<forward>>(m);
  implement<"edge_query_gradients", query_gradients>(m);
  implement<"edge_key_gradients", key_gradients>(m);
}

}  // namespace
}  // namespace ikattn
