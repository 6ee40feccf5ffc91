// Stand-ins for CUDA's side of torch in support/cuda/glue.h, for kernels in the interpreter:
// tensors of the device that device.cpp makes, and no stream.
#pragma once

#include <c10/core/Device.h>

#include <mutex>

#include "support/cuda/launch.h"

#define IKATTN_CUDA_KEY PrivateUse1

namespace ikattn::cuda {

// One call at a time: autograd calls from a thread of its own, and there is one interpreter.
class DeviceGuard {
 public:
  explicit DeviceGuard(const c10::Device&) : lock_(mutex()) {}

 private:
  static std::recursive_mutex& mutex() {
    static std::recursive_mutex the_one;
    return the_one;
  }
  std::lock_guard<std::recursive_mutex> lock_;
};

inline Stream current_stream(const c10::Device&) { return {}; }

}  // namespace ikattn::cuda
