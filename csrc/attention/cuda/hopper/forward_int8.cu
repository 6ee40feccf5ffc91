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
#include "attention/cuda/hopper/pairs.h"
#include "attention/cuda/hopper/weights.h"
#include "attention/cuda/tensor_cores/epilogue_forward.h"

namespace ikattn::cuda {
namespace {

constexpr int kInt8Tiles = 4;  // in flight: products of two go on, one is waited for, one is copied
constexpr int kWords = Int8Features::kColumns / 2;  // 16-bit columns of a row of features

template <int V>
struct Int8Layout {
  using Tiles = KeyTiles<BFloat16, kWords, V, kKeys>;
  using Queries = Boxes<kWarpgroupRows, kWords>;
  using Barriers = TileBarriers<1, kInt8Tiles>;
  static constexpr uint32_t kMagnitudeBytes = kKeys * 2;
  static constexpr uint32_t kQueries = kInt8Tiles * Tiles::kStage;
  // B of the products that sum weights: eight columns of ones, as boxes of kKeys 16-bit rows.
  static constexpr uint32_t kOnes = kQueries + Queries::kBytes;
  static constexpr uint32_t kOnesBytes = kKeys / kBoxColumns * 1024;
  static constexpr uint32_t kMagnitudes = kOnes + kOnesBytes;  // [stage][kKeys]
  static constexpr uint32_t kBarriers = kMagnitudes + kInt8Tiles * kMagnitudeBytes;
  static constexpr uint32_t kNumbers = (kBarriers + Barriers::kBytes + 15) / 16 * 16;
  static constexpr int64_t kBytes = kNumbers + kItemNumbers * 4;
};
struct Int8Maps {
  RowMap queries;
  KeyMaps keys;
};

template <int V, Pairs kPairs>
__global__ void __launch_bounds__(kWarpgroupThreads, 1)
    warpgroup_int8_forward_kernel(AttentionParams params, FoldedTokens tokens, PairMask mask,
                                  Items items, const __grid_constant__ Int8Maps maps) {
#if IKATTN_WARPGROUP_CODE
  using L = Int8Layout<V>;
  static_assert(kLiesInSharedMemory<L, L::Tiles::kStage, L::Tiles::kValues, L::kQueries, L::kOnes>);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  Shared<int> numbers = shared_cast<int>(shared + L::kNumbers);
  Shared<uint32_t> ones = shared_cast<uint32_t>(shared + L::kOnes);
  for (uint32_t i = threadIdx.x; i < L::kOnesBytes / 4; i += kWarpgroupThreads) {
    ones[i] = 0x3f803f80u;
  }
  fence_async();
  const typename L::Barriers barriers(base + L::kBarriers);
  // 1. The third warpgroup copies, item after item.
  if (threadIdx.x >= kProductThreads) {
    int bk = 0, batch = 0, value_head = 0;  // of the item
    const BFloat16* magnitudes = nullptr;
    copy_items(
        barriers, items, numbers, L::Queries::kBytes, L::Tiles::kStage + L::kMagnitudeBytes,
        [&](int index) { return tokens.state[QueryBlock(params, kWarpgroupRows, index).bk]; },
        [&](int index, int, uint32_t barrier) {
          const QueryBlock at(params, kWarpgroupRows, index);
          L::Queries::copy(base + L::kQueries, maps.queries, 0, at.bh, at.i0, barrier);
          batch = at.b;
          bk = at.bk;
          value_head = at.value_head;
          magnitudes = tokens.int8.magnitudes + at.bk * padded_tokens(params.S);
          return tiles_met<kKeys>(params, is_causal_call<kPairs>(params), at.i0);
        },
        [&](int tile, int stage, uint32_t barrier) {
          L::Tiles::copy(base + stage * L::Tiles::kStage, maps.keys, bk, batch, value_head, tile,
                         barrier);
          begin_bytes(base + L::kMagnitudes + stage * L::kMagnitudeBytes,
                      magnitudes + tile * int64_t{kKeys}, L::kMagnitudeBytes, barrier);
        });
    return;
  }
  take_registers<kProductRegisters>();

  const uint32_t eps = pack<BFloat16>(tokens.int8.eps, tokens.int8.eps);
  TileStageOf<kInt8Tiles> stage;
  ItemPlace<1> item;
  uint32_t meeting = 0;  // parity
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
    const int row0 = at.i0 + warp * 16 + g;
    // What the results need is under way while the tiles are passed.
    const double largest = tokens.largest[at.bk];
    float poison[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + 8 * half;
      poison[half] = row < params.L ? tokens.poison[at.bh * params.L + row] : 0.0f;
    }
    // 3. Tile by tile: scores, weights, output += weights x values.
    int32_t scores[kKeys / 2];
    uint32_t rounded[kKeys / 16][4];  // scores, in the order of A
    uint32_t weights[kKeys / 16][4];
    float output[V / kBoxColumns][32] = {};
    // Of the weights of the thread's rows, in [0] and [2]; where some are dropped, of the thread's
    // own.
    float sums[4] = {};
    const auto begin_scores = [&] {
      const uint32_t place = stage.index * L::Tiles::kStage;
      barriers.wait(stage);
      if ((state & kUnclean) != 0) {
        L::Tiles::clean(shared + place, barriers.meeting(), meeting);
        meeting ^= 1;
      }
      wgmma_fence();
      begin_int8<kKeys, kWords>(scores, phi_q, base + place);
      wgmma_commit();
    };
    const auto begin_output = [&](int index_of_stage) {
      const uint32_t place = base + index_of_stage * L::Tiles::kStage;
      wgmma_fence();
      begin_by_rows<BFloat16, kKeys, V>(output, weights, place + L::Tiles::kValues);
      if constexpr (kPairs != Pairs::kAny) {
        const uint64_t right = wgmma_operand(base + L::kOnes);
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k) {
          wgmma_by_columns<BFloat16>(sums, weights[k],
                                     wgmma_operand_after(right, k / 4 * 1024 + k % 4 * 32), true);
        }
      }
      wgmma_commit();
    };
    // Scores, which are then free.
    const auto round_scores = [&] {
      sums_are_there(scores);
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) {
        rounded[i / 4][i % 4] = pack<BFloat16>(static_cast<float>(scores[2 * i]),
                                               static_cast<float>(scores[2 * i + 1]));
      }
    };
    [[maybe_unused]] PairBits bits[kKeys / 64];
    const auto find_bits = [&]([[maybe_unused]] int tile) {
      if constexpr (kPairs == Pairs::kAny) {
#pragma unroll
        for (int i = 0; i < kKeys / 64; ++i) {
          bits[i] =
              find_pairs<false>(params, mask, at.b, at.h, at.i0 + warp * 16, tile * kKeys + i * 64);
        }
      }
    };
    // They become A. diagonal: of an item's last tile, how many keys a row sees less the thread's
    // first row and one.
    const auto make_weights = [&]<bool kCrosses>(int index_of_stage, int diagonal) {
      Shared<const uint32_t> magnitudes = shared_cast<const uint32_t>(
          shared + (L::kMagnitudes + index_of_stage * L::kMagnitudeBytes));
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        const uint32_t of_keys = magnitudes[n * 4 + t];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t pair = rounded[n / 2][n % 2 * 2 + half];
          uint32_t& weight = weights[n / 2][n % 2 * 2 + half];
          weight = int8_weights(pair, of_keys, eps);
          if constexpr (kCrosses) weight &= seen_of_two(diagonal, n, half);
          if constexpr (kPairs == Pairs::kAny) {
            weight &= ones_where(bits[n / 8].seen, n % 8, half);
            const float2 two = unpack<BFloat16>(weight);
            sums[2 * half] += two.x + two.y;
            weight &= ~ones_where(bits[n / 8].dropped, n % 8, half);
          }
        }
      }
      fence_async();
    };
    begin_scores();
    wgmma_wait<0>();
    round_scores();
    const int tiles = tiles_met<kKeys>(params, is_causal_call<kPairs>(params), at.i0);
    int before = 0;  // the stage of the tile before
    for (int tile = 1; tile < tiles; ++tile) {
      const int own = stage.index;
      stage.next();
      begin_scores();
      wgmma_wait<1>();
      if (tile > 1) barriers.release(before);
      find_bits(tile - 1);
      make_weights.template operator()<false>(own, 0);
      begin_output(own);
      wgmma_wait<1>();
      round_scores();
      before = own;
    }
    find_bits(tiles - 1);
    wgmma_wait<0>();
    if (tiles > 1) barriers.release(before);
    make_weights.template operator()<kPairs == Pairs::kCausal>(stage.index,
                                                               row0 - (tiles - 1) * kKeys);
    begin_output(stage.index);
    wgmma_wait<0>();
    barriers.release(stage.index);
    stage.next();
    sums_are_there(output);
    sums_are_there(sums);

    // 4. Rows of the result.
    const double reference = largest - static_cast<double>(tokens.log_scale);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = kPairs == Pairs::kAny ? sum_of_lanes<4>(sums[2 * half]) : sums[2 * half];
      const int row = row0 + 8 * half;
      if (row >= params.L) continue;
      store_result<V>(params, at, row, 0, sum == 0 ? sum : sum + poison[half], 0, reference,
                      kPairs == Pairs::kAny ? mask.kept : 1,
                      [&](int n, int c) { return sum_at(output, half, n, c); });
    }
  }
#else
  trap_without_warpgroups(params, tokens, mask, items, maps);
#endif
}

template <int V>
const char* queue_int8_forward(const AttentionParams& params, const DeviceExecutor& executor,
                               const FoldedTokens& tokens) {
  PairMask mask;
  if (const char* error = make_pair_mask(params, executor, false, mask)) return error;
  const Items items(tokens.items_taken, params.B * params.H * ceil_div(params.L, kWarpgroupRows));
  Int8Maps maps;
  const char* error = map_features<kWords, kWarpgroupRows>(maps.queries, tokens.int8.phi_q,
                                                           params.B * params.H, params.L);
  if (error == nullptr) {
    error = map_keys<kWords, kKeys>(maps.keys, params, tokens, tokens.int8.phi_k);
  }
  if (error != nullptr) return error;
  return launch_pairs(params, [&]<Pairs kPairs>() {
    return launch(warpgroup_int8_forward_kernel<V, kPairs>, items.blocks(), dim3(kWarpgroupThreads),
                  Int8Layout<V>::kBytes, executor.stream, params, tokens, mask, items, maps);
  });
}

}  // namespace

const char* warpgroup_int8_forward(const AttentionParams& params, const DeviceExecutor& executor,
                                   const FoldedTokens& tokens) {
  return params.d_v <= 64 ? queue_int8_forward<64>(params, executor, tokens)
                          : queue_int8_forward<128>(params, executor, tokens);
}

}  // namespace ikattn::cuda
