// Partial results of rows, one of each part of the keys, and how attention from features combines
// them.
#pragma once

#include "attention/calls/params.h"
#include "attention/cuda/operands/math.h"
#include "support/cuda/executor.h"

namespace ikattn::cuda {

constexpr int kPartKeys = 128;  // wherever the GPU and whatever the call

// Partial results of the rows [B, H, L], relative to exp(maximum).
template <typename T>
struct PartialRows {
  int64_t parts;
  T* maxima;  // [rows, parts]  -inf: only hidden keys, or NaN
  T* sums;    // [rows, parts]
  T* out;     // [rows, parts, d_v]  not written where the maximum is -inf and the sum 0

  __device__ bool is_hidden(int64_t index) const {
    return maxima[index] == minus_infinity<T>() && sums[index] == T(0);
  }
};

// Queues what fills `partial`. Returns nullptr, or why it could not.
template <typename T>
const char* attend_parts(const FromFeaturesParams& params, const DeviceExecutor& executor,
                         const PartialRows<T>& partial);

}  // namespace ikattn::cuda
