// Steps that the kernels whose items are queries share: copies by the third warpgroup, hidden pairs
// of a tile, and, in both forward kernels, the results of an item's rows.
#pragma once

#include "attention/cuda/hopper/pipeline.h"
#include "attention/cuda/tensor_cores/epilogue_forward.h"

namespace ikattn::cuda {
namespace {

// Copies items of queries, and tiles of kKeys keys and their values, as the third warpgroup does.
//   copy_rows(at, barrier): begins the copies of an item's own rows, `bytes` of them
//   copy_numbers(tile, stage, barrier): begins those of what lies beside a tile, `number_bytes`
template <typename L, int kKeys, Pairs kPairs, typename CopyRows, typename CopyNumbers>
__device__ __forceinline__ void copy_query_items(const AttentionParams& params,
                                                 const FoldedTokens& tokens, const Items& items,
                                                 const KeyMaps& maps,
                                                 const typename L::Barriers& barriers,
                                                 Shared<int> numbers, uint32_t base, uint32_t bytes,
                                                 uint32_t number_bytes, const CopyRows& copy_rows,
                                                 const CopyNumbers& copy_numbers) {
  int bk = 0, batch = 0, value_head = 0;  // place of the item
  copy_items(
      barriers, items, numbers, bytes, L::Tiles::kStage + number_bytes,
      [&](int index) { return tokens.forms.state[QueryBlock(params, kWarpgroupRows, index).bk]; },
      [&](int index, int, uint32_t barrier) {
        const QueryBlock at(params, kWarpgroupRows, index);
        copy_rows(at, barrier);
        batch = at.b;
        bk = at.bk;
        value_head = at.value_head;
        return tiles_met<kKeys>(params, kPairs == Pairs::kCausal, at.i0);
      },
      [&](int tile, int stage, uint32_t barrier) {
        L::Tiles::copy(base + stage * L::Tiles::kStage, maps, bk, batch, value_head, tile, barrier);
        copy_numbers(tile, stage, barrier);
      });
}

// Makes zero of the values of the tile at `place` that are not finite, where the head's `state`
// says that there may be some. parity: of the phase of the multiplying threads, which goes on.
template <typename Tiles, typename Barriers>
__device__ __forceinline__ void clean_tile(uint32_t state, Shared<unsigned char> place,
                                           const Barriers& barriers, uint32_t& parity) {
  if ((state & kUnclean) == 0) return;
  Tiles::clean(place, barriers.cleaned(), parity);
  parity ^= 1;
}

// Maps of the memory that a forward copies from.
struct ForwardMaps {
  RowMap queries;
  KeyMaps keys;
};
// Makes the maps for features in 16-bit columns, F of a row, and tiles of kKeys keys.
template <int F, int kKeys>
const char* map_forward(ForwardMaps& maps, const AttentionParams& params,
                        const FoldedTokens& tokens, const void* phi_q, const void* phi_k) {
  const char* error =
      map_features<F, kWarpgroupRows>(maps.queries, phi_q, params.B * params.H, params.L);
  return error != nullptr ? error : map_keys<F, kKeys>(maps.keys, params, tokens, phi_k);
}

// Copies for a forward, as the third warpgroup does.
//   terms: a number of each key, [B, key_heads, padded S], of which L::kTerms has [stage][kKeys]
template <typename L, int kKeys, Pairs kPairs, typename Term>
__device__ __forceinline__ void copy_forward(const AttentionParams& params,
                                             const FoldedTokens& tokens, const Items& items,
                                             const ForwardMaps& maps,
                                             const typename L::Barriers& barriers,
                                             Shared<int> numbers, uint32_t base,
                                             const Term* terms) {
  constexpr uint32_t kTermBytes = kKeys * sizeof(Term);
  const Term* of_item = nullptr;
  copy_query_items<L, kKeys, kPairs>(
      params, tokens, items, maps.keys, barriers, numbers, base, L::Queries::kBytes, kTermBytes,
      [&](const QueryBlock& at, uint32_t barrier) {
        L::Queries::copy(base + L::kQueries, maps.queries, 0, at.bh, at.i0, barrier);
        of_item = terms + at.bk * padded_tokens(params.S);
      },
      [&](int tile, int stage, uint32_t barrier) {
        begin_bytes(base + L::kTerms + stage * kTermBytes, of_item + tile * int64_t{kKeys},
                    kTermBytes, barrier);
      });
}

// A thread's two rows of an item, row0 and 8 further on. What the results need of them is under way
// while the tiles are passed.
struct ForwardRowsOfItem {
  int row0;
  double largest;
  float poison[2];

  __device__ __forceinline__ ForwardRowsOfItem(const AttentionParams& params,
                                               const FoldedTokens& tokens, const QueryBlock& at)
      : row0(at.i0 + static_cast<int>(threadIdx.x) / 32 * 16 +
             static_cast<int>(threadIdx.x) % 32 / 4),
        largest(tokens.forms.largest[at.bk]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + 8 * half;
      poison[half] = row < params.L ? tokens.poison[at.bh * params.L + row] : 0.0f;
    }
  }

  // Stores the results of row `half`, from all lanes' sums of its weights and of the errors of
  // rounding them; reference: log Z where the sum is 1; output_scale: the rescale of dropout, over
  // the scale of the value.
  template <int V>
  __device__ __forceinline__ void store(const AttentionParams& params, const QueryBlock& at,
                                        int half, float sum, float rounding, double reference,
                                        float output_scale,
                                        const float (&output)[V / kBoxColumns][32]) const {
    const int row = row0 + 8 * half;
    if (row >= params.L) return;
    store_result<V>(params, at, row, 0, sum == 0 ? sum : sum + poison[half], rounding, reference,
                    output_scale, [&](int n, int c) { return sum_at(output, half, n, c); });
  }
};

}  // namespace
}  // namespace ikattn::cuda
