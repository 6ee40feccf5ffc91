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

#include "attention/cpu/forward.h"

namespace ikattn::IKATTN_ISA {
namespace {

constexpr int64_t kBackwardRows = 64;      // query rows of a block
constexpr int64_t kBackwardKeyBlocks = 2;  // 64-key blocks that share one sweep over the queries
constexpr int64_t kFrequencyTokens =
    512;  // tokens whose frequency gradients are summed in one array

// Per query row: what turns a pair's dP into gradients.
template <typename T>
struct RowGradients {
  T* delta = nullptr;  // folded: (O_i . dO_i) / Z_i; general: O_i . dO_i
  // log Z_i - reference, and what rounding it to T lost: both stand in an exponent. +inf, which
  // makes every weight 0, for a row that is left out: it sees no key, or it is poisoned.
  T* log_normalizer = nullptr;
  T* log_normalizer_rest = nullptr;
  uint8_t* poisoned = nullptr;  // the row is not finite, and all it sees turns NaN
};

// Everything the pair sweep reads and writes for one unit.
template <typename T>
struct BackwardUnit {
  PreparedKeys<T> keys;
  T* phi = nullptr;         // [heads][feature panels][L][64]
  T* grad_out = nullptr;    // [heads][value panels][L][64], folded: times 1/Z
  T* grad_phi_q = nullptr;  // [heads][feature panels][L][64]
  T* grad_phi_k = nullptr;  // [feature panels][padded keys][64]
  T* grad_value = nullptr;  // [value panels][padded keys][64]
  T* grad_logit = nullptr;  // [padded keys]   dg
  RowGradients<T> rows;     // [heads][L] each
  int* progress = nullptr;  // [heads][query blocks]   key sweeps that have added to dphi_q
  T* partials = nullptr;    // [chunks][packed frequencies]

  void take(Workspace& workspace, const AttentionLayout<T>& layout, int64_t L, int64_t query_blocks,
            int64_t chunks) {
    const int64_t heads = layout.heads_per_unit;
    const int64_t feature_row = layout.feature_panels() * kPanel;
    const int64_t value_row = layout.value_panels() * kPanel;
    keys.take(workspace, layout, true);
    phi = workspace.take<T>(heads * L * feature_row);
    grad_out = workspace.take<T>(heads * L * value_row);
    grad_phi_q = workspace.take<T>(heads * L * feature_row);
    grad_phi_k = workspace.take<T>(layout.padded_keys * feature_row);
    grad_value = workspace.take<T>(layout.padded_keys * value_row);
    grad_logit = workspace.take<T>(layout.padded_keys);
    rows.delta = workspace.take<T>(heads * L);
    rows.log_normalizer = workspace.take<T>(heads * L);
    rows.log_normalizer_rest = workspace.take<T>(heads * L);
    rows.poisoned = workspace.take<uint8_t>(heads * L);
    progress = workspace.take<int>(heads * query_blocks);
    partials = workspace.take<T>(chunks * layout.feature.packed_size());
  }
};

template <typename T>
struct BackwardScratch {
  KeyScratch<T> keys;
  T* tokens = nullptr;  // [token panels][64][64]
  T* grad_x = nullptr;  // [token panels][64][64]
  T* angles = nullptr;  // [64][64]
  T* output = nullptr;  // [value panels][64][64]
  T* s = nullptr;       // [64][64]   scores, then ds
  T* w = nullptr;       // [64][64]   weights
  T* dp = nullptr;      // [64][64]   dP
  T* dlog = nullptr;    // [64][64]   gradient of the logits, for the mask
  T* bias = nullptr;    // [64][64]
  T* keep = nullptr;    // [64][64]

  void take(Workspace& workspace, const AttentionLayout<T>& layout) {
    keys.take(workspace, layout);
    tokens = workspace.take<T>(layout.feature.token_panels() * kPanel * kPanel);
    grad_x = workspace.take<T>(layout.feature.token_panels() * kPanel * kPanel);
    output = workspace.take<T>(layout.value_panels() * kPanel * kPanel);
    T** tiles[] = {&angles, &s, &w, &dp, &dlog, &bias, &keep};
    for (T** tile : tiles) *tile = workspace.take<T>(kPanel * kPanel);
  }
};

// The five sizes every step of the backward needs beside the layout.
template <typename T>
struct BackwardPlan {
  const AttentionBackwardParams& params;
  AttentionLayout<T> layout;
  int64_t query_blocks;  // per head
  int64_t key_sweeps;    // of kBackwardKeyBlocks * 64 keys
  int64_t query_chunks;  // per head, of frequency_tokens
  int64_t key_chunks;
  int64_t frequency_tokens;

  explicit BackwardPlan(const AttentionBackwardParams& call)
      : params(call),
        layout(call),
        query_blocks(ceil_div(call.L, kBackwardRows)),
        key_sweeps(ceil_div(layout.key_blocks, kBackwardKeyBlocks)),
        frequency_tokens(max_of(kFrequencyTokens, round_up(4 * call.d, kPanel))) {
    query_chunks = ceil_div(call.L, frequency_tokens);
    key_chunks = ceil_div(call.S, frequency_tokens);
  }
  int64_t chunks() const { return layout.heads_per_unit * query_chunks + key_chunks; }
  QueryBlock query_block(const Unit& unit, int64_t head, int64_t index) const {
    const int64_t i0 = index * kBackwardRows;
    return {unit.b, unit.first_query_head + head, i0, min_of(kBackwardRows, params.L - i0)};
  }
  bool wants_frequencies() const { return params.grad_w1 || params.grad_w2; }
};

// dphi_q of one block of queries starts at zero, its turn at the first sweep of keys.
template <typename T>
void clear_query_gradients(const BackwardPlan<T>& plan, int64_t head, int64_t index,
                           BackwardUnit<T>& state) {
  const int64_t L = plan.params.L, panels = plan.layout.feature_panels();
  const int64_t i0 = index * kBackwardRows, rows = min_of(kBackwardRows, L - i0);
  for (int64_t panel = 0; panel < panels; ++panel) {
    __builtin_memset(state.grad_phi_q + ((head * panels + panel) * L + i0) * kPanel, 0,
                     rows * kPanel * sizeof(T));
  }
  state.progress[head * plan.query_blocks + index] = 0;
}

// Features, scaled dO and delta of one block of queries.
template <typename T>
void prepare_query_gradients(const BackwardPlan<T>& plan, const Unit& unit, int64_t head,
                             int64_t index, const PackedFrequencies<T>& frequencies,
                             BackwardUnit<T>& state, const BackwardScratch<T>& scratch) {
  const AttentionBackwardParams& params = plan.params;
  const AttentionLayout<T>& layout = plan.layout;
  const QueryBlock block = plan.query_block(unit, head, index);
  const int64_t L = params.L;
  const int64_t first_row = head * L + block.i0;
  T* phi = state.phi + (head * layout.feature_panels() * L + block.i0) * kPanel;
  T* grad_out = state.grad_out + (head * layout.value_panels() * L + block.i0) * kPanel;
  uint8_t* poisoned = state.rows.poisoned + first_row;
  prepare_queries(params, layout, block, frequencies.of(unit, layout.feature), scratch.tokens, phi,
                  L, poisoned);
  clear_query_gradients(plan, head, index, state);

  const auto offset = [&](const Array& array) {
    return block.b * array.stride[0] + block.h * array.stride[1] + block.i0 * array.stride[2];
  };
  const Array &output = params.output, &gradient = params.grad_output;
  load_panels(gradient, offset(gradient), gradient.stride[2], gradient.stride[3], block.rows,
              params.d_v, grad_out, L);
  load_panels(output, offset(output), output.stride[2], output.stride[3], block.rows, params.d_v,
              scratch.output, kPanel);
  for (int64_t r = 0; r < block.rows; ++r) {
    Vec<T> products{};
    for (int64_t first = 0; first < params.d_v; first += kPanel) {
      for (int64_t c = 0; c < min_of(kPanel, params.d_v - first); c += kLanes<T>) {
        products += load(scratch.output + first * kPanel + r * kPanel + c) *
                    load(grad_out + first * L + r * kPanel + c);
      }
    }
    const double log_normalizer = load_element<double>(
        params.log_normalizer, offset(params.log_normalizer) + r * params.log_normalizer.stride[2]);
    const double relative = log_normalizer - state.keys.form.reference;
    T delta = sum_of_lanes<T>(products);
    const bool sees_nothing = log_normalizer == -infinity<double>();
    T factor = state.keys.form.folded ? static_cast<T>(exponential(-relative)) : T(1);
    if (sees_nothing) delta = factor = 0;
    delta *= factor;
    poisoned[r] =
        !sees_nothing && (poisoned[r] || !is_finite(delta) || !is_finite(log_normalizer) ||
                          !row_is_finite(grad_out, L, r, params.d_v));
    if (poisoned[r] || sees_nothing) {
      delta = 0;
      fill_row(phi, L, r, layout.feature_panels() * kPanel, T(0));
      fill_row(grad_out, L, r, layout.value_panels() * kPanel, T(0));
    } else if (factor != 1) {
      for (int64_t first = 0; first < params.d_v; first += kPanel) {
        T* row = grad_out + first * L + r * kPanel;
        for (int64_t c = 0; c < kPanel; c += kLanes<T>) store<T>(row + c, load(row + c) * factor);
      }
    }
    state.rows.delta[first_row + r] = delta;
    const bool left_out = poisoned[r] || sees_nothing;
    const T rounded = left_out ? infinity<T>() : static_cast<T>(relative);
    state.rows.log_normalizer[first_row + r] = rounded;
    state.rows.log_normalizer_rest[first_row + r] =
        left_out ? T(0) : static_cast<T>(relative - static_cast<double>(rounded));
  }
}

// What one tile's arithmetic reads: rows and columns of the unit, [columns] and [rows] long.
template <typename T>
struct PairTile {
  int64_t rows, columns;
  const T* terms;           // folded: eps e_j
  const T* logits;          // general: g_j
  const T* delta;           // per row
  const T* log_normalizer;  // general, per row
  const T* log_normalizer_rest;
  const uint8_t* poisoned;  // per row
  const T* bias;            // [rows][64] or null
  const T* keep;            // [rows][64] or null
  T eps;
};

// From s and dP to w (times keep), ds and dlog, in place; dg grows by the column sums of dlog.
template <typename T, bool kFolded, bool kMasked, bool kDropout>
void pair_gradients(const PairTile<T>& tile, T* s, T* w_out, const T* dp, T* dlog, T* grad_logit) {
  for (int64_t c = 0; c < tile.columns; c += kLanes<T>) {
    Vec<T> column_sum = load(grad_logit + c);
    for (int64_t r = 0; r < tile.rows; ++r) {
      const int64_t at = r * kPanel + c;
      const Vec<T> score = load(s + at);
      Vec<T> bias{};
      if constexpr (kMasked) bias = load(tile.bias + at);
      Vec<T> w, slope = score;
      if constexpr (kFolded) {
        w = score * score + load(tile.terms + c);
      } else {
        const Vec<T> z =
            (load(tile.logits + c) + bias - tile.log_normalizer[r]) - tile.log_normalizer_rest[r];
        const Vec<T> scale = exp_bounded<T>(z);
        w = (score * score + tile.eps) * scale;
        slope *= scale;
      }
      Vec<T> gradient = load(dp + at);
      if constexpr (kDropout) gradient *= load(tile.keep + at);
      Vec<T> x = gradient - tile.delta[r];
      if constexpr (kMasked) {
        const auto hidden = bias == -infinity<T>();
        w = hidden ? Vec<T>{} : w;
        x = hidden ? Vec<T>{} : x;
        slope = hidden ? Vec<T>{} : slope;
      }
      const Vec<T> logit_gradient = w * x;
      column_sum += logit_gradient;
      if (dlog) store<T>(dlog + at, logit_gradient);
      if constexpr (kDropout) w *= load(tile.keep + at);
      store<T>(w_out + at, w);
      store<T>(s + at, slope * x);
    }
    store<T>(grad_logit + c, column_sum);
  }
}

// A row that is not finite makes NaN of every pair it sees.
template <typename T>
void poison_rows(const PairTile<T>& tile, T* s, T* w, T* dlog, T* grad_logit) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    if (!tile.poisoned[r]) continue;
    for (int64_t c = 0; c < tile.columns; ++c) {
      const int64_t at = r * kPanel + c;
      const bool hidden =
          tile.logits[c] == -infinity<T>() || (tile.bias && tile.bias[at] == -infinity<T>());
      if (hidden) continue;
      s[at] = w[at] = grad_logit[c] = not_a_number<T>();
      if (dlog) dlog[at] = not_a_number<T>();
    }
  }
}

template <typename T, bool kFolded, bool kMasked>
void pair_gradients(const PairTile<T>& tile, T* s, T* w, const T* dp, T* dlog, T* grad_logit) {
  if (tile.keep) {
    pair_gradients<T, kFolded, kMasked, true>(tile, s, w, dp, dlog, grad_logit);
  } else {
    pair_gradients<T, kFolded, kMasked, false>(tile, s, w, dp, dlog, grad_logit);
  }
}

template <typename T>
void pair_gradients(const PairTile<T>& tile, bool folded, T* s, T* w, const T* dp, T* dlog,
                    T* grad_logit) {
  if (folded && tile.bias) return pair_gradients<T, true, true>(tile, s, w, dp, dlog, grad_logit);
  if (folded) return pair_gradients<T, true, false>(tile, s, w, dp, dlog, grad_logit);
  if (tile.bias) return pair_gradients<T, false, true>(tile, s, w, dp, dlog, grad_logit);
  pair_gradients<T, false, false>(tile, s, w, dp, dlog, grad_logit);
}

// grad_mask += dlog, summed over the axes the mask is broadcast along (stride 0).
template <typename T>
void add_mask_gradient(const Array& grad_mask, const TilePosition& at, int64_t columns,
                       const T* dlog) {
  T* target = static_cast<T*>(grad_mask.data) + at.b * grad_mask.stride[0] +
              at.h * grad_mask.stride[1] + at.j0 * grad_mask.stride[3];
  for (int64_t r = 0; r < at.rows; ++r) {
    T* row = target + (at.i0 + r) * grad_mask.stride[2];
    for (int64_t c = 0; c < columns; ++c) row[c * grad_mask.stride[3]] += dlog[r * kPanel + c];
  }
}

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
      const int64_t first_row = head * L + block.i0;
      PairTile<T> tile{block.rows,
                       round_up(count, kLanes<T>),
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
      scores(layout, block.rows, phi, L, state.keys.block_features(layout, key_block), count,
             scratch.s);
      const T* block_values = state.keys.block_values(layout, key_block);
      for (int64_t first = 0; first < params.d_v; first += kPanel) {
        panel_gemm<T, Left::kRows>(block.rows, count, min_of(kPanel, params.d_v - first),
                                   grad_out + first * L, block_values + first * kPanel, scratch.dp,
                                   first > 0);
      }
      // 2. pair gradients
      if (tile.keep) fill_keep(params, at, scratch.keep);
      T* dlog = params.grad_mask ? scratch.dlog : nullptr;
      pair_gradients(tile, state.keys.form.folded, scratch.s, scratch.w, scratch.dp, dlog,
                     state.grad_logit + j0);
      poison_rows(tile, scratch.s, scratch.w, dlog, state.grad_logit + j0);
      // 3. dV, dphi_k: rows are keys, summed over the block's queries
      for (int64_t first = 0; first < params.d_v; first += kPanel) {
        panel_gemm<T, Left::kColumns>(count, min_of(kPanel, params.d_v - first), block.rows,
                                      scratch.w, grad_out + first * L,
                                      state.grad_value + first * padded + j0 * kPanel, true);
      }
      for (int64_t panel = 0; panel < layout.feature_panels(); ++panel) {
        panel_gemm<T, Left::kColumns>(count, layout.feature.columns(panel), block.rows, scratch.s,
                                      phi + panel * L * kPanel,
                                      state.grad_phi_k + (panel * padded + j0) * kPanel, true);
      }
      // 4. dphi_q (and a mask gradient summed over keys): after all earlier keys
      if (!in_turn) wait_for(progress, static_cast<int>(sweep));
      in_turn = true;
      for (int64_t panel = 0; panel < layout.feature_panels(); ++panel) {
        panel_gemm<T, Left::kRows>(block.rows, layout.feature.columns(panel), count, scratch.s,
                                   state.keys.features_by_row + (panel * padded + j0) * kPanel,
                                   head_grad_phi + (panel * L + block.i0) * kPanel, true);
      }
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

// Loads up to 64 tokens. Those marked, marks[r] == left_out, become zero: their gradient is NaN
// already where anything sees them, and must be zero where nothing does.
template <typename T>
void load_clean_tokens(const Array& array, int64_t offset, int64_t rows, int64_t d, const T* marks,
                       T left_out, T* tokens) {
  load_panels(array, offset, array.stride[2], array.stride[3], rows, d, tokens, kPanel);
  for (int64_t r = 0; r < rows; ++r) {
    if (marks[r] == left_out) fill_row(tokens, kPanel, r, d, T(0));
  }
}

// From dphi to dq and the frequencies, tokens [begin, end) of one query head.
template <typename T>
void finish_queries(const BackwardPlan<T>& plan, const Unit& unit, int64_t head, int64_t begin,
                    int64_t end, const PackedFrequencies<T>& frequencies, BackwardUnit<T>& state,
                    T* partial, const BackwardScratch<T>& scratch) {
  const AttentionBackwardParams& params = plan.params;
  const AttentionLayout<T>& layout = plan.layout;
  const T* grad_phi = state.grad_phi_q + head * layout.feature_panels() * params.L * kPanel;
  const int64_t h = unit.first_query_head + head;
  for (int64_t i0 = begin; i0 < end; i0 += kPanel) {
    const int64_t rows = min_of(kPanel, end - i0);
    const Array& query = params.query;
    load_clean_tokens(query, unit.b * query.stride[0] + h * query.stride[1] + i0 * query.stride[2],
                      rows, params.d, state.rows.log_normalizer + head * params.L + i0,
                      infinity<T>(), scratch.tokens);
    features_backward<T>(
        layout.feature, rows, scratch.tokens, kPanel, frequencies.of(unit, layout.feature),
        frequencies.transposed_of(unit, layout.feature), feature_scale<T>(params.M), nullptr, T(2),
        grad_phi + i0 * kPanel, params.L, params.grad_query ? scratch.grad_x : nullptr, partial,
        scratch.angles);
    if (const Array& out = params.grad_query) {
      store_panels(out, unit.b * out.stride[0] + h * out.stride[1] + i0 * out.stride[2],
                   out.stride[2], out.stride[3], rows, params.d, scratch.grad_x, rows);
    }
  }
}

// dk of one row gains magnitude_scale dg d|k|_p^2.
template <typename T>
void add_magnitude_gradient(const AttentionParams& params, T grad_logit, const T* tokens, int64_t r,
                            int64_t rows, T* grad_x, T* key_row, T* grad_row) {
  if (params.p == 0 || grad_logit == 0) return;
  const T factor = static_cast<T>(params.magnitude_scale) * grad_logit;
  for (int64_t c = 0; c < params.d; ++c) {
    const int64_t panel = c / kPanel, column = c % kPanel;
    key_row[c] = tokens[(panel * kPanel + r) * kPanel + column];
    grad_row[c] = grad_x[(panel * rows + r) * kPanel + column];
  }
  add_squared_norm_gradient(key_row, params.d, params.p, factor, grad_row);
  for (int64_t c = 0; c < params.d; ++c) {
    grad_x[(c / kPanel * rows + r) * kPanel + c % kPanel] = grad_row[c];
  }
}

template <typename T>
void finish_keys(const BackwardPlan<T>& plan, const Unit& unit, int64_t begin, int64_t end,
                 const PackedFrequencies<T>& frequencies, BackwardUnit<T>& state, T* partial,
                 const BackwardScratch<T>& scratch) {
  const AttentionBackwardParams& params = plan.params;
  const AttentionLayout<T>& layout = plan.layout;
  for (int64_t j0 = begin; j0 < end; j0 += kPanel) {
    const int64_t rows = min_of(kPanel, end - j0);
    const Array& key = params.key;
    load_clean_tokens(key, unit.b * key.stride[0] + unit.group * key.stride[1] + j0 * key.stride[2],
                      rows, params.d, state.keys.feature_scales + j0, T(0), scratch.tokens);
    features_backward<T>(
        layout.feature, rows, scratch.tokens, kPanel, frequencies.of(unit, layout.feature),
        frequencies.transposed_of(unit, layout.feature), feature_scale<T>(params.M),
        state.keys.feature_scales + j0, T(2), state.grad_phi_k + j0 * kPanel, layout.padded_keys,
        params.grad_key ? scratch.grad_x : nullptr, partial, scratch.angles);
    const Array& out = params.grad_key;
    if (!out) continue;
    T* rows_on_side = scratch.keys.tokens;  // two rows of d
    for (int64_t r = 0; r < rows; ++r) {
      add_magnitude_gradient(params, state.grad_logit[j0 + r], scratch.tokens, r, rows,
                             scratch.grad_x, rows_on_side,
                             rows_on_side + round_up(params.d, kPanel));
    }
    store_panels(out, unit.b * out.stride[0] + unit.head * out.stride[1] + j0 * out.stride[2],
                 out.stride[2], out.stride[3], rows, params.d, scratch.grad_x, rows);
  }
}

// One chunk of one unit's tokens: queries of its heads first, then keys.
template <typename T>
void finish_chunk(const BackwardPlan<T>& plan, const Unit& unit, int64_t chunk,
                  const PackedFrequencies<T>& frequencies, BackwardUnit<T>& state,
                  const BackwardScratch<T>& scratch) {
  const int64_t size = plan.layout.feature.packed_size();
  T* partial = plan.wants_frequencies() ? state.partials + chunk * size : nullptr;
  if (partial) __builtin_memset(partial, 0, size * sizeof(T));
  const int64_t of_queries = plan.layout.heads_per_unit * plan.query_chunks;
  if (chunk < of_queries) {
    const int64_t begin = chunk % plan.query_chunks * plan.frequency_tokens;
    finish_queries(plan, unit, chunk / plan.query_chunks, begin,
                   min_of(plan.params.L, begin + plan.frequency_tokens), frequencies, state,
                   partial, scratch);
  } else {
    const int64_t begin = (chunk - of_queries) * plan.frequency_tokens;
    finish_keys(plan, unit, begin, min_of(plan.params.S, begin + plan.frequency_tokens),
                frequencies, state, partial, scratch);
  }
}

// Adds the partial sums of units [first, first + count) that share frequency set `set`, in order.
template <typename T>
void reduce_partials(const BackwardPlan<T>& plan, int64_t set, int64_t first, int64_t count,
                     const BackwardUnit<T>* states, T* total) {
  const int64_t size = plan.layout.feature.packed_size();
  for (int64_t slot = 0; slot < count; ++slot) {
    if (unit_at(plan.params, plan.layout, first + slot).frequency_set != set) continue;
    for (int64_t chunk = 0; chunk < plan.chunks(); ++chunk) {
      const T* partial = states[slot].partials + chunk * size;
      for (int64_t i = 0; i < size; i += kLanes<T>) {
        store<T>(total + i, load(total + i) + load(partial + i));
      }
    }
  }
}

// Frequency gradients out of their packed sums.
template <typename T>
void store_frequency_gradients(const AttentionBackwardParams& params,
                               const FeatureLayout<T>& layout, const T* totals) {
  const int64_t sets = params.frequency_batches * params.frequency_heads;
  T* grad_w1 = static_cast<T*>(params.grad_w1.data);
  T* grad_w2 = static_cast<T*>(params.grad_w2.data);
  for (int64_t set = 0; set < sets; ++set) {
    const int64_t at = set * layout.d * layout.M;
    unpack_frequency_gradients(layout, totals + set * layout.packed_size(),
                               grad_w1 ? grad_w1 + at : nullptr, grad_w2 ? grad_w2 + at : nullptr);
  }
}

// A mask gradient summed over batch or heads is added to by one unit at a time, in order.
inline bool units_share_mask_gradient(const AttentionBackwardParams& params) {
  const Array& grad = params.grad_mask;
  return grad && ((params.B > 1 && grad.stride[0] == 0) || (params.H > 1 && grad.stride[1] == 0));
}

template <typename T>
void attention_backward(const AttentionBackwardParams& params, const Executor& executor) {
  const BackwardPlan<T> plan(params);
  const AttentionLayout<T>& layout = plan.layout;
  const int64_t sets = params.frequency_batches * params.frequency_heads;
  BackwardUnit<T> one;
  Workspace measure;
  one.take(measure, layout, params.L, plan.query_blocks, plan.chunks());
  const int64_t in_flight = units_share_mask_gradient(params)
                                ? 1
                                : units_in_flight(layout.units, measure.bytes(), executor.threads);

  PackedFrequencies<T> frequencies;
  double* logits = nullptr;
  T* totals = nullptr;
  BackwardUnit<T>* states = nullptr;
  BackwardScratch<T>* scratch = nullptr;
  const auto lay_out = [&](void* base) {
    Workspace workspace(base);
    frequencies.take(workspace, params, layout.feature, true);
    logits = workspace.take<double>(in_flight * params.S);
    totals = workspace.take<T>(sets * layout.feature.packed_size());
    states = workspace.take<BackwardUnit<T>>(in_flight);
    scratch = workspace.take<BackwardScratch<T>>(executor.threads);
    for (int64_t slot = 0; slot < in_flight; ++slot) {
      BackwardUnit<T> state;
      state.take(workspace, layout, params.L, plan.query_blocks, plan.chunks());
      if (base) states[slot] = state;
    }
    for (int thread = 0; thread < executor.threads; ++thread) {
      BackwardScratch<T> own;
      own.take(workspace, layout);
      if (base) scratch[thread] = own;
    }
    return workspace.bytes();
  };
  lay_out(executor.allocate(executor.owner, lay_out(nullptr)));

  __builtin_memset(totals, 0, sets * layout.feature.packed_size() * sizeof(T));
  pack_all_frequencies(params, layout.feature, frequencies, executor);
  for (int64_t first = 0; first < layout.units; first += in_flight) {
    const int64_t count = min_of(in_flight, layout.units - first);
    const auto unit_of = [&](int64_t slot) { return unit_at(params, layout, first + slot); };
    const KeyStages keys{params,
                         layout,
                         frequencies,
                         first,
                         logits,
                         [&](int64_t slot) -> PreparedKeys<T>& { return states[slot].keys; },
                         [&](int thread) -> KeyScratch<T>& { return scratch[thread].keys; }};
    const Stage queries{layout.heads_per_unit * plan.query_blocks,
                        [&](int64_t slot, int64_t index, int thread) {
                          prepare_query_gradients(plan, unit_of(slot), index / plan.query_blocks,
                                                  index % plan.query_blocks, frequencies,
                                                  states[slot], scratch[thread]);
                        }};
    const Stage pairs{plan.key_sweeps, [&](int64_t slot, int64_t sweep, int thread) {
                        sweep_keys(plan, unit_of(slot), sweep, states[slot], scratch[thread]);
                      }};
    const Stage tokens{plan.chunks(), [&](int64_t slot, int64_t chunk, int thread) {
                         finish_chunk(plan, unit_of(slot), chunk, frequencies, states[slot],
                                      scratch[thread]);
                       }};
    run_stages(executor, count, keys.logits(), keys.form(), keys.blocks(), queries, pairs, tokens);
    if (!plan.wants_frequencies()) continue;
    const int64_t size = layout.feature.packed_size();
    parallel(for_elements(executor, count * plan.chunks() * size), sets, [&](int64_t set, int) {
      reduce_partials(plan, set, first, count, states, totals + set * size);
    });
  }
  if (plan.wants_frequencies()) store_frequency_gradients(params, layout.feature, totals);
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
