// Angles of tokens on CUDA cores: a block takes 16 tokens of one head, or some multiple of 16, and
// passes along the frequencies.
#pragma once

#include "attention/cuda/cuda_cores/tile_product.h"
#include "attention/cuda/operands/feature_source.h"

namespace ikattn::cuda {
namespace {

constexpr int kTokens = 16;  // tokens of one thread
constexpr int kTokenThreads = 128;

__device__ __forceinline__ void sincos_cycles(float angles, float& sine, float& cosine) {
  sincospif(2 * (angles - rintf(angles)), &sine, &cosine);
}
__device__ __forceinline__ void sincos_cycles(double angles, double& sine, double& cosine) {
  sincospi(2 * (angles - rint(angles)), &sine, &cosine);
}

// Sines and cosines of a token's angles x . w1 and x . w2; stationary: the first stands for both.
template <typename T>
struct Angle {
  T sin1, cos1, sin2, cos2;

  __device__ __forceinline__ void set(T angles1, T angles2, bool stationary) {
    sincos_cycles(angles1, sin1, cos1);
    sin2 = sin1;
    cos2 = cos1;
    if (!stationary) sincos_cycles(angles2, sin2, cos2);
  }
};

// One of both [d, M] of one head.
struct Frequencies {
  const Array* w;
  int64_t base;

  __device__ Frequencies(const FeatureSource& source, const Array& array, int64_t b, int64_t head)
      : w(&array),
        base(source.frequency_batch(b) * array.stride[0] +
             source.frequency_head(head) * array.stride[1]) {}
  template <typename T>
  __device__ __forceinline__ T load(int64_t c, int64_t m) const {
    return load_element<T>(*w, base + c * w->stride[2] + m * w->stride[3]);
  }
};

template <typename T>
struct alignas(16) Four {
  T at[4];
};

// Returns the pitch of the tokens' rows in shared memory: elements are read four at a time.
__host__ __device__ inline int64_t token_pitch(int64_t d) { return (d + 3) / 4 * 4; }

// Returns how many groups of a block's threads have kTokens tokens each, several where there are
// few frequencies: the threads of a group have neighbouring frequencies.
template <typename T>
__host__ __device__ inline int token_groups(const FeatureSource& source) {
  const int64_t most = 32 * 1024 / static_cast<int64_t>(sizeof(T));  // elements in shared memory
  int groups = 1;
  while (2 * groups * source.M <= kTokenThreads && groups < 8 &&
         2 * groups * kTokens * token_pitch(source.d) <= most) {
    groups *= 2;
  }
  return groups;
}

// Computes the angles of `kTokens` tokens by both frequencies m.
//   x [kTokens][token_pitch(d)] in shared memory
template <typename T>
__device__ __forceinline__ void angles_of(const FeatureSource& source, int64_t b, int64_t head,
                                          int64_t m, Shared<T> x, T (&angles1)[kTokens],
                                          T (&angles2)[kTokens]) {
  const Frequencies w1(source, source.w1, b, head), w2(source, source.w2, b, head);
  const int64_t pitch = token_pitch(source.d);
#pragma unroll
  for (int t = 0; t < kTokens; ++t) angles1[t] = angles2[t] = 0;
  for (int64_t first = 0; first < source.d; first += 4) {
    T by1[4] = {}, by2[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + i >= source.d) continue;
      by1[i] = w1.load<T>(first + i, m);
      if (!source.stationary()) by2[i] = w2.load<T>(first + i, m);
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const Four<T> values = load_vector<Four<T>>(x + t * pitch + first);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        angles1[t] += values.at[i] * by1[i];
        angles2[t] += values.at[i] * by2[i];
      }
    }
  }
}

// Loads tokens from `first` on into x [count][token_pitch(d)], zeros beyond the last. All threads
// of the block call it, and it synchronises them.
template <typename T>
__device__ __forceinline__ void load_tokens(const FeatureSource& source, int64_t b, int64_t head,
                                            int64_t first, int count, Shared<T> x) {
  const Tokens tokens(source.x, b, source.x_head(head));
  const int pitch = static_cast<int>(token_pitch(source.d));
  for (int index = static_cast<int>(threadIdx.x); index < count * pitch; index += kTokenThreads) {
    const int64_t token = first + index / pitch, c = index % pitch;
    x[index] = token < source.N && c < source.d ? tokens.load<T>(token, c) : T(0);
  }
  __syncthreads();
}

// Calls visit(b, head, index of the token among all heads, token, m, angle) for the block's tokens
// and all frequencies.
template <typename T, typename Visit>
__device__ __forceinline__ void visit_angles(const FeatureSource& source, const Visit& visit) {
  Shared<T> x = dynamic_shared<T>();
  const int groups = token_groups<T>(source), columns = kTokenThreads / groups;
  const int of_block = groups * kTokens;
  const unsigned token_blocks = static_cast<unsigned>((source.N + of_block - 1) / of_block);
  const int64_t bh = blockIdx.x / token_blocks;
  const int64_t first = int64_t{blockIdx.x % token_blocks} * of_block;
  const int64_t b = bh / source.heads, head = bh % source.heads;
  load_tokens(source, b, head, first, of_block, x);
  const int group = static_cast<int>(threadIdx.x) / columns;
  const int64_t own = first + group * kTokens;
  for (int64_t m = threadIdx.x % columns; m < source.M; m += columns) {
    T angles1[kTokens], angles2[kTokens];
    angles_of(source, b, head, m, x + group * kTokens * token_pitch(source.d), angles1, angles2);
    for (int t = 0; t < kTokens && own + t < source.N; ++t) {
      Angle<T> angle;
      angle.set(angles1[t], angles2[t], source.stationary());
      visit(b, head, bh * source.N + own + t, own + t, m, angle);
    }
  }
}

// Launches a kernel that visits the angles of `source`.
template <typename T, typename... Parameters, typename... Arguments>
const char* launch_angles(void (*kernel)(FeatureSource, Parameters...), const FeatureSource& source,
                          Stream stream, Arguments&&... arguments) {
  const int64_t of_block = token_groups<T>(source) * kTokens;
  const auto blocks = static_cast<unsigned>(source.B * source.heads * ceil_div(source.N, of_block));
  return launch(kernel, dim3(blocks), dim3(kTokenThreads),
                of_block * token_pitch(source.d) * int64_t{sizeof(T)}, stream, source,
                static_cast<Arguments&&>(arguments)...);
}

}  // namespace
}  // namespace ikattn::cuda
