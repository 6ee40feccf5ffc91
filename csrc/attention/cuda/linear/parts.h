// Partial sums of tokens, which other kernels finish.
#pragma once

#include "attention/cuda/linear/linear.h"

namespace ikattn::cuda {

constexpr int kTokenSums = 3;  // beside those of the rows: of terms, |phi|^2, |phi|^4

// Division of the tokens of a head, in the order in which prefixes add them up.
struct Shares {
  int count;
  int64_t tokens;         // tokens of a share, a multiple of kStep
  int of_first;           // shares that the first prefix has
  int of_prefix;          // that each has more than the one before it
  int64_t begin = 0;      // the first token
  bool from_end = false;  // the last tokens are the first share

  // Shares that the p-th prefix has.
  __device__ __forceinline__ int end_of(int p) const {
    return min(of_first + p * of_prefix, count);
  }
  // Returns the first token of a share.
  __device__ __forceinline__ int64_t first_of(int share) const {
    return begin + (from_end ? count - 1 - share : share) * tokens;
  }
};

// Sums of each share; see LinearSums. P: prefixes, of which there are no more than shares.
struct TokenParts {
  Shares of_moments, of_gram, of_sums;
  int prefixes;
  int slices;
  int64_t heads;  // key heads
  // [count][B, key_heads, slices, pairs, 256, 64]; at last the first P are the prefixes' sums, less
  // the center's share
  float* moments;
  float* gram;              // [count][B, key_heads, columns, columns]; at last the first P likewise
  float* sums;              // [B, key_heads, count, kTokenSums + slices * 64]
  uint32_t* moment_bounds;  // [B, key_heads, P]  bits of the largest

  __host__ __device__ int sum_columns() const { return kTokenSums + slices * kMomentColumns; }
};

// Combines the sums of parts into LinearSums. key_centers, of queries: their keys'; else nullptr.
const char* finish_sums(const AttentionParams& params, const LinearTokens& tokens,
                        const TokenParts& parts, const LinearSums& sums, const float* key_centers,
                        Stream stream);

}  // namespace ikattn::cuda
