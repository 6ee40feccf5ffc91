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
#include "attention/cuda/hopper/query_items.h"
#include "attention/cuda/hopper/weights.h"

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

// Makes weights of the scores of the thread's two rows, the first of them row0.
//   terms: of the tile's keys; state: of the head
//   sums, roundings: as in ForwardRows
template <typename T, Pairs kPairs>
__device__ __forceinline__ void make_weights(const AttentionParams& params, int tile, int row0,
                                             uint32_t state, Shared<const float> terms,
                                             float (&s)[kKeys / 2], float (&sums)[2],
                                             Roundings& roundings) {
  sums_are_there(s);
  const int diagonal = row0 - tile * kKeys, g = static_cast<int>(threadIdx.x) % 32 / 4;
  if (kPairs == Pairs::kCausal && diagonal - g < kKeys - 1) {
    to_weights<T, true>(s, terms, PairsUpTo{diagonal}, sums, roundings);
  } else if ((state & kFew) != 0) {
    to_weights<T, true>(s, terms, AllPairs(), sums, roundings);
  } else if (is_passing(params, tile * int64_t{kKeys})) {
    to_weights<T, false>(s, terms, AllPairs(), sums, roundings);
  }
  fence_async();
}

template <typename T, int F, int V, Pairs kPairs>
__global__ void __launch_bounds__(kWarpgroupThreads, 1)
    warpgroup_forward_kernel(AttentionParams params, FoldedTokens tokens, Items items,
                             const __grid_constant__ ForwardMaps maps) {
#if IKATTN_WARPGROUP_CODE
  using L = ForwardLayout<T, F, V>;
  static_assert(kLiesInSharedMemory<L, L::Tiles::kStage, L::Tiles::kValues, L::kQueries>);
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  Shared<int> numbers = shared_cast<int>(shared + L::kNumbers);
  const typename L::Barriers barriers(base + L::kBarriers);
  // 1. The third warpgroup copies, item after item.
  if (threadIdx.x >= kProductThreads) {
    copy_forward<L, kKeys, kPairs>(params, tokens, items, maps, barriers, numbers, base,
                                   tokens.forms.terms);
    return;
  }
  take_registers<kProductRegisters>();

  TileStage stage;
  ItemPlace<1> item;
  uint32_t cleaned = 0;  // parity
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
    const ForwardRowsOfItem rows(params, tokens, at);

    // 3. Tile by tile: scores, weights, output += weights x values.
    float s[kKeys / 2];
    uint32_t weights[kKeys / 16][4];  // weights of the tile before
    float output[V / kBoxColumns][32] = {};
    float sums[2] = {};
    Roundings roundings;
    const auto begin = [&](int, int index_of_stage) {
      const uint32_t place = index_of_stage * L::Tiles::kStage;
      clean_tile<typename L::Tiles>(state, shared + place, barriers, cleaned);
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
      make_weights<T, kPairs>(params, tile, rows.row0, state, terms, s, sums, roundings);
    };
    pass_tiles(barriers, stage, tiles_met<kKeys>(params, kPairs == Pairs::kCausal, at.i0), begin,
               begin_output, make, [&] { pack_left<T, kKeys / 8>(s, weights); });
    sums_are_there(output);

    // 4. Rows of the result.
    const float output_scale = 1 / value_scale_of(tokens, at.b * params.G + at.value_head);
    const double reference = rows.largest - static_cast<double>(tokens.forms.log_scale);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sum_of_lanes<4>(sums[half]);
      const float rounding = sum_of_lanes<4>(roundings[half]);
      rows.template store<V>(params, at, half, sum, rounding, reference, output_scale, output);
    }
  }
#else
  trap_without_warpgroups(params, tokens, items, maps);
#endif
}

}  // namespace

const char* warpgroup_forward(const AttentionParams& params, const DeviceExecutor& executor,
                              const FoldedTokens& tokens) {
  return launch_sizes(params, [&]<typename T, int F, int V>() {
    const Items items(tokens.forms.item_counters,
                      params.B * params.H * ceil_div(params.L, kWarpgroupRows));
    ForwardMaps maps;
    const char* error = map_forward<F, kKeys>(maps, params, tokens, tokens.phi_q, tokens.phi_k);
    if (error != nullptr) return error;
    return launch_pairs(params, [&]<Pairs kPairs>() {
      return launch(warpgroup_forward_kernel<T, F, V, kPairs>, items.blocks(),
                    dim3(kWarpgroupThreads), ForwardLayout<T, F, V>::kBytes, executor.stream,
                    params, tokens, items, maps);
    });
  });
}

}  // namespace ikattn::cuda
