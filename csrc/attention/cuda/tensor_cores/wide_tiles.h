// Slices of wide rows: heads of more than 128 features, or columns of the value.
//
// Rows are cut into slices of 128 columns. A block owns 64 rows and one slice of what is added up
// for them, and passes along the tiles of 64 rows of the other side. Of a tile it takes one slice
// after the other, of its own rows and of the tile's, until it knows all scores; the last slice of
// the tile is what the pairs are multiplied with. So nothing that a block holds depends on how wide
// rows are; scores are made once for every slice of the results.
#pragma once

#include "attention/cuda/tensor_cores/pairs.h"

namespace ikattn::cuda {
namespace {

constexpr int kSlice = 128;

__host__ __device__ constexpr int slices_of(int64_t columns) {
  return static_cast<int>((columns + kSlice - 1) / kSlice);
}

// In shared memory: stages of a slice of the block's rows and one of the tile's, and for two tiles
// up to three numbers of each of their rows.
struct WideLayout {
  static constexpr uint32_t kRight =
      kStep * 2 * kSlice;  // features of the tile; they lie behind the block's
  static constexpr uint32_t kStage = 2 * kRight;
  static constexpr uint32_t kNumbers = kStages * kStage, kNumbersOfTile = 3 * kStep * 4;
  static constexpr int64_t kBytes = kNumbers + 2 * int64_t{kNumbersOfTile};

  __device__ __forceinline__ static uint32_t numbers_of(int tile) {
    return kNumbers + tile % 2 * kNumbersOfTile;
  }
};

// Begins to copy a slice of kStep rows; zeros beyond `count` rows and `columns` columns.
template <typename T>
__device__ __forceinline__ void copy_slice(uint32_t place, const T* rows, int64_t stride,
                                           int columns, int slice, int count) {
  const RowCopy<kSlice> copy(stride, columns - slice * kSlice);
  copy.template begin<kStep>(place, copy.source(rows + slice * kSlice), count);
}

// Begins to copy the numbers of a tile, from the first of each array on.
template <int kCount>
__device__ __forceinline__ void copy_numbers(uint32_t place, const float* const (&arrays)[kCount]) {
  static_assert(kCount <= 3);
#pragma unroll
  for (int which = 0; which < kCount; ++which) {
    const int index = static_cast<int>(threadIdx.x) - which * (kStep / 4);
    if (index < 0 || index >= kStep / 4) continue;
    cp_async_16(place + which * (kStep * 4) + index * 16, arrays[which] + index * 4);
  }
}

// Calls visit(tile, slice, stage) for the slices of all tiles, when what begin(tile, slice, stage)
// has begun to copy is there; stage: an address. Between two visits it synchronises the block.
template <typename Begin, typename Visit>
__device__ __forceinline__ void pass_along(uint32_t base, TileRange tiles, int slices,
                                           const Begin& begin, const Visit& visit) {
  uint32_t stage = base, other = base + WideLayout::kStage;
  if (tiles.first < tiles.end) begin(tiles.first, 0, stage);
  cp_async_commit();
  for (int tile = tiles.first; tile < tiles.end; ++tile) {
#pragma unroll 1
    for (int slice = 0; slice < slices; ++slice) {
      cp_async_wait<0>();
      __syncthreads();  // the slice is here, and nobody reads the other stage
      if (slice + 1 < slices) {
        begin(tile, slice + 1, other);
      } else if (tile + 1 < tiles.end) {
        begin(tile + 1, 0, other);
      }
      cp_async_commit();
      visit(tile, slice, stage);
      const uint32_t next = other;
      other = stage;
      stage = next;
    }
  }
}

// A warp's 16 rows of a product with the 64 rows of a tile.
using TileSums = float[kStep / 16][2][4];

__device__ __forceinline__ void clear(TileSums& sums) {
#pragma unroll
  for (int chunk = 0; chunk < kStep / 16; ++chunk) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[chunk][i / 4][i % 4] = 0;
  }
}

// Returns which sums a chunk takes. A loop over a tile's chunks is unrolled where registers hold
// all sums; else it moves the sums of the next chunk to the front.
template <bool kRolls>
__device__ __forceinline__ constexpr int held_at(int chunk) {
  return kRolls ? 0 : chunk;
}
template <bool kRolls>
__device__ __forceinline__ void pass_by(TileSums& sums) {
  if constexpr (kRolls) {
#pragma unroll
    for (int chunk = 1; chunk < kStep / 16; ++chunk) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[chunk - 1][i / 4][i % 4] = sums[chunk][i / 4][i % 4];
    }
  }
}

struct SliceProducts {
  FragmentAddresses left, columns, rows;

  __device__ __forceinline__ SliceProducts()
      : left(FragmentAddresses::of_rows(threadIdx.x / 32 * (16 * 2 * kSlice), 2 * kSlice)),
        columns(FragmentAddresses::of_columns(WideLayout::kRight, 2 * kSlice)),
        rows(FragmentAddresses::of_rows(WideLayout::kRight, 2 * kSlice)) {}

  // Adds to sums the products of the warp's rows of the block's slice and the rows of the tile's.
  template <typename T>
  __device__ __forceinline__ void add_slice(TileSums& sums, uint32_t stage) const {
#pragma unroll
    for (int k = 0; k < kSlice / 16; ++k) {
      const Fragment a = load_fragment(stage + left.at<2 * kSlice>(0, k));
#pragma unroll
      for (int chunk = 0; chunk < kStep / 16; ++chunk) {
        const Fragment b = load_fragment(stage + columns.at<2 * kSlice>(chunk, k));
        mma_m16n8k16<T>(sums[chunk][0], a.registers, b.registers[0], b.registers[1]);
        mma_m16n8k16<T>(sums[chunk][1], a.registers, b.registers[2], b.registers[3]);
      }
    }
  }
  // Adds to sums the products of pairs, 16 rows of the tile, and these rows of the tile's slice.
  template <typename T>
  __device__ __forceinline__ void add_pairs(float (&sums)[1][kSlice / 8][4],
                                            const Fragment (&pairs)[1], uint32_t stage,
                                            int chunk) const {
    multiply_by_rows<T>(sums, pairs, [&](int n) { return stage + rows.at<2 * kSlice>(chunk, n); });
  }
};

}  // namespace
}  // namespace ikattn::cuda
