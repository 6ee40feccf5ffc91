// Pipeline that the kernels of warpgroups share. A block is three of them: two multiply, and one
// thread of the third begins the copies, up to three tiles ahead of those who read. Nobody else
// waits for anybody: a stage has a barrier for its tile to be there, and one for it to be read.
//
// There are no more blocks than run at once. An item is 128 tokens of a head, with all tiles that
// they pass: a block takes one after the other, and the first tiles of the next are on their way
// while the results of the one before are stored.
//
// Tiles lie in shared memory as wgmma takes them, boxes of 64 columns: rows of 128 bytes, whose
// 16-byte chunks are swizzled by the row.
#pragma once

#include "attention/cuda/tensor_cores/blocks.h"
#include "support/cuda/bulk_copies.h"
#include "support/cuda/warpgroups.h"

namespace ikattn::cuda {

namespace {

constexpr int kWarpgroups = 2;  // that multiply
constexpr int kProductThreads = kWarpgroups * 128;
constexpr int kWarpgroupThreads = kProductThreads + 128;
constexpr int kWarpgroupRows = kWarpgroups * 64;  // rows of a block
// One is read by products that go on while the next is waited for, and one is copied.
constexpr int kTilesInFlight = 3;
constexpr int kBoxColumns = 64;
// Registers of a thread: 168 are there for each, and the copying ones need few.
constexpr int kProductRegisters = 240, kCopyRegisters = 24;
// Registers that nobody gives away would keep the multiplying warpgroups waiting.
static_assert(kProductThreads * kProductRegisters + 128 * kCopyRegisters <=
              kWarpgroupThreads * 168);
// Whether a block may have as much shared memory, and kBoxes, where boxes begin, are multiples of
// 1024.
template <typename Layout, uint32_t... kBoxes>
constexpr bool kLiesInSharedMemory =
    Layout::kBytes <= 227 * 1024 && Layout::kBarriers % 8 == 0 && ((kBoxes % 1024 == 0) && ...);

// kRows rows of kWidth 16-bit elements.
template <int kRows, int kWidth>
struct Boxes {
  static constexpr int kCount = kWidth / kBoxColumns;
  static constexpr uint32_t kBox = kRows * 128, kBytes = kCount * kBox;

  // Begins to copy them to `base` from `row` on; zeros beyond the last, and beyond the
  // columns.
  __device__ static __forceinline__ void copy(uint32_t base, const RowMap& map, int batch, int head,
                                              int row, uint32_t barrier) {
#pragma unroll
    for (int box = 0; box < kCount; ++box) {
      begin_box(base + box * kBox, map, batch, head, row, box * kBoxColumns, barrier);
    }
  }
  // Returns the operand of 16 columns of rows, from the k-th 16 on, or of 16 rows of a box, from
  // the k-th 16 on; `operand` is where they begin.
  __device__ static __forceinline__ uint64_t by_columns(uint64_t operand, int k) {
    return wgmma_operand_after(operand, k / 4 * kBox + k % 4 * 32);
  }
  __device__ static __forceinline__ uint64_t by_rows(uint64_t operand, int box, int k) {
    return wgmma_operand_after(operand, box * kBox + k * 2048);
  }
};

// The stage of a tile, of kStages, and how often stages have been used before, in parity.
template <int kStages>
struct TileStageOf {
  int index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void next() {
    if (++index < kStages) return;
    index = 0;
    parity ^= 1;
  }
  // Returns the index of the stage before.
  __device__ __forceinline__ int before() const { return index == 0 ? kStages - 1 : index - 1; }
};
using TileStage = TileStageOf<kTilesInFlight>;

// The items of a kernel.
struct Items {
  unsigned* counter;  // counts items beyond the first of each block; 0 at first
  int count;

  Items(unsigned* counter, int64_t items) : counter(counter), count(static_cast<int>(items)) {}
  dim3 blocks() const {
    return dim3(static_cast<unsigned>(count < multiprocessors() ? count : multiprocessors()));
  }
  __device__ __forceinline__ int first() const { return static_cast<int>(blockIdx.x); }
  __device__ __forceinline__ int next() const {
    return static_cast<int>(gridDim.x + atomicAdd(counter, 1u));
  }
};
// Numbers that tell the multiplying threads of an item, in shared memory: its index, or -1 after
// the last, and the state of its head. Each has 16 bytes of its own.
constexpr int kItemNumbers = 4;

// In shared memory from `first` on: for each stage that its tile is there, and that it is read; the
// same of kItems places of an item's own tokens; and one for those who multiply.
template <int kItems, int kStages = kTilesInFlight>
struct TileBarriers {
  static constexpr uint32_t kBytes = (2 * kStages + 2 * kItems + 1) * 8;
  uint32_t first;

  // Initialises the barriers; all threads of the block call it, and it synchronises them.
  __device__ __forceinline__ explicit TileBarriers(uint32_t place) : first(place) {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        barrier_init(full(stage), 1);
        barrier_init(read(stage), kProductThreads / 32);
      }
      for (int item = 0; item < kItems; ++item) {
        barrier_init(item_full(item), 1);
        barrier_init(item_read(item), kProductThreads / 32);
      }
      barrier_init(cleaned(), kProductThreads);
      fence_barriers();
    }
    __syncthreads();
  }
  __device__ __forceinline__ uint32_t full(int stage) const { return first + stage * 8; }
  __device__ __forceinline__ uint32_t read(int stage) const {
    return first + (kStages + stage) * 8;
  }
  __device__ __forceinline__ uint32_t item_full(int item) const {
    return first + (2 * kStages + item) * 8;
  }
  __device__ __forceinline__ uint32_t item_read(int item) const {
    return first + (2 * kStages + kItems + item) * 8;
  }
  __device__ __forceinline__ uint32_t cleaned() const {
    return first + (2 * kStages + 2 * kItems) * 8;
  }

  // Waits until the tile is there.
  __device__ __forceinline__ void wait(const TileStageOf<kStages>& stage) const {
    barrier_wait(full(stage.index), stage.parity);
  }
  // Says that the warp has read the tile, its products included. Reads by its threads themselves
  // since a fence_async have to be fenced before a copy may come there.
  __device__ __forceinline__ void release(int stage) const { arrive_as_warp(read(stage)); }
  __device__ __forceinline__ void release_item(int item) const {
    fence_async();
    arrive_as_warp(item_read(item));
  }

 private:
  __device__ __forceinline__ static void arrive_as_warp(uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
  }
};

// Place of an item's own tokens, and how often it has been used before, in parity.
template <int kItems>
struct ItemPlace {
  int index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void next() {
    if (++index < kItems) return;
    index = 0;
    parity ^= 1;
  }
};

// Copies items, as the third warpgroup does. For each item, state_of(index) is the state of its
// head; begin(index, place, barrier) begins the copies of its own tokens, `bytes` of them, and
// returns how many tiles it passes; copy(tile, stage, barrier) begins the copies of a tile.
template <int kItems, int kStages, typename StateOf, typename Begin, typename Copy>
__device__ __forceinline__ void copy_items(const TileBarriers<kItems, kStages>& barriers,
                                           const Items& items, Shared<int> numbers, uint32_t bytes,
                                           uint32_t tile_bytes, const StateOf& state_of,
                                           const Begin& begin, const Copy& copy) {
  give_registers<kCopyRegisters>();
  if (threadIdx.x != kProductThreads) return;
  TileStageOf<kStages> stage;
  ItemPlace<kItems> place;
#pragma unroll 1  // registers are few
  for (int index = items.first(); index < items.count; index = items.next()) {
    const uint32_t state = state_of(index);
    if (is_of_other_form<Pairs::kAll>(state)) continue;
    barrier_wait(barriers.item_read(place.index), place.parity ^ 1);
    numbers[place.index * kItemNumbers] = index;
    numbers[place.index * kItemNumbers + 1] = static_cast<int>(state);
    barrier_arrive(barriers.item_full(place.index), bytes);
    const int tiles = begin(index, place.index, barriers.item_full(place.index));
    place.next();
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile, stage.next()) {
      barrier_wait(barriers.read(stage.index), stage.parity ^ 1);
      barrier_arrive(barriers.full(stage.index), tile_bytes);
      copy(tile, stage.index, barriers.full(stage.index));
    }
  }
  barrier_wait(barriers.item_read(place.index), place.parity ^ 1);
  numbers[place.index * kItemNumbers] = -1;
  barrier_arrive(barriers.item_full(place.index));
}

// Passes the tiles of an item, as the multiplying warpgroups do: begin(tile, stage) begins the
// products for a tile, make(tile, stage) turns them into factors, once they are over, and fences
// its reads of the tile; pack() makes the factors A. Meanwhile the tensor cores are at the tile
// before: begin_sums(stage) begins to multiply its factors with it.
template <int kItems, typename Begin, typename BeginSums, typename Make, typename Pack>
__device__ __forceinline__ void pass_tiles(const TileBarriers<kItems>& barriers, TileStage& stage,
                                           int tiles, const Begin& begin,
                                           const BeginSums& begin_sums, const Make& make,
                                           const Pack& pack) {
  int before = 0;  // the stage of the tile before
  for (int tile = 0; tile < tiles; ++tile) {
    barriers.wait(stage);
    begin(tile, stage.index);
    if (tile > 0) {
      begin_sums(before);
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    make(tile, stage.index);
    wgmma_wait<0>();
    if (tile > 0) barriers.release(before);
    pack();
    before = stage.index;
    stage.next();
  }
  if (tiles == 0) return;
  begin_sums(before);
  wgmma_wait<0>();
  barriers.release(before);
}

// Returns how many tiles of kKeys keys an item's queries see.
template <int kKeys>
__device__ __forceinline__ int tiles_met(const AttentionParams& params, bool causal, int i0) {
  const int64_t end = causal ? min(params.S, int64_t{i0} + kWarpgroupRows) : params.S;
  return static_cast<int>((end + kKeys - 1) / kKeys);
}

// Returns true for a tile's first key, which the compiler does not see: in the same block of code
// it would move what is done between two waits for products behind the second, where the tensor
// cores have nothing to do.
__device__ __forceinline__ bool is_passing(const AttentionParams& params, int64_t j0) {
  return j0 < params.S;
}

// Calls launch.operator()<Pairs>() for what a call needs.
template <typename Launch>
const char* launch_pairs(const AttentionParams& params, const Launch& launch) {
  return params.is_causal ? launch.template operator()<Pairs::kCausal>()
                          : launch.template operator()<Pairs::kAll>();
}

// Features, or gradients, of all batches' heads, [heads, N, F], by boxes of kRows rows.
template <int F, int kRows>
const char* map_features(RowMap& map, const void* features, int64_t heads, int64_t N) {
  return map_rows(map, features, {1, heads, N, F}, {heads * N * F, N * F, F, 1}, kRows);
}
template <int kRows>
const char* map_values(RowMap& map, const AttentionParams& params, const FoldedTokens& tokens) {
  return map_rows(map, tokens.value.data, {params.B, params.G, params.S, tokens.value_columns},
                  tokens.value.stride, kRows);
}

// Maps of the memory that keys and values of a call are copied from.
struct KeyMaps {
  RowMap keys, values;
};
template <int F, int kRows>
const char* map_keys(KeyMaps& maps, const AttentionParams& params, const FoldedTokens& tokens,
                     const void* features) {
  const char* error =
      map_features<F, kRows>(maps.keys, features, params.B * params.key_heads, params.S);
  return error != nullptr ? error : map_values<kRows>(maps.values, params, tokens);
}

// Tiles of kKeys keys of a head, and of their values behind them.
template <typename T, int F, int V, int kKeys>
struct KeyTiles {
  using Keys = Boxes<kKeys, F>;
  using Values = Boxes<kKeys, V>;
  static constexpr uint32_t kValues = Keys::kBytes, kStage = kValues + Values::kBytes;

  // Begins to copy a tile to `place`. bk: the key head, of all batches'.
  __device__ __forceinline__ static void copy(uint32_t place, const KeyMaps& maps, int bk,
                                              int batch, int value_head, int tile,
                                              uint32_t barrier) {
    Keys::copy(place, maps.keys, 0, bk, tile * kKeys, barrier);
    Values::copy(place + kValues, maps.values, batch, value_head, tile * kKeys, barrier);
  }
  // Makes zero of the values of the tile at `place` that are not finite. All multiplying threads
  // call it, and synchronise at the barrier `cleaned`, whose phase has the parity `parity`.
  __device__ __forceinline__ static void clean(Shared<unsigned char> place, uint32_t cleaned,
                                               uint32_t parity) {
    clean_values<T, kKeys * V, kProductThreads>(place + kValues);
    fence_async();
    barrier_arrive(cleaned);
    barrier_wait(cleaned, parity);
  }
};

// Loads the warp's 16 rows of an item's tokens at `tokens`, Boxes<kWarpgroupRows, kWidth>, as A.
template <int kWidth>
__device__ __forceinline__ void load_left(uint32_t (&a)[kWidth / 16][4], uint32_t tokens) {
  const FragmentAddresses places =
      FragmentAddresses::of_rows(tokens + threadIdx.x / 32 * (16 * 128), 128);
#pragma unroll
  for (int k = 0; k < kWidth / 16; ++k) {
    ldmatrix_x4(a[k], places.place[k % 4] + k / 4 * Boxes<kWarpgroupRows, kWidth>::kBox);
  }
}

// Begins sums = a b, kWidth on the inner axis.
template <typename T, int kRows, int kWidth, int kSums>
__device__ __forceinline__ void begin_by_columns(float (&sums)[kSums],
                                                 const uint32_t (&a)[kWidth / 16][4], uint32_t b) {
  const uint64_t right = wgmma_operand(b);
#pragma unroll
  for (int k = 0; k < kWidth / 16; ++k) {
    wgmma_by_columns<T>(sums, a[k], Boxes<kRows, kWidth>::by_columns(right, k), k > 0);
  }
}
// Begins products of integers of 8 bits, two in each of kWidth columns.
template <int kRows, int kWidth>
__device__ __forceinline__ void begin_int8(int32_t (&sums)[64], const uint32_t (&a)[kWidth / 16][4],
                                           uint32_t b) {
  const uint64_t right = wgmma_operand(b);
#pragma unroll
  for (int k = 0; k < kWidth / 16; ++k) {
    wgmma_int8(sums, a[k], Boxes<kRows, kWidth>::by_columns(right, k), k > 0);
  }
}
// Begins products of an a in shared memory; Left, Right: boxes of both.
template <typename T, typename Left, typename Right>
__device__ __forceinline__ void begin_by_columns(float (&sums)[32], uint32_t a, uint32_t b) {
  const uint64_t left = wgmma_operand(a), right = wgmma_operand(b);
#pragma unroll
  for (int k = 0; k < Right::kCount * kBoxColumns / 16; ++k) {
    wgmma_by_columns<T>(sums, Left::by_columns(left, k), Right::by_columns(right, k), k > 0);
  }
}
// Begins sums[box] += a b, kRows on the inner axis.
template <typename T, int kRows, int kWidth>
__device__ __forceinline__ void begin_by_rows(float (&sums)[kWidth / kBoxColumns][32],
                                              const uint32_t (&a)[kRows / 16][4], uint32_t b) {
  const uint64_t right = wgmma_operand(b);
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k) {
#pragma unroll
    for (int box = 0; box < kWidth / kBoxColumns; ++box) {
      wgmma_by_rows<T>(sums[box], a[k], Boxes<kRows, kWidth>::by_rows(right, box, k), true);
    }
  }
}
// Returns one of a thread's sums [64][64 boxes]: c of its row `half` in tile n of 8.
template <int kBoxes>
__device__ __forceinline__ float sum_at(const float (&sums)[kBoxes][32], int half, int n, int c) {
  return sums[n / 8][n % 8 * 4 + 2 * half + c];
}
// Packs sums [64][8 kTiles] of products into A.
template <typename T, int kTiles>
__device__ __forceinline__ void pack_left(const float (&sums)[4 * kTiles],
                                          uint32_t (&a)[kTiles / 2][4]) {
#pragma unroll
  for (int k = 0; k < kTiles / 2; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[k][i] = pack<T>(sums[8 * k + 2 * i], sums[8 * k + 2 * i + 1]);
  }
}

}  // namespace
}  // namespace ikattn::cuda
