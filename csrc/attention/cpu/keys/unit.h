// The key side of one unit: a batch item and a key head, whose prepared keys serve one query head
// or, with grouped heads, several.
//
// Two forms of the weight, chosen per unit:
//   folded    w = s'^2 + eps e_j with e_j = exp(g_j - max g), whose root is a factor of phi(k_j):
//             no exponential per pair. Right where every row sees the largest key (no mask, not
//             causal) or the spread of g is too small for anything to underflow.
//   general   w = (s^2 + eps) exp(g_j + mask_ij - m_i), m_i the running maximum of the row. Always
//             where calls are batch-invariant: max g may be that of a key that a row does not see.
#pragma once

#include "attention/calls/params.h"
#include "attention/cpu/features/feature_products.h"
#include "attention/cpu/features/score_features.h"
#include "attention/cpu/route.h"

namespace ikattn::IKATTN_ISA {
namespace {

// The largest max g - min g at which w of every key stays a normal number, with room for s^2 down
// to 1e-12.
template <typename T>
constexpr double kFoldableSpread = sizeof(T) == 4 ? 50 : 500;
// The largest spread where products in bfloat16 read numbers that are not normal as zero: it has
// room for values.
constexpr double kNarrowFoldableSpread = 20;

// Returns the scale of features, phi / (2 sqrt M), with which s = phi_q . phi_k needs no further
// factor.
template <typename T>
inline T feature_scale(int64_t M) {
  return T(1) / square_root(static_cast<T>(M));
}

// Tells whether arithmetic in T may multiply numbers of 16 bits, two to a lane.
template <typename T>
constexpr bool kTakes16Bits = kHasInt16 && sizeof(T) == 4;

template <typename T>
struct AttentionLayout {
  FeatureLayout<T> feature;
  int64_t d_v = 0;
  int64_t key_blocks = 0;   // of 64 keys
  int64_t padded_keys = 0;  // key_blocks * 64
  int64_t heads_per_unit = 0;
  int64_t units = 0;               // B * key_heads
  bool narrow_scores = false;      // features two to a lane, for the scores
  bool bfloat16_products = false;  // and what the backward multiplies over pairs in bfloat16
  bool rounds_inputs = false;      // values and dO, which are float32
  int weight_parts = 0;  // numbers of bfloat16 that the forward takes for a weight; 0: float32

  explicit AttentionLayout(const AttentionParams& params)
      : feature{params.d, params.M, params.stationary()},
        d_v(params.d_v),
        key_blocks(ceil_div(params.S, kPanel)),
        padded_keys(key_blocks * kPanel),
        heads_per_unit(params.H / params.key_heads),
        units(params.B * params.key_heads),
        narrow_scores(kTakes16Bits<T> && takes_16_bits(params)),
        bfloat16_products(kHasBFloat16 && narrow_scores),
        rounds_inputs(bfloat16_products && params.allow_bfloat16),
        weight_parts(!bfloat16_products ? 0
                     : rounds_inputs    ? 1
                     : kHasAmx          ? 2
                                        : 0) {}

  int64_t value_panels() const { return ceil_div(d_v, kPanel); }
  // Tells whether a row of values fills no more than half a vector. The backward then sums dV by
  // column, and the forward in float32 packs two rows to a vector (row_pairs.h).
  bool has_half_values() const { return d_v > 0 && 2 * d_v <= kLanes<T>; }
  bool pairs_values() const {
    return std::is_same_v<T, float> && weight_parts == 0 && has_half_values();
  }
  int64_t narrow_value_panels() const { return ceil_div(d_v, 2 * kPanel); }
  int64_t feature_panels() const { return feature.panels(); }
  ScoreLayout scores() const { return {feature.M}; }
  ProductLayout products() const { return {feature.M}; }
};

// The position of one unit in the call.
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

// The form of the weights, chosen by the largest and smallest logit of the keys that are neither
// hidden nor poisoned.
struct KeyForm {
  bool folded = true;
  double reference =
      0;  // subtracted from every g before it is rounded to T: the largest, if folded
};

template <typename T>
KeyForm choose_form(const AttentionParams& params, bool is_narrow, bool is_linear,
                    const double* logits) {
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
  form.folded = !float_mask && (!params.batch_invariant || is_linear) &&
                (all_rows_see_all_keys || largest == -infinity<double>() ||
                 largest - smallest <= (is_narrow ? kNarrowFoldableSpread : kFoldableSpread<T>));
  // The largest g may belong to a hidden key, far enough from the others to round them off.
  if (!form.folded) form.reference = 0;
  return form;
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
