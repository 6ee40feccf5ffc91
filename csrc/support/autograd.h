// Functions for the Autograd key of every operator.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <initializer_list>
#include <optional>

#include "support/exact_arithmetic.h"

namespace ikattn {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

inline bool is_transformed(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.key_set().has(c10::DispatchKey::FuncTorchGradWrapper) ||
                              tensor._fw_grad(0).defined());
}

// Tells whether vmap stacks several tensors in this one, as is_grads_batched does with gradients.
inline bool is_batched(const at::Tensor& tensor) {
  const c10::DispatchKeySet batched(
      {c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Batched});
  return tensor.defined() && tensor.key_set().has_any(batched);
}

inline bool any_transformed(std::initializer_list<const at::Tensor*> tensors,
                            std::initializer_list<const std::optional<at::Tensor>*> optional) {
  for (const at::Tensor* tensor : tensors) {
    if (is_transformed(*tensor)) return true;
  }
  for (const std::optional<at::Tensor>* tensor : optional) {
    if (tensor->has_value() && is_transformed(**tensor)) return true;
  }
  return false;
}

// Tells whether a call is recorded for backward. Otherwise the kernels are called without a node.
inline bool is_recorded(std::initializer_list<const at::Tensor*> tensors,
                        std::initializer_list<const std::optional<at::Tensor>*> optional) {
  const auto wants = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.requires_grad();
  };
  if (!at::GradMode::is_enabled()) return false;
  for (const at::Tensor* tensor : tensors) {
    if (wants(*tensor)) return true;
  }
  for (const std::optional<at::Tensor>* tensor : optional) {
    if (tensor->has_value() && wants(**tensor)) return true;
  }
  return false;
}

// Returns which of the inputs want a gradient. The context numbers the tensors that are present.
template <size_t kCount>
std::array<bool, kCount> wanted_gradients(AutogradContext* ctx,
                                          const std::array<at::Tensor, kCount>& inputs) {
  std::array<bool, kCount> wanted{};
  size_t edge = 0;
  for (size_t i = 0; i < kCount; ++i) {
    if (!inputs[i].defined()) continue;
    wanted[i] = ctx->needs_input_grad(edge++) && inputs[i].is_floating_point();
  }
  return wanted;
}

// Returns views of the inputs for the reference's graph. An input may be computed from another one,
// or be in two places: its gradient would include the graph behind it twice.
template <size_t kCount>
std::array<at::Tensor, kCount> views_of(const std::array<at::Tensor, kCount>& inputs) {
  std::array<at::Tensor, kCount> views;
  for (size_t i = 0; i < kCount; ++i) {
    if (inputs[i].defined()) views[i] = inputs[i].view_as(inputs[i]);
  }
  return views;
}

// Returns the gradients of `outputs` by the reference's graph, differentiable with create_graph;
// zeros where there are none. The inputs are the views that the reference was called with.
template <size_t kCount>
std::array<at::Tensor, kCount> differentiable_gradients(
    const variable_list& outputs, const variable_list& grad_outputs,
    const std::array<at::Tensor, kCount>& inputs, const std::array<bool, kCount>& wanted,
    bool create_graph = true) {
  const ExactArithmetic exact;
  variable_list sources;
  for (size_t i = 0; i < kCount; ++i) {
    if (wanted[i]) sources.push_back(inputs[i]);
  }
  variable_list found(sources.size());
  if (!outputs.empty()) {
    found = torch::autograd::grad(outputs, sources, grad_outputs, /*retain_graph=*/true,
                                  create_graph, /*allow_unused=*/true);
  }
  for (size_t i = 0; i < found.size(); ++i) {
    if (!found[i].defined()) found[i] = at::zeros_like(sources[i]);
  }
  std::array<at::Tensor, kCount> gradients;
  size_t next = 0;
  for (size_t i = 0; i < kCount; ++i) {
    if (wanted[i]) gradients[i] = found[next++];
  }
  return gradients;
}

// Returns undefined tensors for gradients that are not wanted, for which the operators return empty
// ones.
template <size_t kCount, typename Tuple>
std::array<at::Tensor, kCount> only_wanted(const Tuple& all,
                                           const std::array<bool, kCount>& wanted) {
  std::array<at::Tensor, kCount> gradients =
      std::apply([](const auto&... each) { return std::array<at::Tensor, kCount>{each...}; }, all);
  for (size_t i = 0; i < kCount; ++i) {
    if (!wanted[i]) gradients[i] = at::Tensor();
  }
  return gradients;
}

}  // namespace ikattn
