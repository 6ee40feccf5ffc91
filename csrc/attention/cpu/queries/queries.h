// The query side, and the step that both passes share: a tile of unnormalised weights.
#pragma once

#include "attention/cpu/queries/pass.h"

namespace ikattn::IKATTN_ISA {
namespace {

// A block of consecutive queries of one head.
struct QueryBlock {
  int64_t b, h, i0, rows;
};

// Returns which keys a tile sees; fills bias [rows][64] as fill_bias does.
template <typename T>
Visibility visibility_of(const AttentionParams& params, const PreparedKeys<T>& keys,
                         const TilePosition& at, T* bias) {
  if (keys.is_hidden[at.j0 / kPanel]) return Visibility::kNone;
  return fill_bias(params, at, keys.logits + at.j0, bias);
}

// Returns the number of 64-key blocks that a block of queries can see.
template <typename T>
inline int64_t visible_key_blocks(const AttentionParams& params, const AttentionLayout<T>& layout,
                                  const QueryBlock& block) {
  if (!params.is_causal) return layout.key_blocks;
  return min_of(layout.key_blocks, ceil_div(block.i0 + block.rows, kPanel));
}

// Loads the gradient of the weights of `rows` rows of a tile, from its row `row` on, into incoming
// [rows][64]; columns is a multiple of the vector length. It is 0 for keys that are hidden, and for
// keys that are not finite, whose weights are NaN already.
template <typename T>
void load_incoming(const AttentionParams& params, const PreparedKeys<T>& keys,
                   const TilePosition& at, int64_t row, int64_t rows, int64_t columns,
                   T* incoming) {
  const Array& array = params.grad_weights;
  load_panels(array,
              at.b * array.stride[0] + at.h * array.stride[1] + (at.i0 + row) * array.stride[2] +
                  at.j0 * array.stride[3],
              array.stride[2], array.stride[3], rows, min_of(columns, params.S - at.j0), incoming,
              rows);
  const T share = static_cast<T>(params.weights_share);
  for (int64_t c = 0; c < columns; c += kLanes<T>) {
    const Vec<T> logits = load(keys.logits + at.j0 + c);
    const auto counts = logits > -infinity<T>();
    for (int64_t r = 0; r < rows; ++r) {
      T* x = incoming + r * kPanel + c;
      store<T>(x, counts ? load(x) * share : Vec<T>{});
    }
  }
}

// Computes the features of a block of queries into phi [feature panels][phi_rows][64]. A row that
// is not finite becomes zero and is marked in poisoned[0 .. rows). The backward also gets its
// tangents, from row 0 on. narrow_query_features() follows where the layout has narrow scores.
template <typename T>
void prepare_queries(const AttentionParams& params, const AttentionLayout<T>& layout,
                     const QueryBlock& block, const T* packed, T* tokens, T* phi, int64_t phi_rows,
                     uint8_t* poisoned, const Tangents<T>& tangents = {}) {
  const Array& query = params.query;
  load_panels(query,
              block.b * query.stride[0] + block.h * query.stride[1] + block.i0 * query.stride[2],
              query.stride[2], query.stride[3], block.rows, params.d, tokens, block.rows);
  features<T>(layout.feature, block.rows, tokens, block.rows, packed, feature_scale<T>(params.M),
              nullptr, phi, phi_rows, tangents);
  __builtin_memset(poisoned, 0, block.rows);
  if (rows_are_finite(phi, phi_rows, block.rows, layout.feature.width())) return;
  for (int64_t r = 0; r < block.rows; ++r) {
    poisoned[r] = !row_is_finite(phi, phi_rows, r, layout.feature.width());
    if (poisoned[r]) fill_row(phi, phi_rows, r, layout.feature_panels() * kPanel, T(0));
  }
}

// Packs phi [feature panels][phi_rows][64] of a block of queries, two to a lane, into narrow [score
// panels][phi_rows][64].
template <typename T>
void narrow_query_features(const AttentionLayout<T>& layout, int64_t rows, const T* phi,
                           int64_t phi_rows, float* steps, int32_t* narrow) {
  if constexpr (kTakes16Bits<T>) {
    if (!layout.narrow_scores) return;
    choose_steps(layout.feature, rows, phi, phi_rows, steps);
    for (int64_t panel = 0; panel < layout.scores().panels(); ++panel) {
      narrow_features(layout.feature, panel, rows, phi, phi_rows, steps,
                      narrow + panel * phi_rows * kPanel);
    }
  }
}

// The running state of the rows of a block.
template <typename T>
struct RowState {
  T* sums = nullptr;          // [rows][lanes]  sum of w so far, one part per lane
  T* rounded_sums = nullptr;  // likewise, of w as it is multiplied with the values; null: the same
  T* maxima = nullptr;        // [rows]         general form: m_i
  T* rescale = nullptr;  // [rows]         general form: what the last tile changed earlier sums by

  void take(Workspace& workspace, int64_t rows, bool is_rounded = false) {
    sums = workspace.take<T>(rows * kLanes<T>);
    if (is_rounded) rounded_sums = workspace.take<T>(rows * kLanes<T>);
    maxima = workspace.take<T>(rows);
    rescale = workspace.take<T>(rows);
  }
  RowState from(int64_t row) const {
    const int64_t first = row * kLanes<T>;
    return {sums + first, rounded_sums ? rounded_sums + first : nullptr, maxima + row,
            rescale + row};
  }
  void reset(int64_t rows) {
    __builtin_memset(sums, 0, rows * kLanes<T> * sizeof(T));
    if (rounded_sums) __builtin_memset(rounded_sums, 0, rows * kLanes<T> * sizeof(T));
    for (int64_t r = 0; r < rows; ++r) maxima[r] = -infinity<T>();
  }
};

// Sums over some keys for a block of queries, relative to the maxima of the rows.
template <typename T>
struct RowSums {
  T* out = nullptr;  // [value panels][rows][64]   sum of w v
  RowState<T> state;

  void take(Workspace& workspace, const AttentionLayout<T>& layout, int64_t rows) {
    out = workspace.take<T>(layout.value_panels() * rows * kPanel);
    state.take(workspace, rows, layout.weight_parts == 1);
  }
  void reset(const AttentionLayout<T>& layout, int64_t rows) {
    __builtin_memset(out, 0, layout.value_panels() * rows * kPanel * sizeof(T));
    state.reset(rows);
  }
};

// Adds the sums over earlier keys to `sums`. Never inlined, for the compiler might round
// differently in each copy.
template <typename T>
[[gnu::noinline]] void add_earlier(const AttentionLayout<T>& layout, int64_t rows,
                                   const RowSums<T>& earlier, const RowSums<T>& sums) {
  for (int64_t r = 0; r < rows; ++r) {
    const T before = earlier.state.maxima[r], own = sums.state.maxima[r];
    const T largest = own > before ? own : before;
    // Sums have no maximum in the folded form, or before any finite key.
    const auto factor_of = [&](T maximum) {
      return maximum == -infinity<T>() ? T(1) : exponential(maximum - largest);
    };
    const T of_earlier = factor_of(before), of_own = factor_of(own);
    const auto add = [&](const T* from, T* to) {
      store<T>(to, load(from) * of_earlier + load(to) * of_own);
    };
    const int64_t lane = r * kLanes<T>;
    add(earlier.state.sums + lane, sums.state.sums + lane);
    if (sums.state.rounded_sums) {
      add(earlier.state.rounded_sums + lane, sums.state.rounded_sums + lane);
    }
    for (int64_t panel = 0; panel < layout.value_panels(); ++panel) {
      const int64_t at = (panel * rows + r) * kPanel;
      for (int64_t c = at; c < at + kPanel; c += kLanes<T>) add(earlier.out + c, sums.out + c);
    }
    sums.state.maxima[r] = largest;
  }
}

// Computes the weights of the folded form, w = s^2 + eps e_j, in place of s, 0 where hidden, and
// adds them to the row sums.
//   s [rows][64], columns a multiple of the vector length, terms = eps e_j, bias [rows][64] or null
template <typename T, bool kMasked>
void folded_weights(int64_t rows, int64_t columns, const T* terms, const T* bias, T* s, T* sums) {
  for (int64_t r = 0; r < rows; ++r) {
    Vec<T> sum{};
    for (int64_t c = 0; c < columns; c += kLanes<T>) {
      const Vec<T> score = load(s + r * kPanel + c);
      Vec<T> w = score * score + load(terms + c);
      if constexpr (kMasked) {
        w = load(bias + r * kPanel + c) == -infinity<T>() ? Vec<T>{} : w;
      }
      sum += w;
      store<T>(s + r * kPanel + c, w);
    }
    store<T>(sums + r * kLanes<T>, load(sums + r * kLanes<T>) + sum);
  }
}

// Computes the weights of the general form, w = (s^2 + eps) exp(g_j + bias_ij - m_i). Returns
// whether any row's maximum rose, in which case state.rescale holds the factors for earlier sums.
template <typename T, bool kMasked>
bool general_weights(int64_t rows, int64_t columns, T eps, const T* logits, const T* bias, T* s,
                     const RowState<T>& state) {
  bool rose = false;
  for (int64_t r = 0; r < rows; ++r) {
    Vec<T> largest = broadcast(-infinity<T>());
    for (int64_t c = 0; c < columns; c += kLanes<T>) {
      Vec<T> z = load(logits + c);
      if constexpr (kMasked) {
        const Vec<T> term = load(bias + r * kPanel + c);
        z = term == -infinity<T>() ? term : z + term;
      }
      largest = z > largest ? z : largest;  // a NaN never becomes the maximum
    }
    const T before = state.maxima[r];
    const T tile_max = max_of_lanes<T>(largest);
    const T after = tile_max > before ? tile_max : before;
    const T reference = after == -infinity<T>() ? T(0) : after;
    T* sums = state.sums + r * kLanes<T>;
    state.rescale[r] = 1;
    if (after > before) {
      state.maxima[r] = after;
      state.rescale[r] = before == -infinity<T>() ? T(0) : exponential(before - after);
      // A NaN sum comes from a poisoned key before any finite one, and must stay.
      if (before != -infinity<T>()) store<T>(sums, load(sums) * state.rescale[r]);
      if (T* rounded = state.rounded_sums ? state.rounded_sums + r * kLanes<T> : nullptr) {
        store<T>(rounded, load(rounded) * state.rescale[r]);
      }
      rose = true;
    }
    Vec<T> sum{};
    for (int64_t c = 0; c < columns; c += kLanes<T>) {
      const Vec<T> score = load(s + r * kPanel + c);
      Vec<T> z = load(logits + c);
      if constexpr (kMasked) {
        const Vec<T> term = load(bias + r * kPanel + c);
        z = term == -infinity<T>() ? term : z + term;
      }
      Vec<T> w = (score * score + eps) * exp_bounded<T>(z - reference);
      w = z == -infinity<T>() ? Vec<T>{} : w;  // whatever the score, of NaN frequencies, too
      sum += w;
      store<T>(s + r * kPanel + c, w);
    }
    store<T>(sums, load(sums) + sum);
  }
  return rose;
}

// Computes the weights of one tile from its scores, in either form. bias is null where nothing is
// hidden or added. Returns whether earlier sums must be rescaled by state.rescale.
template <typename T>
bool tile_weights(const AttentionParams& params, const PreparedKeys<T>& keys, int64_t rows,
                  int64_t j0, int64_t columns, const T* bias, T* s, const RowState<T>& state) {
  if (keys.form.folded) {
    const T* terms = keys.weight_terms + j0;
    if (bias) {
      folded_weights<T, true>(rows, columns, terms, bias, s, state.sums);
    } else {
      folded_weights<T, false>(rows, columns, terms, bias, s, state.sums);
    }
    return false;
  }
  const T* logits = keys.logits + j0;
  const T eps = static_cast<T>(params.eps);
  return bias ? general_weights<T, true>(rows, columns, eps, logits, bias, s, state)
              : general_weights<T, false>(rows, columns, eps, logits, bias, s, state);
}

template <typename T>
inline void multiply_tile(int64_t rows, int64_t columns, const T* factor, T* tile) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = r * kPanel; c < r * kPanel + columns; c += kLanes<T>) {
      store<T>(tile + c, load(tile + c) * load(factor + c));
    }
  }
}

// Multiplies a tile by keep. A dropped pair becomes zero even where the tile holds NaN.
template <typename T>
inline void keep_tile(int64_t rows, int64_t columns, const T* keep, T* tile) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = r * kPanel; c < r * kPanel + columns; c += kLanes<T>) {
      const Vec<T> factor = load(keep + c), kept = load(tile + c) * factor;
      store<T>(tile + c, factor == T(0) ? Vec<T>{} : kept);
    }
  }
}

// Multiplies the rows of panels [panels][panel_rows][64] by factor[row].
template <typename T>
inline void scale_rows(int64_t rows, int64_t columns, const T* factor, T* panels,
                       int64_t panel_rows) {
  for (int64_t first = 0; first < columns; first += kPanel) {
    for (int64_t r = 0; r < rows; ++r) {
      T* row = panels + first * panel_rows + r * kPanel;
      for (int64_t c = 0; c < kPanel; c += kLanes<T>) store<T>(row + c, load(row + c) * factor[r]);
    }
  }
}

// Returns the terms of a band from those of its tile, `bias`; null where the band has none.
template <typename T>
inline const T* terms_of(const AttentionParams& params, const Band& band, const T* bias) {
  return bias && (params.mask || band.crosses_diagonal) ? bias + band.row * kPanel : nullptr;
}

// Computes the weights of one band of the tile [at.rows][64] at key j0, from the features of all
// its rows. Earlier sums, panels [panels][at.rows][64] of `summed` columns, are rescaled where a
// maximum rose. bias is that of the whole tile.
template <typename T>
void band_weights(const AttentionParams& params, const AttentionLayout<T>& layout,
                  const PreparedKeys<T>& keys, const TilePosition& at, const Band& band,
                  const QueryFeatures<T>& queries, const T* bias, T* tile, const RowState<T>& state,
                  int64_t summed, T* panels) {
  const int64_t first = band.row * kPanel;
  const RowState<T> rows = state.from(band.row);
  keys.by_column.multiply(layout, at.j0 / kPanel, band.rows, queries.from(band.row), band.columns,
                          tile + first);
  if (tile_weights(params, keys, band.rows, at.j0, band.columns, terms_of(params, band, bias),
                   tile + first, rows)) {
    scale_rows(band.rows, summed, rows.rescale, panels + first, at.rows);
  }
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
