// Whether a GPU runs this library's kernels. Built where torch has CUDA.
#include "support/cuda/glue.h"

#include "support/cuda/probe.h"
#include "support/devices.h"

namespace ikattn::cuda {

std::string why_no_kernels(c10::DeviceIndex index) {
  if (c10::cuda::device_count() == 0) {
    return "torch finds no GPU here (python -m ikattn info says what this library was built for)";
  }
  const c10::cuda::OptionalCUDAGuard guard(
      c10::Device(c10::kCUDA, index < 0 ? c10::cuda::current_device() : index));
  const char* error = why_no_kernels();
  return error == nullptr ? "" : why_not_on_this_gpu(error);
}

}  // namespace ikattn::cuda
