// Bounds of values, and their conversion to 16 bits.
#pragma once

#include "attention/cuda/operands/value_bounds.h"

namespace ikattn::cuda {

// Takes memory for bounds where they are needed, and finds the keys that are seen.
const char* prepare_bounds(const AttentionParams& params, const DeviceExecutor& executor,
                           const Route& route, bool for_backward, ValueBounds& bounds);

// folded.value, the value as the kernels read it, with bounds that are made.
const char* place_values(const AttentionParams& params, const DeviceExecutor& executor,
                         const Route& route, const ValueBounds& bounds, FoldedTokens& folded);

}  // namespace ikattn::cuda
