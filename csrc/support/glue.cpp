#include "support/glue.h"

#include <ATen/ATen.h>

#include "support/checks.h"

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
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(broadcasts_to(tensor.sizes(), sizes));
  const at::IntArrayRef own_sizes = tensor.sizes(), own_strides = tensor.strides();
  const size_t leading = sizes.size() - own_sizes.size();
  Array array;
  array.data = const_cast<void*>(tensor.const_data_ptr());
  array.type = element_type(tensor.scalar_type());
  for (size_t axis = 0; axis < own_sizes.size(); ++axis) {
    array.stride[leading + axis] = own_sizes[axis] == 1 ? 0 : own_strides[axis];
  }
  return array;
}

}  // namespace ikattn
