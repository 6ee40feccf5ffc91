// The arithmetic of one tile of pairs in the backward pass: from s and dP to weights and gradients.
#pragma once

#include "attention/cpu/keys/visibility.h"
#include "support/cpu/vector_math.h"

namespace ikattn::IKATTN_ISA {
namespace {

// The inputs of one tile's arithmetic: arrays over its rows and columns.
template <typename T>
struct PairTile {
  int64_t rows, columns;
  int64_t above;            // causal: rows that do not see the first column; others: -64
  const T* terms;           // folded: eps e_j
  const T* logits;          // general: g_j
  const T* delta;           // per row
  const T* log_normalizer;  // general, per row
  const T* log_normalizer_rest;
  const uint8_t* poisoned;  // per row
  const T* bias;            // [rows][64] or null
  const T* keep;            // [rows][64] or null: no dropout, or in dP already
  T eps;

  // Returns the first row of a band that sees column c.
  int64_t first_row(int64_t c) const { return max_of(0, above + c) / kBandRows * kBandRows; }
};

// Computes w (times keep), ds and dlog from s and dP, the latter two in place, and adds the column
// sums of dlog to dg. dlog is stored whether wanted or not: in a sum alone, w x would not be
// rounded before it is added.
template <typename T, bool kFolded, bool kMasked, bool kDropout>
void pair_gradients(const PairTile<T>& tile, T* s, T* w_out, T* dp, T* grad_logit) {
  for (int64_t c = 0; c < tile.columns; c += kLanes<T>) {
    Vec<T> column_sum{};
    for (int64_t r = tile.first_row(c); r < tile.rows; ++r) {
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
      store<T>(dp + at, logit_gradient);
      if constexpr (kDropout) w *= load(tile.keep + at);
      store<T>(w_out + at, w);
      store<T>(s + at, slope * x);
    }
    store<T>(grad_logit + c, load(grad_logit + c) + column_sum);
  }
}

// Sets every pair that a row which is not finite sees to NaN.
template <typename T>
void poison_rows(const PairTile<T>& tile, T* s, T* w, T* dlog, T* grad_logit) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    if (!tile.poisoned[r]) continue;
    for (int64_t c = 0; c < tile.columns; ++c) {
      const int64_t at = r * kPanel + c;
      const bool hidden =
          tile.logits[c] == -infinity<T>() || (tile.bias && tile.bias[at] == -infinity<T>());
      if (hidden) continue;
      s[at] = w[at] = dlog[at] = grad_logit[c] = not_a_number<T>();
    }
  }
}

template <typename T, bool kFolded, bool kMasked>
void pair_gradients(const PairTile<T>& tile, T* s, T* w, T* dp, T* grad_logit) {
  if (tile.keep) {
    pair_gradients<T, kFolded, kMasked, true>(tile, s, w, dp, grad_logit);
  } else {
    pair_gradients<T, kFolded, kMasked, false>(tile, s, w, dp, grad_logit);
  }
}

template <typename T>
void pair_gradients(const PairTile<T>& tile, bool folded, T* s, T* w, T* dp, T* grad_logit) {
  if (folded && tile.bias) return pair_gradients<T, true, true>(tile, s, w, dp, grad_logit);
  if (folded) return pair_gradients<T, true, false>(tile, s, w, dp, grad_logit);
  if (tile.bias) return pair_gradients<T, false, true>(tile, s, w, dp, grad_logit);
  pair_gradients<T, false, false>(tile, s, w, dp, grad_logit);
}

// Adds dlog to grad_mask, summed over the axes that the mask is broadcast along (stride 0).
template <typename T, typename Sum>
void add_mask_gradient(const Array& grad_mask, const TilePosition& at, int64_t columns,
                       const T* dlog) {
  Sum* target = static_cast<Sum*>(grad_mask.data) + at.b * grad_mask.stride[0] +
                at.h * grad_mask.stride[1] + at.j0 * grad_mask.stride[3];
  for (int64_t r = 0; r < at.rows; ++r) {
    Sum* row = target + (at.i0 + r) * grad_mask.stride[2];
    for (int64_t c = 0; c < columns; ++c) row[c * grad_mask.stride[3]] += dlog[r * kPanel + c];
  }
}

template <typename T>
void add_mask_gradient(const Array& grad_mask, const TilePosition& at, int64_t columns,
                       const T* dlog) {
  if (grad_mask.type == ElementType::kFloat64) {
    add_mask_gradient<T, double>(grad_mask, at, columns, dlog);
  } else {
    add_mask_gradient<T, T>(grad_mask, at, columns, dlog);
  }
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
