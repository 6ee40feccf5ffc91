// The forward pass of the folded form on Hopper: an item is 128 queries, two warpgroups of 64, and
// passes along the keys, 128 at a time. While a tile's weights are made, the tensor cores multiply
// those of the tile before with its values:
//
//   tile t is here   S(t) begins   O += w(t - 1) V(t - 1) begins
//   S(t) is there: w(t) in its place, and sums   O is there: w(t) become the next product's A, and
//   the stage of t - 1 is free
//
// Compiled for sm_90a alone.
#include "attention/cuda/hopper/hopper.h"
#include "attention/cuda/hopper/pairs.h"
#include "attention/cuda/hopper/weights.h"
#include "attention/cuda/tensor_cores/epilogue_forward.h"

namespace ikattn::cuda {
namespace {

template <typename T, int F, int V>
struct ForwardLayout {
  using Tiles = KeyTiles<T, F, V, kKeys>;
  using Queries = Boxes<kWarpgroupRows, F>;
  using Barriers = TileBarriers<1>;
  static constexpr uint32_t kQueries = kTilesInFlight * Tiles::kStage;
  static constexpr uint32_t kTerms = kQueries + Queries::kBytes;  // [stage][kKeys]
  static constexpr uint32_t kBarriers = kTerms + kTilesInFlight * kKeys * 4;
  static constexpr uint32_t kNumbers = (kBarriers + Barriers::kBytes + 15) / 16 * 16;
  static constexpr int64_t kBytes = kNumbers + kItemNumbers * 4;
};
struct ForwardMaps {
  RowMap queries;
  KeyMaps keys;
};

template <typename T, int F, int V, Pairs kPairs>
__global__ void __launch_bounds__(kWarpgroupThreads, 1)
    warpgroup_forward_kernel(AttentionParams params, FoldedTokens tokens, PairMask mask,
                             Items items, const __grid_constant__ ForwardMaps maps) {
#if IKATTN_WARPGROUP_CODE
  using L = ForwardLayout<T, F, V>;
  static_assert(kLiesInSharedMemory<L, L::Tiles::kStage, L::Tiles::kValues, L::kQueries>);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  Shared<int> numbers = shared_cast<int>(shared + L::kNumbers);
  const typename L::Barriers barriers(base + L::kBarriers);
  // 1. The third warpgroup copies, item after item.
  if (threadIdx.x >= kProductThreads) {
    int bk = 0, batch = 0, value_head = 0;  // of the item
    const float* terms = nullptr;
    copy_items(
        barriers, items, numbers, L::Queries::kBytes, L::Tiles::kStage + kKeys * 4,
        [&](int index) { return tokens.state[QueryBlock(params, kWarpgroupRows, index).bk]; },
        [&](int index, int, uint32_t barrier) {
          const QueryBlock at(params, kWarpgroupRows, index);
          L::Queries::copy(base + L::kQueries, maps.queries, 0, at.bh, at.i0, barrier);
          batch = at.b;
          bk = at.bk;
          value_head = at.value_head;
          terms = tokens.terms + at.bk * padded_tokens(params.S);
          return tiles_met<kKeys>(params, is_causal_call<kPairs>(params), at.i0);
        },
        [&](int tile, int stage, uint32_t barrier) {
          L::Tiles::copy(base + stage * L::Tiles::kStage, maps.keys, bk, batch, value_head, tile,
                         barrier);
          begin_bytes(base + L::kTerms + stage * kKeys * 4, terms + tile * int64_t{kKeys},
                      kKeys * 4, barrier);
        });
    return;
  }
  take_registers<kProductRegisters>();

  TileStage stage;
  ItemPlace<1> item;
  uint32_t meeting = 0;  // parity
  for (;; item.next()) {
    // 2. The item's queries into registers.
    barrier_wait(barriers.item_full(0), item.parity);
    const int index = numbers[0];
    const uint32_t state = static_cast<uint32_t>(int{numbers[1]});
    if (index < 0) break;
    uint32_t phi_q[F / 16][4];
    load_left<F>(phi_q, base + L::kQueries);
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
    float s[kKeys / 2];
    uint32_t weights[kKeys / 16][4];  // of the tile before
    float output[V / kBoxColumns][32] = {};
    float sums[2] = {};
    Roundings roundings;
    [[maybe_unused]] PairBits bits[kKeys / 64];
    const auto begin = [&]([[maybe_unused]] int tile, int index_of_stage) {
      if constexpr (kPairs == Pairs::kAny) {
#pragma unroll
        for (int i = 0; i < kKeys / 64; ++i) {
          bits[i] =
              find_pairs<false>(params, mask, at.b, at.h, at.i0 + warp * 16, tile * kKeys + i * 64);
        }
      }
      const uint32_t place = index_of_stage * L::Tiles::kStage;
      if ((state & kUnclean) != 0) {
        L::Tiles::clean(shared + place, barriers.meeting(), meeting);
        meeting ^= 1;
      }
      wgmma_fence();
      begin_by_columns<Half, kKeys, F>(s, phi_q, base + place);
      wgmma_commit();
    };
    const auto begin_output = [&](int index_of_stage) {
      const uint32_t place = base + index_of_stage * L::Tiles::kStage;
      wgmma_fence();
      begin_by_rows<T, kKeys, V>(output, weights, place + L::Tiles::kValues);
      wgmma_commit();
    };
    const auto make = [&](int tile, int index_of_stage) {
      Shared<const float> terms =
          shared_cast<float>(shared + (L::kTerms + index_of_stage * kKeys * 4));
      sums_are_there(s);
      const int diagonal = row0 - tile * kKeys;
      if constexpr (kPairs == Pairs::kAny) {
        if (is_passing(params, tile * int64_t{kKeys})) {
          to_weights<T, true>(
              s, terms, [&](int n, int c) { return bits[n / 8].sees(n % 8, c); },
              [&](int n, int c) { return bits[n / 8].drops(n % 8, c); }, sums, roundings);
        }
      } else if (kPairs == Pairs::kCausal && diagonal - g < kKeys - 1) {
        to_weights<T, true>(s, terms, PairsUpTo{diagonal}, NoPairs(), sums, roundings);
      } else if ((state & kFew) != 0) {
        to_weights<T, true>(s, terms, AllPairs(), NoPairs(), sums, roundings);
      } else if (is_passing(params, tile * int64_t{kKeys})) {
        to_weights<T, false>(s, terms, AllPairs(), NoPairs(), sums, roundings);
      }
      fence_async();
    };
    pass_tiles(barriers, stage, tiles_met<kKeys>(params, is_causal_call<kPairs>(params), at.i0),
               begin, begin_output, make, [&] { pack_left<T, kKeys / 8>(s, weights); });
    sums_are_there(output);

    // 4. Rows of the result.
    const float kept = (kPairs == Pairs::kAny ? mask.kept : 1) /
                       value_scale_of(tokens, at.b * params.G + at.value_head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sum_of_lanes<4>(sums[half]);
      const float rounding = sum_of_lanes<4>(roundings[half]);
      const int row = row0 + 8 * half;
      if (row >= params.L) continue;
      store_result<V>(params, at, row, 0, sum == 0 ? sum : sum + poison[half], rounding,
                      largest - static_cast<double>(tokens.log_scale), kept,
                      [&](int n, int c) { return sum_at(output, half, n, c); });
    }
  }
#else
  trap_without_warpgroups(params, tokens, mask, items, maps);
#endif
}

}  // namespace

const char* warpgroup_forward(const AttentionParams& params, const DeviceExecutor& executor,
                              const FoldedTokens& tokens) {
  PairMask mask;
  if (const char* error = make_pair_mask(params, executor, false, mask)) return error;
  return launch_sizes(params, [&]<typename T, int F, int V>() {
    const Items items(tokens.items_taken, params.B * params.H * ceil_div(params.L, kWarpgroupRows));
    ForwardMaps maps;
    const char* error =
        map_features<F, kWarpgroupRows>(maps.queries, tokens.phi_q, params.B * params.H, params.L);
    if (error == nullptr) error = map_keys<F, kKeys>(maps.keys, params, tokens, tokens.phi_k);
    if (error != nullptr) return error;
    return launch_pairs(params, [&]<Pairs kPairs>() {
      return launch(warpgroup_forward_kernel<T, F, V, kPairs>, items.blocks(),
                    dim3(kWarpgroupThreads), ForwardLayout<T, F, V>::kBytes, executor.stream,
                    params, tokens, mask, items, maps);
    });
  });
}

}  // namespace ikattn::cuda
