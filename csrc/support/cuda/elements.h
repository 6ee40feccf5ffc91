// Elements of any storage type in the compute type.
#pragma once

#include "support/array.h"
#include "support/cuda/float16.h"
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

}  // namespace
}  // namespace ikattn::cuda
