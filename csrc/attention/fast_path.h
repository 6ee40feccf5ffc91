// Which calls the tensor cores take, for the CUDA kernels and for who asks beforehand.
#pragma once

#include "attention/params.h"

namespace ikattn {

// Whether rows of the value can be copied to shared memory as they are, 16 bytes at a time.
inline bool lies_ready_for_tensor_cores(const AttentionParams& params) {
  const Array& value = params.value;
  const auto is_multiple = [](int64_t x, int64_t of) { return x % of == 0; };
  return value.type != ElementType::kFloat32 && is_multiple(params.d_v, 8) &&
         value.stride[3] == 1 && is_multiple(value.stride[0], 8) &&
         is_multiple(value.stride[1], 8) && is_multiple(value.stride[2], 8) &&
         value.stride[2] > 0 &&
         is_multiple(static_cast<int64_t>(reinterpret_cast<uintptr_t>(value.data)), 16);
}

// nullptr, or why a call cannot go to the tensor cores: types and sizes.
inline const char* why_no_tensor_cores(const AttentionParams& params) {
  const Array& value = params.value;
  const bool is_half = value.type == ElementType::kFloat16 || value.type == ElementType::kBFloat16;
  if (!is_half && (value.type != ElementType::kFloat32 || !params.allow_tf32)) {
    return "query, key and value must be float16 or bfloat16, or float32 where torch allows TF32 "
           "(torch.backends.cuda.matmul.fp32_precision = 'tf32')";
  }
  // Where no row's largest key is known beforehand, only eps bounds the gradients of scores.
  if (params.eps < 1e-8 && (params.is_causal || params.mask.type != ElementType::kNone)) {
    return "eps must be at least 1e-8 with attn_mask or is_causal";
  }
  // Weights are up to 2^15 (1 + eps), and float16 ends at 65504.
  if (params.eps > 0.9 && value.type != ElementType::kBFloat16) {
    return "eps must be at most 0.9 unless query, key and value are bfloat16";
  }
  if (params.d_v < 1) return "the head size of value must be at least 1";
  return nullptr;
}

}  // namespace ikattn
