// Tensors as kernels see them.
#pragma once

#include <ATen/core/Tensor.h>

#include "support/array.h"

namespace ikattn {

// Where a table has one entry per arithmetic type: 0 float32, 1 float64.
inline int compute_index(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? 1 : 0;
}

// `tensor` with the axes of `sizes`, to which it broadcasts; broadcast axes get stride 0. Written
// out because tensor.expand() costs a microsecond, and a call has seven of them.
Array array_of(const at::Tensor& tensor, at::IntArrayRef sizes);
inline Array array_of(const at::Tensor& tensor) { return array_of(tensor, tensor.sizes()); }

// make(), which allocates. Where there is no memory, torch says how much was asked for, and this by
// whom and for what.
template <typename Make>
auto with_memory_for(const char* function, const char* what, const Make& make) {
  try {
    return make();
  } catch (const c10::OutOfMemoryError& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, function, ": no memory for ", what, ": ",
                     error.what_without_backtrace());
  } catch (const c10::AcceleratorError&) {
    throw;  // a fault of earlier work, which shows wherever the device is asked next
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, function, ": no memory for ", what, ": ", error.what_without_backtrace());
  }
}

}  // namespace ikattn
