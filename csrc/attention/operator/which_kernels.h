// Which kernels a pass of a call takes. Each device's glue tells it from what it chooses them by.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <string>

#include "attention/calls/params.h"

namespace ikattn {

struct KernelChoice {
  std::string algorithm;  // "quadratic" or "linear"; "none"
  std::string unit;       // an instruction set; "cuda_cores", "tensor_cores" or "hopper"; "none"
  std::string reason;     // why nothing faster, or nothing at all; "": nothing is
  // "int8": scores are products of integers of 8 bits; "float16x2": all products are of float32 as
  // the sum of two numbers of float16; "": of the unit's own
  std::string scores;
  // On which GPU, and at which commit, all of these kernels last passed their tests, or that this
  // machine has proven them; "the CPU"; "": nobody has.
  std::string proven = "";
};

// `type` is that of query, key and value.
KernelChoice cpu_kernels(const AttentionParams& params, at::ScalarType type, bool backward);

namespace cuda {
// Of the GPU with this index, -1 the current one; without any, of one that is not Hopper.
KernelChoice kernels(const AttentionParams& params, at::ScalarType type, c10::DeviceIndex index,
                     bool backward);
}  // namespace cuda

}  // namespace ikattn
