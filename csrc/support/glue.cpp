#include "support/glue.h"

#include <ATen/ATen.h>

namespace ikattn {
namespace {

ElementType element_type(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return ElementType::kFloat64;
    case at::kFloat:
      return ElementType::kFloat32;
    case at::kBFloat16:
      return ElementType::kBFloat16;
    case at::kHalf:
      return ElementType::kFloat16;
    case at::kBool:
      return ElementType::kBool;
    default:
      TORCH_INTERNAL_ASSERT(false, "no kernel reads ", type);
  }
}

}  // namespace

Array array_of(const at::Tensor& tensor, at::IntArrayRef sizes) {
  const at::Tensor view = tensor.expand(sizes);
  Array array;
  array.data = const_cast<void*>(view.const_data_ptr());
  array.type = element_type(view.scalar_type());
  for (int64_t axis = 0; axis < view.dim(); ++axis) {
    array.stride[axis] = view.size(axis) == 1 ? 0 : view.stride(axis);
  }
  return array;
}

}  // namespace ikattn
