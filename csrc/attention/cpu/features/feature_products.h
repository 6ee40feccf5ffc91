// Products of two features, whose sums over tokens replace pairs (../linear/moments.h).
//
//   psi_{r,b}(x) = x_b x_{(b + r) mod F},  r = 0 .. F/2,  b = 0 .. F - 1,  entry e = r F + b
//   (q . k)^2 = sum_e c_e psi_e(q) psi_e(k)
//
// Shift 0 holds the squares, c = 1; the shifts below F/2 hold every other product once, c = 2, and
// shift F/2 each of its products twice, c = 1. Rows of shifted features are whole, where a triangle
// of products has ragged ones, for 1 in F entries more.
#pragma once

#include "attention/cpu/features/features.h"

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
  // Returns the length of a row of features, with the M features that shifts read again, and the
  // rest of the last vector.
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
  // Returns c_e of the entries of a run.
  template <typename T>
  T multiplicity(const ShiftRun& run) const {
    return run.shift == 0 || run.shift == M ? T(1) : T(2);
  }
};

// Copies features without their padding to x [rows][row_size] from phi [panels][phi_rows][64].
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

// Adds x [count] to target, and zeros up to whole vectors.
template <typename T>
inline void add_vectors(int64_t count, const T* x, T* target) {
  for (int64_t c = 0; c < count; c += kLanes<T>) {
    Vec<T> term = load(x + c);
    if (count - c < kLanes<T>) term = first_lanes<T>(term, count - c);
    store<T>(target + c, load(target + c) + term);
  }
}

// Adds x [rows][row_size] to phi [panels][phi_rows][64].
template <typename T>
void add_features(const FeatureLayout<T>& layout, int64_t rows, const T* x, T* phi,
                  int64_t phi_rows) {
  const int64_t size = ProductLayout{layout.M}.row_size<T>();
  for (int64_t r = 0; r < rows; ++r) {
    const T* next = x + r * size;
    for (int64_t panel = 0; panel < layout.panels(); ++panel) {
      T* target = phi + (panel * phi_rows + r) * kPanel;
      const int64_t count = layout.frequencies(panel);
      add_vectors(count, next, target);
      add_vectors(count, next + count, target + layout.half(panel));
      next += 2 * count;
    }
  }
}

// Computes psi [rows][64], and a vector more, of one panel of entries; it may be anything beyond
// the last entry. One of the two sides of a score has its products times c_e.
template <bool kTimesMultiplicity = false, typename T>
void feature_products(const ProductLayout& layout, const ProductLayout::Runs& runs, int64_t rows,
                      const T* x, T* psi) {
  const int64_t size = layout.row_size<T>();
  for (int64_t r = 0; r < rows; ++r) {
    for (const ShiftRun& run : runs) {
      const T* left = x + r * size + run.feature;
      T* out = psi + r * kPanel + run.column;
      const T factor = layout.multiplicity<T>(run);
      // The last vector may write beyond the run; the next run or row overwrites that.
      for (int64_t c = 0; c < run.count; c += kLanes<T>) {
        Vec<T> product = load(left + c) * load(left + run.shift + c);
        if constexpr (kTimesMultiplicity) product *= factor;
        store<T>(out + c, product);
      }
    }
  }
}

// Adds sum_e psi_e(x) weights[e] of one panel of entries to sums [rows][lanes], a part per lane.
template <typename T>
void add_sums_of_products(int64_t entries, int64_t rows, const T* psi, const T* weights, T* sums) {
  for (int64_t r = 0; r < rows; ++r) {
    Vec<T> sum = load(sums + r * kLanes<T>);
    for (int64_t e = 0; e < entries; e += kLanes<T>) {
      Vec<T> product = load(psi + r * kPanel + e) * load(weights + e);
      if (entries - e < kLanes<T>) product = first_lanes<T>(product, entries - e);
      sum += product;
    }
    store<T>(sums + r * kLanes<T>, sum);
  }
}

// Columns, [features or entries][64 tokens], have whole aligned vectors whatever F is, and a
// product with a few values still fills its lanes.

// Transposes up to 64 rows of whole vectors, `stride` apart, to target [columns, whole
// vectors][64]. Lanes without a token may hold anything.
template <typename T>
void rows_by_column(int64_t rows, int64_t columns, const T* source, int64_t stride, T* target) {
  const int64_t whole = rows - rows % kLanes<T>;
  for (int64_t r = 0; r < whole; r += kLanes<T>) {
    for (int64_t c = 0; c < columns; c += kLanes<T>) {
      transpose_block(source + r * stride + c, stride, target + c * kPanel + r, kPanel);
    }
  }
  for (int64_t r = whole; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) target[c * kPanel + r] = source[r * stride + c];
  }
}

// Calls visit(e, b, other) for the entries of a panel, where `other` is the index of x_{(b + r) mod
// F}.
template <typename Visit>
inline void for_each_product(const ProductLayout& layout, int64_t panel, const Visit& visit) {
  const int64_t F = layout.features();
  for (const ShiftRun& run : layout.runs(panel)) {
    for (int64_t i = 0; i < run.count; ++i) {
      const int64_t b = run.feature + i, other = b + run.shift;
      visit(run.column + i, b, other < F ? other : other - F);
    }
  }
}

// Computes psi [64 entries][64] of one panel of entries, from x [features][64].
template <typename T>
void feature_products_by_column(const ProductLayout& layout, int64_t panel, int64_t tokens,
                                const T* x, T* psi) {
  for_each_product(layout, panel, [&](int64_t e, int64_t b, int64_t other) {
    const T *left = x + b * kPanel, *right = x + other * kPanel;
    for (int64_t t = 0; t < tokens; t += kLanes<T>) {
      store<T>(psi + e * kPanel + t, load(left + t) * load(right + t));
    }
  });
}

// Adds the gradient of sum_e psi_e(x) g_e to grad_x [features][64], for g [64 entries][64] of one
// panel of entries.
template <typename T>
void add_product_gradients(const ProductLayout& layout, int64_t panel, int64_t tokens, const T* x,
                           const T* g, T* grad_x) {
  for_each_product(layout, panel, [&](int64_t e, int64_t b, int64_t other) {
    const T *left = x + b * kPanel, *right = x + other * kPanel;
    T *of_left = grad_x + b * kPanel, *of_right = grad_x + other * kPanel;
    for (int64_t t = 0; t < tokens; t += kLanes<T>) {
      const Vec<T> gradient = load(g + e * kPanel + t);
      store<T>(of_left + t, load(of_left + t) + load(right + t) * gradient);
      store<T>(of_right + t, load(of_right + t) + load(left + t) * gradient);
    }
  });
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
