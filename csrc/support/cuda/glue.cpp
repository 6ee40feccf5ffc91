// Whether a GPU runs this library's kernels. Built where torch has CUDA.
#include "support/cuda/glue.h"

#include "support/cuda/probe.h"
#include "support/devices.h"

namespace ikattn::cuda {

std::string why_no_kernels(c10::DeviceIndex index) {
  if (c10::cuda::device_count() == 0) return "";
  const c10::cuda::OptionalCUDAGuard guard(
      c10::Device(c10::kCUDA, index < 0 ? c10::cuda::current_device() : index));
  const char* error = why_no_kernels();
  return error == nullptr ? "" : why_not_on_this_gpu(error);
}

std::string why_not_on_this_gpu(const char* error) {
  const std::string said = error;
  // Of a launch, and of a question about a kernel.
  const bool no_code = said.find("no kernel image") != std::string::npos ||
                       said.find("invalid device function") != std::string::npos;
  if (!no_code) return said;
  return said +
         " (ikattn was built for other architectures than this GPU's, python -m ikattn info names "
         "them: from compute capability 8.0 on, set TORCH_CUDA_ARCH_LIST and build again; before, "
         "there are no kernels)";
}

}  // namespace ikattn::cuda
