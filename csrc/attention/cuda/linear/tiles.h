// Tokens in registers, where 32 of a warp are two A operands.
#pragma once

#include "attention/cuda/linear/linear.h"
#include "attention/cuda/tensor_cores/blocks.h"

namespace ikattn::cuda {
namespace {

// Loads 16 columns of a warp's rows; load(row, column): two neighbours.
template <typename Load>
__device__ __forceinline__ void load_rows(Fragment (&fragments)[2], const Load& load) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      fragments[m].registers[i] = load(m * 16 + lane / 4 + i % 2 * 8, lane % 4 * 2 + i / 2 * 8);
    }
  }
}

// Loads a chunk of the features of the tokens at `phi`, of which `count` are left; zeros beyond
// these, and of chunks that there are not.
__device__ __forceinline__ void load_chunk(Fragment (&fragments)[2], const Half* phi, int count,
                                           const FeatureChunks& chunks, int chunk) {
  const int first = chunk < chunks.count ? chunks.column(chunk) : 0;
  if (chunk >= chunks.count) count = 0;
  load_rows(fragments, [&](int row, int column) {
    return row < count ? load_vector<uint32_t>(phi + row * int64_t{chunks.width} + first + column)
                       : 0u;
  });
}

}  // namespace
}  // namespace ikattn::cuda
