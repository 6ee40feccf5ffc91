// The features of spectral_features, of tokens of 16 bits in their own type, on tensor cores.
#pragma once

#include "attention/calls/params.h"
#include "support/cuda/executor.h"

namespace ikattn::cuda {

bool goes_to_tensor_cores(const FeaturesParams& params);
const char* features_on_tensor_cores(const FeaturesParams& params, const DeviceExecutor& executor);

}  // namespace ikattn::cuda
