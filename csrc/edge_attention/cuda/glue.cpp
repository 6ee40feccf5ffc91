// CUDA: checks, memory, the stream. Built where torch has CUDA.
#include "support/cuda/glue.h"

#include <torch/library.h>

#include "edge_attention/cuda/kernels.h"
#include "edge_attention/operators.h"
#include "edge_attention/reference.h"
#include "edge_attention/tensors.h"

namespace ikattn {
namespace {

template <typename T>
const auto& kernels_of() {
  if constexpr (sizeof(T) == 8) {
    return cuda::edge_kernels_of_double;
  } else {
    return cuda::edge_kernels_of_float;
  }
}

// Working memory for partial sums of rows that are cut.
template <typename T>
struct Scratch {
  double* numbers;
  T* values;

  Scratch(cuda::Call& call, int64_t E, int64_t H, int64_t width) {
    const cuda::EdgeScratch sizes = cuda::edge_scratch(E, H, width);
    numbers = static_cast<double*>(call.allocate(sizes.numbers * int64_t{sizeof(double)}));
    values = static_cast<T*>(call.allocate(sizes.values * static_cast<int64_t>(sizeof(T))));
  }
};

EdgeResults forward(const EdgeFeatures& given) {
  check_edge_features(kFromEdgeFeatures, given);
  const EdgeFeatures edges = contiguous(given);
  const EdgeResults results = empty_results(edges);
  const at::Tensor& output = std::get<0>(results);
  const auto run = [&]<typename T>(EdgeForwardParams<T> params) {
    describe(edges, params);
    params.output = write<T>(output);
    params.weights = write<T>(std::get<1>(results));
    params.log_normalizer = write<double>(std::get<2>(results));
    cuda::Call call(kFromEdgeFeatures, output);
    const Scratch<T> scratch(call, params.E, params.H, params.d_v);
    call.check(kernels_of<T>().forward(params, scratch.numbers, scratch.values, call.stream()));
  };
  if (compute_index(output) == 1) {
    run(EdgeForwardParams<double>());
  } else {
    run(EdgeForwardParams<float>());
  }
  return results;
}

EdgeQueryGradients query_gradients(IKATTN_EDGE_QUERY_GRADIENTS_PARAMETERS) {
  const EdgeFeatures given{IKATTN_EDGE_FEATURES_VALUES};
  check_edge_query_gradients(given, {output, {}, log_normalizer}, grad_output,
                             or_undefined(grad_weights));
  const EdgeFeatures edges = contiguous(given);
  const at::Tensor of_output = grad_output.contiguous(), normalizer = log_normalizer.contiguous();
  const at::Tensor of_weights = contiguous(or_undefined(grad_weights));
  const at::Tensor outputs = output.contiguous();
  const at::Tensor grad_query = at::empty_like(edges.query_features);
  const at::Tensor of_edges =
      at::empty({edges.col.size(0), 3, edges.query_features.size(1)}, grad_query.options());
  const auto run = [&]<typename T>(EdgeQueryGradientParams<T> params) {
    describe(edges, params);
    params.output = read<T>(outputs);
    params.log_normalizer = read<double>(normalizer);
    params.grad_output = read<T>(of_output);
    params.grad_weights = read<T>(of_weights);
    params.grad_query_features = write<T>(grad_query);
    params.of_edges = write<T>(of_edges);
    cuda::Call call(kEdgeQueryGradients, of_edges);
    auto* mean = static_cast<double*>(
        call.allocate(params.N_q * params.H * static_cast<int64_t>(sizeof(double))));
    const Scratch<T> scratch(call, params.E, params.H, params.F);
    call.check(kernels_of<T>().query_gradients(params, mean, scratch.numbers, scratch.values,
                                               call.stream()));
  };
  if (compute_index(of_edges) == 1) {
    run(EdgeQueryGradientParams<double>());
  } else {
    run(EdgeQueryGradientParams<float>());
  }
  return {grad_query, of_edges};
}

EdgeKeyGradients key_gradients(IKATTN_EDGE_KEY_GRADIENTS_PARAMETERS) {
  check_edge_key_gradients({IKATTN_EDGE_KEY_GRADIENTS_VALUES});
  const int64_t N_k = sources.expect_int(), H = query_features.size(1);
  const at::Tensor features = query_features.contiguous(), given = of_edges.contiguous();
  const at::Tensor of_output = grad_output.contiguous();
  const auto [sorted, by_source] = at::sort(col, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const at::Tensor nodes = at::arange(N_k + 1, col.options());
  const at::Tensor colptr = at::searchsorted(sorted, nodes);
  const at::Tensor target = targets_of(rowptr, col).index_select(0, by_source);
  const auto options = features.options();
  const at::Tensor grad_key = at::empty({N_k, H, features.size(2)}, options);
  const at::Tensor grad_value = at::empty({N_k, H, of_output.size(2)}, options);
  const at::Tensor grad_key_logits = at::empty({N_k, H}, options);
  const auto run = [&]<typename T>(EdgeKeyGradientParams<T> params) {
    params = {features.size(0),
              N_k,
              col.size(0),
              H,
              features.size(2),
              of_output.size(2),
              read<int64_t>(colptr),
              read<int64_t>(by_source),
              read<int64_t>(target),
              read<T>(features),
              read<T>(of_output),
              read<T>(given),
              write<T>(grad_key),
              write<T>(grad_value),
              write<T>(grad_key_logits)};
    cuda::Call call(kEdgeKeyGradients, features);
    const Scratch<T> scratch(call, params.E, H, params.F + params.d_v);
    call.check(
        kernels_of<T>().key_gradients(params, scratch.numbers, scratch.values, call.stream()));
  };
  if (compute_index(features) == 1) {
    run(EdgeKeyGradientParams<double>());
  } else {
    run(EdgeKeyGradientParams<float>());
  }
  return {grad_key, grad_value, grad_key_logits};
}

TORCH_LIBRARY_IMPL(ikattn, IKATTN_CUDA_KEY, m) {
  implement<"edge_attention_from_features", from_edge_features<forward>>(m);
  implement<"edge_query_gradients", query_gradients>(m);
  implement<"edge_key_gradients", key_gradients>(m);
}

}  // namespace
}  // namespace ikattn
