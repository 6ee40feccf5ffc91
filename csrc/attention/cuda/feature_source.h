// Where features come from, and who makes them.
#pragma once

#include "attention/cuda/kernels.h"
#include "support/cuda/launch.h"

namespace ikattn::cuda {

// Where the features of one side come from. heads: of the features; a head of x serves several.
struct FeatureSource {
  Array x;       // [B, x_heads, N, d]
  Array w1, w2;  // [frequency_batches, frequency_heads, d, M]; w2 none: stationary
  int64_t B, heads, x_heads, N, d, M, frequency_heads, frequency_batches;

  __device__ int64_t frequency_base(const Array& w, int64_t b, int64_t head) const {
    return (frequency_batches == 1 ? 0 : b) * w.stride[0] +
           head * frequency_heads / heads * w.stride[1];
  }
};

// Of the queries, or the keys, of a call; of ikattn::features.
FeatureSource source_of(const AttentionParams& params, bool keys);
FeatureSource source_of(const FeaturesParams& params);

// Rows [B, heads, N, width] one after the other.
template <typename T>
inline Array contiguous(T* data, int64_t heads, int64_t N, int64_t width) {
  Array array;
  array.data = const_cast<void*>(static_cast<const void*>(data));
  array.type = sizeof(T) == 8 ? ElementType::kFloat64 : ElementType::kFloat32;
  array.stride[0] = heads * N * width;
  array.stride[1] = N * width;
  array.stride[2] = width;
  array.stride[3] = 1;
  return array;
}

// TF32 numbers that an element of the tokens is taken for on tensor cores: 16 bits are one.
inline int tf32_parts_of(const FeatureSource& source) {
  return source.x.type == ElementType::kFloat32 ? 2 : 1;
}

// How features are written.
template <typename T>
struct FeatureOptions {
  int64_t width = 0;          // of a row, >= 2M: zeros beyond
  const T* logits = nullptr;  // [B, heads, N]  where it is NaN or -inf, features are zero
  const T* scales = nullptr;  // [B, heads, N]  multiply the features
  bool clean = false;         // features that are not finite become zero
  bool tensor_cores = false;  // the products by TF32 in parts, sines and cosines to 1e-6
};

// phi [B, heads, N, width], cosines first, then sines.
template <typename T>
const char* write_features(const FeatureSource& source, const Array& phi,
                           const FeatureOptions<T>& options, Stream stream);

}  // namespace ikattn::cuda
