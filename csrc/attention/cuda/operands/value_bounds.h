// Bounds of values, by which operands of 16 bits are scaled.
#pragma once

#include "attention/cuda/operands/operands.h"

namespace ikattn::cuda {

// Keys that some query of a head of the mask sees, by mask and causality. What others hold may be
// anything, and must not decide how numbers are scaled.
struct SeenKeys {
  uint32_t* seen = nullptr;    // [batches, heads, S], 0: hidden; nullptr: there is no mask
  int batches = 1, heads = 1;  // sizes of the mask
  // Rows of the mask, and of a block; one where all rows are alike. A block looks at some, for a
  // grid has 65535 blocks along y.
  int64_t rows = 1, rows_each = 256;

  SeenKeys() = default;
  SeenKeys(const AttentionParams& params, const DeviceExecutor& executor);

  // Returns whether a query of the key head sees key j.
  __device__ __forceinline__ bool sees(const AttentionParams& params, int64_t b, int64_t key_head,
                                       int64_t j) const {
    if (seen == nullptr) return true;
    const int64_t group = heads == 1 ? 1 : params.H / params.key_heads;
    const int64_t first = (batches == 1 ? 0 : b) * heads + (heads == 1 ? 0 : key_head * group);
    uint32_t any = 0;
    for (int64_t h = 0; h < group; ++h) any |= seen[(first + h) * params.S + j];
    return any != 0;
  }
};

// Bits of the largest norm of a value, of keys that are not hidden. The kernel that chooses the
// form of a head makes them.
struct ValueBounds {
  SeenKeys keys;
  uint32_t* of_all = nullptr;     // [B, key_heads]  nullptr: not wanted
  uint32_t* of_weight = nullptr;  // likewise, of keys whose folded features are not zero in Half
};

}  // namespace ikattn::cuda
