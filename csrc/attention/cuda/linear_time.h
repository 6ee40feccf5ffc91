// Attention without pairs on tensor cores, of calls in which every row sees every key
// (attention/linear_time.h has the sums and when they pay).
//
// Features are taken 16 at a time, a chunk. An entry is the product of two of them, a and b, of
// chunks A <= B. Where A < B it stands for (b, a), too, and its moments count twice; where A = B
// both are there. A pair of chunks has 256 entries, a by a, and pairs lie (0, 0), (0, 1), (1, 1),
// (0, 2) .., so that the entries of one B follow each other.
//
//   moment_ab = sum_j k_a k_b v_j,  gram_ab = sum_j k_a k_b,  sum_j S_ij^2 = q_i^T gram q_i
//   out_i = m + sum_ab q_a q_b (moment_ab - m gram_ab) / Z_i,  m = sum_j e_j v_j / sum_j e_j
//
// in the letters of folded.h: the term of eps is in m, and small differences of large values keep
// their digits. Products of two features are Half, as are what moments add up to, for they are as
// good as weights of 11 bits are, unless a query's scores are all small against its features: a
// block with such a query is computed by pairs.
#pragma once

#include "attention/cuda/folded.h"
#include "attention/linear_time.h"

namespace ikattn::cuda {

constexpr int kChunk = 16;           // features
constexpr int kPairEntries = 256;    // of two chunks
constexpr int kMomentColumns = 64;   // of the value, in a row of moments
constexpr int kLinearQueries = 128;  // that are computed by pairs together

// Where the features of a token lie: cosines, then sines, from half of a row on.
struct FeatureChunks {
  int count, of_cosines, width;

  explicit FeatureChunks(const AttentionParams& params)
      : count(2 * static_cast<int>((params.M + kChunk - 1) / kChunk)),
        of_cosines(count / 2),
        width(static_cast<int>(padded_columns(2 * params.M))) {}
  __device__ __forceinline__ int column(int chunk) const {
    return chunk < of_cosines ? chunk * kChunk : width / 2 + (chunk - of_cosines) * kChunk;
  }
  __host__ __device__ __forceinline__ int pairs() const { return count * (count + 1) / 2; }
  // Columns that these are in shared memory, one after the other.
  int columns() const { return count <= 4 ? 64 : 128; }
};

// Slices of 64 columns that the value has.
inline int moment_slices(const AttentionParams& params) {
  return static_cast<int>((params.d_v + kMomentColumns - 1) / kMomentColumns);
}

// Whether a call goes without pairs, but for blocks of queries that it would not be exact for. By
// counting multiply-adds, of which pairs get more done in a time; not measured.
inline bool goes_without_pairs(const AttentionParams& params) {
  constexpr double kRateOfPairs = 1.3;
  const bool can = every_row_sees_all(params) && params.dropout_threshold == 0 && !is_wide(params);
  if (!can || params.L < 8 || params.S < 8) return false;
  if (params.linear_time != LinearTime::kAuto) return params.linear_time == LinearTime::kAlways;
  const double columns = static_cast<double>(moment_slices(params) * kMomentColumns);
  const double entries = FeatureChunks(params).pairs() * double{kPairEntries} * columns;
  const double pair = static_cast<double>(padded_columns(2 * params.M)) + columns;
  const double heads = static_cast<double>(params.H) / static_cast<double>(params.key_heads);
  const double queries = heads * static_cast<double>(params.L);
  const double keys = static_cast<double>(params.S);
  return kRateOfPairs * (queries + keys) * entries < queries * keys * pair;
}

// What queries need to know of a key head.
struct LinearHead {
  float eps_terms;    // sum_j K eps e_j
  float squares;      // sum_j |phi_k'|^2, times 1 + 32 / n (attention/cpu/linear_time.h)
  float gram_unit;    // of the numbers that stand for gram
  float moment_unit;  // of moments, over the scale of the value
  float moment_fit;   // what these were multiplied with
  float value_unit;   // 1 / the scale of the value
};

struct LinearKeys {
  Half* moments;      // [B, key_heads, slices, pairs, 256, 64]
  Half* gram;         // [B, key_heads, 2, columns, columns]  two numbers for each
  float* centers;     // [B, key_heads, slices * 64]  m, of the value as Half
  LinearHead* heads;  // [B, key_heads]
  // Products of two features of a key are multiplied with this, which makes the largest 2^15.
  float entry_scale;
};

const char* linear_keys(const AttentionParams& params, const DeviceExecutor& executor,
                        const FoldedTokens& tokens, LinearKeys& keys);

// The forward. Sets tokens.by_pairs, and leaves these blocks to the kernels of pairs.
const char* linear_forward(const AttentionParams& params, const DeviceExecutor& executor,
                           FoldedTokens& tokens);

namespace {

// Whether all queries of a head are computed by pairs: with few keys a row may be a single one's,
// bit by bit; and what is not finite spoils only its own row there.
__device__ __forceinline__ bool leaves_to_pairs(uint32_t state) {
  return (state & (kGeneral | kUnclean | kFew)) != 0;
}

// The chunks of a pair.
struct ChunkPair {
  int a, b;

  __device__ __forceinline__ explicit ChunkPair(int pair) : a(pair), b(0) {
    while (a > b) a -= ++b;
  }
};

}  // namespace
}  // namespace ikattn::cuda
