// The devices that the library has kernels for.
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace ikattn {

// Returns why no kernel of this library runs on `device`; empty where they do, or where there is no
// such GPU to ask.
std::string why_no_kernels(const c10::Device& device);

namespace cuda {
// Returns why no kernel runs on a GPU; -1: the current one.
std::string why_no_kernels(c10::DeviceIndex index);
// Returns CUDA's error of a launch, with advice where the library has no code for this GPU.
std::string why_not_on_this_gpu(const std::string& error);
}  // namespace cuda

}  // namespace ikattn
