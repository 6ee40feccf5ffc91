// Angles of tokens of 16 bits by wgmma, for short calls on Hopper. A warp has 16 of the 64 tokens
// of its warpgroup, in registers as A; frequencies lie in shared memory as B, where they stay.
#pragma once

#include "attention/cuda/features/angle_operands.h"
#include "attention/cuda/mma/fragments.h"
#include "support/cuda/narrow_products.h"

namespace ikattn::cuda {

constexpr int kGroupRows = 64;      // tokens of a warpgroup at a time
constexpr int kBoxDimensions = 64;  // dimensions of a slice: rows of 128 bytes
constexpr uint32_t kSliceBytes = kGroupRows * kBoxDimensions * 2;  // a slice of these tokens

namespace {

// Begins to copy a head's frequencies: of each number F rows. With kSetsOfRows = 2 there are
// w1 and then w2 of each kRun frequencies, which one set of frequencies stands for, too. By the
// whole block.
//   to [slices][numbers][F]   sets: that there are
template <typename T, int F, int kSetsOfRows, int kRun, int kThreads>
__device__ __forceinline__ void begin_frequencies(const SplitFrequencies& split, int64_t which,
                                                  int sets, uint32_t to) {
  constexpr int kBlock = kAngleFrequencies * kBoxDimensions;
  const T* from = static_cast<const T*>(split.data) +
                  which * (split.pieces * split.slices * kPlanesOf<T> * sets) * kBlock;
  for (int index = threadIdx.x; index < split.slices * 2 * F * 8; index += kThreads) {
    const int chunk = index % 8, row = index / 8 % F, number = index / 8 / F % 2;
    const int slice = index / 8 / F / 2;
    const int set = kSetsOfRows == 1 || sets == 1 ? 0 : row / kRun % 2;
    const int m = row / (kSetsOfRows * kRun) * kRun + row % kRun;
    const int plane = (m / kAngleFrequencies * split.slices + slice) * kPlanesOf<T> + number;
    cp_async_16(
        to + (slice * 2 + number) * (F * 128) + swizzled(row, chunk, 128),
        from + (plane * sets + set) * kBlock + m % kAngleFrequencies * kBoxDimensions + chunk * 8);
  }
  cp_async_commit();
}

// A warp's 16 tokens of the 64 that its warpgroup takes. It copies them itself.
template <typename T>
class WarpTokens {
 public:
  // Takes `base`, where the tokens of all warpgroups begin in shared memory.
  __device__ __forceinline__ WarpTokens(uint32_t base, int slices) : base_(base), slices_(slices) {}

  // Begins to copy those of a head from the `first`-th of its warpgroup on; zeros beyond the
  // last.
  //   x_head: of those that tokens have
  __device__ __forceinline__ void begin(const FeatureSource& source, int64_t b, int64_t x_head,
                                        int first) const {
    begin(source, rows_of(source, b, x_head), first);
  }
  // Begins to copy tokens from `first` on of the rows that rows_of() returns.
  __device__ __forceinline__ void begin(const FeatureSource& source, const T* x, int first) const {
    const unsigned thread = unknown_to_compiler(threadIdx.x);
    const int lane = thread % 32, chunk = lane % 8;
    const int row = first + static_cast<int>(thread / 32 % 4 * 16) + lane / 8;
    const int rows = static_cast<int>(source.N) - row;  // rows that are left, with this one
    const int64_t step_size = 4 * source.x.stride[2];
    uint32_t to = place_of(thread) + swizzled(lane / 8, chunk, 128);
#pragma unroll 1
    for (int slice = 0; slice < slices_; ++slice, to += kSliceBytes) {
      const int column = slice * kBoxDimensions + chunk * 8;
      const int columns = max(0, min(static_cast<int>(source.d) - column, 8));
      const T* from = x + row * source.x.stride[2] + column;
#pragma unroll
      for (int step = 0; step < 16; step += 4) {
        const bool there = columns > 0 && step < rows;
        // Four rows further on, the chunk is swizzled by another bit.
        const uint32_t place = (to + step * 128) ^ (step % 8 == 0 ? 0 : 64);
        cp_async_16(place, there ? from : x, there ? columns * 2 : 0);
        from += step_size;
      }
    }
    cp_async_commit();
  }
  // Returns where the rows of a head's tokens begin.
  __device__ __forceinline__ static const T* rows_of(const FeatureSource& source, int64_t b,
                                                     int64_t x_head) {
    return static_cast<const T*>(source.x.data) + b * source.x.stride[0] +
           x_head * source.x.stride[1];
  }
  // Waits for all copies of the warp.
  __device__ __forceinline__ void wait() const {
    cp_async_wait<0>();
    __syncwarp();
  }
  // Loads a slice of the tokens as A. Others may be copied in their place after a __syncwarp.
  __device__ __forceinline__ void load(int slice, uint32_t (&x)[4][4]) const {
    const unsigned thread = unknown_to_compiler(threadIdx.x);
    const uint32_t first = place_of(thread) + swizzled(thread % 16, thread / 16 % 2, 128);
#pragma unroll
    for (uint32_t k = 0; k < 4; ++k) {
      // The next chunks of a row differ by these bits, whatever its swizzle was.
      ldmatrix_x4(x[k], (first ^ (k * 32)) + slice * kSliceBytes);
    }
  }

 private:
  // Returns where the slices of a thread's warp begin.
  __device__ __forceinline__ uint32_t place_of(unsigned thread) const {
    return base_ + thread / 128 * slices_ * kSliceBytes + thread / 32 % 4 * (16 * 128);
  }

  uint32_t base_;
  int slices_;
};

// Begins angles = x times a slice of 2 kCount rows of frequencies, or adds to them.
//   w: where these rows of the first number are, those of the second being number_bytes on
template <typename T, int kCount>
__device__ __forceinline__ void begin_angles(const uint32_t (&x)[4][4], uint32_t w,
                                             uint32_t number_bytes, bool adds,
                                             float (&angles)[kCount]) {
  const uint64_t first = wgmma_operand(w);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    // The small numbers first.
#pragma unroll
    for (int number = 1; number >= 0; --number) {
      const uint64_t right = wgmma_operand_after(first, k * 32 + number * number_bytes);
      const bool accumulate = adds || number == 0 || k > 0;
      if constexpr (kCount < 32) {
        wgmma_narrow<T>(angles, x[k], right, accumulate);
      } else {
        wgmma_by_columns<T>(angles, x[k], right, accumulate);
      }
    }
  }
}

}  // namespace
}  // namespace ikattn::cuda
