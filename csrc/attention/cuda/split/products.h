// Numbers of two parts as operands of mma.sync, and products of these.
#pragma once

#include "attention/cuda/mma/tile_copy.h"
#include "attention/cuda/operands/operands.h"

namespace ikattn::cuda {
namespace {

// Splits two floats into two operands of Half each: exact where the floats are of 23 bits and lie
// in the range of Half.
__device__ __forceinline__ void split_two(float first, float second, uint32_t& high,
                                          uint32_t& low) {
  high = pack_f16x2(first, second);
  const float2 rounded = unpack<Half>(high);
  low = pack_f16x2(first - rounded.x, second - rounded.y);
}

// FragmentAddresses in one register: of those of a row the first four differ in two bits. Tiles
// begin at multiples of 128 bytes.
class SplitAddresses {
 public:
  // Returns the places of left operands, and of right ones that lie [inner][column].
  __device__ static __forceinline__ SplitAddresses of_rows(uint32_t start, uint32_t row_bytes) {
    const uint32_t lane = threadIdx.x % 32;
    return SplitAddresses(start + swizzled(lane % 16, lane / 16, row_bytes));
  }
  // Returns the places of right operands that lie [column][inner].
  __device__ static __forceinline__ SplitAddresses of_columns(uint32_t start, uint32_t row_bytes) {
    const uint32_t lane = threadIdx.x % 32;
    return SplitAddresses(start + swizzled(lane % 8 + 8 * (lane / 16), lane / 8 % 2, row_bytes));
  }
  // Returns the places so many bytes further on, a multiple of 128. They are computed anew where
  // they are asked for: no register holds the difference.
  __device__ __forceinline__ SplitAddresses behind(uint32_t bytes) const {
    return SplitAddresses(unknown_to_compiler(place_ + bytes));
  }
  // Returns the place of the k-th sixteen columns.
  __device__ __forceinline__ uint32_t at(int k) const {
    return (place_ ^ static_cast<uint32_t>(k % 4 * 32)) + k / 4 * 128;
  }

 private:
  __device__ __forceinline__ explicit SplitAddresses(uint32_t place) : place_(place) {}
  uint32_t place_;
};

struct SplitFragment {
  Fragment high, low;
};
// Loads both operands of a tile: low ones are `distance` bytes behind high ones.
__device__ __forceinline__ SplitFragment load_split(uint32_t row_address, uint32_t distance) {
  return {load_fragment(row_address), load_fragment(row_address + distance)};
}

// Adds a b, but for low times low, which is below what float32 holds: the small products into
// `small`, the large one into `large`.
__device__ __forceinline__ void mma_split(float (&small)[4], float (&large)[4],
                                          const SplitFragment& a, const uint32_t* high,
                                          const uint32_t* low) {
  mma_m16n8k16<Half>(small, a.low.registers, high[0], high[1]);
  mma_m16n8k16<Half>(small, a.high.registers, low[0], low[1]);
  mma_m16n8k16<Half>(large, a.high.registers, high[0], high[1]);
}

// Computes sums = left right over kCount fragments of the inner axis, 16 rows and 16 columns; right
// lies [column][inner], its low part `distance` bytes behind.
template <int kCount, typename Left>
__device__ __forceinline__ void multiply_split_columns(float (&sums)[2][4], const Left& left,
                                                       const SplitAddresses& right,
                                                       uint32_t distance) {
  float small[2][4] = {};
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) sums[n][c] = 0;
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const SplitFragment a = left(k), b = load_split(right.at(k), distance);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      mma_split(small[n], sums[n], a, b.high.registers + 2 * n, b.low.registers + 2 * n);
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) sums[n][c] += small[n][c];
  }
}

// Computes sums = sums * ratios + left right, 16 on the inner axis; right lies [inner][column].
// Tensor cores round towards zero what they add up, which over many tokens is more than float32
// errs: they add 16, and the sums of all are rounded to nearest.
//   ratios: of a thread's two rows
template <int kColumnTiles>
__device__ __forceinline__ void add_split_rows(float (&sums)[kColumnTiles][4],
                                               const float (&ratios)[2], const SplitFragment& left,
                                               const SplitAddresses& right, uint32_t distance) {
#pragma unroll
  for (int n = 0; n < kColumnTiles; n += 2) {
    if (n % 4 == 0) __syncwarp();  // or all columns would be loaded first, and registers spill
    uint32_t high[4], low[4];
    ldmatrix_x4_trans(high, right.at(n / 2));
    ldmatrix_x4_trans(low, right.at(n / 2) + distance);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      float part[4] = {};
      mma_split(part, part, left, high + 2 * tile, low + 2 * tile);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sums[n + tile][c] = sums[n + tile][c] * ratios[c / 2] + part[c];
      }
    }
  }
}

// Returns the quotient of two powers of two, 0 where it is none of float32.
__device__ __forceinline__ float quotient_of_powers(float over, float under) {
  const int exponent = static_cast<int>(__float_as_uint(over) >> 23) -
                       static_cast<int>(__float_as_uint(under) >> 23);
  return exponent < -126 ? 0.0f : __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
}

// Powers of two that make a thread's two rows of left operands fit in Half, by the largest number
// of a row so far, and the factors that its sums have been multiplied with since. They depend on
// nothing but the row, and a sum has an error of 2^-40 of its largest term, as that counts in the
// end, at most where it leaves Half.
class RowFits {
 public:
  // Makes an operand of pairs, and multiplies `ratios` by the factors of the sums so far. All lanes
  // of the warp call it.
  __device__ __forceinline__ SplitFragment put(const float (&x)[2][4], float (&ratios)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = 0;  // passes over NaN
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int c = 2 * half; c < 2 * half + 2; ++c) {
          most = fabsf(x[n][c]) > most ? fabsf(x[n][c]) : most;
        }
      }
      most = max_of_lanes<4>(most);
      if (ratios[half] < 1) raise(half, ratios[half]);
      if (most * fits_[half] < 32768.0f) continue;
      const float fit = fitting_power(most);
      ratios[half] *= quotient_of_powers(fit, fits_[half]);
      fits_[half] = fit;
    }
    SplitFragment operand;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        split_two(x[n][2 * half] * fits_[half], x[n][2 * half + 1] * fits_[half],
                  operand.high.registers[2 * n + half], operand.low.registers[2 * n + half]);
      }
    }
    return operand;
  }
  // Returns the unit of a row's sums.
  __device__ __forceinline__ float unit(int half) const {
    return quotient_of_powers(1.0f, fits_[half]);
  }

 private:
  // Raises a row's power of two. Earlier sums count as little as ratio says, which leaves room for
  // later ones.
  __device__ __forceinline__ void raise(int half, float& ratio) {
    const int faded = 126 - static_cast<int>(__float_as_uint(ratio) >> 23);
    const int room = 253 - static_cast<int>(__float_as_uint(fits_[half]) >> 23);
    const int steps = faded < room ? faded : room;
    const float power = __uint_as_float(static_cast<uint32_t>(127 + steps) << 23);
    fits_[half] *= power;
    ratio *= power;
  }

  float fits_[2] = {0x1p126f, 0x1p126f};  // the largest power: smaller numbers need no digits
};

// Begins to copy kRows rows, of kWidth columns, of both parts; zeros from the `count`-th on. A
// thread has one piece of every kRowStep-th row.
template <int kRows, int kWidth>
__device__ __forceinline__ void copy_split(uint32_t base, const Half* high, const Half* low,
                                           int64_t first, int count) {
  constexpr int kPieces = kWidth / 8, kRowStep = kFoldedThreads / kPieces;
  static_assert(kRowStep % 8 == 0 && kRows % kRowStep == 0);
  const int thread = static_cast<int>(unknown_to_compiler(threadIdx.x));
  const int row = thread / kPieces;
  const uint32_t place = base + swizzled(row, thread % kPieces, 2 * kWidth);
  const int64_t from = (first + row) * kWidth + thread % kPieces * 8;
#pragma unroll
  for (int step = 0; step < kRows; step += kRowStep) {
    const bool there = row + step < count;
    const int64_t at = there ? from + step * kWidth : 0;
    cp_async_16(place + step * (2 * kWidth), high + at, there ? 16 : 0);
    cp_async_16(place + (kRows + step) * (2 * kWidth), low + at, there ? 16 : 0);
  }
}

// Begins to copy numbers of kTokens tokens, from the first of each array on.
template <int kTokens, int kCount>
__device__ __forceinline__ void copy_token_numbers(uint32_t base,
                                                   const float* const (&arrays)[kCount]) {
#pragma unroll
  for (int which = 0; which < kCount; ++which) {
    const int index = static_cast<int>(threadIdx.x) - which * (kTokens / 4);
    if (index < 0 || index >= kTokens / 4) continue;
    cp_async_16(base + which * (kTokens * 4) + index * 16, arrays[which] + index * 4);
  }
}

}  // namespace
}  // namespace ikattn::cuda
