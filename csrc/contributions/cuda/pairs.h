// Pairs in the kernels of maps: a lane is a key, whose factor it reads beside its neighbours'; a
// warp takes four queries at a time, and a factor that is read serves four pairs, or one where so
// many heads leave no room for more.
#pragma once

#include "contributions/cuda/kernels.h"
#include "support/cuda/elements.h"

namespace ikattn::cuda {
namespace {

constexpr int64_t kMostShared = 96 * 1024;

// Shared memory of a warp that takes `rows` queries, in `arrays` arrays as load_own_weights()
// fills.
template <typename T>
constexpr int64_t shared_of_warp(int64_t H, int rows, int arrays) {
  return arrays * H * rows * 32 * int64_t{sizeof(T)};
}

__device__ __forceinline__ bool is_padding(const Array& padding, int64_t b, int64_t token) {
  return padding.type != ElementType::kNone &&
         static_cast<const uint8_t*>(
             padding.data)[b * padding.stride[0] + token * padding.stride[1]] != 0;
}

// Loads a thread's weights of key j and the queries [i0, i0 + kRows), zero where either is padding
// or beyond the end: own[(h * kRows + m) * 32], and whether query m has one that is not zero.
template <int kRows, typename T>
__device__ __forceinline__ void load_own_weights(const PairParams& params, int64_t b, int64_t i0,
                                                 int64_t end, int64_t j, bool key_visible,
                                                 Shared<T> own, bool (&weighed)[kRows]) {
  const int64_t* stride = params.weights.stride;
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
    const int64_t i = i0 + m;
    const bool visible = key_visible && i < end && !is_padding(params.query_padding, b, i);
    weighed[m] = false;
    for (int64_t h = 0; h < params.H; ++h) {
      T weight = 0;
      if (visible) {
        weight = load_element<T>(params.weights,
                                 b * stride[0] + h * stride[1] + i * stride[2] + j * stride[3]);
      }
      weighed[m] = weighed[m] || weight != T(0);
      own[(h * kRows + m) * 32] = weight;
    }
  }
}

// Returns the factors of a key, every kFactorBlock-th.
template <typename T>
__device__ __forceinline__ const T* factors_of(const PairParams& params, const void* of_variant,
                                               int64_t b, int64_t j) {
  const int64_t blocks = (params.S + kFactorBlock - 1) / kFactorBlock;
  return static_cast<const T*>(of_variant) +
         (b * blocks + j / kFactorBlock) * triangle(params.H) * kFactorBlock + j % kFactorBlock;
}

// Computes the norm of one pair in float64, reading its weights and factors again: where the
// squares overflow float32 the norm may not.
template <typename T>
__device__ __forceinline__ T norm_in_double(const PairParams& params, int64_t b, int64_t i,
                                            int64_t j, const void* of_variant) {
  const int64_t* stride = params.weights.stride;
  const int64_t first = b * stride[0] + i * stride[2] + j * stride[3];
  const T* factors = factors_of<T>(params, of_variant, b, j);
  double square = 0;
#pragma unroll 1
  for (int64_t h = 0; h < params.H; ++h) {
    double sum = 0;
#pragma unroll 1
    for (int64_t k = h; k < params.H; ++k, factors += kFactorBlock) {
      sum += static_cast<double>(*factors) *
             load_element<double>(params.weights, first + k * stride[1]);
    }
    square += sum * sum;
  }
  return static_cast<T>(sqrt(square));
}

}  // namespace
}  // namespace ikattn::cuda
