// The backward of causal.h, in two passes over the chunks. With g_i = dO_i, delta_i = g_i . out_i,
// P_ij = exp(logit_j - log Z_i) and D the gradient of the moments of all keys up to a chunk:
//
//   first to last:  dphi_i from the moments of the keys before; pairs of the chunk, each with
//                   x = g_i . v_j - delta_i:  ds = 2 s P x,  dlogit_j = sum_i (s^2 + eps) P x,
//                   dv_j = sum_i (s^2 + eps) P g_i
//   last to first:  dphi_j, dv_j and dlogit_j from D; then the queries of the chunk are added to D
#pragma once

#include "moments/cpu/causal.h"

namespace ikattn::IKATTN_ISA {
namespace {

// Loads dO, delta and log Z, relative to the base, of up to 64 queries whose features are in the
// scratch. A row that is not finite becomes zeros with log Z = NaN; a row that sees no key has log
// Z = inf.
template <typename T>
void load_row_sums(const CausalPlan<T>& plan, const QueryRows& at, CausalScratch<T>& scratch) {
  const FromMomentsParams& params = plan.params.queries;
  const Array &grad = params.grad_output, &out = params.output, &logs = params.log_normalizer;
  const int64_t d_v = params.d_v;
  T* output = scratch.own.out;
  load_panels(grad, at.offset(grad), grad.stride[2], grad.stride[3], at.count, d_v,
              scratch.grad_out, kPanel);
  load_panels(out, at.offset(out), out.stride[2], out.stride[3], at.count, d_v, output, kPanel);
  for (int64_t r = 0; r < at.count; ++r) {
    const double log_sum = load_element<double>(logs, at.offset(logs) + r * logs.stride[2]);
    const bool sees_none = log_sum == -infinity<double>();
    T delta =
        dot_of_rows(plan.table, scratch.grad_out + r * kPanel, kPanel, output + r * kPanel, kPanel);
    const bool counts = !sees_none && is_finite(log_sum) && is_finite(delta) &&
                        row_is_finite(scratch.grad_out, kPanel, r, d_v) &&
                        row_is_finite(scratch.phi, kPanel, r, plan.features);
    scratch.deltas[r] = counts ? delta : T(0);
    scratch.exact_log_sums[r] = log_sum;
    // unused for visible rows where logits rise
    const double rise = scratch.keys.rises ? 0 : log_sum - scratch.keys.base;
    scratch.log_sums[r] = counts      ? static_cast<T>(rise)
                          : sees_none ? infinity<T>()
                                      : not_a_number<T>();
    if (counts) continue;
    fill_row(scratch.grad_out, kPanel, r, d_v, T(0));
    fill_row(scratch.phi, kPanel, r, plan.features, T(0));
  }
}

// Computes weights in dp and ds in the tile, from scores in the tile and dP in dp; adds to dlogit
// of the keys. bias is null where every row sees every key.
template <typename T>
void chunk_pair_gradients(int64_t rows, T eps, const T* logits, const T* bias, const T* log_sums,
                          const T* deltas, T* tile, T* dp, T* grad_logits) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < kPanel; c += kLanes<T>) {
      T *score = tile + r * kPanel + c, *incoming = dp + r * kPanel + c;
      const Vec<T> s = load(score), z = load(logits + c), x = load(incoming) - deltas[r];
      Vec<T> p = exp_bounded<T>(z - log_sums[r]);
      p = z == -infinity<T>() ? Vec<T>{} : p;
      if (bias) p = load(bias + r * kPanel + c) == -infinity<T>() ? Vec<T>{} : p;
      const Vec<T> w = (s * s + eps) * p;
      store<T>(score, s * p * x * T(2));
      store<T>(incoming, w);
      store<T>(grad_logits + c, load(grad_logits + c) + w * x);
    }
  }
}

// Computes all pairs of up to 64 queries, from row r0 of a chunk, with its keys: writes grad_query,
// and adds to grad_key, grad_value and grad_logits.
template <typename T>
void add_pair_gradients(const CausalPlan<T>& plan, int64_t rows, int64_t r0,
                        CausalScratch<T>& scratch) {
  const ChunkKeys<T>& keys = scratch.keys;
  const int64_t d_v = plan.table.d_v, of_tile = kPanel * kPanel;
  const T eps = static_cast<T>(plan.params.queries.eps);
  for (int64_t k0 = 0; k0 <= r0; k0 += kPanel) {
    score_block(plan, rows, k0, scratch);
    if (d_v == 0) __builtin_memset(scratch.dp, 0, of_tile * sizeof(T));
    for (int64_t first = 0; first < d_v; first += kPanel) {
      const int64_t block = k0 / kPanel * plan.table.value_panels() + first / kPanel;
      panel_gemm<T, Left::kRows>(rows, kPanel, min_of(kPanel, d_v - first),
                                 scratch.grad_out + first * kPanel,
                                 keys.values_by_column + block * of_tile, scratch.dp, first > 0);
    }
    const auto pairs = [&](int64_t r, int64_t some, const T* logits, const T* log_sums) {
      chunk_pair_gradients(some, eps, logits, k0 == r0 ? scratch.diagonal + r * kPanel : nullptr,
                           log_sums, scratch.deltas + r, scratch.tile + r * kPanel,
                           scratch.dp + r * kPanel, scratch.grad_logits + k0);
    };
    if (!keys.rises) pairs(0, rows, keys.logits + k0, scratch.log_sums);
    const T nothing = 0;
    for (int64_t r = 0; keys.rises && r < rows; ++r) {
      const bool counts = is_finite(scratch.log_sums[r]);
      if (counts) keys.logits_from(scratch.exact_log_sums[r], k0, scratch.row_logits);
      pairs(r, 1, counts ? scratch.row_logits : keys.logits + k0,
            counts ? &nothing : scratch.log_sums + r);
    }
    for (int64_t panel = 0; panel < plan.feature_panels; ++panel) {
      const int64_t columns = min_of(kPanel, plan.features - panel * kPanel);
      const int64_t at = (panel * kCausalChunk + k0) * kPanel;
      panel_gemm<T, Left::kRows>(rows, columns, kPanel, scratch.tile, keys.phi + at,
                                 scratch.grad_query + panel * of_tile, k0 > 0);
      panel_gemm<T, Left::kColumns>(kPanel, columns, rows, scratch.tile,
                                    scratch.phi + panel * of_tile, scratch.grad_key + at, true);
    }
    for (int64_t first = 0; first < d_v; first += kPanel) {
      panel_gemm<T, Left::kColumns>(kPanel, min_of(kPanel, d_v - first), rows, scratch.dp,
                                    scratch.grad_out + first * kPanel,
                                    scratch.grad_value + first * kCausalChunk + k0 * kPanel, true);
    }
  }
}

// Computes dphi of up to 64 queries: adds the keys before to grad_query, which has the pairs.
template <typename T>
void store_query_gradients(const CausalPlan<T>& plan, const QueryRows& at, double reference,
                           const Moments<T>& of_keys, CausalScratch<T>& scratch) {
  const FromMomentsParams& params = plan.params.queries;
  const ProductScratch<T>& products = scratch.own.products;
  const int64_t row_size = plan.table.products.template row_size<T>();
  const Array& grad = params.grad_features;
  if (reference == -infinity<double>()) {
    __builtin_memset(products.own, 0, at.count * row_size * sizeof(T));
  } else {
    load_row_gradients(params, plan.table, at, reference, products.x, products.values,
                       kMomentTokens, products.factors, scratch.own.out);
    product_gradients(plan.table.products, {0, plan.table.products.panels()}, of_keys, at.count,
                      products.values, kMomentTokens, products.factors, products);
  }
  const T scale = 2 * score_scale<T>(params);
  for (int64_t r = 0; r < at.count; ++r) {
    T* row = products.own + r * row_size;
    for (int64_t f = 0; f < plan.features; ++f) {
      const T of_pairs = scratch.grad_query[(f / kPanel * kPanel + r) * kPanel + f % kPanel];
      row[f] = row[f] * scale + of_pairs;
    }
    store_row(grad, at.offset(grad) + r * grad.stride[2], grad.stride[3], plan.features, row);
  }
}

// Stores the gradients of a chunk's keys from its pairs.
template <typename T>
void store_chunk_gradients(const CausalPlan<T>& plan, const MomentsHead& head, int64_t chunk,
                           const CausalScratch<T>& scratch) {
  const KeyMomentsParams& params = plan.params.keys;
  const int64_t i0 = chunk * kCausalChunk, count = plan.rows_of(chunk);
  const auto offset = [&](const Array& array) { return head.offset(array) + i0 * array.stride[2]; };
  const auto store = [&](const Array& array, int64_t columns, const T* panels) {
    if (!array) return;
    store_panels(array, offset(array), array.stride[2], array.stride[3], count, columns, panels,
                 kCausalChunk);
  };
  const T scale = T(0.25) / static_cast<T>(params.M);
  for (int64_t i = 0; i < plan.feature_panels * kCausalChunk * kPanel; ++i) {
    scratch.grad_key[i] *= scale;
  }
  store(params.grad_features, plan.features, scratch.grad_key);
  store(params.grad_value, params.d_v, scratch.grad_value);
  const Array& logits = params.grad_logits;
  if (logits) store_row(logits, offset(logits), logits.stride[2], count, scratch.grad_logits);
}

template <typename T>
void pass_forward(const CausalPlan<T>& plan, const MomentsHead& head, CausalScratch<T>& scratch) {
  const int64_t value_panels = plan.table.value_panels();
  const bool wants_queries = bool{plan.params.queries.grad_features};
  const double* references = scratch.references;
  load_running(plan, head, scratch);
  Moments<T> of_keys = scratch.running.panels;
  of_keys.by_entry = nullptr;  // only the gradient of queries reads them
  for (int64_t chunk = 0; chunk < plan.chunks; ++chunk) {
    const int64_t count = plan.rows_of(chunk), i0 = chunk * kCausalChunk;
    load_chunk_keys(plan, head, chunk, references[chunk], scratch.keys);
    __builtin_memset(scratch.grad_key, 0, plan.feature_panels * kCausalChunk * kPanel * sizeof(T));
    __builtin_memset(scratch.grad_value, 0, value_panels * kCausalChunk * kPanel * sizeof(T));
    __builtin_memset(scratch.grad_logits, 0, kCausalChunk * sizeof(T));
    for (int64_t index = 0; index < plan.heads(); ++index) {
      for (int64_t r0 = 0; r0 < count; r0 += kPanel) {
        const QueryRows at = plan.queries_at(head, index, i0 + r0, min_of(kPanel, count - r0));
        load_query_block(plan, at, scratch.phi);
        load_row_sums(plan, at, scratch);
        add_pair_gradients(plan, at.count, r0, scratch);
        if (wants_queries) store_query_gradients(plan, at, references[chunk], of_keys, scratch);
      }
    }
    store_chunk_gradients(plan, head, chunk, scratch);
    if (!wants_queries || chunk + 1 == plan.chunks) continue;
    add_chunk_keys(plan, head, chunk, references[chunk], references[chunk + 1], of_keys, scratch);
  }
}

// Adds the gradients of the block of keys at j0 from the running gradient of moments.
template <typename T>
void add_key_gradients(const CausalPlan<T>& plan, const MomentsHead& head, int64_t j0, int64_t rows,
                       double reference, CausalScratch<T>& scratch) {
  const KeyMomentsParams& params = plan.params.keys;
  const Table& table = plan.table;
  const MomentsScratch<T>& own = scratch.own;
  const ProductScratch<T>& products = own.products;
  const ConstantEntry<T>& constant = scratch.running.constant;
  const int64_t row_size = table.products.row_size<T>();
  const T scale = score_scale<T>(plan.params.queries);
  if (!load_keys(params, table, head, reference, j0, rows, products)) return;
  __builtin_memset(own.lane_sums, 0, rows * kLanes<T> * sizeof(T));
  read_moments(table.products, scratch.running.panels, rows, products, own.lane_sums, own.out,
               rows);
  product_gradients(table.products, {0, table.products.panels()}, scratch.running.panels, rows,
                    products.values, kMomentTokens, products.factors, products);
  const Array &features = params.grad_features, &value = params.grad_value,
              &logits = params.grad_logits;
  T before[kPanel];
  const auto add = [&](const Array& array, int64_t offset, int64_t count, const T* numbers,
                       T factor) {
    load_row(array, offset, array.stride[3], count, before);
    for (int64_t c = 0; c < count; ++c) before[c] += numbers[c] * factor;
    store_row(array, offset, array.stride[3], count, before);
  };
  for (int64_t r = 0; r < rows; ++r) {
    const T weight = products.factors[r];
    if (weight == T(0)) continue;  // of a hidden key, whatever came for the others
    const auto offset = [&](const Array& array) {
      return head.offset(array) + (j0 + r) * array.stride[2];
    };
    T of_logit =
        weight * (sum_of_lanes<T>(load(own.lane_sums + r * kLanes<T>)) * scale + constant.total);
    for (int64_t first = 0; first < table.d_v; first += kPanel) {
      const int64_t count = min_of(kPanel, table.d_v - first);
      T* read = own.out + first * rows + r * kPanel;
      const T* weighted = products.values + first * kMomentTokens + r * kPanel;
      for (int64_t c = 0; c < count; ++c) {
        read[c] = read[c] * scale + constant.values[first + c];
        of_logit += weighted[c] * read[c];
      }
      if (value) add(value, offset(value) + first * value.stride[3], count, read, weight);
    }
    for (int64_t first = 0; features && first < plan.features; first += kPanel) {
      add(features, offset(features) + first * features.stride[3],
          min_of(kPanel, plan.features - first), products.own + r * row_size + first, 2 * scale);
    }
    if (logits) {
      const T grown = load_element<T>(logits, offset(logits)) + of_logit;
      store_element(logits, offset(logits), grown);
    }
  }
}

// Adds the queries of a chunk to the running gradient of moments, which becomes that of the keys
// before.
template <typename T>
void add_chunk_queries(const CausalPlan<T>& plan, const MomentsHead& head, int64_t chunk,
                       double before, double reference, CausalScratch<T>& scratch) {
  const Table& table = plan.table;
  const ProductScratch<T>& products = scratch.own.products;
  ConstantEntry<T>& own = scratch.own.constant;
  ConstantEntry<T>& sum = scratch.running.constant;
  rescale_table(table, rescaling<T>(before, reference), scratch.running.panels, sum);
  if (before == -infinity<double>()) return;  // of no key: queries have nothing of them
  const int64_t count = plan.rows_of(chunk), row_size = table.products.row_size<T>();
  const T eps = static_cast<T>(plan.params.queries.eps);
  for (int64_t index = 0; index < plan.heads(); ++index) {
    for (int64_t r0 = 0; r0 < count; r0 += kPanel) {
      const QueryRows at =
          plan.queries_at(head, index, chunk * kCausalChunk + r0, min_of(kPanel, count - r0));
      load_row_gradients(plan.params.queries, table, at, before, products.x + r0 * row_size,
                         products.values + r0 * kPanel, kMomentTokens, products.factors + r0,
                         scratch.own.out);
    }
    own.clear(table);
    own.add(table, count, products.values, kMomentTokens, products.factors);
    for (int64_t c = 0; c < table.d_v; ++c) sum.values[c] += eps * own.values[c];
    sum.total += eps * own.total;
    add_moments(table.products, {0, table.products.panels()}, count, products,
                scratch.running.panels);
  }
}

// Returns a table of gradients in units of the scale of scores, in which queries add to it.
template <typename T>
void multiply_panels(const Table& table, T factor, const Moments<T>& panels) {
  const int64_t count = table.products.panels(), size = table.value_panels() * kPanel * kPanel;
  for (int64_t i = 0; i < count * size; ++i) panels.by_entry[i] *= factor;
  for (int64_t i = 0; i < count * kPanel; ++i) panels.totals[i] *= factor;
}

template <typename T>
void pass_backward(const CausalPlan<T>& plan, const MomentsHead& head, CausalScratch<T>& scratch) {
  const Table& table = plan.table;
  const Array &after = plan.params.keys.moments, &before = plan.params.queries.grad_moments;
  const Panels all{0, table.products.panels()};
  const T scale = score_scale<T>(plan.params.queries);
  const double* references = scratch.references;
  HeldTable<T>& running = scratch.running;
  Moments<T> by_entry = running.panels;
  by_entry.by_value = nullptr;
  if (after) {
    load_table(table, after, head.offset(after), all, Counted::kToQueries, by_entry);
    multiply_panels(table, 1 / scale, by_entry);
    running.constant.load_from(table, after, head.offset(after));
  } else {
    by_entry.clear(all);
    running.constant.clear(table);
  }
  for (int64_t chunk = plan.chunks - 1; chunk >= 0; --chunk) {
    const int64_t first = chunk * kCausalChunk, end = first + plan.rows_of(chunk);
    const bool has_later = after || chunk + 1 < plan.chunks;
    if (has_later) running.panels.transpose(all);
    for (int64_t j0 = first; has_later && j0 < end; j0 += kPanel) {
      add_key_gradients(plan, head, j0, min_of(kPanel, end - j0), references[chunk + 1], scratch);
    }
    if (chunk == 0 && !before) return;
    add_chunk_queries(plan, head, chunk, references[chunk], references[chunk + 1], scratch);
  }
  if (!before) return;
  if (references[0] == -infinity<double>()) {
    by_entry.clear(all);
    running.constant.clear(table);
  }
  multiply_panels(table, scale, by_entry);
  store_table(table, before, head.offset(before), all, Counted::kOfQueries, by_entry);
  running.constant.store_to(table, before, head.offset(before), T(1));
}

template <typename T>
void causal_attention_backward(const CausalParams& params, const Executor& executor) {
  CausalPlan<T> plan{params, executor};
  plan.allocate(true);
  const KeyMomentsParams& keys = params.keys;
  const bool goes_back =
      keys.grad_features || keys.grad_logits || keys.grad_value || params.queries.grad_moments;
  parallel(executor, keys.B * keys.K, [&](int64_t unit, int thread) {
    const MomentsHead head = head_of(keys, unit);
    pass_forward(plan, head, plan.scratch[thread]);
    if (goes_back) pass_backward(plan, head, plan.scratch[thread]);
  });
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
