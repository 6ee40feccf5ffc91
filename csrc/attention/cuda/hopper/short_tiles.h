// Parts of the kernels of short calls on Hopper: tokens and their features, values, and the queries
// of a block.
#pragma once

#include "attention/cuda/features/feature_values.h"
#include "attention/cuda/features/warpgroup_angles.h"
#include "attention/cuda/hopper/weights.h"

namespace ikattn::cuda {

// Layout of shared memory, in bytes. Rows are 128 bytes, by boxes as wgmma takes them.
//   F, V: columns of features and values; slices: of the tokens' dimensions; tiles: of kKeys keys
struct ShortLayout {
  static constexpr uint32_t kMost = 227 * 1024;
  static constexpr int kMostStages = 5, kFewestStages = 3;
  uint32_t frequencies = 0;  // [slices][number][F rows]  of each 32 frequencies w1, then w2
  uint32_t tokens;           // [warpgroup][slices][kGroupRows]
  uint32_t keys;             // [tiles]  features
  uint32_t values;           // [stages]
  // A box of ones, B of the products that sum weights. They read 32 bytes of a row: the first row's
  // other bytes are barriers.
  uint32_t ones;
  uint32_t columns;  // [tiles * kKeys]  e_j of bfloat16, or terms
  uint32_t bytes;
  int stages, tiles;

  __host__ __device__ ShortLayout(bool is_int8, int F, int V, int slices, int count)
      : tiles(count) {
    const uint32_t of_columns = static_cast<uint32_t>(tiles * kKeys * (is_int8 ? 2 : 4));
    const uint32_t stage = static_cast<uint32_t>(kKeys * 2 * V);
    tokens = static_cast<uint32_t>(slices * 2 * F) * 128;
    keys = tokens + static_cast<uint32_t>(kWarpgroups * slices) * kSliceBytes;
    values = keys + static_cast<uint32_t>(tiles * kKeys * (is_int8 ? F : 2 * F));
    const uint32_t others = values + 1024 + of_columns;
    const int room = others < kMost ? static_cast<int>((kMost - others) / stage) : 0;
    stages = min(min(room, tiles), kMostStages);
    ones = values + static_cast<uint32_t>(stages) * stage;
    columns = ones + 1024;
    bytes = columns + of_columns;
  }
  // Returns whether values go through the stages, each several times.
  __host__ __device__ bool is_ring() const { return stages < tiles; }
  bool fits() const { return stages == tiles || stages >= kFewestStages; }

  // Return barriers: the keys' features are there; values are clean; a stage's tile is there, and
  // is read.
  __device__ __forceinline__ uint32_t keys_made() const { return ones + 32; }
  __device__ __forceinline__ uint32_t cleaned() const { return ones + 40; }
  __device__ __forceinline__ uint32_t full(int stage) const { return ones + 48 + 8 * stage; }
  __device__ __forceinline__ uint32_t read(int stage) const { return ones + 88 + 8 * stage; }
};
static_assert(48 + 2 * 8 * ShortLayout::kMostStages == 128);

namespace {

// Returns the first of a thread's two rows, of the 64 of its warpgroup. It is computed anew each
// time: no register holds it over the tiles.
__device__ __forceinline__ int row_of_group() {
  const unsigned thread = unknown_to_compiler(threadIdx.x);
  return static_cast<int>(thread / 32 % 4 * 16 + thread % 32 / 4);
}

// Loads the factors of the features of a thread's two keys, of a warpgroup's 64 from j0 on.
__device__ __forceinline__ void load_scales(const AttentionParams& params,
                                            const FoldedTokens& tokens, int bk, int j0,
                                            float (&scales)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t j = j0 + row_of_group() + 8 * half;
    scales[half] = j < params.S ? tokens.forms.scales[bk * params.S + j] : 0.0f;
  }
}

// Computes the products of a warp's tokens with both frequencies, [64][F]; others may then be
// copied in their place.
//   w: the frequencies' place
template <int F, typename T>
__device__ __forceinline__ void make_angles(const WarpTokens<T>& tokens, int slices, uint32_t w,
                                            float (&angles)[F / 2]) {
  w = unknown_to_compiler(w);
  tokens.wait();
#pragma unroll 1
  for (int slice = 0; slice < slices; ++slice) {
    uint32_t x[4][4];
    tokens.load(slice, x);
    wgmma_fence();
    begin_angles<T>(x, w + slice * (2 * F * 128), F * 128, slice > 0, angles);
    wgmma_commit();
    wgmma_wait<0>();
  }
  sums_are_there(angles);
  __syncwarp();  // no lane reads the tokens any more
}

// Makes features of a thread's two rows as A, of which a step has 32 bytes of a row: the cosines of
// 16 frequencies as integers, and their sines; in Half cosines and sines have a step each. The
// order of columns is of no account, as queries and keys agree.
//   scales: of the rows; where 0, features are. not_finite: becomes NaN where an angle is
template <bool kInt8, int F>
__device__ __forceinline__ void make_features(const float (&angles)[F / 2], int M, float unit,
                                              const float (&scales)[2],
                                              uint32_t (&phi)[F / (kInt8 ? 32 : 16)][4],
                                              float (&not_finite)[2]) {
#pragma unroll
  for (int m = 0; m < F / 32; ++m) {  // 16 frequencies each
    const int remaining = M - 16 * m - static_cast<int>(threadIdx.x) % 4 * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float cosines[4], sines[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Four tiles of w1 stand before four of w2 for each 32 frequencies.
        const int first = 4 * (m / 2 * 8 + m % 2 * 2 + i / 2) + 2 * half + i % 2;
        half_sums_of_products<kInt8 ? FeatureForm::kInt8 : FeatureForm::kHalf>(
            angles[first], angles[first + 16], unit, sines[i], cosines[i]);
        not_finite[half] = fmaf(cosines[i], 0.0f, not_finite[half]);
      }
      // Masks clear hidden keys, for these may hold NaN.
      const uint32_t counts = scales[half] == 0 ? 0u : 0xffffffffu;
      if constexpr (kInt8) {
        const uint32_t mask = counts & int8_present(remaining);
        phi[m][half] = pack_int8(cosines, 2 * kInt8OfOne) & mask;
        phi[m][half + 2] = pack_int8(sines, 2 * kInt8OfOne) & mask;
      } else {
        const float scale = 2 * scales[half];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint32_t mask = counts & half_present(remaining - 2 * j);
          phi[2 * m][half + 2 * j] =
              pack_f16x2(cosines[2 * j] * scale, cosines[2 * j + 1] * scale) & mask;
          phi[2 * m + 1][half + 2 * j] =
              pack_f16x2(sines[2 * j] * scale, sines[2 * j + 1] * scale) & mask;
        }
      }
    }
  }
}

// The key head of a block. Divided anew wherever it is asked for: no register holds over the tiles
// what a division makes of its divisor, nor what follows from the head.
struct ShortHead {
  int bk, b, key_head, first;  // first: of the heads that share the keys

  __device__ __forceinline__ ShortHead(const AttentionParams& params, int shares) {
    const unsigned key_heads = unknown_to_compiler(static_cast<unsigned>(params.key_heads));
    const unsigned index = blockIdx.x / unknown_to_compiler(static_cast<unsigned>(shares));
    bk = static_cast<int>(index);
    b = static_cast<int>(index / key_heads);
    key_head = static_cast<int>(index % key_heads);
    first = key_head * static_cast<int>(static_cast<unsigned>(params.H) / key_heads);
  }
};

// An item of a block, by its index: 128 queries of one of the heads that share the keys, the last
// of each head first.
struct ShortItem {
  int head, i0;  // head: among those that share the keys

  __device__ __forceinline__ ShortItem(const AttentionParams& params, unsigned index) {
    // Divided anew for every item: no register holds what a division makes of its divisor.
    const unsigned blocks = unknown_to_compiler(static_cast<unsigned>(count(params)));
    head = static_cast<int>(index / blocks);
    i0 = static_cast<int>(blocks - 1 - index % blocks) * kWarpgroupRows;
  }
  // Returns the number of items of a head.
  __host__ __device__ static int64_t count(const AttentionParams& params) {
    return (params.L + kWarpgroupRows - 1) / kWarpgroupRows;
  }
};

// The values of the tiles that a block passes, item after item: 128 queries, 64 of each warpgroup.
// Where shared memory holds all of a head they are copied once. Else they go through the stages as
// both warpgroups go along, and a thread that has read a tile copies another in its place.
template <typename T, int V, bool kCausal>
class ShortValues {
 public:
  using Tile = Boxes<kKeys, V>;

  // Begins with the items first, first + shares, .. below end.
  __device__ __forceinline__ ShortValues(const AttentionParams& params, const ShortLayout& layout,
                                         Shared<unsigned char> shared, const RowMap& map,
                                         bool is_unclean, int first, int shares, int end)
      : params_(params),
        layout_(layout),
        shared_(shared),
        base_(shared_address(shared)),
        map_(map),
        step_(shares),
        end_(end),
        is_unclean_(is_unclean && layout.is_ring()),
        item_(first - shares) {}

  // Makes the barriers and begins the first copies. By one thread.
  __device__ __forceinline__ void begin() {
    barrier_init(base_ + layout_.keys_made(), kProductThreads);
    barrier_init(base_ + layout_.cleaned(), kProductThreads);
    for (int stage = 0; stage < layout_.stages; ++stage) {
      barrier_init(base_ + layout_.full(stage), 1);
      barrier_init(base_ + layout_.read(stage), kProductThreads / 32);
    }
    fence_barriers();
    for (int stage = 0; stage < layout_.stages; ++stage) {
      copy(stage, layout_.is_ring() ? next_tile() : stage);
    }
  }
  // Waits for the next tile of an item, and returns its place.
  __device__ __forceinline__ uint32_t next() {
    const uint32_t place = layout_.values + index_ * Tile::kBytes;
    barrier_wait(base_ + layout_.full(index_), parity_);
    if (is_unclean_) {
      clean_values<T, kKeys * V, kProductThreads>(shared_ + place);
      fence_async();
      barrier_arrive(base_ + layout_.cleaned());
      barrier_wait(base_ + layout_.cleaned(), cleaned_parity_);
      cleaned_parity_ ^= 1;
    }
    advance(index_, parity_);
    return base_ + place;
  }
  // Says that the products have read the oldest tile.
  __device__ __forceinline__ void release() {
    if (!layout_.is_ring()) return;
    const uint32_t read = base_ + layout_.read(released_);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(read);
    if (threadIdx.x == 0) {
      const int tile = next_tile();
      if (tile >= 0) {
        barrier_wait(read, released_parity_);
        copy(released_, tile);
      }
    }
    __syncwarp();
    advance(released_, released_parity_);
  }
  // Makes zero of all values that are not finite, where no tile is copied again. All multiplying
  // threads call it.
  __device__ __forceinline__ void clean_all() const {
    for (int stage = 0; stage < layout_.stages; ++stage) {
      barrier_wait(base_ + layout_.full(stage), 0);
      clean_values<T, kKeys * V, kProductThreads>(shared_ +
                                                  (layout_.values + stage * Tile::kBytes));
    }
  }
  // Waits for tiles that no query needed, too: a block may not end before its copies.
  __device__ __forceinline__ void finish() const {
    for (int stage = 0; !layout_.is_ring() && stage < layout_.stages; ++stage) {
      barrier_wait(base_ + layout_.full(stage), 0);
    }
  }
  // Ends an item: values that stay are taken from the first on again.
  __device__ __forceinline__ void end_item() {
    if (!layout_.is_ring()) index_ = 0;
  }

 private:
  __device__ __forceinline__ void advance(int& index, uint32_t& parity) const {
    if (++index < layout_.stages) return;
    index = 0;
    if (layout_.is_ring()) parity ^= 1;
  }
  // Returns the tile to be copied next, -1 after the last.
  __device__ __forceinline__ int next_tile() {
    if (tile_ == tiles_) {
      item_ += step_;
      tile_ = tiles_ = 0;
      if (item_ < end_) {
        tiles_ = tiles_met<kKeys>(params_, kCausal, ShortItem(params_, item_).i0);
      }
    }
    return tile_ < tiles_ ? tile_++ : -1;
  }
  __device__ __forceinline__ void copy(int stage, int tile) const {
    if (tile < 0) return;
    const ShortHead of(params_, step_);
    const int group = static_cast<int>(params_.key_heads) / static_cast<int>(params_.G);
    barrier_arrive(base_ + layout_.full(stage), Tile::kBytes);
    Tile::copy(base_ + layout_.values + stage * Tile::kBytes, map_, of.b, of.key_head / group,
               tile * kKeys, base_ + layout_.full(stage));
  }

  const AttentionParams& params_;
  const ShortLayout& layout_;
  Shared<unsigned char> shared_;
  uint32_t base_;
  const RowMap& map_;
  int step_, end_;
  bool is_unclean_;
  int item_, tile_ = 0, tiles_ = 0;  // state of the copies
  int index_ = 0, released_ = 0;
  uint32_t parity_ = 0, released_parity_ = 0, cleaned_parity_ = 0;
};

}  // namespace
}  // namespace ikattn::cuda
