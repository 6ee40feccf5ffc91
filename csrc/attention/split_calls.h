// Which float32 calls take products of two numbers of Half each on tensor cores, for the CUDA
// kernels and for who asks beforehand.
#pragma once

#include <cstdlib>
#include <cstring>

#include "attention/tensor_core_calls.h"

namespace ikattn {

// Whether IKATTN_SPLIT=0 in the environment does not forbid them.
inline bool allows_split_products() {
  const char* variable = std::getenv("IKATTN_SPLIT");
  return variable == nullptr || std::strcmp(variable, "0") != 0;
}

// nullptr, or why a call in float32 cannot take them.
inline const char* why_no_split_products(const AttentionParams& params) {
  if (params.M > 64 || params.d_v > 128) {
    return "without TF32 (torch.backends.cuda.matmul.fp32_precision = 'tf32') float32 takes at "
           "most 64 frequencies and 128 columns of value on tensor cores";
  }
  if (params.d_v < 1) return "the head size of value must be at least 1";
  return allows_split_products() ? nullptr : "IKATTN_SPLIT=0 keeps float32 on CUDA cores";
}

// nullptr, or why a call goes to CUDA cores: not to the tensor cores as it is, nor by split
// products.
inline const char* why_cuda_cores(const AttentionParams& params) {
  const char* const reason = why_no_tensor_cores(params);
  if (reason == nullptr || params.value.type != ElementType::kFloat32) return reason;
  const char* const of_split = why_no_split_products(params);
  return of_split == nullptr || !params.allow_tf32 ? of_split : reason;
}

}  // namespace ikattn
