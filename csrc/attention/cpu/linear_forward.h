// Forward pass without pairs: moments of the keys, then their sums with the products of each
// query's features.
#pragma once

#include "attention/cpu/linear_time.h"

namespace ikattn::IKATTN_ISA {
namespace {

// What a thread needs beside the rest for rows without pairs.
template <typename T>
struct LinearScratch {
  ProductScratch<T> products;
  T* sums = nullptr;            // [rows]   of the weights
  T* out = nullptr;             // [value panels][rows][64]   while others are computed by pairs
  uint8_t* by_pairs = nullptr;  // [rows]   marks those that would lose digits

  void take(Workspace& workspace, const AttentionLayout<T>& layout, int64_t rows) {
    products.take(workspace, layout.products(), layout.value_panels(), false);
    sums = workspace.take<T>(rows);
    out = workspace.take<T>(layout.value_panels() * rows * kPanel);
    by_pairs = workspace.take<uint8_t>(rows);
  }
};

// Moments of the prepared keys, panels [begin, end) of entries.
template <typename T>
void sum_key_moments(const AttentionLayout<T>& layout, int64_t S, const PreparedKeys<T>& keys,
                     const LinearKeys<T>& linear, int64_t begin, int64_t end,
                     const KeyScratch<T>& scratch, const ProductScratch<T>& own) {
  const ProductLayout products = layout.products();
  sum_moments(
      products, begin, end, S, layout.d_v,
      [&](int64_t first, int64_t count) {
        for (int64_t j0 = first; j0 < first + count; j0 += kPanel) {
          const int64_t rows = min_of(kPanel, first + count - j0);
          for (int64_t panel = 0; panel < layout.feature_panels(); ++panel) {
            const int64_t block = j0 / kPanel * layout.feature_panels() + panel;
            transpose_panel(layout.feature.columns(panel), rows,
                            keys.by_column.phi + block * kPanel * kPanel,
                            scratch.features + panel * kPanel * kPanel);
          }
          gather_features(layout.feature, rows, scratch.features, kPanel,
                          own.x + (j0 - first) * products.row_size<T>());
        }
        copy_rows(count, layout.d_v, keys.values + first * kPanel, layout.padded_keys, own.values,
                  kMomentTokens);
        subtract_center(count, layout.d_v, linear.center, own.values, kMomentTokens);
        for (int64_t t = 0; t < count; ++t) own.factors[t] = 1;
      },
      own, linear.moments);
}

// Features, sums of weights and marks of the queries of a block, phi [feature panels][rows][64], to
// the scratch. Returns how many are marked.
template <typename T>
int64_t sum_weights(const AttentionLayout<T>& layout, const LinearKeys<T>& keys, T eps,
                    int64_t rows, const T* phi, const LinearScratch<T>& scratch) {
  const ProductLayout products = layout.products();
  const T of_keys = keys.sum_of_squares(products);
  gather_features(layout.feature, rows, phi, rows, scratch.products.x);
  int64_t marked = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const T* x = scratch.products.x + r * products.row_size<T>();
    const T sum = sum_of_products(products, x, keys.moments.totals) + eps * keys.magnitude;
    const T square = square_of(layout.feature, phi, rows, r);
    scratch.sums[r] = sum;
    scratch.by_pairs[r] = !keeps_digits(products, sum, square, of_keys);
    marked += scratch.by_pairs[r];
  }
  return marked;
}

// out [value panels][rows][64] = sum_j w_ij v_j of the queries whose features are in the scratch.
template <typename T>
void weighted_values(const AttentionLayout<T>& layout, const LinearKeys<T>& keys, int64_t rows,
                     const LinearScratch<T>& scratch, T* out) {
  const T* sums = scratch.sums;
  read_moments(layout.products(), layout.d_v, keys.moments, rows, scratch.products, out, rows);
  for (int64_t first = 0; first < layout.d_v; first += kPanel) {
    for (int64_t r = 0; r < rows; ++r) {
      T* row = out + first * rows + r * kPanel;
      for (int64_t c = 0; c < kPanel; c += kLanes<T>) {
        store<T>(row + c, load(row + c) + load(keys.center + first + c) * sums[r]);
      }
    }
  }
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
