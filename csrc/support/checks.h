// Checks that every operator makes of its arguments. Each throws, naming the function and the
// argument, what was expected and what came.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <optional>

namespace ikattn {

// float64, float32, bfloat16 or float16.
bool is_supported_float(at::ScalarType type);

// Arithmetic type for a storage type: float64 stays, everything else is computed in float32.
inline at::ScalarType compute_type(at::ScalarType storage) {
  return storage == at::kDouble ? at::kDouble : at::kFloat;
}

// Whether a tensor of shape `from` can be expanded to `to`.
bool broadcasts_to(at::IntArrayRef from, at::IntArrayRef to);

inline bool is_present(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined();
}

inline at::Tensor or_undefined(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() ? *tensor : at::Tensor();
}

inline std::optional<at::Tensor> or_none(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

// nullptr where absent.
inline const at::Tensor* address(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() ? &*tensor : nullptr;
}

struct NamedTensor {
  const char* name;
  const at::Tensor* tensor;  // nullptr or undefined: absent
};

// Every tensor is dense and on the device of the first. Apart from the other checks because it must
// come before the dispatcher chooses a kernel by layouts and devices: a call that mixes them would
// reach the meta device's fake kernel, or none.
void check_placement(const char* function, const char* first_name, const at::Tensor& first,
                     std::initializer_list<NamedTensor> others);

// Whether sizes of these, nullptr or undefined where absent, are symbols of torch.compile.
bool has_symbols(std::initializer_list<const at::Tensor*> tensors);

// Shape, dtype and device of a tensor that an earlier call returned, or of its gradient.
void check_like(const char* function, const char* name, const at::Tensor& tensor,
                at::IntArrayRef sizes, at::ScalarType type, at::Device device);

}  // namespace ikattn
