// Preparation of a unit's keys: from tokens to the arrays that the pairs read.
#pragma once

#include "attention/cpu/features/magnitude.h"
#include "attention/cpu/keys/key_arrays.h"
#include "attention/cpu/keys/visibility.h"

namespace ikattn::IKATTN_ISA {
namespace {

// Computes the logits g of a block, relative to the reference, and the weight terms e_j and
// sqrt(e_j).
template <typename T>
void prepare_weight_terms(const AttentionParams& params, const double* logits,
                          const PreparedKeys<T>& keys, int64_t j0, int64_t count) {
  for (int64_t j = j0; j < j0 + kPanel; ++j) {
    keys.logits[j] =
        j < j0 + count ? static_cast<T>(logits[j] - keys.form.reference) : -infinity<T>();
    const bool hidden = keys.logits[j] == -infinity<T>();
    T root = hidden ? T(0) : T(1);
    if (keys.form.folded && !hidden) root = exponential(keys.logits[j] * T(0.5));
    keys.feature_scales[j] = root;
    keys.weight_terms[j] = static_cast<T>(params.eps) * root * root;
  }
}

// Loads the values of the block at key j0, [value panels][64][64], zero past the last key up to
// whole vectors.
template <typename T>
void load_values(const AttentionParams& params, const AttentionLayout<T>& layout, const Unit& unit,
                 int64_t j0, T* values) {
  const Array& value = params.value;
  const int64_t count = min_of(kPanel, params.S - j0);
  load_panels(value, unit.b * value.stride[0] + unit.group * value.stride[1] + j0 * value.stride[2],
              value.stride[2], value.stride[3], count, params.d_v, values, kPanel);
  if (layout.rounds_inputs) round_to_bfloat16(count, params.d_v, kPanel, values);
  for (int64_t r = count; r < round_up(count, kLanes<T>); ++r) {
    fill_row(values, kPanel, r, params.d_v, T(0));
  }
}

// Loads the values of a block, zero for keys that are left out.
template <typename T>
void load_counted_values(const AttentionParams& params, const AttentionLayout<T>& layout,
                         const Unit& unit, int64_t j0, const PreparedKeys<T>& keys, T* values) {
  load_values(params, layout, unit, j0, values);
  for (int64_t r = 0; r < min_of(kPanel, params.S - j0); ++r) {
    if (keys.feature_scales[j0 + r] == 0) fill_row(values, kPanel, r, params.d_v, T(0));
  }
}

// Stores the values as the forward pass reads them.
template <typename T>
void store_values(const AttentionLayout<T>& layout, int64_t j0, int64_t rows, const T* values,
                  const PreparedKeys<T>& keys) {
  for (int64_t panel = 0; panel < layout.value_panels(); ++panel) {
    const T* tile = values + panel * kPanel * kPanel;
    const int64_t at = (panel * layout.padded_keys + j0) * kPanel;
    if constexpr (kTakes16Bits<T>) {
      if (layout.weight_parts > 0) {
        stack_rows(rows, min_of(kPanel, layout.d_v - panel * kPanel), tile, nullptr,
                   keys.narrow_values + at / 2);
        continue;
      }
    }
    __builtin_memcpy(keys.values + at, tile, rows * kPanel * sizeof(T));
    if constexpr (std::is_same_v<T, float>) {
      if (layout.pairs_values()) pair_rows(rows, tile, keys.row_pairs(j0));
    }
  }
}

// Computes the features phi [feature panels][phi_rows][64] of the block at key j0, times the root
// of e_j, and its values in the scratch. Keys that are not finite get rows of zeros, and are marked
// in `keys`.
template <typename T>
void load_block(const AttentionParams& params, const AttentionLayout<T>& layout, const Unit& unit,
                int64_t j0, int64_t rows, const T* packed, const KeyScratch<T>& scratch,
                const PreparedKeys<T>& keys, T* phi, int64_t phi_rows) {
  const int64_t count = min_of(kPanel, params.S - j0);
  const FeatureLayout<T>& feature = layout.feature;
  const Array& key = params.key;
  load_panels(key, unit.b * key.stride[0] + unit.group * key.stride[1] + j0 * key.stride[2],
              key.stride[2], key.stride[3], count, params.d, scratch.tokens, kPanel);
  for (int64_t r = count; r < rows; ++r) fill_row(scratch.tokens, kPanel, r, params.d, T(0));
  features(feature, rows, scratch.tokens, kPanel, packed, feature_scale<T>(params.M),
           keys.feature_scales + j0, phi, phi_rows, keys.tangents.from(j0));
  if (params.value) load_values(params, layout, unit, j0, scratch.values);

  const bool all_finite =
      rows_are_finite(phi, phi_rows, count, feature.width()) &&
      (!params.value || rows_are_finite(scratch.values, kPanel, count, params.d_v));
  for (int64_t r = 0; r < count; ++r) {  // rows past the last key are zero already
    const int64_t j = j0 + r;
    const bool hidden = keys.logits[j] == -infinity<T>();
    if (all_finite && is_finite(keys.logits[j])) continue;
    const bool clean = row_is_finite(phi, phi_rows, r, feature.width()) &&
                       (!params.value || row_is_finite(scratch.values, kPanel, r, params.d_v)) &&
                       is_finite(keys.logits[j]);
    if (clean) continue;
    keys.feature_scales[j] = 0;
    fill_row(phi, phi_rows, r, layout.feature_panels() * kPanel, T(0));
    keys.tangents.clear(feature, j);
    if (params.value) fill_row(scratch.values, kPanel, r, params.d_v, T(0));
    if (!hidden) keys.logits[j] = keys.weight_terms[j] = not_a_number<T>();
  }
}

// Fills block `block` of `keys` from the unit's logits g [S].
template <typename T>
void prepare_keys(const AttentionParams& params, const AttentionLayout<T>& layout, const Unit& unit,
                  int64_t block, const double* logits, const T* packed,
                  const KeyScratch<T>& scratch, const PreparedKeys<T>& keys) {
  const int64_t j0 = block * kPanel;
  const int64_t count = min_of(kPanel, params.S - j0);
  const int64_t rows = round_up(count, kLanes<T>);  // what the tiles of this block read
  const bool backward = keys.features != nullptr;
  T* phi = backward ? keys.features + j0 * kPanel : scratch.features;
  const int64_t phi_rows = backward ? layout.padded_keys : kPanel;
  prepare_weight_terms(params, logits, keys, j0, count);

  bool is_hidden = true;
  for (int64_t j = j0; j < j0 + count; ++j) is_hidden &= keys.logits[j] == -infinity<T>();
  keys.is_hidden[block] = is_hidden;
  if (is_hidden) {
    for (int64_t r = 0; r < rows; ++r) {
      fill_row(phi, phi_rows, r, layout.feature_panels() * kPanel, T(0));
      fill_row(scratch.values, kPanel, r, params.d_v, T(0));
      if (backward) keys.tangents.clear(layout.feature, j0 + r);
    }
  } else {
    load_block(params, layout, unit, j0, rows, packed, scratch, keys, phi, phi_rows);
  }
  if (backward) return;
  keys.by_column.fill(layout, block, rows, phi, phi_rows, scratch.lanes);
  if (params.value) store_values(layout, j0, rows, scratch.values, keys);
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
