// Sources of features, and the functions that make them.
#pragma once

#include "attention/cuda/operands/tokens.h"
#include "support/cuda/launch.h"

namespace ikattn::cuda {

// Source of the features of one side. heads: of the features; a head of x serves several.
struct FeatureSource {
  Array x;       // [B, x_heads, N, d]
  Array w1, w2;  // [frequency_batches, frequency_heads, d, M]; w2 none: stationary
  int64_t B, heads, x_heads, N, d, M, frequency_heads, frequency_batches;

  __host__ __device__ bool stationary() const { return w2.type == ElementType::kNone; }
  // Return the index of x, w1 and w2 for a head of a batch.
  __device__ int64_t x_head(int64_t head) const {
    return shared_head(static_cast<unsigned>(head), heads, x_heads);
  }
  __device__ int64_t frequency_head(int64_t head) const {
    return shared_head(static_cast<unsigned>(head), heads, frequency_heads);
  }
  __device__ int64_t frequency_batch(int64_t b) const { return frequency_batches == 1 ? 0 : b; }
};

// Returns the source of the queries, or the keys, of a call, or of ikattn::features.
FeatureSource source_of(const AttentionParams& params, bool keys);
FeatureSource source_of(const FeaturesParams& params);

// Returns an array of rows [B, heads, N, width], one after the other.
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

// phi [B, heads, N, 2M], cosines first, then sines; zeros where `logits` [B, heads, N], if there
// are any, is NaN or -inf.
template <typename T>
const char* write_features(const FeatureSource& source, const Array& phi, const T* logits,
                           Stream stream);

}  // namespace ikattn::cuda
