// Whether the current GPU runs this library's kernels.
#pragma once

#include "support/cuda/launch.h"
#include "support/exported.h"

namespace ikattn::cuda {

// nullptr, or what CUDA says of it.
IKATTN_EXPORTED const char* why_no_kernels();

}  // namespace ikattn::cuda
