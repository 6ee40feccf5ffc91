// The query side of the backward on Hopper: grad_phi_q. An item is 128 queries, two
// warpgroups of 64, and passes along the keys, 64 at a time. While the products of a tile are made,
// the tensor cores multiply those of the tile before with its keys.
//
// Compiled for sm_90a alone.
#include "attention/cuda/hopper/hopper.h"
#include "attention/cuda/hopper/query_items.h"
#include "attention/cuda/tensor_cores/epilogue_backward.h"

namespace ikattn::cuda {
namespace {

// Makes factors of grad_phi_q of the scores of a thread's two rows; 0 for pairs that are not seen.
//   sees: of c of tile n of 8 columns
template <typename Sees>
__device__ __forceinline__ void to_products(float (&s)[kStep / 2], const float (&x)[kStep / 2],
                                            const float (&fit)[2], const float (&fitting_delta)[2],
                                            const Sees& sees) {
#pragma unroll
  for (int i = 0; i < kStep / 2; ++i) {
    const int half = i % 4 / 2;
    // A hidden key's score is 0, and its value may be anything.
    s[i] = s[i] == 0 ? 0 : s[i] * (x[i] * fit[half] - fitting_delta[half]);
    if (!sees(i / 4, i % 4)) s[i] = 0;
  }
}

template <typename T, int F, int V>
struct QueryLayout {
  using Tiles = KeyTiles<T, F, V, kStep>;
  using Queries = Boxes<kWarpgroupRows, F>;
  using Gradients = Boxes<kWarpgroupRows, V>;
  using Barriers = TileBarriers<1>;
  static constexpr uint32_t kQueries = kTilesInFlight * Tiles::kStage;
  static constexpr uint32_t kGradients = kQueries + Queries::kBytes;
  static constexpr uint32_t kFits = kGradients + Gradients::kBytes;  // [kWarpgroupRows]
  static constexpr uint32_t kDeltas = kFits + kWarpgroupRows * 4;
  static constexpr uint32_t kBarriers = kDeltas + kWarpgroupRows * 4;
  static constexpr uint32_t kNumbers = (kBarriers + Barriers::kBytes + 15) / 16 * 16;
  static constexpr int64_t kBytes = kNumbers + kItemNumbers * 4;
};
struct QueryMaps {
  RowMap queries, gradients;
  KeyMaps keys;
};

// Copies a block's queries and tiles; its third warpgroup does.
template <typename L, Pairs kPairs>
__device__ __forceinline__ void copy_queries(const AttentionBackwardParams& params,
                                             const FoldedTokens& tokens, const FoldedRows& rows,
                                             const Items& items, const QueryMaps& maps,
                                             const typename L::Barriers& barriers,
                                             Shared<int> numbers, uint32_t base) {
  constexpr uint32_t kRowNumbers = kWarpgroupRows * 4;
  copy_query_items<L, kStep, kPairs>(
      params, tokens, items, maps.keys, barriers, numbers, base,
      L::Queries::kBytes + L::Gradients::kBytes + 2 * kRowNumbers, 0,
      [&](const QueryBlock& at, uint32_t barrier) {
        L::Queries::copy(base + L::kQueries, maps.queries, 0, at.bh, at.i0, barrier);
        L::Gradients::copy(base + L::kGradients, maps.gradients, 0, at.bh, at.i0, barrier);
        const int64_t row = at.bh * padded_tokens(params.L) + at.i0;
        begin_bytes(base + L::kFits, rows.fit + row, kRowNumbers, barrier);
        begin_bytes(base + L::kDeltas, rows.delta + row, kRowNumbers, barrier);
      },
      [](int, int, uint32_t) {});
}

// Numbers of a thread's two rows, the first of them row0, that their pairs need.
struct RowNumbers {
  int row0;
  float fit[2], fitting_delta[2], normalizer[2];

  // Takes the fits and deltas of the item's rows.
  __device__ __forceinline__ RowNumbers(const AttentionBackwardParams& params,
                                        const FoldedRows& rows, const QueryBlock& at,
                                        Shared<const float> fits, Shared<const float> deltas) {
    const int of_item =
        static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
    row0 = at.i0 + of_item;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = of_item + 8 * half;
      fit[half] = fits[row];
      fitting_delta[half] = deltas[row] * fit[half];
      normalizer[half] = normalizer_of<false>(params, rows, at, row0 + 8 * half);
    }
  }
};

// Makes factors of the scores s and products x of a tile.
template <Pairs kPairs>
__device__ __forceinline__ void make_products(const AttentionParams& params, int tile,
                                              const RowNumbers& rows, float (&s)[kStep / 2],
                                              float (&x)[kStep / 2]) {
  sums_are_there(s);
  sums_are_there(x);
  const int diagonal = rows.row0 - tile * kStep, lane = threadIdx.x % 32;
  const auto always = [](int, int) { return true; };
  if (kPairs == Pairs::kCausal && diagonal - lane / 4 < kStep - 1) {
    const auto sees = [&](int n, int c) {
      return n * 8 + lane % 4 * 2 + c % 2 - 8 * (c / 2) <= diagonal;
    };
    to_products(s, x, rows.fit, rows.fitting_delta, sees);
  } else if (is_passing(params, tile * int64_t{kStep})) {
    to_products(s, x, rows.fit, rows.fitting_delta, always);
  }
}

template <typename T, int F, int V, Pairs kPairs>
__global__ void __launch_bounds__(kWarpgroupThreads, 1)
    warpgroup_query_kernel(AttentionBackwardParams params, FoldedTokens tokens, FoldedRows rows,
                           Items items, FeatureGradients grad_phi_q,
                           const __grid_constant__ QueryMaps maps) {
#if IKATTN_WARPGROUP_CODE
  using L = QueryLayout<T, F, V>;
  using Tiles = typename L::Tiles;
  static_assert(kLiesInSharedMemory<L, Tiles::kStage, Tiles::kValues, L::kQueries, L::kGradients>);
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  Shared<int> numbers = shared_cast<int>(shared + L::kNumbers);
  const typename L::Barriers barriers(base + L::kBarriers);
  // 1. The third warpgroup copies, item after item.
  if (threadIdx.x >= kProductThreads) {
    copy_queries<L, kPairs>(params, tokens, rows, items, maps, barriers, numbers, base);
    return;
  }
  take_registers<kProductRegisters>();

  TileStage stage;
  ItemPlace<1> item;
  uint32_t cleaned = 0;  // parity
  for (;; item.next()) {
    // 2. The item's queries and their gradients into registers.
    barrier_wait(barriers.item_full(0), item.parity);
    const int index = numbers[0];
    const uint32_t state = static_cast<uint32_t>(int{numbers[1]});
    if (index < 0) break;
    uint32_t phi_q[F / 16][4], gradients[V / 16][4];
    load_left<F>(phi_q, base + L::kQueries);
    load_left<V>(gradients, base + L::kGradients);
    const QueryBlock at(params, kWarpgroupRows, index);
    const RowNumbers own(params, rows, at, shared_cast<float>(shared + L::kFits),
                         shared_cast<float>(shared + L::kDeltas));
    barriers.release_item(0);

    // 3. Tile by tile: scores s and products x = dO V^T, from both dS, sums += dS phi_k.
    float s[kStep / 2], x[kStep / 2];
    uint32_t products[kStep / 16][4];  // products of the tile before
    float sums[F / kBoxColumns][32] = {};
    const auto begin = [&](int, int index_of_stage) {
      const uint32_t place = index_of_stage * Tiles::kStage;
      clean_tile<Tiles>(state, shared + place, barriers, cleaned);
      wgmma_fence();
      begin_by_columns<Half, kStep, F>(s, phi_q, base + place);
      begin_by_columns<T, kStep, V>(x, gradients, base + place + Tiles::kValues);
      wgmma_commit();
    };
    const auto begin_sums = [&](int index_of_stage) {
      wgmma_fence();
      begin_by_rows<Half, kStep, F>(sums, products, base + index_of_stage * Tiles::kStage);
      wgmma_commit();
    };
    const auto make = [&](int tile, int) { make_products<kPairs>(params, tile, own, s, x); };
    pass_tiles(barriers, stage, tiles_met<kStep>(params, kPairs == Pairs::kCausal, at.i0), begin,
               begin_sums, make, [&] { pack_left<Half, kStep / 8>(s, products); });
    sums_are_there(sums);

    // 4. Rows of the result.
    const float units =
        gradient_scale_of(rows, at.bk) * value_scale_of(tokens, at.b * params.G + at.value_head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      store_query_gradients<F, false>(
          params, own.normalizer[half], at, own.row0 + 8 * half, 0, own.fit[half], units,
          [&](int n, int c) { return sum_at(sums, half, n, c); }, grad_phi_q);
    }
  }
#else
  trap_without_warpgroups(params, tokens, rows, items, grad_phi_q, maps);
#endif
}

}  // namespace

const char* warpgroup_query_gradients(const AttentionBackwardParams& params,
                                      const DeviceExecutor& executor, const FoldedTokens& tokens,
                                      const FoldedRows& rows, const FeatureGradients& grad_phi_q) {
  return launch_sizes(params, [&]<typename T, int F, int V>() {
    const Items items(tokens.forms.item_counters,
                      params.B * params.H * ceil_div(params.L, kWarpgroupRows));
    QueryMaps maps = {};
    const char* error =
        map_features<F, kWarpgroupRows>(maps.queries, tokens.phi_q, params.B * params.H, params.L);
    if (error == nullptr) {
      error = map_features<V, kWarpgroupRows>(maps.gradients, rows.gradients, params.B * params.H,
                                              params.L);
    }
    if (error == nullptr) error = map_keys<F, kStep>(maps.keys, params, tokens, tokens.phi_k);
    if (error != nullptr) return error;
    return launch_pairs(params, [&]<Pairs kPairs>() {
      return launch(warpgroup_query_kernel<T, F, V, kPairs>, items.blocks(),
                    dim3(kWarpgroupThreads), QueryLayout<T, F, V>::kBytes, executor.stream, params,
                    tokens, rows, items, grad_phi_q, maps);
    });
  });
}

}  // namespace ikattn::cuda
