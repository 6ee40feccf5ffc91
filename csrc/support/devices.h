// Which devices the library has kernels for.
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace ikattn {

// Why no kernel of this library runs on `device`; empty: they do, or there is no such GPU to ask.
std::string why_no_kernels(const c10::Device& device);

namespace cuda {
// Of a GPU; -1: the current one.
std::string why_no_kernels(c10::DeviceIndex index);
// What CUDA said of a launch, with what to do where the library has no code for this GPU.
std::string why_not_on_this_gpu(const std::string& error);
}  // namespace cuda

}  // namespace ikattn
