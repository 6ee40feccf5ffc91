// Backward pass, one sweep over the pairs (1024 flops each at M = d_v = 64):
//
//   keys and queries prepared -> for each block of 128 keys, all query blocks in order:
//       S = phi_q phi_k^T      dP = dO V^T      w, x = dP - delta, ds = s x      (dlog = w x)
//       dV += w^T dO    dphi_k += ds^T phi_q    dphi_q += ds phi_k    dg += column sums of dlog
//   -> from dphi to x and the frequencies -> frequencies summed over tokens, heads and batch
//
// Linear time (linear.h) is taken where it is faster. In the backward of weights their gradient
// less its mean replaces x, and there is no dV.
//
// In the folded form dO and delta carry 1/Z_i and phi_k carries sqrt(e_j), so that w = s^2 + eps
// e_j and ds = s x need nothing else; dO of 16 bits is not scaled, and 1/Z_i multiplies dP and w.
#pragma once

#include "attention/cpu/backward/linear.h"
#include "attention/cpu/backward/sweep.h"
#include "attention/cpu/backward/tokens.h"

namespace ikattn::IKATTN_ISA {
namespace {

// Computes dV, dphi_k and dg of the keys of a sweep, in linear time and from the remaining pairs.
template <typename T>
void make_key_gradients(const BackwardPlan<T>& plan, const Unit& unit, int64_t sweep,
                        BackwardUnit<T>& state, const BackwardScratch<T>& scratch) {
  const bool is_taken = state.linear.keys.is_taken;
  const bool is_causal = plan.params.is_causal;
  clear_key_gradients(plan.layout, sweep, is_taken && is_causal, state, scratch);
  if (is_taken) linear_key_gradients(plan, unit, sweep, state, scratch);
  if (!is_taken || is_causal || state.linear.any_by_pairs) {
    sweep_keys(plan, unit, sweep, state, scratch);
  }
  store_sweep(plan, unit, sweep, state, scratch);
}

// Returns the largest magnitude among rows of one head of a tensor; where logits are given, among
// those of keys that count.
inline double largest_magnitude(const Array& x, int64_t b, int64_t h, int64_t rows, int64_t columns,
                                const double* logits = nullptr) {
  double largest = 0;
  const bool is_plain = x.type == ElementType::kFloat32 && x.stride[3] == 1;
  for (int64_t r = 0; r < rows; ++r) {
    if (logits && !is_finite(logits[r])) continue;
    const int64_t row = b * x.stride[0] + h * x.stride[1] + r * x.stride[2];
    int32_t most = 0;  // whose bits are in the order of magnitudes, which compilers vectorise
    for (int64_t c = 0; is_plain && c < columns; ++c) {
      const int32_t bits = static_cast<const int32_t*>(x.data)[row + c] & 0x7fffffff;
      most = bits > most ? bits : most;
    }
    double found = __builtin_bit_cast(float, most);
    for (int64_t c = 0; !is_plain && c < columns; ++c) {
      const double own = load_element<double>(x, row + c * x.stride[3]);
      found = found < own ? own : found < -own ? -own : found;
    }
    largest = largest < found ? found : largest;
  }
  return largest;
}

// Takes the general form where 1/Z times dO and a value might leave the range of T: 1/Z is large in
// a row that does not see the largest keys, or is not similar to them.
template <typename T>
void keep_in_range(const AttentionBackwardParams& params, const AttentionLayout<T>& layout,
                   const Unit& unit, const double* logits, KeyForm& form) {
  if (!form.folded || params.d_v == 0) return;
  const Array &log_normalizer = params.log_normalizer, &gradient = params.grad_output;
  double least = infinity<double>(), incoming = 0;
  const int64_t end = unit.first_query_head + layout.heads_per_unit;
  for (int64_t h = unit.first_query_head; h < end; ++h) {
    for (int64_t i = 0; i < params.L; ++i) {
      const double found = load_element<double>(log_normalizer, unit.b * log_normalizer.stride[0] +
                                                                    h * log_normalizer.stride[1] +
                                                                    i * log_normalizer.stride[2]);
      if (is_finite(found)) least = found < least ? found : least;
    }
  }
  const double factor = exponential(form.reference - least);
  constexpr double kUsual = 1e3, kRoom = sizeof(T) == 4 ? 1e30 : 1e290;
  if (factor < kUsual) return;
  for (int64_t h = unit.first_query_head; h < end; ++h) {
    const double found = largest_magnitude(gradient, unit.b, h, params.L, params.d_v);
    incoming = incoming < found ? found : incoming;
  }
  const double value =
      largest_magnitude(params.value, unit.b, unit.group, params.S, params.d_v, logits);
  if (factor * value * incoming * static_cast<double>(params.d_v) >= kRoom) form = {false, 0};
}

// Finishes the keys of a sweep, in the thread that computes all sweeps of the unit. sum is the
// unit's frequency gradient; null: not wanted.
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

// Tells whether a mask gradient is summed over batch or heads, so that units must add to it one at
// a time, in order.
inline bool units_share_mask_gradient(const AttentionBackwardParams& params) {
  const Array& grad = params.grad_mask;
  return grad && ((params.B > 1 && grad.stride[0] == 0) || (params.H > 1 && grad.stride[1] == 0));
}

// Returns the number of units whose frequency gradients are in memory at once.
template <typename T>
inline int64_t units_per_group(const BackwardPlan<T>& plan) {
  if (units_share_mask_gradient(plan.params)) return 1;
  if (!plan.wants_frequencies()) return max_of(1, plan.layout.units);
  return max_of(1, min_of(plan.layout.units, gradients_held(plan.layout.feature)));
}

template <typename T>
void attention_backward(const AttentionBackwardParams& params, const Route& route,
                        const Executor& executor) {
  const BackwardPlan<T> plan(params, route);
  const AttentionLayout<T>& layout = plan.layout;
  const int64_t sets = params.frequency_batches * params.frequency_heads;
  const int64_t packed_size = layout.feature.packed_size();
  const int64_t group = units_per_group(plan);
  const bool whole = Schedule::has_whole_units(executor, group);
  PassMemory<T, BackwardUnit<T>, BackwardScratch<T>> memory;
  memory.allocate(
      executor, params, layout, group, Schedule::slots(executor, group, whole),
      [&](BackwardUnit<T>& unit, Workspace& workspace) {
        unit.take(workspace, params, layout, plan.query_blocks, whole, plan.chunks(),
                  plan.is_linear);
      },
      [&](BackwardScratch<T>& own, Workspace& workspace) {
        own.take(workspace, params, layout, plan.is_linear);
      });

  // A thread that computes a whole unit adds up its chunks one by one; otherwise they are added
  // when all are complete. Units with separate frequencies need no sum over units.
  const bool shares_sets = sets != layout.units;
  const auto unit_sum = [&](int64_t unit, int64_t first) {
    return shares_sets ? memory.unit_sums + (unit - first) * packed_size
                       : memory.totals + unit_at(params, layout, unit).frequency_set * packed_size;
  };
  __builtin_memset(memory.totals, 0, sets * packed_size * sizeof(T));
  pack_all_frequencies(params, layout.feature, memory.frequencies, executor);
  const KeyStages keys{params, layout, memory, plan.is_linear};
  const Stage range{int64_t{!params.grad_weights}, [&](const Place& at, int64_t, int) {
                      keep_in_range(params, layout, unit_at(params, layout, at.unit),
                                    keys.logits_of(at.slot), memory.slots[at.slot].keys.form);
                    }};
  const Stage centre{int64_t{layout.bfloat16_products}, [&](const Place& at, int64_t, int) {
                       find_centre(plan, memory.slots[at.slot]);
                     }};
  const auto unit_of = [&](const Place& at) { return unit_at(params, layout, at.unit); };
  const Stage queries{layout.heads_per_unit * plan.query_blocks,
                      [&](const Place& at, int64_t index, int thread) {
                        prepare_query_gradients(plan, unit_of(at), index / plan.query_blocks,
                                                index % plan.query_blocks, memory.frequencies,
                                                memory.slots[at.slot], memory.scratch[thread]);
                      }};
  const LinearBackwardStages linear{
      plan, memory, PanelGroups::of_call(params, layout.products(), executor.threads, whole)};
  const bool wants = plan.wants_frequencies() && plan.chunks() > 0;
  for (int64_t first = 0; first < layout.units; first += group) {
    const int64_t count = min_of(group, layout.units - first);
    const Stage pairs{plan.key_sweeps, [&](const Place& at, int64_t sweep, int thread) {
                        BackwardUnit<T>& state = memory.slots[at.slot];
                        const BackwardScratch<T>& scratch = memory.scratch[thread];
                        make_key_gradients(plan, unit_of(at), sweep, state, scratch);
                        if (!whole) return;
                        finish_sweep(plan, unit_of(at), sweep, memory.frequencies, state,
                                     wants ? unit_sum(at.unit, first) : nullptr, scratch);
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
    run_stages(executor, Schedule{first, count, whole}, keys.logits(), keys.form(), range,
               keys.blocks(), centre, queries, linear.preparation(), linear.moments(),
               linear.queries(), linear.chunks(), pairs, tokens, chunk_sums);
    if (wants && shares_sets) {
      const FrequencySets by_unit{params.frequency_heads, params.key_heads / params.frequency_heads,
                                  params.frequency_batches > 1};
      add_to_sets(by_unit, packed_size, first, count, memory.unit_sums, memory.totals, executor);
    }
  }
  if (plan.wants_frequencies()) store_frequency_gradients(params, layout.feature, memory.totals);
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
