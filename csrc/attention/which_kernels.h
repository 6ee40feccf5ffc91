// Which kernels a call takes, in words. Each device's glue tells it from what it chooses them by.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <string>

#include "attention/params.h"

namespace ikattn {

// `type` is that of query, key and value.
std::string cpu_kernels(const AttentionParams& params, at::ScalarType type, bool backward);

namespace cuda {
// Of a GPU, or of one that has no kernels of its own where there is none to ask.
std::string kernels(const AttentionParams& params, at::ScalarType type, c10::DeviceIndex index,
                    bool backward);
}  // namespace cuda

}  // namespace ikattn
