// The key side of the backward on Hopper: grad_phi_k, grad_value and the gradients of the logits.
// An item is 128 keys, two warpgroups of 64, and passes along the queries of all heads that share
// them, 64 at a time. Rows are keys: S^T = phi_k' phi_q^T and dP^T = V dO^T, and weights and
// gradients made of them are the left operands of the sums.
//
// Compiled for sm_90a alone.
#include "attention/cuda/hopper/hopper.h"
#include "attention/cuda/hopper/key_items.h"

namespace ikattn::cuda {
namespace {

// Whether registers hold an item's own values.
template <int V>
constexpr bool kHoldsValues = V <= 64;

template <int F, int V>
struct KeyLayout {
  using Queries = Boxes<kStep, F>;
  using Gradients = Boxes<kStep, V>;
  static constexpr uint32_t kGradients = Queries::kBytes;
  static constexpr uint32_t kStage = kGradients + Gradients::kBytes;
  // An item's own keys and values are read from shared memory to its end, but for narrow values,
  // which registers hold. Where there is room, those of two items lie there.
  using OwnKeys = Boxes<kWarpgroupRows, F>;
  using OwnValues = Boxes<kWarpgroupRows, V>;
  static constexpr int kItems = F + V <= 192 ? 2 : 1;
  using Barriers = TileBarriers<kItems>;
  static constexpr uint32_t kOwn = OwnKeys::kBytes + OwnValues::kBytes;
  static constexpr uint32_t kOwnAt = kTilesInFlight * kStage;  // [item]
  static constexpr int kRowNumbers = 2 * kStep;  // [stage][2][kStep], deltas behind normalizers
  static constexpr uint32_t kNormalizers = kOwnAt + kItems * kOwn;
  static constexpr uint32_t kBarriers = kNormalizers + kTilesInFlight * kRowNumbers * 4;
  static constexpr uint32_t kNumbers = (kBarriers + Barriers::kBytes + 15) / 16 * 16;
  static constexpr int64_t kBytes = kNumbers + kItems * kItemNumbers * 4;
};

// Maps of the memory that an item's own tokens, and the tiles it passes along, are copied from.
struct PairMaps {
  KeyMaps own;
  RowMap queries, gradients;
};

// Copies a block's tokens and tiles; its third warpgroup does.
template <typename L, Pairs kPairs>
__device__ __forceinline__ void copy_pairs(const AttentionBackwardParams& params,
                                           const FoldedTokens& tokens, const FoldedRows& rows,
                                           const Items& items, const PairMaps& maps,
                                           const typename L::Barriers& barriers,
                                           Shared<int> numbers, uint32_t base) {
  constexpr uint32_t kRowBytes = kStep * 4;
  constexpr bool is_causal = kPairs == Pairs::kCausal;
  int bh = 0, first = 0, i0 = 0;  // place of the item's tiles
  copy_items(
      barriers, items, numbers, L::kOwn, L::kStage + L::kRowNumbers * 4,
      [&](int index) {
        return tokens.forms.state[KeyBlock(params, kWarpgroupRows, is_causal, index).bk];
      },
      [&](int index, int place, uint32_t barrier) {
        const KeyBlock at(params, kWarpgroupRows, is_causal, index);
        const uint32_t own = base + L::kOwnAt + place * L::kOwn;
        L::OwnKeys::copy(own, maps.own.keys, 0, at.bk, at.j0, barrier);
        L::OwnValues::copy(own + L::OwnKeys::kBytes, maps.own.values, at.b, at.value_head, at.j0,
                           barrier);
        bh = at.bk * at.group;
        first = i0 = at.first_tile * kStep;
        return at.steps;
      },
      [&](int, int stage, uint32_t barrier) {
        const int64_t row = bh * padded_tokens(params.L) + i0;
        const uint32_t place = base + stage * L::kStage;
        const uint32_t of_rows = base + L::kNormalizers + stage * L::kRowNumbers * 4;
        L::Queries::copy(place, maps.queries, 0, bh, i0, barrier);
        L::Gradients::copy(place + L::kGradients, maps.gradients, 0, bh, i0, barrier);
        begin_bytes(of_rows, rows.normalizer + row, kRowBytes, barrier);
        begin_bytes(of_rows + kRowBytes, rows.delta + row, kRowBytes, barrier);
        i0 += kStep;
        if (i0 < params.L) return;
        i0 = first;
        ++bh;
      });
}

// Begins a tile's scores and x = V dO^T.
//   own_keys, own_values: those of the thread's warpgroup; held_values: where registers hold them
template <typename T, int V, typename L>
__device__ __forceinline__ void begin_pairs(float (&s)[kStep / 2], float (&x)[kStep / 2],
                                            uint32_t own_keys, uint32_t own_values,
                                            const uint32_t (&held_values)[V / 16][4],
                                            uint32_t place) {
  wgmma_fence();
  begin_by_columns<Half, typename L::OwnKeys, typename L::Queries>(s, own_keys, place);
  if constexpr (kHoldsValues<V>) {
    begin_by_columns<T, kStep, V>(x, held_values, place + L::kGradients);
  } else {
    begin_by_columns<T, typename L::OwnValues, typename L::Gradients>(x, own_values,
                                                                      place + L::kGradients);
  }
  wgmma_commit();
}

// Stores rows of the results, of keys at `at`; own: their numbers.
template <typename T, int F, int V>
__device__ __forceinline__ void store_keys(const AttentionBackwardParams& params,
                                           const FoldedTokens& tokens, const FoldedRows& rows,
                                           const float* logits, const FoldedGradients& gradients,
                                           const KeyBlock& at, const KeyNumbers& own,
                                           const float (&logit_sums)[2],
                                           const float (&key_sums)[F / kBoxColumns][32],
                                           const float (&value_sums)[V / kBoxColumns][32]) {
  const KeyScales scales =
      key_scales_of<T>(params, tokens, rows, at.bk, at.b * params.G + at.value_head);
  const int thread = static_cast<int>(unknown_to_compiler(threadIdx.x));
  const int first_key = at.j0 + thread / 32 * 16 + thread % 32 / 4;
  HiddenKeys hidden;
  if constexpr (kOverlaps<F, V>) {
    hidden = own.hidden();
  } else {
    hidden = hidden_keys(params, logits, at.bk, first_key);
  }
  store_key_gradients<F, V>(
      params, hidden, gradients, scales, at.b, at.key_head, first_key, logit_sums,
      [&](int half, int n, int c) { return sum_at(key_sums, half, n, c); },
      [&](int half, int n, int c) { return sum_at(value_sums, half, n, c); });
}

template <typename T, int F, int V, Pairs kPairs>
__global__ void __launch_bounds__(kWarpgroupThreads, 1)
    warpgroup_key_kernel(AttentionBackwardParams params, FoldedTokens tokens, FoldedRows rows,
                         const float* logits, FoldedGradients gradients, Items items,
                         const __grid_constant__ PairMaps maps) {
#if IKATTN_WARPGROUP_CODE
  using L = KeyLayout<F, V>;
  static_assert(
      kLiesInSharedMemory<L, L::kStage, L::kGradients, L::kOwnAt, L::kOwn, L::OwnKeys::kBytes>);
  constexpr bool kOverlap = kOverlaps<F, V>;
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  Shared<int> numbers = shared_cast<int>(shared + L::kNumbers);
  const typename L::Barriers barriers(base + L::kBarriers);
  // 1. The third warpgroup copies, item after item.
  if (threadIdx.x >= kProductThreads) {
    copy_pairs<L, kPairs>(params, tokens, rows, items, maps, barriers, numbers, base);
    return;
  }
  take_registers<kProductRegisters>();

  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  const uint32_t warpgroup = __shfl_sync(0xffffffffu, warp / 4, 0);  // known to be the warp's
  TileStage stage;
  ItemPlace<L::kItems> item;
  for (;; item.next()) {
    // 2. The item's keys: values into registers, and what pairs are scaled with.
    barrier_wait(barriers.item_full(item.index), item.parity);
    const int index = numbers[item.index * kItemNumbers];
    if (index < 0) break;
    const KeyBlock at(params, kWarpgroupRows, kPairs == Pairs::kCausal, index);
    const uint32_t own = base + L::kOwnAt + item.index * L::kOwn;
    const uint32_t own_keys = own + warpgroup * (64 * 128);
    const uint32_t own_values = own_keys + L::OwnKeys::kBytes;
    uint32_t held_values[V / 16][4];
    if constexpr (kHoldsValues<V>) load_left<V>(held_values, own + L::OwnKeys::kBytes);
    const float fit_of_head =
        key_scales_of<T>(params, tokens, rows, at.bk, at.b * params.G + at.value_head).fit;
    const KeyNumbers keys = KeyNumbers::load<T, kOverlap>(params, tokens, logits, at.bk,
                                                          at.j0 + warp * 16 + g, fit_of_head);

    // 3. Tile by tile: scores and V dO^T, from both w and dS; dV += w^T dO, dphi_k += dS^T phi_q.
    float s[kStep / 2], x[kStep / 2];
    uint32_t weights[kStep / 16][4], products[kStep / 16][4];
    float key_sums[F / kBoxColumns][32] = {}, value_sums[V / kBoxColumns][32] = {};
    float logit_sums[2] = {};
    const auto begin_sums = [&](int index_of_stage) {
      const uint32_t place = base + index_of_stage * L::kStage;
      wgmma_fence();
      begin_by_rows<T, kStep, V>(value_sums, weights, place + L::kGradients);
      begin_by_rows<Half, kStep, F>(key_sums, products, place);
      wgmma_commit();
    };
    Diagonal<kPairs> diagonal(params, at);
    bool has_before = false;
    for (int remaining = at.steps; remaining > 0; --remaining, stage.next()) {
      barriers.wait(stage);
      begin_pairs<T, V, L>(s, x, own_keys, own_values, held_values, base + stage.index * L::kStage);
      if (kOverlap && has_before) {
        begin_sums(stage.before());
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      finish_pairs<T, kPairs>(
          keys, s, x,
          shared_cast<float>(shared + (L::kNormalizers + stage.index * L::kRowNumbers * 4)),
          diagonal.now, logit_sums);
      if constexpr (kOverlap) {
        wgmma_wait<0>();
        if (has_before) barriers.release(stage.before());
        has_before = true;
      }
      pack_left<T, kStep / 8>(x, weights);
      pack_left<Half, kStep / 8>(s, products);
      if constexpr (!kOverlap) {
        begin_sums(stage.index);
        wgmma_wait<0>();
        barriers.release(stage.index);
      }
      diagonal.next();
    }

    // 4. Rows of the results. The block is found anew: no register holds it over the tiles. The
    // products that read the own tokens are over.
    const KeyBlock again(params, kWarpgroupRows, kPairs == Pairs::kCausal,
                         int{numbers[item.index * kItemNumbers]});
    barriers.release_item(item.index);
    if (has_before) {
      begin_sums(stage.before());
      wgmma_wait<0>();
      barriers.release(stage.before());
    }
    sums_are_there(key_sums);
    sums_are_there(value_sums);
    store_keys<T, F, V>(params, tokens, rows, logits, gradients, again, keys, logit_sums, key_sums,
                        value_sums);
  }
#else
  trap_without_warpgroups(params, tokens, rows, logits, gradients, items, maps);
#endif
}

template <typename T, int F, int V>
const char* queue_key_gradients(const AttentionBackwardParams& params,
                                const DeviceExecutor& executor, const FoldedTokens& tokens,
                                const FoldedRows& rows, const float* logits,
                                const FoldedGradients& gradients) {
  const int64_t heads = params.B * params.H;
  const Items items(tokens.forms.item_counters + 1,
                    params.B * params.key_heads * ceil_div(params.S, kWarpgroupRows));
  PairMaps maps = {};
  const char* error = map_keys<F, kWarpgroupRows>(maps.own, params, tokens, tokens.phi_k);
  if (error == nullptr) error = map_features<F, kStep>(maps.queries, tokens.phi_q, heads, params.L);
  if (error == nullptr) {
    error = map_features<V, kStep>(maps.gradients, rows.gradients, heads, params.L);
  }
  if (error != nullptr) return error;
  return launch_pairs(params, [&]<Pairs kPairs>() {
    return launch(warpgroup_key_kernel<T, F, V, kPairs>, items.blocks(), dim3(kWarpgroupThreads),
                  KeyLayout<F, V>::kBytes, executor.stream, params, tokens, rows, logits, gradients,
                  items, maps);
  });
}

}  // namespace

const char* warpgroup_key_gradients(const AttentionBackwardParams& params,
                                    const DeviceExecutor& executor, const FoldedTokens& tokens,
                                    const FoldedRows& rows, const float* logits,
                                    const FoldedGradients& gradients) {
  return launch_sizes(params, [&]<typename T, int F, int V>() {
    return queue_key_gradients<T, F, V>(params, executor, tokens, rows, logits, gradients);
  });
}

}  // namespace ikattn::cuda
