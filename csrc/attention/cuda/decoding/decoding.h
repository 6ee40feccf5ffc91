// Attention of few queries to keys whose features are kept.
#pragma once

#include "attention/calls/params.h"
#include "support/cuda/executor.h"
#include "support/exported.h"

namespace ikattn::cuda {

// Queues its work and returns nullptr, or why it could not. T: the type of the features.
template <typename T>
IKATTN_EXPORTED const char* attention_from_features(const FromFeaturesParams& params,
                                                    const DeviceExecutor& executor);

}  // namespace ikattn::cuda
