// Moments of keys, sums over keys of psi(k_j) e_j [v_j, 1] with e_j = exp(logit_j - reference), and
// their backward. One thread computes each sum, in the order of keys.
#pragma once

#include "moments/cpu/tables.h"
#include "moments/params.h"

namespace ikattn::IKATTN_ISA {
namespace {

inline MomentsHead head_of(const KeyMomentsParams& params, int64_t unit) {
  return {unit / params.K, unit % params.K};
}

// Returns the largest finite logit of a head, earlier keys included; -inf where there is none.
inline double largest_finite_logit(const KeyMomentsParams& params, const MomentsHead& head) {
  double logits[kPanel];
  double largest = params.grows
                       ? load_element<double>(params.reference, head.offset(params.reference))
                       : -infinity<double>();
  for (int64_t first = 0; first < params.S; first += kPanel) {
    const int64_t count = min_of(kPanel, params.S - first), stride = params.logits.stride[2];
    load_row(params.logits, head.offset(params.logits) + first * stride, stride, count, logits);
    for (int64_t i = 0; i < count; ++i) {
      if (logits[i] > largest && is_finite(logits[i])) largest = logits[i];
    }
  }
  return largest;
}

// Computes e_j of keys [first, first + count) in weights; returns whether any is not 0. It is 0 for
// hidden keys, and for visible ones whose weight underflows beside the largest.
template <typename T>
bool load_weights(const KeyMomentsParams& params, const MomentsHead& head, double reference,
                  int64_t first, int64_t count, T* weights) {
  double logits[kMomentTokens];
  const int64_t stride = params.logits.stride[2];
  load_row(params.logits, head.offset(params.logits) + first * stride, stride, count, logits);
  const double base = reference == -infinity<double>() ? 0 : reference;
  bool any = false;
  for (int64_t i = 0; i < count; ++i) {
    weights[i] = exponential(static_cast<T>(logits[i] - base));  // of -inf: 0
    any |= weights[i] != T(0);
  }
  return any;
}

// Loads x, e_j v_j and e_j of keys [first, first + count) into the scratch; returns false where all
// e_j are 0. Keys without weight may hold anything, NaN included.
template <typename T>
bool load_keys(const KeyMomentsParams& params, const Table& table, const MomentsHead& head,
               double reference, int64_t first, int64_t count, const ProductScratch<T>& own) {
  if (!load_weights(params, head, reference, first, count, own.factors)) return false;
  const Array &features = params.features, &value = params.value;
  const int64_t row_size = table.products.row_size<T>();
  const int64_t of_value =
      head.b * value.stride[0] + head.head / (params.K / params.G) * value.stride[1];
  load_panels(value, of_value + first * value.stride[2], value.stride[2], value.stride[3], count,
              table.d_v, own.values, kMomentTokens);
  for (int64_t t = 0; t < count; ++t) {
    T* row = own.x + t * row_size;
    if (own.factors[t] == T(0)) {
      __builtin_memset(row, 0, row_size * sizeof(T));
    } else {
      load_features(table.products, features,
                    head.offset(features) + (first + t) * features.stride[2], row);
    }
    multiply_row(table, own.factors[t], own.values, kMomentTokens, t);
  }
  return true;
}

template <typename T>
void sum_key_moments(const KeyMomentsParams& params, const MomentsPlan<T>& plan, int64_t unit,
                     int64_t group, MomentsScratch<T>& own) {
  const Table& table = plan.table;
  const MomentsHead head = head_of(params, unit);
  const Panels panels = plan.groups.of(group);
  const double reference = largest_finite_logit(params, head);
  own.sums.first_panel = panels.begin;
  own.constant.clear(table);
  sum_moments(
      table.products, panels, params.S,
      [&](int64_t first, int64_t count) {
        if (!load_keys(params, table, head, reference, first, count, own.products)) return false;
        if (group == 0) {
          own.constant.add(table, count, own.products.values, kMomentTokens, own.products.factors);
        }
        return true;
      },
      own.products, own.sums);
  const int64_t offset = head.offset(params.moments);
  Earlier<T> earlier;
  if (params.grows) {
    const double before = load_element<double>(params.reference, head.offset(params.reference));
    earlier = {
        before == -infinity<double>() ? T(0) : exponential(static_cast<T>(before - reference)),
        own.out};
  }
  store_table(table, params.moments, offset, panels, Counted::kOfKeys, own.sums, earlier);
  if (group == 0) own.constant.store_to(table, params.moments, offset, T(1), earlier);
}

template <typename T>
void key_moments(const KeyMomentsParams& params, const Executor& executor) {
  MomentsPlan<T> plan{executor, {{params.M}, params.d_v}, params.B * params.K};
  if (params.S <= kPanel) plan.groups.together = 1;  // so that a token's sums stay in cache
  plan.allocate(false, false);
  run_stages(executor, plan.schedule(),
             Stage{plan.groups.count(),
                   [&](const Place& at, int64_t group, int thread) {
                     sum_key_moments(params, plan, at.unit, group, plan.scratch[thread]);
                   }},
             Stage{1, [&](const Place& at, int64_t, int) {  // which all groups have read
                     const MomentsHead head = head_of(params, at.unit);
                     store_element(params.reference, head.offset(params.reference),
                                   largest_finite_logit(params, head));
                   }});
}

// The backward, with D the gradient of a table:
//   dphi_j = gradient of psi(k_j) . (D [e_j v_j, e_j]),   t_j = D^T psi(k_j), values and a number
//   dv_j = e_j t_j,   dlogit_j = e_j v_j . t_j + e_j times the number
//
// Computes t_j of a block of keys, whose x is in the scratch, in own.out and own.lane_sums.
template <typename T>
void read_gradients(const Table& table, const HeldTable<T>& gradient, int64_t rows,
                    const MomentsScratch<T>& own) {
  __builtin_memset(own.lane_sums, 0, rows * kLanes<T> * sizeof(T));
  read_moments(table.products, gradient.panels, rows, own.products, own.lane_sums, own.out, rows);
  for (int64_t of_values = 0; of_values < table.value_panels(); ++of_values) {
    const T* constant = gradient.constant.values + of_values * kPanel;
    for (int64_t r = 0; r < rows; ++r) {
      T* row = own.out + (of_values * rows + r) * kPanel;
      for (int64_t c = 0; c < kPanel; c += kLanes<T>) {
        store<T>(row + c, load(row + c) + load(constant + c));
      }
    }
  }
}

template <typename T>
T dot_of_rows(const Table& table, const T* a, int64_t a_rows, const T* b, int64_t b_rows) {
  T sum = 0;
  for (int64_t first = 0; first < table.d_v; first += kPanel) {
    for (int64_t c = 0; c < min_of(kPanel, table.d_v - first); ++c) {
      sum += a[first * a_rows + c] * b[first * b_rows + c];
    }
  }
  return sum;
}

// Computes dv and dlogit of a block of keys, whose e_j v_j and e_j are in the scratch.
template <typename T>
void store_key_gradients(const KeyMomentsParams& params, const MomentsPlan<T>& plan,
                         const MomentsHead& head, int64_t j0, int64_t rows, T of_constant,
                         const MomentsScratch<T>& own) {
  const Array &grad_value = params.grad_value, &grad_logits = params.grad_logits;
  for (int64_t r = 0; r < rows; ++r) {
    const T weight = own.products.factors[r];
    if (grad_logits) {
      const T of_values = dot_of_rows(plan.table, own.products.values + r * kPanel, kMomentTokens,
                                      own.out + r * kPanel, rows);
      const T number = sum_of_lanes<T>(load(own.lane_sums + r * kLanes<T>)) + of_constant;
      store_element(grad_logits, head.offset(grad_logits) + (j0 + r) * grad_logits.stride[2],
                    weight == T(0) ? T(0) : of_values + weight * number);
    }
    multiply_row(plan.table, weight, own.out, rows, r);
  }
  if (grad_value) {
    store_panels(grad_value, head.offset(grad_value) + j0 * grad_value.stride[2],
                 grad_value.stride[2], grad_value.stride[3], rows, params.d_v, own.out, rows);
  }
}

template <typename T>
void store_feature_gradients(const ProductLayout& layout, const Array& array, int64_t offset,
                             int64_t rows, T factor, T* gradients) {
  for (int64_t r = 0; r < rows; ++r) {
    T* row = gradients + r * layout.row_size<T>();
    for (int64_t f = 0; f < layout.features(); ++f) row[f] *= factor;
    store_row(array, offset + r * array.stride[2], array.stride[3], layout.features(), row);
  }
}

// Computes all gradients of the block of keys at j0.
template <typename T>
void key_block_gradients(const KeyMomentsParams& params, const MomentsPlan<T>& plan,
                         const Place& at, int64_t j0, const MomentsScratch<T>& own) {
  const Table& table = plan.table;
  const MomentsHead head = head_of(params, at.unit);
  const HeldTable<T>& gradient = plan.slots[at.slot];
  const int64_t rows = min_of(kPanel, params.S - j0);
  const double reference = load_element<double>(params.reference, head.offset(params.reference));
  const Array& grad_features = params.grad_features;
  if (!load_keys(params, table, head, reference, j0, rows, own.products)) {
    const int64_t row_size = table.products.row_size<T>();
    __builtin_memset(own.products.own, 0, rows * row_size * sizeof(T));
    __builtin_memset(own.products.values, 0,
                     table.value_panels() * kMomentTokens * kPanel * sizeof(T));
    __builtin_memset(own.out, 0, table.value_panels() * rows * kPanel * sizeof(T));
  } else {
    if (params.grad_value || params.grad_logits) read_gradients(table, gradient, rows, own);
    if (grad_features) {
      product_gradients(table.products, {0, table.products.panels()}, gradient.panels, rows,
                        own.products.values, kMomentTokens, own.products.factors, own.products);
    }
  }
  if (grad_features) {
    store_feature_gradients(table.products, grad_features,
                            head.offset(grad_features) + j0 * grad_features.stride[2], rows, T(2),
                            own.products.own);
  }
  if (params.grad_value || params.grad_logits) {
    store_key_gradients(params, plan, head, j0, rows, gradient.constant.total, own);
  }
}

template <typename T>
void key_moments_backward(const KeyMomentsParams& params, const Executor& executor) {
  MomentsPlan<T> plan{executor, {{params.M}, params.d_v}, params.B * params.K};
  plan.allocate(true, true);
  const auto heads = [&](int64_t unit) { return head_of(params, unit); };
  run_stages(executor, plan.schedule(),
             load_tables(plan, params.moments, Counted::kAsTheyAre, heads),
             Stage{ceil_div(params.S, kPanel), [&](const Place& at, int64_t block, int thread) {
                     key_block_gradients(params, plan, at, block * kPanel, plan.scratch[thread]);
                   }});
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
