// Features for the scores of bfloat16 inputs: two numbers to a lane, the cosine and the sine of a
// frequency.
//
// In fixed point, a token's features are divided by the token's step, as small as 32 bits allow: a
// score is the sum of their products, and by Cauchy and Schwarz at most the product of both norms,
// so that norms of 46300 steps suffice. At 64 frequencies the rounding error of a feature of usual
// size is at most 2^-13 of it, where that of bfloat16 is up to 2^-8; more frequencies share the
// same bits. Tiles multiply bfloat16 so fast that a feature is split into two of them, and a score
// is three of their four products: 2^-16.
#pragma once

#include "attention/cpu/features/features.h"
#include "support/cpu/sixteen_bits.h"

namespace ikattn::IKATTN_ISA {
namespace {

constexpr int64_t kScoreFrequencies = kPanel;     // of a panel
constexpr int64_t kScoreParts = kHasAmx ? 2 : 1;  // panels of the same frequencies

struct ScoreLayout {
  int64_t M;

  int64_t panels() const { return ceil_div(M, kScoreFrequencies) * kScoreParts; }
  int64_t lanes(int64_t panel) const {
    const int64_t first = panel / kScoreParts * kScoreFrequencies;
    return round_up(min_of(kScoreFrequencies, M - first), kLanes<float>);
  }
};

// Computes the step of each row of phi [panels][phi_rows][64]; 0 where the row is zero. Does
// nothing for tiles.
inline void choose_steps(const FeatureLayout<float>& layout, int64_t rows, const float* phi,
                         int64_t phi_rows, float* steps) {
  if (kHasAmx) return;
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

// Rounds one panel of score features, out [rows][64], from phi [panels][phi_rows][64].
inline void narrow_features(const FeatureLayout<float>& layout, int64_t score_panel, int64_t rows,
                            const float* phi, int64_t phi_rows, const float* steps, int32_t* out) {
  const int64_t first = score_panel / kScoreParts * 2;
  const bool is_rest = score_panel % kScoreParts == 1;
  for (int64_t panel = first; panel < min_of(layout.panels(), first + 2); ++panel) {
    const int64_t half = layout.half(panel);
    for (int64_t r = 0; r < rows; ++r) {
      const float* row = phi + (panel * phi_rows + r) * kPanel;
      int32_t* lanes = out + r * kPanel + panel % 2 * kPanelFrequencies;
      const float scale = kHasAmx || steps[r] == 0 ? 0 : 1 / steps[r];
      for (int64_t c = 0; c < half; c += kLanes<float>) {
        Vec<float> cosines = load(row + c), sines = load(row + half + c);
        if (half < kLanes<float>) {
          cosines = first_lanes<float>(cosines, half);
          sines = first_lanes<float>(sines, half);
        }
        if (!kHasAmx) {
          store(lanes + c, stacked_int16(cosines, sines, scale));
        } else if (is_rest) {
          store(lanes + c,
                stacked_bfloat16(cosines - as_bfloat16(cosines), sines - as_bfloat16(sines)));
        } else {
          store(lanes + c, stacked_bfloat16(cosines, sines));
        }
      }
    }
  }
}

// Adds to s [rows][64], or sets it to, the products of one panel of q [panels][q_rows][64] with one
// of k, by column [panels][64][64]: one panel of fixed point, or all parts of one.
inline void multiply_scores(int64_t rows, int64_t columns, int64_t lanes, const int32_t* q,
                            int64_t q_rows, const int32_t* k, float* s, bool accumulate,
                            const Factors<float>& steps) {
#if defined(__AMX_BF16__)
  const int32_t *q_rest = q + q_rows * kPanel, *k_rest = k + kPanel * kPanel;
  const AmxTerm terms[] = {{q, k}, {q, k_rest}, {q_rest, k}};
  (void)steps;
  amx_gemm<Left::kRows>(rows, columns, lanes, terms, s, accumulate, {});
#else
  (void)q_rows;
  panel_gemm<Int16x2, Left::kRows>(rows, columns, lanes, q, k, s, accumulate, steps);
#endif
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
