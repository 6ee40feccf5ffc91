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

// All query blocks of one head against one sweep of key blocks.
template <typename T>
void sweep_head(const BackwardPlan<T>& plan, const Unit& unit, int64_t head, int64_t sweep,
                BackwardUnit<T>& state, const BackwardScratch<T>& scratch) {
  const AttentionBackwardParams& params = plan.params;
  const AttentionLayout<T>& layout = plan.layout;
  const int64_t L = params.L, padded = layout.padded_keys;
  const int64_t first_block = sweep * kBackwardKeyBlocks;
  const int64_t last_block = min_of(layout.key_blocks, first_block + kBackwardKeyBlocks);
  const T* head_phi = state.phi + head * layout.feature_panels() * L * kPanel;
  const T* head_grad_out = state.grad_out + head * layout.value_panels() * L * kPanel;
  T* head_grad_phi = state.grad_phi_q + head * layout.feature_panels() * L * kPanel;
  const int64_t first_query_block = params.is_causal ? first_block * kPanel / kBackwardRows : 0;

  for (int64_t index = first_query_block; index < plan.query_blocks; ++index) {
    const QueryBlock block = plan.query_block(unit, head, index);
    const T* phi = head_phi + block.i0 * kPanel;
    const T* grad_out = head_grad_out + block.i0 * kPanel;
    int* progress = state.progress + head * plan.query_blocks + index;
    bool in_turn = false;
    for (int64_t key_block = first_block; key_block < last_block; ++key_block) {
      const int64_t j0 = key_block * kPanel;
      const TilePosition at{block.b, block.h, block.i0, block.rows, j0};
      const Visibility visibility = fill_bias(params, at, scratch.bias);
      if (visibility == Visibility::kNone) continue;
      const int64_t count = min_of(kPanel, params.S - j0);
      const int64_t columns = round_up(count, kLanes<T>);
      const int64_t first_row = head * L + block.i0;
      PairTile<T> tile{block.rows,
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
      const T* block_features = state.keys.block_features(layout, key_block);
      const T* block_values = state.keys.block_values(layout, key_block);
      if (params.d_v == 0) __builtin_memset(scratch.dp, 0, kPanel * kPanel * sizeof(T));
      for_each_band(params, at, columns, [&](const Band& band) {
        const int64_t row = band.row * kPanel;
        scores(layout, band.rows, phi + row, L, block_features, band.columns, scratch.s + row);
        for (int64_t first = 0; first < params.d_v; first += kPanel) {
          panel_gemm<T, Left::kRows>(band.rows, band.columns, min_of(kPanel, params.d_v - first),
                                     grad_out + first * L + row, block_values + first * kPanel,
                                     scratch.dp + row, first > 0);
        }
      });
      // 2. pair gradients
      if (tile.keep) fill_keep(params, at, scratch.keep);
      T* dlog = params.grad_mask ? scratch.dlog : nullptr;
      if (dlog) __builtin_memset(dlog, 0, kPanel * kPanel * sizeof(T));
      pair_gradients(tile, state.keys.form.folded, scratch.s, scratch.w, scratch.dp, dlog,
                     state.grad_logit + j0);
      poison_rows(tile, scratch.s, scratch.w, dlog, state.grad_logit + j0);
      // 3. dV, dphi_k: rows are keys, summed over the block's queries
      for_each_key_band(params, at, count, [&](int64_t column, int64_t keys, int64_t row) {
        const int64_t rows = block.rows - row, left = row * kPanel + column;
        if (rows <= 0) return;
        for (int64_t first = 0; first < params.d_v; first += kPanel) {
          panel_gemm<T, Left::kColumns>(keys, min_of(kPanel, params.d_v - first), rows,
                                        scratch.w + left, grad_out + first * L + row * kPanel,
                                        state.grad_value + first * padded + (j0 + column) * kPanel,
                                        true);
        }
        for (int64_t panel = 0; panel < layout.feature_panels(); ++panel) {
          panel_gemm<T, Left::kColumns>(keys, layout.feature.columns(panel), rows, scratch.s + left,
                                        phi + (panel * L + row) * kPanel,
                                        state.grad_phi_k + (panel * padded + j0 + column) * kPanel,
                                        true);
        }
      });
      // 4. dphi_q (and a mask gradient summed over keys): after all earlier keys
      if (!in_turn) wait_for(progress, static_cast<int>(sweep));
      in_turn = true;
      for_each_band(params, at, columns, [&](const Band& band) {
        for (int64_t panel = 0; panel < layout.feature_panels(); ++panel) {
          panel_gemm<T, Left::kRows>(band.rows, layout.feature.columns(panel),
                                     min_of(count, band.columns), scratch.s + band.row * kPanel,
                                     state.keys.features_by_row + (panel * padded + j0) * kPanel,
                                     head_grad_phi + (panel * L + block.i0 + band.row) * kPanel,
                                     true);
        }
      });
      if (dlog) add_mask_gradient(params.grad_mask, at, count, dlog);
    }
    if (!in_turn) wait_for(progress, static_cast<int>(sweep));
    __atomic_store_n(progress, static_cast<int>(sweep) + 1, __ATOMIC_RELEASE);
  }
}

// Gradients of one sweep's keys start at zero.
template <typename T>
void clear_key_gradients(const AttentionLayout<T>& layout, int64_t sweep, BackwardUnit<T>& state) {
  const int64_t first = sweep * kBackwardKeyBlocks * kPanel;
  const int64_t rows = min_of(layout.padded_keys - first, kBackwardKeyBlocks * kPanel);
  const int64_t padded = layout.padded_keys;
  for (int64_t panel = 0; panel < layout.feature_panels(); ++panel) {
    __builtin_memset(state.grad_phi_k + (panel * padded + first) * kPanel, 0,
                     rows * kPanel * sizeof(T));
  }
  for (int64_t panel = 0; panel < layout.value_panels(); ++panel) {
    __builtin_memset(state.grad_value + (panel * padded + first) * kPanel, 0,
                     rows * kPanel * sizeof(T));
  }
  __builtin_memset(state.grad_logit + first, 0, rows * sizeof(T));
}

template <typename T>
void sweep_keys(const BackwardPlan<T>& plan, const Unit& unit, int64_t sweep,
                BackwardUnit<T>& state, const BackwardScratch<T>& scratch) {
  const AttentionBackwardParams& params = plan.params;
  const AttentionLayout<T>& layout = plan.layout;
  clear_key_gradients(layout, sweep, state);
  for (int64_t head = 0; head < layout.heads_per_unit; ++head) {
    sweep_head(plan, unit, head, sweep, state, scratch);
  }
  const int64_t j0 = sweep * kBackwardKeyBlocks * kPanel;
  const int64_t count = min_of(kBackwardKeyBlocks * kPanel, params.S - j0);
  if (const Array& out = params.grad_value) {
    store_panels(out, unit.b * out.stride[0] + unit.head * out.stride[1] + j0 * out.stride[2],
                 out.stride[2], out.stride[3], count, params.d_v, state.grad_value + j0 * kPanel,
                 layout.padded_keys);
  }
  if (const Array& out = params.grad_key_bias) {
    store_row(out, unit.b * out.stride[0] + unit.head * out.stride[1] + j0 * out.stride[2],
              out.stride[2], count, state.grad_logit + j0);
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
        unit.take(workspace, layout, params.L, plan.query_blocks, plan.chunks());
      },
      [&](BackwardScratch<T>& own, Workspace& workspace) { own.take(workspace, layout); });

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
  const Stage pairs{plan.key_sweeps, [&](const Place& at, int64_t sweep, int thread) {
                      sweep_keys(plan, unit_of(at), sweep, memory.slots[at.slot],
                                 memory.scratch[thread]);
                    }};
  const Stage tokens{plan.chunks(), [&](const Place& at, int64_t chunk, int thread) {
                       finish_chunk(plan, unit_of(at), chunk, memory.frequencies,
                                    memory.slots[at.slot], memory.scratch[thread]);
                     }};
  for (int64_t first = 0; first < layout.units; first += group) {
    const int64_t count = min_of(group, layout.units - first);
    const Stage chunk_sums{int64_t{plan.wants_frequencies()}, [&](const Place& at, int64_t, int) {
                             sum_chunks(plan, memory.slots[at.slot],
                                        memory.unit_sums + (at.unit - first) * packed_size);
                           }};
    run_stages(executor, Schedule{first, count, whole}, keys.logits(), keys.form(), keys.blocks(),
               queries, pairs, tokens, chunk_sums);
    if (!plan.wants_frequencies()) continue;
    parallel(for_elements(executor, count * packed_size), sets, [&](int64_t set, int) {
      sum_units(plan, set, first, count, memory.unit_sums, memory.totals + set * packed_size);
    });
  }
  if (plan.wants_frequencies()) store_frequency_gradients(params, layout.feature, memory.totals);
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
