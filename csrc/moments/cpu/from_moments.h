// Attention of queries to the keys in moments, and its backward. With a = 1 / (2 F)^2 and a table m
// whose entries are multiplied by their counts:
//
//   n_i = a psi(q_i) . m + eps times the constant entry, values and a number Z'_i
//   out_i = values / Z'_i,   log Z_i = log Z'_i + reference
//
// In the backward out_i and Z_i may belong to more keys, of which these are a part. With g_i = dO_i
// exp(reference - log Z_i) and delta_i = g_i . out_i
//
//   dm = sum_i [a psi(q_i), eps] [g_i, -delta_i],   dphi_i = gradient of a psi(q_i) . (m [g_i,
//   -delta_i])
#pragma once

#include "moments/cpu/key_moments.h"

namespace ikattn::IKATTN_ISA {
namespace {

inline MomentsHead head_of(const FromMomentsParams& params, int64_t unit) {
  return {unit / params.K, unit % params.K};
}

// Some queries of one head.
struct QueryRows {
  int64_t b, h, i0, count;
  int64_t offset(const Array& array) const {
    return b * array.stride[0] + h * array.stride[1] + i0 * array.stride[2];
  }
};

// The rows of one head, from the blocks of all query heads that share the moments.
inline QueryRows query_rows(const FromMomentsParams& params, const MomentsHead& head, int64_t index,
                            int64_t rows) {
  const int64_t blocks = ceil_div(params.L, rows), heads = params.H / params.K;
  const int64_t i0 = index % blocks * rows;
  return {head.b, head.head * heads + index / blocks, i0, min_of(rows, params.L - i0)};
}

template <typename T>
T score_scale(const FromMomentsParams& params) {  // (2 F)^-2
  return T(1) / static_cast<T>(16 * params.M * params.M);
}

template <typename T>
void load_query_features(const FromMomentsParams& params, const Table& table, const QueryRows& at,
                         T* x) {
  const Array& features = params.features;
  for (int64_t r = 0; r < at.count; ++r) {
    load_features(table.products, features, at.offset(features) + r * features.stride[2],
                  x + r * table.products.row_size<T>());
  }
}

// Computes psi(q_i) . m of some queries, whose x is in the scratch, into own.out and own.lane_sums.
// Used where one block reads the table, which it does panel by panel, without a copy.
template <typename T>
void read_table(const FromMomentsParams& params, const Table& table, const MomentsHead& head,
                int64_t rows, MomentsScratch<T>& own) {
  const int64_t offset = head.offset(params.moments);
  for (int64_t panel = 0; panel < table.products.panels(); ++panel) {
    const Panels one{panel, panel + 1};
    own.sums.first_panel = panel;
    load_table(table, params.moments, offset, one, Counted::kByQuery, own.sums);
    read_panels(table.products, one, own.sums, rows, own.products, own.lane_sums);
    add_panels(rows, table.d_v, own.products.partial, own.out, rows, panel > 0);
  }
  own.constant.load_from(table, params.moments, offset);
}

// Stores output and log Z of some queries from the scratch.
template <typename T>
void finish_rows(const FromMomentsParams& params, const Table& table, const QueryRows& at,
                 double reference, const ConstantEntry<T>& constant, const MomentsScratch<T>& own) {
  const T scale = score_scale<T>(params), eps = static_cast<T>(params.eps);
  const T least = eps * constant.total;  // squares do not add less than nothing
  const Array &output = params.output, &logs = params.log_normalizer;
  for (int64_t r = 0; r < at.count; ++r) {
    T sum = sum_of_lanes<T>(load(own.lane_sums + r * kLanes<T>)) * scale + least;
    if (sum < least) sum = least;
    const T inverse = sum == T(0) ? T(0) : T(1) / sum;
    for (int64_t of_values = 0; of_values < table.value_panels(); ++of_values) {
      T* row = own.out + (of_values * at.count + r) * kPanel;
      const T* values = constant.values + of_values * kPanel;
      for (int64_t c = 0; c < kPanel; c += kLanes<T>) {
        store<T>(row + c, (load(row + c) * scale + load(values + c) * eps) * inverse);
      }
    }
    store_element(
        logs, at.offset(logs) + r * logs.stride[2],
        sum == T(0) ? -infinity<double>() : __builtin_log(static_cast<double>(sum)) + reference);
  }
  store_panels(output, at.offset(output), output.stride[2], output.stride[3], at.count, table.d_v,
               own.out, at.count);
}

template <typename T>
void attend_rows(const FromMomentsParams& params, const MomentsPlan<T>& plan, const Place& place,
                 int64_t index, MomentsScratch<T>& own) {
  const Table& table = plan.table;
  const MomentsHead head = head_of(params, place.unit);
  const QueryRows at = query_rows(params, head, index, kProductRows);
  const double reference = load_element<double>(params.reference, head.offset(params.reference));
  load_query_features(params, table, at, own.products.x);
  __builtin_memset(own.lane_sums, 0, at.count * kLanes<T> * sizeof(T));
  if (plan.has_slots) {
    const HeldTable<T>& held = plan.slots[place.slot];
    read_moments(table.products, held.panels, at.count, own.products, own.lane_sums, own.out,
                 at.count);
    finish_rows(params, table, at, reference, held.constant, own);
  } else {
    read_table(params, table, head, at.count, own);
    finish_rows(params, table, at, reference, own.constant, own);
  }
}

template <typename T>
void attention_from_moments(const FromMomentsParams& params, const Executor& executor) {
  MomentsPlan<T> plan{executor, {{params.M}, params.d_v}, params.B * params.K};
  const int64_t blocks = params.H / params.K * ceil_div(params.L, kProductRows);
  plan.allocate(blocks > 1, false);
  const auto heads = [&](int64_t unit) { return head_of(params, unit); };
  run_stages(executor, plan.schedule(),
             load_tables(plan, params.moments, Counted::kByQuery, heads, plan.has_slots),
             Stage{blocks, [&](const Place& at, int64_t index, int thread) {
                     attend_rows(params, plan, at, index, plan.scratch[thread]);
                   }});
}

// Loads x, g_i and -delta_i of at most 64 queries; zero for queries that see no key.
template <typename T>
void load_row_gradients(const FromMomentsParams& params, const Table& table, const QueryRows& at,
                        double reference, T* x, T* values, int64_t value_rows, T* factors,
                        T* output) {
  const Array &grad = params.grad_output, &out = params.output;
  load_query_features(params, table, at, x);
  load_panels(grad, at.offset(grad), grad.stride[2], grad.stride[3], at.count, table.d_v, values,
              value_rows);
  load_panels(out, at.offset(out), out.stride[2], out.stride[3], at.count, table.d_v, output,
              kPanel);
  for (int64_t r = 0; r < at.count; ++r) {
    const Array& logs = params.log_normalizer;
    const double log_normalizer = load_element<double>(logs, at.offset(logs) + r * logs.stride[2]);
    const bool sees_none =
        reference == -infinity<double>() || log_normalizer == -infinity<double>();
    const T share = sees_none ? T(0) : static_cast<T>(__builtin_exp(reference - log_normalizer));
    factors[r] = 0;
    multiply_row(table, share, values, value_rows, r);
    if (share == T(0)) {
      __builtin_memset(x + r * table.products.row_size<T>(), 0,
                       table.products.row_size<T>() * sizeof(T));
      continue;
    }
    factors[r] = -dot_of_rows(table, values + r * kPanel, value_rows, output + r * kPanel, kPanel);
  }
}

// Computes dm of a group of panels, over the queries of all heads that share the moments.
template <typename T>
void sum_moment_gradients(const FromMomentsParams& params, const MomentsPlan<T>& plan, int64_t unit,
                          int64_t group, MomentsScratch<T>& own) {
  const Table& table = plan.table;
  const MomentsHead head = head_of(params, unit);
  const Panels panels = plan.groups.of(group);
  const double reference = load_element<double>(params.reference, head.offset(params.reference));
  const int64_t row_size = table.products.row_size<T>(), L = params.L;
  own.sums.first_panel = panels.begin;
  own.constant.clear(table);
  sum_moments(
      table.products, panels, params.H / params.K * L,
      [&](int64_t first, int64_t count) {
        for (int64_t t = 0, rows; t < count; t += rows) {  // of one head
          const int64_t h = head.head * (params.H / params.K) + (first + t) / L;
          const int64_t i0 = (first + t) % L;
          rows = min_of(min_of(kPanel, count - t), L - i0);
          load_row_gradients(params, table, {head.b, h, i0, rows}, reference,
                             own.products.x + t * row_size, own.products.values + t * kPanel,
                             kMomentTokens, own.products.factors + t, own.out);
        }
        if (group == 0) {
          own.constant.add(table, count, own.products.values, kMomentTokens, own.products.factors);
        }
        return true;
      },
      own.products, own.sums);
  const int64_t offset = head.offset(params.grad_moments);
  const T scale = score_scale<T>(params);
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    T* tiles = own.sums.tile(panel, 0);
    for (int64_t i = 0; i < table.value_panels() * kPanel * kPanel; i += kLanes<T>) {
      store<T>(tiles + i, load(tiles + i) * scale);
    }
    for (int64_t e = 0; e < kPanel; ++e) own.sums.total(panel)[e] *= scale;
  }
  store_table(table, params.grad_moments, offset, panels, Counted::kOfQueries, own.sums);
  if (group == 0) {
    own.constant.store_to(table, params.grad_moments, offset, static_cast<T>(params.eps));
  }
}

template <typename T>
void query_gradients(const FromMomentsParams& params, const MomentsPlan<T>& plan,
                     const Place& place, int64_t index, const MomentsScratch<T>& own) {
  const Table& table = plan.table;
  const MomentsHead head = head_of(params, place.unit);
  const QueryRows at = query_rows(params, head, index, kPanel);
  const double reference = load_element<double>(params.reference, head.offset(params.reference));
  const ProductScratch<T>& products = own.products;
  load_row_gradients(params, table, at, reference, products.x, products.values, kMomentTokens,
                     products.factors, own.out);
  product_gradients(table.products, {0, table.products.panels()}, plan.slots[place.slot].panels,
                    at.count, products.values, kMomentTokens, products.factors, products);
  store_feature_gradients(table.products, params.grad_features, at.offset(params.grad_features),
                          at.count, 2 * score_scale<T>(params), products.own);
}

template <typename T>
void attention_from_moments_backward(const FromMomentsParams& params, const Executor& executor) {
  MomentsPlan<T> plan{executor, {{params.M}, params.d_v}, params.B * params.K};
  const bool wants_features = bool{params.grad_features};
  plan.allocate(wants_features, true);
  const auto heads = [&](int64_t unit) { return head_of(params, unit); };
  const int64_t blocks = params.H / params.K * ceil_div(params.L, kPanel);
  run_stages(executor, plan.schedule(),
             Stage{params.grad_moments ? plan.groups.count() : 0,
                   [&](const Place& at, int64_t group, int thread) {
                     sum_moment_gradients(params, plan, at.unit, group, plan.scratch[thread]);
                   }},
             load_tables(plan, params.moments, Counted::kByQuery, heads, wants_features),
             Stage{wants_features ? blocks : 0, [&](const Place& at, int64_t index, int thread) {
                     query_gradients(params, plan, at, index, plan.scratch[thread]);
                   }});
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
