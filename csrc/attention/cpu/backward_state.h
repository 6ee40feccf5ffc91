// What the backward pass keeps of a unit, and how the query side gets there.
#pragma once

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
  Tangents<T> tangents;     // [feature panels][heads][L][32]
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
    tangents = {workspace.take<T>(Tangents<T>::size(layout.feature, heads * L)), heads * L};
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
                  L, poisoned, state.tangents.from(first_row));
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
      state.tangents.clear(layout.feature, first_row + r);
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

}  // namespace
}  // namespace ikattn::IKATTN_ISA
