// Pairs of the tensor-core kernels: which are seen and which are dropped, and what their keys
// bring. A thread has those of fragments: rows g and g + 8 of 16, columns 2t and 2t + 1 of two
// tiles of 8.
#pragma once

#include "attention/calls/offsets.h"
#include "attention/cuda/tensor_cores/blocks.h"
#include "support/philox.h"

namespace ikattn::cuda {
namespace {

// Returns exp(x).
__device__ __forceinline__ float fast_exponential(float x) { return fast_exp2(x * 1.44269504f); }

// Keys that the queries of a tile see; rows and columns count from the tile's first. Beyond the
// last token there are zeros, which change nothing.
template <Pairs kPairs>
struct TileVisibility {
  int diagonal;  // the key that query 0 sees last
  int rows, columns;
  const Array& mask;
  int64_t base;  // begin of the tile in the mask

  __device__ __forceinline__ TileVisibility(const AttentionParams& params, int64_t b, int64_t h,
                                            int64_t i0, int64_t j0)
      : mask(params.mask) {
    if constexpr (kPairs == Pairs::kAll) return;
    const int64_t far = 1 << 20;
    diagonal = static_cast<int>(params.is_causal ? max(-far, min(i0 - j0, far)) : far);
    if constexpr (kDrops<kPairs>) {
      rows = remaining_of(params.L, i0);
      columns = remaining_of(params.S, j0);
      base = b * mask.stride[0] + h * mask.stride[1] + i0 * mask.stride[2] + j0 * mask.stride[3];
    }
  }
  __device__ __forceinline__ bool operator()(int row, int column) const {
    if constexpr (kPairs == Pairs::kAll) return true;
    if (column - row > diagonal) return false;
    if constexpr (kPairs == Pairs::kCausal) return true;
    if (row >= rows || column >= columns) return false;
    return mask.type != ElementType::kBool ||
           static_cast<const uint8_t*>(mask.data)[place(row, column)] != 0;
  }
  // Returns the float mask of a visible pair, which is added to its logit.
  __device__ __forceinline__ float logit(int row, int column) const {
    if (mask.type == ElementType::kNone || mask.type == ElementType::kBool) return 0;
    return bounded_offset(load_element<float>(mask, place(row, column)));
  }
  // Returns exp(logit - log Z) in the general form, for the logit and its normalizer in two parts
  // each; 0 for a hidden pair.
  __device__ __forceinline__ float exponential(int row, int column, float high, float low,
                                               float normalizer, float normalizer_low) const {
    if (!(*this)(row, column) || high == minus_infinity<float>()) return 0;
    const float masked = logit(row, column);
    if (masked == minus_infinity<float>()) return 0;
    return fast_exponential(
        relative_logit<float>({high, low}, masked, {normalizer, normalizer_low}));
  }

 private:
  __device__ __forceinline__ int64_t place(int row, int column) const {
    return base + row * mask.stride[2] + column * mask.stride[3];
  }
};

// Pairs that dropout drops in a 16 x 16 block's fragment: rows g and g + 8, columns 2t, 2t + 1 of
// two tiles of 8.
struct FragmentDropout {
  uint32_t dropped = 0;  // bit 4n + c: register c of column tile n

  FragmentDropout() = default;
  // Finds the pairs that are dropped. transposed: rows are keys.
  __device__ __forceinline__ FragmentDropout(const AttentionParams& params, int64_t bh,
                                             int64_t query, int64_t key, bool transposed) {
    if (params.dropout_threshold == 0) return;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const PhiloxBlock bytes =
        dropout_group(params.dropout, bh, query / 16 * 4 + (transposed ? t : g / 2),
                      key / 16 * 4 + (transposed ? g / 2 : t));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int row = (g & 1) + 2 * (c / 2), column = c % 2 + 2 * n;
        // An index that is known at run time only would take local memory.
        const uint32_t word = transposed     ? bytes.word[column]
                              : (g & 1) != 0 ? bytes.word[2 * (c / 2) + 1]
                                             : bytes.word[2 * (c / 2)];
        const uint32_t byte = word >> (8 * (transposed ? row : column)) & 0xff;
        dropped |= static_cast<uint32_t>(byte < params.dropout_threshold) << (4 * n + c);
      }
    }
  }
  __device__ __forceinline__ bool drops(int n, int c) const {
    return (dropped >> (4 * n + c) & 1) != 0;
  }
};

// Loads the numbers of a thread's columns from a stage, two for each of the two column tiles of a
// chunk.
__device__ __forceinline__ void load_columns(Shared<const float> numbers, int chunk,
                                             float (&columns)[2][2]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 pair = load_vector<float2>(numbers + chunk * 16 + n * 8 + threadIdx.x % 4 * 2);
    columns[n][0] = pair.x;
    columns[n][1] = pair.y;
  }
}

// A thread's pairs of 16 queries and 16 keys. Transposed: rows are keys.
template <Pairs kPairs, bool kTransposed = false>
struct FragmentPairs {
  const TileVisibility<kPairs>& visible;
  int row, column;  // place of the first pair's query and key, counted from the tile's first ones
  FragmentDropout dropout;

  // Takes the 16 rows from row0 and the 16 columns from column0 of the tile of queries from i0 and
  // keys from j0 on.
  __device__ __forceinline__ FragmentPairs(const AttentionParams& params,
                                           const TileVisibility<kPairs>& which, int64_t bh,
                                           int64_t i0, int64_t j0, int row0, int column0)
      : visible(which) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    row = row0 + (kTransposed ? 2 * t : g);
    column = column0 + (kTransposed ? g : 2 * t);
    if constexpr (kDrops<kPairs>) {
      dropout = FragmentDropout(params, bh, i0 + row0, j0 + column0, kTransposed);
    }
  }
  __device__ __forceinline__ int row_of(int n, int c) const {
    return row + (kTransposed ? n * 8 + c % 2 : 8 * (c / 2));
  }
  __device__ __forceinline__ int column_of(int n, int c) const {
    return column + (kTransposed ? 8 * (c / 2) : n * 8 + c % 2);
  }
  __device__ __forceinline__ bool sees(int n, int c) const {
    return visible(row_of(n, c), column_of(n, c));
  }
  __device__ __forceinline__ bool drops(int n, int c) const {
    return kDrops<kPairs> && dropout.drops(n, c);
  }
};

// Brings lanes together that pairs have sent different ways, as the next product needs them.
template <Pairs kPairs>
__device__ __forceinline__ void rejoin_after() {
  if constexpr (kDrops<kPairs>) __syncwarp();
}

// Numbers of the 16 keys that a thread's two queries are paired with.
struct KeyColumns {
  float terms[2][2];
  float lows[2][2];  // general

  // Returns the logit of the key of a fragment's register c of tile n, in the general form.
  __device__ __forceinline__ TwoParts<float> logit(int n, int c) const {
    return {terms[n][c % 2], lows[n][c % 2]};
  }
};
// Loads the numbers of the chunk-th 16 of kStep keys, whose terms, and in the general form lows,
// lie one array after the other.
template <Pairs kPairs>
__device__ __forceinline__ KeyColumns load_keys(Shared<const float> numbers, int chunk) {
  KeyColumns keys;
  load_columns(numbers, chunk, keys.terms);
  if constexpr (kPairs == Pairs::kGeneral) load_columns(numbers + kStep, chunk, keys.lows);
  return keys;
}

}  // namespace
}  // namespace ikattn::cuda
