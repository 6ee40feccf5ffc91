// Linear time in both passes (../../calls/linear_time.h): the choice of units and queries that take
// it, and the center of the values.
//
// A causal call is computed in chunks: a query sees the keys before its chunk through their
// moments, and the keys of its chunk pair by pair. Any other call is one chunk, and moments hold
// all its keys.
//
// The rounding error of a sum over entries is relative to |phi_q|^2 sum_j |phi_j|^2, and a query
// whose scores are all far below that would lose its weights. The mean square of the score between
// random directions is 1/F of it; queries whose sum of weights is below a quarter of that mean are
// computed in quadratic time (docs/guide/performance.md, "Linear time", has the errors). Where few
// keys dominate the sum their errors do not cancel, and that quarter is multiplied by 1 + 32 / n,
// for n = (sum |phi_j|^2)^2 / sum |phi_j|^4 keys.
//
// Values are relative to their mean over e_j, the center, which is added to the output at the end.
// The term of eps then vanishes, and differences of values, of which gradients consist, keep their
// digits. In a causal call the center is the mean of the keys before a chunk, for later keys must
// not count.
#pragma once

#include "attention/calls/linear_time.h"
#include "attention/cpu/linear/moments.h"
#include "attention/cpu/queries/queries.h"

namespace ikattn::IKATTN_ISA {
namespace {

inline int64_t chunk_count(const AttentionParams& params) {
  return params.is_causal ? ceil_div(params.L, kCausalChunk) : 1;
}
inline int64_t chunk_of(const AttentionParams& params, int64_t query) {
  return params.is_causal ? query / kCausalChunk : 0;
}
// Returns the end of the keys that moments hold for the queries of a chunk: [0, end).
inline int64_t keys_before(const AttentionParams& params, int64_t chunk) {
  return params.is_causal ? min_of(params.S, chunk * kCausalChunk) : params.S;
}
// Returns the begin of the queries that moments hold for the keys of a chunk: [begin, L).
inline int64_t first_query_after(const AttentionParams& params, int64_t chunk) {
  return params.is_causal ? min_of(params.L, (chunk + 1) * kCausalChunk) : 0;
}

// Sums over the keys of one unit, and whether it takes linear time.
template <typename T>
struct LinearKeys {
  bool is_taken = false;   // folded, no key is poisoned, and moments hold visible ones
  double* sums = nullptr;  // [d_v]
  // Sums over the keys that moments hold for a chunk:
  T* centers = nullptr;     // [chunks][center_size]   sum e_j v_j / sum e_j
  T* magnitudes = nullptr;  // [chunks]   sum e_j
  T* squares = nullptr;     // [chunks]   sum |phi_j|^2, times 1 + 32 / n
  int64_t center_size = 0;
  Moments<T> moments;  // where there is one chunk

  void take(Workspace& workspace, const AttentionParams& params, const AttentionLayout<T>& layout) {
    const int64_t chunks = chunk_count(params);
    sums = workspace.take<double>(layout.d_v);
    center_size = layout.value_panels() * kPanel;
    centers = workspace.take<T>(chunks * center_size);
    magnitudes = workspace.take<T>(chunks);
    squares = workspace.take<T>(chunks);
    if (params.is_causal) return;
    moments = Moments<T>::take(workspace, layout.products().panels(), layout.d_v, false, true);
  }
  T* center(int64_t chunk) const { return centers + chunk * center_size; }
};

// Adds e_j v_j of a block of keys, [value panels][value_rows][64], to sums [d_v]; returns the sum
// of e_j.
template <typename T>
double add_weighted_values(const AttentionLayout<T>& layout, const T* feature_scales, int64_t count,
                           const T* values, int64_t value_rows, double* sums) {
  double magnitude = 0;
  for (int64_t r = 0; r < count; ++r) {
    const double root = static_cast<double>(feature_scales[r]), e = root * root;
    if (e == 0) continue;
    magnitude += e;
    for (int64_t first = 0; first < layout.d_v; first += kPanel) {
      const T* row = values + first * value_rows + r * kPanel;
      for (int64_t c = 0; c < min_of(kPanel, layout.d_v - first); ++c) {
        sums[first + c] += e * static_cast<double>(row[c]);
      }
    }
  }
  return magnitude;
}

// Sums over keys of |phi_j|^2 and, in units of the largest, of |phi_j|^4, which would underflow.
struct KeySquares {
  double squares = 0, fourths = 0, largest = 0;

  void add(double square) {
    if (square == 0) return;
    if (square > largest) {
      const double shrunk = largest / square;
      fourths *= shrunk * shrunk;
      largest = square;
    }
    squares += square;
    fourths += square / largest * (square / largest);
  }
  double weighted() const {
    return squares == 0 ? 0 : squares + 32 * fourths * largest * (largest / squares);
  }
};

// Decides whether a unit takes linear time, and fills the sums of its chunks. For a block of keys
// at j0, values(j0) loads theirs, [value panels][value_rows][64], and add_squares(j0, sums) adds
// their |phi_j|^2.
template <typename T, typename Values, typename Squares>
void describe_keys(const AttentionParams& params, const AttentionLayout<T>& layout,
                   const PreparedKeys<T>& keys, int64_t value_rows, const Values& values,
                   const Squares& add_squares, LinearKeys<T>& out) {
  double magnitude = 0;
  KeySquares squares;
  for (int64_t c = 0; c < layout.d_v; ++c) out.sums[c] = 0;
  for (int64_t chunk = 0, j0 = 0; chunk < chunk_count(params); ++chunk) {
    for (; j0 < keys_before(params, chunk); j0 += kPanel) {
      const int64_t count = min_of(kPanel, params.S - j0);
      magnitude += add_weighted_values(layout, keys.feature_scales + j0, count, values(j0),
                                       value_rows, out.sums);
      add_squares(j0, squares);
    }
    out.magnitudes[chunk] = static_cast<T>(magnitude);
    out.squares[chunk] = static_cast<T>(squares.weighted());
    for (int64_t c = 0; c < out.center_size; ++c) {
      const bool has_mean = c < layout.d_v && magnitude > 0;
      out.center(chunk)[c] = has_mean ? static_cast<T>(out.sums[c] / magnitude) : T(0);
    }
  }
  out.is_taken = keys.form.folded && magnitude > 0 && all_finite(keys.weight_terms, params.S);
}

// The division of the panels of entries into groups, each of which is a task.
struct PanelGroups {
  int64_t panels, together;

  // Returns groups for a call of one chunk, where any thread may compute any panel.
  static PanelGroups for_threads(const ProductLayout& layout, int threads, bool whole) {
    const int64_t shared = max_of(1, min_of(kProductPanels, layout.panels() / (2 * threads)));
    return {layout.panels(), whole ? kProductPanels : shared};
  }
  // Returns groups for a causal call. They add to a token in order, and are the same for every
  // number of threads.
  static PanelGroups for_chunks(const ProductLayout& layout) {
    const int64_t panels = layout.panels(), to_share = min_of(4, panels / 2);
    return {panels, ceil_div(panels, max_of(to_share, ceil_div(panels, kProductPanels)))};
  }
  static PanelGroups of_call(const AttentionParams& params, const ProductLayout& layout,
                             int threads, bool whole) {
    return params.is_causal ? for_chunks(layout) : for_threads(layout, threads, whole);
  }
  int64_t count() const { return ceil_div(panels, together); }
  Panels of(int64_t group) const {
    return {group * together, min_of(panels, (group + 1) * together)};
  }
};

// Subtracts the center from the values [value panels][value_rows][64].
template <typename T>
void subtract_center(int64_t rows, int64_t d_v, const T* center, T* values, int64_t value_rows) {
  for (int64_t first = 0; first < d_v; first += kPanel) {
    for (int64_t r = 0; r < rows; ++r) {
      T* row = values + (first / kPanel * value_rows + r) * kPanel;
      for (int64_t c = 0; c < kPanel; c += kLanes<T>) {
        store<T>(row + c, load(row + c) - load(center + first + c));
      }
    }
  }
}

// Returns |phi|^2 of one row of phi [feature panels][phi_rows][64].
template <typename T>
T square_of(const FeatureLayout<T>& layout, const T* phi, int64_t phi_rows, int64_t row) {
  Vec<T> squares{};
  for (int64_t panel = 0; panel < layout.panels(); ++panel) {
    const T* values = phi + (panel * phi_rows + row) * kPanel;
    for (int64_t c = 0; c < layout.columns(panel); c += kLanes<T>) {
      squares += load(values + c) * load(values + c);
    }
  }
  return sum_of_lanes<T>(squares);
}

// Tells whether products keep the digits of the weights of a query: their sum is not far below its
// mean over directions. query is |phi_q|^2, and keys is LinearKeys::squares.
template <typename T>
bool keeps_digits(const ProductLayout& layout, T sum_of_weights, T query, T keys) {
  constexpr T kShareOfMean = 0.25;
  return sum_of_weights * static_cast<T>(layout.features()) >= kShareOfMean * query * keys;
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
