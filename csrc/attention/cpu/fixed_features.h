// Features in fixed point, for the scores of bfloat16 inputs.
//
// A token's features are divided by a step of their own, as small as 32 bits allow: a score is the
// sum of their products, and by Cauchy and Schwarz at most the product of both norms, so that norms
// of 46300 steps will do. At 64 frequencies the rounding error of a feature of usual size is at
// most 2^-13 of it, where that of bfloat16 is up to 2^-8; more frequencies share the same bits.
#pragma once

#include "attention/cpu/features.h"
#include "support/cpu/sixteen_bits.h"

namespace ikattn::IKATTN_ISA {
namespace {

constexpr int64_t kFixedFrequencies = kPanel;  // of a panel: cosine and sine lie in one lane

struct FixedLayout {
  int64_t M;

  int64_t panels() const { return ceil_div(M, kFixedFrequencies); }
  int64_t lanes(int64_t panel) const {
    return round_up(min_of(kFixedFrequencies, M - panel * kFixedFrequencies), kLanes<float>);
  }
};

// steps[row]: of each row of phi [panels][phi_rows][64]; 0 where it is zero.
inline void choose_steps(const FeatureLayout<float>& layout, int64_t rows, const float* phi,
                         int64_t phi_rows, float* steps) {
  constexpr float kNorm = 46300, kLargest = 32766;  // below 2^15.5 and 2^15 with what rounding adds
  for (int64_t r = 0; r < rows; ++r) {
    Vec<float> squares{}, largest{};
    for (int64_t panel = 0; panel < layout.panels(); ++panel) {
      const float* row = phi + (panel * phi_rows + r) * kPanel;
      for (int64_t c = 0; c < layout.columns(panel); c += kLanes<float>) {
        const Vec<float> x = load(row + c), size = x < 0 ? -x : x;
        squares += x * x;
        largest = size > largest ? size : largest;
      }
    }
    const float norm = square_root(sum_of_lanes<float>(squares));
    const float of_norm = norm / kNorm, of_largest = max_of_lanes<float>(largest) / kLargest;
    steps[r] = of_norm > of_largest ? of_norm : of_largest;
  }
}

// One panel of them, out [rows][64], from phi [panels][phi_rows][64].
inline void fix_features(const FeatureLayout<float>& layout, int64_t fixed_panel, int64_t rows,
                         const float* phi, int64_t phi_rows, const float* steps, int32_t* out) {
  const int64_t last = min_of(layout.panels(), 2 * fixed_panel + 2);
  for (int64_t panel = 2 * fixed_panel; panel < last; ++panel) {
    const int64_t half = layout.half(panel);
    for (int64_t r = 0; r < rows; ++r) {
      const float* cosines = phi + (panel * phi_rows + r) * kPanel;
      int32_t* lanes = out + r * kPanel + panel % 2 * kPanelFrequencies;
      const float scale = steps[r] > 0 ? 1 / steps[r] : 0;
      for (int64_t c = 0; c < half; c += kLanes<float>) {
        store(lanes + c, stacked_int16(load(cosines + c), load(cosines + half + c), scale));
      }
    }
  }
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
