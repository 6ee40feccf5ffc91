// The forward pass of the general form on Hopper: float masks of pairs, and heads whose keys'
// magnitudes differ too much for the folded form. An item is 128 queries, two warpgroups of 64, and
// passes along the keys, 64 at a time. Rows are relative to the largest exponent so far, as in
// softmax attention: where it rises, what they have added up to is multiplied.
//
//   tile t is here   S(t) begins   O += w(t - 1) V(t - 1) begins
//   S(t) is there: exponents, w(t), and sums   O is there, and is multiplied: w(t) become the next
//   product's A, and the stage of t - 1 is free
//
// Compiled for sm_90a alone.
#include "attention/cuda/hopper/general_weights.h"
#include "attention/cuda/hopper/hopper.h"
#include "attention/cuda/hopper/query_items.h"

namespace ikattn::cuda {
namespace {

// Whether registers hold an item's queries.
template <int F, int V>
constexpr bool kHoldsQueries = F + V < 256;

template <typename T, int F, int V>
struct GeneralLayout {
  using Tiles = KeyTiles<T, F, V, kStep>;
  using Queries = Boxes<kWarpgroupRows, F>;
  using Barriers = TileBarriers<1>;
  static constexpr uint32_t kOffsets = kTilesInFlight * Tiles::kStage;  // [stage]
  static constexpr uint32_t kQueries = kOffsets + kTilesInFlight * kOffsetBytes;
  static constexpr uint32_t kLogits =
      kQueries + Queries::kBytes;  // [stage][2][kStep], high and low
  static constexpr uint32_t kBarriers = kLogits + kTilesInFlight * 2 * kStep * 4;
  static constexpr uint32_t kNumbers = (kBarriers + Barriers::kBytes + 15) / 16 * 16;
  static constexpr int64_t kBytes = kNumbers + kItemNumbers * 4;
};
struct GeneralMaps {
  ForwardMaps tokens;
  RowMap offsets;  // of calls that have some
};

// What the third warpgroup of a block does.
template <typename L>
__device__ __forceinline__ void copy_general(const AttentionParams& params,
                                             const FoldedTokens& tokens, const Items& items,
                                             const GeneralMaps& maps,
                                             const typename L::Barriers& barriers,
                                             Shared<int> numbers, uint32_t base) {
  int head = 0, i0 = 0;  // of the item
  copy_query_items<L, kStep, Pairs::kGeneral>(
      params, tokens, items, maps.tokens.keys, barriers, numbers, base, L::Queries::kBytes,
      2 * kStep * 4 + offset_bytes(params),
      [&](const QueryBlock& at, uint32_t barrier) {
        L::Queries::copy(base + L::kQueries, maps.tokens.queries, 0, at.bh, at.i0, barrier);
        head = at.h;
        i0 = at.i0;
      },
      [&](int bk, int batch, int tile, int stage, uint32_t barrier) {
        copy_exponents<L>(params, tokens, maps.offsets, base, bk, batch, head, i0, tile, stage,
                          barrier);
      });
}

template <typename T, int F, int V>
__global__ void __launch_bounds__(kWarpgroupThreads, 1)
    warpgroup_general_forward_kernel(AttentionParams params, FoldedTokens tokens, PairMask mask,
                                     Items items, const __grid_constant__ GeneralMaps maps) {
#if IKATTN_WARPGROUP_CODE
  using L = GeneralLayout<T, F, V>;
  static_assert(kLiesInSharedMemory<L, L::Tiles::kStage, L::Tiles::kValues, L::kOffsets,
                                    kOffsetBytes, L::kQueries>);
  if (!has_general_head(params, tokens)) return;  // the whole block
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  Shared<int> numbers = shared_cast<int>(shared + L::kNumbers);
  const typename L::Barriers barriers(base + L::kBarriers);
  // 1. The third warpgroup copies, item after item.
  if (threadIdx.x >= kProductThreads) {
    copy_general<L>(params, tokens, items, maps, barriers, numbers, base);
    return;
  }
  take_registers<kRegistersOfProducts<Pairs::kGeneral>>();

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
    if constexpr (kHoldsQueries<F, V>) {
      load_left<F>(phi_q, base + L::kQueries);
      barriers.release_item(0);
    }
    const QueryBlock at(params, kWarpgroupRows, index);
    const ForwardRowsOfItem rows(params, tokens, at);

    // 3. Tile by tile: scores, weights, output += weights x values.
    float s[kStep / 2];
    uint32_t weights[kStep / 16][4];  // of the tile before
    float output[V / kBoxColumns][32] = {};
    GeneralRows sums;
    PairBits bits[1];
    const auto begin = [&](int tile, int index_of_stage) {
      const uint32_t place = index_of_stage * L::Tiles::kStage;
      find_tile_pairs<Pairs::kGeneral>(params, mask, at, tile, bits);
      clean_tile<typename L::Tiles>(state, shared + place, barriers, meeting);
      wgmma_fence();
      begin_scores<typename L::Tiles::Keys, typename L::Queries, kHoldsQueries<F, V>>(
          s, phi_q, base + L::kQueries, base + place);
      wgmma_commit();
    };
    const auto begin_output = [&](int index_of_stage) {
      const uint32_t place = base + index_of_stage * L::Tiles::kStage;
      wgmma_fence();
      begin_by_rows<T, kStep, V>(output, weights, place + L::Tiles::kValues);
      wgmma_commit();
    };
    const auto make = [&](int tile, int index_of_stage) {
      Shared<const float> logits =
          shared_cast<float>(shared + (L::kLogits + index_of_stage * 2 * kStep * 4));
      sums_are_there(s);
      if (is_passing(params, tile * int64_t{kStep})) {
        float e[kStep / 2];
        sums.exponentials_of(e, params.mask.type,
                             shared + (L::kOffsets + index_of_stage * kOffsetBytes),
                             {logits, logits + kStep}, bits[0]);
        sums.template weigh<T>(s, e, tokens.general, bits[0]);
      }
      fence_async();
    };
    const auto pack = [&] {
      sums_are_there(output);
      sums.rescale_sums(output);
      pack_left<T, kStep / 8>(s, weights);
    };
    pass_tiles(barriers, stage, tiles_met<kStep>(params, params.is_causal, at.i0), begin,
               begin_output, make, pack);
    sums_are_there(output);
    if constexpr (!kHoldsQueries<F, V>) barriers.release_item(0);

    // 4. Rows of the result.
    const float kept = mask.kept / value_scale_of(tokens, at.b * params.G + at.value_head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const double largest =
          static_cast<double>(sums.largest[half]) + static_cast<double>(sums.lows[half]);
      rows.template store<V>(params, at, half, sum_of_lanes<4>(sums.sums[half]),
                             sum_of_lanes<4>(sums.roundings[half]),
                             reference_of<T, true>(tokens, at.bk, largest), kept, output);
    }
  }
#else
  trap_without_warpgroups(params, tokens, mask, items, maps);
#endif
}

}  // namespace

const char* warpgroup_general_forward(const AttentionParams& params, const DeviceExecutor& executor,
                                      const FoldedTokens& tokens) {
  PairMask mask;
  if (const char* error = make_pair_mask(params, executor, false, mask)) return error;
  return launch_sizes(params, [&]<typename T, int F, int V>() {
    // The folded form's kernel has counted with the first.
    const Items items(tokens.items_taken + 1,
                      params.B * params.H * ceil_div(params.L, kWarpgroupRows));
    GeneralMaps maps = {};
    const char* error =
        map_forward<F, kStep>(maps.tokens, params, tokens, tokens.phi_q, tokens.phi_k);
    if (error == nullptr) error = map_offsets<kWarpgroupRows>(maps.offsets, params);
    if (error != nullptr) return error;
    return launch(warpgroup_general_forward_kernel<T, F, V>, items.blocks(),
                  dim3(kWarpgroupThreads), GeneralLayout<T, F, V>::kBytes, executor.stream, params,
                  tokens, mask, items, maps);
  });
}

}  // namespace ikattn::cuda
