// Parts of blocks that own queries, in both passes: the queries of a warp, and the tiles of keys
// and values that the block passes along, two in flight.
#pragma once

#include "attention/cuda/split/pairs.h"

namespace ikattn::cuda {
namespace {

template <int F, int V>
struct KeyTileLayout {
  static constexpr int kTokens = F + V > 192 ? 16 : 32;  // or GPUs of 99 KiB would not hold them
  static constexpr uint32_t kKeyLow = kTokens * 2 * F, kValue = 2 * kKeyLow;
  static constexpr uint32_t kValueLow = kTokens * 2 * V;  // behind kValue
  static constexpr uint32_t kNumbers = kValue + 2 * kValueLow;
  static constexpr uint32_t kStage = kNumbers + 4 * kTokens * 4;
};

// Numbers of the 16 keys of a chunk.
struct SplitKeyColumns {
  KeyColumns logits;
  float key_units[2][2], value_units[2][2];
};

template <int F, int V>
struct KeyTiles {
  using L = KeyTileLayout<F, V>;
  const SplitTokens& tokens;
  int64_t S, first_key, first_value, padded_key,
      padded_value;  // length and first rows of the heads
  int count;         // number of tiles that the queries see

  __device__ __forceinline__ KeyTiles(const AttentionParams& params, const SplitTokens& which,
                                      const QueryBlock& at)
      : tokens(which), S(params.S) {
    const int64_t value = at.b * params.G + at.value_head, padded = padded_tokens(S);
    first_key = at.bk * S;
    first_value = value * S;
    padded_key = at.bk * padded;
    padded_value = value * padded;
    const int64_t seen = params.is_causal ? min(S, int64_t{at.i0} + kSplitRows) : S;
    count = static_cast<int>((seen + L::kTokens - 1) / L::kTokens);
  }
  // Begins to copy a tile into the stage at `base`.
  __device__ __forceinline__ void copy(int tile, uint32_t base) const {
    const int64_t j0 = int64_t{tile} * L::kTokens;
    const int there = remaining_of(S, j0);
    copy_split<L::kTokens, F>(base, tokens.key.high, tokens.key.low, first_key + j0, there);
    copy_split<L::kTokens, V>(base + L::kValue, tokens.value.high, tokens.value.low,
                              first_value + j0, there);
    copy_token_numbers<L::kTokens, 4>(
        base + L::kNumbers,
        {tokens.high + padded_key + j0, tokens.low + padded_key + j0,
         tokens.key.units + padded_key + j0, tokens.value.units + padded_value + j0});
    cp_async_commit();
  }
  __device__ __forceinline__ static SplitKeyColumns columns_of(Shared<unsigned char> stage,
                                                               int chunk) {
    Shared<const float> numbers = shared_cast<float>(stage + L::kNumbers);
    SplitKeyColumns columns;
    load_columns(numbers, chunk, columns.logits.terms);
    load_columns(numbers + L::kTokens, chunk, columns.logits.lows);
    load_columns(numbers + 2 * L::kTokens, chunk, columns.key_units);
    load_columns(numbers + 3 * L::kTokens, chunk, columns.value_units);
    return columns;
  }
};

// All F features of the 16 queries of a warp, as left operands in registers; 0: none.
template <int F>
struct HeldQueries {
  SplitFragment features[F / 16 + 1];

  // Loads queries from i on.
  __device__ __forceinline__ HeldQueries(const AttentionParams& params, const SplitRows& queries,
                                         int64_t bh, int64_t i) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool there = i + g + 8 * half < params.L;
      const int64_t row = (bh * params.L + i + g + 8 * half) * F + 2 * t;
#pragma unroll
      for (int k = 0; k < F / 16; ++k) {
#pragma unroll
        for (int right = 0; right < 2; ++right) {
          const int64_t at = row + 16 * k + 8 * right;
          const int own = half + 2 * right;
          features[k].high.registers[own] = there ? load_vector<uint32_t>(queries.high + at) : 0;
          features[k].low.registers[own] = there ? load_vector<uint32_t>(queries.low + at) : 0;
        }
      }
    }
  }
  __device__ __forceinline__ const SplitFragment& operator()(int k) const { return features[k]; }
};

// A warp's 16 rows as left operands where they lie in shared memory.
struct SharedRows {
  SplitAddresses places;
  uint32_t distance;  // distance of the low parts

  // Returns kWidth columns of the block's rows, which begin at `base`.
  template <int kWidth>
  __device__ __forceinline__ static SharedRows of(uint32_t base) {
    const uint32_t warp = threadIdx.x / 32;
    return {SplitAddresses::of_rows(base + warp * (16 * 2 * kWidth), 2 * kWidth).behind(0),
            kSplitRows * 2 * kWidth};
  }
  __device__ __forceinline__ SplitFragment operator()(int k) const {
    return load_split(places.at(k), distance);
  }
};

// Stores a thread's pairs of a row of 2M floats, of sums of F columns.
template <int F, typename Pair>
__device__ __forceinline__ void store_features(const AttentionParams& params, float* row,
                                               const Pair& pair) {
  for_pairs<F>([&](int column, int n) {
    if (column < 2 * params.M) store_vector(row + column, pair(n));
  });
}

}  // namespace
}  // namespace ikattn::cuda
