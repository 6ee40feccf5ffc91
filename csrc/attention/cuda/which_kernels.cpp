// CUDA's answer to which_kernels. Built where torch has CUDA.
#include "attention/which_kernels.h"

#include <c10/cuda/CUDAGuard.h>

#include "attention/cuda/kernels.h"
#include "attention/fast_path.h"

namespace ikattn::cuda {

std::string kernels(const AttentionParams& params, at::ScalarType type, c10::DeviceIndex index,
                    bool backward) {
  c10::cuda::OptionalCUDAGuard guard;
  if (c10::cuda::device_count() > 0 && index >= 0) guard.set_index(index);
  const bool in_double = type == at::kDouble;
  const char* reason = in_double ? "float64" : why_no_tensor_cores(params);
  switch (way_of(params, in_double, backward)) {
    case Way::kOrdinaryUnits:
      return std::string("ordinary units, by pairs: ") + reason;
    case Way::kTensorCores:
      return "tensor cores (mma.sync), by pairs";
    case Way::kWarpgroups:
      return "tensor cores (Hopper's wgmma), by pairs";
    case Way::kWithoutPairs:
      return "tensor cores (mma.sync), without pairs";
  }
  return "";
}

}  // namespace ikattn::cuda
