// Moments: sums over tokens of products of features times a row of numbers, and their use.
#pragma once

#include "attention/cpu/features/feature_products.h"

namespace ikattn::IKATTN_ISA {
namespace {

// Panels of entries, [begin, end).
struct Panels {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
};

// Sums over tokens of c_e psi_e(x) times a row of numbers, and times one more number. Stored by
// value they are read by 64 tokens together, in whole vectors however few values there are; stored
// by entry, by any number of tokens.
template <typename T>
struct Moments {
  T* by_entry = nullptr;  // [panels][value panels][64 entries][64 values]
  T* totals = nullptr;    // [panels][64], and a vector more   beside by_entry
  T* by_value = nullptr;  // [panels][d_v + 1][64 entries]   the last row: totals
  int64_t d_v = 0;
  int64_t first_panel = 0;  // of entries, where not all of them are held

  int64_t value_panels() const { return ceil_div(d_v, kPanel); }
  T* tile(int64_t panel, int64_t of_values) const {
    return by_entry + ((panel - first_panel) * value_panels() + of_values) * kPanel * kPanel;
  }
  T* values(int64_t panel) const { return by_value + (panel - first_panel) * (d_v + 1) * kPanel; }
  T* total(int64_t panel) const {
    return by_entry ? totals + (panel - first_panel) * kPanel : values(panel) + d_v * kPanel;
  }
  // Return the array of the sums, and the size of one panel in it.
  T* summed(int64_t panel) const { return by_entry ? tile(panel, 0) : values(panel); }
  int64_t summed_size() const { return (by_entry ? value_panels() * kPanel : d_v + 1) * kPanel; }

  static Moments take(Workspace& workspace, int64_t panels, int64_t d_v, bool by_entry,
                      bool by_value) {
    Moments result;
    result.d_v = d_v;
    if (by_entry) {
      result.by_entry = workspace.take<T>(panels * result.value_panels() * kPanel * kPanel);
      result.totals = workspace.take<T>(panels * kPanel + kLanes<T>);
    }
    if (by_value) result.by_value = workspace.take<T>(panels * (d_v + 1) * kPanel);
    return result;
  }
  void clear(const Panels& panels) const {
    __builtin_memset(summed(panels.begin), 0, panels.count() * summed_size() * sizeof(T));
    if (by_entry) __builtin_memset(total(panels.begin), 0, panels.count() * kPanel * sizeof(T));
  }
  // Copies sums that are stored by entry to those by value.
  void transpose(const Panels& panels) const {
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      for (int64_t first = 0; first < d_v; first += kPanel) {
        const T* source = tile(panel, first / kPanel);
        T* target = values(panel) + first * kPanel;
        const int64_t width = min_of(kPanel, d_v - first), whole = width - width % kLanes<T>;
        transpose_panel(kPanel, whole, source, target);
        for (int64_t c = whole; c < width; ++c) {
          for (int64_t e = 0; e < kPanel; ++e) target[c * kPanel + e] = source[e * kPanel + c];
        }
      }
      copy_row(total(panel), values(panel) + d_v * kPanel);
    }
  }
};

template <typename T>
struct ProductScratch {
  T* x = nullptr;        // [kMomentTokens][row_size]
  T* values = nullptr;   // [value panels][kMomentTokens][64]
  T* factors = nullptr;  // [kMomentTokens]
  T* psi = nullptr;      // [kProductRows][64] and a vector
  T* partial = nullptr;  // [value panels][kProductRows][64]
  // Columns of 64 tokens:
  T* x_by_column = nullptr;    // [features][64]
  T* row_by_column = nullptr;  // [kMomentTokens / 64][row_columns][64]   values, then factors
  T* sums = nullptr;           // [row_columns][64]
  int64_t row_columns = 0;     // d_v + 1, and up to whole vectors
  // Used by the backward:
  T* tile = nullptr;           // [64][64]
  T* own_by_column = nullptr;  // [features][64]
  T* own = nullptr;            // [64][row_size]

  void take(Workspace& workspace, const ProductLayout& layout, int64_t d_v, bool backward) {
    const int64_t row_size = layout.row_size<T>(), value_panels = max_of(1, ceil_div(d_v, kPanel));
    const int64_t features = round_up(layout.features(), kLanes<T>);
    row_columns = round_up(d_v + 1, kLanes<T>);
    x = workspace.take<T>(kMomentTokens * row_size);
    values = workspace.take<T>(value_panels * kMomentTokens * kPanel);
    factors = workspace.take<T>(kMomentTokens);
    psi = workspace.take<T>(kProductRows * kPanel + kLanes<T>);
    partial = workspace.take<T>(value_panels * kProductRows * kPanel);
    x_by_column = workspace.take<T>(features * kPanel);
    row_by_column = workspace.take<T>(kMomentTokens * row_columns);
    sums = workspace.take<T>(row_columns * kPanel);
    if (!backward) return;
    tile = workspace.take<T>(kPanel * kPanel);
    own_by_column = workspace.take<T>(features * kPanel);
    own = workspace.take<T>(kPanel * row_size);
  }
};

// Transposes values [value panels][value_rows][64] and factors of up to 64 tokens to [d_v + 1][64].
template <typename T>
void values_and_factors(int64_t rows, int64_t d_v, const T* values, int64_t value_rows,
                        const T* factors, T* by_column) {
  for (int64_t first = 0; first < d_v; first += kPanel) {
    rows_by_column(rows, min_of(kPanel, d_v - first), values + first * value_rows, kPanel,
                   by_column + first * kPanel);
  }
  __builtin_memcpy(by_column + d_v * kPanel, factors, rows * sizeof(T));
}

// Adds psi [rows][64] times values and factors of the tokens from t on, all in the scratch, to
// scratch.partial, laid out as Moments::values; the first time it overwrites.
template <typename T>
void multiply_by_value(int64_t entries, int64_t d_v, int64_t t, int64_t rows,
                       const ProductScratch<T>& scratch) {
  panel_gemm<T, Left::kRows>(d_v + 1, entries, rows,
                             scratch.row_by_column + t * scratch.row_columns, scratch.psi,
                             scratch.partial, t > 0);
}

// Computes psi times values, laid out as Moments::by_entry, and adds psi times factors to totals.
template <typename T>
void multiply_by_entry(int64_t entries, int64_t d_v, int64_t t, int64_t rows,
                       const ProductScratch<T>& scratch, Vec<T> (&totals)[kPanel / kLanes<T>]) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t v = 0; v < kPanel / kLanes<T>; ++v) {
      totals[v] += load(scratch.psi + r * kPanel + v * kLanes<T>) * scratch.factors[t + r];
    }
  }
  for (int64_t first = 0; first < d_v; first += kPanel) {
    panel_gemm<T, Left::kColumns>(entries, min_of(kPanel, d_v - first), rows, scratch.psi,
                                  scratch.values + first * kMomentTokens + t * kPanel,
                                  scratch.partial + first * kPanel, t > 0);
  }
}

// Adds c_e psi_e(x) times values and factors of `count` tokens, all in the scratch, to some panels
// of entries.
template <typename T>
void add_moments(const ProductLayout& layout, const Panels& panels, int64_t count,
                 const ProductScratch<T>& scratch, const Moments<T>& out) {
  for (int64_t t = 0; !out.by_entry && t < count; t += kPanel) {
    values_and_factors(min_of(kPanel, count - t), out.d_v, scratch.values + t * kPanel,
                       kMomentTokens, scratch.factors + t,
                       scratch.row_by_column + t * scratch.row_columns);
  }
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    const auto runs = layout.runs(panel);
    const int64_t entries = layout.entries(panel);
    Vec<T> totals[kPanel / kLanes<T>] = {};
    for (int64_t t = 0; t < count; t += kPanel) {
      const int64_t rows = min_of(kPanel, count - t);
      feature_products<true>(layout, runs, rows, scratch.x + t * layout.row_size<T>(), scratch.psi);
      if (out.by_entry) {
        multiply_by_entry(entries, out.d_v, t, rows, scratch, totals);
      } else {
        multiply_by_value(entries, out.d_v, t, rows, scratch);
      }
    }
    T* sum = out.summed(panel);
    for (int64_t i = 0; i < out.summed_size(); i += kLanes<T>) {
      store<T>(sum + i, load(sum + i) + load(scratch.partial + i));
    }
    for (int64_t v = 0; out.by_entry && v < kPanel / kLanes<T>; ++v) {
      T* total = out.total(panel) + v * kLanes<T>;
      store<T>(total, load(total) + totals[v]);
    }
  }
}

// Computes the moments of some panels over `tokens` tokens. load_tokens(first, count) fills x,
// values and factors of the scratch for up to kMomentTokens tokens, or returns that none counts.
// One thread computes each sum, in the order of tokens.
template <typename T, typename Load>
void sum_moments(const ProductLayout& layout, const Panels& panels, int64_t tokens,
                 const Load& load_tokens, const ProductScratch<T>& scratch, const Moments<T>& out) {
  out.clear(panels);
  for (int64_t first = 0; first < tokens; first += kMomentTokens) {
    const int64_t count = min_of(kMomentTokens, tokens - first);
    if (load_tokens(first, count)) add_moments(layout, panels, count, scratch, out);
  }
}

// Changes moments by value from values relative to one center [d_v] to values relative to another.
template <typename T>
void move_center(const Panels& panels, const T* from, const T* to, const Moments<T>& out) {
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    for (int64_t c = 0; c < out.d_v; ++c) {
      const T step = to[c] - from[c];
      T* sums = out.values(panel) + c * kPanel;
      for (int64_t e = 0; e < kPanel; e += kLanes<T>) {
        store<T>(sums + e, load(sums + e) - load(out.total(panel) + e) * step);
      }
    }
  }
}

// Changes totals of numbers f + g . center, where g are the values, to another center.
template <typename T>
void move_center_in_totals(const Panels& panels, const T* from, const T* to,
                           const Moments<T>& out) {
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    for (int64_t e = 0; e < kPanel; e += kLanes<T>) {
      Vec<T> sum{};
      for (int64_t c = 0; c < out.d_v; ++c) {
        sum += load(out.values(panel) + c * kPanel + e) * (to[c] - from[c]);
      }
      T* total = out.total(panel) + e;
      store<T>(total, load(total) + sum);
    }
  }
}

// Does the work of read_panels for moments by value and up to 64 tokens, whose partial sums begin
// at row `first`.
template <typename T>
void read_by_value(const ProductLayout& layout, const Panels& panels, const Moments<T>& moments,
                   int64_t first, int64_t tokens, int64_t rows, const ProductScratch<T>& scratch,
                   T* sums) {
  const int64_t d_v = moments.d_v;
  const T* x = scratch.x + first * layout.row_size<T>();
  rows_by_column(tokens, layout.features(), x, layout.row_size<T>(), scratch.x_by_column);
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    feature_products_by_column(layout, panel, tokens, scratch.x_by_column, scratch.psi);
    panel_gemm<T, Left::kRows>(sums ? d_v + 1 : d_v, tokens, layout.entries(panel),
                               moments.values(panel), scratch.psi, scratch.sums,
                               panel > panels.begin);
  }
  for (int64_t r = 0; sums && r < tokens; ++r) {
    sums[(first + r) * kLanes<T>] += scratch.sums[d_v * kPanel + r];
  }
  for (int64_t c = 0; c < d_v; c += kPanel) {
    const int64_t width = round_up(min_of(kPanel, d_v - c), kLanes<T>);
    rows_by_column(width, tokens, scratch.sums + c * kPanel, kPanel, scratch.psi);
    __builtin_memcpy(scratch.partial + c * rows + first * kPanel, scratch.psi,
                     tokens * kPanel * sizeof(T));
  }
}

// Computes scratch.partial [value panels][rows][64] = sum over some panels of psi_e(x) moments_e of
// up to kProductRows tokens, whose features are in the scratch; adds psi_e(x) totals_e to sums
// [rows][lanes], where there are any.
template <typename T>
void read_panels(const ProductLayout& layout, const Panels& panels, const Moments<T>& moments,
                 int64_t rows, const ProductScratch<T>& scratch, T* sums) {
  for (int64_t first = 0; !moments.by_entry && first < rows; first += kPanel) {
    read_by_value(layout, panels, moments, first, min_of(kPanel, rows - first), rows, scratch,
                  sums);
  }
  for (int64_t panel = panels.begin; moments.by_entry && panel < panels.end; ++panel) {
    const int64_t entries = layout.entries(panel);
    feature_products(layout, layout.runs(panel), rows, scratch.x, scratch.psi);
    if (sums) add_sums_of_products(entries, rows, scratch.psi, moments.total(panel), sums);
    for (int64_t of_values = 0; of_values < moments.value_panels(); ++of_values) {
      panel_gemm<T, Left::kRows>(rows, min_of(kPanel, moments.d_v - of_values * kPanel), entries,
                                 scratch.psi, moments.tile(panel, of_values),
                                 scratch.partial + of_values * rows * kPanel, panel > panels.begin);
    }
  }
}

// Adds panels [value panels][rows][64] to out [value panels][out_rows][64], or sets it to them.
template <typename T>
void add_panels(int64_t rows, int64_t columns, const T* panels, T* out, int64_t out_rows,
                bool grows) {
  for (int64_t first = 0; first < columns; first += kPanel) {
    const T* term = panels + first * rows;
    T* sum = out + first * out_rows;
    for (int64_t i = 0; i < rows * kPanel; i += kLanes<T>) {
      store<T>(sum + i, grows ? load(sum + i) + load(term + i) : load(term + i));
    }
  }
}

// Computes out [value panels][out_rows][64] = sum_e psi_e(x) moments_e, and sums as in read_panels.
template <typename T>
void read_moments(const ProductLayout& layout, const Moments<T>& moments, int64_t rows,
                  const ProductScratch<T>& scratch, T* sums, T* out, int64_t out_rows) {
  for (int64_t begin = 0; begin < layout.panels(); begin += kProductPanels) {
    const Panels panels{begin, min_of(layout.panels(), begin + kProductPanels)};
    read_panels(layout, panels, moments, rows, scratch, sums);
    add_panels(rows, moments.d_v, scratch.partial, out, out_rows, begin > 0);
  }
}

// Computes the gradients of half of sum_e psi_e(x) (moments_e . values + totals_e factor) over some
// panels, by value, for up to 64 tokens whose features are in the scratch, into scratch.own. values
// [value panels][value_rows][64], factors [rows].
template <typename T>
void product_gradients(const ProductLayout& layout, const Panels& panels, const Moments<T>& moments,
                       int64_t rows, const T* values, int64_t value_rows, const T* factors,
                       const ProductScratch<T>& scratch) {
  const int64_t F = layout.features(), row_size = layout.row_size<T>();
  const int64_t depth = moments.d_v + 1, parts = max_of(1, depth / kPanel);
  T *x = scratch.x_by_column, *own = scratch.own_by_column;
  rows_by_column(rows, F, scratch.x, row_size, x);
  values_and_factors(rows, moments.d_v, values, value_rows, factors, scratch.row_by_column);
  __builtin_memset(own, 0, F * kPanel * sizeof(T));
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    for (int64_t part = 0; part < parts; ++part) {  // summed by itself
      const int64_t begin = part * depth / parts, end = (part + 1) * depth / parts;
      panel_gemm<T, Left::kColumns>(layout.entries(panel), rows, end - begin,
                                    moments.values(panel) + begin * kPanel,
                                    scratch.row_by_column + begin * kPanel, scratch.tile, part > 0);
    }
    add_product_gradients(layout, panel, rows, x, scratch.tile, own);
  }
  for (int64_t i = 0; i < F * kPanel; i += kLanes<T>) store<T>(own + i, load(own + i) * T(0.5));
  for (int64_t r = 0; r < rows; r += kLanes<T>) {
    for (int64_t b = 0; b < F; b += kLanes<T>) {
      transpose_block(own + b * kPanel + r, kPanel, scratch.own + r * row_size + b, row_size);
    }
  }
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
