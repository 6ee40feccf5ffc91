// A tensor as kernels see it: a pointer, an element type, strides. No torch header.
#pragma once

#include <stdint.h>

namespace ikattn {

enum class ElementType : uint8_t { kNone, kFloat64, kFloat32, kBFloat16, kFloat16, kBool };

// An array of up to four axes with strides in elements; a broadcast axis has stride 0.
struct Array {
  void* data = nullptr;
  ElementType type = ElementType::kNone;
  int64_t stride[4] = {0, 0, 0, 0};

  explicit operator bool() const { return type != ElementType::kNone; }
};

}  // namespace ikattn
