// The CUDA kernels' doors: what glue.cpp calls, with the parameters the CPU kernels take.
#pragma once

#include "attention/params.h"
#include "support/cuda/launch.h"

namespace ikattn::cuda {

// How a kernel asks for memory on the device; it lives until the work queued with it is done.
struct DeviceExecutor {
  Stream stream{};
  void* (*allocate)(void* owner, int64_t bytes) = nullptr;
  void* owner = nullptr;

  template <typename T>
  T* take(int64_t count) const {
    return static_cast<T*>(allocate(owner, (count > 0 ? count : 1) * int64_t{sizeof(T)}));
  }
};

// Each queues its work and returns nullptr, or why it could not. Index 0: compute in float32; 1: in
// float64. Dropout reads its seed and offset from params.dropout_state, on the device.
struct AttentionKernels {
  const char* (*forward[2])(const AttentionParams&, const DeviceExecutor&);
  const char* (*backward[2])(const AttentionBackwardParams&, const DeviceExecutor&);
  const char* (*weights[2])(const WeightsParams&, const DeviceExecutor&);
  const char* (*features[2])(const FeaturesParams&, bool backward, const DeviceExecutor&);
};

extern const AttentionKernels attention_kernels;

// keep [B, H, L, S]: what dropout keeps, from B, H, L, S, dropout_threshold and dropout_state.
const char* dropout_keep_mask(const AttentionParams& params, uint8_t* keep, Stream stream);

}  // namespace ikattn::cuda
