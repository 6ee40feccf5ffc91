// Interface by which the drivers of a call ask for memory on the device.
#pragma once

#include "support/cuda/launch.h"

namespace ikattn::cuda {

// Memory lives until the work queued with it is done.
struct DeviceExecutor {
  Stream stream{};
  void* (*allocate)(void* owner, int64_t bytes) = nullptr;
  void* owner = nullptr;

  template <typename T>
  T* take(int64_t count) const {
    return static_cast<T*>(allocate(owner, (count > 0 ? count : 1) * int64_t{sizeof(T)}));
  }
};

}  // namespace ikattn::cuda
