// The query side of the backward on Hopper, of both forms: grad_phi_q. An item is 128 queries, two
// warpgroups of 64, and passes along the keys, 64 at a time. While the products of a tile are made,
// the tensor cores multiply those of the tile before with its keys.
//
// Compiled for sm_90a alone.
#include "attention/cuda/hopper/general_gradients.h"
#include "attention/cuda/hopper/hopper.h"
#include "attention/cuda/hopper/query_items.h"
#include "attention/cuda/tensor_cores/epilogue_backward.h"

namespace ikattn::cuda {
namespace {

// Scores of a thread's two rows become factors of grad_phi_q; those of pairs that are not seen: 0.
//   sees, drops: of c of tile n of 8 columns
template <typename Sees, typename Drops>
__device__ __forceinline__ void to_products(float (&s)[kStep / 2], const float (&x)[kStep / 2],
                                            const float (&fit)[2], const float (&fitting_delta)[2],
                                            const Sees& sees, const Drops& drops) {
#pragma unroll
  for (int i = 0; i < kStep / 2; ++i) {
    const int half = i % 4 / 2;
    const float product = drops(i / 4, i % 4) ? 0.0f : x[i];
    // A hidden key's score is 0, and its value may be anything.
    s[i] = s[i] == 0 ? 0 : s[i] * (product * fit[half] - fitting_delta[half]);
    if (!sees(i / 4, i % 4)) s[i] = 0;
  }
}

// Whether registers hold an item's queries.
template <int F, int V, Pairs kPairs>
constexpr bool kHoldsQueries = kPairs != Pairs::kGeneral || F + V == 128;

template <typename T, int F, int V, Pairs kPairs>
struct QueryLayout {
  static constexpr bool kIsGeneral = kPairs == Pairs::kGeneral;
  using Tiles = KeyTiles<T, F, V, kStep>;
  using Queries = Boxes<kWarpgroupRows, F>;
  using Gradients = Boxes<kWarpgroupRows, V>;
  using Barriers = TileBarriers<1>;
  static constexpr uint32_t kQueries = kTilesInFlight * Tiles::kStage;
  static constexpr uint32_t kGradients = kQueries + Queries::kBytes;
  static constexpr uint32_t kFits = kGradients + Gradients::kBytes;  // [kWarpgroupRows]
  static constexpr uint32_t kDeltas = kFits + kWarpgroupRows * 4;
  // General: the keys' logits, high and low, and, where a mask adds to them, offsets.
  static constexpr uint32_t kLogits = kDeltas + kWarpgroupRows * 4;  // [stage][2][kStep]
  static constexpr uint32_t kLogitBytes = kIsGeneral ? 2 * kStep * 4 : 0;
  static constexpr uint32_t kBarriers = kLogits + kTilesInFlight * kLogitBytes;
  static constexpr uint32_t kNumbers = (kBarriers + Barriers::kBytes + 15) / 16 * 16;
  static constexpr int64_t kBytes = kNumbers + kItemNumbers * 4;
  static constexpr uint32_t kOffsets = (kBytes + 1023) / 1024 * 1024;  // [stage]
};
struct QueryMaps {
  RowMap queries, gradients;
  KeyMaps keys;
  RowMap offsets;  // of the general form, where there are some
};

// What the third warpgroup of a block does.
template <typename L, Pairs kPairs>
__device__ __forceinline__ void copy_queries(const AttentionBackwardParams& params,
                                             const FoldedTokens& tokens, const FoldedRows& rows,
                                             const Items& items, const QueryMaps& maps,
                                             const typename L::Barriers& barriers,
                                             Shared<int> numbers, uint32_t base) {
  constexpr uint32_t kRowNumbers = kWarpgroupRows * 4;
  [[maybe_unused]] int head = 0, i0 = 0;  // of the item
  copy_query_items<L, kStep, kPairs>(
      params, tokens, items, maps.keys, barriers, numbers, base,
      L::Queries::kBytes + L::Gradients::kBytes + 2 * kRowNumbers,
      L::kIsGeneral ? L::kLogitBytes + offset_bytes(params) : 0,
      [&](const QueryBlock& at, uint32_t barrier) {
        L::Queries::copy(base + L::kQueries, maps.queries, 0, at.bh, at.i0, barrier);
        L::Gradients::copy(base + L::kGradients, maps.gradients, 0, at.bh, at.i0, barrier);
        const int64_t row = at.bh * padded_tokens(params.L) + at.i0;
        begin_bytes(base + L::kFits, rows.fit + row, kRowNumbers, barrier);
        begin_bytes(base + L::kDeltas, rows.delta + row, kRowNumbers, barrier);
        if constexpr (L::kIsGeneral) {
          head = at.h;
          i0 = at.i0;
        }
      },
      [&](int bk, int batch, int tile, int stage, uint32_t barrier) {
        if constexpr (L::kIsGeneral) {
          copy_exponents<L>(params, tokens, maps.offsets, base, bk, batch, head, i0, tile, stage,
                            barrier);
        }
      });
}

// What a thread's two rows, the first of them row0, bring to their pairs.
struct RowNumbers {
  int row0;
  float fit[2], fitting_delta[2], normalizer[2];

  // fits, deltas: of the item's rows.
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

// Scores s and products x of a tile become factors; bits: of kAny alone.
template <Pairs kPairs>
__device__ __forceinline__ void make_products(const AttentionParams& params, const PairMask& mask,
                                              int tile, const RowNumbers& rows,
                                              const PairBits (&bits)[1], float (&s)[kStep / 2],
                                              float (&x)[kStep / 2]) {
  sums_are_there(s);
  sums_are_there(x);
  const int diagonal = rows.row0 - tile * kStep, lane = threadIdx.x % 32;
  const auto always = [](int, int) { return true; };
  const auto never = [](int, int) { return false; };
  if constexpr (kPairs == Pairs::kAny) {
    if (is_passing(params, tile * int64_t{kStep})) {
      const float kept[2] = {rows.fit[0] * mask.kept, rows.fit[1] * mask.kept};
      to_products(
          s, x, kept, rows.fitting_delta, [&](int n, int c) { return bits[0].sees(n, c); },
          [&](int n, int c) { return bits[0].drops(n, c); });
    }
  } else if (kPairs == Pairs::kCausal && diagonal - lane / 4 < kStep - 1) {
    const auto sees = [&](int n, int c) {
      return n * 8 + lane % 4 * 2 + c % 2 - 8 * (c / 2) <= diagonal;
    };
    to_products(s, x, rows.fit, rows.fitting_delta, sees, never);
  } else if (is_passing(params, tile * int64_t{kStep})) {
    to_products(s, x, rows.fit, rows.fitting_delta, always, never);
  }
}

// The same of the general form; offsets, keys: of the tile.
[[maybe_unused]] __device__ __forceinline__ void make_general_products(
    const AttentionParams& params, const PairMask& mask, const GeneralQueries& rows,
    Shared<const unsigned char> offsets, const KeyLogits& keys, const PairBits (&bits)[1],
    float (&s)[kStep / 2], float (&x)[kStep / 2]) {
  sums_are_there(s);
  sums_are_there(x);
  if (__any_sync(0xffffffffu, !rows.are_plain() || !keys.are_plain())) {
    rows.make<true>(s, x, params.mask.type, offsets, keys, bits[0], mask.kept);
  } else {
    rows.make<false>(s, x, params.mask.type, offsets, keys, bits[0], mask.kept);
  }
  fence_async();
}

template <typename T, int F, int V, Pairs kPairs>
__global__ void __launch_bounds__(kWarpgroupThreads, 1)
    warpgroup_query_kernel(AttentionBackwardParams params, FoldedTokens tokens, FoldedRows rows,
                           PairMask mask, Items items, FeatureGradients grad_phi_q,
                           const __grid_constant__ QueryMaps maps) {
#if IKATTN_WARPGROUP_CODE
  using L = QueryLayout<T, F, V, kPairs>;
  using Tiles = typename L::Tiles;
  static_assert(kLiesInSharedMemory<L, Tiles::kStage, Tiles::kValues, L::kQueries, L::kGradients>);
  static_assert(F + V > 192 || kHasRoomForOffsets<L>);
  if (L::kIsGeneral && !has_general_head(params, tokens)) return;  // the whole block
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  Shared<int> numbers = shared_cast<int>(shared + L::kNumbers);
  const typename L::Barriers barriers(base + L::kBarriers);
  // 1. The third warpgroup copies, item after item.
  if (threadIdx.x >= kProductThreads) {
    copy_queries<L, kPairs>(params, tokens, rows, items, maps, barriers, numbers, base);
    return;
  }
  take_registers<kRegistersOfProducts<kPairs>>();

  TileStage stage;
  ItemPlace<1> item;
  uint32_t meeting = 0;  // parity
  for (;; item.next()) {
    // 2. The item's queries and their gradients into registers.
    barrier_wait(barriers.item_full(0), item.parity);
    const int index = numbers[0];
    const uint32_t state = static_cast<uint32_t>(int{numbers[1]});
    if (index < 0) break;
    uint32_t phi_q[F / 16][4], gradients[V / 16][4];
    if constexpr (kHoldsQueries<F, V, kPairs>) load_left<F>(phi_q, base + L::kQueries);
    load_left<V>(gradients, base + L::kGradients);
    const QueryBlock at(params, kWarpgroupRows, index);
    using Rows = std::conditional_t<L::kIsGeneral, GeneralQueries, RowNumbers>;
    const Rows own(params, rows, at, shared_cast<float>(shared + L::kFits),
                   shared_cast<float>(shared + L::kDeltas));
    if constexpr (kHoldsQueries<F, V, kPairs>) barriers.release_item(0);

    // 3. Tile by tile: scores s and products x = dO V^T, from both dS, sums += dS phi_k.
    float s[kStep / 2], x[kStep / 2];
    uint32_t products[kStep / 16][4];  // of the tile before
    float sums[F / kBoxColumns][32] = {};
    [[maybe_unused]] PairBits bits[1];
    const auto begin = [&](int tile, int index_of_stage) {
      const uint32_t place = index_of_stage * Tiles::kStage;
      // Before there are products, which leave no registers for it.
      find_tile_pairs<kPairs>(params, mask, at, tile, bits);
      clean_tile<Tiles>(state, shared + place, barriers, meeting);
      wgmma_fence();
      begin_scores<typename Tiles::Keys, typename L::Queries, kHoldsQueries<F, V, kPairs>>(
          s, phi_q, base + L::kQueries, base + place);
      begin_by_columns<T, kStep, V>(x, gradients, base + place + Tiles::kValues);
      wgmma_commit();
    };
    const auto begin_sums = [&](int index_of_stage) {
      wgmma_fence();
      begin_by_rows<Half, kStep, F>(sums, products, base + index_of_stage * Tiles::kStage);
      wgmma_commit();
    };
    const auto make = [&](int tile, [[maybe_unused]] int index_of_stage) {
      if constexpr (L::kIsGeneral) {
        Shared<const float> logits =
            shared_cast<float>(shared + (L::kLogits + index_of_stage * L::kLogitBytes));
        make_general_products(params, mask, own,
                              shared + (L::kOffsets + index_of_stage * kOffsetBytes),
                              {logits, logits + kStep}, bits, s, x);
      } else {
        make_products<kPairs>(params, mask, tile, own, bits, s, x);
      }
    };
    pass_tiles(barriers, stage, tiles_met<kStep>(params, is_causal_call<kPairs>(params), at.i0),
               begin, begin_sums, make, [&] { pack_left<Half, kStep / 8>(s, products); });
    sums_are_there(sums);
    if constexpr (!kHoldsQueries<F, V, kPairs>) barriers.release_item(0);

    // 4. Rows of the result.
    const float units =
        gradient_scale_of(rows, at.bk) * value_scale_of(tokens, at.b * params.G + at.value_head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      store_query_gradients<F, L::kIsGeneral>(
          params, own.normalizer[half], at, own.row0 + 8 * half, 0, own.fit[half], units,
          [&](int n, int c) { return sum_at(sums, half, n, c); }, grad_phi_q);
    }
  }
#else
  trap_without_warpgroups(params, tokens, rows, mask, items, grad_phi_q, maps);
#endif
}

}  // namespace

const char* warpgroup_query_gradients(const AttentionBackwardParams& params,
                                      const DeviceExecutor& executor, const FoldedTokens& tokens,
                                      const FoldedRows& rows, const FeatureGradients& grad_phi_q,
                                      bool general_alone) {
  if (general_alone && every_row_sees_all(params)) return nullptr;
  PairMask mask;
  if (const char* error = make_pair_mask(params, executor, false, mask)) return error;
  return launch_sizes(params, [&]<typename T, int F, int V>() {
    const Items items(tokens.items_taken, params.B * params.H * ceil_div(params.L, kWarpgroupRows));
    QueryMaps maps = {};
    const char* error =
        map_features<F, kWarpgroupRows>(maps.queries, tokens.phi_q, params.B * params.H, params.L);
    if (error == nullptr) {
      error = map_features<V, kWarpgroupRows>(maps.gradients, rows.gradients, params.B * params.H,
                                              params.L);
    }
    if (error == nullptr) error = map_keys<F, kStep>(maps.keys, params, tokens, tokens.phi_k);
    if (error == nullptr) error = map_offsets<kWarpgroupRows>(maps.offsets, params);
    if (error != nullptr) return error;
    const auto queue = [&]<Pairs kPairs>(const Items& of_form) {
      using L = QueryLayout<T, F, V, kPairs>;
      const bool has_more = L::kIsGeneral && has_offsets(params);
      return launch(warpgroup_query_kernel<T, F, V, kPairs>, of_form.blocks(),
                    dim3(kWarpgroupThreads),
                    has_more ? L::kOffsets + kTilesInFlight * kOffsetBytes : L::kBytes,
                    executor.stream, params, tokens, rows, mask, of_form, grad_phi_q, maps);
    };
    if (!general_alone && !is_general_alone(params)) {
      error = launch_pairs(
          params, [&]<Pairs kPairs>() { return queue.template operator()<kPairs>(items); });
    }
    if (error != nullptr || every_row_sees_all(params)) return error;
    Items general = items;
    error = count_anew(executor, general);
    return error != nullptr ? error : queue.template operator()<Pairs::kGeneral>(general);
  });
}

}  // namespace ikattn::cuda
