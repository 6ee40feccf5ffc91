// The kernels that a pass of a call takes, told by the route of each device.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <string>

#include "attention/calls/params.h"

namespace ikattn {

struct KernelChoice {
  std::string algorithm;  // "quadratic" or "linear"; "none"
  std::string unit;       // an instruction set; "cuda_cores", "tensor_cores" or "hopper"; "none"
  std::string reason;     // why no faster kernels, or none at all; "": there are no faster ones
  // "int8": scores are products of 8-bit integers; "float16x2": products are of float32 split into
  // two float16; "": of the unit's own type
  std::string scores;
  // The GPU and the commit where all of these kernels last passed their tests, or that this machine
  // has proven them; "the CPU"; "": unproven.
  std::string proven = "";
};

KernelChoice cpu_kernels(const AttentionParams& params, bool backward);

namespace cuda {
// `type` is that of query, key and value. Tells the kernels on the GPU with this index, -1 the
// current one; without any GPU, on one that is not Hopper.
KernelChoice kernels(const AttentionParams& params, at::ScalarType type, c10::DeviceIndex index,
                     bool backward);
}  // namespace cuda

}  // namespace ikattn
