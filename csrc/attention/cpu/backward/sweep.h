// One sweep of the backward pass: 128 keys against all queries of the heads they serve.
//
// Sweeps run on different threads, and add to dphi_q of one query block in ascending order of keys
// (a counter per query block). The result is bitwise the same for every number of threads without a
// second copy of dphi_q.
#pragma once

#include "attention/cpu/backward/tile.h"

namespace ikattn::IKATTN_ISA {
namespace {

// Clears the gradients of one sweep's keys; keeps_features leaves dphi_k to linear time, which has
// added to it.
template <typename T>
void clear_key_gradients(const AttentionLayout<T>& layout, int64_t sweep, bool keeps_features,
                         BackwardUnit<T>& state, const BackwardScratch<T>& scratch) {
  const int64_t first = sweep * kSweepKeys, rows = min_of(layout.padded_keys - first, kSweepKeys);
  for (int64_t panel = 0; !keeps_features && panel < layout.feature_panels(); ++panel) {
    __builtin_memset(
        state.grad_phi_k + (panel * state.held_keys + first % state.held_keys) * kPanel, 0,
        rows * kPanel * sizeof(T));
  }
  __builtin_memset(scratch.sweep.grad_value, 0,
                   layout.value_panels() * kSweepKeys * kPanel * sizeof(T));
  __builtin_memset(state.grad_logit + first, 0, rows * sizeof(T));
  if (layout.bfloat16_products) {
    __builtin_memset(state.narrow.key_sums + first, 0, rows * sizeof(float));
  }
}

// Loads the values of one block of the sweep, by column; zero for keys that are left out.
template <typename T>
void prepare_sweep_values(const AttentionParams& params, const AttentionLayout<T>& layout,
                          const Unit& unit, int64_t block, int64_t j0, const BackwardUnit<T>& state,
                          const BackwardScratch<T>& scratch) {
  const int64_t count = min_of(kPanel, params.S - j0), rows = round_up(count, kLanes<T>);
  T* values = scratch.keys.values;
  load_counted_values(params, layout, unit, j0, state.keys, values);
  if constexpr (kTakes16Bits<T>) {
    const int64_t panels = layout.bfloat16_products ? layout.narrow_value_panels() : 0;
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t columns = min_of(2 * kPanel, params.d_v - panel * 2 * kPanel);
      join_columns(rows, columns, values + panel * 2 * kPanel * kPanel, kPanel, scratch.keys.lanes);
      transpose_panel(rows, ceil_div(columns, 2), scratch.keys.lanes,
                      scratch.sweep.narrow_values + (block * panels + panel) * kPanel * kPanel);
    }
    if (layout.bfloat16_products) return;
  }
  const int64_t panels = layout.value_panels();
  for (int64_t panel = 0; panel < panels; ++panel) {
    transpose_panel(rows, min_of(kPanel, params.d_v - panel * kPanel),
                    values + panel * kPanel * kPanel,
                    scratch.sweep.values + (block * panels + panel) * kPanel * kPanel);
  }
}

template <typename T>
void prepare_sweep(const AttentionParams& params, const AttentionLayout<T>& layout,
                   const Unit& unit, int64_t sweep, const BackwardUnit<T>& state,
                   const BackwardScratch<T>& scratch) {
  const int64_t first_block = sweep * kBackwardKeyBlocks;
  for (int64_t block = 0; block < min_of(kBackwardKeyBlocks, layout.key_blocks - first_block);
       ++block) {
    if (state.keys.is_hidden[first_block + block]) continue;
    const int64_t j0 = (first_block + block) * kPanel;
    const int64_t rows = round_up(min_of(kPanel, params.S - j0), kLanes<T>);
    const T* phi = state.keys.features + j0 * kPanel;
    scratch.sweep.by_column.fill(layout, block, rows, phi, layout.padded_keys, scratch.keys.lanes);
    prepare_sweep_values(params, layout, unit, block, j0, state, scratch);
    if constexpr (kTakes16Bits<T>) {
      const int64_t panels = layout.bfloat16_products ? layout.feature_panels() : 0;
      for (int64_t panel = 0; panel < panels; ++panel) {
        stack_rows(rows, layout.feature.columns(panel), phi + panel * layout.padded_keys * kPanel,
                   nullptr,
                   scratch.sweep.narrow_features +
                       (panel * kBackwardKeyBlocks + block) * kPanel / 2 * kPanel,
                   state.narrow.centre + panel * kPanel, state.keys.feature_scales + j0);
      }
    }
  }
}

// Tells whether a block of queries and a sweep of keys are computed pair by pair.
template <typename T>
bool is_paired_with(const BackwardPlan<T>& plan, const BackwardUnit<T>& state, int64_t head,
                    int64_t index, int64_t sweep) {
  static_assert(kCausalChunk == kSweepKeys && kSweepKeys % kBackwardRows == 0);
  const bool is_own_chunk = plan.params.is_causal && index * kBackwardRows / kSweepKeys == sweep;
  return is_own_chunk || is_quadratic(plan, state, head, index);
}

// Computes all query blocks of one head that are paired with a sweep of key blocks.
template <typename N, typename T>
void sweep_head(const BackwardPlan<T>& plan, const Unit& unit, int64_t head, int64_t sweep,
                BackwardUnit<T>& state, const BackwardScratch<T>& scratch) {
  const AttentionBackwardParams& params = plan.params;
  const AttentionLayout<T>& layout = plan.layout;
  const int64_t first_block = sweep * kBackwardKeyBlocks;
  const int64_t last_block = min_of(layout.key_blocks, first_block + kBackwardKeyBlocks);
  const int64_t first_query_block = params.is_causal ? first_block * kPanel / kBackwardRows : 0;
  const PairOperands<N> operands =
      operands_of(layout, state, scratch, first_block * kPanel, static_cast<N*>(nullptr));

  // Where no block takes quadratic time, a sweep of a causal call has pairs with its chunk alone.
  const bool is_alone =
      params.is_causal && state.linear.keys.is_taken && !state.linear.any_by_pairs;
  const int64_t query_blocks =
      is_alone ? min_of(plan.query_blocks, first_query_block + kSweepKeys / kBackwardRows)
               : plan.query_blocks;
  for (int64_t index = first_query_block; index < query_blocks; ++index) {
    if (!is_paired_with(plan, state, head, index, sweep)) continue;
    const QueryBlock block = plan.query_block(unit, head, index);
    int* progress = state.progress + head * plan.query_blocks + index;
    bool in_turn = false;
    for (int64_t key_block = first_block; key_block < last_block; ++key_block) {
      const int64_t j0 = key_block * kPanel;
      const TilePosition at{block.b, block.h, block.i0, block.rows, j0};
      const Visibility visibility = visibility_of(params, state.keys, at, scratch.bias);
      if (visibility == Visibility::kNone) continue;
      const Tile<N, T> tile{plan, state, scratch, head, key_block - first_block, at, operands};
      const int64_t columns = round_up(tile.keys(), kLanes<T>);
      const PairTile<T> pairs =
          tile.pairs(columns, visibility == Visibility::kMixed ? scratch.bias : nullptr);

      // 1. scores and dP
      if (params.d_v == 0 || params.grad_mask) {  // what no band covers has no gradient
        __builtin_memset(scratch.dp, 0, kPanel * kPanel * sizeof(T));
      }
      if (params.dropout_threshold) fill_keep(params, at, kept_factor<T>(params), scratch.keep);
      for_each_band(params, at, columns, [&](const Band& band) { tile.score(band); });
      // 2. pair gradients
      pair_gradients(pairs, state.keys.form.folded, scratch.s, scratch.w, scratch.dp,
                     state.grad_logit + j0);
      poison_rows(pairs, scratch.s, scratch.w, scratch.dp, state.grad_logit + j0);
      tile.narrow();
      // 3. dV, dphi_k: rows are keys, summed over the block's queries
      for_each_key_band(params, at, tile.keys(), [&](int64_t column, int64_t keys, int64_t row) {
        tile.add_to_keys(column, keys, row);
      });
      // 4. dphi_q (and a mask gradient summed over keys): after all earlier keys
      if (!in_turn) wait_for_turn(progress, sweep);
      in_turn = true;
      for_each_band(params, at, columns, [&](const Band& band) {
        tile.add_to_queries(band);
        tile.add_to_sums(band);
      });
      if (params.grad_mask) add_mask_gradient(params.grad_mask, at, tile.keys(), scratch.dp);
    }
    if (!in_turn) wait_for_turn(progress, sweep);
    end_turn(progress, sweep);
  }
}

// Stores the results of a sweep.
template <typename T>
void store_sweep(const BackwardPlan<T>& plan, const Unit& unit, int64_t sweep,
                 const BackwardUnit<T>& state, const BackwardScratch<T>& scratch) {
  const AttentionBackwardParams& params = plan.params;
  const int64_t j0 = sweep * kSweepKeys, count = min_of(kSweepKeys, params.S - j0);
  if (const Array& out = params.grad_value) {
    store_panels(out, unit.b * out.stride[0] + unit.head * out.stride[1] + j0 * out.stride[2],
                 out.stride[2], out.stride[3], count, params.d_v, scratch.sweep.grad_value,
                 kSweepKeys);
  }
  if (const Array& out = params.grad_key_bias) {
    store_row(out, unit.b * out.stride[0] + unit.head * out.stride[1] + j0 * out.stride[2],
              out.stride[2], count, state.grad_logit + j0);
  }
}

// Transposes dV of values that fill half a vector, which pairs sum by column.
template <typename T>
void add_by_column(const AttentionLayout<T>& layout, int64_t sweep,
                   const BackwardScratch<T>& scratch) {
  const int64_t blocks = min_of(kBackwardKeyBlocks, layout.key_blocks - sweep * kBackwardKeyBlocks);
  T* by_row = scratch.keys.values;  // free once the sweep is prepared
  for (int64_t block = 0; block < blocks; ++block) {
    transpose_panel(layout.d_v, kPanel,
                    scratch.sweep.grad_value_by_column + block * kLanes<T> * kPanel, by_row);
    for (int64_t r = 0; r < kPanel; ++r) {
      T* sum = scratch.sweep.grad_value + (block * kPanel + r) * kPanel;
      store<T>(sum, load(sum) + load(by_row + r * kPanel));
    }
  }
}

// Adds the pairs of a sweep to the gradients of its keys.
template <typename T>
void sweep_keys(const BackwardPlan<T>& plan, const Unit& unit, int64_t sweep,
                BackwardUnit<T>& state, const BackwardScratch<T>& scratch) {
  const AttentionBackwardParams& params = plan.params;
  const AttentionLayout<T>& layout = plan.layout;
  [[maybe_unused]] const AmxTiles tiles;
  prepare_sweep(params, layout, unit, sweep, state, scratch);
  if (layout.has_half_values()) {
    __builtin_memset(scratch.sweep.grad_value_by_column, 0,
                     SweepKeys<T>::kByColumnSize * sizeof(T));
  }
  for (int64_t head = 0; head < layout.heads_per_unit; ++head) {
    if constexpr (kTakes16Bits<T> && kHasBFloat16) {
      if (layout.bfloat16_products) {
        sweep_head<BFloat16x2>(plan, unit, head, sweep, state, scratch);
        continue;
      }
    }
    sweep_head<T>(plan, unit, head, sweep, state, scratch);
  }
  if (layout.has_half_values()) add_by_column(layout, sweep, scratch);
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
