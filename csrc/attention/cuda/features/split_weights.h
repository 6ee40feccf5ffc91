// Splits frequencies into operands of 16 bits (SplitFrequencies).
#pragma once

#include "attention/cuda/features/angle_operands.h"
#include "attention/cuda/operands/operands.h"
#include "support/cuda/intrinsics.h"

namespace ikattn::cuda {
namespace {

// Returns the frequency, of 32, that a row of SplitFrequencies has: a product's lanes have columns
// 2t and 2t + 1 of two tiles of eight, and so frequencies 4t to 4t + 3 of 16.
__device__ __forceinline__ int frequency_of_row(int row) {
  const int column = row % 8, tile = row / 8 % 2;
  return row / 16 * 16 + column / 2 * 4 + tile * 2 + column % 2;
}

// The frequencies of one head, among [frequency_batches, frequency_heads].
class HeadFrequencies {
 public:
  __device__ __forceinline__ HeadFrequencies(const FeatureSource& source, int64_t which)
      : source_(source),
        batch_(which / source.frequency_heads),
        head_(which % source.frequency_heads) {}

  // Loads dimensions c to c + 7 of frequency m of w1 or w2; zeros where there is none.
  __device__ __forceinline__ void load(int set, int m, int c, float (&w)[8]) const {
    const Array& array = set == 0 ? source_.w1 : source_.w2;
    switch (array.type) {
      case ElementType::kFloat64:
        return load_from<double>(array, m, c, w);
      case ElementType::kFloat32:
        return load_from<float>(array, m, c, w);
      case ElementType::kBFloat16:
        return load_from<BFloat16>(array, m, c, w);
      default:
        return load_from<Half>(array, m, c, w);
    }
  }
  // Returns the largest finite number of all sets. All threads of the block call it, and it
  // synchronises them.
  //   maxima [kThreads / 32]
  template <int kThreads>
  __device__ __forceinline__ float largest(int sets, Shared<float> maxima) const {
    const int M = static_cast<int>(source_.M), chunks = (static_cast<int>(source_.d) + 7) / 8;
    float most = 0;
    for (int index = threadIdx.x; index < sets * chunks * M; index += kThreads) {
      float w[8];
      load(index / M / chunks, index % M, index / M % chunks * 8, w);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (is_finite(w[i])) most = fmaxf(most, fabsf(w[i]));
      }
    }
    most = max_of_lanes(most);
    if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = most;
    __syncthreads();
    for (int warp = 0; warp < kThreads / 32; ++warp) {
      const float other = maxima[warp];
      most = fmaxf(most, other);
    }
    return most;
  }

 private:
  template <typename W>
  __device__ __forceinline__ void load_from(const Array& array, int m, int c, float (&w)[8]) const {
    const W* from = static_cast<const W*>(array.data) + batch_ * array.stride[0] +
                    head_ * array.stride[1] + m * array.stride[3];
    const int count = m < source_.M ? static_cast<int>(source_.d) - c : 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // all under way before one is looked at
      w[i] = i < count ? convert<float>(from[(c + i) * array.stride[2]]) : 0.0f;
    }
  }

  const FeatureSource& source_;
  int64_t batch_, head_;
};

// Splits w[i] scale into two operands of T, the largest first.
template <typename T>
__device__ __forceinline__ void split_eight(const float (&w)[8], float scale, uint4 (&numbers)[2]) {
  float rest[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) rest[i] = w[i] * scale;
#pragma unroll
  for (int number = 0; number < 2; ++number) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = pack<T>(rest[2 * i], rest[2 * i + 1]);
      const float2 rounded = unpack<T>(pairs[i]);
      rest[2 * i] -= rounded.x;
      rest[2 * i + 1] -= rounded.y;
    }
    numbers[number] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

}  // namespace
}  // namespace ikattn::cuda
