// The state of a unit in the backward pass, and the preparation of its queries.
#pragma once

#include "attention/cpu/forward/forward.h"

namespace ikattn::IKATTN_ISA {
namespace {

// Factors of each query row that turn a pair's dP into gradients.
template <typename T>
struct RowGradients {
  T* delta = nullptr;   // folded: (O_i . dO_i) / Z_i; general: O_i . dO_i
  T* factor = nullptr;  // folded: 1 / Z_i; general: 1
  // The sum over j of w_ij g_ij / Z_i in the backward of weights, where delta is 0: it is
  // subtracted from their gradient g (times keep).
  T* mean = nullptr;
  // log Z_i - reference, and its rounding error in T: both stand in an exponent. +inf, which makes
  // every weight 0, for a row that sees no key or is poisoned.
  T* log_normalizer = nullptr;
  T* log_normalizer_rest = nullptr;
  uint8_t* poisoned = nullptr;  // the row is not finite, and all it sees turns NaN
};

// The query side as the products over pairs read it, two numbers to a lane.
struct NarrowQueries {
  int32_t* phi = nullptr;              // [heads][score panels][L][64]
  float* steps = nullptr;              // [heads][L]
  int32_t* phi_by_row = nullptr;       // [heads][feature panels][(L + 1) / 2][64]
  int32_t* grad_out = nullptr;         // [heads][narrow value panels][L][64]  not times 1/Z
  int32_t* grad_out_by_row = nullptr;  // [heads][value panels][(L + 1) / 2][64]  likewise
  // Features are rounded after a centre is subtracted, whose part of the gradients is a float32 sum
  // of ds:
  float* centre = nullptr;    // [feature panels][64]   the keys' mean, by their weight e_j
  float* row_sums = nullptr;  // [heads][L][lanes]      sums of ds sqrt(e_j), a part per lane
  float* key_sums = nullptr;  // [padded keys]          sums of ds

  template <typename T>
  void take(Workspace& workspace, const AttentionLayout<T>& layout, int64_t L) {
    if (!layout.narrow_scores) return;
    const int64_t rows = layout.heads_per_unit * L * kPanel;
    const int64_t pairs = layout.heads_per_unit * ceil_div(L, 2) * kPanel;
    phi = workspace.take<int32_t>(layout.scores().panels() * rows);
    steps = workspace.take<float>(layout.heads_per_unit * L);
    if (!layout.bfloat16_products) return;
    phi_by_row = workspace.take<int32_t>(layout.feature_panels() * pairs);
    grad_out = workspace.take<int32_t>(layout.narrow_value_panels() * rows);
    grad_out_by_row = workspace.take<int32_t>(layout.value_panels() * pairs);
    centre = workspace.take<float>(layout.feature_panels() * kPanel);
    row_sums = workspace.take<float>(layout.heads_per_unit * L * kLanes<float>);
    key_sums = workspace.take<float>(layout.padded_keys);
  }
};

// The state of linear time, which replaces pairs (linear.h).
template <typename T>
struct LinearBackward {
  LinearKeys<T> keys;
  Moments<T> queries;           // where there is one chunk
  T* factors = nullptr;         // [heads][L]   f_i
  uint8_t* by_pairs = nullptr;  // [heads][query blocks]   a query would lose digits
  // Sums over the queries that moments hold for the keys of a chunk:
  T* sums_of_gradients = nullptr;  // [chunks][d_v]   sum g_i
  T* sums_of_factors = nullptr;    // [chunks]        sum f_i
  // Used by causal calls: sums of those queries for keys, and the number of groups that have added
  // to a block.
  T* grad_value = nullptr;         // [value panels][padded keys][64]
  int* groups_at_query = nullptr;  // [heads][query blocks]
  int* groups_at_key = nullptr;    // [key blocks]
  bool any_by_pairs = false;
  int64_t poisoned_keys = 0;  // that a query sees which is poisoned: they have no gradient

  void take(Workspace& workspace, const AttentionParams& params, const AttentionLayout<T>& layout) {
    const int64_t chunks = chunk_count(params), heads = layout.heads_per_unit;
    const int64_t query_blocks = heads * ceil_div(params.L, kBackwardRows);
    keys.take(workspace, params, layout);
    factors = workspace.take<T>(heads * params.L);
    by_pairs = workspace.take<uint8_t>(query_blocks);
    sums_of_gradients = workspace.take<T>(chunks * layout.d_v);
    sums_of_factors = workspace.take<T>(chunks);
    if (params.is_causal) {
      grad_value = workspace.take<T>(layout.value_panels() * layout.padded_keys * kPanel);
      groups_at_query = workspace.take<int>(query_blocks);
      groups_at_key = workspace.take<int>(layout.key_blocks);
    } else {
      queries = Moments<T>::take(workspace, layout.products().panels(), layout.d_v, false, true);
    }
  }
};

// The arrays that the pair sweep reads and writes for one unit.
template <typename T>
struct BackwardUnit {
  PreparedKeys<T> keys;
  T* phi = nullptr;       // [heads][feature panels][L][64]
  Tangents<T> tangents;   // [feature panels][heads][L][32]
  T* grad_out = nullptr;  // [heads][value panels][L][64], folded: times 1/Z; or narrow
  NarrowQueries narrow;
  T* grad_phi_q = nullptr;  // [heads][feature panels][L][64]
  T* grad_phi_k = nullptr;  // [feature panels][held_keys][64]   key j at row j % held_keys
  int64_t held_keys = 0;    // those of a sweep, or all
  T* grad_logit = nullptr;  // [padded keys]   dg
  RowGradients<T> rows;     // [heads][L] each
  int* progress = nullptr;  // [heads][query blocks]   key sweeps that have added to dphi_q
  T* partials = nullptr;    // [held chunks][packed frequencies]
  LinearBackward<T> linear;

  // Allocates the arrays. whole: one thread computes all stages of the unit, and results that one
  // stage hands to the next need not be held for the whole unit.
  void take(Workspace& workspace, const AttentionParams& params, const AttentionLayout<T>& layout,
            int64_t query_blocks, bool whole, int64_t chunks, bool is_linear) {
    const int64_t heads = layout.heads_per_unit, L = params.L;
    if (is_linear) linear.take(workspace, params, layout);
    const int64_t feature_row = layout.feature_panels() * kPanel;
    const int64_t value_row = layout.value_panels() * kPanel;
    keys.take(workspace, layout, true);
    phi = workspace.take<T>(heads * L * feature_row);
    tangents = {workspace.take<T>(Tangents<T>::size(layout.feature, heads * L)), heads * L};
    if (!layout.bfloat16_products) grad_out = workspace.take<T>(heads * L * value_row);
    narrow.take(workspace, layout, L);
    grad_phi_q = workspace.take<T>(heads * L * feature_row);
    const bool has_later_chunks = is_linear && params.is_causal;
    held_keys =
        whole && !has_later_chunks ? min_of(layout.padded_keys, kSweepKeys) : layout.padded_keys;
    grad_phi_k = workspace.take<T>(held_keys * feature_row);
    grad_logit = workspace.take<T>(layout.padded_keys);
    rows.delta = workspace.take<T>(heads * L);
    rows.factor = workspace.take<T>(heads * L);
    rows.log_normalizer = workspace.take<T>(heads * L);
    rows.log_normalizer_rest = workspace.take<T>(heads * L);
    rows.poisoned = workspace.take<uint8_t>(heads * L);
    if (params.grad_weights) rows.mean = workspace.take<T>(heads * L);
    progress = workspace.take<int>(heads * query_blocks);
    partials = workspace.take<T>((whole ? 1 : chunks) * layout.feature.packed_size());
  }
};

// The keys of one sweep over the queries, as the products over pairs read them.
template <typename T>
struct SweepKeys {
  KeyFeatures<T> by_column;
  T* values = nullptr;                 // [key blocks][value panels][64][64]   by column; or
  int32_t* narrow_values = nullptr;    // [key blocks][narrow value panels][64][64]
  int32_t* narrow_features = nullptr;  // [feature panels][key blocks * 32][64]
  T* grad_value = nullptr;             // [value panels][key blocks * 64][64]
  T* grad_value_by_column =
      nullptr;  // [key blocks][lanes][64]   what half values get in quadratic time
  static constexpr int64_t kByColumnSize = kBackwardKeyBlocks * kLanes<T> * kPanel;

  void take(Workspace& workspace, const AttentionLayout<T>& layout) {
    const int64_t blocks = min_of(kBackwardKeyBlocks, layout.key_blocks);
    const int64_t size = kSweepKeys * kPanel;
    by_column.take(workspace, layout, blocks);
    grad_value = workspace.take<T>(layout.value_panels() * size);
    if (layout.has_half_values()) grad_value_by_column = workspace.take<T>(kByColumnSize);
    if (layout.bfloat16_products) {
      narrow_values = workspace.take<int32_t>(layout.narrow_value_panels() * size);
      narrow_features = workspace.take<int32_t>(layout.feature_panels() * size / 2);
    } else {
      values = workspace.take<T>(layout.value_panels() * size);
    }
  }
};

template <typename T>
struct BackwardScratch {
  KeyScratch<T> keys;
  SweepKeys<T> sweep;
  T* tokens = nullptr;                  // [token panels][64][64]
  T* grad_x = nullptr;                  // [token panels][64][64]
  T* angles = nullptr;                  // [64][64]
  T* output = nullptr;                  // [value panels][64][64]
  T* grad_out = nullptr;                // [value panels][64][64]   before it is narrowed
  int32_t* narrow_ds = nullptr;         // [64][64]   ds, two to a lane
  int32_t* narrow_ds_by_row = nullptr;  // [32][64]
  int32_t* narrow_w_by_row = nullptr;   // [32][64]
  T* s = nullptr;                       // [64][64]   scores, then ds
  T* w = nullptr;                       // [64][64]   weights
  T* dp = nullptr;                      // [64][64]   dP, then the gradient of the logits
  T* bias = nullptr;                    // [64][64]
  T* keep = nullptr;                    // [64][64]
  ProductScratch<T> products;
  Moments<T> growing;  // causal: of what is before or after a chunk, one group of panels

  void take(Workspace& workspace, const AttentionParams& params, const AttentionLayout<T>& layout,
            bool is_linear) {
    if (is_linear) products.take(workspace, layout.products(), layout.d_v, true);
    if (is_linear && params.is_causal) {
      growing = Moments<T>::take(workspace, PanelGroups::for_chunks(layout.products()).together,
                                 layout.d_v, false, true);
    }
    keys.take(workspace, layout, true);
    sweep.take(workspace, layout);
    tokens = workspace.take<T>(layout.feature.token_panels() * kPanel * kPanel);
    grad_x = workspace.take<T>(layout.feature.token_panels() * kPanel * kPanel);
    output = workspace.take<T>(layout.value_panels() * kPanel * kPanel);
    if (layout.bfloat16_products) {
      grad_out = workspace.take<T>(layout.value_panels() * kPanel * kPanel);
      narrow_ds = workspace.take<int32_t>(kPanel * kPanel);
      narrow_ds_by_row = workspace.take<int32_t>(kPanel / 2 * kPanel);
      narrow_w_by_row = workspace.take<int32_t>(kPanel / 2 * kPanel);
    }
    T** tiles[] = {&angles, &s, &w, &dp, &bias, &keep};
    for (T** tile : tiles) *tile = workspace.take<T>(kPanel * kPanel);
  }
};

// The sizes that every step of the backward needs beside the layout.
template <typename T>
struct BackwardPlan {
  const AttentionBackwardParams& params;
  AttentionLayout<T> layout;
  int64_t query_blocks;  // per head
  int64_t key_sweeps;    // of kBackwardKeyBlocks * 64 keys
  int64_t query_chunks;  // per head, of frequency_tokens
  int64_t key_chunks;
  int64_t frequency_tokens;
  bool is_linear;

  BackwardPlan(const AttentionBackwardParams& call, const Route& route)
      : params(call),
        layout(call),
        query_blocks(ceil_div(call.L, kBackwardRows)),
        key_sweeps(ceil_div(layout.key_blocks, kBackwardKeyBlocks)),
        frequency_tokens(max_of(kFrequencyTokens, round_up(4 * call.d, kSweepKeys))),
        is_linear(!kTakes16Bits<T> && route.is_linear) {
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

template <typename T>
inline bool is_quadratic(const BackwardPlan<T>& plan, const BackwardUnit<T>& state, int64_t head,
                         int64_t index) {
  return !state.linear.keys.is_taken ||
         state.linear.by_pairs[head * plan.query_blocks + index] != 0;
}

// Clears dphi_q of one block of queries, and its count of sweeps.
template <typename T>
void clear_query_gradients(const BackwardPlan<T>& plan, int64_t head, int64_t index,
                           BackwardUnit<T>& state) {
  const int64_t L = plan.params.L, panels = plan.layout.feature_panels();
  const int64_t i0 = index * kBackwardRows, rows = min_of(kBackwardRows, L - i0);
  for (int64_t panel = 0; panel < panels; ++panel) {
    __builtin_memset(state.grad_phi_q + ((head * panels + panel) * L + i0) * kPanel, 0,
                     rows * kPanel * sizeof(T));
  }
  if (plan.layout.bfloat16_products) {
    __builtin_memset(state.narrow.row_sums + (head * L + i0) * kLanes<float>, 0,
                     rows * kLanes<float> * sizeof(float));
  }
  state.progress[head * plan.query_blocks + index] = 0;
}

// Computes the weighted mean of the keys' features, the centre from which they differ least: the
// sum of sqrt(e_j) phi_kj sqrt(e_j) over the sum of e_j.
template <typename T>
void find_centre(const BackwardPlan<T>& plan, const BackwardUnit<T>& state) {
  if constexpr (kTakes16Bits<T>) {
    const AttentionLayout<T>& layout = plan.layout;
    const T* roots = state.keys.feature_scales;
    float weight = 0;
    for (int64_t j = 0; j < plan.params.S; ++j) weight += roots[j] * roots[j];
    const float share = weight > 0 ? 1 / weight : 0;
    for (int64_t panel = 0; panel < layout.feature_panels(); ++panel) {
      const T* features = state.keys.features + panel * layout.padded_keys * kPanel;
      for (int64_t c = 0; c < layout.feature.columns(panel); c += kLanes<T>) {
        Vec<T> sum{};
        for (int64_t j = 0; j < plan.params.S; ++j) {
          sum += roots[j] * load(features + j * kPanel + c);
        }
        store<T>(state.narrow.centre + panel * kPanel + c, sum * share);
      }
    }
  }
}

// Adds the centre times sum_of(r) to the gradients of `rows` features, [feature
// panels][panel_rows][64], where features are rounded.
template <typename T, typename SumOf>
void add_centre(const AttentionLayout<T>& layout, const NarrowQueries& narrow, int64_t rows,
                T* gradients, int64_t panel_rows, const SumOf& sum_of) {
  if constexpr (kTakes16Bits<T>) {
    if (!layout.bfloat16_products) return;
    for (int64_t r = 0; r < rows; ++r) {
      const T sum = sum_of(r);
      for (int64_t panel = 0; panel < layout.feature_panels(); ++panel) {
        T* row = gradients + (panel * panel_rows + r) * kPanel;
        for (int64_t c = 0; c < layout.feature.columns(panel); c += kLanes<T>) {
          store<T>(row + c, load(row + c) + sum * load(narrow.centre + panel * kPanel + c));
        }
      }
    }
  }
}

// Packs one block of queries as the products over pairs read it, from phi [feature panels][L][64]
// and grad_out [value panels][64][64].
template <typename T>
void narrow_queries(const AttentionLayout<T>& layout, int64_t L, int64_t head,
                    const QueryBlock& block, const T* phi, const NarrowQueries& narrow,
                    const T* grad_out) {
  if constexpr (kTakes16Bits<T>) {
    const int64_t i0 = block.i0, pairs = ceil_div(L, 2);
    if (!layout.narrow_scores) return;
    narrow_query_features(layout, block.rows, phi, L, narrow.steps + head * L + i0,
                          narrow.phi + (head * layout.scores().panels() * L + i0) * kPanel);
    if (!layout.bfloat16_products) return;
    for (int64_t panel = 0; panel < layout.feature_panels(); ++panel) {
      const int64_t row = (head * layout.feature_panels() + panel) * pairs + i0 / 2;
      stack_rows(block.rows, layout.feature.columns(panel), phi + panel * L * kPanel, nullptr,
                 narrow.phi_by_row + row * kPanel, narrow.centre + panel * kPanel);
    }
    for (int64_t panel = 0; panel < layout.value_panels(); ++panel) {
      const int64_t row = (head * layout.value_panels() + panel) * pairs + i0 / 2;
      stack_rows(block.rows, min_of(kPanel, layout.d_v - panel * kPanel),
                 grad_out + panel * kPanel * kPanel, nullptr,
                 narrow.grad_out_by_row + row * kPanel);
    }
    for (int64_t panel = 0; panel < layout.narrow_value_panels(); ++panel) {
      const int64_t row = (head * layout.narrow_value_panels() + panel) * L + i0;
      join_columns(block.rows, min_of(2 * kPanel, layout.d_v - panel * 2 * kPanel),
                   grad_out + panel * 2 * kPanel * kPanel, kPanel, narrow.grad_out + row * kPanel);
    }
  }
}

// Computes features, scaled dO and delta of one block of queries.
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
  const bool is_narrow = layout.bfloat16_products;
  const int64_t grad_rows = is_narrow ? kPanel : L;
  T* grad_out = is_narrow ? scratch.grad_out
                          : state.grad_out + (head * layout.value_panels() * L + block.i0) * kPanel;
  uint8_t* poisoned = state.rows.poisoned + first_row;
  prepare_queries(params, layout, block, frequencies.of(unit, layout.feature), scratch.tokens, phi,
                  L, poisoned, state.tangents.from(first_row));
  clear_query_gradients(plan, head, index, state);

  const auto offset = [&](const Array& array) {
    return block.b * array.stride[0] + block.h * array.stride[1] + block.i0 * array.stride[2];
  };
  const Array &output = params.output, &gradient = params.grad_output;
  load_panels(gradient, offset(gradient), gradient.stride[2], gradient.stride[3], block.rows,
              params.d_v, grad_out, grad_rows);
  if (layout.rounds_inputs) round_to_bfloat16(block.rows, params.d_v, grad_rows, grad_out);
  load_panels(output, offset(output), output.stride[2], output.stride[3], block.rows, params.d_v,
              scratch.output, kPanel);
  for (int64_t r = 0; r < block.rows; ++r) {
    Vec<T> products{};
    for (int64_t first = 0; first < params.d_v; first += kPanel) {
      for (int64_t c = 0; c < min_of(kPanel, params.d_v - first); c += kLanes<T>) {
        products += load(scratch.output + first * kPanel + r * kPanel + c) *
                    load(grad_out + first * grad_rows + r * kPanel + c);
      }
    }
    const double log_normalizer = load_element<double>(
        params.log_normalizer, offset(params.log_normalizer) + r * params.log_normalizer.stride[2]);
    const double relative = log_normalizer - state.keys.form.reference;
    const T mean =
        params.grad_weights ? load_element<T>(output, offset(output) + r * output.stride[2]) : T(0);
    T delta = params.grad_weights ? mean : sum_of_lanes<T>(products);
    const bool sees_nothing = log_normalizer == -infinity<double>();
    T factor = state.keys.form.folded ? static_cast<T>(exponential(-relative)) : T(1);
    if (sees_nothing) delta = factor = 0;
    delta *= factor;
    poisoned[r] =
        !sees_nothing && (poisoned[r] || !is_finite(delta) || !is_finite(log_normalizer) ||
                          !row_is_finite(grad_out, grad_rows, r, params.d_v));
    if (poisoned[r] || sees_nothing) {
      delta = factor = 0;
      fill_row(phi, L, r, layout.feature_panels() * kPanel, T(0));
      fill_row(grad_out, grad_rows, r, layout.value_panels() * kPanel, T(0));
      state.tangents.clear(layout.feature, first_row + r);
    } else if (factor != 1 && !is_narrow) {
      for (int64_t first = 0; first < params.d_v; first += kPanel) {
        T* row = grad_out + first * L + r * kPanel;
        for (int64_t c = 0; c < kPanel; c += kLanes<T>) store<T>(row + c, load(row + c) * factor);
      }
    }
    if (state.rows.mean) {
      state.rows.mean[first_row + r] = mean;
      delta = 0;
    }
    state.rows.delta[first_row + r] = delta;
    state.rows.factor[first_row + r] = factor;
    const bool left_out = poisoned[r] || sees_nothing;
    const T rounded = left_out ? infinity<T>() : static_cast<T>(relative);
    state.rows.log_normalizer[first_row + r] = rounded;
    state.rows.log_normalizer_rest[first_row + r] =
        left_out ? T(0) : static_cast<T>(relative - static_cast<double>(rounded));
  }
  narrow_queries(layout, L, head, block, phi, state.narrow, scratch.grad_out);
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
