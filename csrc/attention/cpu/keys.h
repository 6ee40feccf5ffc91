// The key side of one unit: a batch item and a key head, whose prepared keys serve one query head
// or, with grouped heads, several.
//
// Two forms of the weight, chosen per unit:
//   folded    w = s'^2 + eps e_j, e_j = exp(g_j - max g), sqrt(e_j) inside phi(k_j), s' = phi_q .
//   phi_k':
//             no exponential per pair. Right where every row sees the largest key (no mask, not
//             causal) or the spread of g is too small for anything to underflow.
//   general   w = (s^2 + eps) exp(g_j + mask_ij - m_i), m_i the running maximum of the row.
#pragma once

#include "attention/cpu/features.h"
#include "attention/cpu/magnitude.h"
#include "attention/cpu/tiles.h"

namespace ikattn::IKATTN_ISA {
namespace {

// Largest max g - min g at which w of every key stays a normal number, with room for s^2 down to
// 1e-12.
template <typename T>
constexpr double kFoldableSpread = sizeof(T) == 4 ? 50 : 500;

// phi / (2 sqrt M), so that s = phi_q . phi_k needs no further factor.
template <typename T>
inline T feature_scale(int64_t M) {
  return T(1) / square_root(static_cast<T>(M));
}

template <typename T>
struct AttentionLayout {
  FeatureLayout<T> feature;
  int64_t d_v = 0;
  int64_t key_blocks = 0;   // of 64 keys
  int64_t padded_keys = 0;  // key_blocks * 64
  int64_t heads_per_unit = 0;
  int64_t units = 0;  // B * key_heads

  explicit AttentionLayout(const AttentionParams& params)
      : feature{params.d, params.M, params.stationary()},
        d_v(params.d_v),
        key_blocks(ceil_div(params.S, kPanel)),
        padded_keys(key_blocks * kPanel),
        heads_per_unit(params.H / params.key_heads),
        units(params.B * params.key_heads) {}

  int64_t value_panels() const { return ceil_div(d_v, kPanel); }
  int64_t feature_panels() const { return feature.panels(); }
};

// One unit's place in the call.
struct Unit {
  int64_t b = 0;
  int64_t head = 0;           // key head
  int64_t group = 0;          // key/value head
  int64_t frequency_set = 0;  // which packed frequencies
  int64_t first_query_head = 0;
};

template <typename T>
inline Unit unit_at(const AttentionParams& params, const AttentionLayout<T>& layout,
                    int64_t index) {
  Unit unit;
  unit.b = index / params.key_heads;
  unit.head = index % params.key_heads;
  unit.group = unit.head * params.G / params.key_heads;
  const int64_t frequency_head = unit.head * params.frequency_heads / params.key_heads;
  const int64_t frequency_batch = params.frequency_batches > 1 ? unit.b : 0;
  unit.frequency_set = frequency_batch * params.frequency_heads + frequency_head;
  unit.first_query_head = unit.head * layout.heads_per_unit;
  return unit;
}

// The largest and smallest logit of the keys that are neither hidden nor poisoned decide the form.
struct KeyForm {
  bool folded = true;
  double reference =
      0;  // subtracted from every g before it is rounded to T: the largest, if folded
};

template <typename T>
KeyForm choose_form(const AttentionParams& params, const double* logits) {
  double largest = -infinity<double>(), smallest = infinity<double>();
  for (int64_t j = 0; j < params.S; ++j) {
    if (!is_finite(logits[j])) continue;
    largest = logits[j] > largest ? logits[j] : largest;
    smallest = logits[j] < smallest ? logits[j] : smallest;
  }
  const bool all_rows_see_all_keys = !params.mask && !params.is_causal;
  const bool float_mask = params.mask && params.mask.type != ElementType::kBool;
  KeyForm form;
  form.reference = is_finite(largest) ? largest : 0.0;
  form.folded = !float_mask && (all_rows_see_all_keys || largest == -infinity<double>() ||
                                largest - smallest <= kFoldableSpread<T>);
  // The largest g may be that of a hidden key, and so far from the others that the distance rounds
  // them off.
  if (!form.folded) form.reference = 0;
  return form;
}

// Prepared keys of one unit. Padded, hidden and poisoned keys have zero features and a zero value
// row; a poisoned one has a NaN weight term, so that exactly the rows that see it turn NaN.
template <typename T>
struct PreparedKeys {
  KeyForm form;
  T* logits = nullptr;              // [padded_keys]       g_j - reference
  T* weight_terms = nullptr;        // [padded_keys]       folded: eps e_j
  T* feature_scales = nullptr;      // [padded_keys]       folded: sqrt(e_j); 0 where phi is zero
  T* features_by_column = nullptr;  // [key_blocks][feature panels][64][64]   phi^T of each block
  T* features_by_row = nullptr;     // [feature panels][padded_keys][64]      backward only
  Tangents<T> tangents;             // [feature panels][padded_keys][32]      backward only
  T* values = nullptr;              // [value panels][padded_keys][64]        forward only
  T* values_by_column = nullptr;    // [key_blocks][value panels][64][64]     backward only

  void take(Workspace& workspace, const AttentionLayout<T>& layout, bool backward) {
    logits = workspace.take<T>(layout.padded_keys);
    weight_terms = workspace.take<T>(layout.padded_keys);
    feature_scales = workspace.take<T>(layout.padded_keys);
    const int64_t feature_size = layout.feature_panels() * layout.padded_keys * kPanel;
    const int64_t value_size = layout.value_panels() * layout.padded_keys * kPanel;
    features_by_column = workspace.take<T>(feature_size);
    if (backward) {
      features_by_row = workspace.take<T>(feature_size);
      tangents = {workspace.take<T>(Tangents<T>::size(layout.feature, layout.padded_keys)),
                  layout.padded_keys};
      values_by_column = workspace.take<T>(value_size);
    } else {
      values = workspace.take<T>(value_size);
    }
  }
  const T* block_features(const AttentionLayout<T>& layout, int64_t block) const {
    return features_by_column + block * layout.feature_panels() * kPanel * kPanel;
  }
  const T* block_values(const AttentionLayout<T>& layout, int64_t block) const {
    return values_by_column + block * layout.value_panels() * kPanel * kPanel;
  }
};

// Scratch of prepare_keys: tokens, features or values of one block of 64 keys.
template <typename T>
struct KeyScratch {
  T* tokens = nullptr;    // [token panels][64][64]
  T* features = nullptr;  // [feature panels][64][64]
  T* values = nullptr;    // [value panels][64][64]

  void take(Workspace& workspace, const AttentionLayout<T>& layout) {
    tokens = workspace.take<T>(layout.feature.token_panels() * kPanel * kPanel);
    features = workspace.take<T>(layout.feature_panels() * kPanel * kPanel);
    values = workspace.take<T>(layout.value_panels() * kPanel * kPanel);
  }
};

// The logits g of a block, relative to the reference, and the weight terms: e_j, sqrt(e_j).
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

// Fills block `block` of `keys` from the unit's logits g [S].
template <typename T>
void prepare_keys(const AttentionParams& params, const AttentionLayout<T>& layout, const Unit& unit,
                  int64_t block, const double* logits, const T* packed,
                  const KeyScratch<T>& scratch, const PreparedKeys<T>& keys) {
  const int64_t j0 = block * kPanel;
  const int64_t count = min_of(kPanel, params.S - j0);
  const int64_t rows = round_up(count, kLanes<T>);  // what the tiles of this block read
  const int64_t panel_rows = layout.padded_keys;
  const FeatureLayout<T>& feature = layout.feature;
  prepare_weight_terms(params, logits, keys, j0, count);

  const Array& key = params.key;
  load_panels(key, unit.b * key.stride[0] + unit.group * key.stride[1] + j0 * key.stride[2],
              key.stride[2], key.stride[3], count, params.d, scratch.tokens, kPanel);
  for (int64_t r = count; r < rows; ++r) fill_row(scratch.tokens, kPanel, r, params.d, T(0));
  features(feature, rows, scratch.tokens, kPanel, packed, feature_scale<T>(params.M),
           keys.feature_scales + j0, scratch.features, kPanel, keys.tangents.from(j0));

  if (params.value) {
    const Array& value = params.value;
    load_panels(value,
                unit.b * value.stride[0] + unit.group * value.stride[1] + j0 * value.stride[2],
                value.stride[2], value.stride[3], count, params.d_v, scratch.values, kPanel);
    for (int64_t r = count; r < rows; ++r) fill_row(scratch.values, kPanel, r, params.d_v, T(0));
  }

  const int64_t feature_columns = layout.feature_panels() * kPanel;
  const bool all_finite =
      rows_are_finite(scratch.features, kPanel, count, feature.width()) &&
      (!params.value || rows_are_finite(scratch.values, kPanel, count, params.d_v));
  for (int64_t r = 0; r < count; ++r) {  // rows past the last key are zero already
    const int64_t j = j0 + r;
    const bool hidden = keys.logits[j] == -infinity<T>();
    if (all_finite && is_finite(keys.logits[j])) continue;
    const bool clean = row_is_finite(scratch.features, kPanel, r, feature.width()) &&
                       (!params.value || row_is_finite(scratch.values, kPanel, r, params.d_v)) &&
                       is_finite(keys.logits[j]);
    if (clean) continue;
    keys.feature_scales[j] = 0;
    fill_row(scratch.features, kPanel, r, feature_columns, T(0));
    keys.tangents.clear(feature, j);
    if (params.value) fill_row(scratch.values, kPanel, r, params.d_v, T(0));
    if (!hidden) keys.logits[j] = keys.weight_terms[j] = not_a_number<T>();
  }

  for (int64_t panel = 0; panel < layout.feature_panels(); ++panel) {
    const T* tile = scratch.features + panel * kPanel * kPanel;
    transpose_panel(
        rows, feature.columns(panel), tile,
        keys.features_by_column + (block * layout.feature_panels() + panel) * kPanel * kPanel);
    if (keys.features_by_row) {
      __builtin_memcpy(keys.features_by_row + (panel * panel_rows + j0) * kPanel, tile,
                       rows * kPanel * sizeof(T));
    }
  }
  if (!params.value) return;
  for (int64_t panel = 0; panel < layout.value_panels(); ++panel) {
    const T* tile = scratch.values + panel * kPanel * kPanel;
    if (keys.values) {
      __builtin_memcpy(keys.values + (panel * panel_rows + j0) * kPanel, tile,
                       rows * kPanel * sizeof(T));
    } else {
      transpose_panel(
          rows, min_of(kPanel, params.d_v - panel * kPanel), tile,
          keys.values_by_column + (block * layout.value_panels() + panel) * kPanel * kPanel);
    }
  }
}

// s [rows][64] = phi_q . phi_k of one block; phi_q [feature panels][q_rows][64].
template <typename T>
inline void scores(const AttentionLayout<T>& layout, int64_t rows, const T* phi_q, int64_t q_rows,
                   const T* block_features, int64_t keys_in_block, T* s) {
  for (int64_t panel = 0; panel < layout.feature_panels(); ++panel) {
    panel_gemm<T, Left::kRows>(rows, keys_in_block, layout.feature.columns(panel),
                               phi_q + panel * q_rows * kPanel,
                               block_features + panel * kPanel * kPanel, s, panel > 0);
  }
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
