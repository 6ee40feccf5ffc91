// Products of matrices on tensor cores, nearly as exact as float32: a factor is one or two splits
// of TF32 (1xTF32, 3xTF32), of 11 bits each. Operands lie in shared memory in slices of 64 columns,
// as float32 or in 16 bits, which one number of TF32 holds.
#pragma once

#include "attention/cuda/mma/fragments.h"
#include "attention/cuda/operands/math.h"

namespace ikattn::cuda {
namespace {

constexpr int kProductThreads = 128;
constexpr int kSliceColumns = 64;

// A lane's share of 16 rows and 16 columns of an operand:
//   element[i][c]   row g + 8 (i % 2), column 2t + c + 8 (i / 2)
// Which of a product's eight inner places has which column is of no account as long as both
// operands agree: a lane's two neighbours stand where the instruction's table has t and t + 4. So
// one block is A, and is B by columns; and sums are A of the next product.
struct Block {
  float element[4][2];
};
// Makes a block of a tile's sums, two of 8 columns side by side.
__device__ __forceinline__ Block block_of(const float (&sums)[2][4]) {
  Block block;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int c = 0; c < 2; ++c) block.element[i][c] = sums[i / 2][i % 2 * 2 + c];
  }
  return block;
}

// Number of TF32 splits of an element.
template <typename T>
constexpr int kTf32Splits = sizeof(T) == 2 ? 1 : 2;

// A block as kSplits splits of TF32 for each element: the remainder of one is cut off, or the next
// split.
template <int kSplits>
struct Tf32Block {
  uint32_t part[kSplits][4][2];

  Tf32Block() = default;
  __device__ __forceinline__ explicit Tf32Block(const Block& block) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float x = block.element[i][c], leading = kSplits > 1 ? tf32_part(x) : x;
        part[0][i][c] = __float_as_uint(leading);
        if constexpr (kSplits > 1) part[1][i][c] = __float_as_uint(x - leading);
      }
    }
  }
};

// Adds left right^T to the sums: 16 rows of left and 16 of right, along their 16 columns.
template <int kLeftParts, int kRightParts>
__device__ __forceinline__ void multiply(float (&sums)[2][4], const Tf32Block<kLeftParts>& left,
                                         const Tf32Block<kRightParts>& right) {
  // The small products first; small times small is below what float32 holds.
#pragma unroll
  for (int p = kLeftParts - 1; p >= 0; --p) {
#pragma unroll
    for (int q = kRightParts - 1; q >= 0; --q) {
      if (p + q > 1) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t (&low)[2] = left.part[p][2 * half];
        const uint32_t (&high)[2] = left.part[p][2 * half + 1];
        const uint32_t a[4] = {low[0], high[0], low[1], high[1]};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const uint32_t (&b)[2] = right.part[q][2 * half + n];
          mma_m16n8k8_tf32(sums[n], a, b[0], b[1]);
        }
      }
    }
  }
}

// Rows of kSliceColumns of T in shared memory.
template <typename T>
struct Slice {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4);
  static constexpr bool kIsFloat = sizeof(T) == 4;
  // Pitch of rows. In float32 lanes g, t read row g, columns 2t and 2t + 1, half a warp at a time,
  // from different banks. 16 bits are swizzled.
  static constexpr uint32_t kRowBytes = kIsFloat ? (kSliceColumns + 8) * 4 : kSliceColumns * 2;

  Shared<unsigned char> memory;

  __device__ static __forceinline__ uint32_t place(uint32_t row, uint32_t chunk) {
    return kIsFloat ? row * kRowBytes + chunk * 16 : swizzled(row, chunk, kRowBytes);
  }
  // Begins to copy kRows rows, from row0 of the slice on, that lie at multiples of 16 bytes;
  // zeros from the `count`-th row and the `columns`-th column on.
  template <int kRows>
  __device__ __forceinline__ void begin(int row0, const T* rows, int64_t stride, int64_t columns,
                                        int64_t count) const {
    constexpr int kWidth = 16 / sizeof(T), kChunks = kSliceColumns / kWidth;
    constexpr int kRowStep = kProductThreads / kChunks;
    static_assert(kRows % kRowStep == 0 && kRowStep % 8 == 0);
    // Unknown to the compiler, addresses are computed anew for each tile, and take no registers
    // between.
    const unsigned thread = unknown_to_compiler(threadIdx.x);
    const int row = thread / kChunks, chunk = thread % kChunks;
    const int64_t remaining = columns - chunk * kWidth;
    const int bytes = remaining <= 0       ? 0
                      : remaining < kWidth ? static_cast<int>(remaining * sizeof(T))
                                           : 16;
    const T* from = rows + row * stride + chunk * kWidth;
    uint32_t to = shared_address(memory) + place(row0 + row, chunk);
#pragma unroll 2
    for (int step = 0; step < kRows / kRowStep; ++step) {
      const bool there = bytes > 0 && row + step * kRowStep < count;
      cp_async_16(to, there ? from : rows, there ? bytes : 0);
      from += kRowStep * stride;
      to += kRowStep * kRowBytes;
    }
  }

  // Begins to copy rows of two sources side by side, 32 columns of each.
  template <int kRows>
  __device__ __forceinline__ void begin_halves(const T* left, const T* right, int64_t stride,
                                               int64_t count) const {
    constexpr int kHalf = kSliceColumns / 2;
    const bool is_right = threadIdx.x % (kSliceColumns * sizeof(T) / 16) >= kHalf * sizeof(T) / 16;
    begin<kRows>(0, is_right ? right - kHalf : left, stride, kSliceColumns, count);
  }

  // Loads 16 rows and 16 columns, from multiples of 16 on.
  __device__ __forceinline__ Block block(int row0, int column0) const {
    const int lane = threadIdx.x % 32;
    Block result;
    if constexpr (kIsFloat) {
      Shared<const float> from = shared_cast<float>(memory);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = row0 + lane / 4 + 8 * (i % 2),
                  column = column0 + lane % 4 * 2 + 8 * (i / 2);
        const float2 two = load_vector<float2>(from + row * (kRowBytes / 4) + column);
        result.element[i][0] = two.x;
        result.element[i][1] = two.y;
      }
    } else {
      uint32_t registers[4];
      ldmatrix_x4(registers, shared_address(memory) + row0 * kRowBytes +
                                 place(lane % 16, column0 / 8 + lane / 16));
#pragma unroll
      for (int i = 0; i < 4; ++i) set(result, i, registers[i]);
    }
    return result;
  }
  // Loads a block of the transposed slice: columns of this one are its rows.
  __device__ __forceinline__ Block transposed_block(int row0, int column0) const {
    const int lane = threadIdx.x % 32;
    Block result;
    if constexpr (kIsFloat) {
      Shared<const float> from = shared_cast<float>(memory);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int row = row0 + lane % 4 * 2 + c + 8 * (i / 2);
          const int column = column0 + lane / 4 + 8 * (i % 2);
          result.element[i][c] = from[row * (kRowBytes / 4) + column];
        }
      }
    } else {
      uint32_t registers[4];
      ldmatrix_x4_trans(registers, shared_address(memory) + row0 * kRowBytes +
                                       place(lane % 16, column0 / 8 + lane / 16));
#pragma unroll
      for (int i = 0; i < 4; ++i) set(result, i, registers[i / 2 + i % 2 * 2]);
    }
    return result;
  }
  // Return an element of 16 bits: its place, and the element. Eight rows further on it is in the
  // same place of its row.
  __device__ __forceinline__ static uint32_t place_of_element(int row, int column) {
    return place(row, column / 8) + column % 8 * 2;
  }
  __device__ __forceinline__ float at(uint32_t place_of_element) const {
    Shared<const uint16_t> own = shared_cast<uint16_t>(memory + place_of_element);
    const uint16_t bits = own[0];
    return to_float(T{bits});
  }
  // Loads two neighbours, from an even column on.
  __device__ __forceinline__ float2 pair(int row, int column) const {
    const uint32_t at = place(row, column * sizeof(T) / 16) + column * sizeof(T) % 16;
    if constexpr (kIsFloat) {
      return load_vector<float2>(shared_cast<float>(memory + at));
    } else {
      Shared<const uint32_t> two = shared_cast<uint32_t>(memory + at);
      return unpack<T>(two[0]);
    }
  }

 private:
  __device__ static __forceinline__ void set(Block& block, int i, uint32_t two) {
    if constexpr (!kIsFloat) {
      const float2 both = unpack<T>(two);
      block.element[i][0] = both.x;
      block.element[i][1] = both.y;
    }
  }
};

}  // namespace
}  // namespace ikattn::cuda
