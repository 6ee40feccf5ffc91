#include "support/checks.h"

#include <algorithm>

namespace ikattn {

bool is_supported_float(at::ScalarType type) {
  return type == at::kDouble || type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}

bool broadcasts_to(at::IntArrayRef from, at::IntArrayRef to) {
  if (from.size() > to.size()) return false;
  const size_t skipped = to.size() - from.size();
  for (size_t i = 0; i < from.size(); ++i) {
    if (from[i] != 1 && from[i] != to[i + skipped]) return false;
  }
  return true;
}

void check_dense(const char* function, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == at::kStrided, function, ": ", name,
              " must be a dense (strided) tensor, got layout ", tensor.layout());
}

bool check_placement(const char* function, const char* first_name, const at::Tensor& first,
                     std::initializer_list<NamedTensor> others) {
  check_dense(function, first_name, first);
  bool are_numbers = !has_symbols({&first});
  for (const auto& [name, tensor] : others) {
    if (tensor == nullptr || !tensor->defined()) continue;
    check_dense(function, name, *tensor);
    TORCH_CHECK(tensor->device() == first.device(), function, ": ", name,
                " must be on the device of ", first_name, ", ", first.device(), ", got ",
                tensor->device());
    are_numbers = are_numbers && !has_symbols({tensor});
  }
  return are_numbers;
}

bool has_symbols(std::initializer_list<const at::Tensor*> tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor* tensor) {
    return tensor != nullptr && tensor->defined() &&
           tensor->unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  });
}

void check_like(const char* function, const char* name, const at::Tensor& tensor,
                at::IntArrayRef sizes, at::ScalarType type, at::Device device) {
  TORCH_CHECK(tensor.sizes() == sizes && tensor.scalar_type() == type && tensor.device() == device,
              function, ": ", name, " must be ", type, " of shape ", sizes, " on ", device,
              ", got ", tensor.scalar_type(), " ", tensor.sizes(), " on ", tensor.device());
}

}  // namespace ikattn
