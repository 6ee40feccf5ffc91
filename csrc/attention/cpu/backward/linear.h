// Backward pass in linear time (../../calls/linear_time.h). With v' = v - center, g_i = dO_i / Z_i
// and f_i = g_i . center - delta_i, the contribution of a pair starts with s_ij (g_i . v'_j + f_i):
//
//   moments of the keys with v' and 1, moments of the queries with g and f
//   -> dphi_q = half the gradient of psi(q) . (moments of the keys with g_i and f_i)
//   -> dphi_k likewise with v'_j and 1,   dV_j = psi(k) . (moments with g) + eps e_j sum_i g_i
//
// In a causal call the moments of the keys grow from the first chunk on, those of the queries from
// the last one back, and the sweep of a chunk computes its pairs. The center moves with both: it is
// a mean over keys that every query concerned sees.
#pragma once

#include "attention/cpu/backward/state.h"

namespace ikattn::IKATTN_ISA {
namespace {

// Loads the values of the block of keys at j0, [value panels][64][64], relative to a center; zero
// for keys that are left out.
template <typename T>
T* centered_values(const BackwardPlan<T>& plan, const Unit& unit, int64_t j0, const T* center,
                   const BackwardUnit<T>& state, const BackwardScratch<T>& scratch) {
  const AttentionBackwardParams& params = plan.params;
  T* values = scratch.keys.values;
  load_counted_values(params, plan.layout, unit, j0, state.keys, values);
  subtract_center(min_of(kPanel, params.S - j0), params.d_v, center, values, kPanel);
  return values;
}

// Returns the center of a chunk of keys for the queries after it.
template <typename T>
const T* center_of_keys(const BackwardPlan<T>& plan, const LinearKeys<T>& keys, int64_t chunk) {
  if (!plan.params.is_causal) return keys.center(0);
  return keys.center(min_of(chunk + 1, chunk_count(plan.params) - 1));
}

// Marks the blocks of queries that take quadratic time, the same for every number of threads.
template <typename T>
void mark_blocks(const BackwardPlan<T>& plan, BackwardUnit<T>& state) {
  const AttentionLayout<T>& layout = plan.layout;
  const int64_t L = plan.params.L, heads = layout.heads_per_unit;
  LinearBackward<T>& linear = state.linear;
  __builtin_memset(linear.by_pairs, 0, heads * plan.query_blocks);
  linear.any_by_pairs = false;
  linear.poisoned_keys = 0;
  for (int64_t row = 0; row < heads * L; ++row) {
    const int64_t head = row / L, i = row % L;
    const T* phi = state.phi + head * layout.feature_panels() * L * kPanel;
    const T factor = state.rows.factor[row];  // 1/Z, 0 where the row is left out
    if (state.rows.poisoned[row]) {
      const int64_t seen = plan.params.is_causal ? i + 1 : plan.params.S;
      linear.poisoned_keys = max_of(linear.poisoned_keys, seen);
      fill_row(state.grad_phi_q + head * layout.feature_panels() * L * kPanel, L, i,
               layout.feature.width(), not_a_number<T>());
    }
    if (factor == 0 ||
        keeps_digits(layout.products(), 1 / factor, square_of(layout.feature, phi, L, i),
                     linear.keys.squares[chunk_of(plan.params, i)])) {
      continue;
    }
    linear.by_pairs[head * plan.query_blocks + i / kBackwardRows] = 1;
    linear.any_by_pairs = true;
  }
  // A block with pairs in its chunk's sweep only waits for no other sweep.
  for (int64_t block = 0; plan.params.is_causal && block < heads * plan.query_blocks; ++block) {
    if (linear.by_pairs[block]) continue;
    state.progress[block] =
        static_cast<int>(block % plan.query_blocks * kBackwardRows / kSweepKeys);
  }
}

// Computes f_i of the queries [begin, end) of all heads that take linear time; adds g_i to sums
// [d_v] and delta_i to sum_of_deltas.
template <typename T>
void add_query_terms(const BackwardPlan<T>& plan, int64_t begin, int64_t end,
                     BackwardUnit<T>& state, double* sums, double& sum_of_deltas) {
  const AttentionLayout<T>& layout = plan.layout;
  const int64_t L = plan.params.L, d_v = plan.params.d_v;
  const LinearBackward<T>& linear = state.linear;
  for (int64_t head = 0; head < layout.heads_per_unit; ++head) {
    for (int64_t i = begin; i < end; ++i) {
      linear.factors[head * L + i] = 0;
      if (is_quadratic(plan, state, head, i / kBackwardRows)) continue;
      const T* center = linear.keys.center(chunk_of(plan.params, i));
      const T delta = state.rows.delta[head * L + i];
      T factor = -delta;
      for (int64_t first = 0; first < d_v; first += kPanel) {
        const T* row = state.grad_out + (head * layout.value_panels() * L + i) * kPanel + first * L;
        for (int64_t c = 0; c < min_of(kPanel, d_v - first); ++c) {
          factor += row[c] * center[first + c];
          sums[first + c] += static_cast<double>(row[c]);
        }
      }
      linear.factors[head * L + i] = factor;
      sum_of_deltas += static_cast<double>(delta);
    }
  }
}

// Computes f_i, and the sums of g_i and f_i over the queries that moments hold for each chunk of
// keys.
template <typename T>
void sum_query_terms(const BackwardPlan<T>& plan, BackwardUnit<T>& state) {
  const AttentionBackwardParams& params = plan.params;
  const LinearBackward<T>& linear = state.linear;
  double *sums = linear.keys.sums, sum_of_deltas = 0;
  for (int64_t c = 0; c < params.d_v; ++c) sums[c] = 0;
  int64_t end = params.L;
  for (int64_t chunk = chunk_count(params) - 1; chunk >= 0; --chunk) {
    const int64_t begin = first_query_after(params, chunk);
    add_query_terms(plan, begin, end, state, sums, sum_of_deltas);
    end = begin;
    const T* center = center_of_keys(plan, linear.keys, chunk);
    double sum_of_factors = -sum_of_deltas;
    for (int64_t c = 0; c < params.d_v; ++c) {
      linear.sums_of_gradients[chunk * params.d_v + c] = static_cast<T>(sums[c]);
      sum_of_factors += sums[c] * static_cast<double>(center[c]);
    }
    linear.sums_of_factors[chunk] = static_cast<T>(sum_of_factors);
  }
}

// Clears the sums to which groups of panels add, chunk by chunk.
template <typename T>
void clear_chunks(const BackwardPlan<T>& plan, BackwardUnit<T>& state) {
  const AttentionLayout<T>& layout = plan.layout;
  const LinearBackward<T>& linear = state.linear;
  const int64_t keys = layout.padded_keys * kPanel * int64_t{sizeof(T)};
  __builtin_memset(state.grad_phi_k, 0, layout.feature_panels() * keys);
  __builtin_memset(linear.grad_value, 0, layout.value_panels() * keys);
  __builtin_memset(linear.groups_at_query, 0,
                   layout.heads_per_unit * plan.query_blocks * sizeof(int));
  __builtin_memset(linear.groups_at_key, 0, layout.key_blocks * sizeof(int));
}

// Decides which queries take linear time, and computes the sums over tokens that precede moments.
template <typename T>
void prepare_linear(const BackwardPlan<T>& plan, const Unit& unit, BackwardUnit<T>& state,
                    const BackwardScratch<T>& scratch) {
  const AttentionBackwardParams& params = plan.params;
  const AttentionLayout<T>& layout = plan.layout;
  LinearBackward<T>& linear = state.linear;
  describe_keys(
      params, layout, state.keys, kPanel,
      [&](int64_t j0) {
        load_values(params, layout, unit, j0, scratch.keys.values);
        return scratch.keys.values;
      },
      [&](int64_t j0, KeySquares& sums) {
        for (int64_t j = j0; j < min_of(params.S, j0 + kPanel); ++j) {
          sums.add(static_cast<double>(
              square_of(layout.feature, state.keys.features, layout.padded_keys, j)));
        }
      },
      linear.keys);
  if (!linear.keys.is_taken) return;
  mark_blocks(plan, state);
  sum_query_terms(plan, state);
  if (params.is_causal) clear_chunks(plan, state);
}

// Loads x, factors, and values relative to a center, of keys [first, first + count) into the
// scratch.
template <typename T>
void load_linear_keys(const BackwardPlan<T>& plan, const Unit& unit, int64_t first, int64_t count,
                      const T* center, const BackwardUnit<T>& state,
                      const BackwardScratch<T>& scratch) {
  const AttentionLayout<T>& layout = plan.layout;
  const ProductScratch<T>& own = scratch.products;
  gather_features(layout.feature, count, state.keys.features + first * kPanel, layout.padded_keys,
                  own.x);
  for (int64_t t = 0; t < count; t += kPanel) {
    copy_rows(min_of(kPanel, count - t), layout.d_v,
              centered_values(plan, unit, first + t, center, state, scratch), kPanel,
              own.values + t * kPanel, kMomentTokens);
  }
  for (int64_t t = 0; t < count; ++t) own.factors[t] = 1;
}

// Loads x, g and f of queries [first, first + count) of all heads into the scratch; zero for
// queries in quadratic time.
template <typename T>
void load_linear_queries(const BackwardPlan<T>& plan, int64_t first, int64_t count,
                         const BackwardUnit<T>& state, const BackwardScratch<T>& scratch) {
  const AttentionLayout<T>& layout = plan.layout;
  const ProductScratch<T>& own = scratch.products;
  const int64_t L = plan.params.L, row_size = layout.products().template row_size<T>();
  for (int64_t t = 0, rows; t < count; t += rows) {  // rows of one block of a head
    const int64_t head = (first + t) / L, i = (first + t) % L;
    rows = min_of(count - t, min_of(L - i, kBackwardRows - i % kBackwardRows));
    T* x = own.x + t * row_size;
    gather_features(layout.feature, rows,
                    state.phi + (head * layout.feature_panels() * L + i) * kPanel, L, x);
    copy_rows(rows, layout.d_v, state.grad_out + (head * layout.value_panels() * L + i) * kPanel, L,
              own.values + t * kPanel, kMomentTokens);
    if (is_quadratic(plan, state, head, i / kBackwardRows)) {
      __builtin_memset(x, 0, rows * row_size * sizeof(T));
    }
  }
  __builtin_memcpy(own.factors, state.linear.factors + first, count * sizeof(T));
}

// The moments of keys and queries of a call of one chunk.
template <typename T>
void sum_both_moments(const BackwardPlan<T>& plan, const Unit& unit, const Panels& panels,
                      const BackwardUnit<T>& state, const BackwardScratch<T>& scratch) {
  const ProductLayout products = plan.layout.products();
  sum_moments(
      products, panels, plan.params.S,
      [&](int64_t first, int64_t count) {
        if (state.keys.are_hidden(first, count)) return false;
        load_linear_keys(plan, unit, first, count, state.linear.keys.center(0), state, scratch);
        return true;
      },
      scratch.products, state.linear.keys.moments);
  sum_moments(
      products, panels, plan.layout.heads_per_unit * plan.params.L,
      [&](int64_t first, int64_t count) {
        load_linear_queries(plan, first, count, state, scratch);
        return true;
      },
      scratch.products, state.linear.queries);
}

// Computes half the gradient of the features of one block of queries from some panels of the
// moments of keys, in products.own, and adds it to dphi_q.
template <typename T>
void query_product_gradients(const BackwardPlan<T>& plan, int64_t head, int64_t index,
                             const Panels& panels, const Moments<T>& of_keys,
                             const BackwardUnit<T>& state, const BackwardScratch<T>& scratch) {
  const AttentionLayout<T>& layout = plan.layout;
  const int64_t L = plan.params.L, i0 = index * kBackwardRows, rows = min_of(kBackwardRows, L - i0);
  gather_features(layout.feature, rows,
                  state.phi + (head * layout.feature_panels() * L + i0) * kPanel, L,
                  scratch.products.x);
  product_gradients(layout.products(), panels, of_keys, rows,
                    state.grad_out + (head * layout.value_panels() * L + i0) * kPanel, L,
                    state.linear.factors + head * L + i0, scratch.products);
}

template <typename T>
void add_query_gradients(const BackwardPlan<T>& plan, int64_t head, int64_t index,
                         BackwardUnit<T>& state, const BackwardScratch<T>& scratch) {
  const AttentionLayout<T>& layout = plan.layout;
  const int64_t L = plan.params.L, i0 = index * kBackwardRows;
  add_features(layout.feature, min_of(kBackwardRows, L - i0), scratch.products.own,
               state.grad_phi_q + (head * layout.feature_panels() * L + i0) * kPanel, L);
}

// Computes half the gradient of the features of the block of keys at j0, whose centered values are
// given, from some panels of the moments of queries, in products.own.
template <typename T>
void key_product_gradients(const BackwardPlan<T>& plan, int64_t j0, const T* values,
                           const Panels& panels, const Moments<T>& of_queries,
                           const BackwardUnit<T>& state, const BackwardScratch<T>& scratch) {
  const ProductScratch<T>& own = scratch.products;
  const int64_t rows = min_of(kPanel, plan.params.S - j0);
  gather_features(plan.layout.feature, rows, state.keys.features + j0 * kPanel,
                  plan.layout.padded_keys, own.x);
  for (int64_t r = 0; r < rows; ++r) own.factors[r] = 1;
  product_gradients(plan.layout.products(), panels, of_queries, rows, values, kPanel, own.factors,
                    own);
}

// Computes a group of panels for the chunks of a causal call from the first to the last: adds to
// each block of queries the contribution of the keys before.
template <typename T>
void pass_earlier_chunks(const BackwardPlan<T>& plan, const Unit& unit, int64_t group,
                         const Panels& panels, BackwardUnit<T>& state,
                         const BackwardScratch<T>& scratch) {
  const AttentionLayout<T>& layout = plan.layout;
  const int64_t chunks = chunk_count(plan.params), blocks_of_chunk = kCausalChunk / kBackwardRows;
  Moments<T> of_keys = scratch.growing;
  of_keys.first_panel = panels.begin;
  of_keys.clear(panels);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t begin = chunk * blocks_of_chunk;
    const int64_t end = min_of(plan.query_blocks, begin + blocks_of_chunk);
    for (int64_t head = 0; chunk > 0 && head < layout.heads_per_unit; ++head) {
      for (int64_t index = begin; index < end; ++index) {
        if (is_quadratic(plan, state, head, index)) continue;
        int* turn = state.linear.groups_at_query + head * plan.query_blocks + index;
        query_product_gradients(plan, head, index, panels, of_keys, state, scratch);
        wait_for_turn(turn, group);
        add_query_gradients(plan, head, index, state, scratch);
        end_turn(turn, group);
      }
    }
    const int64_t first = keys_before(plan.params, chunk);
    const int64_t count = keys_before(plan.params, chunk + 1) - first;
    if (count == 0 || chunk + 1 == chunks) continue;
    const LinearKeys<T>& keys = state.linear.keys;
    move_center(panels, keys.center(chunk), keys.center(chunk + 1), of_keys);
    load_linear_keys(plan, unit, first, count, keys.center(chunk + 1), state, scratch);
    add_moments(layout.products(), panels, count, scratch.products, of_keys);
  }
}

// Computes a group of panels from the last chunk to the first: adds to each block of keys the
// contribution of the queries after its chunk.
template <typename T>
void pass_later_chunks(const BackwardPlan<T>& plan, const Unit& unit, int64_t group,
                       const Panels& panels, BackwardUnit<T>& state,
                       const BackwardScratch<T>& scratch) {
  const AttentionLayout<T>& layout = plan.layout;
  const ProductLayout products = layout.products();
  const int64_t L = plan.params.L, S = plan.params.S, chunks = chunk_count(plan.params);
  const LinearKeys<T>& keys = state.linear.keys;
  Moments<T> of_queries = scratch.growing;
  of_queries.first_panel = panels.begin;
  of_queries.clear(panels);
  for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
    const int64_t first = chunk * kCausalChunk;
    const bool has_later = chunk + 1 < chunks;
    for (int64_t j0 = first; has_later && j0 < min_of(S, first + kCausalChunk); j0 += kPanel) {
      if (state.keys.is_hidden[j0 / kPanel]) continue;
      const T* values = centered_values(plan, unit, j0, keys.center(chunk + 1), state, scratch);
      key_product_gradients(plan, j0, values, panels, of_queries, state, scratch);
      const int64_t rows = min_of(kPanel, S - j0);
      read_panels(products, panels, of_queries, rows, scratch.products, static_cast<T*>(nullptr));
      int* turn = state.linear.groups_at_key + j0 / kPanel;
      wait_for_turn(turn, group);
      add_panels(rows, layout.d_v, scratch.products.partial, state.linear.grad_value + j0 * kPanel,
                 layout.padded_keys, true);
      add_features(layout.feature, rows, scratch.products.own, state.grad_phi_k + j0 * kPanel,
                   state.held_keys);
      end_turn(turn, group);
    }
    if (has_later) {
      move_center_in_totals(panels, keys.center(chunk + 1), keys.center(chunk), of_queries);
    }
    for (int64_t head = 0; chunk > 0 && head < layout.heads_per_unit; ++head) {
      const int64_t count = min_of(kCausalChunk, L - first);
      load_linear_queries(plan, head * L + first, count, state, scratch);
      add_moments(products, panels, count, scratch.products, of_queries);
    }
  }
}

// Adds the terms of eps, and computes dg, of the block of keys at j0, whose centered values are
// given, after dphi_k and the sums of s^2 g.
template <typename T>
void add_key_terms(const BackwardPlan<T>& plan, int64_t j0, const T* values, T* grad_value,
                   BackwardUnit<T>& state) {
  const AttentionLayout<T>& layout = plan.layout;
  const LinearBackward<T>& linear = state.linear;
  const int64_t S = plan.params.S, d_v = plan.params.d_v;
  const int64_t chunk = min_of(chunk_count(plan.params) - 1, chunk_of(plan.params, j0));
  const T* sum_of_gradients = linear.sums_of_gradients + chunk * d_v;
  for (int64_t j = j0; j < min_of(S, j0 + kPanel); ++j) {
    const int64_t row = (j - j0) * kPanel;
    const T term = state.keys.weight_terms[j];
    T of_term = linear.sums_of_factors[chunk];
    for (int64_t first = 0; first < d_v; first += kPanel) {
      const T* value = values + first * kPanel + row;
      T* gradient = grad_value + first * kSweepKeys + row;
      for (int64_t c = 0; c < min_of(kPanel, d_v - first); ++c) {
        of_term += value[c] * sum_of_gradients[first + c];
        gradient[c] += term * sum_of_gradients[first + c];
      }
    }
    Vec<T> of_score{};
    for (int64_t panel = 0; panel < layout.feature_panels(); ++panel) {
      const T* phi = state.keys.features + (panel * layout.padded_keys + j) * kPanel;
      const T* gradient =
          state.grad_phi_k + (panel * state.held_keys + j % state.held_keys) * kPanel;
      for (int64_t c = 0; c < layout.feature.columns(panel); c += kLanes<T>) {
        of_score += load(phi + c) * load(gradient + c);
      }
    }
    state.grad_logit[j] = sum_of_lanes<T>(of_score) + term * of_term;
  }
}

// Sets the gradients of every key that a query which is not finite sees to NaN.
template <typename T>
void poison_keys(const BackwardPlan<T>& plan, int64_t begin, int64_t end, BackwardUnit<T>& state,
                 const BackwardScratch<T>& scratch) {
  for (int64_t j = begin; j < end; ++j) {
    if (state.keys.logits[j] == -infinity<T>()) continue;
    state.grad_logit[j] = not_a_number<T>();
    fill_row(scratch.sweep.grad_value, kSweepKeys, j - begin, plan.params.d_v, not_a_number<T>());
    fill_row(state.grad_phi_k, state.held_keys, j % state.held_keys, plan.layout.feature.width(),
             not_a_number<T>());
  }
}

// Computes dV, dphi_k and dg of the keys of one sweep, cleared before.
template <typename T>
void linear_key_gradients(const BackwardPlan<T>& plan, const Unit& unit, int64_t sweep,
                          BackwardUnit<T>& state, const BackwardScratch<T>& scratch) {
  const AttentionLayout<T>& layout = plan.layout;
  const ProductLayout products = layout.products();
  const LinearBackward<T>& linear = state.linear;
  const int64_t d_v = plan.params.d_v, first_key = sweep * kSweepKeys;
  const int64_t end = min_of(plan.params.S, first_key + kSweepKeys);
  const T* center = center_of_keys(plan, linear.keys, chunk_of(plan.params, first_key));
  for (int64_t j0 = first_key; j0 < end; j0 += kPanel) {
    if (state.keys.is_hidden[j0 / kPanel]) continue;
    const int64_t rows = min_of(kPanel, end - j0);
    T* grad_value = scratch.sweep.grad_value + (j0 - first_key) * kPanel;
    const T* values = centered_values(plan, unit, j0, center, state, scratch);
    if (plan.params.is_causal) {
      copy_rows(rows, d_v, linear.grad_value + j0 * kPanel, layout.padded_keys, grad_value,
                kSweepKeys);
    } else {
      key_product_gradients(plan, j0, values, {0, products.panels()}, linear.queries, state,
                            scratch);
      read_moments(products, linear.queries, rows, scratch.products, static_cast<T*>(nullptr),
                   grad_value, kSweepKeys);
      add_features(layout.feature, rows, scratch.products.own,
                   state.grad_phi_k + j0 % state.held_keys * kPanel, state.held_keys);
    }
    add_key_terms(plan, j0, values, grad_value, state);
  }
  poison_keys(plan, first_key, min_of(end, linear.poisoned_keys), state, scratch);
}

// The stages that replace pairs, before the sweeps of keys.
template <typename T, typename Memory>
struct LinearBackwardStages {
  const BackwardPlan<T>& plan;
  const Memory& memory;
  PanelGroups groups;

  Unit unit_of(const Place& at) const { return unit_at(plan.params, plan.layout, at.unit); }
  bool is_taken(const Place& at) const { return memory.slots[at.slot].linear.keys.is_taken; }
  bool is_causal() const { return plan.is_linear && plan.params.is_causal; }

  auto preparation() const {
    return Stage{int64_t{plan.is_linear}, [this](const Place& at, int64_t, int thread) {
                   prepare_linear(plan, unit_of(at), memory.slots[at.slot], memory.scratch[thread]);
                 }};
  }
  auto moments() const {
    return Stage{plan.is_linear && !is_causal() ? groups.count() : 0,
                 [this](const Place& at, int64_t group, int thread) {
                   if (!is_taken(at)) return;
                   sum_both_moments(plan, unit_of(at), groups.of(group), memory.slots[at.slot],
                                    memory.scratch[thread]);
                 }};
  }
  auto queries() const {
    const int64_t blocks = plan.layout.heads_per_unit * plan.query_blocks;
    return Stage{plan.is_linear && !is_causal() ? blocks : 0,
                 [this](const Place& at, int64_t block, int thread) {
                   BackwardUnit<T>& state = memory.slots[at.slot];
                   const int64_t head = block / plan.query_blocks,
                                 index = block % plan.query_blocks;
                   if (is_quadratic(plan, state, head, index)) return;
                   const BackwardScratch<T>& scratch = memory.scratch[thread];
                   query_product_gradients(plan, head, index, {0, groups.panels},
                                           state.linear.keys.moments, state, scratch);
                   add_query_gradients(plan, head, index, state, scratch);
                 }};
  }
  // Both directions of a group are separate tasks, for they write to different arrays.
  auto chunks() const {
    return Stage{is_causal() ? 2 * groups.count() : 0,
                 [this](const Place& at, int64_t task, int thread) {
                   if (!is_taken(at)) return;
                   const int64_t group = task / 2;
                   const auto pass = task % 2 == 0 ? pass_earlier_chunks<T> : pass_later_chunks<T>;
                   pass(plan, unit_of(at), group, groups.of(group), memory.slots[at.slot],
                        memory.scratch[thread]);
                 }};
  }
};

template <typename T, typename Memory>
LinearBackwardStages(const BackwardPlan<T>&, const Memory&, const PanelGroups&)
    -> LinearBackwardStages<T, Memory>;

}  // namespace
}  // namespace ikattn::IKATTN_ISA
