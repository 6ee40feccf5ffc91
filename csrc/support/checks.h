// Checks of the arguments of every operator. Errors name the function and the argument, what was
// expected and what was given.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <optional>

namespace ikattn {

// Tells whether a type is float64, float32, bfloat16 or float16.
bool is_supported_float(at::ScalarType type);

// Returns the arithmetic type of a storage type: float64 for float64, else float32.
inline at::ScalarType compute_type(at::ScalarType storage) {
  return storage == at::kDouble ? at::kDouble : at::kFloat;
}

// Tells whether a tensor of shape `from` can be expanded to `to`.
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

// Returns nullptr where absent.
inline const at::Tensor* address(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() ? &*tensor : nullptr;
}

struct NamedTensor {
  const char* name;
  const at::Tensor* tensor;  // nullptr or undefined: absent
};

// Checks that a tensor is dense.
void check_dense(const char* function, const char* name, const at::Tensor& tensor);

// Checks that every tensor is dense and on the device of the first. It must precede the choice of a
// kernel by layouts and devices: a call that mixes them would reach the meta device's fake kernel,
// or none. Returns whether all sizes are numbers, which may be checked, and no symbols.
bool check_placement(const char* function, const char* first_name, const at::Tensor& first,
                     std::initializer_list<NamedTensor> others);

// Tells whether sizes of these tensors, nullptr or undefined where absent, are symbols of
// torch.compile.
bool has_symbols(std::initializer_list<const at::Tensor*> tensors);

// Checks shape, dtype and device of a tensor that an earlier call returned, or of its gradient.
void check_like(const char* function, const char* name, const at::Tensor& tensor,
                at::IntArrayRef sizes, at::ScalarType type, at::Device device);

}  // namespace ikattn
