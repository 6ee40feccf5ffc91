// The forward pass of the folded form of bfloat16, with scores of integers of 8 bits
// (Int8Features). An item is 128 queries, two warpgroups of 64, and passes along the keys, 128 at a
// time. The tensor cores always have something to do:
//
//   S(t) is there: rounded to bfloat16   S(t + 1) begins   O of tile t - 1 is there: its stage is
//   free, and w(t) becomes A   O += w(t) V(t) begins, and the sums of w(t)
//
// w = (s s + eps) e_j is computed two at a time in bfloat16, and rounded at each step; a row is
// divided by the sum of the weights that it was made of. Items and tiles are of one size: under
// causality none but an item's last tile crosses the diagonal.
//
// Compiled for sm_90a alone.
#include "attention/cuda/hopper/hopper.h"
#include "attention/cuda/hopper/query_items.h"
#include "attention/cuda/hopper/weights.h"

namespace ikattn::cuda {
namespace {

constexpr int kInt8Tiles = 4;  // in flight: products of two go on, one is waited for, one is copied
constexpr int kWords = Int8Features::kColumns / 2;  // 16-bit columns of a row of features

template <int V>
struct Int8Layout {
  using Tiles = KeyTiles<BFloat16, kWords, V, kKeys>;
  using Queries = Boxes<kWarpgroupRows, kWords>;
  using Barriers = TileBarriers<1, kInt8Tiles>;
  static constexpr uint32_t kTermBytes = kKeys * 2;
  static constexpr uint32_t kQueries = kInt8Tiles * Tiles::kStage;
  // B of the products that sum weights: eight columns of ones, as boxes of kKeys 16-bit rows.
  static constexpr uint32_t kOnes = kQueries + Queries::kBytes;
  static constexpr uint32_t kOnesBytes = kKeys / kBoxColumns * 1024;
  static constexpr uint32_t kTerms = kOnes + kOnesBytes;  // [stage][kKeys]  magnitudes
  static constexpr uint32_t kBarriers = kTerms + kInt8Tiles * kTermBytes;
  static constexpr uint32_t kNumbers = (kBarriers + Barriers::kBytes + 15) / 16 * 16;
  static constexpr int64_t kBytes = kNumbers + kItemNumbers * 4;
};

// Computes the factors of sums of weights, in all threads of the block.
template <typename L>
__device__ __forceinline__ void write_ones(Shared<unsigned char> shared) {
  Shared<uint32_t> ones = shared_cast<uint32_t>(shared + L::kOnes);
  for (uint32_t i = threadIdx.x; i < L::kOnesBytes / 4; i += kWarpgroupThreads) {
    ones[i] = 0x3f803f80u;
  }
  fence_async();
}

// Adds the weights of each row to its four sums, by a product with ones at `ones`.
[[maybe_unused]] __device__ __forceinline__ void begin_row_sums(
    float (&sums)[4], const uint32_t (&weights)[kKeys / 16][4], uint32_t ones) {
  const uint64_t right = wgmma_operand(ones);
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
    wgmma_by_columns<BFloat16>(sums, weights[k],
                               wgmma_operand_after(right, k / 4 * 1024 + k % 4 * 32), true);
  }
}

// Rounds scores, which are then free, to bfloat16 in the order of A.
[[maybe_unused]] __device__ __forceinline__ void round_scores(int32_t (&scores)[kKeys / 2],
                                                              uint32_t (&rounded)[kKeys / 16][4]) {
  sums_are_there(scores);
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i) {
    rounded[i / 4][i % 4] =
        pack<BFloat16>(static_cast<float>(scores[2 * i]), static_cast<float>(scores[2 * i + 1]));
  }
}

// Makes weights of rounded scores, as A.
//   magnitudes: of the tile's keys, by pairs
//   diagonal: of a tile that crosses it, how many keys a row sees less the thread's first row and
//     one
template <bool kCrosses>
__device__ __forceinline__ void make_weights(const uint32_t (&rounded)[kKeys / 16][4],
                                             Shared<const uint32_t> magnitudes, uint32_t eps,
                                             int diagonal, uint32_t (&weights)[kKeys / 16][4]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
    const uint32_t of_keys = magnitudes[n * 4 + t];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t pair = rounded[n / 2][n % 2 * 2 + half];
      uint32_t& weight = weights[n / 2][n % 2 * 2 + half];
      weight = int8_weights(pair, of_keys, eps);
      if constexpr (kCrosses) weight &= seen_of_two(diagonal, n, half);
    }
  }
  fence_async();
}

// Passes the tiles of an item, as the multiplying warpgroups do: begin_scores() waits for a tile
// and begins its scores, round() frees them, make(stage) makes its weights, and begin_output(stage)
// begins to multiply these with its values.
//   kCrosses: of the last tile, whether make must hide pairs beyond the diagonal
template <bool kCrosses, typename Begin, typename Round, typename Make, typename BeginOutput>
__device__ __forceinline__ void pass_rounded_tiles(const TileBarriers<1, kInt8Tiles>& barriers,
                                                   TileStageOf<kInt8Tiles>& stage, int tiles,
                                                   const Begin& begin_scores, const Round& round,
                                                   const Make& make,
                                                   const BeginOutput& begin_output) {
  begin_scores();
  wgmma_wait<0>();
  round();
  int before = 0;  // the stage of the tile before
  for (int tile = 1; tile < tiles; ++tile) {
    const int own = stage.index;
    stage.next();
    begin_scores();
    wgmma_wait<1>();
    if (tile > 1) barriers.release(before);
    make.template operator()<false>(own);
    begin_output(own);
    wgmma_wait<1>();
    round();
    before = own;
  }
  wgmma_wait<0>();
  if (tiles > 1) barriers.release(before);
  make.template operator()<kCrosses>(stage.index);
  begin_output(stage.index);
  wgmma_wait<0>();
  barriers.release(stage.index);
  stage.next();
}

template <int V, Pairs kPairs>
__global__ void __launch_bounds__(kWarpgroupThreads, 1)
    warpgroup_int8_forward_kernel(AttentionParams params, FoldedTokens tokens, Items items,
                                  const __grid_constant__ ForwardMaps maps) {
#if IKATTN_WARPGROUP_CODE
  using L = Int8Layout<V>;
  static_assert(kLiesInSharedMemory<L, L::Tiles::kStage, L::Tiles::kValues, L::kQueries, L::kOnes>);
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  Shared<int> numbers = shared_cast<int>(shared + L::kNumbers);
  write_ones<L>(shared);
  const typename L::Barriers barriers(base + L::kBarriers);
  // 1. The third warpgroup copies, item after item.
  if (threadIdx.x >= kProductThreads) {
    copy_forward<L, kKeys, kPairs>(params, tokens, items, maps, barriers, numbers, base,
                                   tokens.int8.magnitudes);
    return;
  }
  take_registers<kProductRegisters>();

  const uint32_t eps = pack<BFloat16>(tokens.int8.eps, tokens.int8.eps);
  TileStageOf<kInt8Tiles> stage;
  ItemPlace<1> item;
  uint32_t cleaned = 0;  // parity
  for (;; item.next()) {
    // 2. The item's queries into registers.
    barrier_wait(barriers.item_full(0), item.parity);
    const int index = numbers[0];
    const uint32_t state = static_cast<uint32_t>(int{numbers[1]});
    if (index < 0) break;
    uint32_t phi_q[kWords / 16][4];
    load_left<kWords>(phi_q, base + L::kQueries);
    barriers.release_item(0);
    const QueryBlock at(params, kWarpgroupRows, index);
    const ForwardRowsOfItem rows(params, tokens, at);

    // 3. Tile by tile: scores, weights, output += weights x values.
    int32_t scores[kKeys / 2];
    uint32_t rounded[kKeys / 16][4], weights[kKeys / 16][4];
    float output[V / kBoxColumns][32] = {};
    float sums[4] = {};  // sums of weights of the thread's rows, in [0] and [2]
    const auto begin_scores = [&] {
      const uint32_t place = stage.index * L::Tiles::kStage;
      barriers.wait(stage);
      clean_tile<typename L::Tiles>(state, shared + place, barriers, cleaned);
      wgmma_fence();
      begin_int8<kKeys, kWords>(scores, phi_q, base + place);
      wgmma_commit();
    };
    const auto begin_output = [&](int index_of_stage) {
      const uint32_t place = base + index_of_stage * L::Tiles::kStage;
      wgmma_fence();
      begin_by_rows<BFloat16, kKeys, V>(output, weights, place + L::Tiles::kValues);
      begin_row_sums(sums, weights, base + L::kOnes);
      wgmma_commit();
    };
    const auto finish_scores = [&] { round_scores(scores, rounded); };
    const int tiles = tiles_met<kKeys>(params, kPairs == Pairs::kCausal, at.i0);
    const int diagonal = rows.row0 - (tiles - 1) * kKeys;
    pass_rounded_tiles<kPairs == Pairs::kCausal>(
        barriers, stage, tiles, begin_scores, finish_scores,
        [&]<bool kCrosses>(int index_of_stage) {
          Shared<const uint32_t> magnitudes =
              shared_cast<const uint32_t>(shared + (L::kTerms + index_of_stage * L::kTermBytes));
          make_weights<kCrosses>(rounded, magnitudes, eps, diagonal, weights);
        },
        begin_output);
    sums_are_there(output);
    sums_are_there(sums);

    // 4. Rows of the result.
    const double reference = rows.largest - static_cast<double>(tokens.forms.log_scale);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.template store<V>(params, at, half, sums[2 * half], 0, reference, 1, output);
    }
  }
#else
  trap_without_warpgroups(params, tokens, items, maps);
#endif
}

template <int V>
const char* queue_int8_forward(const AttentionParams& params, const DeviceExecutor& executor,
                               const FoldedTokens& tokens) {
  const Items items(tokens.forms.item_counters,
                    params.B * params.H * ceil_div(params.L, kWarpgroupRows));
  ForwardMaps maps;
  const char* error =
      map_forward<kWords, kKeys>(maps, params, tokens, tokens.int8.phi_q, tokens.int8.phi_k);
  if (error != nullptr) return error;
  return launch_pairs(params, [&]<Pairs kPairs>() {
    return launch(warpgroup_int8_forward_kernel<V, kPairs>, items.blocks(), dim3(kWarpgroupThreads),
                  Int8Layout<V>::kBytes, executor.stream, params, tokens, items, maps);
  });
}

}  // namespace

const char* warpgroup_int8_forward(const AttentionParams& params, const DeviceExecutor& executor,
                                   const FoldedTokens& tokens) {
  return params.d_v <= 64 ? queue_int8_forward<64>(params, executor, tokens)
                          : queue_int8_forward<128>(params, executor, tokens);
}

}  // namespace ikattn::cuda
