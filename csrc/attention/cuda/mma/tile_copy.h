// Tiles of 16-bit rows in shared memory: how blocks of four warps copy them, two stages in flight,
// where their fragments lie, and products of these by mma.sync.
#pragma once

#include <type_traits>

#include "attention/cuda/mma/fragments.h"
#include "attention/cuda/operands/math.h"

namespace ikattn::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kFoldedThreads = kWarps * 32;
constexpr int kStep = 64;  // tokens that a block passes by at a time
constexpr int kStages = 2;

// Copies rows of 16-bit elements, kWidth of them in shared memory: a thread takes one 16-byte
// column, and every kRowStep-th row of it. The rows' places differ by constants: kRowStep is a
// multiple of 8, the period of the swizzle.
template <int kWidth>
struct RowCopy {
  static constexpr int kRowStep = kFoldedThreads / (kWidth / 8);
  static_assert(kRowStep % 8 == 0);

  int64_t stride;  // elements from row to row
  uint32_t place;
  int row, column;  // place of the thread
  bool inside;      // false: beyond the columns that there are; zeros

  __device__ __forceinline__ RowCopy(int64_t row_stride, int columns)
      : stride(row_stride), row(threadIdx.x / (kWidth / 8)) {
    const int chunk = threadIdx.x % (kWidth / 8);
    place = swizzled(row, chunk, 2 * kWidth);
    column = chunk * 8;
    inside = column < columns;
  }
  // Returns the thread's place in an array whose rows begin at `rows`.
  template <typename T>
  __device__ __forceinline__ const T* source(const T* rows) const {
    return rows + row * stride + (inside ? column : 0);
  }
  // Begins to copy kRows rows from a thread's place; of those from the `count`-th on, zeros.
  template <int kRows, typename T>
  __device__ __forceinline__ void begin(uint32_t base, const T* from, int count) const {
#pragma unroll
    for (int step = 0; step < kRows / kRowStep; ++step) {
      const bool there = inside && row + step * kRowStep < count;
      cp_async_16(base + place + step * (kRowStep * 2 * kWidth),
                  there ? from + step * kRowStep * stride : from, there ? 16 : 0);
    }
  }
};

// Addresses at which a lane reads fragments of a 16-row chunk: column fragment k (32 bytes) of
// chunk c is at place[k % 4] + k / 4 * 128 + c * 16 rows, the latter two known when compiling.
struct FragmentAddresses {
  uint32_t place[4];

  __device__ FragmentAddresses(uint32_t start, int row, int half, uint32_t row_bytes) {
#pragma unroll
    for (int k = 0; k < 4; ++k) place[k] = start + swizzled(row, 2 * k + half, row_bytes);
  }
  // Returns the places of A, and of B that lies [k][n] and is read with trans.
  __device__ static __forceinline__ FragmentAddresses of_rows(uint32_t start, uint32_t row_bytes) {
    const int lane = threadIdx.x % 32;
    return FragmentAddresses(start, lane % 16, lane / 16, row_bytes);
  }
  // Returns the places of B that lies [n][k].
  __device__ static __forceinline__ FragmentAddresses of_columns(uint32_t start,
                                                                 uint32_t row_bytes) {
    const int lane = threadIdx.x % 32;
    return FragmentAddresses(start, lane % 8 + 8 * (lane / 16), lane / 8 % 2, row_bytes);
  }
  template <int kRowBytes>
  __device__ __forceinline__ uint32_t at(int chunk, int k) const {
    return place[k % 4] + k / 4 * 128 + chunk * 16 * kRowBytes;
  }
};

// Four registers of a lane: an operand A, or two tiles of B side by side.
struct Fragment {
  uint32_t registers[4];

  // Puts the n-th of two tiles of sums that, side by side, are this A.
  template <typename T>
  __device__ __forceinline__ void put(int n, const float (&tile)[4]) {
    registers[2 * n] = pack<T>(tile[0], tile[1]);
    registers[2 * n + 1] = pack<T>(tile[2], tile[3]);
  }
};
__device__ __forceinline__ Fragment load_fragment(uint32_t row_address) {
  Fragment fragment;
  ldmatrix_x4(fragment.registers, row_address);
  return fragment;
}

// Adds left(m, k) right(k) to sums[m], over kCount fragments of the inner axis; 16 columns of
// right, which lies [column][inner] at right(k).
template <typename T, int kCount, int kRowTiles, typename Left, typename Address>
__device__ __forceinline__ void multiply_by_columns(float (&sums)[kRowTiles][2][4],
                                                    const Left& left, const Address& right) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const Fragment b = load_fragment(right(k));
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const Fragment a = left(m, k);
      mma_m16n8k16<T>(sums[m][0], a.registers, b.registers[0], b.registers[1]);
      mma_m16n8k16<T>(sums[m][1], a.registers, b.registers[2], b.registers[3]);
    }
  }
}

// Adds left[m] right to sums[m], 16 on the inner axis; right lies [inner][column], 16 columns of it
// at right(n).
template <typename T, int kColumnTiles, int kRowTiles, typename Address>
__device__ __forceinline__ void multiply_by_rows(float (&sums)[kRowTiles][kColumnTiles][4],
                                                 const Fragment (&left)[kRowTiles],
                                                 const Address& right) {
#pragma unroll
  for (int n = 0; n < kColumnTiles / 2; ++n) {
    uint32_t b[4];
    ldmatrix_x4_trans(b, right(n));
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      mma_m16n8k16<T>(sums[m][2 * n], left[m].registers, b[0], b[1]);
      mma_m16n8k16<T>(sums[m][2 * n + 1], left[m].registers, b[2], b[3]);
    }
  }
}

// Makes zero of the value rows of poisoned keys, whose effect is in their eps. Others may read them
// after a barrier.
template <typename T, int kCount, int kThreads = kFoldedThreads>
__device__ __forceinline__ void clean_values(Shared<unsigned char> tile) {
  Shared<uint16_t> values = shared_cast<uint16_t>(tile);
  for (int index = threadIdx.x; index < kCount; index += kThreads) {
    const uint16_t bits = values[index];
    if (!is_finite(to_float(T{bits}))) values[index] = 0;
  }
}

}  // namespace
}  // namespace ikattn::cuda
