// The operators with kernels, from a Device that runs them: checks, memory, tensors as the structs
// of params.h.
#pragma once

#include <ATen/ATen.h>

#include "edge_attention/operators.h"
#include "edge_attention/params.h"
#include "support/glue.h"
#include "support/memory.h"

namespace ikattn {
namespace {

template <typename T>
const T* read(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}

template <typename T>
T* write(const at::Tensor& tensor) {
  return tensor.mutable_data_ptr<T>();
}

at::Tensor contiguous(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.contiguous() : tensor;
}

EdgeFeatures contiguous(const EdgeFeatures& given) {
  EdgeFeatures call = given;
  for (at::Tensor* tensor :
       {&call.query_features, &call.key_features, &call.value, &call.key_logits, &call.edge_logits,
        &call.keep, &call.rowptr, &call.col}) {
    *tensor = contiguous(*tensor);
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
  params.exponential = !call.eps.has_value();
  params.eps = static_cast<T>(call.eps.value_or(0));
  params.negative_slope = static_cast<T>(call.negative_slope);
}

// Calls function(params) with the params of the tensor's type.
template <template <typename> class Params, typename Function>
void with_params(const at::Tensor& like, const Function& function) {
  if (compute_index(like) == 1) {
    function(Params<double>());
  } else {
    function(Params<float>());
  }
}

// Edges by source: source j has the edges edges[k], into targets[k], for k from colptr[j] up to
// colptr[j + 1], ascending.
struct BySource {
  at::Tensor colptr, edges, targets;
};

// A Device has
//   check(function, rowptr, col, N_k)       throws where numbers are wrong, if it looks at them
//   by_source(rowptr, col, N_k)             BySource of contiguous int64 tensors
//   forward(params, like), query_gradients(params, like), key_gradients(params, like)
template <typename Device>
struct EdgeOperators {
  static EdgeResults forward(const EdgeFeatures& given) {
    check_edge_features(kFromEdgeFeatures, given);
    Device::check(kFromEdgeFeatures, given.rowptr, given.col, given.key_features.size(0));
    const EdgeFeatures call = contiguous(given);
    const int64_t N_q = call.query_features.size(0), H = call.query_features.size(1);
    const auto options = call.query_features.options();
    const at::Tensor output = in_large_pages(at::empty({N_q, H, call.value.size(2)}, options));
    const at::Tensor weights = in_large_pages(at::empty({call.col.size(0), H}, options));
    const at::Tensor log_normalizer = at::empty({N_q, H}, options.dtype(at::kDouble));
    with_params<EdgeForwardParams>(output, [&]<typename T>(EdgeForwardParams<T> params) {
      describe(call, params);
      params.output = write<T>(output);
      params.weights = write<T>(weights);
      params.log_normalizer = write<double>(log_normalizer);
      Device::forward(params, output);
    });
    return {output, weights, log_normalizer};
  }

  static EdgeQueryGradients query_gradients(IKATTN_EDGE_QUERY_GRADIENTS_PARAMETERS) {
    const EdgeFeatures given{IKATTN_EDGE_FEATURES_VALUES};
    check_edge_query_gradients(given, {output, {}, log_normalizer}, grad_output,
                               or_undefined(grad_weights));
    Device::check(kEdgeQueryGradients, rowptr, col, key_features.size(0));
    const EdgeFeatures call = contiguous(given);
    const at::Tensor of_output = grad_output.contiguous(), normalizer = log_normalizer.contiguous();
    const at::Tensor of_weights = contiguous(or_undefined(grad_weights));
    const at::Tensor outputs = output.contiguous();
    const at::Tensor grad_query = in_large_pages(at::empty_like(call.query_features));
    const at::Tensor of_edges = in_large_pages(
        at::empty({call.col.size(0), 3, call.query_features.size(1)}, grad_query.options()));
    with_params<EdgeQueryGradientParams>(of_edges,
                                         [&]<typename T>(EdgeQueryGradientParams<T> params) {
                                           describe(call, params);
                                           params.output = read<T>(outputs);
                                           params.log_normalizer = read<double>(normalizer);
                                           params.grad_output = read<T>(of_output);
                                           params.grad_weights = read<T>(of_weights);
                                           params.grad_query_features = write<T>(grad_query);
                                           params.of_edges = write<T>(of_edges);
                                           Device::query_gradients(params, of_edges);
                                         });
    return {grad_query, of_edges};
  }

  static EdgeKeyGradients key_gradients(IKATTN_EDGE_KEY_GRADIENTS_PARAMETERS) {
    check_edge_key_gradients({IKATTN_EDGE_KEY_GRADIENTS_VALUES});
    const int64_t N_k = sources.expect_int(), H = query_features.size(1);
    Device::check(kEdgeKeyGradients, rowptr, col, N_k);
    const at::Tensor features = query_features.contiguous(), given = of_edges.contiguous();
    const at::Tensor of_output = grad_output.contiguous();
    const BySource edges = Device::by_source(rowptr.contiguous(), col.contiguous(), N_k);
    const auto options = features.options();
    const at::Tensor grad_key = in_large_pages(at::empty({N_k, H, features.size(2)}, options));
    const at::Tensor grad_value = in_large_pages(at::empty({N_k, H, of_output.size(2)}, options));
    const at::Tensor grad_key_logits = at::empty({N_k, H}, options);
    with_params<EdgeKeyGradientParams>(features, [&]<typename T>(EdgeKeyGradientParams<T> params) {
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
      Device::key_gradients(params, features);
    });
    return {grad_key, grad_value, grad_key_logits};
  }

  static void register_in(torch::Library& m) {
    implement<"edge_attention_from_features", from_edge_features<forward>>(m);
    implement<"edge_query_gradients", query_gradients>(m);
    implement<"edge_key_gradients", key_gradients>(m);
  }
};

}  // namespace
}  // namespace ikattn
