// CUDA's answer to which_kernels. Built where torch has CUDA.
#include "attention/operator/which_kernels.h"

#include <c10/cuda/CUDAGuard.h>

#include "attention/cuda/operands/route.h"
#include "support/cuda/families.h"

namespace ikattn::cuda {
namespace {

// Names who has proven all families that a pass takes: "" where one of them is not proven.
std::string proven_by_all(const std::vector<Family>& families) {
  if (families.empty()) return "H200 at c2071f5";  // CUDA cores
  std::string all;
  for (const Family family : families) {
    const std::string one = proven_by(family);
    if (one.empty()) return "";
    if (all.find(one) == std::string::npos) all += (all.empty() ? "" : "; ") + one;
  }
  return all;
}

}  // namespace

KernelChoice kernels(const AttentionParams& params, at::ScalarType type, c10::DeviceIndex index,
                     bool backward) {
  c10::cuda::OptionalCUDAGuard guard;
  if (c10::cuda::device_count() > 0 && index >= 0) guard.set_index(index);
  const Route route =
      route_of(params, type == at::kDouble, backward ? Pass::kBackward : Pass::kForward);
  const char* const scores = route.split_products ? "float16x2" : route.int8_scores ? "int8" : "";
  const char* units[] = {"cuda_cores", "tensor_cores", "hopper"};
  return {route.algorithm == Algorithm::kLinear ? "linear" : "quadratic",
          units[static_cast<int>(route.unit)], route.reason == nullptr ? "" : route.reason, scores,
          proven_by_all(families_of(params, route))};
}

}  // namespace ikattn::cuda
