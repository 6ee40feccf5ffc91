// Tensors of the operators as what kernels take; for the glue of both devices.
#pragma once

#include <ATen/ATen.h>

#include "edge_attention/arguments.h"
#include "edge_attention/params.h"
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
}

EdgeResults empty_results(const EdgeFeatures& call) {
  const int64_t N_q = call.query_features.size(0), H = call.query_features.size(1);
  const auto options = call.query_features.options();
  return {in_large_pages(at::empty({N_q, H, call.value.size(2)}, options)),
          in_large_pages(at::empty({call.col.size(0), H}, options)),
          at::empty({N_q, H}, options.dtype(at::kDouble))};
}

}  // namespace
}  // namespace ikattn
