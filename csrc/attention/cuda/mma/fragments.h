// Addresses of 16-bit elements in shared memory, for copies and for ldmatrix.
#pragma once

#include "support/cuda/intrinsics.h"

namespace ikattn::cuda {
namespace {

// Returns the place of a chunk in rows of 128 n bytes; the 16-byte chunk is swizzled by the row, so
// that eight rows of one chunk lie in different banks.
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t chunk, uint32_t row_bytes) {
  return row * row_bytes + ((chunk & ~7u) | ((chunk ^ row) & 7u)) * 16;
}

}  // namespace
}  // namespace ikattn::cuda
