// Sums over tokens of products of features times a row of numbers, and what is read out of them.
#pragma once

#include "attention/cpu/feature_products.h"

namespace ikattn::IKATTN_ISA {
namespace {

// Sums over tokens of psi_e(x) times a row of numbers, and times one number more.
template <typename T>
struct Moments {
  T* by_entry = nullptr;  // [panels][value panels][64 entries][64 values]
  T* by_value = nullptr;  // [panels][value panels][64 values][64 entries]
  T* totals = nullptr;    // [panels][64], and a vector more

  // The tile that sums are made in.
  T* summed(int64_t value_panels, int64_t panel, int64_t of_values) const {
    return (by_entry ? by_entry : by_value) + (panel * value_panels + of_values) * kPanel * kPanel;
  }

  static Moments take(Workspace& workspace, const ProductLayout& layout, int64_t value_panels,
                      bool by_entry, bool by_value) {
    const int64_t size = layout.panels() * value_panels * kPanel * kPanel;
    Moments result;
    if (by_entry) result.by_entry = workspace.take<T>(size);
    if (by_value) result.by_value = workspace.take<T>(size);
    result.totals = workspace.take<T>(layout.panels() * kPanel + kLanes<T>);
    return result;
  }
};

constexpr int64_t kMomentTokens = 256;  // summed by themselves, then added: errors stay small
constexpr int64_t kProductRows = 192;   // query rows that read the moments together
constexpr int64_t kProductPanels = 16;  // of entries, whose moments stay in cache for all tokens

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

// Adds psi_e(x) times `values` and `factors` of `count` tokens, all three in the scratch, to one
// panel of entries.
template <typename T>
void add_moments(const ProductLayout& layout, int64_t panel, int64_t count, int64_t d_v,
                 const ProductScratch<T>& scratch, const Moments<T>& out) {
  constexpr int64_t kVectors = kPanel / kLanes<T>;
  const auto runs = layout.runs(panel);
  const int64_t entries = layout.entries(panel), value_panels = ceil_div(d_v, kPanel);
  Vec<T> totals[kVectors] = {};
  for (int64_t t = 0; t < count; t += kPanel) {
    const int64_t rows = min_of(kPanel, count - t);
    feature_products(layout, runs, rows, scratch.x + t * layout.row_size<T>(), scratch.psi);
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
    T* sum = out.summed(value_panels, panel, of_values);
    for (int64_t i = 0; i < (out.by_entry ? entries : width) * kPanel; i += kLanes<T>) {
      store<T>(sum + i, load(sum + i) + load(partial + i));
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    T* total = out.totals + panel * kPanel + v * kLanes<T>;
    store<T>(total, load(total) + totals[v]);
  }
}

// The moments of one panel of entries times c_e.
template <typename T>
void multiply_entries(const ProductLayout& layout, int64_t panel, int64_t value_panels,
                      const Moments<T>& out) {
  const int64_t entry_step = out.by_entry ? kPanel : 1, value_step = out.by_entry ? 1 : kPanel;
  for (const ShiftRun& run : layout.runs(panel)) {
    const T factor = layout.multiplicity<T>(run);
    if (factor == 1) continue;
    for (int64_t e = run.column; e < run.column + run.count; ++e) {
      out.totals[panel * kPanel + e] *= factor;
      for (int64_t of_values = 0; of_values < value_panels; ++of_values) {
        T* entry = out.summed(value_panels, panel, of_values) + e * entry_step;
        for (int64_t c = 0; c < kPanel; ++c) entry[c * value_step] *= factor;
      }
    }
  }
}

// Moments of the panels [begin, end) over `tokens` tokens. load_tokens(first, count) fills x,
// values and factors of the scratch for up to kMomentTokens tokens. Each sum is made by one thread,
// in the order of tokens.
template <typename T, typename Load>
void sum_moments(const ProductLayout& layout, int64_t begin, int64_t end, int64_t tokens,
                 int64_t d_v, const Load& load_tokens, const ProductScratch<T>& scratch,
                 const Moments<T>& out) {
  const int64_t value_panels = ceil_div(d_v, kPanel), panels = end - begin;
  __builtin_memset(out.summed(value_panels, begin, 0), 0,
                   panels * value_panels * kPanel * kPanel * sizeof(T));
  __builtin_memset(out.totals + begin * kPanel, 0, panels * kPanel * sizeof(T));
  for (int64_t first = 0; first < tokens; first += kMomentTokens) {
    const int64_t count = min_of(kMomentTokens, tokens - first);
    load_tokens(first, count);
    for (int64_t panel = begin; panel < end; ++panel) {
      add_moments(layout, panel, count, d_v, scratch, out);
    }
  }
  for (int64_t panel = begin; panel < end; ++panel) {
    multiply_entries(layout, panel, value_panels, out);
  }
}

// out [value panels][out_rows][64] = sum_e psi_e(x) moments_e of up to kProductRows tokens, whose
// features are in the scratch.
template <typename T>
void read_moments(const ProductLayout& layout, int64_t d_v, const Moments<T>& moments, int64_t rows,
                  const ProductScratch<T>& scratch, T* out, int64_t out_rows) {
  const int64_t value_panels = ceil_div(d_v, kPanel);
  for (int64_t begin = 0; begin < layout.panels(); begin += kProductPanels) {
    for (int64_t panel = begin; panel < min_of(layout.panels(), begin + kProductPanels); ++panel) {
      feature_products(layout, layout.runs(panel), rows, scratch.x, scratch.psi);
      for (int64_t of_values = 0; of_values < value_panels; ++of_values) {
        const T* tile = moments.by_entry + (panel * value_panels + of_values) * kPanel * kPanel;
        panel_gemm<T, Left::kRows>(rows, min_of(kPanel, d_v - of_values * kPanel),
                                   layout.entries(panel), scratch.psi, tile,
                                   scratch.partial + of_values * rows * kPanel, panel > begin);
      }
    }
    for (int64_t of_values = 0; of_values < value_panels; ++of_values) {
      const T* partial = scratch.partial + of_values * rows * kPanel;
      T* sum = out + of_values * out_rows * kPanel;
      for (int64_t i = 0; i < rows * kPanel; i += kLanes<T>) {
        store<T>(sum + i, begin > 0 ? load(sum + i) + load(partial + i) : load(partial + i));
      }
    }
  }
}

// Gradients of half of sum_e psi_e(x) (moments_e . values + totals_e factor), for up to 64 tokens
// whose features are in the scratch: to scratch.own. values [value panels][value_rows][64], factors
// [rows].
template <typename T>
void product_gradients(const ProductLayout& layout, int64_t d_v, const Moments<T>& moments,
                       int64_t rows, const T* values, int64_t value_rows, const T* factors,
                       const ProductScratch<T>& scratch) {
  const int64_t value_panels = ceil_div(d_v, kPanel), row_size = layout.row_size<T>();
  __builtin_memset(scratch.own, 0, rows * row_size * sizeof(T));
  __builtin_memset(scratch.shifted, 0, rows * row_size * sizeof(T));
  for (int64_t panel = 0; panel < layout.panels(); ++panel) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < kPanel; c += kLanes<T>) {
        store<T>(scratch.tile + r * kPanel + c,
                 load(moments.totals + panel * kPanel + c) * factors[r]);
      }
    }
    for (int64_t of_values = 0; of_values < value_panels; ++of_values) {
      const T* right = moments.by_value + (panel * value_panels + of_values) * kPanel * kPanel;
      panel_gemm<T, Left::kRows>(
          rows, layout.entries(panel), min_of(kPanel, d_v - of_values * kPanel),
          values + of_values * value_rows * kPanel, right, scratch.tile, true);
    }
    add_product_gradients(layout, layout.runs(panel), rows, scratch.x, scratch.tile, scratch.own,
                          scratch.shifted);
  }
  fold_gradients(layout, rows, scratch.shifted, scratch.own);
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
