// Causal attention of tokens to themselves, and through moments to keys before them, in chunks of
// 128 tokens. With m the moments of all keys before a chunk and e_j = exp(logit_j - r_i), r_i the
// largest logit that query i sees:
//
//   n_i = exp(reference - r_i) (a psi(q_i) . m + eps times the constant entry)
//         + sum_j (s_ij^2 + eps) e_j [v_j, 1]   over the keys j <= i of the chunk
//
// Then the chunk's keys are added to m. One thread computes a head of the moments.
#pragma once

#include "moments/cpu/from_moments.h"

namespace ikattn::IKATTN_ISA {
namespace {

// The keys of a chunk as pairs read them, relative to a base. Hidden keys are zeros with the logit
// -inf, keys that are not finite zeros with the logit NaN.
template <typename T>
struct ChunkKeys {
  T* phi = nullptr;               // [feature panels][128][64]   over 2 F
  T* phi_by_column = nullptr;     // [2][feature panels][64][64]
  T* values = nullptr;            // [value panels][128][64]
  T* values_by_column = nullptr;  // [2][value panels][64][64]   backward
  T* logits = nullptr;            // [128]
  double* exact = nullptr;        // [128]   the same, relative to nothing, where they are finite
  double base = 0;
  bool rises = false;     // so far above the base that a difference of logits would be rounded away
  bool poisoned = false;  // a key is not finite

  void take(Workspace& workspace, int64_t feature_panels, int64_t value_panels, bool backward) {
    phi = workspace.take<T>(feature_panels * kCausalChunk * kPanel);
    phi_by_column = workspace.take<T>(feature_panels * kCausalChunk * kPanel);
    values = workspace.take<T>(value_panels * kCausalChunk * kPanel);
    if (backward) values_by_column = workspace.take<T>(value_panels * kCausalChunk * kPanel);
    logits = workspace.take<T>(kCausalChunk);
    exact = workspace.take<double>(kCausalChunk);
  }

  // Returns the logits of the 64 keys at k0 relative to another base.
  void logits_from(double other, int64_t k0, T* out) const {
    for (int64_t c = 0; c < kPanel; ++c) {
      const T own = logits[k0 + c];
      out[c] = own == -infinity<T>() || own != own ? own : static_cast<T>(exact[k0 + c] - other);
    }
  }
};

// The rise of logits above the base of a chunk that float32 rounds by half a millionth.
constexpr double kLargestRise = 8;

template <typename T>
struct CausalScratch {
  MomentsScratch<T> own;
  HeldTable<T> running;          // of the keys before a chunk; backward: gradients, too
  double* references = nullptr;  // [chunks + 1]   of the keys before each, and of all
  ChunkKeys<T> keys;
  T* phi = nullptr;         // [feature panels][64][64]   of queries
  T* tile = nullptr;        // [64][64]
  T* diagonal = nullptr;    // [64][64]   0 where a query sees a key of its block, otherwise -inf
  RowState<T> rows;         // [128]
  double* bases = nullptr;  // [128]   what the maxima of rows are relative to
  T* row_logits = nullptr;  // [64]    of keys, for one query
  bool poisoned = false;    // a key before the chunk is not finite
  // Used by the backward:
  T* grad_out = nullptr;             // [value panels][64][64]
  T* dp = nullptr;                   // [64][64]
  T* grad_query = nullptr;           // [feature panels][64][64]
  T* grad_key = nullptr;             // [feature panels][128][64]
  T* grad_value = nullptr;           // [value panels][128][64]
  T* grad_logits = nullptr;          // [128]
  T* deltas = nullptr;               // [64]
  T* log_sums = nullptr;             // [64]
  double* exact_log_sums = nullptr;  // [64]   relative to nothing
};

// The memory of a call, a scratch for each thread.
template <typename T>
struct CausalPlan {
  const CausalParams& params;
  const Executor& executor;
  Table table{{params.keys.M}, params.keys.d_v};
  int64_t L = params.keys.S;
  int64_t chunks = ceil_div(L, kCausalChunk);
  int64_t features = table.products.features();
  int64_t feature_panels = ceil_div(features, kPanel);
  CausalScratch<T>* scratch = nullptr;

  void take(Workspace& workspace, CausalScratch<T>& out, bool backward) const {
    const int64_t value_panels = max_of(1, table.value_panels());
    out.own.take(workspace, table, 1, backward);
    out.running.take(workspace, table, backward);
    out.references = workspace.take<double>(chunks + 1);
    out.keys.take(workspace, feature_panels, value_panels, backward);
    out.phi = workspace.take<T>(feature_panels * kPanel * kPanel);
    out.tile = workspace.take<T>(kPanel * kPanel);
    out.diagonal = workspace.take<T>(kPanel * kPanel);
    out.rows.take(workspace, kCausalChunk);
    out.bases = workspace.take<double>(kCausalChunk);
    out.row_logits = workspace.take<T>(kPanel);
    if (!backward) return;
    out.grad_out = workspace.take<T>(value_panels * kPanel * kPanel);
    out.dp = workspace.take<T>(kPanel * kPanel);
    out.grad_query = workspace.take<T>(feature_panels * kPanel * kPanel);
    out.grad_key = workspace.take<T>(feature_panels * kCausalChunk * kPanel);
    out.grad_value = workspace.take<T>(value_panels * kCausalChunk * kPanel);
    out.grad_logits = workspace.take<T>(kCausalChunk);
    out.deltas = workspace.take<T>(kPanel);
    out.log_sums = workspace.take<T>(kPanel);
    out.exact_log_sums = workspace.take<double>(kPanel);
  }
  void allocate(bool backward) {
    const auto lay_out = [&](void* base) {
      Workspace workspace(base);
      scratch = workspace.take<CausalScratch<T>>(executor.threads);
      for (int thread = 0; thread < executor.threads; ++thread) {
        CausalScratch<T> own;
        take(workspace, own, backward);
        if (!base) continue;
        for (int64_t i = 0; i < kPanel * kPanel; ++i) {
          own.diagonal[i] = i % kPanel <= i / kPanel ? T(0) : -infinity<T>();
        }
        scratch[thread] = own;
      }
      return workspace.bytes();
    };
    lay_out(executor.allocate(executor.owner, lay_out(nullptr)));
  }
  int64_t rows_of(int64_t chunk) const { return min_of(kCausalChunk, L - chunk * kCausalChunk); }
  QueryRows queries_at(const MomentsHead& head, int64_t index, int64_t i0, int64_t rows) const {
    return {head.b, head.head * heads() + index, i0, rows};
  }
  int64_t heads() const { return params.queries.H / params.queries.K; }  // that share moments
};

// Returns the factor that makes moments relative to a larger reference; 0 for moments without keys.
template <typename T>
T rescaling(double from, double to) {
  return from == -infinity<double>() ? T(0) : static_cast<T>(__builtin_exp(from - to));
}

// Computes the largest finite logits before each chunk, and of all.
template <typename T>
void find_references(const CausalPlan<T>& plan, const MomentsHead& head, double* out) {
  const Array &reference = plan.params.queries.reference, &logits = plan.params.keys.logits;
  out[0] = load_element<double>(reference, head.offset(reference));
  double chunk_logits[kCausalChunk];
  for (int64_t chunk = 0; chunk < plan.chunks; ++chunk) {
    const int64_t count = plan.rows_of(chunk), stride = logits.stride[2];
    load_row(logits, head.offset(logits) + chunk * kCausalChunk * stride, stride, count,
             chunk_logits);
    double largest = out[chunk];
    for (int64_t t = 0; t < count; ++t) {
      if (chunk_logits[t] > largest && is_finite(chunk_logits[t])) largest = chunk_logits[t];
    }
    out[chunk + 1] = largest;
  }
}

// Returns the base of a chunk's logits: the largest before it, or its first one. Its largest would
// let later keys change the rounding of a row.
inline double base_of(const double* logits, int64_t count, double reference) {
  if (reference != -infinity<double>()) return reference;
  for (int64_t t = 0; t < count; ++t) {
    if (is_finite(logits[t])) return logits[t];
  }
  return 0;
}

// Loads the keys of a chunk; reference is that of the keys before.
template <typename T>
void load_chunk_keys(const CausalPlan<T>& plan, const MomentsHead& head, int64_t chunk,
                     double reference, ChunkKeys<T>& out) {
  const KeyMomentsParams& params = plan.params.keys;
  const int64_t i0 = chunk * kCausalChunk, count = plan.rows_of(chunk);
  const int64_t padded = round_up(count, kPanel), d_v = params.d_v;
  const Array &features = params.features, &value = params.value, &logits = params.logits;
  load_panels(features, head.offset(features) + i0 * features.stride[2], features.stride[2],
              features.stride[3], count, plan.features, out.phi, kCausalChunk);
  load_panels(value,
              head.b * value.stride[0] + head.head * params.G / params.K * value.stride[1] +
                  i0 * value.stride[2],
              value.stride[2], value.stride[3], count, d_v, out.values, kCausalChunk);
  double found[kCausalChunk];
  T scales[kCausalChunk] = {};
  load_row(logits, head.offset(logits) + i0 * logits.stride[2], logits.stride[2], count, found);
  out.base = base_of(found, count, reference);
  out.rises = out.poisoned = false;
  for (int64_t t = 0; t < padded; ++t) {
    const bool is_hidden = t >= count || found[t] == -infinity<double>();
    const bool counts = !is_hidden && is_finite(found[t]) &&
                        row_is_finite(out.phi, kCausalChunk, t, plan.features) &&
                        row_is_finite(out.values, kCausalChunk, t, d_v);
    out.logits[t] = counts      ? static_cast<T>(found[t] - out.base)
                    : is_hidden ? -infinity<T>()
                                : not_a_number<T>();
    scales[t] = T(0.25) / static_cast<T>(params.M);
    out.exact[t] = counts ? found[t] : 0;
    if (counts && found[t] - out.base > kLargestRise) out.rises = true;
    if (!counts && !is_hidden) out.poisoned = true;
    if (counts) continue;
    fill_row(out.phi, kCausalChunk, t, plan.features, T(0));
    fill_row(out.values, kCausalChunk, t, d_v, T(0));
  }
  scale_rows(padded, plan.features, scales, out.phi, kCausalChunk);
  const auto transpose = [&](int64_t panels, const T* from, T* to) {
    for (int64_t block = 0; block < padded / kPanel; ++block) {
      for (int64_t panel = 0; panel < panels; ++panel) {
        transpose_panel(kPanel, kPanel, from + (panel * kCausalChunk + block * kPanel) * kPanel,
                        to + (block * panels + panel) * kPanel * kPanel);
      }
    }
  };
  transpose(plan.feature_panels, out.phi, out.phi_by_column);
  if (out.values_by_column) {
    transpose(plan.table.value_panels(), out.values, out.values_by_column);
  }
}

// Computes the sums over the keys before a chunk for its queries, in own.out [value
// panels][count][64] and the state of the rows.
template <typename T>
void read_running(const CausalPlan<T>& plan, const QueryRows& at, double reference,
                  CausalScratch<T>& scratch) {
  const FromMomentsParams& params = plan.params.queries;
  const Table& table = plan.table;
  MomentsScratch<T>& own = scratch.own;
  scratch.rows.reset(at.count);
  if (reference == -infinity<double>()) {
    __builtin_memset(own.out, 0, table.value_panels() * at.count * kPanel * sizeof(T));
    return;
  }
  load_query_features(params, table, at, own.products.x);
  __builtin_memset(own.lane_sums, 0, at.count * kLanes<T> * sizeof(T));
  read_moments(table.products, scratch.running.panels, at.count, own.products, own.lane_sums,
               own.out, at.count);
  const ConstantEntry<T>& constant = scratch.running.constant;
  const T scale = score_scale<T>(params), eps = static_cast<T>(params.eps);
  const T least = eps * constant.total;  // squares do not add less than nothing
  for (int64_t r = 0; r < at.count; ++r) {
    T sum = sum_of_lanes<T>(load(own.lane_sums + r * kLanes<T>)) * scale + least;
    scratch.rows.sums[r * kLanes<T>] = sum < least ? least : sum;
    scratch.rows.maxima[r] = 0;  // the reference is the base
    for (int64_t of_values = 0; of_values < table.value_panels(); ++of_values) {
      T* row = own.out + (of_values * at.count + r) * kPanel;
      for (int64_t c = 0; c < kPanel; c += kLanes<T>) {
        store<T>(row + c,
                 load(row + c) * scale + load(constant.values + of_values * kPanel + c) * eps);
      }
    }
  }
}

// Computes the scores of 64 queries, whose features are in the scratch, with the block of keys at
// k0.
template <typename T>
void score_block(const CausalPlan<T>& plan, int64_t rows, int64_t k0,
                 const CausalScratch<T>& scratch) {
  for (int64_t panel = 0; panel < plan.feature_panels; ++panel) {
    const int64_t block = k0 / kPanel * plan.feature_panels + panel;
    panel_gemm<T, Left::kRows>(rows, kPanel, min_of(kPanel, plan.features - panel * kPanel),
                               scratch.phi + panel * kPanel * kPanel,
                               scratch.keys.phi_by_column + block * kPanel * kPanel, scratch.tile,
                               panel > 0);
  }
}

template <typename T>
void load_query_block(const CausalPlan<T>& plan, const QueryRows& at, T* phi) {
  const Array& features = plan.params.queries.features;
  load_panels(features, at.offset(features), features.stride[2], features.stride[3], at.count,
              plan.features, phi, kPanel);
}

// Makes each row relative to the largest logit that it sees, where logits of the chunk rise.
template <typename T>
void find_bases(const CausalPlan<T>& plan, int64_t count, CausalScratch<T>& scratch) {
  const ChunkKeys<T>& keys = scratch.keys;
  double base = keys.base;
  for (int64_t r = 0; r < count; ++r) {
    const bool is_finite = keys.logits[r] > -infinity<T>();
    if (keys.rises && is_finite && keys.exact[r] > base) base = keys.exact[r];
    scratch.bases[r] = base;
    scratch.rows.rescale[r] = static_cast<T>(__builtin_exp(keys.base - base));
    for (int64_t c = 0; keys.rises && c < kLanes<T>; ++c) {
      scratch.rows.sums[r * kLanes<T> + c] *= scratch.rows.rescale[r];
    }
  }
  if (keys.rises) {
    scale_rows(count, plan.table.d_v, scratch.rows.rescale, scratch.own.out, count);
  }
}

// Computes general_weights of a block of rows and a block of keys; rows among which logits rise are
// each relative to a separate base.
template <typename T>
bool chunk_weights(const CausalPlan<T>& plan, int64_t count, int64_t r0, int64_t k0,
                   CausalScratch<T>& scratch) {
  const ChunkKeys<T>& keys = scratch.keys;
  const RowState<T> rows = scratch.rows.from(r0);
  const T eps = static_cast<T>(plan.params.queries.eps);
  const auto weights = [&](int64_t row, int64_t some, const T* logits) {
    T* tile = scratch.tile + row * kPanel;
    const T* diagonal = scratch.diagonal + row * kPanel;
    return k0 == r0
               ? general_weights<T, true>(some, kPanel, eps, logits, diagonal, tile, rows.from(row))
               : general_weights<T, false>(some, kPanel, eps, logits, nullptr, tile,
                                           rows.from(row));
  };
  if (!keys.rises) return weights(0, count, keys.logits + k0);
  bool rose = false;
  for (int64_t r = 0; r < count; ++r) {
    keys.logits_from(scratch.bases[r0 + r], k0, scratch.row_logits);
    rose |= weights(r, 1, scratch.row_logits);
  }
  return rose;
}

// Adds the pairs of a chunk to the sums of its rows.
template <typename T>
void add_chunk_pairs(const CausalPlan<T>& plan, const QueryRows& at, CausalScratch<T>& scratch) {
  const int64_t d_v = plan.table.d_v;
  const ChunkKeys<T>& keys = scratch.keys;
  find_bases(plan, at.count, scratch);
  for (int64_t r0 = 0; r0 < at.count; r0 += kPanel) {
    const QueryRows block{at.b, at.h, at.i0 + r0, min_of(kPanel, at.count - r0)};
    const RowState<T> rows = scratch.rows.from(r0);
    T* out = scratch.own.out + r0 * kPanel;
    load_query_block(plan, block, scratch.phi);
    for (int64_t k0 = 0; k0 <= r0; k0 += kPanel) {
      score_block(plan, block.count, k0, scratch);
      if (chunk_weights(plan, block.count, r0, k0, scratch)) {
        scale_rows(block.count, d_v, rows.rescale, out, at.count);
      }
      for (int64_t first = 0; first < d_v; first += kPanel) {
        panel_gemm<T, Left::kRows>(
            block.count, min_of(kPanel, d_v - first), min_of(kPanel, at.count - k0), scratch.tile,
            keys.values + first * kCausalChunk + k0 * kPanel, out + first * at.count, true);
      }
    }
  }
}

template <typename T>
void finish_chunk_rows(const CausalPlan<T>& plan, const QueryRows& at,
                       const CausalScratch<T>& scratch) {
  const FromMomentsParams& params = plan.params.queries;
  const Array &output = params.output, &logs = params.log_normalizer;
  for (int64_t r = 0; r < at.count; ++r) {
    const T sum = sum_of_lanes<T>(load(scratch.rows.sums + r * kLanes<T>));
    const double largest = static_cast<double>(scratch.rows.maxima[r]);
    scratch.rows.rescale[r] = sum == T(0) ? T(0) : T(1) / sum;
    store_element(logs, at.offset(logs) + r * logs.stride[2],
                  sum == T(0)
                      ? -infinity<double>()
                      : __builtin_log(static_cast<double>(sum)) + (largest + scratch.bases[r]));
  }
  scale_rows(at.count, plan.table.d_v, scratch.rows.rescale, scratch.own.out, at.count);
  store_panels(output, at.offset(output), output.stride[2], output.stride[3], at.count,
               plan.table.d_v, scratch.own.out, at.count);
}

// Multiplies panels and constant entry of a table by a factor; 0 clears them, even if they hold
// NaN.
template <typename T>
void rescale_table(const Table& table, T factor, const Moments<T>& held,
                   ConstantEntry<T>& constant) {
  if (factor == T(1)) return;
  const int64_t panels = table.products.panels();
  const auto rescale = [&](int64_t count, T* numbers) {
    for (int64_t i = 0; i < count; i += kLanes<T>) {
      store<T>(numbers + i, factor == T(0) ? Vec<T>{} : load(numbers + i) * factor);
    }
  };
  rescale(panels * held.summed_size(), held.summed(0));
  if (held.by_entry) rescale(panels * kPanel, held.total(0));
  rescale(table.value_panels() * kPanel, constant.values);
  constant.total = factor == T(0) ? T(0) : constant.total * factor;
}

// Adds the keys of a chunk to the running moments, which are relative to a reference.
template <typename T>
void add_chunk_keys(const CausalPlan<T>& plan, const MomentsHead& head, int64_t chunk,
                    double before, double reference, const Moments<T>& panels,
                    CausalScratch<T>& scratch) {
  const Table& table = plan.table;
  rescale_table(table, rescaling<T>(before, reference), panels, scratch.running.constant);
  const ProductScratch<T>& products = scratch.own.products;
  const int64_t count = plan.rows_of(chunk);
  if (!load_keys(plan.params.keys, table, head, reference, chunk * kCausalChunk, count, products)) {
    return;
  }
  scratch.running.constant.add(table, count, products.values, kMomentTokens, products.factors);
  add_moments(table.products, {0, table.products.panels()}, count, products, panels);
}

// Loads the moments of the keys before into the scratch.
template <typename T>
void load_running(const CausalPlan<T>& plan, const MomentsHead& head, CausalScratch<T>& scratch) {
  const Array& moments = plan.params.queries.moments;
  const int64_t offset = head.offset(moments);
  find_references(plan, head, scratch.references);
  load_table(plan.table, moments, offset, {0, plan.table.products.panels()}, Counted::kToKeys,
             scratch.running.panels);
  scratch.running.constant.load_from(plan.table, moments, offset);
}

template <typename T>
void attend_causally(const CausalPlan<T>& plan, const MomentsHead& head,
                     CausalScratch<T>& scratch) {
  const double* references = scratch.references;
  HeldTable<T>& running = scratch.running;
  load_running(plan, head, scratch);
  scratch.poisoned = running.constant.total != running.constant.total;
  for (int64_t chunk = 0; chunk < plan.chunks; ++chunk) {
    load_chunk_keys(plan, head, chunk, references[chunk], scratch.keys);
    for (int64_t index = 0; index < plan.heads(); ++index) {
      const QueryRows at = plan.queries_at(head, index, chunk * kCausalChunk, plan.rows_of(chunk));
      read_running(plan, at, references[chunk], scratch);
      for (int64_t r = 0; scratch.poisoned && r < at.count; ++r) {
        scratch.rows.sums[r * kLanes<T>] = not_a_number<T>();
      }
      add_chunk_pairs(plan, at, scratch);
      finish_chunk_rows(plan, at, scratch);
    }
    add_chunk_keys(plan, head, chunk, references[chunk], references[chunk + 1], running.panels,
                   scratch);
    scratch.poisoned |= scratch.keys.poisoned;
  }
  // independent of later keys
  if (scratch.poisoned) {
    rescale_table(plan.table, not_a_number<T>(), running.panels, running.constant);
  }
  const Array &moments = plan.params.keys.moments, &reference = plan.params.keys.reference;
  const int64_t offset = head.offset(moments);
  store_table(plan.table, moments, offset, {0, plan.table.products.panels()}, Counted::kOfKeys,
              running.panels);
  running.constant.store_to(plan.table, moments, offset, T(1));
  store_element(reference, head.offset(reference), references[plan.chunks]);
}

template <typename T>
void causal_attention(const CausalParams& params, const Executor& executor) {
  CausalPlan<T> plan{params, executor};
  plan.allocate(false);
  parallel(executor, params.keys.B * params.keys.K, [&](int64_t unit, int thread) {
    attend_causally(plan, head_of(params.keys, unit), plan.scratch[thread]);
  });
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
