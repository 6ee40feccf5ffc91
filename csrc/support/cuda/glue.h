// Parts that the glue of every CUDA kernel needs: the stream, memory, errors. Includes torch.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "support/cuda/launch.h"
#include "support/devices.h"
#include "support/glue.h"
#include "support/memory.h"

#if defined(IKATTN_INTERPRETER)
#include "interpreter/torch/device_call.h"
#else

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

// Dispatch key of the tensors that the kernels take.
#define IKATTN_CUDA_KEY CUDA

namespace ikattn::cuda {

using DeviceGuard = c10::cuda::CUDAGuard;

inline Stream current_stream(const c10::Device& device) {
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
}

}  // namespace ikattn::cuda

#endif  // IKATTN_INTERPRETER

namespace ikattn::cuda {

// The device of a call made current, its stream, and memory that lives as long as this object: the
// allocator hands it out again only to work queued after.
class Call {
 public:
  Call(const char* function, const at::Tensor& like)
      : function_(function),
        device_(like.device()),
        guard_(like.device()),
        stream_(current_stream(like.device())) {}

  Stream stream() const { return stream_; }

  void* allocate(int64_t bytes) {
    const auto said = [&] {
      return c10::str(function_, ": no memory for ", bytes, " bytes beyond ", taken_,
                      kWorkingMemory);
    };
    const auto options = at::TensorOptions().dtype(at::kByte).device(device_);
    memory_.push_back(with_memory([&] { return at::empty({bytes}, options); }, said));
    taken_ += bytes;
    return memory_.back().mutable_data_ptr();
  }

  // Raises an error where `error`, the result of a launch, is one.
  void check(const char* error) const {
    TORCH_CHECK(error == nullptr, function_,
                ": the CUDA kernels could not be launched: ", why_not_on_this_gpu(error));
  }

 private:
  const char* function_;
  at::Device device_;
  DeviceGuard guard_;
  Stream stream_;
  std::vector<at::Tensor> memory_;
  int64_t taken_ = 0;  // bytes
};

}  // namespace ikattn::cuda
