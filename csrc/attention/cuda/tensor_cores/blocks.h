// Blocks of pairs on tensor cores: tokens that a block owns and passes along, and masks, types and
// widths for which a kernel is compiled.
#pragma once

#include "attention/cuda/mma/tile_copy.h"
#include "attention/cuda/operands/operands.h"

namespace ikattn::cuda {
namespace {

// The queries of one of the blocks that own `rows` queries of a head each, and their keys and
// values. 32 bits: a grid has not more blocks, and no GPU room for more tokens.
struct QueryBlock {
  int bh, i0, b, h, bk, key_head, value_head;

  __device__ __forceinline__ QueryBlock(const AttentionParams& params, int rows, int64_t index) {
    const int blocks = static_cast<int>((params.L + rows - 1) / rows);
    const int at = static_cast<int>(index), heads = static_cast<int>(params.H);
    const int key_heads = static_cast<int>(params.key_heads);
    bh = at / blocks;
    // The last rows first: under causality they have the most to do.
    i0 = (blocks - 1 - at % blocks) * rows;
    b = bh / heads;
    h = bh % heads;
    key_head = h / (heads / key_heads);
    bk = b * key_heads + key_head;
    value_head = h / (heads / static_cast<int>(params.G));
  }
};

// Keys of one of the blocks that own `rows` of them, and the tiles of queries that it passes along:
// all heads that share the keys, one head after the other.
struct KeyBlock {
  int bk, j0, b, key_head, value_head;
  int group;              // heads that share the keys
  int first_tile, tiles;  // tiles of kStep queries, for each of these heads
  int steps;              // tiles of all of them

  __device__ __forceinline__ KeyBlock(const AttentionParams& params, int rows, bool is_causal,
                                      int64_t index) {
    const int blocks = static_cast<int>((params.S + rows - 1) / rows);
    const int at = static_cast<int>(index), key_heads = static_cast<int>(params.key_heads);
    bk = at / blocks;
    // The first keys first: under causality they have the most to do.
    j0 = at % blocks * rows;
    b = bk / key_heads;
    key_head = bk % key_heads;
    value_head = key_head / (key_heads / static_cast<int>(params.G));
    group = static_cast<int>(params.H) / key_heads;
    const int all_tiles = static_cast<int>((params.L + kStep - 1) / kStep);
    first_tile = is_causal ? min(j0 / kStep, all_tiles) : 0;
    tiles = all_tiles - first_tile;
    steps = tiles * group;
  }
};

// The tiles of kStep keys that a block of `rows` queries passes along: those it sees, or its share
// of them, the part-th of `parts`.
struct TileRange {
  int first, end;

  __device__ __forceinline__ TileRange(int from, int to) : first(from), end(to) {}
  __device__ __forceinline__ TileRange(const AttentionParams& params, const QueryBlock& at,
                                       int rows, int part = 0, int parts = 1) {
    const int64_t seen = params.is_causal ? min(params.S, int64_t{at.i0} + rows) : params.S;
    const int all = static_cast<int>((seen + kStep - 1) / kStep), each = (all + parts - 1) / parts;
    first = part * each;
    end = min(first + each, all);
  }
};

// Calls visit(column, n) for the pairs of neighbouring columns that a thread has of a row of sums,
// in tile n of 8.
template <int kWidth, typename Visit>
__device__ __forceinline__ void for_pairs(const Visit& visit) {
#pragma unroll
  for (int n = 0; n < kWidth / 8; ++n) visit(n * 8 + static_cast<int>(threadIdx.x) % 4 * 2, n);
}

// Returns the rows of the value that belong to a query head.
template <typename T>
__device__ __forceinline__ const T* value_rows(const AttentionParams& params,
                                               const FoldedTokens& tokens, int64_t b, int64_t h) {
  return static_cast<const T*>(tokens.value.data) + b * tokens.value.stride[0] +
         h * params.G / params.H * tokens.value.stride[1];
}

// Returns how many tokens there are from the first of a tile on; beyond 2^31 a tile is full all the
// same.
__device__ __forceinline__ int remaining_of(int64_t count, int64_t first) {
  return static_cast<int>(min(count - first, int64_t{1} << 30));
}

// Pairs that a kernel is compiled for. In the folded form: all; those that causality allows; or
// bool masks and dropout, too. kGeneral: the general form, with all of these and float masks.
enum class Pairs { kAll, kCausal, kAny, kGeneral };

template <Pairs kPairs>
constexpr bool kDrops = kPairs == Pairs::kAny || kPairs == Pairs::kGeneral;

// Calls launch.operator()<Pairs>() for what a call needs: both forms where the device decides.
template <typename Launch>
const char* launch_forms(const AttentionParams& params, const Launch& launch) {
  const char* error = nullptr;
  if (is_general_alone(params)) return launch.template operator()<Pairs::kGeneral>();
  if (params.mask.type != ElementType::kNone || params.dropout_threshold != 0) {
    error = launch.template operator()<Pairs::kAny>();
  } else if (params.is_causal) {
    error = launch.template operator()<Pairs::kCausal>();
  } else {
    error = launch.template operator()<Pairs::kAll>();
  }
  if (error != nullptr || every_row_sees_all(params)) return error;
  return launch.template operator()<Pairs::kGeneral>();
}

// Calls launch.operator()<T>() for the 16-bit type.
template <typename Launch>
const char* launch_type(const AttentionParams& params, const Launch& launch) {
  return params.value.type == ElementType::kBFloat16 ? launch.template operator()<BFloat16>()
                                                     : launch.template operator()<Half>();
}
// Calls launch.operator()<T, F, V>() for the 16-bit type and the widths that rows of features
// and of the value have in shared memory.
template <typename Launch>
const char* launch_sizes(const AttentionParams& params, const Launch& launch) {
  const auto of_features = [&]<typename T, int F>() {
    return params.d_v <= 64 ? launch.template operator()<T, F, 64>()
                            : launch.template operator()<T, F, 128>();
  };
  return launch_type(params, [&]<typename T>() {
    return padded_columns(2 * params.M) == 64 ? of_features.template operator()<T, 64>()
                                              : of_features.template operator()<T, 128>();
  });
}

// Returns whether another kernel computes this head.
template <Pairs kPairs>
__device__ __forceinline__ bool is_of_other_form(uint32_t state) {
  return ((state & kGeneral) != 0) != (kPairs == Pairs::kGeneral);
}

// Returns whether linear_backward has the gradients of a key head.
__device__ __forceinline__ bool is_without_pairs(const FoldedTokens& tokens, int64_t bk) {
  return tokens.linear.quadratic_heads != nullptr && tokens.linear.quadratic_heads[bk] == 0;
}

// Tiles of 16 rows per warp: as many as the registers hold.
template <int V>
constexpr int kRowTilesFor = V <= 64 ? 2 : 1;

}  // namespace
}  // namespace ikattn::cuda
