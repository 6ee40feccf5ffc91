// Which calls the tensor cores take, for the CUDA kernels and for who asks beforehand.
#pragma once

#include <stdint.h>

#include "attention/params.h"

namespace ikattn {

// nullptr, or why a call cannot go to the tensor cores: types, sizes,
// alignment. What depends on the numbers is decided on the device: heads whose keys differ in
// magnitude by more than a row can hold (cuda/folded.h) go to the ordinary units too.
inline const char* why_no_tensor_cores(const AttentionParams& params) {
  const Array& value = params.value;
  const auto is_multiple = [](int64_t x, int64_t of) { return x % of == 0; };
  if (value.type != ElementType::kFloat16 && value.type != ElementType::kBFloat16) {
    return "query, key and value must be float16 or bfloat16";
  }
  if (params.mask.type != ElementType::kNone && params.mask.type != ElementType::kBool) {
    return "attn_mask must be bool";
  }
  if (2 * params.M > 128) return "there must be at most 64 frequencies";
  if (params.d_v < 8 || params.d_v > 128 || !is_multiple(params.d_v, 8)) {
    return "the head size of value must be a multiple of 8 from 8 to 128";
  }
  if (value.stride[3] != 1 || !is_multiple(value.stride[0], 8) ||
      !is_multiple(value.stride[1], 8) || !is_multiple(value.stride[2], 8) ||
      !is_multiple(static_cast<int64_t>(reinterpret_cast<uintptr_t>(value.data)), 16)) {
    return "rows of value must be contiguous and begin at multiples of 16 bytes";
  }
  return nullptr;
}

}  // namespace ikattn
