// What both passes without pairs (../linear_time.h) share: which units and queries take them, and
// the center of the values.
//
// A sum over entries keeps only what |phi_q|^2 sum_j |phi_j|^2 leaves of the last bits, and a query
// whose scores are all far below that would lose its weights: the mean square of the score between
// directions taken at random is 1/F of it, and queries whose sum of weights is below a quarter of
// that mean are computed by pairs (docs/performance.md, "Linear time", has what they would err).
//
// Values count relative to their mean over e_j. The mean goes into the output as it is, which saves
// the term of eps, and differences of values, as gradients are made of, keep their digits.
#pragma once

#include "attention/cpu/moments.h"
#include "attention/cpu/queries.h"
#include "attention/linear_time.h"

namespace ikattn::IKATTN_ISA {
namespace {

// What is known of the keys of one unit.
template <typename T>
struct LinearKeys {
  bool is_taken = false;   // no key is poisoned, and some are visible
  T magnitude = 0;         // sum e_j
  T* center = nullptr;     // [value panels][64]   sum e_j v_j / sum e_j
  double* sums = nullptr;  // [d_v]
  Moments<T> moments;

  void take(Workspace& workspace, const AttentionLayout<T>& layout, bool backward) {
    center = workspace.take<T>(layout.value_panels() * kPanel);
    sums = workspace.take<double>(layout.d_v);
    moments =
        Moments<T>::take(workspace, layout.products(), layout.value_panels(), !backward, backward);
  }
  // sum |phi_j|^2, which shift 0 leaves in the totals.
  T sum_of_squares(const ProductLayout& layout) const {
    T sum = 0;
    for (int64_t e = 0; e < layout.features(); ++e) sum += moments.totals[e];
    return sum;
  }
};

// Whether a unit goes without pairs, and the mean of its values. values(j0) loads those of a block
// of keys, [value panels][value_rows][64].
template <typename T, typename Values>
void find_center(const AttentionLayout<T>& layout, const PreparedKeys<T>& keys, int64_t S,
                 int64_t value_rows, const Values& values, LinearKeys<T>& out) {
  bool all_finite = true;
  double magnitude = 0;
  for (int64_t c = 0; c < layout.d_v; ++c) out.sums[c] = 0;
  for (int64_t j0 = 0; j0 < S; j0 += kPanel) {
    const int64_t count = min_of(kPanel, S - j0);
    const T* rows = values(j0);
    for (int64_t r = 0; r < count; ++r) {
      all_finite &= is_finite(keys.weight_terms[j0 + r]);
      const double root = static_cast<double>(keys.feature_scales[j0 + r]), e = root * root;
      if (e == 0) continue;
      magnitude += e;
      for (int64_t first = 0; first < layout.d_v; first += kPanel) {
        const T* row = rows + first * value_rows + r * kPanel;
        for (int64_t c = 0; c < min_of(kPanel, layout.d_v - first); ++c) {
          out.sums[first + c] += e * static_cast<double>(row[c]);
        }
      }
    }
  }
  out.is_taken = all_finite && magnitude > 0;
  out.magnitude = static_cast<T>(magnitude);
  for (int64_t c = 0; c < layout.value_panels() * kPanel; ++c) {
    out.center[c] = out.is_taken && c < layout.d_v ? static_cast<T>(out.sums[c] / magnitude) : T(0);
  }
}

// Panels of entries that a task takes.
inline int64_t panels_per_task(const ProductLayout& layout, int threads, bool whole) {
  return whole ? kProductPanels
               : max_of(1, min_of(kProductPanels, layout.panels() / (2 * threads)));
}

// What is left of the values [value panels][value_rows][64].
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

// |phi|^2 of one row of phi [feature panels][phi_rows][64].
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

// Whether products keep the digits of the weights of a query: their sum is not far below its mean
// over directions. |phi_q|^2 = query, sum |phi_j|^2 = keys.
template <typename T>
bool keeps_digits(const ProductLayout& layout, T sum_of_weights, T query, T keys) {
  constexpr T kShareOfMean = 0.25;
  return sum_of_weights * static_cast<T>(layout.features()) >= kShareOfMean * query * keys;
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
