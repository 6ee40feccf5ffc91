// The last steps of the backward pass: from the gradients of features to tokens and frequencies.
#pragma once

#include "attention/cpu/backward/state.h"
#include "attention/cpu/features/frequency_sums.h"

namespace ikattn::IKATTN_ISA {
namespace {

// Loads up to 64 tokens. Tokens with marks[r] == left_out become zero: their gradient is NaN
// already where anything sees them, and must be zero where nothing does.
template <typename T>
void load_clean_tokens(const Array& array, int64_t offset, int64_t rows, int64_t d, const T* marks,
                       T left_out, T* tokens) {
  load_panels(array, offset, array.stride[2], array.stride[3], rows, d, tokens, kPanel);
  for (int64_t r = 0; r < rows; ++r) {
    if (marks[r] == left_out) fill_row(tokens, kPanel, r, d, T(0));
  }
}

// Computes dq and the gradients of frequencies from dphi, for tokens [begin, end) of one query
// head.
template <typename T>
void finish_queries(const BackwardPlan<T>& plan, const Unit& unit, int64_t head, int64_t begin,
                    int64_t end, const PackedFrequencies<T>& frequencies, BackwardUnit<T>& state,
                    T* partial, const BackwardScratch<T>& scratch) {
  const AttentionBackwardParams& params = plan.params;
  const AttentionLayout<T>& layout = plan.layout;
  const int64_t head_size = layout.feature_panels() * params.L * kPanel;
  const T* phi = state.phi + head * head_size;
  T* grad_phi = state.grad_phi_q + head * head_size;
  const int64_t h = unit.first_query_head + head;
  for (int64_t i0 = begin; i0 < end; i0 += kPanel) {
    const int64_t rows = min_of(kPanel, end - i0);
    const Array& query = params.query;
    load_clean_tokens(query, unit.b * query.stride[0] + h * query.stride[1] + i0 * query.stride[2],
                      rows, params.d, state.rows.log_normalizer + head * params.L + i0,
                      infinity<T>(), scratch.tokens);
    const float* row_sums = state.narrow.row_sums + (head * params.L + i0) * kLanes<float>;
    add_centre(layout, state.narrow, rows, grad_phi + i0 * kPanel, params.L,
               [&](int64_t r) { return sum_of_lanes<float>(load(row_sums + r * kLanes<float>)); });
    features_backward<T>(layout.feature, rows, scratch.tokens, kPanel,
                         frequencies.transposed_of(unit, layout.feature), phi + i0 * kPanel,
                         params.L, state.tangents.from(head * params.L + i0), T(2),
                         grad_phi + i0 * kPanel, params.L,
                         params.grad_query ? scratch.grad_x : nullptr, partial, scratch.angles);
    if (const Array& out = params.grad_query) {
      store_panels(out, unit.b * out.stride[0] + h * out.stride[1] + i0 * out.stride[2],
                   out.stride[2], out.stride[3], rows, params.d, scratch.grad_x, rows);
    }
  }
}

// Adds magnitude_scale dg d|k|_p^2 to dk of one row.
template <typename T>
void add_magnitude_gradient(const AttentionParams& params, T grad_logit, const T* tokens, int64_t r,
                            int64_t rows, T* grad_x, T* key_row, T* grad_row) {
  if (params.p == 0 || grad_logit == 0) return;
  const T factor = static_cast<T>(params.magnitude_scale) * grad_logit;
  for (int64_t first = 0; first < params.d; first += kPanel) {
    copy_row(tokens + first * kPanel + r * kPanel, key_row + first);
    copy_row(grad_x + first * rows + r * kPanel, grad_row + first);
  }
  add_squared_norm_gradient(key_row, params.d, params.p, factor, grad_row);
  for (int64_t first = 0; first < params.d; first += kPanel) {
    copy_row(grad_row + first, grad_x + first * rows + r * kPanel);
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
    const Array &key = params.key, &out = params.grad_key;
    const int64_t at = unit.b * out.stride[0] + unit.head * out.stride[1] + j0 * out.stride[2];
    if (state.keys.is_hidden[j0 / kPanel]) {
      if (!out) continue;
      for (int64_t r = 0; r < rows; ++r) fill_row(scratch.grad_x, rows, r, params.d, T(0));
      store_panels(out, at, out.stride[2], out.stride[3], rows, params.d, scratch.grad_x, rows);
      continue;
    }
    load_clean_tokens(key, unit.b * key.stride[0] + unit.group * key.stride[1] + j0 * key.stride[2],
                      rows, params.d, state.keys.feature_scales + j0, T(0), scratch.tokens);
    T* grad_phi = state.grad_phi_k + j0 % state.held_keys * kPanel;
    add_centre(layout, state.narrow, rows, grad_phi, state.held_keys,
               [&](int64_t r) { return state.narrow.key_sums[j0 + r]; });
    features_backward<T>(layout.feature, rows, scratch.tokens, kPanel,
                         frequencies.transposed_of(unit, layout.feature),
                         state.keys.features + j0 * kPanel, layout.padded_keys,
                         state.keys.tangents.from(j0), T(2), grad_phi, state.held_keys,
                         params.grad_key ? scratch.grad_x : nullptr, partial, scratch.angles);
    if (!out) continue;
    T* rows_on_side = scratch.keys.tokens;  // two rows of d
    for (int64_t r = 0; r < rows; ++r) {
      add_magnitude_gradient(params, state.grad_logit[j0 + r], scratch.tokens, r, rows,
                             scratch.grad_x, rows_on_side,
                             rows_on_side + round_up(params.d, kPanel));
    }
    store_panels(out, at, out.stride[2], out.stride[3], rows, params.d, scratch.grad_x, rows);
  }
}

// Computes one chunk of one unit's tokens: keys first, then queries of its heads. partial is its
// gradient of the packed frequencies, overwritten; null: not wanted.
template <typename T>
void finish_chunk(const BackwardPlan<T>& plan, const Unit& unit, int64_t chunk,
                  const PackedFrequencies<T>& frequencies, BackwardUnit<T>& state, T* partial,
                  const BackwardScratch<T>& scratch) {
  if (partial) __builtin_memset(partial, 0, plan.layout.feature.packed_size() * sizeof(T));
  if (chunk < plan.key_chunks) {
    const int64_t begin = chunk * plan.frequency_tokens;
    finish_keys(plan, unit, begin, min_of(plan.params.S, begin + plan.frequency_tokens),
                frequencies, state, partial, scratch);
  } else {
    const int64_t index = chunk - plan.key_chunks;
    const int64_t begin = index % plan.query_chunks * plan.frequency_tokens;
    finish_queries(plan, unit, index / plan.query_chunks, begin,
                   min_of(plan.params.L, begin + plan.frequency_tokens), frequencies, state,
                   partial, scratch);
  }
}

// Adds one chunk to its unit's frequency gradient; chunks are added in order.
template <typename T>
void add_chunk(const BackwardPlan<T>& plan, int64_t chunk, const T* partial, T* sum) {
  const int64_t size = plan.layout.feature.packed_size();
  if (chunk == 0) __builtin_memset(sum, 0, size * sizeof(T));
  add_packed(size, partial, sum);
}

// Unpacks the gradients of frequencies.
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

}  // namespace
}  // namespace ikattn::IKATTN_ISA
