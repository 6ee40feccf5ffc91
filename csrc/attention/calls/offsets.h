// The bound of float masks and key biases, on every device.
#pragma once

#include "support/host_device.h"

namespace ikattn {
namespace {  // compiled once for each instruction set

// Clamps finite offsets to 2^33. A larger one, such as the lowest number of a type, which stands
// for "hidden", would round off the logarithm of the sum in log Z of a row that sees nothing else,
// and with it the gradients. At 2^33 float64 keeps 1e-6 of it.
template <typename T>
IKATTN_HOST_DEVICE inline T bounded_offset(T offset) {
  constexpr T kFarthest = 8589934592;
  const T bounded = offset < -kFarthest ? -kFarthest : offset > kFarthest ? kFarthest : offset;
  return offset - offset == T(0) ? bounded : offset;
}

}  // namespace
}  // namespace ikattn
