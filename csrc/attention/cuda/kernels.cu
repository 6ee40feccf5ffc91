// The table of doors, and which way a call takes; see kernels.h.
#include "attention/cuda/folded_forward.h"
#include "attention/cuda/kernels.h"
#include "attention/cuda/linear_time.h"
#include "attention/cuda/tiles.h"

namespace ikattn::cuda {

template <typename T>
const char* attention_backward(const AttentionBackwardParams&, const DeviceExecutor&);
template <typename T>
const char* attention_weights(const WeightsParams&, const DeviceExecutor&);
template <typename T>
const char* features(const FeaturesParams&, bool backward, const DeviceExecutor&);

const AttentionKernels attention_kernels = {
    {attention_forward<float>, attention_forward<double>},
    {attention_backward<float>, attention_backward<double>},
    {attention_weights<float>, attention_weights<double>},
    {features<float>, features<double>},
};

Way way_of(const AttentionParams& params, bool in_double, bool backward) {
  if (in_double || why_no_tensor_cores(params) != nullptr) return Way::kOrdinaryUnits;
  if (goes_without_pairs(params, backward)) return Way::kWithoutPairs;
  const bool by_warpgroups =
      backward ? goes_to_warpgroups(params) : forward_goes_to_warpgroups(params);
  return by_warpgroups ? Way::kWarpgroups : Way::kTensorCores;
}

}  // namespace ikattn::cuda
