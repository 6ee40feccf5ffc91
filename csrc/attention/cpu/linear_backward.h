// Backward pass without pairs (../linear_time.h). With v' = v - center, g_i = dO_i / Z_i and
// f_i = g_i . center - delta_i, what a pair contributes begins with s_ij (g_i . v'_j + f_i):
//
//   moments of the keys with v' and 1, moments of the queries with g and f
//   -> dphi_q = half the gradient of psi(q) . (moments of the keys with g_i and f_i)
//   -> dphi_k likewise with v'_j and 1,   dV_j = psi(k) . (moments with g) + eps e_j sum_i g_i
#pragma once

#include "attention/cpu/backward_state.h"

namespace ikattn::IKATTN_ISA {
namespace {

// Values of the block of keys at j0, [value panels][64][64], relative to the center; keys left out
// count for nothing.
template <typename T>
T* centered_values(const BackwardPlan<T>& plan, const Unit& unit, int64_t j0,
                   const BackwardUnit<T>& state, const BackwardScratch<T>& scratch) {
  const AttentionBackwardParams& params = plan.params;
  T* values = scratch.keys.values;
  load_counted_values(params, plan.layout, unit, j0, state.keys, values);
  subtract_center(min_of(kPanel, params.S - j0), params.d_v, state.linear.keys.center, values,
                  kPanel);
  return values;
}

// Marks the blocks of queries that go by pairs. They are the same for every number of threads.
template <typename T>
void mark_blocks(const BackwardPlan<T>& plan, BackwardUnit<T>& state) {
  const AttentionLayout<T>& layout = plan.layout;
  const int64_t L = plan.params.L, heads = layout.heads_per_unit;
  LinearBackward<T>& linear = state.linear;
  double of_keys = 0;
  for (int64_t j = 0; j < plan.params.S; ++j) {
    of_keys +=
        static_cast<double>(square_of(layout.feature, state.keys.features, layout.padded_keys, j));
  }
  __builtin_memset(linear.by_pairs, 0, heads * plan.query_blocks);
  linear.any_by_pairs = linear.any_poisoned = false;
  for (int64_t row = 0; row < heads * L; ++row) {
    const int64_t head = row / L, i = row % L;
    const T* phi = state.phi + head * layout.feature_panels() * L * kPanel;
    const T factor = state.rows.factor[row];  // 1/Z, 0 where the row is left out
    linear.any_poisoned |= state.rows.poisoned[row] != 0;
    if (factor == 0 ||
        keeps_digits(layout.products(), 1 / factor, square_of(layout.feature, phi, L, i),
                     static_cast<T>(of_keys))) {
      continue;
    }
    linear.by_pairs[head * plan.query_blocks + i / kBackwardRows] = 1;
    linear.any_by_pairs = true;
  }
}

// Which queries go without pairs, the center of the values, f_i, and the sums of g_i and f_i.
template <typename T>
void prepare_linear(const BackwardPlan<T>& plan, const Unit& unit, BackwardUnit<T>& state,
                    const BackwardScratch<T>& scratch) {
  const AttentionBackwardParams& params = plan.params;
  const AttentionLayout<T>& layout = plan.layout;
  LinearBackward<T>& linear = state.linear;
  find_center(
      layout, state.keys, params.S, kPanel,
      [&](int64_t j0) {
        load_values(params, layout, unit, j0, scratch.keys.values);
        return scratch.keys.values;
      },
      linear.keys);
  if (!linear.keys.is_taken) return;
  mark_blocks(plan, state);

  double* sums = linear.keys.sums;
  double sum_of_factors = 0;
  for (int64_t c = 0; c < params.d_v; ++c) sums[c] = 0;
  for (int64_t head = 0; head < layout.heads_per_unit; ++head) {
    for (int64_t i = 0; i < params.L; ++i) {
      linear.factors[head * params.L + i] = 0;
      if (goes_by_pairs(plan, state, head, i / kBackwardRows)) continue;
      T factor = -state.rows.delta[head * params.L + i];
      for (int64_t first = 0; first < params.d_v; first += kPanel) {
        const T* row = state.grad_out + (head * layout.value_panels() * params.L + i) * kPanel +
                       first * params.L;
        for (int64_t c = 0; c < min_of(kPanel, params.d_v - first); ++c) {
          factor += row[c] * linear.keys.center[first + c];
          sums[first + c] += static_cast<double>(row[c]);
        }
      }
      linear.factors[head * params.L + i] = factor;
      sum_of_factors += static_cast<double>(factor);
    }
  }
  for (int64_t c = 0; c < params.d_v; ++c) linear.sum_of_gradients[c] = static_cast<T>(sums[c]);
  linear.sum_of_factors = static_cast<T>(sum_of_factors);
}

// Moments of keys and queries, panels [begin, end) of entries.
template <typename T>
void sum_both_moments(const BackwardPlan<T>& plan, const Unit& unit, int64_t begin, int64_t end,
                      const BackwardUnit<T>& state, const BackwardScratch<T>& scratch) {
  const AttentionLayout<T>& layout = plan.layout;
  const ProductLayout products = layout.products();
  const ProductScratch<T>& own = scratch.products;
  const int64_t L = plan.params.L, d_v = plan.params.d_v, value_panels = layout.value_panels();
  sum_moments(
      products, begin, end, plan.params.S, d_v,
      [&](int64_t first, int64_t count) {
        gather_features(layout.feature, count, state.keys.features + first * kPanel,
                        layout.padded_keys, own.x);
        for (int64_t t = 0; t < count; t += kPanel) {
          copy_rows(min_of(kPanel, count - t), d_v,
                    centered_values(plan, unit, first + t, state, scratch), kPanel,
                    own.values + t * kPanel, kMomentTokens);
        }
        for (int64_t t = 0; t < count; ++t) own.factors[t] = 1;
      },
      own, state.linear.keys.moments);
  const Moments<T>& of_queries = state.linear.queries;
  sum_moments(
      products, begin, end, layout.heads_per_unit * L, d_v,
      [&](int64_t first, int64_t count) {
        for (int64_t t = 0, rows; t < count; t += rows) {  // rows of one block of a head
          const int64_t head = (first + t) / L, i = (first + t) % L;
          rows = min_of(count - t, min_of(L - i, kBackwardRows - i % kBackwardRows));
          T* x = own.x + t * products.row_size<T>();
          gather_features(layout.feature, rows,
                          state.phi + (head * layout.feature_panels() * L + i) * kPanel, L, x);
          copy_rows(rows, d_v, state.grad_out + (head * value_panels * L + i) * kPanel, L,
                    own.values + t * kPanel, kMomentTokens);
          if (goes_by_pairs(plan, state, head, i / kBackwardRows)) {
            __builtin_memset(x, 0, rows * products.row_size<T>() * sizeof(T));
          }
        }
        __builtin_memcpy(own.factors, state.linear.factors + first, count * sizeof(T));
      },
      own, of_queries);
  for (int64_t tile = begin * value_panels; tile < end * value_panels; ++tile) {
    transpose_panel(kPanel, kPanel, of_queries.by_entry + tile * kPanel * kPanel,
                    of_queries.by_value + tile * kPanel * kPanel);
  }
}

// dphi_q of one block of queries.
template <typename T>
void linear_query_gradients(const BackwardPlan<T>& plan, int64_t head, int64_t index,
                            BackwardUnit<T>& state, const BackwardScratch<T>& scratch) {
  const AttentionLayout<T>& layout = plan.layout;
  const int64_t L = plan.params.L, i0 = index * kBackwardRows, rows = min_of(kBackwardRows, L - i0);
  if (goes_by_pairs(plan, state, head, index)) return;
  const int64_t at = (head * layout.feature_panels() * L + i0) * kPanel;
  gather_features(layout.feature, rows, state.phi + at, L, scratch.products.x);
  product_gradients(layout.products(), plan.params.d_v, state.linear.keys.moments, rows,
                    state.grad_out + (head * layout.value_panels() * L + i0) * kPanel, L,
                    state.linear.factors + head * L + i0, scratch.products);
  scatter_features(layout.feature, rows, scratch.products.own, state.grad_phi_q + at, L);
  for (int64_t r = 0; r < rows; ++r) {
    if (!state.rows.poisoned[head * L + i0 + r]) continue;
    fill_row(state.grad_phi_q + at, L, r, layout.feature.width(), not_a_number<T>());
  }
}

// A query that is not finite makes NaN of every key's gradients that it sees, and it sees them all.
template <typename T>
void poison_keys(const BackwardPlan<T>& plan, int64_t first_key, int64_t count,
                 BackwardUnit<T>& state, const BackwardScratch<T>& scratch) {
  for (int64_t r = 0; r < count; ++r) {
    const int64_t j = first_key + r;
    if (state.keys.logits[j] == -infinity<T>()) continue;
    state.grad_logit[j] = not_a_number<T>();
    fill_row(scratch.sweep.grad_value, kSweepKeys, r, plan.params.d_v, not_a_number<T>());
    fill_row(state.grad_phi_k, state.held_keys, j % state.held_keys, plan.layout.feature.width(),
             not_a_number<T>());
  }
}

// dV, dphi_k and dg of the keys of one sweep.
template <typename T>
void linear_key_gradients(const BackwardPlan<T>& plan, const Unit& unit, int64_t sweep,
                          BackwardUnit<T>& state, const BackwardScratch<T>& scratch) {
  const AttentionLayout<T>& layout = plan.layout;
  const ProductLayout products = layout.products();
  const LinearBackward<T>& linear = state.linear;
  const ProductScratch<T>& own = scratch.products;
  const int64_t S = plan.params.S, d_v = plan.params.d_v, first_key = sweep * kSweepKeys;
  for (int64_t j0 = first_key; j0 < min_of(S, first_key + kSweepKeys); j0 += kPanel) {
    const int64_t rows = min_of(kPanel, S - j0);
    const T* values = centered_values(plan, unit, j0, state, scratch);
    gather_features(layout.feature, rows, state.keys.features + j0 * kPanel, layout.padded_keys,
                    own.x);
    T* grad_value = scratch.sweep.grad_value + (j0 - first_key) * kPanel;
    read_moments(products, d_v, linear.queries, rows, own, grad_value, kSweepKeys);
    for (int64_t r = 0; r < rows; ++r) own.factors[r] = 1;
    product_gradients(products, d_v, linear.queries, rows, values, kPanel, own.factors, own);
    scatter_features(layout.feature, rows, own.own,
                     state.grad_phi_k + j0 % state.held_keys * kPanel, state.held_keys);
    for (int64_t r = 0; r < rows; ++r) {
      const T term = state.keys.weight_terms[j0 + r];
      T of_term = linear.sum_of_factors, of_score = 0;
      for (int64_t first = 0; first < d_v; first += kPanel) {
        const T* value = values + first * kPanel + r * kPanel;
        T* gradient = grad_value + first * kSweepKeys + r * kPanel;
        for (int64_t c = 0; c < min_of(kPanel, d_v - first); ++c) {
          of_term += value[c] * linear.sum_of_gradients[first + c];
          gradient[c] += term * linear.sum_of_gradients[first + c];
        }
      }
      const int64_t row = r * products.row_size<T>();
      for (int64_t b = 0; b < products.features(); ++b)
        of_score += own.x[row + b] * own.own[row + b];
      state.grad_logit[j0 + r] = of_score + term * of_term;
    }
  }
  if (!linear.any_poisoned) return;
  poison_keys(plan, first_key, min_of(kSweepKeys, S - first_key), state, scratch);
}

// The stages that take the place of pairs, before the sweeps of keys.
template <typename T, typename Memory>
struct LinearStages {
  const BackwardPlan<T>& plan;
  const Memory& memory;
  int64_t together;  // panels of entries of a task

  Unit unit_of(const Place& at) const { return unit_at(plan.params, plan.layout, at.unit); }
  bool is_taken(const Place& at) const { return memory.slots[at.slot].linear.keys.is_taken; }

  auto preparation() const {
    return Stage{int64_t{plan.is_linear}, [this](const Place& at, int64_t, int thread) {
                   prepare_linear(plan, unit_of(at), memory.slots[at.slot], memory.scratch[thread]);
                 }};
  }
  auto moments() const {
    const int64_t panels = plan.layout.products().panels();
    return Stage{plan.is_linear ? ceil_div(panels, together) : 0,
                 [this, panels](const Place& at, int64_t task, int thread) {
                   if (!is_taken(at)) return;
                   const int64_t begin = task * together;
                   sum_both_moments(plan, unit_of(at), begin, min_of(panels, begin + together),
                                    memory.slots[at.slot], memory.scratch[thread]);
                 }};
  }
  auto queries() const {
    const int64_t blocks = plan.layout.heads_per_unit * plan.query_blocks;
    return Stage{plan.is_linear ? blocks : 0, [this](const Place& at, int64_t index, int thread) {
                   if (!is_taken(at)) return;
                   linear_query_gradients(plan, index / plan.query_blocks,
                                          index % plan.query_blocks, memory.slots[at.slot],
                                          memory.scratch[thread]);
                 }};
  }
};

template <typename T, typename Memory>
LinearStages(const BackwardPlan<T>&, const Memory&, int64_t) -> LinearStages<T, Memory>;

}  // namespace
}  // namespace ikattn::IKATTN_ISA
