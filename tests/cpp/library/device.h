// The device of tests that every device must pass: IKATTN_TEST_DEVICE, for example cuda, or the
// CPU.
#pragma once

#include <torch/torch.h>

#include <cstdlib>

inline torch::Device test_device() {
  static const torch::Device device = [] {
    const char* name = std::getenv("IKATTN_TEST_DEVICE");
    return torch::Device(name != nullptr ? name : "cpu");
  }();
  return device;
}

inline at::TensorOptions on_device(at::ScalarType type) {
  return at::TensorOptions(type).device(test_device());
}
