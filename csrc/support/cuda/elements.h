// Elements of any storage type in the compute type.
#pragma once

#include "support/array.h"
#include "support/cuda/float16.h"
#include "support/cuda/intrinsics.h"
#include "support/cuda/launch.h"

namespace ikattn::cuda {
namespace {

// Loads one element of any storage type.
template <typename T>
__device__ __forceinline__ T load_element(const Array& array, int64_t offset) {
  switch (array.type) {
    case ElementType::kFloat64:
      return static_cast<T>(static_cast<const double*>(array.data)[offset]);
    case ElementType::kFloat32:
      return static_cast<T>(static_cast<const float*>(array.data)[offset]);
    case ElementType::kBFloat16:
      return convert<T>(static_cast<const BFloat16*>(array.data)[offset]);
    default:
      return convert<T>(static_cast<const Half*>(array.data)[offset]);
  }
}

template <typename T>
__device__ __forceinline__ void store_element(const Array& array, int64_t offset, T value) {
  switch (array.type) {
    case ElementType::kFloat64:
      static_cast<double*>(array.data)[offset] = static_cast<double>(value);
      break;
    case ElementType::kFloat32:
      static_cast<float*>(array.data)[offset] = static_cast<float>(value);
      break;
    case ElementType::kBFloat16:
      static_cast<BFloat16*>(array.data)[offset] = convert<BFloat16>(value);
      break;
    default:
      static_cast<Half*>(array.data)[offset] = convert<Half>(value);
  }
}

// Stores 16 columns of a row at `row`, of which a product's lanes have two of every eight, tile0
// and tile1: four neighbours from each lane, so that they are whole sectors. All lanes of the warp
// call it.
__device__ __forceinline__ void store_tiles(Half* row, bool there, uint32_t tile0, uint32_t tile1) {
  const int t = threadIdx.x % 4;
  const bool odd = t % 2 != 0;
  const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? tile0 : tile1, 1);
  if (!there) return;
  uint2 four;
  four.x = odd ? other : tile0;
  four.y = odd ? tile1 : other;
  store_vector(row + (odd ? 8 : 0) + t / 2 * 4, four);
}

// Rows of float32 or 16 bits that the lanes of a product's sums store: each has two neighbours of
// every eight columns. What decides how they are stored is asked once for a row, not for a pair:
// the code of every pair is there as often as pairs are.
class RowPairs {
 public:
  __device__ __forceinline__ explicit RowPairs(const Array& rows) : rows_(rows) {
    // Every pair from an even column on lies at a multiple of its size.
    const int64_t pair_bytes = rows.type == ElementType::kFloat32 ? 8 : 4;
    is_together_ = rows.stride[3] == 1 &&
                   ((rows.stride[0] | rows.stride[1] | rows.stride[2]) & 1) == 0 &&
                   reinterpret_cast<uintptr_t>(rows.data) % pair_bytes == 0;
  }
  // Stores kWidth columns from the even column `first` on, as far as below `columns`, of the row at
  // `offset`; pair(n): of the n-th eight columns.
  template <int kWidth, typename Pair>
  __device__ __forceinline__ void store(int64_t offset, int64_t first, int64_t columns,
                                        const Pair& pair) const {
    const int64_t own = first + threadIdx.x % 4 * 2;
    // Pairs of an even number of columns lie within the row or beyond it as a whole.
    if (!is_together_ || (columns % 2 != 0 && first + kWidth > columns)) {
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n) {
        const float2 two = pair(n);
        const int64_t column = own + 8 * n;
        if (column < columns) store_one(offset + column * rows_.stride[3], two.x);
        if (column + 1 < columns) store_one(offset + (column + 1) * rows_.stride[3], two.y);
      }
    } else if (rows_.type == ElementType::kFloat32) {
      float* row = static_cast<float*>(rows_.data) + offset + own;
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n) {
        const float2 two = pair(n);
        if (own + 8 * n < columns) store_vector(row + 8 * n, two);
      }
    } else {
      const bool is_half = rows_.type == ElementType::kFloat16;
      uint16_t* row = static_cast<uint16_t*>(rows_.data) + offset + own;
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n) {
        const float2 two = pair(n);
        const uint32_t packed = is_half ? pack_f16x2(two.x, two.y) : pack_bf16x2(two.x, two.y);
        if (own + 8 * n < columns) store_vector(row + 8 * n, packed);
      }
    }
  }

 private:
  __device__ __forceinline__ void store_one(int64_t offset, float x) const {
    if (rows_.type == ElementType::kFloat32) {
      static_cast<float*>(rows_.data)[offset] = x;
    } else {
      const uint32_t bits =
          rows_.type == ElementType::kFloat16 ? pack_f16x2(x, 0) : pack_bf16x2(x, 0);
      static_cast<uint16_t*>(rows_.data)[offset] = static_cast<uint16_t>(bits);
    }
  }

  const Array& rows_;
  bool is_together_;
};

}  // namespace
}  // namespace ikattn::cuda
