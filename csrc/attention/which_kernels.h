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
// Of the GPU with this index, -1 the current one; without any, of one that is not Hopper.
std::string kernels(const AttentionParams& params, at::ScalarType type, c10::DeviceIndex index,
                    bool backward);
}  // namespace cuda

}  // namespace ikattn
