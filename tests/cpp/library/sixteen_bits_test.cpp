// Steps of features in fixed point, which halve a score's digits where they are twice as large;
// what the fuzzer's bounds leave room for.
#define IKATTN_ISA sixteen_bits_test

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "attention/cpu/features/score_features.h"

namespace ikattn::sixteen_bits_test {
namespace {

std::mt19937& generator() {
  static std::mt19937 numbers(11);
  return numbers;
}

// Features of some tokens: of usual size, of one frequency only, tiny, and zero.
std::vector<float> features_of_rows(const FeatureLayout<float>& layout, int64_t rows) {
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> phi(layout.panels() * rows * kPanel, 0);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t m = 0; m < layout.M; ++m) {
      const int64_t panel = m / kPanelFrequencies, c = m % kPanelFrequencies;
      float* row = phi.data() + (panel * rows + r) * kPanel;
      const float turn = 6.2831853f * uniform(generator());
      float size = r % 4 == 1 ? (m == 0 ? 1.0f : 0.0f) : uniform(generator());
      if (r % 4 == 2) size *= 1e-12f;
      if (r % 4 == 3) size = 0;
      row[c] = size * std::cos(turn);
      row[layout.half(panel) + c] = size * std::sin(turn);
    }
  }
  return phi;
}

TEST(FixedFeatures, StepsAreAsSmallAsTheLaneAllows) {
  const FeatureLayout<float> layout{8, 64, false};
  const std::vector<float> phi = features_of_rows(layout, 8);
  std::vector<float> steps(8);
  choose_steps(layout, 8, phi.data(), 8, steps.data());
  for (int64_t r = 0; r < 8; ++r) {
    double squares = 0, largest = 0;
    for (int64_t i = 0; i < 2 * kPanel; ++i) {
      const double x = phi[(i / kPanel * 8 + r) * kPanel + i % kPanel];
      squares += x * x;
      largest = std::max(largest, std::abs(x));
    }
    EXPECT_NEAR(steps[r], std::max(std::sqrt(squares) / 46300, largest / 32766), 1e-6 * steps[r]);
    EXPECT_EQ(steps[r] == 0, r % 4 == 3);
  }
}

}  // namespace
}  // namespace ikattn::sixteen_bits_test
