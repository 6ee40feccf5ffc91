// Backward pass, one sweep over the pairs (1024 flops each at M = d_v = 64):
//
//   keys and queries prepared -> for each block of 128 keys, all query blocks in order:
//       S = phi_q phi_k^T      dP = dO V^T      w, x = dP - delta, ds = s x      (dlog = w x)
//       dV += w^T dO    dphi_k += ds^T phi_q    dphi_q += ds phi_k    dg += column sums of dlog
//   -> from dphi to x and the frequencies -> frequencies summed over tokens, heads and batch
//
// In the folded form dO and delta carry 1/Z_i and phi_k carries sqrt(e_j), so that w = s^2 + eps
// e_j and ds = s x need nothing else. Key blocks run on different threads; what they add to dphi_q
// of one query block they add in ascending order of keys (a counter per query block), which makes
// the result bitwise the same for every number of threads without a second copy of dphi_q.
#pragma once

#include <sched.h>

#include "attention/cpu/backward_tokens.h"
#include "attention/cpu/pairs.h"

namespace ikattn::IKATTN_ISA {
namespace {

inline void wait_for(const int* counter, int value) {
  for (int spins = 0; __atomic_load_n(counter, __ATOMIC_ACQUIRE) != value; ++spins) {
    if (spins > 64) sched_yield();
  }
}

// What the products over pairs multiply, as numbers N: of the unit's queries, of the sweep's keys,
// and of a tile. "By row": rows of one column share a lane, and not columns of one row.
template <typename N>
struct PairOperands {
  const Storage<N>* grad_out;         // [heads][panels of N][L][64]
  const Storage<N>* grad_out_by_row;  // [heads][value panels][L in lanes][64]
  const Storage<N>* phi_by_row;       // [heads][feature panels][L in lanes][64]
  const Storage<N>* key_features;  // [feature panels][key_rows][64]   by row, of the first key on
  int64_t key_rows;                // in lanes
  const Storage<N>* values;        // [key blocks][panels of N][64][64]   columns by row
  const Storage<N>* weights;       // [64 in lanes][64]   by row
  const Storage<N>* ds;            // [64][64]
  const Storage<N>* ds_by_row;     // [64 in lanes][64]
};

template <typename T>
PairOperands<T> operands_of(const AttentionLayout<T>& layout, const BackwardUnit<T>& state,
                            const BackwardScratch<T>& scratch, int64_t first_key, T*) {
  return {
      state.grad_out,     state.grad_out,       state.phi, state.keys.features + first_key * kPanel,
      layout.padded_keys, scratch.sweep.values, scratch.w, scratch.s,
      scratch.s};
}

inline PairOperands<BFloat16x2> operands_of(const AttentionLayout<float>&,
                                            const BackwardUnit<float>& state,
                                            const BackwardScratch<float>& scratch, int64_t,
                                            BFloat16x2*) {
  return {state.narrow.grad_out,   state.narrow.grad_out_by_row,
          state.narrow.phi_by_row, scratch.sweep.narrow_features,
          kSweepKeys / 2,          scratch.sweep.narrow_values,
          scratch.narrow_w_by_row, scratch.narrow_ds,
          scratch.narrow_ds_by_row};
}

// One tile of pairs: up to 64 queries of one head against 64 keys.
template <typename N, typename T>
struct Tile {
  const BackwardPlan<T>& plan;
  BackwardUnit<T>& state;
  const BackwardScratch<T>& scratch;
  int64_t head;   // of the unit
  int64_t block;  // of the sweep's keys
  TilePosition at;
  PairOperands<N> operands;

  static constexpr int64_t kPerLane = Numbers<N>::kPerLane;

  const AttentionLayout<T>& layout() const { return plan.layout; }
  int64_t keys() const { return min_of(kPanel, plan.params.S - at.j0); }
  // A row of the query side, or the lanes it begins, in [heads][panels][L in lanes][64].
  int64_t of_queries(int64_t panels, int64_t panel, int64_t row, int64_t per_lane) const {
    return ((head * panels + panel) * ceil_div(plan.params.L, per_lane) + row / per_lane) * kPanel;
  }
  // What dO lacks in the folded form where it is not rounded again: 1/Z.
  const T* row_factors(int64_t row) const {
    if (std::is_same_v<N, T> || !state.keys.form.folded) return nullptr;
    return state.rows.factor + head * plan.params.L + at.i0 + row;
  }

  // s = phi_q phi_k^T, dP = dO V^T of one band.
  void score(const Band& band) const {
    const int64_t L = plan.params.L, row = at.i0 + band.row, d_v = layout().d_v;
    const bool is_fixed = layout().fixed_scores;
    const QueryFeatures<T> queries{
        state.phi + of_queries(layout().feature_panels(), 0, row, 1),
        is_fixed ? state.narrow.phi + of_queries(layout().fixed().panels(), 0, row, 1) : nullptr,
        is_fixed ? state.narrow.steps + head * L + row : nullptr, L};
    const int64_t panels = ceil_div(d_v, kPerLane * kPanel);
    scratch.sweep.by_column.multiply(layout(), block, band.rows, queries, band.columns,
                                     scratch.s + band.row * kPanel);
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t width = min_of(kPerLane * kPanel, d_v - panel * kPerLane * kPanel);
      panel_gemm<N, Left::kRows>(band.rows, band.columns, ceil_div(width, kPerLane),
                                 operands.grad_out + of_queries(panels, panel, row, 1),
                                 operands.values + (block * panels + panel) * kPanel * kPanel,
                                 scratch.dp + band.row * kPanel, panel > 0,
                                 {row_factors(band.row), nullptr});
    }
  }

  // Weights and ds as the products below read them.
  void narrow() const {
    if constexpr (!std::is_same_v<N, T>) {
      const int64_t columns = round_up(keys(), kLanes<T>);
      stack_rows(at.rows, columns, scratch.w, row_factors(0), scratch.narrow_w_by_row);
      stack_rows(at.rows, columns, scratch.s, nullptr, scratch.narrow_ds_by_row);
      join_columns(at.rows, columns, scratch.s, kPanel, scratch.narrow_ds);
    }
  }

  // dV += w^T dO, dphi_k += ds^T phi_q of `count` keys, over the rows from `row` on.
  void add_to_keys(int64_t column, int64_t count, int64_t row) const {
    const int64_t rows = at.rows - row, depth = ceil_div(rows, kPerLane);
    const int64_t left = row / kPerLane * kPanel + column;
    if (rows <= 0) return;
    const int64_t key = block * kPanel + column;
    const int64_t values = layout().value_panels(), features = layout().feature_panels();
    for (int64_t panel = 0; panel < values; ++panel) {
      panel_gemm<N, Left::kColumns>(
          count, min_of(kPanel, layout().d_v - panel * kPanel), depth, operands.weights + left,
          operands.grad_out_by_row + of_queries(values, panel, at.i0 + row, kPerLane),
          scratch.sweep.grad_value + (panel * kSweepKeys + key) * kPanel, true);
    }
    for (int64_t panel = 0; panel < features; ++panel) {
      panel_gemm<N, Left::kColumns>(
          count, layout().feature.columns(panel), depth, operands.ds_by_row + left,
          operands.phi_by_row + of_queries(features, panel, at.i0 + row, kPerLane),
          state.grad_phi_k + (panel * state.held_keys + at.j0 % state.held_keys + column) * kPanel,
          true);
    }
  }

  // dphi_q += ds phi_k of one band.
  void add_to_queries(const Band& band) const {
    const int64_t panels = layout().feature_panels();
    for (int64_t panel = 0; panel < panels; ++panel) {
      panel_gemm<N, Left::kRows>(
          band.rows, layout().feature.columns(panel),
          ceil_div(min_of(keys(), band.columns), kPerLane), operands.ds + band.row * kPanel,
          operands.key_features + (panel * operands.key_rows + block * kPanel / kPerLane) * kPanel,
          state.grad_phi_q + of_queries(panels, panel, at.i0 + band.row, 1), true);
    }
  }
};

// All query blocks of one head against one sweep of key blocks.
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

  for (int64_t index = first_query_block; index < plan.query_blocks; ++index) {
    const QueryBlock block = plan.query_block(unit, head, index);
    int* progress = state.progress + head * plan.query_blocks + index;
    bool in_turn = false;
    for (int64_t key_block = first_block; key_block < last_block; ++key_block) {
      const int64_t j0 = key_block * kPanel;
      const TilePosition at{block.b, block.h, block.i0, block.rows, j0};
      const Visibility visibility = fill_bias(params, at, scratch.bias);
      if (visibility == Visibility::kNone) continue;
      const Tile<N, T> tile{plan, state, scratch, head, key_block - first_block, at, operands};
      const int64_t columns = round_up(tile.keys(), kLanes<T>);
      const int64_t first_row = head * params.L + block.i0;
      const PairTile<T> pairs{block.rows,
                              columns,
                              params.is_causal ? j0 - block.i0 : -kPanel,
                              state.keys.weight_terms + j0,
                              state.keys.logits + j0,
                              state.rows.delta + first_row,
                              state.rows.log_normalizer + first_row,
                              state.rows.log_normalizer_rest + first_row,
                              state.rows.poisoned + first_row,
                              visibility == Visibility::kMixed ? scratch.bias : nullptr,
                              params.dropout_threshold ? scratch.keep : nullptr,
                              static_cast<T>(params.eps)};

      // 1. scores and dP
      if (params.d_v == 0) __builtin_memset(scratch.dp, 0, kPanel * kPanel * sizeof(T));
      for_each_band(params, at, columns, [&](const Band& band) { tile.score(band); });
      // 2. pair gradients
      if (pairs.keep) fill_keep(params, at, kept_factor<T>(params), scratch.keep);
      T* dlog = params.grad_mask ? scratch.dlog : nullptr;
      if (dlog) __builtin_memset(dlog, 0, kPanel * kPanel * sizeof(T));
      pair_gradients(pairs, state.keys.form.folded, scratch.s, scratch.w, scratch.dp, dlog,
                     state.grad_logit + j0);
      poison_rows(pairs, scratch.s, scratch.w, dlog, state.grad_logit + j0);
      tile.narrow();
      // 3. dV, dphi_k: rows are keys, summed over the block's queries
      for_each_key_band(params, at, tile.keys(), [&](int64_t column, int64_t keys, int64_t row) {
        tile.add_to_keys(column, keys, row);
      });
      // 4. dphi_q (and a mask gradient summed over keys): after all earlier keys
      if (!in_turn) wait_for(progress, static_cast<int>(sweep));
      in_turn = true;
      for_each_band(params, at, columns, [&](const Band& band) { tile.add_to_queries(band); });
      if (dlog) add_mask_gradient(params.grad_mask, at, tile.keys(), dlog);
    }
    if (!in_turn) wait_for(progress, static_cast<int>(sweep));
    __atomic_store_n(progress, static_cast<int>(sweep) + 1, __ATOMIC_RELEASE);
  }
}

// Gradients of one sweep's keys start at zero.
template <typename T>
void clear_key_gradients(const AttentionLayout<T>& layout, int64_t sweep, BackwardUnit<T>& state,
                         const BackwardScratch<T>& scratch) {
  const int64_t first = sweep * kSweepKeys, rows = min_of(layout.padded_keys - first, kSweepKeys);
  for (int64_t panel = 0; panel < layout.feature_panels(); ++panel) {
    __builtin_memset(
        state.grad_phi_k + (panel * state.held_keys + first % state.held_keys) * kPanel, 0,
        rows * kPanel * sizeof(T));
  }
  __builtin_memset(scratch.sweep.grad_value, 0,
                   layout.value_panels() * kSweepKeys * kPanel * sizeof(T));
  __builtin_memset(state.grad_logit + first, 0, rows * sizeof(T));
}

// Values of one block of the sweep, by column; keys left out count for nothing.
template <typename T>
void prepare_sweep_values(const AttentionParams& params, const AttentionLayout<T>& layout,
                          const Unit& unit, int64_t block, int64_t j0, const BackwardUnit<T>& state,
                          const BackwardScratch<T>& scratch) {
  const int64_t count = min_of(kPanel, params.S - j0), rows = round_up(count, kLanes<T>);
  T* values = scratch.keys.values;
  load_values(params, unit, j0, values);
  for (int64_t r = 0; r < count; ++r) {
    if (state.keys.feature_scales[j0 + r] == 0) fill_row(values, kPanel, r, params.d_v, T(0));
  }
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
                       (panel * kBackwardKeyBlocks + block) * kPanel / 2 * kPanel);
      }
    }
  }
}

template <typename T>
void sweep_keys(const BackwardPlan<T>& plan, const Unit& unit, int64_t sweep,
                BackwardUnit<T>& state, const BackwardScratch<T>& scratch) {
  const AttentionBackwardParams& params = plan.params;
  const AttentionLayout<T>& layout = plan.layout;
  clear_key_gradients(layout, sweep, state, scratch);
  prepare_sweep(params, layout, unit, sweep, state, scratch);
  for (int64_t head = 0; head < layout.heads_per_unit; ++head) {
    if constexpr (kTakes16Bits<T> && kHasBFloat16) {
      if (layout.bfloat16_products) {
        sweep_head<BFloat16x2>(plan, unit, head, sweep, state, scratch);
        continue;
      }
    }
    sweep_head<T>(plan, unit, head, sweep, state, scratch);
  }
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

// The last step for the keys of a sweep, by the thread that makes all of the unit's sweeps; sum:
// the unit's frequency gradient, null: not wanted.
template <typename T>
void finish_sweep(const BackwardPlan<T>& plan, const Unit& unit, int64_t sweep,
                  const PackedFrequencies<T>& frequencies, BackwardUnit<T>& state, T* sum,
                  const BackwardScratch<T>& scratch) {
  const int64_t begin = sweep * kSweepKeys, end = min_of(plan.params.S, begin + kSweepKeys);
  T* partial = sum ? state.partials : nullptr;
  if (partial && begin % plan.frequency_tokens == 0) {
    __builtin_memset(partial, 0, plan.layout.feature.packed_size() * sizeof(T));
  }
  finish_keys(plan, unit, begin, end, frequencies, state, partial, scratch);
  if (partial && (end == plan.params.S || end % plan.frequency_tokens == 0)) {
    add_chunk(plan, begin / plan.frequency_tokens, partial, sum);
  }
}

// A mask gradient summed over batch or heads is added to by one unit at a time, in order.
inline bool units_share_mask_gradient(const AttentionBackwardParams& params) {
  const Array& grad = params.grad_mask;
  return grad && ((params.B > 1 && grad.stride[0] == 0) || (params.H > 1 && grad.stride[1] == 0));
}

// Units whose frequency gradients are held at once.
template <typename T>
inline int64_t units_per_group(const BackwardPlan<T>& plan) {
  constexpr int64_t kBytes = int64_t{8} << 20;
  if (units_share_mask_gradient(plan.params)) return 1;
  if (!plan.wants_frequencies()) return max_of(1, plan.layout.units);
  const int64_t fitting = kBytes / (plan.layout.feature.packed_size() * int64_t{sizeof(T)});
  return max_of(1, min_of(plan.layout.units, fitting));
}

template <typename T>
void attention_backward(const AttentionBackwardParams& params, const Executor& executor) {
  const BackwardPlan<T> plan(params);
  const AttentionLayout<T>& layout = plan.layout;
  const int64_t sets = params.frequency_batches * params.frequency_heads;
  const int64_t packed_size = layout.feature.packed_size();
  const int64_t group = units_per_group(plan);
  const bool whole = Schedule::has_whole_units(executor, group);
  PassMemory<T, BackwardUnit<T>, BackwardScratch<T>> memory;
  memory.allocate(
      executor, params, layout, group, Schedule::slots(executor, group, whole),
      [&](BackwardUnit<T>& unit, Workspace& workspace) {
        unit.take(workspace, layout, params.L, plan.query_blocks, whole, plan.chunks());
      },
      [&](BackwardScratch<T>& own, Workspace& workspace) { own.take(workspace, layout); });

  // Chunks of a unit that one thread goes through are added up as they come, those of others when
  // all are there; units with frequencies of their own need no sum over units.
  const bool shares_sets = sets != layout.units;
  const auto unit_sum = [&](int64_t unit, int64_t first) {
    return shares_sets ? memory.unit_sums + (unit - first) * packed_size
                       : memory.totals + unit_at(params, layout, unit).frequency_set * packed_size;
  };
  __builtin_memset(memory.totals, 0, sets * packed_size * sizeof(T));
  pack_all_frequencies(params, layout.feature, memory.frequencies, executor);
  const KeyStages keys{params, layout, memory};
  const auto unit_of = [&](const Place& at) { return unit_at(params, layout, at.unit); };
  const Stage queries{layout.heads_per_unit * plan.query_blocks,
                      [&](const Place& at, int64_t index, int thread) {
                        prepare_query_gradients(plan, unit_of(at), index / plan.query_blocks,
                                                index % plan.query_blocks, memory.frequencies,
                                                memory.slots[at.slot], memory.scratch[thread]);
                      }};
  const bool wants = plan.wants_frequencies() && plan.chunks() > 0;
  for (int64_t first = 0; first < layout.units; first += group) {
    const int64_t count = min_of(group, layout.units - first);
    const Stage pairs{plan.key_sweeps, [&](const Place& at, int64_t sweep, int thread) {
                        BackwardUnit<T>& state = memory.slots[at.slot];
                        sweep_keys(plan, unit_of(at), sweep, state, memory.scratch[thread]);
                        if (!whole) return;
                        finish_sweep(plan, unit_of(at), sweep, memory.frequencies, state,
                                     wants ? unit_sum(at.unit, first) : nullptr,
                                     memory.scratch[thread]);
                      }};
    const int64_t finished = whole ? plan.key_chunks : 0;
    const Stage tokens{plan.chunks() - finished, [&](const Place& at, int64_t index, int thread) {
                         BackwardUnit<T>& state = memory.slots[at.slot];
                         T* partial =
                             wants ? state.partials + (whole ? 0 : index) * packed_size : nullptr;
                         finish_chunk(plan, unit_of(at), finished + index, memory.frequencies,
                                      state, partial, memory.scratch[thread]);
                         if (wants && whole) {
                           add_chunk(plan, finished + index, partial, unit_sum(at.unit, first));
                         }
                       }};
    const Stage chunk_sums{int64_t{wants && !whole}, [&](const Place& at, int64_t, int) {
                             const T* partials = memory.slots[at.slot].partials;
                             for (int64_t chunk = 0; chunk < plan.chunks(); ++chunk) {
                               add_chunk(plan, chunk, partials + chunk * packed_size,
                                         unit_sum(at.unit, first));
                             }
                           }};
    run_stages(executor, Schedule{first, count, whole}, keys.logits(), keys.form(), keys.blocks(),
               queries, pairs, tokens, chunk_sums);
    if (!wants || !shares_sets) continue;
    parallel(for_elements(executor, count * packed_size), sets, [&](int64_t set, int) {
      sum_units(plan, set, first, count, memory.unit_sums, memory.totals + set * packed_size);
    });
  }
  if (plan.wants_frequencies()) store_frequency_gradients(params, layout.feature, memory.totals);
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
