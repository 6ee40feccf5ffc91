// What a float mask, or a key bias, adds to logits, on every device.
#pragma once

#include "support/host_device.h"

namespace ikattn {
namespace {  // compiled once for each instruction set

// Finite offsets end at 2^33. Beyond, as the lowest number of a type that stands for "hidden",
// log Z of a row that sees nothing else would have lost the logarithm of its sum, and with it the
// gradients: in float64 it keeps 1e-6 of it here.
template <typename T>
IKATTN_HOST_DEVICE inline T bounded_offset(T offset) {
  constexpr T kFarthest = 8589934592;
  const T bounded = offset < -kFarthest ? -kFarthest : offset > kFarthest ? kFarthest : offset;
  return offset - offset == T(0) ? bounded : offset;
}

}  // namespace
}  // namespace ikattn
