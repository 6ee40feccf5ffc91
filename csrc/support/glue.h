// Tensors as kernels see them.
#pragma once

#include <ATen/core/Tensor.h>

#include "support/array.h"

namespace ikattn {

// Returns the index of an arithmetic type in tables: 0 float32, 1 float64.
inline int compute_index(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? 1 : 0;
}

// Returns `tensor` with the axes of `sizes`, to which it broadcasts; broadcast axes get stride 0.
// tensor.expand() would cost a microsecond, and a call has seven of them.
Array array_of(const at::Tensor& tensor, at::IntArrayRef sizes);
inline Array array_of(const at::Tensor& tensor) { return array_of(tensor, tensor.sizes()); }

}  // namespace ikattn
