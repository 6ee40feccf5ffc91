// Blocks that make the moments of a part of a head's tokens.
#pragma once

#include "attention/cuda/linear/parts.h"
#include "attention/cuda/tensor_cores/blocks.h"

namespace ikattn::cuda {

constexpr int kMomentWarps = 8;
constexpr int kEntryRows = 4;                                       // a's of a warp
constexpr int kPairsTogether = kMomentWarps * kEntryRows / kChunk;  // pairs of chunks in a block

namespace {

// Key head and part of a block.
struct PartBlock {
  int64_t bk, first, end;  // key head, tokens
  int part;

  __device__ __forceinline__ PartBlock(const LinearTokens& tokens, const Shares& shares,
                                       unsigned index)
      : bk(index / shares.count), part(static_cast<int>(index % shares.count)) {
    first = shares.first_of(part);
    end = min(first + shares.tokens, tokens.N);
  }
  __device__ __forceinline__ int tiles() const {
    return static_cast<int>((end - first + kStep - 1) / kStep);
  }
};

// Stores the moments of a pair of chunks, of a's from the a0-th on: sum(r, n, i), of the r-th a the
// i-th of tile n of 8 columns.
template <typename Sum>
__device__ __forceinline__ void store_moments(const TokenParts& parts, const FeatureChunks& chunks,
                                              const PartBlock& at, int slice, int pair, int a0,
                                              const Sum& sum) {
  if (pair >= chunks.pairs()) return;
  const int lane = threadIdx.x % 32;
  float* rows =
      parts.moments +
      (((at.part * parts.heads + at.bk) * parts.slices + slice) * int64_t{chunks.pairs()} + pair) *
          (kPairEntries * kMomentColumns);
#pragma unroll
  for (int r = 0; r < kEntryRows; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* entry = rows + ((a0 + r) * kChunk + lane / 4 + 8 * half) * kMomentColumns;
      for_pairs<kMomentColumns>([&](int column, int n) {
        store_vector(entry + column, make_float2(sum(r, n, 2 * half), sum(r, n, 2 * half + 1)));
      });
    }
  }
}

}  // namespace
}  // namespace ikattn::cuda
