// Sums over tokens of products of features times a row of numbers, and what is read out of them.
#pragma once

#include "attention/cpu/features/feature_products.h"

namespace ikattn::IKATTN_ISA {
namespace {

// Panels of entries, [begin, end).
struct Panels {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
};

// Sums over tokens of c_e psi_e(x) times a row of numbers, and times one number more.
template <typename T>
struct Moments {
  T* by_entry = nullptr;  // [panels][value panels][64 entries][64 values]
  T* by_value = nullptr;  // [panels][value panels][64 values][64 entries]
  T* totals = nullptr;    // [panels][64], and a vector more
  int64_t value_panels = 0;
  int64_t first_panel = 0;  // of entries, where not all of them are held

  int64_t tile(int64_t panel, int64_t of_values) const {
    return ((panel - first_panel) * value_panels + of_values) * kPanel * kPanel;
  }
  T* total(int64_t panel) const { return totals + (panel - first_panel) * kPanel; }
  // The array that sums are made in.
  T* summed() const { return by_entry ? by_entry : by_value; }

  static Moments take(Workspace& workspace, int64_t panels, int64_t value_panels, bool by_entry,
                      bool by_value) {
    const int64_t size = panels * value_panels * kPanel * kPanel;
    Moments result;
    if (by_entry) result.by_entry = workspace.take<T>(size);
    if (by_value) result.by_value = workspace.take<T>(size);
    result.totals = workspace.take<T>(panels * kPanel + kLanes<T>);
    result.value_panels = value_panels;
    return result;
  }
  void clear(const Panels& panels) const {
    __builtin_memset(summed() + tile(panels.begin, 0), 0,
                     panels.count() * value_panels * kPanel * kPanel * sizeof(T));
    __builtin_memset(total(panels.begin), 0, panels.count() * kPanel * sizeof(T));
  }
  // Where sums are made by entry and read by value, too.
  void transpose(const Panels& panels) const {
    for (int64_t at = tile(panels.begin, 0); at < tile(panels.end, 0); at += kPanel * kPanel) {
      transpose_panel(kPanel, kPanel, by_entry + at, by_value + at);
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
  T* tile = nullptr;     // [64][64]
  T* own = nullptr;      // [64][row_size]
  T* shifted = nullptr;  // [64][row_size]

  void take(Workspace& workspace, const ProductLayout& layout, int64_t value_panels,
            bool backward) {
    const int64_t row_size = layout.row_size<T>();
    x = workspace.take<T>(kMomentTokens * row_size);
    values = workspace.take<T>(value_panels * kMomentTokens * kPanel);
    factors = workspace.take<T>(kMomentTokens);
    psi = workspace.take<T>(kProductRows * kPanel + kLanes<T>);
    partial = workspace.take<T>(value_panels * kProductRows * kPanel);
    if (!backward) return;
    tile = workspace.take<T>(kPanel * kPanel + kLanes<T>);
    own = workspace.take<T>(kPanel * row_size);
    shifted = workspace.take<T>(kPanel * row_size);
  }
};

// Adds c_e psi_e(x) times `values` and `factors` of `count` tokens, all three in the scratch, to
// one panel of entries.
template <typename T>
void add_moments(const ProductLayout& layout, int64_t panel, int64_t count, int64_t d_v,
                 const ProductScratch<T>& scratch, const Moments<T>& out) {
  constexpr int64_t kVectors = kPanel / kLanes<T>;
  const auto runs = layout.runs(panel);
  const int64_t entries = layout.entries(panel), value_panels = ceil_div(d_v, kPanel);
  Vec<T> totals[kVectors] = {};
  for (int64_t t = 0; t < count; t += kPanel) {
    const int64_t rows = min_of(kPanel, count - t);
    feature_products<true>(layout, runs, rows, scratch.x + t * layout.row_size<T>(), scratch.psi);
    for (int64_t r = 0; r < rows; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        totals[v] += load(scratch.psi + r * kPanel + v * kLanes<T>) * scratch.factors[t + r];
      }
    }
    for (int64_t of_values = 0; of_values < value_panels; ++of_values) {
      const int64_t width = min_of(kPanel, d_v - of_values * kPanel);
      const T* values = scratch.values + (of_values * kMomentTokens + t) * kPanel;
      T* partial = scratch.partial + of_values * kPanel * kPanel;
      if (out.by_entry) {
        panel_gemm<T, Left::kColumns>(entries, width, rows, scratch.psi, values, partial, t > 0);
      } else {
        panel_gemm<T, Left::kColumns>(width, entries, rows, values, scratch.psi, partial, t > 0);
      }
    }
  }
  for (int64_t of_values = 0; of_values < value_panels; ++of_values) {
    const int64_t width = min_of(kPanel, d_v - of_values * kPanel);
    const T* partial = scratch.partial + of_values * kPanel * kPanel;
    T* sum = out.summed() + out.tile(panel, of_values);
    for (int64_t i = 0; i < (out.by_entry ? entries : width) * kPanel; i += kLanes<T>) {
      store<T>(sum + i, load(sum + i) + load(partial + i));
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    T* total = out.total(panel) + v * kLanes<T>;
    store<T>(total, load(total) + totals[v]);
  }
}

// Moments of some panels over `tokens` tokens. load_tokens(first, count) fills x, values and
// factors of the scratch for up to kMomentTokens tokens, or tells that none counts. Each sum is
// made by one thread, in the order of tokens.
template <typename T, typename Load>
void sum_moments(const ProductLayout& layout, const Panels& panels, int64_t tokens, int64_t d_v,
                 const Load& load_tokens, const ProductScratch<T>& scratch, const Moments<T>& out) {
  out.clear(panels);
  for (int64_t first = 0; first < tokens; first += kMomentTokens) {
    const int64_t count = min_of(kMomentTokens, tokens - first);
    if (!load_tokens(first, count)) continue;
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      add_moments(layout, panel, count, d_v, scratch, out);
    }
  }
}

// Moments of values relative to one center, [value panels][64], become those relative to another.
template <typename T>
void move_center(const Panels& panels, const T* from, const T* to, const Moments<T>& out) {
  T step[kPanel];
  for (int64_t of_values = 0; of_values < out.value_panels; ++of_values) {
    for (int64_t c = 0; c < kPanel; ++c) {
      step[c] = to[of_values * kPanel + c] - from[of_values * kPanel + c];
    }
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      const T* of_row = out.by_entry ? out.total(panel) : step;
      const T* of_column = out.by_entry ? step : out.total(panel);
      T* tile = out.summed() + out.tile(panel, of_values);
      for (int64_t r = 0; r < kPanel; ++r) {
        for (int64_t c = 0; c < kPanel; c += kLanes<T>) {
          T* sum = tile + r * kPanel + c;
          store<T>(sum, load(sum) - load(of_column + c) * of_row[r]);
        }
      }
    }
  }
}

// Totals of numbers f + g . center, g the values, become those of another center.
template <typename T>
void move_center_in_totals(const Panels& panels, int64_t d_v, const T* from, const T* to,
                           const Moments<T>& out) {
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    for (int64_t e = 0; e < kPanel; ++e) {
      Vec<T> sum{};
      for (int64_t c = 0; c < d_v; c += kLanes<T>) {
        const T* row = out.by_entry + out.tile(panel, c / kPanel) + e * kPanel;
        Vec<T> term = load(row + c % kPanel) * (load(to + c) - load(from + c));
        if (d_v - c < kLanes<T>) term = first_lanes<T>(term, d_v - c);
        sum += term;
      }
      out.total(panel)[e] += sum_of_lanes<T>(sum);
    }
  }
}

// scratch.partial [value panels][rows][64] = sum over some panels of psi_e(x) moments_e of up to
// kProductRows tokens, whose features are in the scratch; sums [rows][lanes], where there are any,
// grow by psi_e(x) totals_e.
template <typename T>
void read_panels(const ProductLayout& layout, const Panels& panels, int64_t d_v,
                 const Moments<T>& moments, int64_t rows, const ProductScratch<T>& scratch,
                 T* sums) {
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    const int64_t entries = layout.entries(panel);
    feature_products(layout, layout.runs(panel), rows, scratch.x, scratch.psi);
    if (sums) add_sums_of_products(entries, rows, scratch.psi, moments.total(panel), sums);
    for (int64_t of_values = 0; of_values < moments.value_panels; ++of_values) {
      panel_gemm<T, Left::kRows>(rows, min_of(kPanel, d_v - of_values * kPanel), entries,
                                 scratch.psi, moments.by_entry + moments.tile(panel, of_values),
                                 scratch.partial + of_values * rows * kPanel, panel > panels.begin);
    }
  }
}

// out [value panels][out_rows][64] grows by panels [value panels][rows][64], or is set to it.
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

// out [value panels][out_rows][64] = sum_e psi_e(x) moments_e, sums as in read_panels.
template <typename T>
void read_moments(const ProductLayout& layout, int64_t d_v, const Moments<T>& moments, int64_t rows,
                  const ProductScratch<T>& scratch, T* sums, T* out, int64_t out_rows) {
  for (int64_t begin = 0; begin < layout.panels(); begin += kProductPanels) {
    const Panels panels{begin, min_of(layout.panels(), begin + kProductPanels)};
    read_panels(layout, panels, d_v, moments, rows, scratch, sums);
    add_panels(rows, d_v, scratch.partial, out, out_rows, begin > 0);
  }
}

// Gradients of half of sum_e psi_e(x) (moments_e . values + totals_e factor) over some panels, for
// up to 64 tokens whose features are in the scratch: to scratch.own. values
// [value panels][value_rows][64], factors [rows].
template <typename T>
void product_gradients(const ProductLayout& layout, const Panels& panels, int64_t d_v,
                       const Moments<T>& moments, int64_t rows, const T* values, int64_t value_rows,
                       const T* factors, const ProductScratch<T>& scratch) {
  const int64_t row_size = layout.row_size<T>();
  __builtin_memset(scratch.own, 0, rows * row_size * sizeof(T));
  __builtin_memset(scratch.shifted, 0, rows * row_size * sizeof(T));
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < kPanel; c += kLanes<T>) {
        store<T>(scratch.tile + r * kPanel + c, load(moments.total(panel) + c) * factors[r]);
      }
    }
    for (int64_t of_values = 0; of_values < moments.value_panels; ++of_values) {
      panel_gemm<T, Left::kRows>(
          rows, layout.entries(panel), min_of(kPanel, d_v - of_values * kPanel),
          values + of_values * value_rows * kPanel,
          moments.by_value + moments.tile(panel, of_values), scratch.tile, true);
    }
    add_product_gradients(layout, layout.runs(panel), rows, scratch.x, scratch.tile, scratch.own,
                          scratch.shifted);
  }
  fold_gradients(layout, rows, scratch.shifted, scratch.own);
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
