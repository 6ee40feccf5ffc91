// Products of two features, and the sums of them over tokens that make weights without pairs.
//
//   psi_{r,b}(x) = x_b x_{(b + r) mod F},  r = 0 .. F/2,  b = 0 .. F - 1,  entry e = r F + b
//   (q . k)^2 = sum_e c_e psi_e(q) psi_e(k)
//
// Shift 0 holds the squares, c = 1; the shifts below F/2 hold every other product once, c = 2, and
// shift F/2 each of its products twice, c = 1. Whole rows of shifted features, where a triangle of
// products would have ragged ones, for 1 in F entries more.
#pragma once

#include "attention/cpu/features.h"

namespace ikattn::IKATTN_ISA {
namespace {

// Entries of a panel that are one shift of consecutive features.
struct ShiftRun {
  int64_t column, feature, shift, count;
};

struct ProductLayout {
  int64_t M = 0;

  int64_t features() const { return 2 * M; }
  int64_t size() const { return features() * (M + 1); }
  int64_t panels() const { return ceil_div(size(), kPanel); }
  int64_t entries(int64_t panel) const { return min_of(kPanel, size() - panel * kPanel); }
  // Numbers of a row of features: with the M that shifts reach once more, and what whole vectors
  // read beyond.
  template <typename T>
  int64_t row_size() const {
    return round_up(features() + M + kLanes<T>, kLanes<T>);
  }

  struct Runs {
    ShiftRun run[kPanel / 2 + 1];
    int count = 0;
    const ShiftRun* begin() const { return run; }
    const ShiftRun* end() const { return run + count; }
  };
  Runs runs(int64_t panel) const {
    Runs result;
    const int64_t first = panel * kPanel, end = first + entries(panel);
    for (int64_t e = first; e < end; e += result.run[result.count++].count) {
      const int64_t feature = e % features();
      result.run[result.count] = {e - first, feature, e / features(),
                                  min_of(end - e, features() - feature)};
    }
    return result;
  }
  // c_e of the entries of a run.
  template <typename T>
  T multiplicity(const ShiftRun& run) const {
    return run.shift == 0 || run.shift == M ? T(1) : T(2);
  }
};

// Zero from lane `count` on.
template <typename T>
inline Vec<T> first_lanes(Vec<T> value, int64_t count) {
  Bits<T> lane;
  for (int i = 0; i < kLanes<T>; ++i) lane[i] = i;
  return lane < static_cast<decltype(+lane[0])>(count) ? value : Vec<T>{};
}

// x [rows][row_size] from phi [panels][phi_rows][64]: features without their padding.
template <typename T>
void gather_features(const FeatureLayout<T>& layout, int64_t rows, const T* phi, int64_t phi_rows,
                     T* x) {
  const ProductLayout products{layout.M};
  const int64_t size = products.row_size<T>(), features = products.features();
  for (int64_t r = 0; r < rows; ++r) {
    T* row = x + r * size;
    T* end = row;
    for (int64_t panel = 0; panel < layout.panels(); ++panel) {
      const T* source = phi + (panel * phi_rows + r) * kPanel;
      const int64_t count = layout.frequencies(panel), bytes = count * int64_t{sizeof(T)};
      __builtin_memcpy(end, source, bytes);
      __builtin_memcpy(end + count, source + layout.half(panel), bytes);
      end += 2 * count;
    }
    __builtin_memcpy(end, row, layout.M * sizeof(T));
    __builtin_memset(end + layout.M, 0, (size - features - layout.M) * sizeof(T));
  }
}

// The other way: phi [panels][phi_rows][64] from x [rows][row_size], zero where it is padded.
template <typename T>
void scatter_features(const FeatureLayout<T>& layout, int64_t rows, const T* x, T* phi,
                      int64_t phi_rows) {
  const int64_t size = ProductLayout{layout.M}.row_size<T>();
  for (int64_t r = 0; r < rows; ++r) {
    const T* next = x + r * size;
    for (int64_t panel = 0; panel < layout.panels(); ++panel) {
      T* target = phi + (panel * phi_rows + r) * kPanel;
      const int64_t count = layout.frequencies(panel), bytes = count * int64_t{sizeof(T)};
      __builtin_memset(target, 0, kPanel * sizeof(T));
      __builtin_memcpy(target, next, bytes);
      __builtin_memcpy(target + layout.half(panel), next + count, bytes);
      next += 2 * count;
    }
  }
}

// psi [rows][64], and a vector more, of one panel of entries; beyond the last entry anything.
template <typename T>
void feature_products(const ProductLayout& layout, const ProductLayout::Runs& runs, int64_t rows,
                      const T* x, T* psi) {
  const int64_t size = layout.row_size<T>();
  for (int64_t r = 0; r < rows; ++r) {
    for (const ShiftRun& run : runs) {
      const T* left = x + r * size + run.feature;
      T* out = psi + r * kPanel + run.column;
      // What the last vector writes beyond the run, the next run or row writes again.
      for (int64_t c = 0; c < run.count; c += kLanes<T>) {
        store<T>(out + c, load(left + c) * load(left + run.shift + c));
      }
    }
  }
}

// sum_e psi_e(x) weights[e] of one token.
template <typename T>
T sum_of_products(const ProductLayout& layout, const T* x, const T* weights) {
  const int64_t F = layout.features();
  Vec<T> sums[2] = {};
  for (int64_t shift = 0; shift <= layout.M; ++shift) {
    for (int64_t b = 0; b < F; b += kLanes<T>) {
      Vec<T> product = load(x + b) * load(x + b + shift) * load(weights + shift * F + b);
      if (F - b < kLanes<T>) product = first_lanes<T>(product, F - b);
      sums[b / kLanes<T> % 2] += product;
    }
  }
  return sum_of_lanes<T>(sums[0] + sums[1]);
}

// The gradient of sum_e psi_e(x) g_e, in two parts: what reaches x_b lies in `own`, what reaches
// x_{b + r}, as far as the row goes, in `shifted`; both [rows][row_size], to be added by
// fold_gradients. g [rows][64] is that of one panel of entries.
template <typename T>
void add_product_gradients(const ProductLayout& layout, const ProductLayout::Runs& runs,
                           int64_t rows, const T* x, const T* g, T* own, T* shifted) {
  const int64_t size = layout.row_size<T>();
  for (int64_t r = 0; r < rows; ++r) {
    for (const ShiftRun& run : runs) {
      const int64_t first = r * size + run.feature;
      for (int64_t c = 0; c < run.count; c += kLanes<T>) {
        Vec<T> gradient = load(g + r * kPanel + run.column + c);
        if (run.count - c < kLanes<T>) gradient = first_lanes<T>(gradient, run.count - c);
        T* left = own + first + c;
        T* right = shifted + first + run.shift + c;
        store<T>(left, load(left) + load(x + first + run.shift + c) * gradient);
        store<T>(right, load(right) + load(x + first + c) * gradient);
      }
    }
  }
}

// own = (own + shifted) / 2, features beyond the last one again from the first on.
template <typename T>
void fold_gradients(const ProductLayout& layout, int64_t rows, const T* shifted, T* own) {
  const int64_t size = layout.row_size<T>(), F = layout.features();
  for (int64_t r = 0; r < rows; ++r) {
    T* row = own + r * size;
    const T* other = shifted + r * size;
    for (int64_t b = 0; b < layout.M; ++b) row[b] += other[F + b];
    for (int64_t b = 0; b < F; ++b) row[b] = (row[b] + other[b]) * T(0.5);
  }
}

// Sums over tokens of psi_e(x) times a row of numbers, and times one number more.
template <typename T>
struct Moments {
  T* by_entry = nullptr;  // [panels][value panels][64 entries][64 values]
  T* by_value = nullptr;  // [panels][value panels][64 values][64 entries]
  T* totals = nullptr;    // [panels][64], and a vector more

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

// Moments of the panels [begin, end) over `tokens` tokens: psi_e(x) times `values`, and times
// `factors`. load(first, count) fills these three arrays of the scratch for up to kMomentTokens
// tokens. Each sum is made by one thread, in the order of tokens. In the end they are multiplied
// with c_e.
template <typename T, typename Load>
void sum_moments(const ProductLayout& layout, int64_t begin, int64_t end, int64_t tokens,
                 int64_t d_v, const Load& load_tokens, const ProductScratch<T>& scratch,
                 const Moments<T>& out) {
  const int64_t value_panels = ceil_div(d_v, kPanel), row_size = layout.row_size<T>();
  T* const sums = out.by_entry ? out.by_entry : out.by_value;
  const auto tile_of = [&](int64_t panel, int64_t value_panel) {
    return sums + (panel * value_panels + value_panel) * kPanel * kPanel;
  };
  __builtin_memset(tile_of(begin, 0), 0,
                   (end - begin) * value_panels * kPanel * kPanel * sizeof(T));
  __builtin_memset(out.totals + begin * kPanel, 0, (end - begin) * kPanel * sizeof(T));
  for (int64_t first = 0; first < tokens; first += kMomentTokens) {
    const int64_t count = min_of(kMomentTokens, tokens - first);
    load_tokens(first, count);
    for (int64_t panel = begin; panel < end; ++panel) {
      const auto runs = layout.runs(panel);
      const int64_t entries = layout.entries(panel);
      Vec<T> totals[kPanel / kLanes<T>] = {};
      for (int64_t t = 0; t < count; t += kPanel) {
        const int64_t rows = min_of(kPanel, count - t);
        feature_products(layout, runs, rows, scratch.x + t * row_size, scratch.psi);
        for (int64_t r = 0; r < rows; ++r) {
          for (int v = 0; v < kPanel / kLanes<T>; ++v) {
            totals[v] += load(scratch.psi + r * kPanel + v * kLanes<T>) * scratch.factors[t + r];
          }
        }
        for (int64_t of_values = 0; of_values < value_panels; ++of_values) {
          const int64_t width = min_of(kPanel, d_v - of_values * kPanel);
          const T* values = scratch.values + (of_values * kMomentTokens + t) * kPanel;
          T* partial = scratch.partial + of_values * kPanel * kPanel;
          if (out.by_entry) {
            panel_gemm<T, Left::kColumns>(entries, width, rows, scratch.psi, values, partial,
                                          t > 0);
          } else {
            panel_gemm<T, Left::kColumns>(width, entries, rows, values, scratch.psi, partial,
                                          t > 0);
          }
        }
      }
      for (int64_t of_values = 0; of_values < value_panels; ++of_values) {
        const int64_t width = min_of(kPanel, d_v - of_values * kPanel);
        const T* partial = scratch.partial + of_values * kPanel * kPanel;
        T* sum = tile_of(panel, of_values);
        for (int64_t i = 0; i < (out.by_entry ? entries : width) * kPanel; i += kLanes<T>) {
          store<T>(sum + i, load(sum + i) + load(partial + i));
        }
      }
      for (int v = 0; v < kPanel / kLanes<T>; ++v) {
        T* total = out.totals + panel * kPanel + v * kLanes<T>;
        store<T>(total, load(total) + totals[v]);
      }
    }
  }
  for (int64_t panel = begin; panel < end; ++panel) {
    for (const ShiftRun& run : layout.runs(panel)) {
      const T factor = layout.multiplicity<T>(run);
      for (int64_t e = run.column; e < run.column + run.count; ++e) {
        out.totals[panel * kPanel + e] *= factor;
        for (int64_t of_values = 0; of_values < value_panels; ++of_values) {
          T* tile = tile_of(panel, of_values);
          for (int64_t c = 0; c < kPanel; ++c)
            tile[out.by_entry ? e * kPanel + c : c * kPanel + e] *= factor;
        }
      }
    }
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
