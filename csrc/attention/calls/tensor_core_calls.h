// The calls that the tensor cores take, for the CUDA kernels and for which_kernels.
#pragma once

#include "attention/calls/determinism.h"
#include "attention/calls/params.h"

namespace ikattn {

// Tells whether the rows of an array start at multiples of 16 bytes, and can be copied to shared
// memory unchanged.
inline bool lies_in_rows_of_16_bytes(const Array& rows, int64_t element_bytes) {
  const auto is_multiple = [](int64_t bytes) { return bytes % 16 == 0; };
  return rows.stride[3] == 1 && is_multiple(rows.stride[0] * element_bytes) &&
         is_multiple(rows.stride[1] * element_bytes) &&
         is_multiple(rows.stride[2] * element_bytes) &&
         is_multiple(static_cast<int64_t>(reinterpret_cast<uintptr_t>(rows.data)));
}
// Tells whether the rows of value can: they are whole pieces of 16 bytes and do not overlap.
inline bool lies_ready_for_tensor_cores(const AttentionParams& params) {
  const Array& value = params.value;
  return value.type != ElementType::kFloat32 && params.d_v % 8 == 0 &&
         value.stride[2] >= params.d_v && lies_in_rows_of_16_bytes(value, 2);
}

// Returns nullptr, or why the types and sizes of a call exclude the tensor cores.
inline const char* why_no_tensor_cores(const AttentionParams& params) {
  const Array& value = params.value;
  const bool is_half = value.type == ElementType::kFloat16 || value.type == ElementType::kBFloat16;
  if (!is_half && (value.type != ElementType::kFloat32 || !params.allow_tf32)) {
    return "query, key and value must be float16 or bfloat16, or float32 where torch allows TF32 "
           "(torch.backends.cuda.matmul.fp32_precision = 'tf32')";
  }
  // Only eps bounds the gradients of scores where no row's largest key is known beforehand.
  if (params.eps < 1e-8 && (params.is_causal || params.mask.type != ElementType::kNone)) {
    return "eps must be at least 1e-8 with attn_mask or is_causal";
  }
  // Weights are up to 2^15 (1 + eps), and float16 ends at 65504.
  if (params.eps > 0.9 && value.type != ElementType::kBFloat16) {
    return "eps must be at most 0.9 unless query, key and value are bfloat16";
  }
  if (params.d_v < 1) return "the head size of value must be at least 1";
  // Values of float32 share a scale that depends on rows beside this one. eps alone must decide,
  // for prefill and decoding steps differ in their masks.
  const bool is_invariant = !params.batch_invariant || (is_half && params.eps >= 1e-8);
  return is_invariant ? nullptr : kBatchInvariantReason;
}

}  // namespace ikattn
