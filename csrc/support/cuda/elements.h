// Elements of any storage type in the compute type.
#pragma once

#include "support/array.h"
#include "support/cuda/float16.h"
#include "support/cuda/intrinsics.h"
#include "support/cuda/launch.h"

namespace ikattn::cuda {
namespace {

// One element of any storage type.
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

// Two neighbours at a time, in one access where they lie side by side.
struct RowPairs {
  const Array& array;
  bool together;  // and every pair from an even column on at a multiple of its size

  __device__ explicit RowPairs(const Array& rows) : array(rows) {
    const int64_t element = rows.type == ElementType::kFloat32 ? 4 : 2;
    together = rows.type != ElementType::kFloat64 && rows.stride[3] == 1 &&
               ((rows.stride[0] | rows.stride[1] | rows.stride[2]) & 1) == 0 &&
               reinterpret_cast<uintptr_t>(rows.data) % (2 * element) == 0;
  }
  // Columns `column`, which is even, and the next, of those below `columns`; of the row at
  // `offset`.
  __device__ __forceinline__ void store(int64_t offset, int64_t column, int64_t columns,
                                        float2 two) const {
    if (together && column + 1 < columns) {
      const int64_t at = offset + column;
      switch (array.type) {
        case ElementType::kFloat32:
          store_vector(static_cast<float*>(array.data) + at, two);
          break;
        case ElementType::kBFloat16:
          store_vector(static_cast<uint16_t*>(array.data) + at, pack_bf16x2(two.x, two.y));
          break;
        default:
          store_vector(static_cast<uint16_t*>(array.data) + at, pack_f16x2(two.x, two.y));
      }
      return;
    }
    if (column < columns) store_element(array, offset + column * array.stride[3], two.x);
    if (column + 1 < columns) store_element(array, offset + (column + 1) * array.stride[3], two.y);
  }
};

}  // namespace
}  // namespace ikattn::cuda
