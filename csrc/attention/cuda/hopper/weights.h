// Turns a warpgroup's scores of 64 queries and 128 keys into weights, in the forward of the folded
// form: of Half, w = s s + term; of integers of 8 bits, w = (s s + eps) e_j. Sums of products lie
// in a thread as rows g and g + 8, columns 2t and 2t + 1 of tiles of 8.
#pragma once

#include "attention/cuda/hopper/pipeline.h"
#include "attention/cuda/tensor_cores/forward_pairs.h"

namespace ikattn::cuda {
namespace {

constexpr int kKeys = 128;  // keys of a tile

// Predicates that tell which pairs a thread's rows see, c of tile n of 8 keys.
struct AllPairs {
  __device__ __forceinline__ bool operator()(int, int) const { return true; }
};
// Keys up to the `diagonal`-th of a tile, of the thread's first row.
struct PairsUpTo {
  int diagonal;

  __device__ __forceinline__ bool operator()(int n, int c) const {
    const int t = threadIdx.x % 4;
    return n * 8 + 2 * t + c % 2 - 8 * (c / 2) <= diagonal;
  }
};

// Makes weights of the scores of a thread's two rows; 0 for pairs that are not seen.
//   terms: of the tile's keys
//   sums, roundings: as in ForwardRows, kRounds where rows may see few keys
template <typename T, bool kRounds, typename Sees>
__device__ __forceinline__ void to_weights(float (&s)[kKeys / 2], Shared<const float> terms,
                                           const Sees& sees, float (&sums)[2],
                                           Roundings& roundings) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
    const float2 pair = load_vector<float2>(terms + n * 8 + 2 * t);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float score = s[4 * n + c];
      float weight = score * score + (c % 2 == 0 ? pair.x : pair.y);
      if (!sees(n, c)) weight = 0;
      sums[c / 2] += weight;
      s[4 * n + c] = weight;
    }
    if constexpr (kRounds) {
      const float* row = s + 4 * n;
      roundings.add(rounding_of<T>(pack<T>(row[0], row[1]), row[0], row[1]),
                    rounding_of<T>(pack<T>(row[2], row[3]), row[2], row[3]));
    }
  }
}

// Returns (s s + eps) e_j for two scores of integers, rounded to bfloat16; eps: twice, of bfloat16.
__device__ __forceinline__ uint32_t int8_weights(uint32_t scores, uint32_t magnitudes,
                                                 uint32_t eps) {
  constexpr uint32_t kMinusZeros = 0x80008000u;  // added, they change nothing
  return fma_bf16x2(fma_bf16x2(scores, scores, eps), magnitudes, kMinusZeros);
}
// Returns a mask of two numbers of bfloat16: pairs up to the `diagonal`-th key of the thread's
// first row.
__device__ __forceinline__ uint32_t seen_of_two(int diagonal, int n, int half) {
  const int t = threadIdx.x % 4, seen = diagonal + 8 * half - (n * 8 + 2 * t);
  return seen > 0 ? 0xffffffffu : seen == 0 ? 0x0000ffffu : 0u;
}

}  // namespace
}  // namespace ikattn::cuda
